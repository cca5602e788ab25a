"""Tree attention on Triton: forward, and backward by queries and by keys.

    s = cap(scale · q kᵀ)     p = exp(s - logsumexp s)          out = p v
    delta = rowsum(dout · out)     ds = p · (dout vᵀ - delta)
    dq = scale · ds k         dk = scale · Σ dsᵀ q              dv = Σ pᵀ dout    (Σ: grouped heads)

A program owns one block of queries (or of keys) of one head and walks the list of blocks that it
meets (`TreePlan`): first those that are visible throughout, without a mask, then those that need
one, where visible(q, k) = k <= q < end[k] is decided per pair. q, k and v are read where they lie,
with any strides over tokens and heads; grouped heads read their key head in place, and the program
of a block of keys adds up the query heads of its key head itself. So there are no atomics and no
copies, each sum has one fixed order, and a call repeats itself bit for bit.

Exponentials are base 2; accumulators, statistics and ds are float32, and p and ds enter the second
product in the operands' dtype. float32 operands multiply as float32 (not TF32). Widths that are no
power of two are padded inside the program, by masks on the loads.

Saved for backward: q, k, v, out, and the log-sum-exp of each row in base 2, float32 [H, T]. Extra
memory in backward: delta, float32 [H, T]. Programs with the longest lists start first; heads are
the slow axis of the grid, so the keys of one head stay in cache while its queries run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .kept import kept
from .tree_plan import BlockLists, TreePlan
from .triton_attention_kernels import (
    forward_blocks,
    key_gradients,
    query_gradients,
    row_deltas,
)
from .triton_softmax import Configuration, configuration

ALIGN = 16  # rows of statistics begin at multiples of 64 bytes
DELTA = {"BLOCK_Q": 32, "num_warps": 4, "num_stages": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of one kernel, its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {
            "BLOCK_Q": self.queries,
            "BLOCK_K": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True, slots=True)
class Shapes:
    """Blocks of the three kernels that multiply."""

    forward: Shape
    by_query: Shape
    by_key: Shape


# The largest blocks that spill nothing on sm_80 (255 registers, 163 KiB): there the operands that
# stay fixed in a loop are kept in registers, so blocks of keys in backward, with two accumulators
# and two fixed operands, are smaller (at 256 a cap on the scores must fit as well). Forward and
# backward by queries share their lists at 64, 128 and 256. Masks for padding cost registers, hence
# smaller blocks for 80 and 96. float32 multiplies without matrix instructions: more warps, smaller
# blocks.
HALF = {
    64: Shapes(Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(64, 128, 8, 3)),
    96: Shapes(Shape(128, 64, 8, 3), Shape(64, 64, 8, 3), Shape(32, 64, 8, 3)),
    128: Shapes(Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(64, 64, 8, 3)),
    256: Shapes(Shape(64, 32, 8, 2), Shape(64, 32, 8, 2), Shape(32, 32, 8, 2)),
}
SINGLE = {
    64: Shapes(Shape(32, 64, 8, 2), Shape(32, 32, 4, 2), Shape(32, 32, 8, 2)),
    128: Shapes(Shape(16, 32, 8, 2), Shape(32, 32, 8, 2), Shape(32, 32, 8, 2)),
    256: Shapes(Shape(16, 32, 8, 2), Shape(16, 16, 4, 2), Shape(16, 32, 8, 2)),
}


def shapes(width: int, dtype: torch.dtype) -> Shapes:
    """From (E, dtype), never from T: the row of the next larger width.

    Example: width 80 in bfloat16 takes the row of 96, in float32 that of 128.
    """
    table = SINGLE if dtype == torch.float32 else HALF
    return table[min(most for most in table if most >= width)]


def attend(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Differentiable once; arguments as `tree_attention` has checked them."""
    out_THE: Tensor = _TreeAttention.apply(q_THE, k_TKE, v_TKE, plan, scale, softcap)
    return out_THE


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        plan: TreePlan,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        q_THE, k_TKE, v_TKE = (_readable(x) for x in (q_THE, k_TKE, v_TKE))
        call = _Call(plan, q_THE, k_TKE, v_TKE, scale, softcap)
        out_THE, lse_HT = kept(call.forward, (q_THE, k_TKE, v_TKE))
        ctx.save_for_backward(q_THE, k_TKE, v_TKE, out_THE, lse_HT)
        ctx.plan, ctx.scale, ctx.softcap = plan, scale, softcap
        return out_THE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, k_TKE, v_TKE, out_THE, lse_HT = ctx.saved_tensors
        grad_THE = _readable(grad_THE)
        call = _Call(ctx.plan, q_THE, k_TKE, v_TKE, ctx.scale, ctx.softcap)
        delta_HT = _statistic(q_THE)
        call.delta(out_THE, grad_THE, delta_HT)
        dq_THE, dk_TKE, dv_TKE = None, None, None
        if ctx.needs_input_grad[0]:
            dq_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
            call.by_query(grad_THE, lse_HT, delta_HT, dq_THE)
        if any(ctx.needs_input_grad[1:3]):
            dk_TKE, dv_TKE = (
                torch.empty(k_TKE.shape, dtype=k_TKE.dtype, device=k_TKE.device) for _ in "kv"
            )
            call.by_key(grad_THE, lse_HT, delta_HT, dk_TKE, dv_TKE)
        return dq_THE, dk_TKE, dv_TKE, None, None, None


