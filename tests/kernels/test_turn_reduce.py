"""Laws of the turn reductions and of the turn-level surrogate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels

SINGLE, DOUBLE = torch.float32, torch.float64
CLIP = {"clip_low": 0.2, "clip_high": 0.25}


def plain_reduce(values_A: Tensor, turn_A: Tensor, turns: int, how: str) -> Tensor:
    """One turn at a time, by autograd."""
    rows = []
    for turn in range(turns):
        own = values_A[turn_A == turn]
        if how == "sum":
            rows.append(own.sum())
        elif how == "mean":
            rows.append(own.mean() if len(own) else own.sum())
        else:
            mean = own.mean() if len(own) else own.sum()
            rows.append(mean.clamp(-10, 10).exp())
    return torch.stack(rows)


def plain_surrogate(
    logprob_A: Tensor,
    behavior_A: Tensor,
    turn_A: Tensor,
    advantage_U: Tensor,
    weight_U: Tensor,
) -> Tensor:
    ratio_U = plain_reduce(logprob_A - behavior_A, turn_A, len(weight_U), "geometric_mean")
    clipped_U = ratio_U.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
    return -(weight_U * torch.minimum(ratio_U * advantage_U, clipped_U * advantage_U)).sum()


def ratio_case(seed: int = 0, turns: int = 12, actions: int = 70) -> dict[str, Tensor]:
    """Actions of turns in mixed order; the last turn has none; ratios inside and outside."""
    draw = torch.Generator().manual_seed(seed)
    turn_A = torch.randint(turns - 1, (actions,), generator=draw)
    logprob_A = -torch.rand(actions, generator=draw, dtype=DOUBLE) * 3
    shift_U = torch.tensor([-0.5, -0.1, 0.1, 0.5], dtype=DOUBLE).repeat(turns)[:turns]
    noise_A = 0.01 * torch.randn(actions, generator=draw, dtype=DOUBLE)
    return {
        "logprob_A": logprob_A,
        "behavior_A": logprob_A - shift_U[turn_A] + noise_A,
        "turn_A": turn_A,
        "advantage_U": torch.randn(turns, generator=draw, dtype=DOUBLE),
        "weight_U": torch.rand(turns, generator=draw, dtype=DOUBLE) + 0.1,
    }


def run(case: dict[str, Tensor], **changes: Any) -> tuple[kernels.TurnRatioOutput, Tensor]:
    given: dict[str, Any] = {**case, **CLIP, **changes}
    logprob_A = given.pop("logprob_A").clone().requires_grad_()
    out = kernels.turn_ratio_surrogate(
        logprob_A, given.pop("behavior_A"), given.pop("turn_A"), **given
    )
    return out, torch.autograd.grad(out.loss, logprob_A)[0]


@pytest.mark.parametrize("how", ["sum", "mean", "geometric_mean"])
@pytest.mark.parametrize("actions", [0, 1, 7, 257])
def test_reductions_equal_one_turn_at_a_time(how: str, actions: int) -> None:
    draw = torch.Generator().manual_seed(actions)
    turn_A = torch.randint(9, (actions,), generator=draw)
    values_A = torch.randn(actions, generator=draw, dtype=DOUBLE).requires_grad_()
    upstream_U = torch.randn(10, generator=draw, dtype=DOUBLE)
    got_U = kernels.turn_reduce(values_A, turn_A, 10, how)
    want_U = plain_reduce(values_A, turn_A, 10, how)
    torch.testing.assert_close(got_U, want_U, rtol=1e-13, atol=1e-14)
    grads = [torch.autograd.grad(x, values_A, upstream_U)[0] for x in (got_U, want_U)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("how", ["sum", "mean", "geometric_mean"])
def test_gradcheck(how: str) -> None:
    turn_A = torch.tensor([2, 0, 2, 1, 0, 2, 4])
    values_A = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    assert torch.autograd.gradcheck(
        lambda x: kernels.turn_reduce(x, turn_A, 5, how), values_A.requires_grad_()
    )


def test_the_documented_examples() -> None:
    values_A = torch.tensor([math.log(2), math.log(8), 0.0])
    got_U = kernels.turn_reduce(values_A, torch.tensor([0, 0, 1]), 3, "geometric_mean")
    torch.testing.assert_close(got_U, torch.tensor([4.0, 1.0, 1.0]))
    case = {
        "logprob_A": torch.tensor([math.log(1.1), math.log(1.3)], dtype=DOUBLE),
        "behavior_A": torch.zeros(2, dtype=DOUBLE),
        "turn_A": torch.tensor([0, 0]),
        "advantage_U": torch.ones(1, dtype=DOUBLE),
        "weight_U": torch.ones(1, dtype=DOUBLE),
    }
    out, grad_A = run(case)
    assert float(out.loss.detach()) == pytest.approx(-math.sqrt(1.43))
    assert grad_A.tolist() == pytest.approx([-math.sqrt(1.43) / 2] * 2)


def test_a_turn_alone_equals_the_turn_in_a_batch() -> None:
    """Bit for bit, wherever its actions lie, and from run to run."""
    draw = torch.Generator().manual_seed(2)
    turn_A = torch.randint(20, (3000,), generator=draw)
    values_A = torch.randn(3000, generator=draw)
    whole_U = kernels.turn_reduce(values_A, turn_A, 20, "geometric_mean")
    for turn in (0, 7, 19):
        own = values_A[turn_A == turn]
        alone = kernels.turn_reduce(own, torch.zeros_like(turn_A[: len(own)]), 1, "geometric_mean")
        assert torch.equal(alone[0], whole_U[turn])
    assert torch.equal(whole_U, kernels.turn_reduce(values_A, turn_A, 20, "geometric_mean"))


def test_a_long_turn_is_summed_exactly() -> None:
    """20,000 float32 values of one turn: one rounding, however long the turn is."""
    values_A = torch.rand(20_000, generator=torch.Generator().manual_seed(3)) * 10
    got = kernels.turn_reduce(values_A, torch.zeros(20_000, dtype=torch.int64), 1, "sum")
    assert float(got[0]) == float(values_A.double().sum().float())


def test_surrogate_equals_plain_autograd() -> None:
    case = ratio_case()
    out, grad_A = run(case)
    logprob_A = case["logprob_A"].clone().requires_grad_()
    case["weight_U"][-1] = 0  # the turn without actions
    plain = plain_surrogate(logprob_A, *list(case.values())[1:])
    torch.testing.assert_close(out.loss.detach(), plain.detach(), rtol=1e-13, atol=0)
    want_A = torch.autograd.grad(plain, logprob_A)[0]
    torch.testing.assert_close(grad_A, want_A, rtol=1e-13, atol=1e-15)
    assert out.sums["turns"] == 11
    assert out.sums["clipped_low"] + out.sums["clipped_high"] > 0
    assert (grad_A == 0).any()
    assert (grad_A != 0).any()


def test_surrogate_gradcheck() -> None:
    case = ratio_case(4, turns=5, actions=9)

    def loss(logprob_A: Tensor) -> Tensor:
        rest = {k: v for k, v in case.items() if k.endswith("U")}
        return kernels.turn_ratio_surrogate(
            logprob_A, case["behavior_A"], case["turn_A"], **rest, **CLIP
        ).loss

    assert torch.autograd.gradcheck(loss, case["logprob_A"].clone().requires_grad_())


def test_without_behavior_the_ratio_is_one() -> None:
    """Ratio exactly 1; an action's gradient is -A·w / |turn|."""
    case = ratio_case()
    out, grad_A = run(case, behavior_A=None)
    assert out.ratio_U.tolist() == [1.0] * 12
    length_U = torch.bincount(case["turn_A"], minlength=12).double()
    want_A = -(case["advantage_U"] * case["weight_U"] / length_U.clamp(min=1))[case["turn_A"]]
    torch.testing.assert_close(grad_A, want_A, rtol=1e-14, atol=0)


