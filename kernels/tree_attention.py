"""Attention over packed trees: token k is visible to q iff k <= q < end[k]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from .dispatch import check_float, check_index, choose


class TreePlan:
    """What all layers share for one packed batch."""

    def __init__(self, end_T: Tensor, window: int | None = None, position_T: Tensor | None = None):
        self.end_T = end_T
        i_T = torch.arange(end_T.shape[0], device=end_T.device)
        self.seen_TT = (i_T[None, :] <= i_T[:, None]) & (i_T[:, None] < end_T[None, :])
        if window is not None:
            place_T = i_T if position_T is None else position_T
            self.seen_TT &= place_T[:, None] - place_T[None, :] < window


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
    """Attention of every query over the keys it sees, grouped-query heads: out_THE."""
    tokens, _, width = q_THE.shape
    check_float("q_THE", q_THE, (None, None, None), q_THE)
    check_float("k_TKE", k_TKE, (tokens, None, width), q_THE)
    check_float("v_TKE", v_TKE, tuple(k_TKE.shape), q_THE)
    check_index("end_T", end_T, (tokens,), q_THE)
    run = choose(impl, IMPLEMENTATIONS, q_THE.device)
    scale = width**-0.5 if scale is None else scale
    return run(q_THE, k_TKE, v_TKE, end_T, scale, window, position_T, plan)


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
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THE, k_TKE, v_TKE))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=plan.seen_TT, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


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


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"torch": _torch, "reference": _reference}
