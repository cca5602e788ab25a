"""Clipped policy-gradient loss of the output layer, forward and gradient in one pass.

    z = softcap(h · Wᵀ + b) / temperature          logprob_a = z[y_a] - logsumexp(z)
    ρ_a = exp(clamp(logprob_a - behavior_a, ±10))  d_a = clamp(reference_a - logprob_a, ±10)
    loss = Σ_a w_a [ -min(ρ_a A_a, clip(ρ_a, 1 - clip_low, 1 + clip_high) A_a)
                     + kl_coef (exp(d_a) - d_a - 1) ]
    c_a = ∂loss/∂logprob_a,  S = Σ c over the actions of one hidden row
    dZ = Σ_a c_a · onehot(y_a) - S · p,  dh = dZ W / temperature,  dW = dZᵀ h / temperature

The loss is inside, so c_a is known as soon as a chunk has its log-probabilities: the chunk's logits
turn into dZ where they lie and nothing is recomputed. 6·R·D·V floating-point operations (R rows
with a live action), the floor for a loss of this form.

Saved for backward: dh [R, D] and dW [V, D] (db [V]) in float32; backward scales them by the
upstream scalar and rounds once, when the chunk's logits are gone. So a loss scale (float16) or a
division of the loss costs no digits.
Extra memory: dW, one chunk of logits (at most 64 MiB on CPU, 1 GiB elsewhere; twice with softcap),
one tile (1 MiB on CPU). Half precision on CPU adds a float32 copy of W.

What is skipped, exactly: actions of weight 0, and with kl_coef = 0 also actions of advantage 0,
leave before the first matrix product whatever their other numbers hold; rows whose coefficients
are all 0 (clipped) leave before dh and dW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .dispatch import (
    check_allowed,
    check_finite,
    check_float,
    check_head,
    check_number,
    choose,
    refuse_second_derivative,
    without_autocast,
)
from .head_gradient import HeadGradient, check_head_gradient
from .rows import Chunk, Gradients, Head, Live, label_gradient, own_rows, rounded, wide_dtype

CLAMP = reference.CLAMP


@dataclass(frozen=True, slots=True)
class SurrogateOutput:
    """What `turn_surrogate` returns; everything but `loss` is detached.

    loss       0-dim, float32 (float64 for float64 inputs)
    logprob_A  log-probability of each scored action, 0 where not scored
    entropy_A  entropy of the distribution each scored action was drawn from, 0 where not scored
    sums       0-dim float64, added over batches and ranks: actions (scored ones), log_ratio and
               abs_log_ratio (clamped), kl_behavior, kl_reference (k3 estimates), clipped_low,
               clipped_high (actions whose gradient the clip removed), clamped (log-ratios
               beyond ±10), entropy, logprob
    peaks      0-dim float64, the maximum over batches and ranks: abs_log_ratio (not clamped), ratio
    """

    loss: Tensor
    logprob_A: Tensor
    entropy_A: Tensor
    sums: dict[str, Tensor]
    peaks: dict[str, Tensor]


class Terms(NamedTuple):
    """Per scored action, in the accumulation dtype; `row_A` indexes hidden rows."""

    label_A: Tensor
    row_A: Tensor
    behavior_A: Tensor | None
    advantage_A: Tensor
    weight_A: Tensor
    reference_A: Tensor | None


class Settings(NamedTuple):
    clip_low: float
    clip_high: float
    temperature: float
    kl_coef: float
    softcap: float | None


def turn_surrogate(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    *,
    row_A: Tensor | None = None,
    behavior_A: Tensor | None = None,
    advantage_A: Tensor,
    weight_A: Tensor,
    clip_low: float,
    clip_high: float,
    temperature: float = 1.0,
    kl_coef: float = 0.0,
    reference_A: Tensor | None = None,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    head_gradient: HeadGradient | None = None,
    impl: str = "auto",
) -> SurrogateOutput:
    """Weighted clipped surrogate of sampled actions, with gradients to hidden, head and bias.

    hidden_RD    hidden states; head_VD the output layer, same floating dtype
    action_A     int64 sampled ids in [0, V)
    row_A        int64, non-decreasing: the row of hidden_RD each action is scored on; None means
                 action a on row a. Actions of one row share one softmax.
    behavior_A   log-probabilities under the policy that sampled; None: the current ones, detached
                 (ratio exactly 1, gradient -A·w)
    advantage_A, weight_A   the loss is Σ weight · (...): normalisers are already in the weights
    reference_A  log-probabilities under the reference policy; needed when kl_coef > 0, otherwise
                 only reported in sums["kl_reference"]
    bias_V       added to the logits, -inf forbids an id; softcap: z → softcap · tanh(z / softcap),
                 and forbidden ids stay forbidden
    head_gradient   backward adds the head's gradient to this float32 sum and gives head_VD none:
                 one rounding for all micro-batches

    An action is scored unless its weight is 0, or its advantage is 0 while kl_coef is 0. Actions
    that are not scored cost nothing, contribute exactly nothing, may hold NaN anywhere but in
    action_A, and report log-probability and entropy 0; use `linear_logprob` to score them.

    Raises `ValueError` naming the argument for a wrong type, dtype, shape or device, a label
    outside [0, V), a scored action whose bias is -inf, a non-finite weight, NaN or +inf in the
    bias, or a non-finite number of a scored action. A hidden state or head that is not finite gives
    a loss and gradients that are not finite. Autocast has no influence. Source: the RTPO objective
    (clipped surrogate of Schulman et al. 2017, k3 estimator of Schulman 2020).

    Example: logits [0, 0], action 0, behaviour log ½, advantage 1, weight 1 give loss -1,
    logprob -0.693, entropy 0.693 and dloss/dlogits = [-½, ½].
    """
    check_head(hidden_RD, head_VD, action_A, row_A, temperature, bias_V, softcap)
    check_head_gradient(head_gradient, head_VD, impl)
    run = choose(impl, IMPLEMENTATIONS, hidden_RD.device, hidden_RD.dtype)
    settings = Settings(clip_low, clip_high, temperature, kl_coef, softcap)
    given = Terms(
        action_A, own_rows(row_A, action_A), behavior_A, advantage_A, weight_A, reference_A
    )
    check_terms(given, settings, hidden_RD)
    live_A, terms = scored_terms(given, settings, wide_dtype(hidden_RD.dtype))
    check_allowed(terms.label_A, bias_V)
    given_head = (hidden_RD, head_VD, bias_V)
    with without_autocast(hidden_RD.device):
        loss, logprob_L, entropy_L = run(*given_head, terms, settings, head_gradient)
    logprob_L, entropy_L = logprob_L.detach(), entropy_L.detach()
    logprob_A = logprob_L.new_zeros(len(action_A)).index_put_((live_A,), logprob_L)
    entropy_A = entropy_L.new_zeros(len(action_A)).index_put_((live_A,), entropy_L)
    sums, peaks = statistics(terms, settings, logprob_L, entropy_L)
    return SurrogateOutput(loss, logprob_A, entropy_A, sums, peaks)


def check_terms(terms: Terms, settings: Settings, like: Tensor) -> None:
    size = (len(terms.label_A),)
    check_float("advantage_A", terms.advantage_A, size, like)
    check_float("weight_A", terms.weight_A, size, like)
    check_finite("weight_A", terms.weight_A)
    if terms.behavior_A is not None:
        check_float("behavior_A", terms.behavior_A, size, like)
    check_number("clip_low", settings.clip_low, 0.0)
    check_number("clip_high", settings.clip_high, 0.0)
    check_number("kl_coef", settings.kl_coef, 0.0)
    if terms.reference_A is not None:
        check_float("reference_A", terms.reference_A, size, like)
    elif settings.kl_coef:
        raise ValueError(
            f"reference_A: expected log-probabilities because kl_coef={settings.kl_coef}, got None"
        )


def scored_terms(given: Terms, settings: Settings, wide: torch.dtype) -> tuple[Tensor, Terms]:
    """Indices of the scored actions, and their terms, checked to be finite."""
    keep_A = given.weight_A != 0
    if not settings.kl_coef:
        keep_A &= given.advantage_A != 0
    live_A = keep_A.nonzero().squeeze(1)

    def take(name: str, value_A: Tensor | None, checked: bool = True) -> Tensor | None:
        if value_A is None:
            return None
        value_L = value_A.detach()[live_A].to(wide)
        if checked:
            check_finite(f"{name} (scored actions)", value_L)
        return value_L

    advantage_L = take("advantage_A", given.advantage_A)
    weight_L = take("weight_A", given.weight_A)
    assert advantage_L is not None and weight_L is not None
    return live_A, Terms(
        given.label_A[live_A],
        given.row_A[live_A],
        take("behavior_A", given.behavior_A),
        advantage_L,
        weight_L,
        take("reference_A", given.reference_A, checked=settings.kl_coef != 0),
    )


def statistics(
    terms: Terms, settings: Settings, logprob_A: Tensor, entropy_A: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reported sums and peaks over the scored actions, in float64."""
    logprob_A, entropy_A = logprob_A.double(), entropy_A.double()
    zero_A = torch.zeros_like(logprob_A)
    behavior_A, reference_A = terms.behavior_A, terms.reference_A
    raw_A = zero_A if behavior_A is None else logprob_A - behavior_A.double()
    log_A = raw_A.clamp(-CLAMP, CLAMP)
    d_A = zero_A if reference_A is None else reference_A.double() - logprob_A
    d_A = d_A.clamp(-CLAMP, CLAMP)
    ratio_A, sign_A = log_A.exp(), terms.advantage_A
    each = {
        "actions": zero_A + 1,
        "log_ratio": log_A,
        "abs_log_ratio": log_A.abs(),
        "kl_behavior": torch.expm1(-log_A) + log_A,
        "kl_reference": torch.expm1(d_A) - d_A,
        "clipped_low": ((ratio_A < 1 - settings.clip_low) & (sign_A < 0)).double(),
        "clipped_high": ((ratio_A > 1 + settings.clip_high) & (sign_A > 0)).double(),
        "clamped": (raw_A.abs() > CLAMP).double(),
        "entropy": entropy_A,
        "logprob": logprob_A,
    }
    totals = torch.stack(list(each.values())).sum(1)
    tops = torch.stack([raw_A.abs(), ratio_A]).amax(1) if len(raw_A) else totals.new_zeros(2)
    peaks = dict(zip(("abs_log_ratio", "ratio"), tops.unbind(), strict=True))
    return dict(zip(each, totals.unbind(), strict=True)), peaks