def test_what_is_not_scored_may_hold_anything() -> None:
    case = ratio_case()
    case["weight_U"][3], case["advantage_U"][5] = 0, 0
    clean, clean_A = run(case)
    behavior_A, advantage_U = case["behavior_A"].clone(), case["advantage_U"].clone()
    dead_A = (case["turn_A"] == 3) | (case["turn_A"] == 5)
    for garbage in (math.nan, math.inf, -1e4):
        behavior_A[dead_A] = garbage
        advantage_U[3] = garbage
        out, grad_A = run(case, behavior_A=behavior_A, advantage_U=advantage_U)
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(grad_A, clean_A)
        assert not grad_A[dead_A].any()


def test_huge_log_ratios_are_clamped_and_counted() -> None:
    case = ratio_case()
    behavior_A = case["behavior_A"].clone()
    behavior_A[case["turn_A"] == 2] -= 200
    out, grad_A = run(case, behavior_A=behavior_A, advantage_U=-case["advantage_U"].abs())
    assert out.sums["clamped"] == 1
    assert float(out.peaks["ratio"]) == pytest.approx(math.exp(10))
    assert out.peaks["abs_log_ratio"] > 190
    assert out.loss.isfinite()
    assert not grad_A[case["turn_A"] == 2].any()


def test_empty_and_all_silent_batches() -> None:
    case = ratio_case()
    out, grad_A = run(case, weight_U=torch.zeros(12, dtype=DOUBLE))
    assert (float(out.loss.detach()), float(out.sums["turns"])) == (0, 0)
    assert not grad_A.any()
    none = {name: value[:0] for name, value in case.items()}
    out, grad_A = run(none)
    assert (float(out.loss.detach()), grad_A.shape, out.ratio_U.shape) == (0, (0,), (0,))


