"""The output layer split over ranks: each holds some rows of the head, all hold the hidden states.

    over the rows v of rank r:  m_r = max z,  s_r = Σ exp(z - m_r),  d_r = Σ exp(z - m_r) (z - m_r)
    M = max_r m_r,  S = Σ_r exp(m_r - M) s_r,  D = Σ_r exp(m_r - M) (d_r + (m_r - M) s_r)
    logprob = (z[y] - M) - log S,  H = log S - D / S,  p = exp(z - m_r) · exp(m_r - M) / S

Collectives, and why not fewer:

- statistics: one all-gather of [C, 3] and the label's logit [A] of each rank. An all-reduce would
  need two, because S and D need M first; gathering lets every rank combine the same numbers in
  rank order, so all ranks agree bit for bit and runs repeat. `vocabulary_parallel_surrogate`: one
  for each chunk of rows, since dZ replaces the chunk's logits where they lie (6·R·D·V over all
  ranks); `vocabulary_parallel_logprob`: one a call, and none in backward, which saves [R, 4].
- dh: one all-reduce of [R, D] a call in the accumulation dtype, rounded once behind it. dW and db
  stay with the rank that owns the rows.

Chunk heights follow from the largest slice, so that all ranks run the same chunks. A rank may hold
no row. Labels are ids of the whole vocabulary and belong to the rank whose range holds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import (
    check_head,
    check_index,
    check_range,
    check_sorted,
    check_tensor,
    refuse_second_derivative,
    without_autocast,
)
from .head_gradient import HeadGradient, check_head_gradient
from .rows import Chunk, Gradients, Head, Live, label_gradient, own_rows, wide_dtype
from .turn_surrogate import (
    Settings,
    SurrogateOutput,
    Terms,
    check_terms,
    objective,
    scaled,
    scored_terms,
    statistics,
)
from .vocabulary_slice import Shard, VocabularySlice, Whole


def vocabulary_parallel_surrogate(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    *,
    part: VocabularySlice,
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
) -> SurrogateOutput:
    """`turn_surrogate` with a head that is split over the ranks of `part`.

    head_VD, bias_V   this rank's rows, `part.rows` of them (0 allowed)
    action_A          ids of the whole vocabulary, in [0, part.total)
    all other arguments are equal on all ranks, and so are all results

    Backward gives the whole gradient of hidden_RD on every rank, and of head_VD and bias_V the
    rows that the rank holds. Every rank calls it, with gradients wanted on all or on none; a wrong
    argument raises `ValueError` on the ranks that have it, before any collective.

    Example: rank 0 holds logit [0], rank 1 logit [0]; action 1 gives both logprob -0.693.
    """
    _check_head(hidden_RD, head_VD, action_A, part, row_A, temperature, bias_V, softcap)
    check_head_gradient(head_gradient, head_VD, "torch")
    settings = Settings(clip_low, clip_high, temperature, kl_coef, softcap)
    given = Terms(
        action_A, own_rows(row_A, action_A), behavior_A, advantage_A, weight_A, reference_A
    )
    check_terms(given, settings, hidden_RD)
    live_A, terms = scored_terms(given, settings, wide_dtype(hidden_RD.dtype))
    wanted = torch.is_grad_enabled()
    with without_autocast(hidden_RD.device):
        loss, logprob_L, entropy_L = _Surrogate.apply(
            hidden_RD, head_VD, bias_V, terms, settings, part, head_gradient, wanted
        )
    if bool((logprob_L == -torch.inf).any()):  # the same on all ranks: only one has the bias
        bad = int(terms.label_A[logprob_L == -torch.inf][0])
        raise ValueError(
            f"action_A (scored actions): expected ids that bias_V allows, got {bad}, whose bias is "
            f"-inf; give such actions weight 0"
        )
    logprob_A = logprob_L.new_zeros(len(action_A)).index_put_((live_A,), logprob_L)
    entropy_A = entropy_L.new_zeros(len(action_A)).index_put_((live_A,), entropy_L)
    sums, peaks = statistics(terms, settings, logprob_L, entropy_L)
    return SurrogateOutput(loss, logprob_A, entropy_A, sums, peaks)


def vocabulary_parallel_logprob(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    *,
    part: VocabularySlice,
    row_A: Tensor | None = None,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    head_gradient: HeadGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_logprob` with a head that is split over the ranks of `part`: (logprob_A, entropy_A).

    Arguments, gradients and errors as in `vocabulary_parallel_surrogate`; upstream gradients must
    be equal on all ranks.
    """
    _check_head(hidden_RD, head_VD, action_A, part, row_A, temperature, bias_V, softcap)
    check_head_gradient(head_gradient, head_VD, "torch")
    row_A = own_rows(row_A, action_A)
    with without_autocast(hidden_RD.device):
        scored: tuple[Tensor, Tensor] = _Logprob.apply(
            hidden_RD, head_VD, bias_V, action_A, row_A, temperature, softcap, part, head_gradient
        )
    return scored


