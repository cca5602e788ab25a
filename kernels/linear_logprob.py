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
from typing import Any

import torch
from torch import Tensor

from . import reference
from .dispatch import check_head, choose
from .rows import Chunk, Gradients, Head, Live, label_gradient


def linear_logprob(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    *,
    row_A: Tensor | None = None,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(logprob_A, entropy_A) of actions under softmax(hidden · headᵀ), float32 (float64 for
    float64 inputs); never more than one chunk of logits exists.

    Arguments and errors are those of `turn_surrogate`. Example: logits [0, 0] and action 1 give
    (-0.693, 0.693).
    """
    check_head(hidden_RD, head_VD, action_A, row_A, temperature, bias_V, softcap)
    run = choose(impl, IMPLEMENTATIONS, hidden_RD.device)
    return run(hidden_RD, head_VD, action_A, row_A, temperature, bias_V, softcap)


def _torch(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    row_A: Tensor | None,
    temperature: float,
    bias_V: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if row_A is None:
        row_A = torch.arange(len(action_A), device=action_A.device)
    return _LinearLogprob.apply(hidden_RD, head_VD, bias_V, action_A, row_A, temperature, softcap)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "torch": _torch,
    "reference": reference.linear_logprob,
}


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        action_A: Tensor,
        row_A: Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        live = Live.of(action_A, row_A)
        head = Head(head_VD, bias_V, temperature, softcap, len(live.row_R))
        logprob_A, entropy_A = (
            torch.empty(len(action_A), dtype=head.wide, device=head_VD.device) for _ in "le"
        )
        hidden = hidden_RD.detach()
        for chunk in live.chunks(head.chunk, head.tile):
            x_CD = head.hidden(hidden, chunk.row_C)
            _, sum_C, entropy_C, shifted_A = head.exponentials(x_CD, chunk)
            of = slice(chunk.first, chunk.last)
            logprob_A[of] = shifted_A - sum_C.log()[chunk.slot_A]
            entropy_A[of] = entropy_C[chunk.slot_A]
        ctx.save_for_backward(hidden_RD, head_VD, bias_V, action_A, row_A)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.set_materialize_grads(False)
        return logprob_A, entropy_A

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        glogprob_A, gentropy_A = upstream
        if glogprob_A is None and gentropy_A is None:
            return (None,) * 7
        hidden_RD, head_VD, bias_V, action_A, row_A = ctx.saved_tensors
        live_A = torch.zeros_like(action_A, dtype=torch.bool)
        for g in upstream:
            if g is not None:
                live_A |= g != 0
        glogprob_L, gentropy_L = (None if g is None else g[live_A] for g in upstream)
        live = Live.of(action_A[live_A], row_A[live_A])
        head = Head(head_VD, bias_V, ctx.temperature, ctx.softcap, len(live.row_R))
        gradients = Gradients(hidden_RD, head_VD, bias_V, ctx.needs_input_grad[:3])
        for chunk in live.chunks(head.chunk, head.tile):
            x_CD = head.hidden(hidden_RD, chunk.row_C)
            of = slice(chunk.first, chunk.last)
            glogprob, gentropy = (None if g is None else g[of] for g in (glogprob_L, gentropy_L))
            dz_CV = _chunk_gradient(head, chunk, x_CD, glogprob, gentropy)
            gradients.add(head, chunk.row_C, dz_CV, x_CD)
        return *gradients.result(), None, None, None, None


def _chunk_gradient(
    head: Head, chunk: Chunk, x_CD: Tensor, glogprob_A: Tensor | None, gentropy_A: Tensor | None
) -> Tensor:
    """dZ of one chunk by the raw products, in the shared buffer."""
    exp_CV, sum_C, entropy_C, shifted_A = head.exponentials(x_CD, chunk)
    slot_A, at = chunk.slot_A, (chunk.slot_A, chunk.label_A)
    logprob_A = shifted_A - sum_C.log()[slot_A]
    coef_A = torch.zeros_like(logprob_A) if glogprob_A is None else glogprob_A
    total_C = torch.zeros_like(sum_C).index_add_(0, slot_A, coef_A)
    entropy_part_A: Tensor | float = 0.0
    if gentropy_A is None:
        scale_C = -total_C / (sum_C * head.temperature)
        dz_CV = head.keep(exp_CV, scale_C, None, len(chunk.row_C))
    else:
        gain_C = torch.zeros_like(sum_C).index_add_(0, slot_A, gentropy_A)
        dz_CV = head.keep_entropy(exp_CV, sum_C, entropy_C, total_C, gain_C)
        finite_A = logprob_A.clamp_min(torch.finfo(head.wide).min)
        entropy_part_A = -gain_C[slot_A] * finite_A.exp() * (finite_A + entropy_C[slot_A])
    shared = len(slot_A) > len(chunk.row_C)
    target_A = label_gradient(dz_CV, at, logprob_A, coef_A, total_C[slot_A], shared)
    dz_CV[at] = head.at_labels(*at, target_A + entropy_part_A)
    return dz_CV
