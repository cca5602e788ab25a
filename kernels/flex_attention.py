"""Tree attention through torch's FlexAttention: the plan's rule as a mask, skipped by blocks.

    visible(q, k) = k <= q < end[k]     (and position[q] - position[k] < window)

Tokens are padded to whole blocks of BLOCK with tokens that see only themselves, so that one
compilation with dynamic shapes serves every length and no block is cut. The lists of visible blocks
come from each block's smallest and largest end; the rule is never evaluated on all pairs.

On CUDA the kernel is the one that torch compiles. On a CPU torch has only the uncompiled, dense
form, and no gradient. It exists to be compared with, and for devices where it is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .tree_plan import TreePlan

BLOCK = 128  # what FlexAttention's kernels are tuned for


def attend(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Same contract as `tree_attention` with a plan; used through its `impl="flex"`."""
    inputs = q_THE, k_TKE, v_TKE
    if not q_THE.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError(
            f"impl='flex': expected a CUDA tensor, got one on {q_THE.device.type}, where "
            f"FlexAttention has no backward; choose 'torch' there"
        )
    if not plan.tokens:
        return q_THE + 0 * (k_TKE.sum() + v_TKE.sum())
    mask = block_mask(plan)
    padding = mask.seq_lengths[0] - plan.tokens
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None] for x in inputs)
    out_1HTE = _attend(q_THE.device.type)(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q_THE.shape[1] != k_TKE.shape[1],
    )
    return out_1HTE[0].transpose(0, 1)[: plan.tokens]


def block_mask(plan: TreePlan) -> BlockMask:
    """The plan as FlexAttention takes it; made once and kept with the plan.

    Example: a plan of 200 tokens gives a mask of 256 x 256 in blocks of 128.
    """
    return plan.derived("flex", _block_mask)


def _block_mask(plan: TreePlan) -> BlockMask:
    blocks = -(-plan.tokens // BLOCK)
    index_T = torch.arange(blocks * BLOCK, device=plan.device)
    end_T, position_T = index_T + 1, index_T.clone()
    end_T[: plan.tokens] = plan.end_T
    position_T[: plan.tokens] = plan.place_T
    window = plan.window

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < end_T[k])
        if window is not None:
            seen = seen & (position_T[q] - position_T[k] < window)
        return seen

    full_BB, some_BB = _visible_blocks(end_T, position_T, window)
    some_n, some_i = _lists(some_BB & ~full_BB)
    full_n, full_i = _lists(full_BB)
    return BlockMask.from_kv_blocks(
        some_n, some_i, full_n, full_i, BLOCK_SIZE=BLOCK, mask_mod=visible
    )


def _visible_blocks(end_T: Tensor, position_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """(wholly visible, visible at least in part) for every pair of query and key blocks. The second
    is tight without a window and an upper bound with one."""
    end_BN, position_BN = end_T.view(-1, BLOCK), position_T.view(-1, BLOCK)
    start_B = torch.arange(len(end_BN), device=end_T.device) * BLOCK
    query_B1 = start_B.unsqueeze(1)
    some_BB = (start_B <= query_B1) & (end_BN.amax(1) > query_B1)
    full_BB = (start_B < query_B1) & (end_BN.amin(1) >= query_B1 + BLOCK)
    if window is not None:
        low_B, high_B = position_BN.amin(1), position_BN.amax(1)
        some_BB &= low_B.unsqueeze(1) - high_B < window
        full_BB &= high_B.unsqueeze(1) - low_B < window
    return full_BB, some_BB


def _lists(chosen_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Count [1, 1, B] and indices [1, 1, B, B] of the chosen key blocks of every query block, in
    order and first in its row."""
    order_BB = torch.argsort(~chosen_BB, dim=1, stable=True)
    return chosen_BB.sum(1).int()[None, None], order_BB.int()[None, None].contiguous()


@functools.cache
def _attend(device_type: str) -> Callable[..., Any]:
    if device_type != "cuda":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod
