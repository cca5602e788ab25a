"""Training on packed, cut and dealt out trees is training on plain rows: losses, gradients, weights
after many steps, on a two-layer Qwen3 and multi-turn trees with tool answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from fastturn.loss import Objective
from fastturn.pack import PackedBatch, pack, scored_turns
from fastturn.policy import Policy
from fastturn.types import Boundary, Completion, Credit, Ending, Ids, Stop, Trajectory, Turn

V = 61
OBJECTIVE = Objective(temperature=0.8, clip_low=0.2, clip_high=0.3)
STEPS = 20


def model(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.15,
            tie_word_embeddings=True,
        )
    )
    return made.to(dtype)


def groups(seed: int = 0) -> list[list[Credit]]:
    """Two GRPO-like groups (whole episodes of three turns with tool answers, one of which drops
    part of an action from its history) and two RTPO-like groups on one trunk."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> Ids:
        return rng.integers(0, V, count, dtype=np.int32)

    def turn(kept: int, pushed_T: Ids) -> Turn:
        action_A = ids(int(rng.integers(1, 6)))
        logprob_A = rng.normal(-3.8, 0.3, len(action_A)).astype(np.float32)
        return Turn(Boundary(kept, pushed_T), Completion(action_A, logprob_A, 0, Stop.STOP))

    def credit(*turns: Turn) -> Credit:
        path = Trajectory("task", 0, turns, Ending.FINISHED)
        return Credit(path, rng.normal(size=len(turns)), rng.uniform(0.01, 0.1, len(turns)))

    made = []
    for prompt_T in (ids(9), ids(12)):
        group = []
        for sibling in range(3):
            turns, running = [], 0
            for number in range(3):
                kept = running - 2 * (number == 2 and sibling == 1)
                pushed_T = ids(4) if number else prompt_T
                turns.append(turn(kept, pushed_T))
                running = kept + len(pushed_T) + len(turns[-1].completion.action_A)
            group.append(credit(*turns))
        made.append(group)
    trunk_T = ids(20)
    for boundary in (8, 20):
        made.append([credit(turn(0, trunk_T[:boundary])) for _ in range(3)])
    return made


class Wide(TorchFunctionMode):
    """Keeps float64 where the model would step down to float32 (norms, softmax), so that what is
    compared is packing and not rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and torch.float32 in args[1:]:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def row_a_turn(credits: Sequence[Sequence[Credit]]) -> list[PackedBatch]:
    """Replicated: one micro-batch a turn, every context read again."""
    batches = []
    for group in credits:
        for credit in group:
            for number in np.flatnonzero(credit.weight_U):
                only_U = np.where(np.arange(len(credit.weight_U)) == number, credit.weight_U, 0.0)
                batches += pack([[replace(credit, weight_U=only_U)]], 1)
    return batches


def dealt(credits: Sequence[Sequence[Credit]]) -> list[PackedBatch]:
    """What three ranks with small micro-batches read, one after the other."""
    shares = [pack(credits, 48, rank=rank, ranks=3) for rank in range(3)]
    return [batch for batches in shares for batch in batches]


CUTS: dict[str, Callable[[Sequence[Sequence[Credit]]], list[PackedBatch]]] = {
    "whole": lambda credits: pack(credits, 10_000),
    "cut": lambda credits: pack(credits, 48),
    "split": lambda credits: pack(credits, 20),
    "ranks": dealt,
    "many ranks": lambda credits: [b for r in range(9) for b in pack(credits, 48, rank=r, ranks=9)],
}


def update(policy: Policy, batches: Sequence[PackedBatch]) -> dict[str, torch.Tensor]:
    """Loss and gradients accumulated over micro-batches, by name."""
    policy.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = policy(batch, OBJECTIVE).loss
        loss.backward()
        total += loss.detach().double()
    named = policy.model.named_parameters()
    return {"loss": total, **{name: p.grad.double().clone() for name, p in named}}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest |got - want| relative to each tensor's largest entry (or 1e-3 of the largest)."""
    floor = 1e-3 * max(float(value.abs().max()) for value in want.values())
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp(min=floor))
        for name, value in want.items()
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_any_cut_gives_the_gradients_of_plain_rows(cut: str, dtype, bound: float) -> None:
    batches, rows = CUTS[cut](groups()), row_a_turn(groups())
    assert len(rows) == 2 * 3 * 3 + 2 * 3
    assert sum(b.tokens_packed for b in batches) < sum(b.tokens_packed for b in rows)
    if cut == "many ranks":
        assert any(batch.tokens_packed == 0 for batch in batches)
    with Wide():
        policy = Policy(model(dtype))
        assert worst(update(policy, batches), update(policy, rows)) <= bound


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().double() for name, p in policy.model.named_parameters()}