def _reference(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    terms: Terms,
    settings: Settings,
    head_gradient: HeadGradient | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.turn_surrogate(
        hidden_RD,
        head_VD,
        *terms,
        settings.clip_low,
        settings.clip_high,
        settings.temperature,
        settings.kl_coef,
        bias_V,
        settings.softcap,
    )


def _torch(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _TurnSurrogate.apply(*given, torch.is_grad_enabled(), _Pass)


def _triton(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .triton_surrogate import TritonPass

    return _TurnSurrogate.apply(*given, torch.is_grad_enabled(), TritonPass)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "torch": _torch,
    "reference": _reference,
    "triton": _triton,
}


class _TurnSurrogate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        terms: Terms,
        settings: Settings,
        head_gradient: HeadGradient | None,
        wanted: bool,
        one_pass: Callable[..., Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants = [need and wanted for need in ctx.needs_input_grad[:3]]
        body = one_pass(hidden_RD, head_VD, bias_V, terms, settings, wants)
        body.run()
        ctx.save_for_backward(*body.gradients.sums())
        ctx.dtypes, ctx.head_gradient = body.gradients.dtypes, head_gradient
        ctx.mark_non_differentiable(body.logprob_A, body.entropy_A)
        ctx.set_materialize_grads(False)
        return body.loss(), body.logprob_A, body.entropy_A

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("turn_surrogate")
        return *scaled(ctx, upstream[0]), *(None,) * 5


def scaled(ctx: Any, scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The saved sums (dhidden, dhead, dbias) times the upstream scalar, rounded once."""
    if scale is None:
        return None, None, None
    dhidden_RD, dhead_VD, dbias_V = ctx.saved_tensors
    if ctx.head_gradient is not None and dhead_VD is not None:
        ctx.head_gradient.add(dhead_VD, scale)
        dhead_VD = None
    # Reading a scalar is free on CPU, and saves a second dW.
    factor = None if scale.device.type == "cpu" and float(scale) == 1.0 else scale
    sums = (dhidden_RD, dhead_VD, dbias_V)
    return tuple(rounded(g, dtype, factor) for g, dtype in zip(sums, ctx.dtypes, strict=True))


def objective(
    logprob_A: Tensor,
    behavior_A: Tensor | None,
    advantage_A: Tensor,
    reference_A: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Loss of each action before its weight, and the derivative of that by the log-probability.

    The clip is active where `min` takes the clipped branch; a clamped log-ratio is constant.
    """
    if behavior_A is None:
        each_A, slope_A = -advantage_A, -advantage_A
    else:
        raw_A = logprob_A - behavior_A
        ratio_A = raw_A.clamp(-CLAMP, CLAMP).exp()
        low, high = 1 - settings.clip_low, 1 + settings.clip_high
        clipped_A = ratio_A.clamp(low, high)
        each_A = -torch.minimum(ratio_A * advantage_A, clipped_A * advantage_A)
        flat_A = (ratio_A < low) & (advantage_A < 0) | (ratio_A > high) & (advantage_A > 0)
        flat_A |= raw_A.abs() > CLAMP
        slope_A = torch.where(flat_A, 0, -ratio_A * advantage_A)
    if reference_A is not None and settings.kl_coef:
        d_A = reference_A - logprob_A
        inside_A = d_A.abs() <= CLAMP
        d_A = d_A.clamp(-CLAMP, CLAMP)
        grow_A = torch.expm1(d_A)
        each_A = each_A + settings.kl_coef * (grow_A - d_A)
        slope_A = slope_A - settings.kl_coef * torch.where(inside_A, grow_A, 0)
    return each_A, slope_A


class _Pass:
    """One pass over the chunks of one call; results are attributes."""

    def __init__(
        self,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        terms: Terms,
        settings: Settings,
        wants: list[bool],
    ) -> None:
        self.hidden_RD, self.terms, self.settings = hidden_RD.detach(), terms, settings
        self.live = Live.of(terms.label_A, terms.row_A)
        self.head = Head(
            head_VD, bias_V, settings.temperature, settings.softcap, len(self.live.row_R)
        )
        self.gradients = Gradients(hidden_RD, head_VD, bias_V, wants)
        wide, device = self.head.wide, head_VD.device
        count = len(terms.label_A)
        self.logprob_A, self.entropy_A, self.loss_A = (
            torch.empty(count, dtype=wide, device=device) for _ in range(3)
        )
        self.wanted = any(wants)

    def run(self) -> None:
        for chunk in self.live.chunks(self.head.chunk, self.head.tile):
            self._chunk(chunk)

    def loss(self) -> Tensor:
        return self.loss_A.sum(dtype=torch.float64).to(self.head.wide)

    def _chunk(self, chunk: Chunk) -> None:
        x_CD = self.head.hidden(self.hidden_RD, chunk.row_C)
        exp_CV, sum_C, log_C, entropy_C, shifted_A = self.head.exponentials(x_CD, chunk)
        logprob_A = shifted_A - log_C[chunk.slot_A]
        of = slice(chunk.first, chunk.last)
        behavior_A, reference_A = (
            None if x is None else x[of] for x in (self.terms.behavior_A, self.terms.reference_A)
        )
        each_A, slope_A = objective(
            logprob_A, behavior_A, self.terms.advantage_A[of], reference_A, self.settings
        )
        weight_A = self.terms.weight_A[of]
        self.logprob_A[of], self.entropy_A[of] = logprob_A, entropy_C[chunk.slot_A]
        self.loss_A[of] = weight_A * each_A
        if self.wanted:
            self._gradient(chunk, x_CD, exp_CV, sum_C, logprob_A, weight_A * slope_A)

    def _gradient(
        self,
        chunk: Chunk,
        x_CD: Tensor,
        exp_CV: Tensor,
        sum_C: Tensor,
        logprob_A: Tensor,
        coef_A: Tensor,
    ) -> None:
        slot_A = chunk.slot_A
        live_C = torch.zeros(len(x_CD), dtype=torch.bool, device=x_CD.device)
        live_C[slot_A[coef_A != 0]] = True
        kept_N = live_C.nonzero().squeeze(1)
        count, row_N = len(kept_N), None
        if count == 0:
            return
        total_C = torch.zeros_like(sum_C).index_add_(0, slot_A, coef_A)
        place_A, label_A = slot_A, chunk.label_A
        if count < len(chunk.row_C):  # rows without a coefficient leave here
            inside_A = live_C[slot_A]
            slot_A, label_A = slot_A[inside_A], label_A[inside_A]
            logprob_A, coef_A = logprob_A[inside_A], coef_A[inside_A]
            place_A = (live_C.cumsum(0) - 1)[slot_A]
            row_N = kept_N
            x_CD = self.head.hidden(self.hidden_RD, chunk.row_C[row_N])
        total_A = total_C[slot_A]
        scale_C = -total_C / (sum_C * self.settings.temperature)
        dz_NV = self.head.keep(exp_CV, scale_C, row_N, count)
        at, shared = (place_A, label_A), self.live.shared
        target_A = label_gradient(dz_NV, at, logprob_A, coef_A, total_A, shared)
        dz_NV[at] = self.head.at_labels(slot_A, label_A, target_A)
        hidden_N = chunk.row_C if row_N is None else chunk.row_C[row_N]
        self.gradients.add(self.head, hidden_N, dz_NV, x_CD)
