"""Attention over packed trees, block-sparse: one integer per token is the whole mask.

    visible(q, k) = k <= q < end[k]     (and position[q] - position[k] < window)
    out_q = Σ_k softmax_k(scale · q·k) v_k over the visible keys

`TreePlan` cuts the tokens into tiles once per packed batch; all layers share it. A tile is a block
of queries and the keys that any of them sees, those seen by all of them first, so that only the
rest is masked. Independent trees of at most SMALL tokens are whole tiles, and those of similar
length are batched and padded; longer trees are cut into blocks of BLOCK queries. No tile
holds a key that none of its queries sees: siblings do not pay for each other, and nothing of size
T · T exists.

Layout inside: q [K, T+1, G, E] (G query heads for each of the K key heads), k and v [K, T+1, E], in
float32 or float64. A tile's G · Q query rows meet its keys in one matrix product per key head,
without repeating keys. Row T is zero: padding points there.

Saved for backward: q, k, v, out in that layout; probabilities are recomputed tile by tile. Extra
memory: two tiles of scores, K · G · BLOCK · keys numbers each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import reference
from .dispatch import check_float, check_index, check_number, choose

BLOCK = 64  # queries of a tile of a larger tree
SMALL = 128  # trees up to this many tokens are one tile
BATCH = 1 << 17  # most query-key pairs of a batch of small trees
STEP = 16  # small trees are padded to multiples of this

At = slice | Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """`count` tiles of `queries` x `keys` each; `hidden` masks the keys from `full` on."""

    count: int
    queries: int
    keys: int
    query_at: At  # count * queries indices into [0, T]
    key_at: At  # count * keys indices into [0, T]
    full: int
    hidden: Tensor | None  # bool [count, queries, 1, keys - full]


class TreePlan:
    """The tiles of one packed batch, for any head count and dtype on the device of `end_T`.

    end_T int64 [T] with t < end[t] <= T; with a window, position_T int64 [T] are the positions that
    the window is measured in (default: the packed index). Raises `ValueError` for another shape
    or an end out of range.

    Example: end_T = [4, 2, 4, 4] (token 1 is a sibling that token 2 does not see) is one tile.
    """

    def __init__(
        self, end_T: Tensor, window: int | None = None, position_T: Tensor | None = None
    ) -> None:
        check_index("end_T", end_T, (None,), end_T)
        self.tokens, self.window, self.device = len(end_T), window, end_T.device
        end = end_T.cpu().numpy()
        index = np.arange(self.tokens)
        bad = np.flatnonzero((end <= index) | (end > self.tokens))
        if bad.size:
            raise ValueError(
                f"end_T: expected t < end[t] <= {self.tokens}, got {end[bad[0]]} at {bad[0]}"
            )
        position = index
        if position_T is not None:
            check_index("position_T", position_T, (self.tokens,), end_T)
            position = position_T.cpu().numpy()
        if window is not None:
            check_number("window", window, 1)
        self._end = np.append(end, 0)
        self._position = np.append(position, 0)
        self.tiles = tuple(self._build())

    def _build(self) -> Iterator[Tile]:
        if not self.tokens:
            return
        index = np.arange(self.tokens)
        last = np.maximum.accumulate(self._end[:-1])
        first_N = np.flatnonzero(np.append(True, last[:-1] <= index[1:]))
        stop_N = np.append(first_N[1:], self.tokens)
        small_N = stop_N - first_N <= SMALL
        yield from self._small(first_N[small_N], stop_N[small_N])
        for first, stop in zip(first_N[~small_N], stop_N[~small_N], strict=True):
            for start in range(first, stop, BLOCK):
                yield self._block(int(first), start, min(start + BLOCK, int(stop)))

    def _small(self, first_N: np.ndarray, stop_N: np.ndarray) -> Iterator[Tile]:
        """Whole trees, batched by padded length."""
        length_N = -(-(stop_N - first_N) // STEP) * STEP
        for length in np.unique(length_N):
            (which,) = np.nonzero(length_N == length)
            most = max(BATCH // int(length) ** 2, 1)
            for some in (which[i : i + most] for i in range(0, len(which), most)):
                at = first_N[some, None] + np.arange(length)
                at[at >= stop_N[some, None]] = self.tokens
                seen = self._visible(at[:, :, None], at[:, None, :])
                seen[at == self.tokens, 0] = True  # padding sees something, for a finite softmax
                flat = self._at(at.ravel())
                yield self._tile(len(some), int(length), int(length), flat, flat, 0, seen)

    def _block(self, first: int, start: int, stop: int) -> Tile:
        """Queries start:stop of the tree that begins at `first`, and the keys that they see."""
        key = np.arange(first, stop)
        end, seen = self._end[first:stop], self._end[first:stop] > start
        full = (key <= start) & (end >= stop)
        if self.window is not None:
            place = self._position[start:stop]
            seen &= place.min() - self._position[first:stop] < self.window
            full &= place.max() - self._position[first:stop] < self.window
        full &= seen
        some = key[seen & ~full]
        key = np.concatenate([key[full], some])
        mask = self._visible(np.arange(start, stop)[:, None], some)[None]
        query_at, count = self._at(np.arange(start, stop)), int(full.sum())
        return self._tile(1, stop - start, len(key), query_at, self._at(key), count, mask)

    def _visible(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        seen = (key <= query) & (query < self._end[key])
        if self.window is not None:
            seen &= self._position[query] - self._position[key] < self.window
        return seen

    def _tile(
        self,
        count: int,
        queries: int,
        keys: int,
        query_at: At,
        key_at: At,
        full: int,
        seen: np.ndarray,
    ) -> Tile:
        hidden = None
        if not seen.all():
            hidden = torch.from_numpy(~seen).unsqueeze(2).to(self.device)
        return Tile(count, queries, keys, query_at, key_at, full, hidden)

    def _at(self, index: np.ndarray) -> At:
        """A slice where the indices are consecutive: its tile is a view."""
        if index[-1] - index[0] + 1 == len(index) and (np.diff(index) == 1).all():
            return slice(int(index[0]), int(index[-1]) + 1)
        return torch.from_numpy(index).to(self.device)


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
    h // (H / K)), one floating dtype. end_T as in `TreePlan`; scale defaults to 1 / sqrt(E).
    `plan` is `TreePlan(end_T, window, position_T)` built before; without one it is built here.
    Differentiable once, by q, k and v; half precision is computed in float32 and rounded once.
    T = 0 and T not a multiple of any block are exact. Raises `ValueError` for a wrong shape, dtype
    or device, H not a multiple of K, or a plan of another length or window.

    Example: end_T = [3, 2, 3] lets token 2 see tokens 0 and 2 but not its sibling 1; with equal
    scores out[2] = (v[0] + v[2]) / 2.
    """
    width = _check(q_THE, k_TKE, v_TKE, end_T, plan, window)
    run = choose(impl, IMPLEMENTATIONS, q_THE.device)
    scale = width**-0.5 if scale is None else scale
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
    return _TreeAttention.apply(q_THE, k_TKE, v_TKE, scale, plan)


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


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, scale: float, plan: TreePlan
    ) -> Tensor:
        groups = q_THE.shape[1] // k_TKE.shape[1]
        q_KTGE = _inside(q_THE.unflatten(1, (-1, groups)), scale)
        k_KTE, v_KTE = _inside(k_TKE), _inside(v_TKE)
        out_KTGE = torch.empty_like(q_KTGE)
        scratch = _Scratch(plan, q_KTGE)
        for tile in plan.tiles:
            p = scratch.probabilities(tile, _rows(q_KTGE, tile), _keys(k_KTE, tile))
            out = torch.bmm(p, _keys(v_KTE, tile))
            _put(out_KTGE, tile, out)
        ctx.save_for_backward(q_KTGE, k_KTE, v_KTE, out_KTGE)
        ctx.plan, ctx.scale, ctx.dtype = plan, scale, q_THE.dtype
        return _outside(out_KTGE, q_THE.dtype).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q_KTGE, k_KTE, v_KTE, out_KTGE = ctx.saved_tensors
        plan: TreePlan = ctx.plan
        do_KTGE = _inside(grad_THE.unflatten(1, (-1, q_KTGE.shape[2])))
        # The row of padding stays zero: its output is never defined.
        delta_KTG1 = torch.zeros_like(do_KTGE[..., :1])
        torch.sum(do_KTGE[:, :-1] * out_KTGE[:, :-1], -1, keepdim=True, out=delta_KTG1[:, :-1])
        dq_KTGE = torch.empty_like(q_KTGE)
        dk_KTE, dv_KTE = torch.zeros_like(k_KTE), torch.zeros_like(v_KTE)
        scratch = _Scratch(plan, q_KTGE)
        for tile in plan.tiles:
            q, k, do = _rows(q_KTGE, tile), _keys(k_KTE, tile), _rows(do_KTGE, tile)
            p = scratch.probabilities(tile, q, k)
            _add(dv_KTE, tile, torch.bmm(p.mT, do))
            ds = torch.bmm(do, _keys(v_KTE, tile).mT, out=scratch.other(p))
            ds.sub_(_rows(delta_KTG1, tile)).mul_(p)
            _put(dq_KTGE, tile, torch.bmm(ds, k))
            _add(dk_KTE, tile, torch.bmm(ds.mT, q))
        dq_KTGE.mul_(ctx.scale)
        dq_THE = _outside(dq_KTGE, ctx.dtype).flatten(1, 2)
        return dq_THE, _outside(dk_KTE, ctx.dtype), _outside(dv_KTE, ctx.dtype), None, None


class _Scratch:
    """Two buffers of scores, as large as the largest tile needs."""

    def __init__(self, plan: TreePlan, q_KTGE: Tensor) -> None:
        self.heads, _, self.groups, _ = q_KTGE.shape
        most = max((t.count * t.queries * t.keys for t in plan.tiles), default=0)
        self.scores, self.probs = q_KTGE.new_empty(2, self.heads * self.groups * most)

    def probabilities(self, tile: Tile, q: Tensor, k: Tensor) -> Tensor:
        """softmax(q kᵀ) of a tile: [K · count, queries · G, keys]."""
        shape = (len(q), q.shape[1], tile.keys)
        size = shape[0] * shape[1] * shape[2]
        scores = torch.bmm(q, k.mT, out=self.scores[:size].view(shape))
        if tile.hidden is not None:
            split = scores.view(self.heads, tile.count, tile.queries, self.groups, tile.keys)
            split[..., tile.full :].masked_fill_(tile.hidden, -torch.inf)
        return torch.softmax(scores, -1, out=self.probs[:size].view(shape))

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
