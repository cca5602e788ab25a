"""Log-probability and entropy of sampled actions, differentiable by any upstream gradient.

    z = softcap(h · Wᵀ + b) / temperature
    logprob_a = z[y_a] - logsumexp(z),  H = -Σ p log p
    dZ = Σ_a g_a · onehot(y_a) - (Σ_a g_a) · p - (Σ_a e_a) · p · (log p + H)

with g, e the upstream gradients of logprob_A and entropy_A, summed over the actions of a row.
Upstream gradients are not known in the forward pass, so backward computes each chunk of logits
again: 2·R·D·V forward and 6·R·D·V backward. Saved: the inputs only. Extra memory: one chunk of
logits and one tile (twice the chunk with softcap), and in backward dW. Rows whose upstream
gradients are all 0 leave before the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .dispatch import check_head, choose, refuse_second_derivative, without_autocast
from .head_gradient import HeadGradient, check_head_gradient
from .rows import Chunk, Gradients, Head, Live, label_gradient, own_rows


def linear_logprob(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    *,
    row_A: Tensor | None = None,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    head_gradient: HeadGradient | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(logprob_A, entropy_A) of actions under softmax(hidden · headᵀ), float32 (float64 for
    float64 inputs); never more than one chunk of logits exists.

    Arguments and errors are those of `turn_surrogate`, except that a forbidden id (bias -inf) may
    be scored: its log-probability is -inf. Example: logits [0, 0] and action 1 give
    (-0.693, 0.693).
    """
    check_head(hidden_RD, head_VD, action_A, row_A, temperature, bias_V, softcap)
    check_head_gradient(head_gradient, head_VD, impl)
    run = choose(impl, IMPLEMENTATIONS, hidden_RD.device, hidden_RD.dtype)
    given = Given(action_A, own_rows(row_A, action_A), temperature, softcap, head_gradient)
    with without_autocast(hidden_RD.device):
        return run(hidden_RD, head_VD, bias_V, given)


def _reference(
    hidden_RD: Tensor, head_VD: Tensor, bias_V: Tensor | None, given: Given
) -> tuple[Tensor, Tensor]:
    return reference.linear_logprob(
        hidden_RD,
        head_VD,
        given.action_A,
        given.row_A,
        given.temperature,
        bias_V,
        given.softcap,
    )


def _torch(
    hidden_RD: Tensor, head_VD: Tensor, bias_V: Tensor | None, given: Given
) -> tuple[Tensor, Tensor]:
    return _LinearLogprob.apply(hidden_RD, head_VD, bias_V, given, (_score, _differentiate))


def _triton(
    hidden_RD: Tensor, head_VD: Tensor, bias_V: Tensor | None, given: Given
) -> tuple[Tensor, Tensor]:
    from . import triton_logprob as kernel

    leaves = (x for x in (hidden_RD, head_VD, bias_V) if x is not None)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in leaves)):
        live = Live.of(given.action_A, given.row_A)
        (vocab, width), free = head_VD.shape, kernel.free_bytes(head_VD.device)
        if kernel.without_logits(len(live.row_R), width, vocab, free):
            return kernel.by_tiles(
                hidden_RD, head_VD, bias_V, live, given.temperature, given.softcap
            )
    pair = (kernel.score, kernel.differentiate)
    return _LinearLogprob.apply(hidden_RD, head_VD, bias_V, given, pair)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "torch": _torch,
    "reference": _reference,
    "triton": _triton,
}