@functools.cache
def trained(cut: str) -> dict[str, torch.Tensor]:
    """Weights after an optimiser step on each of twenty sets of groups."""
    policy = Policy(model())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-6)
    for step in range(STEPS):
        how = row_a_turn if cut == "rows" else CUTS[cut]
        update(policy, how(groups(step)))
        optimizer.step()
    return weights(policy)


@pytest.mark.parametrize("cut", ["whole", "cut", "ranks"])
def test_weights_stay_equal_over_twenty_steps(cut: str) -> None:
    assert worst(trained("rows"), weights(Policy(model()))) > 1e-2  # they have moved
    assert worst(trained(cut), trained("rows")) <= 1e-5


def test_tool_tokens_stay_in_the_context_and_out_of_the_loss() -> None:
    """A response that interleaves actions with tool answers, against one plain causal forward of
    the whole conversation scored at the actions; without the tool answers the result is another."""
    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, V, n, dtype=np.int32) for n in (7, 4, 5, 3, 6, 4)]
    prompt_T, actions, tools = pieces[0], pieces[1::2], pieces[2::2]
    turns, kept = [], 0
    for pushed_T, action_A in zip((prompt_T, *tools), actions, strict=True):
        done = Completion(action_A, np.full(len(action_A), -4, np.float32), 0, Stop.STOP)
        turns.append(Turn(Boundary(kept, pushed_T), done))
        kept += len(pushed_T) + len(action_A)
    path = Trajectory("task", 0, tuple(turns), Ending.FINISHED)
    (batch,) = pack([[Credit(path, np.ones(3), np.full(3, 0.1))]], 1000)
    conversation_T = np.concatenate(pieces)
    assert batch.token_T.tolist() == conversation_T[:-1].tolist()
    assert batch.action_A.tolist() == np.concatenate(actions).tolist()

    plain = model()
    policy = Policy(model())

    def expected(sequence_T: Ids, is_action_T: np.ndarray) -> torch.Tensor:
        tokens_1T = torch.from_numpy(sequence_T.astype(np.int64)).unsqueeze(0)
        with torch.no_grad():
            logits_TV = plain(input_ids=tokens_1T, use_cache=False).logits[0]
        all_TV = (logits_TV / OBJECTIVE.temperature).log_softmax(-1)
        label_T = torch.from_numpy(np.flatnonzero(is_action_T))
        return all_TV[label_T - 1, tokens_1T[0, label_T]]

    kinds = [np.full(len(piece), place % 2 == 1) for place, piece in enumerate(pieces)]
    is_action_T = np.concatenate(kinds)
    logprob_A = policy.score(batch, OBJECTIVE.temperature)
    torch.testing.assert_close(logprob_A, expected(conversation_T, is_action_T))

    spoken = [prompt_T, *actions]
    deaf = expected(np.concatenate(spoken), np.repeat([False, True], [7, sum(map(len, actions))]))
    first = len(actions[0])  # before the first tool answer nothing differs
    torch.testing.assert_close(logprob_A[:first], deaf[:first])
    assert (logprob_A[first:] - deaf[first:]).abs().max() > 0.05


def test_the_loss_written_out_a_row_a_turn() -> None:
    """The packed loss is the sum over turns that the definition gives."""
    policy, plain = Policy(model()), model()
    total = 0.0
    for turn in scored_turns(groups()):
        tokens_1T = torch.from_numpy(turn.tokens_T.astype(np.int64)).unsqueeze(0)
        with torch.no_grad():
            logits_AV = plain(input_ids=tokens_1T, use_cache=False).logits[0, turn.sources]
        all_AV = (logits_AV / OBJECTIVE.temperature).log_softmax(-1)
        logprob_A = all_AV.gather(1, torch.from_numpy(turn.action_A.astype(np.int64))[:, None])
        ratio_A = (logprob_A.squeeze(1) - torch.from_numpy(turn.behavior_A)).exp()
        given_A = torch.from_numpy(turn.advantage_A)
        gain_A = torch.minimum(ratio_A * given_A, ratio_A.clamp(0.8, 1.3) * given_A)
        total -= turn.weight * float(gain_A.sum())
    losses = [
        sum(float(policy(batch, OBJECTIVE).loss.detach()) for batch in cut(groups()))
        for cut in CUTS.values()
    ]
    assert losses == pytest.approx([total] * len(CUTS), rel=1e-5)