def _check_head(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    part: VocabularySlice,
    row_A: Tensor | None,
    temperature: float,
    bias_V: Tensor | None,
    softcap: float | None,
) -> None:
    for name, value in {"hidden_RD": hidden_RD, "action_A": action_A}.items():
        check_tensor(name, value)
    none_A, no_row_A = action_A[:0], None if row_A is None else row_A[:0]
    check_head(hidden_RD[:0], head_VD, none_A, no_row_A, temperature, bias_V, softcap)
    if head_VD.shape[0] != part.rows:
        raise ValueError(
            f"head_VD: expected the {part.rows} rows of rank {part.rank}, got {head_VD.shape[0]}"
        )
    check_index("action_A", action_A, (None,), hidden_RD)
    check_range("action_A", action_A, part.total)
    if row_A is None and hidden_RD.shape[0] != action_A.shape[0]:
        raise ValueError(
            f"action_A: expected one action for each of the {hidden_RD.shape[0]} rows of "
            f"hidden_RD, got {action_A.shape[0]}; pass row_A when they differ"
        )
    if row_A is not None:
        check_index("row_A", row_A, (action_A.shape[0],), hidden_RD)
        check_range("row_A", row_A, hidden_RD.shape[0])
        check_sorted("row_A", row_A)


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        terms: Terms,
        settings: Settings,
        part: VocabularySlice,
        head_gradient: HeadGradient | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants = [need and wanted for need in ctx.needs_input_grad[:3]]
        live = Live.of(terms.label_A, terms.row_A)
        head = Head(head_VD, bias_V, settings.temperature, settings.softcap, len(live.row_R))
        shard = Shard(head, part, head_VD.device.type)
        gradients = Gradients(hidden_RD, head_VD, bias_V, wants)
        logprob_A, entropy_A, loss_A = (
            torch.empty(len(terms.label_A), dtype=head.wide, device=head_VD.device)
            for _ in range(3)
        )
        hidden = hidden_RD.detach()
        for chunk in live.chunks(shard.chunk, shard.tile):
            x_CD = head.hidden(hidden, chunk.row_C)
            exp_CV, stat_3C, shifted_A = shard.exponentials(x_CD, chunk)
            whole = shard.whole(stat_3C, shifted_A, chunk.slot_A, chunk.label_A)
            of = slice(chunk.first, chunk.last)
            old_A, reference_A = (
                None if x is None else x[of] for x in (terms.behavior_A, terms.reference_A)
            )
            each_A, slope_A = objective(
                whole.logprob_A, old_A, terms.advantage_A[of], reference_A, settings
            )
            logprob_A[of], entropy_A[of] = whole.logprob_A, whole.entropy_C[chunk.slot_A]
            loss_A[of] = terms.weight_A[of] * each_A
            if any(wants):
                # exp(z - m_r) · over_C is p / temperature of this rank's columns.
                over_C = (stat_3C[0] - whole.max_C).exp() / (whole.sum_C * settings.temperature)
                coef_A = terms.weight_A[of] * slope_A
                _add_rows(shard, gradients, hidden, chunk, x_CD, exp_CV, over_C, whole, coef_A)
        part.add(gradients.dhidden_RD)
        ctx.save_for_backward(*gradients.sums())
        ctx.dtypes, ctx.head_gradient = gradients.dtypes, head_gradient
        ctx.mark_non_differentiable(logprob_A, entropy_A)
        ctx.set_materialize_grads(False)
        return loss_A.sum(dtype=torch.float64).to(head.wide), logprob_A, entropy_A

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("vocabulary_parallel_surrogate")
        return *scaled(ctx, upstream[0]), *(None,) * 5


