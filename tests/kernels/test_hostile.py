"""Hostile numbers and surroundings, the same for every implementation: what is not finite shows,
peaked rows keep their digits, forbidden ids stay forbidden, autocast and second derivatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels
from fastturn.kernels import adapters

SINGLE, DOUBLE = torch.float32, torch.float64
IMPLEMENTATIONS = ("torch", "triton", "reference")
ALONE = kernels.VocabularySlice((20,), 0)
RULE = {"clip_low": 0.2, "clip_high": 0.2}

every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def leaves(dtype: torch.dtype = SINGLE, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden_RD, head_VD = torch.randn(6, 8, generator=draw), torch.randn(20, 8, generator=draw)
    return hidden_RD.to(dtype).requires_grad_(), (scale * head_VD).to(dtype).requires_grad_()


def surrogate(hidden: Tensor, head: Tensor, **changes: Any) -> Any:
    """One of six actions a row; the ratios of a negative advantage are not bounded by the clip."""
    given: dict[str, Any] = {
        "action_A": torch.arange(6),
        "behavior_A": torch.full((6,), -3.0),
        "advantage_A": -torch.ones(6),
        "weight_A": torch.ones(6),
    }
    given |= RULE | changes
    impl = given.pop("impl", "auto")
    if impl == "parallel":
        return kernels.vocabulary_parallel_surrogate(hidden, head, part=ALONE, **given)
    return kernels.turn_surrogate(hidden, head, impl=impl, **given)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "parallel"])
def test_a_live_row_that_is_not_finite_shows(impl: str, bad: float, sign: float) -> None:
    """One hidden row, and one row of the head: loss and gradients are not finite either."""
    for place in (0, 1):
        given = leaves()
        given[place].data[2] = bad
        out = surrogate(*given, impl=impl, advantage_A=torch.full((6,), sign))
        assert out.loss.isnan()
        assert out.logprob_A[2].isnan()
        for gradient in torch.autograd.grad(out.loss, given):
            assert not gradient.isfinite().all()
        assert out.sums["clipped_low"] + out.sums["clipped_high"] <= 5


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_score_that_is_not_finite_shows(impl: str) -> None:
    """Without logits as well, and where the whole last tile of columns is NaN."""
    hidden, head = torch.randn(3, 32), torch.randn(129, 32)
    head[128] = math.nan
    logprob_A, entropy_A = kernels.linear_logprob(hidden, head, torch.arange(3), impl=impl)
    assert logprob_A.isnan().all() and entropy_A.isnan().all()


@pytest.mark.parametrize("temperature", [1.0, 0.02, 0.005])
@pytest.mark.parametrize("actions", [1, 64])
def test_float16_holds_the_largest_coefficients(actions: int, temperature: float) -> None:
    """Ratios of exp(9.9), small temperatures and many actions on one row do not overflow dZ."""
    gradients = {}
    for dtype, impl in ((torch.float16, "triton"), (DOUBLE, "reference")):
        hidden, head = leaves(torch.float16, 0.02 * temperature)
        pair = [hidden.detach()[:1].to(dtype).requires_grad_(), head.detach().to(dtype)]
        given = {"action_A": torch.full((actions,), 3), "row_A": torch.zeros(actions).long()}
        score, _ = kernels.linear_logprob(
            *pair, given["action_A"], row_A=given["row_A"], temperature=temperature
        )
        out = surrogate(
            *pair,
            impl=impl,
            behavior_A=score.detach() - 9.9,
            advantage_A=-torch.ones(actions),
            weight_A=torch.full((actions,), 1e-6),
            temperature=temperature,
            **given,
        )
        gradients[impl] = torch.autograd.grad(out.loss * 4096, pair[0])[0].double()
    got, truth = gradients["triton"], gradients["reference"]
    assert (got - truth).abs().max() <= 2e-3 * truth.abs().max()


@pytest.mark.parametrize("rarity", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("impl", ["torch", "parallel"])
def test_a_peaked_row_keeps_its_digits(impl: str, rarity: float) -> None:
    """p = 1 - rarity: log-probability, its gradient and the entropy, to float32's precision."""
    head = torch.zeros(20, 4)
    head[7, 0] = math.log((1 - rarity) / rarity * 19)
    hidden = torch.eye(4)[:1]
    found = {}
    for dtype, how in ((SINGLE, impl), (DOUBLE, "reference")):
        pair = (hidden.to(dtype), head.to(dtype).requires_grad_())
        out = surrogate(
            *pair,
            impl=how,
            action_A=torch.tensor([7]),
            behavior_A=None,
            advantage_A=torch.ones(1),
            weight_A=torch.ones(1),
        )
        (gradient,) = torch.autograd.grad(out.loss, pair[1])
        found[how] = torch.stack([out.logprob_A[0], out.entropy_A[0], gradient[7, 0]])
        if how == "torch":
            scored, _ = kernels.linear_logprob(*pair, torch.tensor([7]), impl=how)
            assert torch.equal(scored.detach(), out.logprob_A)
    torch.testing.assert_close(found[impl].double(), found["reference"], rtol=2e-6, atol=0)


