"""Reductions of actions to turns, and the clipped surrogate of turn-level ratios (GSPO).

    sum_u = Σ_{a in u} x_a,  mean_u = sum_u / |u|,  geometric mean of ratios = exp(mean log-ratio)
    ρ_u = exp(clamp(mean_{a in u} (logprob_a - behavior_a), ±10))
    loss = -Σ_u w_u min(ρ_u A_u, clip(ρ_u, 1 - clip_low, 1 + clip_high) A_u)
    ∂loss/∂logprob_a = -w_u A_u ρ_u / |u| unless the clip or the clamp of its turn u holds

Actions come in any order (siblings interleave on shared rows): a stable sort makes each turn one
segment, summed in float64 in the order of its actions and rounded once. No atomics: a turn's value
depends on its own actions only, bit for bit. Saved: turn_A and one slope for each turn. Memory and
time are [A], negligible beside the output layer.

Turn-level ratios need all log-probabilities of a turn before any gradient, so they compose with
`linear_logprob` (8·R·D·V) and not with the one-pass `turn_surrogate`; rows of turns without a
gradient (silent, clipped) still leave before the backward matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dispatch import (
    check_finite,
    check_float,
    check_index,
    check_number,
    check_range,
    check_tensor,
)
from .reference import CLAMP
from .rows import wide_dtype

REDUCTIONS = ("sum", "mean", "geometric_mean")


@dataclass(frozen=True, slots=True)
class TurnRatioOutput:
    """What `turn_ratio_surrogate` returns; everything but `loss` is detached.

    loss     0-dim, float32 (float64 for float64 inputs)
    ratio_U  geometric-mean ratio of each turn, 1 where the turn is not scored
    sums     0-dim float64, added over batches and ranks: turns (scored ones), log_ratio and
             abs_log_ratio (turn means, clamped), clipped_low, clipped_high (turns whose gradient
             the clip removed), clamped (turns with a mean log-ratio beyond ±10)
    peaks    0-dim float64, the maximum over batches and ranks: abs_log_ratio (not clamped), ratio
    """

    loss: Tensor
    ratio_U: Tensor
    sums: dict[str, Tensor]
    peaks: dict[str, Tensor]


def turn_reduce(values_A: Tensor, turn_A: Tensor, turns: int, how: str = "sum") -> Tensor:
    """One number for each of `turns` turns, [U], differentiable by values_A.

    values_A  floating [A]; turn_A int64 [A], the turn of each value in [0, turns), in any order
    how       "sum", "mean", or "geometric_mean": exp of the mean, for log-ratios; the mean is
              clamped to ±10 before exp, and beyond that its gradient is 0

    float32 (float64 for float64 values). A turn without values gives 0, or 1 for the geometric
    mean. Raises `ValueError` naming the argument for a wrong dtype, shape, index or `how`.

    Example: values [log 2, log 8, 0], turns [0, 0, 1] of 3 and "geometric_mean" give [4, 1, 1].
    """
    check_tensor("values_A", values_A)
    check_float("values_A", values_A, (None,), values_A)
    _check_turns(turn_A, turns, values_A)
    if how not in REDUCTIONS:
        raise ValueError(f"how={how!r}: expected one of {', '.join(REDUCTIONS)}")
    reduced_U: Tensor = _TurnReduce.apply(values_A, turn_A, turns, how)
    return reduced_U


def turn_ratio_surrogate(
    logprob_A: Tensor,
    behavior_A: Tensor | None,
    turn_A: Tensor,
    *,
    advantage_U: Tensor,
    weight_U: Tensor,
    clip_low: float,
    clip_high: float,
) -> TurnRatioOutput:
    """Weighted clipped surrogate of one ratio a turn: the geometric mean of its tokens' ratios.

    logprob_A    log-probabilities with a graph, from `linear_logprob`
    behavior_A   those of the policy that sampled; None: the current ones, detached (ratio
                 exactly 1, gradient kept)
    turn_A       int64, the turn of each action in [0, U), in any order. A turn may also stand for
                 a whole trajectory.
    advantage_U, weight_U   the loss is Σ weight · (...): normalisers are already in the weights

    A turn is scored unless its weight or advantage is 0 or it has no action. Turns that are not
    scored contribute exactly nothing and may hold NaN in anything but turn_A and weight_U.
    Raises `ValueError` naming the argument for a wrong dtype, shape, device or index, a non-finite
    weight, or a non-finite number of a scored turn. Source: GSPO (Zheng et al. 2025), eq. 5 and 7.

    Example: log-ratios [log 1.1, log 1.3] of one turn, advantage 1, weight 1 and clip 0.2 give
    ratio √1.43 = 1.196 and loss -1.196; each action's gradient is -0.598.
    """
    check_tensor("logprob_A", logprob_A)
    check_float("logprob_A", logprob_A, (None,), logprob_A)
    check_float("advantage_U", advantage_U, (None,), logprob_A)
    turns = len(advantage_U)
    _check_turns(turn_A, turns, logprob_A)
    check_float("weight_U", weight_U, (turns,), logprob_A)
    check_finite("weight_U", weight_U)
    check_number("clip_low", clip_low, 0.0)
    check_number("clip_high", clip_high, 0.0)
    if behavior_A is None:
        behavior_A = logprob_A.detach()
    check_float("behavior_A", behavior_A, (len(turn_A),), logprob_A)
    wide = wide_dtype(logprob_A.dtype)
    count_U = torch.bincount(turn_A, minlength=turns)
    live_U = (weight_U != 0) & (advantage_U != 0) & (count_U > 0)
    check_finite("advantage_U (scored turns)", advantage_U[live_U])
    live_A = live_U[turn_A]
    check_finite("behavior_A (scored turns)", behavior_A[live_A])
    check_finite("logprob_A (scored turns)", logprob_A.detach()[live_A])
    # `where` before the difference: NaN of a turn that is not scored meets no arithmetic.
    current_A = torch.where(live_A, logprob_A.to(wide), 0)
    raw_A = current_A - torch.where(live_A, behavior_A.detach().to(wide), 0)
    advantage_U = torch.where(live_U, advantage_U.detach(), 0).to(wide)
    weight_U = torch.where(live_U, weight_U.detach(), 0).to(wide)
    ratio_U = turn_reduce(raw_A, turn_A, turns, "geometric_mean")
    clipped_U = ratio_U.clamp(1 - clip_low, 1 + clip_high)
    each_U = torch.minimum(ratio_U * advantage_U, clipped_U * advantage_U)
    loss = -(weight_U * each_U).sum(dtype=torch.float64).to(wide)
    mean_L = turn_reduce(raw_A.detach(), turn_A, turns, "mean").double()[live_U]
    bounds = 1 - clip_low, 1 + clip_high
    sums, peaks = _statistics(mean_L, advantage_U[live_U], bounds)
    return TurnRatioOutput(loss, ratio_U.detach(), sums, peaks)


def _check_turns(turn_A: Tensor, turns: int, like: Tensor) -> None:
    check_index("turn_A", turn_A, (len(like),), like)
    if turns < 0:
        raise ValueError(f"turns: expected a count >= 0, got {turns}")
    check_range("turn_A", turn_A, turns)


def _statistics(
    mean_U: Tensor, advantage_U: Tensor, bounds: tuple[float, float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reported sums and peaks over the scored turns, in float64."""
    log_U = mean_U.clamp(-CLAMP, CLAMP)
    ratio_U = log_U.exp()
    each = {
        "turns": torch.ones_like(log_U),
        "log_ratio": log_U,
        "abs_log_ratio": log_U.abs(),
        "clipped_low": ((ratio_U < bounds[0]) & (advantage_U < 0)).double(),
        "clipped_high": ((ratio_U > bounds[1]) & (advantage_U > 0)).double(),
        "clamped": (mean_U.abs() > CLAMP).double(),
    }
    totals = torch.stack(list(each.values())).sum(1)
    tops = torch.stack([mean_U.abs(), ratio_U]).amax(1) if len(mean_U) else totals.new_zeros(2)
    peaks = dict(zip(("abs_log_ratio", "ratio"), tops.unbind(), strict=True))
    return dict(zip(each, totals.unbind(), strict=True)), peaks


class _TurnReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_A: Tensor, turn_A: Tensor, turns: int, how: str) -> Tensor:
        count_U = torch.bincount(turn_A, minlength=turns)
        sorted_A = values_A.detach().double()[turn_A.argsort(stable=True)]
        out_U = torch.segment_reduce(sorted_A, "sum", lengths=count_U, unsafe=True, initial=0)
        slope_U = torch.ones_like(out_U)
        if how != "sum":
            slope_U = 1 / count_U.clamp(min=1).double()
            out_U = out_U * slope_U
        if how == "geometric_mean":
            inside_U = out_U.abs() <= CLAMP
            out_U = out_U.clamp(-CLAMP, CLAMP).exp()
            slope_U = torch.where(inside_U, slope_U * out_U, 0)
        ctx.save_for_backward(turn_A, slope_U)
        ctx.dtype = values_A.dtype
        return out_U.to(wide_dtype(values_A.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_U: Tensor) -> tuple[Tensor | None, ...]:
        turn_A, slope_U = ctx.saved_tensors
        grad_U = torch.where(upstream_U == 0, 0, upstream_U.double() * slope_U)
        return grad_U[turn_A].to(ctx.dtype), None, None, None
