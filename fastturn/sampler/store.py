"""Keys and values of everything read at one policy version, found again by token ids."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from numpy.typing import NDArray

from fastturn.pack import shared_prefix
from fastturn.types import Ids

Slots = NDArray[np.int64]


def order_key(ids_T: Ids) -> bytes:
    """Bytes that order as the ids do, a prefix before what continues it."""
    return ids_T.astype(">u4").tobytes()


class PrefixStore:
    """One arena of key/value slots a layer, and the token sequences that lie in it.

    A sequence is a list of slots, one a token; sequences with a common prefix share slots. The
    longest stored prefix of a sequence is shared with one of its two neighbours in sorted order.

    Example: after `insert([1, 2, 3], [0, 1, 2])`, `longest([1, 2, 9])` gives slots [0, 1].
    """

    def __init__(self) -> None:
        self.size = 0  # slots in use
        self._k_LXKE: list[torch.Tensor] = []
        self._v_LXKE: list[torch.Tensor] = []
        self._keys: list[bytes] = []
        self._sequences: list[tuple[Ids, Slots]] = []

    def clear(self) -> None:
        """Forget every sequence; the memory is kept for the next ones."""
        self.size = 0
        self._keys.clear()
        self._sequences.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use, over all layers."""
        arenas = (*self._k_LXKE, *self._v_LXKE)
        return sum(self.size * arena[:1].nbytes for arena in arenas)

    def longest(self, ids_T: Ids) -> Slots:
        """Slots of the longest stored prefix of `ids_T`."""
        at = bisect_left(self._keys, order_key(ids_T))
        best = np.empty(0, np.int64)
        for stored_T, slots_T in self._sequences[max(0, at - 1) : at + 1]:
            length = shared_prefix(stored_T, ids_T)
            if length > len(best):
                best = slots_T[:length]
        return best

    def insert(self, ids_T: Ids, slots_T: Slots) -> None:
        """Remember that token i of `ids_T` lies in slot `slots_T[i]`."""
        key = order_key(ids_T)
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            self._keys.insert(at, key)
            self._sequences.insert(at, (ids_T, slots_T))

    def reserve(self, tokens: int) -> int:
        """First of `tokens` new consecutive slots; they must be written in every layer."""
        start = self.size
        self.size += tokens
        return start

    def write(self, layer: int, start: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> None:
        """Fill reserved slots of one layer."""
        if layer == len(self._k_LXKE):
            self._k_LXKE.append(k_TKE.new_empty(0, *k_TKE.shape[1:]))
            self._v_LXKE.append(v_TKE.new_empty(0, *v_TKE.shape[1:]))
        for arenas, new_TKE in ((self._k_LXKE, k_TKE), (self._v_LXKE, v_TKE)):
            if len(arenas[layer]) < self.size:
                arenas[layer] = _grown(arenas[layer], start, self.size)
            arenas[layer][start : start + len(new_TKE)] = new_TKE

    def read(self, layer: int, slot_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*X, K, E] of slots of any shape X."""
        flat = slot_X.reshape(-1)
        k_XKE, v_XKE = self._k_LXKE[layer], self._v_LXKE[layer]
        return (
            k_XKE.index_select(0, flat).view(*slot_X.shape, *k_XKE.shape[1:]),
            v_XKE.index_select(0, flat).view(*slot_X.shape, *v_XKE.shape[1:]),
        )


def _grown(arena_XKE: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """The arena with room for `needed` slots and a half more; the first `used` are kept."""
    grown = arena_XKE.new_empty(needed + needed // 2, *arena_XKE.shape[1:])
    grown[:used] = arena_XKE[:used]
    return grown
