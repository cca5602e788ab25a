"""The in-process sampler: what it draws, what it reports, what it shares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fastturn import activations
from fastturn.pack import pack
from fastturn.policy import Policy
from fastturn.sampler.base import Request, SamplerStats, SamplingParams
from fastturn.sampler.local import LocalSampler, trie
from fastturn.types import Boundary, Completion, Credit, Ending, Ids, Stop, Trajectory, Turn

V = 61
STOPS = (3, 4, 5)


def policy(family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: object) -> Policy:
    torch.manual_seed(2)
    values = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
        "initializer_range": 0.2,
        "pad_token_id": None,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    return Policy(model.to(dtype))


GEMMA = {"sliding_window": 6, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
FAMILIES = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 6},
    "gemma2": GEMMA,
    "granite": {"logits_scaling": 2.0},
}


def ids(rng: np.random.Generator, length: int) -> Ids:
    return rng.integers(6, V, length).astype(np.int32)


def requests(seed: int = 0, count: int = 7, most: int = 9) -> list[Request]:
    """Contexts of 1 to 30 tokens, some sharing a beginning, 0 to 5 completions each."""
    rng = np.random.default_rng(seed)
    start_T = ids(rng, 8)
    made = []
    for index in range(count):
        context_T = ids(rng, int(rng.integers(1, 22)))
        if index % 2:
            context_T = np.concatenate([start_T, context_T])
        seeds = tuple(int(s) for s in rng.integers(0, 2**63, index % 6))
        made.append(Request(context_T, int(rng.integers(1, most)), seeds))
    return made


def alone(model: Policy, context_T: Ids, action_A: Ids, temperature: float) -> np.ndarray:
    """Log-probabilities by one packed sequence, the way the trainer scores them."""
    done = Completion(action_A, np.zeros(len(action_A), np.float32), 0, Stop.STOP)
    trajectory = Trajectory("t", 0, (Turn(Boundary(0, context_T), done),), Ending.FINISHED)
    (batch,) = pack([[Credit(trajectory, np.ones(1), np.ones(1))]], 10_000)
    return model.score(batch, temperature).double().numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_trainer(family: str, temperature: float) -> None:
    model = policy(family, **FAMILIES[family])
    asked = requests()
    answers = LocalSampler(model).sample(asked, SamplingParams(temperature, STOPS))
    assert [len(group) for group in answers] == [len(request.seeds) for request in asked]
    for request, group in zip(asked, answers, strict=True):
        for done in group:
            want_A = alone(model, request.context_T, done.action_A, temperature)
            np.testing.assert_allclose(done.logprob_A, want_A, atol=1e-5, rtol=0)


def test_bfloat16_agrees_within_its_own_noise() -> None:
    model, wide = policy(dtype=torch.bfloat16), policy(dtype=torch.bfloat16)
    wide.double()
    noise, difference = [], []
    asked = requests(count=12)
    for request, group in zip(
        asked, LocalSampler(model).sample(asked, SamplingParams(1.0, STOPS)), strict=True
    ):
        for done in group:
            trainer_A = alone(model, request.context_T, done.action_A, 1.0)
            exact_A = alone(wide, request.context_T, done.action_A, 1.0)
            noise.append(np.abs(trainer_A - exact_A))
            difference.append(np.abs(trainer_A - done.logprob_A))
    noise_A, difference_A = np.concatenate(noise), np.concatenate(difference)
    assert difference_A.mean() <= 2 * noise_A.mean()
    assert difference_A.max() <= 2 * noise_A.max() + 8 * torch.finfo(torch.bfloat16).eps


def play(
    sampler: LocalSampler, turns: int, popped: int = 0, seed: int = 0
) -> list[list[tuple[Request, Completion]]]:
    """Four episodes from two contexts; each turn drops the last `popped` ids of the running
    sequence and appends three more."""
    rng = np.random.default_rng(seed)
    contexts = [c for c in (ids(rng, 9), ids(rng, 12)) for _ in range(2)]
    history = []
    for turn in range(turns):
        asked = [Request(c, 6, (seed + 10 * turn + i,)) for i, c in enumerate(contexts)]
        answers = sampler.sample(asked, SamplingParams(0.8, STOPS))
        history.append([(r, a[0]) for r, a in zip(asked, answers, strict=True)])
        contexts = []
        for request, done in history[-1]:
            running_T = np.concatenate([request.context_T, done.action_A])
            contexts.append(np.concatenate([running_T[: len(running_T) - popped], ids(rng, 3)]))
    return history


@pytest.mark.parametrize("popped", [0, 1, 3, 8])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_multi_turn_histories_match_the_packed_batch(family: str, popped: int) -> None:
    model = policy(family, **FAMILIES[family])
    history = play(LocalSampler(model), turns=3, popped=popped)
    credits = []
    for episode in range(4):
        turns, running_T = [], np.empty(0, np.int32)
        for turn in history:
            request, done = turn[episode]
            kept = max(0, len(running_T) - popped)
            assert np.array_equal(request.context_T[:kept], running_T[:kept])
            turns.append(Turn(Boundary(kept, request.context_T[kept:]), done))
            running_T = np.concatenate([request.context_T, done.action_A])
        trajectory = Trajectory("t", 0, tuple(turns), Ending.FINISHED)
        credits.append(Credit(trajectory, np.ones(3), np.ones(3)))
    (batch,) = pack([credits], 10_000)
    assert batch.tokens_packed < batch.tokens_flat
    score_A = model.score(batch, 0.8)
    assert float((score_A - batch.behavior_A).abs().max()) <= 1e-5


def test_later_turns_read_only_what_is_new() -> None:
    model = policy()
    kept, fresh = LocalSampler(model), LocalSampler(model, store_gib=0)
    read = []
    for sampler in (kept, fresh):
        history = play(sampler, turns=3)
        read.append((sampler.stats.prefill_tokens, [[d.action_A for _, d in t] for t in history]))
    (few, actions_kept), (many, actions_fresh) = read
    # The last sampled token, which no forward pass has read, and the three appended ones.
    assert few == 4 * 4 < many
    for left, right in zip(actions_kept, actions_fresh, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_publish_drops_what_older_weights_computed() -> None:
    model = policy()
    sampler = LocalSampler(model, version=4)
    (request,) = [Request(ids(np.random.default_rng(0), 12), 5, (1, 2))]
    params = SamplingParams(1.0, STOPS)
    (before,) = sampler.sample([request], params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02)
    with pytest.raises(RuntimeError, match=r"changed since publish\(4\)"):
        sampler.sample([request], params)
    sampler.publish(5)
    (after,) = sampler.sample([request], params)
    assert sampler.stats.prefill_tokens == 12
    assert {done.version for done in before} == {4} and {done.version for done in after} == {5}
    for done in after:
        want_A = alone(model, request.context_T, done.action_A, 1.0)
        np.testing.assert_allclose(done.logprob_A, want_A, atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_its_company() -> None:
    model = policy()
    asked, params = requests(seed=3, count=9), SamplingParams(1.0, STOPS)
    together = LocalSampler(model).sample(asked, params)
    backwards = LocalSampler(model).sample(asked[::-1], params)[::-1]
    waves = LocalSampler(model, resident_tokens=40, prefill_tokens=16).sample(asked, params)
    single = [
        [
            LocalSampler(model).sample([Request(r.context_T, r.max_tokens, (s,))], params)[0][0]
            for s in r.seeds
        ]
        for r in asked
    ]
    for other in (backwards, waves, single):
        for left, right in zip(flat(together), flat(other), strict=True):
            assert np.array_equal(left.action_A, right.action_A) and left.stop == right.stop
            np.testing.assert_allclose(left.logprob_A, right.logprob_A, atol=1e-5)


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return list(itertools.chain.from_iterable(groups))


def test_equal_contexts_are_read_once_and_answered_apart() -> None:
    context_T = ids(np.random.default_rng(1), 20)
    sampler = LocalSampler(policy())
    asked = [Request(context_T, 4, (1, 2)), Request(context_T, 4, (3,))]
    answers = sampler.sample(asked, SamplingParams(1.0, ()))
    assert [len(group) for group in answers] == [2, 1]
    assert sampler.stats == SamplerStats(
        context_tokens_flat=60, prefill_tokens=20, decode_tokens=12, decode_steps=3
    )


def test_shared_beginnings_are_read_once() -> None:
    rng = np.random.default_rng(2)
    start_T = ids(rng, 30)
    asked = [Request(np.concatenate([start_T, ids(rng, 2)]), 1, (i,)) for i in range(5)]
    sampler = LocalSampler(policy())
    sampler.sample(asked, SamplingParams(1.0, ()))
    assert sampler.stats.prefill_tokens == 30 + 5 * 2
    assert sampler.stats.context_tokens_flat == 5 * 32


def test_an_action_ends_with_its_stop_id_or_its_budget() -> None:
    asked = [Request(ids(np.random.default_rng(0), 5), 40, tuple(range(64)))]
    (group,) = LocalSampler(policy()).sample(asked, SamplingParams(1.0, STOPS))
    assert {done.stop for done in group} == {Stop.STOP, Stop.LENGTH}
    for done in group:
        assert not np.isin(done.action_A[:-1], STOPS).any()
        assert (done.action_A[-1] in STOPS) == (done.stop is Stop.STOP)
        assert done.stop is Stop.STOP or len(done.action_A) == 40


def test_a_budget_beyond_the_context_limit_is_cut() -> None:
    asked = [Request(ids(np.random.default_rng(0), 90), 40, (1,))]
    ((done,),) = LocalSampler(policy()).sample(asked, SamplingParams(1.0, ()))
    assert len(done.action_A) == 96 - 90 and done.stop is Stop.LENGTH


def test_greedy_is_what_generate_does() -> None:
    model = policy()
    context_T = ids(np.random.default_rng(5), 17)
    asked = [Request(context_T, 10, (1, 2))]
    ((left, right),) = LocalSampler(model).sample(asked, SamplingParams(0.0, ()))
    assert np.array_equal(left.action_A, right.action_A)
    want_A = alone(model, context_T, left.action_A, 1.0)
    np.testing.assert_allclose(left.logprob_A, want_A, atol=1e-5)
    model.model.set_attn_implementation("eager")
    tokens = torch.from_numpy(context_T.astype(np.int64)).unsqueeze(0)
    plan = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = model.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), generation_config=plan
    )
    assert found[0, 17:].tolist() == left.action_A.tolist()


def test_draws_follow_the_distribution() -> None:
    model = policy()
    context_T = ids(np.random.default_rng(5), 6)
    n = 20_000
    asked = [Request(context_T, 1, tuple(range(n)))]
    (group,) = LocalSampler(model, resident_tokens=10**6).sample(asked, SamplingParams(0.5, ()))
    counts_V = np.bincount([done.action_A[0] for done in group], minlength=V)
    p_V = np.exp([alone(model, context_T, np.array([v], np.int32), 0.5)[0] for v in range(V)])
    assert p_V.sum() == pytest.approx(1, abs=1e-5)
    expected_V = n * p_V
    seen = expected_V > 5
    chi2 = (((counts_V - expected_V) ** 2) / expected_V)[seen].sum()
    degrees = seen.sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def test_nothing_asked_is_nothing_done() -> None:
    sampler = LocalSampler(policy())
    params = SamplingParams(1.0, STOPS)
    assert sampler.sample([], params) == []
    assert sampler.sample([Request(ids(np.random.default_rng(0), 5), 4, ())], params) == [[]]
    assert sampler.stats == SamplerStats()


def test_training_mode_and_gradients_are_left_alone() -> None:
    model = policy().train()
    activations.keep(model.model, "full")
    asked = requests()
    LocalSampler(model).sample(asked, SamplingParams(1.0, STOPS))
    assert model.training and model.model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.zeros(96, np.int32), 1, (1,)), r"context of 96 tokens.*at most 96"),
        (Request(np.zeros(0, np.int32), 1, (1,)), r"context of 0 tokens"),
        (Request(np.array([1, V], np.int32), 1, (1,)), rf"token id {V}.*0 to {V - 1}"),
        (Request(np.array([-1], np.int32), 1, (1,)), r"token id -1"),
        (Request(np.array([1], np.int32), 0, (1,)), r"max_tokens=0"),
    ],
)
def test_impossible_requests_are_named(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=rf"request 0: .*{message}"):
        LocalSampler(policy()).sample([request_], SamplingParams(1.0, ()))


def test_diverged_weights_are_an_error() -> None:
    model = policy()
    with torch.no_grad():
        model.head().weight_VD[7] = torch.nan
    asked = [Request(np.array([8, 9], np.int32), 2, (1,))]
    with pytest.raises(FloatingPointError, match="not finite"):
        LocalSampler(model).sample(asked, SamplingParams(1.0, ()))


def test_trie_example() -> None:
    token_T, position_T, end_T, index = trie(
        [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)]
    )
    assert token_T.tolist() == [1, 2, 3, 4] and position_T.tolist() == [0, 1, 2, 2]
    assert end_T.tolist() == [4, 4, 3, 4]
    assert [i.tolist() for i in index] == [[0, 1, 2], [0, 1, 3]]
