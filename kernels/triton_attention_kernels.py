# mypy: disable-error-code="no-untyped-def"
"""Triton bodies of tree attention; `triton_attention` says what they compute and launches them.

Shared arguments: strides in elements over tokens (t) and heads (h); `walk` int32 [blocks, 4] and
`met` are `BlockLists`; end and position are int32 [T]; statistics float32 [H, stride_lse]. Program
i owns row i % blocks of `walk` for head i // blocks. PADDED is the width E rounded up to a power of
two. Blocks visible throughout lie inside the tokens, so only the others mask their loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_softmax import final_logit


@triton.jit
def _rows(
    p,
    o_t,
    stride,
    tokens,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows o_t of one head, zero beyond E and, if MASKED, beyond the last token."""
    o_e = tl.arange(0, PADDED)
    p_x = p + o_t.to(tl.int64)[:, None] * stride + o_e[None, :]
    if MASKED:
        if E == PADDED:
            x = tl.load(p_x, mask=(o_t < tokens)[:, None], other=0.0)
        else:
            x = tl.load(p_x, mask=(o_t < tokens)[:, None] & (o_e < E)[None, :], other=0.0)
    elif E == PADDED:
        x = tl.load(p_x)
    else:
        x = tl.load(p_x, mask=(o_e < E)[None, :], other=0.0)
    if INTERPRET:  # the interpreter multiplies the bits of bfloat16
        x = x.to(tl.float32)
    return x


@triton.jit
def _numbers(p, o_t, tokens, MASKED: tl.constexpr):
    """One number a token, 0 beyond the last token if MASKED."""
    return tl.load(p + o_t, mask=o_t < tokens, other=0) if MASKED else tl.load(p + o_t)