def test_silent_turns_leave_the_output_layer_s_backward() -> None:
    """Composed with `linear_logprob`: gradients equal plain autograd, and a row of a turn without
    advantage keeps exactly zero gradient."""
    draw = torch.Generator().manual_seed(5)
    hidden_RD = torch.randn(20, 8, generator=draw, dtype=DOUBLE)
    head_VD = torch.randn(50, 8, generator=draw, dtype=DOUBLE)
    action_A = torch.randint(50, (20,), generator=draw)
    turn_A = torch.arange(20) // 5
    advantage_U = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=DOUBLE)
    weight_U = torch.full((4,), 0.25, dtype=DOUBLE)
    grads = []
    for impl in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (hidden_RD, head_VD)]
        logprob_A, _ = kernels.linear_logprob(*leaves, action_A, impl=impl)
        behavior_A = logprob_A.detach() - 0.05
        if impl == "torch":
            loss = kernels.turn_ratio_surrogate(
                logprob_A, behavior_A, turn_A, advantage_U=advantage_U, weight_U=weight_U, **CLIP
            ).loss
        else:
            loss = plain_surrogate(logprob_A, behavior_A, turn_A, advantage_U, weight_U)
        grads.append(torch.autograd.grad(loss, leaves))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
    assert not grads[0][0][5:10].any()
    assert grads[0][0][:5].any()


def test_bad_input_is_named() -> None:
    case = ratio_case()
    values_A, turn_A = torch.zeros(3), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"how='median'.*sum, mean, geometric_mean"):
        kernels.turn_reduce(values_A, turn_A, 3, "median")
    with pytest.raises(ValueError, match=r"turn_A.*\[0, 2\).*2"):
        kernels.turn_reduce(values_A, turn_A, 2)
    with pytest.raises(ValueError, match=r"turn_A: expected shape \[3\]"):
        kernels.turn_reduce(values_A, turn_A[:2], 3)
    with pytest.raises(ValueError, match=r"turn_A: expected int64"):
        kernels.turn_reduce(values_A, turn_A.int(), 3)
    with pytest.raises(ValueError, match=r"weight_U: expected finite numbers, got nan at 1"):
        run(case, weight_U=torch.tensor([1.0, math.nan]).repeat(6))
    bad_A = case["behavior_A"].clone()
    bad_A[0] = math.inf
    with pytest.raises(ValueError, match=r"behavior_A \(scored turns\).*inf"):
        run(case, behavior_A=bad_A)
    with pytest.raises(ValueError, match=r"clip_low"):
        run(case, clip_low=-0.1)
