"""Tree attention in plain matrix products over the plan's tiles; any floating dtype, any device.

Layout inside: q [K, T+1, G, E] (G query heads for each of the K key heads), k and v [K, T+1, E], in
float32 or float64. A tile's G · Q query rows meet its keys in one matrix product per key head,
without repeating keys. Row T is zero: padding points there.

Saved for backward: q, k, v, out in that layout; probabilities are recomputed tile by tile. Extra
memory: two tiles of scores, K · G · BLOCK · keys numbers each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import without_autocast
from .kept import kept
from .tree_plan import Tile, TreePlan


def attend(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    plan: TreePlan,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Differentiable once; half precision is computed in float32 and rounded once."""
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
        with without_autocast(q_THE.device):
            groups = q_THE.shape[1] // k_TKE.shape[1]
            q_KTGE = _inside(q_THE.unflatten(1, (-1, groups)), scale)
            k_KTE, v_KTE = _inside(k_TKE), _inside(v_TKE)
            inside = q_KTGE, k_KTE, v_KTE
            (out_KTGE,) = kept(lambda: [_forward(*inside, plan, softcap)], inside)
            ctx.save_for_backward(q_KTGE, k_KTE, v_KTE, out_KTGE)
            ctx.plan, ctx.scale, ctx.softcap, ctx.dtype = plan, scale, softcap, q_THE.dtype
            return _outside(out_KTGE, q_THE.dtype).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(grad_THE.device):
            q_KTGE, k_KTE, v_KTE, out_KTGE = ctx.saved_tensors
            plan: TreePlan = ctx.plan
            do_KTGE = _inside(grad_THE.unflatten(1, (-1, q_KTGE.shape[2])))
            # The row of padding stays zero: its output is never defined.
            delta_KTG1 = torch.zeros_like(do_KTGE[..., :1])
            torch.sum(do_KTGE[:, :-1] * out_KTGE[:, :-1], -1, keepdim=True, out=delta_KTG1[:, :-1])
            dq_KTGE = torch.empty_like(q_KTGE)
            dk_KTE, dv_KTE = torch.zeros_like(k_KTE), torch.zeros_like(v_KTE)
            scratch = _Scratch(plan, q_KTGE, ctx.softcap)
            for tile in plan.tiles:
                q, k, do = _rows(q_KTGE, tile), _keys(k_KTE, tile), _rows(do_KTGE, tile)
                p = scratch.probabilities(tile, q, k)
                _add(dv_KTE, tile, torch.bmm(p.mT, do))
                ds = torch.bmm(do, _keys(v_KTE, tile).mT, out=scratch.other(p))
                ds.sub_(_rows(delta_KTG1, tile)).mul_(p)
                if ctx.softcap is not None:
                    ds.mul_(scratch.slope(p))
                _put(dq_KTGE, tile, torch.bmm(ds, k))
                _add(dk_KTE, tile, torch.bmm(ds.mT, q))
            dq_KTGE.mul_(ctx.scale)
            dq_THE = _outside(dq_KTGE, ctx.dtype).flatten(1, 2)
            dk_TKE, dv_TKE = _outside(dk_KTE, ctx.dtype), _outside(dv_KTE, ctx.dtype)
            return dq_THE, dk_TKE, dv_TKE, None, None, None


def _forward(
    q_KTGE: Tensor, k_KTE: Tensor, v_KTE: Tensor, plan: TreePlan, softcap: float | None
) -> Tensor:
    out_KTGE = torch.empty_like(q_KTGE)
    scratch = _Scratch(plan, q_KTGE, softcap)
    for tile in plan.tiles:
        p = scratch.probabilities(tile, _rows(q_KTGE, tile), _keys(k_KTE, tile))
        _put(out_KTGE, tile, torch.bmm(p, _keys(v_KTE, tile)))
    return out_KTGE


class _Scratch:
    """Two buffers of scores, three with a cap on them, as large as the largest tile needs."""

    def __init__(self, plan: TreePlan, q_KTGE: Tensor, softcap: float | None) -> None:
        self.heads, _, self.groups, _ = q_KTGE.shape
        self.softcap = softcap
        most = max((t.count * t.queries * t.keys for t in plan.tiles), default=0)
        buffers = q_KTGE.new_empty(2 + (softcap is not None), self.heads * self.groups * most)
        self.scores, self.probs, *self.tanh = buffers

    def probabilities(self, tile: Tile, q: Tensor, k: Tensor) -> Tensor:
        """softmax(cap(q kᵀ)) of a tile: [K · count, queries · G, keys]."""
        shape = (len(q), q.shape[1], tile.keys)
        size = shape[0] * shape[1] * shape[2]
        scores = torch.bmm(q, k.mT, out=self.scores[:size].view(shape))
        if self.softcap is not None:
            tanh = torch.tanh(scores.div_(self.softcap), out=self.tanh[0][:size].view(shape))
            torch.mul(tanh, self.softcap, out=scores)
        if tile.hidden is not None:
            split = scores.view(self.heads, tile.count, tile.queries, self.groups, tile.keys)
            split[..., tile.full :].masked_fill_(tile.hidden, -torch.inf)
        return torch.softmax(scores, -1, out=self.probs[:size].view(shape))

    def slope(self, probs: Tensor) -> Tensor:
        """Derivative of the capped scores by the scores, of the tile of `probs`."""
        tanh = self.tanh[0][: probs.numel()].view_as(probs)
        return tanh.square_().neg_().add_(1)

    def other(self, probs: Tensor) -> Tensor:
        return self.scores[: probs.numel()].view_as(probs)


def _inside(x_TKX: Tensor, scale: float = 1.0) -> Tensor:
    """[T, K, ...] -> contiguous [K, T+1, ...] in the accumulation dtype, row T zero."""
    wide = torch.promote_types(x_TKX.dtype, torch.float32)
    tokens, heads, *rest = x_TKX.shape
    x_KTX = torch.empty(heads, tokens + 1, *rest, dtype=wide, device=x_TKX.device)
    torch.mul(x_TKX.transpose(0, 1), scale, out=x_KTX[:, :tokens])
    x_KTX[:, tokens] = 0
    return x_KTX


def _outside(x_KTX: Tensor, dtype: torch.dtype) -> Tensor:
    """[K, T+1, ...] -> contiguous [T, K, ...]."""
    return x_KTX[:, :-1].transpose(0, 1).to(dtype).contiguous()


def _rows(x_KTGX: Tensor, tile: Tile) -> Tensor:
    """[K · count, queries · G, X]; a view where the tile's queries are consecutive."""
    rows = x_KTGX[:, tile.query_at]
    return rows.reshape(len(rows) * tile.count, -1, rows.shape[-1])


def _keys(x_KTE: Tensor, tile: Tile) -> Tensor:
    keys = x_KTE[:, tile.key_at]
    return keys.reshape(len(keys) * tile.count, tile.keys, -1)


def _put(x_KTGX: Tensor, tile: Tile, rows: Tensor) -> None:
    x_KTGX[:, tile.query_at] = rows.view(len(x_KTGX), -1, *x_KTGX.shape[2:])


def _add(x_KTE: Tensor, tile: Tile, keys: Tensor) -> None:
    keys = keys.view(len(x_KTE), -1, x_KTE.shape[2])
    if isinstance(tile.key_at, slice):
        x_KTE[:, tile.key_at] += keys
    else:
        x_KTE.index_add_(1, tile.key_at, keys)
