"""Tree attention by flash-attn's variable-length kernels: two calls, merged by log-sum-exp.

A packed tree is a list of segments: runs of tokens of which each sees the one before it. Every
token of a segment sees the same ancestors, the tokens before the segment that end behind its
first token.

    within:   each segment is one causal sequence                        q, k, v as they lie
    above:    segments with the same ancestors are one query sequence,   q and k, v gathered
              their ancestors one key sequence, no mask

    lse = logaddexp(lse_within, lse_above)       out = Σ exp(lse_i - lse) out_i

Backward gives both calls the merged output and log-sum-exp, from which flash-attn recomputes the
merged probabilities: the sum of both results is the exact gradient. Gathered gradients of keys are
added by a sorted accumulation, which is deterministic.

Needs the package flash-attn, a CUDA device, float16 or bfloat16, heads of at most 256; there is no
sliding window here, because within and above are measured from different ends.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tree_plan import TreePlan

WIDEST = 256  # head width that flash-attn does


@dataclass(frozen=True, slots=True)
class Calls:
    """flash-attn's pair of low-level functions, by position as its release 2.7 and 2.8 have them.

    forward(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, scale, causal, softcap=)
    -> (out, lse [H, T], ...); backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, longest_q,
    longest_k, dropout, scale, causal, left, right, softcap, slopes, deterministic) fills dq, dk and
    dv.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sequences:
    """One varlen call: cumulative lengths int32 [N+1] of queries and keys, and the longest."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Both calls of a plan; `query_N` and `key_N` gather the second one's rows."""

    within: Sequences
    above: Sequences | None  # None: no segment has ancestors
    query_N: Tensor
    key_N: Tensor


def attend(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Same contract as `tree_attention` with a plan; used through its `impl="flash"`."""
    reason = obstacle(q_THE, plan)
    if reason:
        raise ValueError(f"impl='flash': {reason}; choose 'triton' or 'flex'")
    calls = installed()
    assert calls is not None
    return merged(q_THE, k_TKE, v_TKE, plan, scale, softcap, calls)


def obstacle(q_THE: Tensor, plan: TreePlan) -> str | None:
    """Why flash-attn cannot run these arguments."""
    if plan.window is not None:
        return f"expected attention over the whole history, got a window of {plan.window}"
    if q_THE.device.type != "cuda":
        return f"expected a CUDA tensor, got one on {q_THE.device.type}"
    if q_THE.dtype not in (torch.float16, torch.bfloat16):
        return f"expected float16 or bfloat16, got {q_THE.dtype}"
    if q_THE.shape[2] > WIDEST or q_THE.shape[2] % 8:
        return f"expected a head width up to {WIDEST} in steps of 8, got {q_THE.shape[2]}"
    if installed() is None:
        return "expected the package flash-attn, which is not installed; pip install flash-attn"
    return None


@functools.cache
def installed() -> Calls | None:
    """flash-attn's functions, or None without the package."""
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None
    return Calls(interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward)


def merged(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None,
    calls: Calls,
) -> Tensor:
    """The two calls and their merge, with whatever pair of functions has flash-attn's contract."""
    if not plan.tokens:
        return q_THE + 0 * (k_TKE.sum() + v_TKE.sum())
    made = plan.derived("flash", layout)
    out: Tensor = _Flash.apply(q_THE, k_TKE, v_TKE, made, scale, softcap or 0.0, calls)
    return out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        layout: Layout,
        scale: float,
        softcap: float,
        calls: Calls,
    ) -> Tensor:
        ctx.rest = layout, scale, softcap, calls
        out_THE, lse_HT = _forward(calls, (q_THE, k_TKE, v_TKE), layout.within, scale, softcap)
        if layout.above is not None:
            at = layout.query_N
            rows = q_THE[at], k_TKE[layout.key_N], v_TKE[layout.key_N]
            above_NHE, above_HN = _forward(calls, rows, layout.above, scale, softcap)
            within_HN = lse_HT[:, at]
            merged_HN = torch.logaddexp(within_HN, above_HN)

            def share(lse_HN: Tensor) -> Tensor:
                return torch.exp(lse_HN - merged_HN).T.unsqueeze(2)

            mixed_NHE = share(within_HN) * out_THE[at] + share(above_HN) * above_NHE
            out_THE = out_THE.index_copy(0, at, mixed_NHE.to(out_THE.dtype))
            lse_HT = lse_HT.index_copy(1, at, merged_HN)
        ctx.save_for_backward(q_THE, k_TKE, v_TKE, out_THE, lse_HT)
        return out_THE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, k_TKE, v_TKE, out_THE, lse_HT = ctx.saved_tensors
        layout, scale, softcap, calls = ctx.rest
        saved = grad_THE.contiguous(), q_THE, k_TKE, v_TKE, out_THE, lse_HT
        dq, dk, dv = _backward(calls, saved, layout.within, scale, softcap)
        if layout.above is not None:
            query, key = layout.query_N, layout.key_N
            rows = grad_THE[query], q_THE[query], k_TKE[key], v_TKE[key], out_THE[query]
            saved = *rows, lse_HT[:, query].contiguous()
            above = _backward(calls, saved, layout.above, scale, softcap)
            # In float32: a context token collects a gradient from every branch below it.
            dq, dk, dv = (
                x.float().index_put((at,), more.float(), accumulate=True).to(x.dtype)
                for x, at, more in zip((dq, dk, dv), (query, key, key), above, strict=True)
            )
        return dq, dk, dv, None, None, None, None