def _readable(x_THE: Tensor) -> Tensor:
    """Unit stride over E; other strides are the kernel's business."""
    return x_THE.detach() if x_THE.stride(2) == 1 else x_THE.detach().contiguous()


def _statistic(q_THE: Tensor) -> Tensor:
    """float32 [H, T], rows aligned."""
    tokens, heads, _ = q_THE.shape
    stride = -(-tokens // ALIGN) * ALIGN
    return torch.empty(heads, stride, dtype=torch.float32, device=q_THE.device)[:, :tokens]


def _constants(width: int, windowed: bool, capped: bool, *, interpret: bool) -> dict[str, int]:
    return {
        "HAS_WINDOW": windowed,
        "HAS_CAP": capped,
        "E": width,
        "PADDED": triton.next_power_of_2(width),
        "INTERPRET": interpret,
    }


class _Call:
    """Launches over one plan and one q, k, v."""

    def __init__(
        self,
        plan: TreePlan,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        self.plan, self.scale, self.softcap = plan, float(scale), float(softcap or 1.0)
        self.q, self.k, self.v = q_THE, k_TKE, v_TKE
        self.tokens, self.heads, self.width = q_THE.shape
        self.key_heads = k_TKE.shape[1]
        self.groups = self.heads // self.key_heads
        self.shapes = shapes(self.width, q_THE.dtype)
        kind = plan.window is not None, softcap is not None
        self.constants = _constants(self.width, *kind, interpret=q_THE.device.type == "cpu")

    def forward(self) -> list[Tensor]:
        """The result and its statistic."""
        out_THE = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        lse_HT = _statistic(self.q)
        shape = self.shapes.forward
        lists = self.plan.by_query(shape.queries, shape.keys)
        self._launch(
            forward_blocks, lists, self.heads, shape, (), (out_THE, lse_HT), (out_THE,), lse_HT
        )
        return [out_THE, lse_HT]

    def delta(self, out_THE: Tensor, grad_THE: Tensor, delta_HT: Tensor) -> None:
        programs = triton.cdiv(self.tokens, DELTA["BLOCK_Q"]) * self.heads
        if programs:
            row_deltas[(programs,)](
                out_THE,
                grad_THE,
                delta_HT,
                self.tokens,
                *out_THE.stride()[:2],
                *grad_THE.stride()[:2],
                delta_HT.stride(0),
                E=self.width,
                PADDED=self.constants["PADDED"],
                **DELTA,
            )

    def by_query(self, grad_THE: Tensor, lse_HT: Tensor, delta_HT: Tensor, dq_THE: Tensor) -> None:
        shape = self.shapes.by_query
        lists = self.plan.by_query(shape.queries, shape.keys)
        reads, writes = (grad_THE, lse_HT, delta_HT), (dq_THE,)
        strided = (grad_THE, dq_THE)
        self._launch(query_gradients, lists, self.heads, shape, reads, writes, strided, lse_HT)

    def by_key(
        self,
        grad_THE: Tensor,
        lse_HT: Tensor,
        delta_HT: Tensor,
        dk_TKE: Tensor,
        dv_TKE: Tensor,
    ) -> None:
        shape = self.shapes.by_key
        lists = self.plan.by_key(shape.queries, shape.keys)
        reads, writes = (grad_THE, lse_HT, delta_HT), (dk_TKE, dv_TKE)
        strided = (grad_THE, dk_TKE)
        self._launch(key_gradients, lists, self.key_heads, shape, reads, writes, strided, lse_HT)

    def _launch(
        self,
        kernel: Any,
        lists: BlockLists,
        heads: int,
        shape: Shape,
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        strided: tuple[Tensor, ...],
        statistic_HT: Tensor,
    ) -> None:
        """Arguments in the order that the kernels share."""
        blocks = len(lists.walk_N4)
        if not blocks * heads:
            return
        end_T = self.plan.end_T
        strides = [n for x in (self.q, self.k, self.v, *strided) for n in x.stride()[:2]]
        kernel[(blocks * heads,)](
            self.q,
            self.k,
            self.v,
            *reads,
            *writes,
            end_T,
            self.plan.place_T if self.constants["HAS_WINDOW"] else end_T,
            lists.walk_N4,
            lists.met,
            self.tokens,
            blocks,
            self.groups,
            self.plan.window or 0,
            self.scale,
            self.softcap,
            *strides,
            statistic_HT.stride(0),
            **self.constants,
            **shape.launch,
        )


def configurations() -> list[Configuration]:
    """Every width in bfloat16, the most common one with a window, Gemma's with both that and a cap
    on the scores, the larger ones in float32."""
    cases = [(width, "bf16", "plain") for width in (64, 80, 96, 128, 256)]
    cases += [(128, "bf16", "window"), (256, "bf16", "window, cap")]
    cases += [(128, "fp32", "plain"), (256, "fp32", "plain")]
    found = []
    for width, narrow, kind in cases:
        chosen = shapes(width, torch.float32 if narrow == "fp32" else torch.bfloat16)
        for kernel, shape in (
            (forward_blocks, chosen.forward),
            (query_gradients, chosen.by_query),
            (key_gradients, chosen.by_key),
        ):
            found.append(_configuration(kernel, shape.launch, width, narrow, kind))
    for width, narrow in ((64, "bf16"), (256, "fp32")):
        found.append(_configuration(row_deltas, DELTA, width, narrow, "plain"))
    return found


def _configuration(
    kernel: Any, launch: Mapping[str, int], width: int, narrow: str, kind: str
) -> Configuration:
    constants = _constants(width, "window" in kind, "cap" in kind, interpret=False) | dict(launch)
    constants = {n: c for n, c in constants.items() if n in kernel.arg_names}
    types = dict.fromkeys(("p_lse", "p_delta"), "*fp32") | dict.fromkeys(
        ("scale", "softcap"), "fp32"
    )
    types |= dict.fromkeys(("p_end", "p_position", "p_walk", "p_met"), "*i32")
    for name in kernel.arg_names:
        if name not in types:
            types[name] = f"*{narrow}" if name.startswith("p_") else "i32"
    return configuration(
        f"{kernel.__name__}/E{width}/{narrow}/{kind}",
        kernel,
        types,
        constants,
        tuple(name for name in kernel.arg_names if name.startswith("stride_")),
        (launch["num_warps"], launch["num_stages"]),
    )