@every_implementation
def test_a_softcap_does_not_allow_a_forbidden_id(impl: str) -> None:
    bias_V = torch.tensor([0.0, 0.0, -math.inf])
    hidden, head = torch.zeros(2, 32, requires_grad=True), torch.zeros(3, 32, requires_grad=True)
    out = kernels.linear_logprob(
        hidden, head, torch.tensor([0, 2]), bias_V=bias_V, softcap=5.0, impl=impl
    )
    assert out[0].tolist() == pytest.approx([-math.log(2), -math.inf])
    assert out[1].tolist() == pytest.approx([math.log(2)] * 2)
    (gradient,) = torch.autograd.grad(out[0][0], head)
    assert not gradient[2].any()
    with torch.no_grad():  # Triton without logits
        again = kernels.linear_logprob(
            hidden, head, torch.tensor([0, 2]), bias_V=bias_V, softcap=5.0, impl=impl
        )
    assert again[0].tolist() == pytest.approx([-math.log(2), -math.inf])


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "parallel"])
def test_a_scored_forbidden_id_is_refused(impl: str) -> None:
    bias_V = torch.zeros(20)
    bias_V[4] = -math.inf
    with pytest.raises(ValueError, match=r"action_A \(scored.*bias_V allows, got 4, .*weight 0"):
        surrogate(*leaves(), impl=impl, bias_V=bias_V)
    weight_A = (torch.arange(6) != 4).float()
    assert surrogate(*leaves(), impl=impl, bias_V=bias_V, weight_A=weight_A).loss.isfinite()


def test_gradients_of_a_forbidden_id_s_log_probability_agree() -> None:
    bias_V = torch.zeros(20)
    bias_V[4] = -math.inf
    found = []
    for impl in IMPLEMENTATIONS:
        pair = leaves()
        out = kernels.linear_logprob(*pair, torch.arange(6), bias_V=bias_V, impl=impl)
        assert out[0].isneginf().tolist() == [False] * 4 + [True, False]
        found.append(torch.autograd.grad(out[0].sum(), pair))
    for got in found:
        for one, want in zip(got, found[0], strict=True):
            torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "triton", "parallel"])
def test_autocast_changes_nothing(impl: str) -> None:
    found = []
    for enabled in (False, True):
        pair = leaves()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = surrogate(*pair, impl=impl)
            if impl == "parallel":
                scored = kernels.vocabulary_parallel_logprob(*pair, torch.arange(6), part=ALONE)
            else:
                scored = kernels.linear_logprob(*pair, torch.arange(6), impl=impl)
            total = out.loss + scored[0].sum() + scored[1].sum()
            found.append([out.loss.detach(), *scored, *torch.autograd.grad(total, pair)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("impl", ["torch", "triton", "parallel"])
def test_a_second_derivative_is_refused_at_once(impl: str) -> None:
    pair = leaves()
    with pytest.raises(RuntimeError, match=r"surrogate: expected .* without create_graph=True"):
        torch.autograd.grad(surrogate(*pair, impl=impl).loss, pair, create_graph=True)
    if impl == "parallel":
        scored = kernels.vocabulary_parallel_logprob(*pair, torch.arange(6), part=ALONE)
    else:
        scored = kernels.linear_logprob(*pair, torch.arange(6), impl=impl)
    with pytest.raises(RuntimeError, match=r"logprob: expected .* without create_graph=True"):
        torch.autograd.grad(scored[0].sum(), pair, create_graph=True)


def test_the_reference_has_a_second_derivative() -> None:
    pair = leaves(DOUBLE)
    loss = surrogate(*pair, impl="reference").loss
    (gradient,) = torch.autograd.grad(loss, pair[0], create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), pair[0])[0].isfinite().all()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("list", {"action_A": [0] * 6}, r"action_A: expected a tensor, got list"),
    ("none", {"advantage_A": None}, r"advantage_A: expected a tensor, got NoneType"),
    ("hidden", {"hidden": 3}, r"hidden_RD: expected a tensor, got int"),
    ("text", {"temperature": "1"}, r"temperature: expected a Python number > 0.0, got '1'"),
    ("tensor", {"clip_low": torch.tensor(0.2)}, r"clip_low: .* type Tensor; .*float\(\)"),
    ("bias NaN", {"bias_V": torch.full((20,), math.nan)}, r"bias_V: .* got nan at 0"),
    ("bias inf", {"bias_V": torch.full((20,), math.inf)}, r"bias_V: .* got inf at 0"),
]