def _forward(
    calls: Calls, qkv: tuple[Tensor, Tensor, Tensor], s: Sequences, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    lengths = s.cu_q, s.cu_k, s.longest_q, s.longest_k
    out, lse, *_ = calls.forward(*qkv, *lengths, 0.0, scale, s.causal, softcap=softcap)
    return out, lse


def _backward(
    calls: Calls, saved: tuple[Tensor, ...], s: Sequences, scale: float, softcap: float
) -> list[Tensor]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[1:4]]
    lengths = s.cu_q, s.cu_k, s.longest_q, s.longest_k
    calls.backward(*saved, *grads, *lengths, 0.0, scale, s.causal, -1, -1, softcap, None, True)
    return grads


def layout(plan: TreePlan) -> Layout:
    """Segments, and for every branching point its ancestors and the segments below it."""
    end, index = plan.end_T.cpu().numpy(), np.arange(plan.tokens)
    start_S = np.flatnonzero(np.append(True, end[:-1] <= index[1:]))
    stop_S = np.append(start_S[1:], plan.tokens)
    branches: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}  # by the last ancestor
    path: list[np.ndarray] = []  # indices of the tokens that are visible, by segment
    for start, stop in zip(start_S.tolist(), stop_S.tolist(), strict=True):
        # Ends only fall along a segment: what is left of it is its beginning.
        path = [at[: np.count_nonzero(end[at] > start)] for at in path if end[at[0]] > start]
        own = np.arange(start, stop)
        if path:
            last = int(path[-1][-1])
            if last not in branches:
                branches[last] = np.concatenate(path), []
            branches[last][1].append(own)
        path.append(own)
    within = _sequences(stop_S - start_S, stop_S - start_S, True, plan.device)
    if not branches:
        none = torch.zeros(0, dtype=torch.int64, device=plan.device)
        return Layout(within, None, none, none)
    keys = [ancestors for ancestors, _ in branches.values()]
    queries = [np.concatenate(segments) for _, segments in branches.values()]
    above = _sequences([len(q) for q in queries], [len(k) for k in keys], False, plan.device)
    query_N, key_N = (torch.from_numpy(np.concatenate(x)).to(plan.device) for x in (queries, keys))
    return Layout(within, above, query_N, key_N)


def _sequences(query_N: Any, key_N: Any, causal: bool, device: torch.device) -> Sequences:
    def cumulative(lengths: Any) -> Tensor:
        return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)

    longest = int(np.max(query_N)), int(np.max(key_N))
    return Sequences(cumulative(query_N), cumulative(key_N), *longest, causal)
