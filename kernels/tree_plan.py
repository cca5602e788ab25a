"""The plan of one packed batch: which queries meet which keys, made once and used by all layers.

    visible(q, k) = k <= q < end[k]     (and position[q] - position[k] < window)

Two ways to walk the visible pairs, each made when it is first asked for. Neither holds anything of
size T · T, and siblings do not pay for each other.

Tiles (the torch path): a block of queries and the keys that any of them sees, those seen by all of
them first, so that only the rest is masked. Independent trees of at most SMALL tokens are whole
tiles, and those of similar length are batched and padded; longer trees are cut into blocks.

Block lists (the Triton path): for each block of queries the aligned blocks of keys that it sees,
and the transpose. With the least and greatest end of a block of keys,

    skipped    where no query is at or after the first key, or q_first >= max(end)
    unmasked   where k_last <= q_first and q_last < min(end)

and in a window, by the least and greatest positions, where all or none of the pairs are within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .dispatch import check_count, check_index

BLOCK = 64  # queries of a tile of a larger tree
SMALL = 128  # trees up to this many tokens are one tile
BATCH = 1 << 17  # most query-key pairs of a batch of small trees
STEP = 16  # small trees are padded to multiples of this
CELLS = 1 << 22  # pairs of blocks that are looked at together

At = slice | Tensor
Made = TypeVar("Made")
Relation = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


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


@dataclass(frozen=True, slots=True)
class BlockLists:
    """For every block of one kind, the blocks of the other kind that it meets.

    walk_N4 int32 [N, 4]: (block, first, middle, last), longest lists first; the block meets
    met[first:middle], where every pair is visible, and met[middle:last], where some are. Both parts
    ascend. met int32 [pairs of blocks].

    Example: one chain of 256 tokens in blocks of 128 x 128, by query:
    walk = [[1, 1, 2, 3], [0, 0, 0, 1]], met = [0, 0, 1].
    """

    walk_N4: Tensor
    met: Tensor


class TreePlan:
    """One packed batch, for any head count, dtype and implementation, on the device of `end_T`.

    end_T int64 [T] with t < end[t] <= T, properly nested: end[i] <= end[j] for j < i < end[j]. With
    a window, position_T int64 [T] are the positions that the window is measured in (default: the
    packed index). Raises `ValueError` for another shape, an end out of range, or intervals that
    cross, with the index, the expectation and the value.

    Example: end_T = [4, 2, 4, 4] (token 1 is a sibling that token 2 does not see) is one tile.
    """

    def __init__(
        self, end_T: Tensor, window: int | None = None, position_T: Tensor | None = None
    ) -> None:
        check_index("end_T", end_T, (None,), end_T)
        self.tokens, self.window, self.device = len(end_T), window, end_T.device
        end = end_T.cpu().numpy()
        check_nested(end)
        position = np.arange(self.tokens)
        if position_T is not None:
            check_index("position_T", position_T, (self.tokens,), end_T)
            position = position_T.cpu().numpy()
        if window is not None:
            check_count("window", window, 1)
        self._end = np.append(end, 0)
        self._position = np.append(position, 0)
        self._derived: dict[object, Any] = {}

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of the torch path."""
        return tuple(self._build())

    @cached_property
    def end_T(self) -> Tensor:
        """int32 [T] on the plan's device."""
        return self._on_device(self._end[:-1])

    @cached_property
    def place_T(self) -> Tensor:
        """int32 [T] on the plan's device: the positions that the window is measured in."""
        return self._on_device(self._position[:-1])

    def ends(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(least, greatest) end of the tokens of each aligned block, int64 [ceil(T / block)].

        Example: end_T = [4, 2, 4, 4] in blocks of 2 gives [2, 4] and [4, 4].
        """
        return _extremes(self._end[:-1], block)

    def derived(self, key: object, build: Callable[[TreePlan], Made]) -> Made:
        """What `build` makes of this plan, made once: implementations keep their own form here."""
        if key not in self._derived:
            self._derived[key] = build(self)
        made: Made = self._derived[key]
        return made

    def by_query(self, queries: int, keys: int) -> BlockLists:
        """For each block of `queries` queries the blocks of `keys` keys that it sees."""

        def build(plan: TreePlan) -> BlockLists:
            first = np.arange(0, plan.tokens, queries)
            last = np.minimum(first + queries, plan.tokens) - 1
            reach = np.maximum.accumulate(plan.ends(keys)[1])
            low, high = np.searchsorted(reach, first, "right"), last // keys + 1
            return plan._walk(low, high, plan._relation(queries, keys))

        return self.derived(("query", queries, keys), build)

    def by_key(self, queries: int, keys: int) -> BlockLists:
        """For each block of `keys` keys the blocks of `queries` queries that see it."""

        def build(plan: TreePlan) -> BlockLists:
            low = np.arange(0, plan.tokens, keys) // queries
            high = -(-plan.ends(keys)[1] // queries)
            relation = plan._relation(queries, keys)
            return plan._walk(low, high, lambda k, q: relation(q, k))

        return self.derived(("key", queries, keys), build)

    def _relation(self, queries: int, keys: int) -> Relation:
        """Of blocks of queries and blocks of keys that broadcast: some pair visible, and all.

        A block that is not whole is never unmasked, so unmasked ones need no check of bounds.
        """
        least, greatest = self.ends(keys)
        low_q, high_q = _extremes(self._position[:-1], queries)
        low_k, high_k = _extremes(self._position[:-1], keys)

        def relation(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            first, stop = q * queries, (q + 1) * queries
            some = (k * keys < stop) & (greatest[k] > first)
            whole = ((k + 1) * keys <= first + 1) & (least[k] >= stop) & (stop <= self.tokens)
            if self.window is not None:
                some &= low_q[q] - high_k[k] < self.window
                whole &= high_q[q] - low_k[k] < self.window
            return some, whole & some

        return relation

    def _walk(self, low_N: np.ndarray, high_N: np.ndarray, relation: Relation) -> BlockLists:
        """Rows whose columns lie in [low, high), a few rows at a time."""
        count_N2 = np.zeros((len(low_N), 2), np.int64)
        met = [np.zeros(0, np.int32)]
        start = 0
        while start < len(low_N):
            stop = start + max(CELLS // max(int(high_N.max()), 1), 1)
            rows = np.arange(start, min(stop, len(low_N)))
            first = int(low_N[rows].min())
            columns = np.arange(first, int(high_N[rows].max()))
            some, whole = relation(rows[:, None], columns)
            both = np.stack([whole, some & ~whole], 1)
            count_N2[rows] = both.sum(2)
            met.append((np.nonzero(both)[2] + first).astype(np.int32))
            start = int(rows[-1]) + 1
        size_N = count_N2.sum(1)
        begin_N = np.cumsum(size_N) - size_N
        order_N = np.argsort(-size_N, kind="stable")
        middle_N = begin_N + count_N2[:, 0]
        walk_N4 = np.stack([np.arange(len(size_N)), begin_N, middle_N, begin_N + size_N], 1)
        return BlockLists(self._on_device(walk_N4[order_N]), self._on_device(np.concatenate(met)))

    def _on_device(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index.astype(np.int32)).to(self.device)

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


def check_nested(end: np.ndarray) -> None:
    """Every end lies in (t, T], and intervals [t, end[t]) contain each other or are apart.

    Tokens with the end of the token before them bring no new condition, so one token of each run of
    equal ends is looked at: the greatest end inside its interval, from maxima over powers of two,
    is at most its own.
    """
    index = np.arange(len(end))
    (bad,) = np.nonzero((end <= index) | (end > len(end)))
    if bad.size:
        raise ValueError(f"end_T: expected t < end[t] <= {len(end)}, got {end[bad[0]]} at {bad[0]}")
    first_N = np.flatnonzero(np.append(True, end[1:] != end[:-1])) if len(end) else index
    end_N = end[first_N]
    begin_N = np.arange(1, len(first_N) + 1)
    count_N = np.searchsorted(first_N, end_N) - begin_N  # runs that begin inside
    greatest, span = end_N, 1  # of runs n : n + span
    while (count_N >= span).any():
        (some,) = np.nonzero((count_N >= span) & (count_N < 2 * span))
        from_end = begin_N[some] + count_N[some] - span
        inside = np.maximum(greatest[begin_N[some]], greatest[from_end])
        if (inside > end_N[some]).any():
            _report_crossing(end, int(first_N[some[inside > end_N[some]][0]]))
        greatest, span = np.maximum(greatest[:-span], greatest[span:]), 2 * span


def _report_crossing(end: np.ndarray, outer: int) -> None:
    inner = outer + int(np.argmax(end[outer : end[outer]] > end[outer]))
    raise ValueError(
        f"end_T: expected nested intervals, so at most {end[outer]} at {inner}, which lies in "
        f"[{outer}, {end[outer]}) of token {outer}, got {end[inner]}"
    )


def _extremes(value: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    start = np.arange(0, len(value), block)
    if not len(start):
        return value, value
    return np.minimum.reduceat(value, start), np.maximum.reduceat(value, start)