def _add_rows(
    shard: Shard,
    gradients: Gradients,
    hidden_RD: Tensor,
    chunk: Chunk,
    x_CD: Tensor,
    exp_CV: Tensor,
    over_C: Tensor,
    whole: Whole,
    coef_A: Tensor,
) -> None:
    """Adds the gradients of a chunk; rows without a coefficient leave before the products."""
    head, slot_A = shard.head, chunk.slot_A
    live_C = torch.zeros(len(x_CD), dtype=torch.bool, device=x_CD.device)
    live_C[slot_A[coef_A != 0]] = True
    kept_N = live_C.nonzero().squeeze(1)
    if not len(kept_N):
        return
    total_C = torch.zeros_like(over_C).index_add_(0, slot_A, coef_A)
    row_N = None
    if len(kept_N) < len(chunk.row_C):
        row_N = kept_N
        x_CD = head.hidden(hidden_RD, chunk.row_C[row_N])
    dz_NV = head.keep(exp_CV, -total_C * over_C, row_N, len(kept_N))
    owned_A = shard.owned(chunk.label_A)
    owned_A = owned_A[live_C[slot_A[owned_A]]]
    slot_A, label_A = slot_A[owned_A], chunk.label_A[owned_A] - shard.part.start
    at = ((live_C.cumsum(0) - 1)[slot_A], label_A)
    shared = len(chunk.label_A) > len(chunk.row_C)
    target_A = label_gradient(
        dz_NV, at, whole.logprob_A[owned_A], coef_A[owned_A], total_C[slot_A], shared
    )
    dz_NV[at] = head.at_labels(slot_A, label_A, target_A)
    gradients.add(head, chunk.row_C if row_N is None else chunk.row_C[row_N], dz_NV, x_CD)