@pytest.mark.parametrize(("change", "match"), [x[1:] for x in BAD], ids=[x[0] for x in BAD])
@pytest.mark.parametrize("impl", ["torch", "parallel"])
def test_bad_input_is_named(impl: str, change: dict[str, Any], match: str) -> None:
    hidden, head = leaves()
    hidden = change.get("hidden", hidden)
    with pytest.raises(ValueError, match=match):
        surrogate(hidden, head, impl=impl, **{k: v for k, v in change.items() if k != "hidden"})


def test_tensors_without_data_are_named() -> None:
    meta = {
        name: torch.ones(6, device="meta") for name in ("behavior_A", "advantage_A", "weight_A")
    }
    with pytest.raises(ValueError, match=r"hidden_RD: expected a tensor with data.* device meta"):
        surrogate(
            torch.ones(6, 8, device="meta"),
            torch.ones(20, 8, device="meta"),
            action_A=torch.zeros(6, dtype=torch.int64, device="meta"),
            **meta,
        )


def test_a_reference_without_a_coefficient_is_only_reported() -> None:
    plain, reported = (
        surrogate(*leaves(), reference_A=x) for x in (None, torch.full((6,), math.nan))
    )
    assert torch.equal(plain.loss, reported.loss)
    assert reported.sums["kl_reference"].isnan()


def test_turn_ratios_name_bad_input() -> None:
    turn_A, logprob_A = torch.tensor([0, 0, 1]), torch.tensor([math.nan, -1.0, -1.0])
    given = {"advantage_U": torch.ones(2), "weight_U": torch.ones(2)} | RULE
    with pytest.raises(ValueError, match=r"logprob_A \(scored turns\): .* got nan at 0"):
        kernels.turn_ratio_surrogate(logprob_A, -torch.ones(3), turn_A, **given)
    silent = given | {"weight_U": torch.tensor([0.0, 1.0])}
    assert kernels.turn_ratio_surrogate(logprob_A, -torch.ones(3), turn_A, **silent).loss == -1
    with pytest.raises(ValueError, match=r"advantage_U: expected shape \[any\], got \[\]"):
        bad = given | {"advantage_U": torch.ones(())}
        kernels.turn_ratio_surrogate(logprob_A, None, turn_A, **bad)


@pytest.mark.parametrize("trainer", [None, object()])
def test_what_is_no_trainer_is_named(trainer: object) -> None:
    with pytest.raises(ValueError, match=r"trainer: expected a GRPOTrainer of TRL, got .*`model`"):
        adapters.fuse_trl(trainer)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"labels": torch.tensor([0, 20])}, r"labels: expected entries in \[0, 20\), got 20"),
        ({"labels": torch.tensor([0, -1])}, r"labels: expected entries >= 0, got -1"),
        ({"labels": torch.tensor([0])}, r"labels: expected 2 on cpu like hidden, got 1"),
        ({"labels": torch.zeros(2)}, r"labels: expected integers, got torch\.float32"),
        ({"weight": torch.zeros(20, 7)}, r"weight: expected shape \[any, 8\], got \[20, 7\]"),
        ({"weight": torch.zeros(20, 8).double()}, r"weight: expected torch\.float32 like hidden"),
        ({"hidden": torch.zeros(())}, r"hidden: expected shape \[\.\.\., D\], got \[\]"),
        ({"hidden": None}, r"hidden: expected a tensor, got NoneType"),
        ({"temperature": 0.0}, r"temperature: .* > 0\.0, got 0\.0"),
    ],
)
def test_verl_s_arguments_go_by_their_names(change: dict[str, Any], match: str) -> None:
    given = {
        "hidden": torch.zeros(2, 8),
        "weight": torch.zeros(20, 8),
        "labels": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=match):
        adapters.linear_cross_entropy(**(given | change))
