"""Attention over packed trees, block-sparse: one integer per token is the whole mask.

    visible(q, k) = k <= q < end[k]     (and position[q] - position[k] < window)
    out_q = Σ_k softmax_k(scale · q·k) v_k over the visible keys

`TreePlan` finds once per packed batch which queries meet which keys; all layers share it. The
implementations are `torch_attention`, matrix products over tiles for any device and dtype, and
`triton_attention`, fused kernels for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import reference, torch_attention
from .dispatch import check_float, check_index, check_number, choose
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
    position_T: Tensor | None = None,
    plan: TreePlan | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of every query over the keys that it sees; grouped-query heads: out_THE.

    q_THE [T, H, E], k_TKE and v_TKE [T, K, E] with H a multiple of K (query head h reads key head
    h // (H / K)), one floating dtype. end_T as in `TreePlan`; scale > 0 defaults to 1 / sqrt(E).
    `plan` is `TreePlan(end_T, window, position_T)` built before; without one it is built here.
    Differentiable once, by q, k and v; accumulation is float32 (float64 in float64). T = 0 and T
    not a multiple of any block are exact. `impl="auto"` is Triton on CUDA, and torch for float64
    and for head widths that Triton has no tiles for (`WIDTHS`). Raises `ValueError` for a wrong
    shape, dtype or device, H not a multiple of K, a plan of another length or window, or a width
    outside `WIDTHS` with impl="triton".

    Example: end_T = [3, 2, 3] lets token 2 see tokens 0 and 2 but not its sibling 1; with equal
    scores out[2] = (v[0] + v[2]) / 2.
    """
    width = _check(q_THE, k_TKE, v_TKE, end_T, plan, window)
    if width not in WIDTHS:
        impl = _without_triton(impl, width)
    run = choose(impl, IMPLEMENTATIONS, q_THE.device, q_THE.dtype)
    scale = width**-0.5 if scale is None else scale
    check_number("scale", scale, 0.0, open_low=True)
    return run(q_THE, k_TKE, v_TKE, end_T, scale, window, position_T, plan)


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
    check_index("end_T", end_T, (tokens,), q_THE)
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


def _torch(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    scale: float,
    window: int | None,
    position_T: Tensor | None,
    plan: TreePlan | None,
) -> Tensor:
    plan = plan or TreePlan(end_T, window, position_T)
    return torch_attention.attend(q_THE, k_TKE, v_TKE, scale, plan)


def _triton(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    scale: float,
    window: int | None,
    position_T: Tensor | None,
    plan: TreePlan | None,
) -> Tensor:
    from . import triton_attention

    plan = plan or TreePlan(end_T, window, position_T)
    return triton_attention.attend(q_THE, k_TKE, v_TKE, scale, plan)


def _reference(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    scale: float,
    window: int | None,
    position_T: Tensor | None,
    plan: TreePlan | None,
) -> Tensor:
    return reference.tree_attention(q_THE, k_TKE, v_TKE, end_T, scale, window, position_T)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "torch": _torch,
    "triton": _triton,
    "reference": _reference,
}
