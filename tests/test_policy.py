"""Packed loss and gradients against one plain forward per turn with the model's own attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import AutoConfig

from fastturn import activations, attention
from fastturn.config import ConfigError
from fastturn.kernels import TreePlan, torch_attention
from fastturn.loss import Objective
from fastturn.pack import PackedBatch, pack, scored_turns
from fastturn.policy import Policy
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn

V = 53
COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
    "mistral-window": {"model_type": "mistral", "sliding_window": 4, "head_dim": 8},
    "gemma-softcap": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "granite-scale": {"model_type": "granite", "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "cohere-scale": {"model_type": "cohere", "logit_scale": 0.25},
    "phi-head-bias": {"model_type": "phi", "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "experts_implementation": "eager",
    },
}
REFERENCE = float(-np.log(np.float32(V)))  # log-probability under a uniform reference policy
OBJECTIVE = Objective(temperature=0.7, clip_low=0.2, clip_high=0.3, kl_coef=0.05)


def tiny(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    values = {**COMMON, **FAMILIES[family]}
    torch.manual_seed(1)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():  # biases and norms are no longer trivial
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.get_input_embeddings().padding_idx = None
    return model.to(dtype)


class Wide(TorchFunctionMode):
    """Models step down to float32 in norms and softmax; in float64 runs this keeps them in float64,
    so that differences are those of packing."""

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


@functools.cache
def groups(seed: int = 0) -> tuple[tuple[Credit, ...], ...]:
    """Three groups of multi-turn siblings: shared contexts, popped actions, one-token actions, the
    padding id everywhere, siblings that begin alike."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(3):
        context_T = rng.integers(0, V, 5 + 3 * group).astype(np.int32)
        context_T[1::3] = 2
        credits = []
        for sibling in range(3):
            turns, kept, running = [], 0, np.empty(0, np.int32)
            push_T = context_T
            for turn in range(2):
                action_A = rng.integers(0, V, 1 + (sibling + turn) % 4).astype(np.int32)
                if sibling and turn == 0:
                    action_A[0] = 7
                logprob_A = rng.normal(-3.5, 0.3, len(action_A)).astype(np.float32)
                done = Completion(action_A, logprob_A, 0, Stop.STOP)
                turns.append(Turn(Boundary(kept, push_T), done))
                running = np.concatenate([running[:kept], push_T, action_A])
                kept = len(running) - turn - sibling % 2
                push_T = rng.integers(0, V, 3).astype(np.int32)
            trajectory = Trajectory(f"t{group}", 0, tuple(turns), Ending.FINISHED)
            weight_U = rng.uniform(0.02, 0.1, 2)
            credits.append(Credit(trajectory, rng.normal(size=2), weight_U))
        made.append(tuple(credits))
    return tuple(made)


@functools.cache
def batch() -> PackedBatch:
    (packed,) = pack(groups(), 10_000)
    assert packed.tokens_packed < packed.tokens_flat
    return packed


def unpacked_loss(model: PreTrainedModel, objective: Objective) -> torch.Tensor:
    """The loss written out, one eager forward per turn; the reference policy is uniform."""
    total = torch.zeros((), dtype=torch.float64)
    for turn in scored_turns(groups()):
        tokens_1T = torch.from_numpy(turn.tokens_T.astype(np.int64)).unsqueeze(0)
        logits_AV = model(input_ids=tokens_1T, use_cache=False).logits[0, turn.sources]
        wide = torch.promote_types(logits_AV.dtype, torch.float32)
        all_AV = (logits_AV.to(wide) / objective.temperature).log_softmax(-1)
        action_A1 = torch.from_numpy(turn.action_A.astype(np.int64)).unsqueeze(1)
        logprob_A = all_AV.gather(1, action_A1).squeeze(1)
        ratio_A = (logprob_A - torch.from_numpy(turn.behavior_A)).exp()
        clipped_A = ratio_A.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        advantage_A = torch.from_numpy(turn.advantage_A)
        loss_A = -torch.minimum(ratio_A * advantage_A, clipped_A * advantage_A)
        d_A = REFERENCE - logprob_A
        loss_A = loss_A + objective.kl_coef * (d_A.exp() - d_A - 1)
        total = total + float(np.float32(turn.weight)) * loss_A.sum().double()
    return total


def packed_loss(policy: Policy, objective: Objective) -> torch.Tensor:
    packed = batch()
    reference_A = torch.full_like(packed.behavior_A, REFERENCE)
    return policy(packed, objective, reference_A).loss


def gradients(model: PreTrainedModel, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value = loss()
    value.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach().double(), **found}