class Given(NamedTuple):
    """Arguments without a gradient; `row_A` indexes hidden rows."""

    action_A: Tensor
    row_A: Tensor
    temperature: float
    softcap: float | None
    head_gradient: HeadGradient | None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        given: Given,
        pair: tuple[Callable[..., Any], Callable[..., Any]],
    ) -> tuple[Tensor, Tensor]:
        """`pair` is the implementation: its score, and its gradient."""
        action_A, row_A, temperature, softcap, ctx.head_gradient = given
        ctx.save_for_backward(hidden_RD, head_VD, bias_V, action_A, row_A)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.differentiate = pair[1]
        ctx.set_materialize_grads(False)
        live = Live.of(action_A, row_A)
        found: tuple[Tensor, Tensor] = pair[0](
            hidden_RD, head_VD, bias_V, live, temperature, softcap
        )
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 5
        refuse_second_derivative("linear_logprob")
        hidden_RD, head_VD, bias_V, action_A, row_A = ctx.saved_tensors
        live_A = torch.zeros_like(action_A, dtype=torch.bool)
        for g in upstream:
            if g is not None:
                live_A |= g != 0
        live = Live.of(action_A[live_A], row_A[live_A])
        wants, sink = ctx.needs_input_grad[:3], ctx.head_gradient
        shared_VD = sink.sum_VD if sink is not None and wants[1] else None
        gradients = Gradients(hidden_RD, head_VD, bias_V, wants, shared_VD)
        with without_autocast(hidden_RD.device):
            ctx.differentiate(
                hidden_RD,
                head_VD,
                bias_V,
                live,
                ctx.temperature,
                ctx.softcap,
                tuple(None if g is None else g[live_A] for g in upstream),
                gradients,
            )
        return *gradients.result(), None, None


def _score(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    live: Live,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    head = Head(head_VD, bias_V, temperature, softcap, len(live.row_R))
    logprob_A, entropy_A = (
        torch.empty(len(live.label_A), dtype=head.wide, device=head_VD.device) for _ in "le"
    )
    hidden = hidden_RD.detach()
    for chunk in live.chunks(head.chunk, head.tile):
        x_CD = head.hidden(hidden, chunk.row_C)
        _, _, log_C, entropy_C, shifted_A = head.exponentials(x_CD, chunk)
        of = slice(chunk.first, chunk.last)
        logprob_A[of] = shifted_A - log_C[chunk.slot_A]
        entropy_A[of] = entropy_C[chunk.slot_A]
    return logprob_A, entropy_A


def _differentiate(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    live: Live,
    temperature: float,
    softcap: float | None,
    upstream: tuple[Tensor | None, Tensor | None],
    gradients: Gradients,
) -> None:
    head = Head(head_VD, bias_V, temperature, softcap, len(live.row_R))
    for chunk in live.chunks(head.chunk, head.tile):
        x_CD = head.hidden(hidden_RD, chunk.row_C)
        of = slice(chunk.first, chunk.last)
        glogprob, gentropy = (None if g is None else g[of] for g in upstream)
        dz_CV = _chunk_gradient(head, chunk, x_CD, glogprob, gentropy)
        gradients.add(head, chunk.row_C, dz_CV, x_CD)


def _chunk_gradient(
    head: Head, chunk: Chunk, x_CD: Tensor, glogprob_A: Tensor | None, gentropy_A: Tensor | None
) -> Tensor:
    """dZ of one chunk by the raw products, in the shared buffer."""
    exp_CV, sum_C, log_C, entropy_C, shifted_A = head.exponentials(x_CD, chunk)
    slot_A, at = chunk.slot_A, (chunk.slot_A, chunk.label_A)
    logprob_A = shifted_A - log_C[slot_A]
    coef_A = torch.zeros_like(logprob_A) if glogprob_A is None else glogprob_A
    total_C = torch.zeros_like(sum_C).index_add_(0, slot_A, coef_A)
    entropy_part_A: Tensor | float = 0.0
    if gentropy_A is None:
        scale_C = -total_C / (sum_C * head.temperature)
        dz_CV = head.keep(exp_CV, scale_C, None, len(chunk.row_C))
    else:
        gain_C = torch.zeros_like(sum_C).index_add_(0, slot_A, gentropy_A)
        dz_CV = head.keep_entropy(exp_CV, sum_C, entropy_C - log_C, total_C, gain_C)
        finite_A = logprob_A.clamp_min(torch.finfo(head.wide).min)
        entropy_part_A = -gain_C[slot_A] * finite_A.exp() * (finite_A + entropy_C[slot_A])
    shared = len(slot_A) > len(chunk.row_C)
    target_A = label_gradient(dz_CV, at, logprob_A, coef_A, total_C[slot_A], shared)
    dz_CV[at] = head.at_labels(*at, target_A + entropy_part_A)
    return dz_CV
