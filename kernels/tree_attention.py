"""Attention over packed trees, block-sparse: one integer per token is the whole mask.

    visible(q, k) = k <= q < end[k]     (and position[q] - position[k] < window)
    out_q = Σ_k softmax_k(cap(scale · q·k)) v_k over the visible keys

`TreePlan` finds once per packed batch which queries meet which keys; all layers share it. The
implementations are `torch_attention`, matrix products over tiles for any device and dtype,
`triton_attention`, fused kernels for CUDA, and for comparison, or where they are faster,
`flex_attention` and `flash_attention`, which run other people's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import flash_attention, flex_attention, reference, torch_attention
from .dispatch import check_float, check_index, check_number, choose, triton_obstacle
from .tree_plan import TreePlan

WIDTHS = (16, 32, 64, 80, 96, 128, 256)  # head widths that the Triton kernels have tiles for


def tree_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    position_T: Tensor | None = None,
    plan: TreePlan | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of every query over the keys that it sees; grouped-query heads: out_THE.

    q_THE [T, H, E], k_TKE and v_TKE [T, K, E] with H a multiple of K (query head h reads key head
    h // (H / K)), one floating dtype. end_T as in `TreePlan`; scale > 0 defaults to 1 / sqrt(E);
    scores are capped as softcap · tanh(score / softcap). `plan` is `TreePlan(end_T, window,
    position_T)` built before, and then `end_T` is not read; without one it is built here.
    Differentiable once, by q, k and v; accumulation is float32 (float64 in float64). T = 0 and T
    not a multiple of any block are exact.

    `impl="auto"` is Triton on CUDA, and torch for float64 and for head widths that Triton has no
    tiles for (`WIDTHS`). Raises `ValueError` for a wrong shape, dtype or device, H not a multiple
    of K, a plan of another length or window, or an `impl` that cannot run these arguments.

    Example: end_T = [3, 2, 3] lets token 2 see tokens 0 and 2 but not its sibling 1; with equal
    scores out[2] = (v[0] + v[2]) / 2.
    """
    width = _check(q_THE, k_TKE, v_TKE, end_T, plan, window)
    if width not in WIDTHS:
        impl = _without_triton(impl, width)
    run = choose(impl, IMPLEMENTATIONS, q_THE.device, q_THE.dtype)
    scale = width**-0.5 if scale is None else scale
    check_number("scale", scale, 0.0, open_low=True)
    if softcap is not None:
        check_number("softcap", softcap, 0.0, open_low=True)
    return run(q_THE, k_TKE, v_TKE, plan or TreePlan(end_T, window, position_T), scale, softcap)


def _check(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    plan: TreePlan | None,
    window: int | None,
) -> int:
    check_float("q_THE", q_THE, (None, None, None), q_THE)
    tokens, heads, width = q_THE.shape
    check_float("k_TKE", k_TKE, (tokens, None, width), q_THE)
    check_float("v_TKE", v_TKE, tuple(k_TKE.shape), q_THE)
    for name, x in (("k_TKE", k_TKE), ("v_TKE", v_TKE)):
        if x.dtype != q_THE.dtype:
            raise ValueError(f"{name}: expected {q_THE.dtype} like q_THE, got {x.dtype}")
    if not (heads and width):
        raise ValueError(
            f"q_THE: expected at least one head of at least one number, got {heads} "
            f"heads of {width}"
        )
    if plan is None:
        check_index("end_T", end_T, (tokens,), q_THE)
    elif not isinstance(plan, TreePlan):
        raise ValueError(f"plan: expected a TreePlan, got {type(plan).__name__}")
    if not k_TKE.shape[1] or heads % k_TKE.shape[1]:
        raise ValueError(
            f"q_THE: expected a multiple of the {k_TKE.shape[1]} key heads, got {heads} query heads"
        )
    if plan is not None and (plan.tokens, plan.window) != (tokens, window):
        raise ValueError(
            f"plan: expected one for {tokens} tokens and window {window}, "
            f"got {plan.tokens} tokens and window {plan.window}"
        )
    return int(width)


def _without_triton(impl: str, width: int) -> str:
    """The implementation for a width that Triton has no tiles for."""
    if impl == "triton":
        raise ValueError(
            f"impl='triton': expected a head width of {', '.join(map(str, WIDTHS))}, got {width}; "
            f"impl='torch' does any width"
        )
    return "torch" if impl == "auto" else impl


def _triton(*arguments: Any) -> Tensor:
    from . import triton_attention

    return triton_attention.attend(*arguments)


def _reference(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None,
) -> Tensor:
    return reference.tree_attention(
        q_THE, k_TKE, v_TKE, plan.end_T, scale, plan.window, plan.place_T, softcap
    )


# All take (q_THE, k_TKE, v_TKE, plan, scale, softcap). Looked up when called, for a test or a user
# may replace one.
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "triton": _triton,
    "torch": lambda *arguments: torch_attention.attend(*arguments),
    "flex": lambda *arguments: flex_attention.attend(*arguments),
    "flash": lambda *arguments: flash_attention.attend(*arguments),
    "reference": _reference,
}


def attention_implementations(device: torch.device) -> dict[str, str | None]:
    """Every implementation, with the reason why it cannot train on `device` (None: it can).

    Example: on a CPU "torch" and "reference" can, "flash" needs a CUDA device.
    """
    remedy = "use auto, or torch, which runs on any device"
    cuda = None if device.type == "cuda" else f"expected a CUDA device, got {device.type}; {remedy}"
    package = None if flash_attention.installed() else "the package flash-attn is not installed"
    reasons = {"triton": triton_obstacle(device), "flex": cuda, "flash": cuda or package}
    return {name: reasons.get(name) for name in IMPLEMENTATIONS}