def error(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """max |got - truth| / max |truth|, by name; truth of a shift-invariant bias may be nothing, so
    the scale is at least a thousandth of the largest gradient."""
    assert got.keys() == truth.keys()
    floor = 1e-3 * max(float(value.abs().max()) for value in truth.values())
    return {
        name: float((got[name] - value).abs().max() / value.abs().max().clamp(min=floor))
        for name, value in truth.items()
    }


@functools.cache
def truth(
    family: str, dtype: torch.dtype = torch.float64, objective: Objective = OBJECTIVE
) -> dict[str, torch.Tensor]:
    """Unpacked loss and gradients of the weights rounded to `dtype`, computed in float64."""
    model = tiny(family, dtype).double()
    with Wide():
        return gradients(model, lambda: unpacked_loss(model, objective))


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_in_float64(family: str, attention: str) -> None:
    model = tiny(family)
    batch()  # made outside, where its float32 rows stay float32
    with Wide():
        policy = Policy(model, attention)
        got = gradients(model, lambda: packed_loss(policy, OBJECTIVE))
    assert max(error(got, truth(family)).values()) <= 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_in_float32(family: str) -> None:
    model = tiny(family, torch.float32)
    policy = Policy(model)
    got = gradients(model, lambda: packed_loss(policy, OBJECTIVE))
    assert max(error(got, truth(family, torch.float32)).values()) <= 1e-5


def test_a_plan_is_made_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring, the loss and its backward pass share it, one for each window."""
    made: list[int | None] = []

    class Counted(TreePlan):
        def __init__(self, end_T: Any, window: int | None, position_T: Any) -> None:
            made.append(window)
            super().__init__(end_T, window, position_T)

    policy = Policy(tiny("gemma-softcap", torch.float32))
    one = replace(batch(), plans={})
    policy.score(one, 1.0)  # the first use of an implementation is checked with a plan of its own
    monkeypatch.setattr(attention, "TreePlan", Counted)
    two = replace(batch(), plans={})
    for _ in range(2):
        policy.score(two, 1.0)
        policy(two, OBJECTIVE, torch.zeros_like(two.behavior_A)).loss.backward()
        policy.score(one, 1.0)
    assert sorted(made, key=str) == [4, None]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral-window", "gemma-softcap"])
def test_bfloat16_is_no_worse_than_unpacked(family: str) -> None:
    # Nothing is clipped: a rounding that moves a ratio over the edge would be a jump, not an error.
    smooth = Objective(temperature=0.7, clip_low=0.999, clip_high=1e6, kl_coef=0.05)
    want = truth(family, torch.bfloat16, smooth)
    plain, model = tiny(family, torch.bfloat16), tiny(family, torch.bfloat16)
    plain_error = error(gradients(plain, lambda: unpacked_loss(plain, smooth)), want)
    policy = Policy(model)
    packed_error = error(gradients(model, lambda: packed_loss(policy, smooth)), want)
    eps = torch.finfo(torch.bfloat16).eps
    assert np.mean(list(packed_error.values())) <= np.mean(list(plain_error.values())) + eps
    assert all(packed_error[name] <= 2 * plain_error[name] + 8 * eps for name in want)


def test_score_is_the_log_probability_of_the_loss() -> None:
    policy = Policy(tiny("qwen3", torch.float32))
    out = policy(batch(), OBJECTIVE, torch.zeros_like(batch().behavior_A))
    score_A = policy.score(batch(), OBJECTIVE.temperature)
    assert not score_A.requires_grad
    torch.testing.assert_close(score_A, out.logprob_A, atol=1e-6, rtol=0)


def test_on_policy_ratio_is_one_whatever_the_behaviour_says() -> None:
    policy = Policy(tiny("qwen3", torch.float32))
    wrong = replace(batch(), behavior_A=batch().behavior_A - 1)
    out = policy(wrong, Objective(on_policy=True))
    assert float(out.peaks["ratio"]) == 1.0
    expected = -(batch().weight_A * batch().advantage_A).sum()
    torch.testing.assert_close(out.loss.detach(), expected)
    out.loss.backward()
    assert all(p.grad is not None for p in policy.parameters())


@pytest.mark.parametrize("keep", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral-window"])
def test_gradient_checkpointing_changes_nothing(family: str, keep: str) -> None:
    plain, saved = tiny(family, torch.float32), tiny(family, torch.float32)
    policies = Policy(plain).train(), Policy(saved).train()
    activations.keep(saved, keep)
    calls = []
    mlp = saved.base_model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    want = gradients(plain, lambda: packed_loss(policies[0], OBJECTIVE))
    got = gradients(saved, lambda: packed_loss(policies[1], OBJECTIVE))
    assert len(calls) == 2  # once forward, once again in backward
    assert max(error(got, want).values()) <= 1e-6


def test_what_selective_checkpointing_keeps_is_not_computed_again(monkeypatch) -> None:
    calls: list[int] = []
    forward = torch_attention._forward
    monkeypatch.setattr(torch_attention, "_forward", lambda *a: calls.append(1) or forward(*a))
    products, attentions = {}, {}
    for keep in ("none", "full", "selective"):
        model = tiny("qwen3", torch.float32)
        policy = Policy(model).train()
        activations.keep(model, keep)
        packed_loss(policy, OBJECTIVE).backward()  # the first use of a kind of input is checked
        calls.clear()
        with FlopCounterMode(display=False) as counter:
            packed_loss(policy, OBJECTIVE).backward()
        products[keep], attentions[keep] = counter.get_total_flops(), len(calls)
    assert products["none"] == products["selective"] < products["full"]
    assert attentions == {"none": 2, "selective": 2, "full": 4}


def test_empty_batch_has_zero_loss_and_zero_gradients() -> None:
    policy = Policy(tiny("qwen3", torch.float32))
    empty = PackedBatch(
        **{
            field.name: getattr(batch(), field.name)[:0]
            for field in fields(PackedBatch)
            if field.name not in ("tokens_flat", "plans")
        },
        tokens_flat=0,
    )
    loss = policy(empty, Objective()).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)
    assert policy.model.get_input_embeddings().weight.grad is not None
    assert policy.score(empty, 1.0).shape == (0,)


def test_packed_and_unpacked_stay_equal_over_twenty_steps() -> None:
    plain, model = tiny("llama"), tiny("llama")
    batch()
    with Wide():
        policy = Policy(model)
        losses = []
        for parameters, loss in (
            (plain.parameters(), lambda: unpacked_loss(plain, OBJECTIVE)),
            (model.parameters(), lambda: packed_loss(policy, OBJECTIVE)),
        ):
            optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
            for _ in range(20):
                optimizer.zero_grad()
                value = loss()
                value.backward()
                optimizer.step()
            losses.append(float(loss()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)


def test_the_padding_id_is_an_ordinary_id() -> None:
    model = tiny("qwen3", torch.float32)
    model.get_input_embeddings().padding_idx = 2
    policy = Policy(model)
    assert int((batch().token_T == 2).sum()) > 0
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    packed_loss(policy, OBJECTIVE).backward()
    assert model.get_input_embeddings().weight.grad[2].abs().max() > 0


def test_adapted_heads_are_refused() -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = tiny("llama", torch.float32)
    model.set_output_embeddings(Adapted(32, V, bias=False))
    with pytest.raises(ConfigError, match="head is a Adapted"):
        Policy(model)


def test_dropout_is_refused() -> None:
    values = {**COMMON, "attention_dropout": 0.1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values))
    with pytest.raises(ConfigError, match=r"dropout 0\.1"):
        Policy(model)


def test_score_changes_that_tree_attention_lacks_are_refused() -> None:
    sizes = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("gpt_oss", **{**COMMON, **sizes})
    with pytest.raises(ConfigError, match="changes attention scores by s_aux"):
        Policy(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("change", ["mix", "logits"])
def test_the_probe_refuses_what_no_check_knows(change: str) -> None:
    model = tiny("llama", torch.float32)

    class Mixing(torch.nn.Module):
        """A short convolution over the token axis, as some hybrid models have."""

        def forward(self, x_1TD: torch.Tensor) -> torch.Tensor:
            return x_1TD + 0.1 * x_1TD.roll(1, 1)

    if change == "mix":
        model.model.layers[0].mlp = Mixing()
    else:
        whole = model.forward

        def scaled(*args: object, **kwargs: object) -> object:
            out = whole(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

        model.forward = scaled
    with pytest.raises(ConfigError, match="packed logits differ"):
        Policy(model)


def test_calling_the_model_without_an_attention_object_says_what_to_do() -> None:
    model = tiny("llama", torch.float32)
    Policy(model)
    with pytest.raises(ValueError, match=r"set_attn_implementation\('sdpa'\)"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_loss_inside_a_sharded_root(tmp_path: Path) -> None:
    """FSDP2 gathers the tied head in the root's forward; outside, it is a shard."""
    plain, model = tiny("qwen3", torch.float32), tiny("qwen3", torch.float32)
    want = gradients(plain, lambda: packed_loss(Policy(plain), OBJECTIVE))
    policy = Policy(model)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        loss = packed_loss(policy, OBJECTIVE)
        loss.backward()
        got = {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert max(error({"loss": loss.detach().double(), **got}, want).values()) <= 1e-6
