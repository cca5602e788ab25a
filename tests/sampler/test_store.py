"""The prefix store: longest prefixes and slots."""

from __future__ import annotations

import numpy as np
import torch

from fastturn.sampler.store import PrefixStore


def test_longest_prefix_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    store, sequences, next_slot = PrefixStore(), [], 0
    for _ in range(60):
        ids_T = rng.integers(0, 3, int(rng.integers(1, 9))).astype(np.int32)
        slots_T = np.arange(next_slot, next_slot + len(ids_T))
        next_slot += len(ids_T)
        store.insert(ids_T, slots_T)
        sequences.append(ids_T.tolist())
    for _ in range(200):
        asked_T = rng.integers(0, 3, int(rng.integers(1, 9))).astype(np.int32)
        want = max(shared(asked_T.tolist(), stored) for stored in sequences)
        assert len(store.longest(asked_T)) == want


def shared(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_ids_order_beyond_one_byte() -> None:
    store = PrefixStore()
    store.insert(np.array([256, 1], np.int32), np.array([0, 1]))
    store.insert(np.array([1, 256], np.int32), np.array([2, 3]))
    assert store.longest(np.array([256, 2], np.int32)).tolist() == [0]
    assert store.longest(np.array([1, 256, 9], np.int32)).tolist() == [2, 3]
    assert store.longest(np.array([7], np.int32)).tolist() == []


def test_slots_keep_what_was_written_while_growing() -> None:
    store, written = PrefixStore(), []
    for size in (3, 1, 40, 2):
        start = store.reserve(size)
        for layer in range(2):
            k_TKE, v_TKE = torch.randn(size, 2, 4), torch.randn(size, 2, 4)
            store.write(layer, start, k_TKE, v_TKE)
            written.append((layer, start, k_TKE, v_TKE))
    for layer, start, k_TKE, v_TKE in written:
        slots = torch.arange(start, start + len(k_TKE))
        k, v = store.read(layer, slots)
        assert torch.equal(k, k_TKE) and torch.equal(v, v_TKE)
    assert store.used_bytes == 46 * 2 * 2 * 2 * 4 * 4
    store.clear()
    assert store.size == 0 and store.used_bytes == 0
