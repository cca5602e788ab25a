"""The least time that physics allows: floating-point work and traffic of each op against a device.

    floor = max(FLOPs / peak, bytes / bandwidth)        fraction of floor = floor / measured

Work is what the mathematics needs, whatever an implementation does: recomputed logits, padding and
rows that contribute nothing count against it. Traffic is each operand read once and each result
written once. Peaks are dense tensor-core figures of the vendor's data sheets; no kernel reaches
them (plain matrix products reach about three quarters), so scripts/gpu_check measures the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastturn.devices import Device


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    bytes: float

    def floor_s(self, device: Device) -> float:
        return max(self.flops / device.flops_s, self.bytes / device.bytes_s)


def logprob_forward(actions: int, width: int, vocab: int, itemsize: int = 2) -> Work:
    """Logits once: 2·A·H·V. Reads hidden and head."""
    return Work(2.0 * actions * width * vocab, float(itemsize) * width * (vocab + actions))


def logprob(actions: int, width: int, vocab: int, itemsize: int = 2) -> Work:
    """Forward and backward for any upstream gradient: 6·A·H·V, as if logits could be kept."""
    return surrogate(actions, width, vocab, itemsize=itemsize)


def surrogate(
    actions: int,
    width: int,
    vocab: int,
    *,
    scored: float = 1.0,
    moving: float = 1.0,
    itemsize: int = 2,
) -> Work:
    """Loss and both gradients: 2·A·H·V for the share `scored` and 4·A·H·V for the share `moving`
    (scored with a coefficient that is not 0). Reads hidden and head twice, writes both gradients.

    Example: (8192, 4096, 151936) is 30.6 TFLOP, 30.9 ms on an H100.
    """
    unit, once = float(actions) * width * vocab, float(itemsize) * width
    forward, backward = once * (vocab + actions * scored), 2 * once * (vocab + actions * moving)
    return Work(unit * (2 * scored + 4 * moving), forward + backward)


def attention(
    end_T: Tensor, heads: int, keys: int, width: int, *, backward: bool, itemsize: int = 2
) -> Work:
    """4·E FLOPs for each visible pair and query head forward (QKᵀ, PV); backward adds 10·E (S
    again, dV, dP, dQ, dK: probabilities of all pairs are too many to keep).

    Forward reads q, k, v and writes out; backward reads these and dout and writes dq, dk, dv.
    Example: one token that sees itself, 1 head of width 8: 32 FLOPs forward.
    """
    tokens = len(end_T)
    pairs = float((end_T - torch.arange(tokens, device=end_T.device)).sum())
    query, key = float(tokens * heads * width), float(tokens * keys * width)
    moved = (6 * query + 6 * key) if backward else (2 * query + 2 * key)
    return Work((14 if backward else 4) * pairs * heads * width, itemsize * moved)