@triton.jit
def _store_rows(p, x, o_t, stride, tokens, E: tl.constexpr, PADDED: tl.constexpr):
    o_e = tl.arange(0, PADDED)
    p_x = p + o_t.to(tl.int64)[:, None] * stride + o_e[None, :]
    mask = (o_t < tokens)[:, None] & (o_e < E)[None, :]
    tl.store(p_x, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _visible(o_q, o_k, end, place_q, place_k, window, HAS_WINDOW: tl.constexpr):
    """The rule, for arguments that broadcast to the shape of the scores."""
    m = (o_k <= o_q) & (o_q < end)
    if HAS_WINDOW:
        m &= place_q - place_k < window
    return m


@triton.jit
def _keys_of(p_end, p_position, o_k, tokens, HAS_WINDOW: tl.constexpr):
    """end and position of keys; beyond the last token nothing is visible."""
    end = _numbers(p_end, o_k, tokens, True)
    place = end
    if HAS_WINDOW:
        place = _numbers(p_position, o_k, tokens, True)
    return end, place


@triton.jit(do_not_specialize=["tokens", "blocks", "groups", "window"])
def forward_blocks(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_end,
    p_position,
    p_walk,
    p_met,
    tokens,
    blocks,
    groups,
    window,
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_lse,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Output and log-sum-exp of one block of queries of one head."""
    i_h = (tl.program_id(0) // blocks).to(tl.int64)
    p_row = p_walk + (tl.program_id(0) % blocks) * 4
    o_q = tl.load(p_row) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    narrow: tl.constexpr = p_v.dtype.element_ty
    q = _rows(p_q + i_h * stride_qh, o_q, stride_qt, tokens, E, PADDED, True, INTERPRET)
    p_k += (i_h // groups) * stride_kh
    p_v += (i_h // groups) * stride_vh
    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    base_2 = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    for part in tl.static_range(2):  # visible throughout, then with a mask
        for i in range(tl.load(p_row + 1 + part), tl.load(p_row + 2 + part)):
            o_k = tl.load(p_met + i) * BLOCK_K + tl.arange(0, BLOCK_K)
            k = _rows(p_k, o_k, stride_kt, tokens, E, PADDED, part == 1, INTERPRET)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if HAS_CAP:
                s, _ = final_logit(s * scale, 0.0, 1.0, softcap, True)
            if part == 1:
                place_q = o_q
                if HAS_WINDOW:
                    place_q = _numbers(p_position, o_q, tokens, True)
                end, place_k = _keys_of(p_end, p_position, o_k, tokens, HAS_WINDOW)
                seen = _visible(
                    o_q[:, None],
                    o_k[None, :],
                    end[None, :],
                    place_q[:, None],
                    place_k[None, :],
                    window,
                    HAS_WINDOW,
                )
                s = tl.where(seen, s, float("-inf"))
            now = tl.maximum(top, tl.max(s, 1) * base_2)
            safe = now
            if part == 1:  # a row that has seen nothing yet
                safe = tl.where(now == float("-inf"), 0.0, now)
            p = tl.exp2(s * base_2 - safe[:, None])
            decay = tl.exp2(top - safe)
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None]
            v = _rows(p_v, o_k, stride_vt, tokens, E, PADDED, part == 1, INTERPRET)
            acc = tl.dot(p.to(narrow).to(v.dtype), v, acc, input_precision="ieee")
            top = now
    total = tl.where(o_q < tokens, total, 1.0)
    acc = acc / total[:, None]
    _store_rows(p_out + i_h * stride_oh, acc, o_q, stride_ot, tokens, E, PADDED)
    tl.store(p_lse + i_h * stride_lse + o_q, top + tl.log2(total), mask=o_q < tokens)


@triton.jit(do_not_specialize=["tokens"])
def row_deltas(
    p_out,
    p_grad,
    p_delta,
    tokens,
    stride_ot,
    stride_oh,
    stride_gt,
    stride_gh,
    stride_delta,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """delta = Σ_e dout · out, of one block of rows of one head."""
    blocks = tl.cdiv(tokens, BLOCK_Q)
    i_h = (tl.program_id(0) // blocks).to(tl.int64)
    o_q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    out = _rows(p_out + i_h * stride_oh, o_q, stride_ot, tokens, E, PADDED, True, True)
    grad = _rows(p_grad + i_h * stride_gh, o_q, stride_gt, tokens, E, PADDED, True, True)
    delta = tl.sum(out * grad, 1)
    tl.store(p_delta + i_h * stride_delta + o_q, delta, mask=o_q < tokens)


@triton.jit(do_not_specialize=["tokens", "blocks", "groups", "window"])
def query_gradients(
    p_q,
    p_k,
    p_v,
    p_grad,
    p_lse,
    p_delta,
    p_dq,
    p_end,
    p_position,
    p_walk,
    p_met,
    tokens,
    blocks,
    groups,
    window,
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_dqt,
    stride_dqh,
    stride_lse,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dq of one block of queries of one head."""
    i_h = (tl.program_id(0) // blocks).to(tl.int64)
    p_row = p_walk + (tl.program_id(0) % blocks) * 4
    o_q = tl.load(p_row) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    narrow: tl.constexpr = p_k.dtype.element_ty
    q = _rows(p_q + i_h * stride_qh, o_q, stride_qt, tokens, E, PADDED, True, INTERPRET)
    grad = _rows(p_grad + i_h * stride_gh, o_q, stride_gt, tokens, E, PADDED, True, INTERPRET)
    lse = _numbers(p_lse + i_h * stride_lse, o_q, tokens, True)
    delta = _numbers(p_delta + i_h * stride_lse, o_q, tokens, True)
    p_k += (i_h // groups) * stride_kh
    p_v += (i_h // groups) * stride_vh
    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    base_2 = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    for part in tl.static_range(2):  # visible throughout, then with a mask
        for i in range(tl.load(p_row + 1 + part), tl.load(p_row + 2 + part)):
            o_k = tl.load(p_met + i) * BLOCK_K + tl.arange(0, BLOCK_K)
            k = _rows(p_k, o_k, stride_kt, tokens, E, PADDED, part == 1, INTERPRET)
            v = _rows(p_v, o_k, stride_vt, tokens, E, PADDED, part == 1, INTERPRET)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if HAS_CAP:
                s, slope = final_logit(s * scale, 0.0, 1.0, softcap, True)
            s = s * base_2 - lse[:, None]
            if part == 1:
                place_q = o_q
                if HAS_WINDOW:
                    place_q = _numbers(p_position, o_q, tokens, True)
                end, place_k = _keys_of(p_end, p_position, o_k, tokens, HAS_WINDOW)
                seen = _visible(
                    o_q[:, None],
                    o_k[None, :],
                    end[None, :],
                    place_q[:, None],
                    place_k[None, :],
                    window,
                    HAS_WINDOW,
                )
                s = tl.where(seen, s, float("-inf"))
            p = tl.exp2(s)
            dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            if HAS_CAP:
                ds *= slope
            acc = tl.dot(ds.to(narrow).to(k.dtype), k, acc, input_precision="ieee")
    _store_rows(p_dq + i_h * stride_dqh, acc * scale, o_q, stride_dqt, tokens, E, PADDED)


@triton.jit(do_not_specialize=["tokens", "blocks", "groups", "window"])
def key_gradients(
    p_q,
    p_k,
    p_v,
    p_grad,
    p_lse,
    p_delta,
    p_dk,
    p_dv,
    p_end,
    p_position,
    p_walk,
    p_met,
    tokens,
    blocks,
    groups,
    window,
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_dkt,
    stride_dkh,
    stride_lse,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dk and dv of one block of keys of one key head, over all query heads that read it."""
    i_h = (tl.program_id(0) // blocks).to(tl.int64)
    p_row = p_walk + (tl.program_id(0) % blocks) * 4
    o_k = tl.load(p_row) * BLOCK_K + tl.arange(0, BLOCK_K)
    narrow: tl.constexpr = p_q.dtype.element_ty
    k = _rows(p_k + i_h * stride_kh, o_k, stride_kt, tokens, E, PADDED, True, INTERPRET)
    v = _rows(p_v + i_h * stride_vh, o_k, stride_vt, tokens, E, PADDED, True, INTERPRET)
    end, place_k = _keys_of(p_end, p_position, o_k, tokens, HAS_WINDOW)
    dk = tl.zeros([BLOCK_K, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_K, PADDED], tl.float32)
    base_2 = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    for i_g in range(0, groups):
        i_q = i_h * groups + i_g
        p_qh = p_q + i_q * stride_qh
        p_gh = p_grad + i_q * stride_gh
        p_lseh = p_lse + i_q * stride_lse
        p_deltah = p_delta + i_q * stride_lse
        for part in tl.static_range(2):  # visible throughout, then with a mask
            for i in range(tl.load(p_row + 1 + part), tl.load(p_row + 2 + part)):
                o_q = tl.load(p_met + i) * BLOCK_Q + tl.arange(0, BLOCK_Q)
                q = _rows(p_qh, o_q, stride_qt, tokens, E, PADDED, part == 1, INTERPRET)
                grad = _rows(p_gh, o_q, stride_gt, tokens, E, PADDED, part == 1, INTERPRET)
                lse = _numbers(p_lseh, o_q, tokens, part == 1)
                delta = _numbers(p_deltah, o_q, tokens, part == 1)
                s = tl.dot(k, tl.trans(q), input_precision="ieee")
                if HAS_CAP:
                    s, slope = final_logit(s * scale, 0.0, 1.0, softcap, True)
                s = s * base_2 - lse[None, :]
                if part == 1:
                    place_q = o_q
                    if HAS_WINDOW:
                        place_q = _numbers(p_position, o_q, tokens, True)
                    seen = _visible(
                        o_q[None, :],
                        o_k[:, None],
                        end[:, None],
                        place_q[None, :],
                        place_k[:, None],
                        window,
                        HAS_WINDOW,
                    )
                    s = tl.where(seen, s, float("-inf"))
                p = tl.exp2(s)
                dv = tl.dot(p.to(narrow).to(grad.dtype), grad, dv, input_precision="ieee")
                dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
                ds = p * (dp - delta[None, :])
                if HAS_CAP:
                    ds *= slope
                dk = tl.dot(ds.to(narrow).to(q.dtype), q, dk, input_precision="ieee")
    _store_rows(p_dk + i_h * stride_dkh, dk * scale, o_k, stride_dkt, tokens, E, PADDED)
    _store_rows(p_dv + i_h * stride_dkh, dv, o_k, stride_dkt, tokens, E, PADDED)