class _Logprob(torch.autograd.Function):
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
        part: VocabularySlice,
        head_gradient: HeadGradient | None,
    ) -> tuple[Tensor, Tensor]:
        live = Live.of(action_A, row_A)
        head = Head(head_VD, bias_V, temperature, softcap, len(live.row_R))
        shard = Shard(head, part, head_VD.device.type)
        empty = torch.empty(0, dtype=head.wide, device=head_VD.device)
        stats, shifts = [empty.view(3, 0)], [empty]
        for chunk in live.chunks(shard.chunk, shard.tile):
            x_CD = head.hidden(hidden_RD.detach(), chunk.row_C)
            _, stat_3C, shifted_A = shard.exponentials(x_CD, chunk)
            stats.append(stat_3C[:, : len(chunk.row_C)])
            shifts.append(shifted_A)
        if len(live.row_R):
            whole = shard.whole(torch.cat(stats, 1), torch.cat(shifts), live.slot_A, live.label_A)
        else:
            whole = Whole(*(empty for _ in Whole._fields))
        # By hidden row, so that backward finds the rows that its upstream gradient leaves.
        stat_4R = empty.new_ones(4, len(hidden_RD))
        stat_4R[:, live.row_R] = torch.stack(whole[:4])
        ctx.save_for_backward(hidden_RD, head_VD, bias_V, action_A, row_A, stat_4R, whole.logprob_A)
        ctx.temperature, ctx.softcap, ctx.part = temperature, softcap, part
        ctx.head_gradient = head_gradient
        ctx.set_materialize_grads(False)
        return whole.logprob_A.clone(), whole.entropy_C[live.slot_A]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 9
        refuse_second_derivative("vocabulary_parallel_logprob")
        hidden_RD, head_VD, bias_V, action_A, row_A, stat_4R, logprob_A = ctx.saved_tensors
        live_A = torch.zeros_like(action_A, dtype=torch.bool)
        for g in upstream:
            if g is not None:
                live_A |= g != 0
        glogprob_L, gentropy_L = (None if g is None else g[live_A] for g in upstream)
        live = Live.of(action_A[live_A], row_A[live_A])
        head = Head(head_VD, bias_V, ctx.temperature, ctx.softcap, len(live.row_R))
        shard = Shard(head, ctx.part, head_VD.device.type)
        wants, sink = ctx.needs_input_grad[:3], ctx.head_gradient
        shared_VD = sink.sum_VD if sink is not None and wants[1] else None
        gradients = Gradients(hidden_RD, head_VD, bias_V, wants, shared_VD)
        for chunk in live.chunks(shard.chunk, shard.tile):
            x_CD = head.hidden(hidden_RD, chunk.row_C)
            of = slice(chunk.first, chunk.last)
            glogprob, gentropy = (None if g is None else g[of] for g in (glogprob_L, gentropy_L))
            stat_4C = torch.nn.functional.pad(
                stat_4R[:, chunk.row_C], (0, len(x_CD) - len(chunk.row_C)), value=1.0
            )
            max_C, sum_C, log_C, entropy_C = stat_4C
            whole = Whole(max_C, sum_C, log_C, entropy_C, logprob_A[live_A][of])
            with without_autocast(hidden_RD.device):
                dz_CV = _chunk_gradient(shard, chunk, x_CD, whole, glogprob, gentropy)
                gradients.add(head, chunk.row_C, dz_CV, x_CD)
        ctx.part.add(gradients.dhidden_RD)
        return *gradients.result(), *(None,) * 6


def _chunk_gradient(
    shard: Shard,
    chunk: Chunk,
    x_CD: Tensor,
    whole: Whole,
    glogprob_A: Tensor | None,
    gentropy_A: Tensor | None,
) -> Tensor:
    """dZ of this rank's columns of one chunk by the raw products, in the shared buffer."""
    head, slot_A, count = shard.head, chunk.slot_A, len(chunk.row_C)
    for z_V, (r0, r1, _, _) in shard.logits(x_CD, chunk):
        z_V.sub_(whole.max_C[r0:r1].unsqueeze(1)).exp_()
    exp_CV = head.buffer_CV[: len(x_CD)]
    exp_CV[count:] = 0  # rows of padding have no maximum to subtract
    coef_A = torch.zeros_like(whole.logprob_A) if glogprob_A is None else glogprob_A
    total_C = torch.zeros_like(whole.sum_C).index_add_(0, slot_A, coef_A)
    if gentropy_A is None:
        dz_CV = head.keep(exp_CV, -total_C / (whole.sum_C * head.temperature), None, count)
    else:
        gain_C = torch.zeros_like(whole.sum_C).index_add_(0, slot_A, gentropy_A)
        dz_CV = head.keep_entropy(
            exp_CV, whole.sum_C, whole.entropy_C - whole.log_C, total_C, gain_C
        )
    owned_A = shard.owned(chunk.label_A)
    shared = len(slot_A) > count
    slot_A, label_A = slot_A[owned_A], chunk.label_A[owned_A] - shard.part.start
    own_A = whole.logprob_A[owned_A]
    target_A = label_gradient(
        dz_CV, (slot_A, label_A), own_A, coef_A[owned_A], total_C[slot_A], shared
    )
    if gentropy_A is not None:
        finite_A = own_A.clamp_min(torch.finfo(head.wide).min)
        entropy_A = whole.entropy_C[slot_A]
        target_A = target_A - gain_C[slot_A] * finite_A.exp() * (finite_A + entropy_A)
    dz_CV[slot_A, label_A] = head.at_labels(slot_A, label_A, target_A)
    return dz_CV
