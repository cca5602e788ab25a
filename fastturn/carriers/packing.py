"""Many tensors as few byte buffers, cut where vLLM's receiver cuts them.

A broadcast has no boundaries of its own: the receiver derives the length of every buffer from
dtypes and shapes, by a rule that both sides must follow exactly. Broadcast: tensors are added until
a buffer holds more than `limit` bytes. CUDA IPC: a buffer never holds more than it has room for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Meta = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tensors that travel together: their metadata and, one after the other, their bytes."""

    metas: tuple[Meta, ...]
    bytes_N: torch.Tensor

    @property
    def sizes(self) -> list[int]:
        return [size_bytes(meta) for meta in self.metas]


def size_bytes(meta: Meta) -> int:
    """Example: ("w", torch.bfloat16, (2, 3)) is 12."""
    return math.prod(meta[2]) * meta[1].itemsize


def meta_of(name: str, tensor: torch.Tensor) -> Meta:
    return name, tensor.dtype, tuple(tensor.shape)


def describe(metas: Sequence[Meta]) -> dict[str, Any]:
    """The update info that both transfer backends send.

    Example: {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}.
    """
    return {
        "names": [name for name, _, _ in metas],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in metas],
        "shapes": [list(shape) for _, _, shape in metas],
    }


def aligned(meta: Meta) -> int:
    """Sort key of the order to send in: wide types first. The receiver views slices of a buffer as
    their type, so each must begin at a multiple of its width, and tensors may be of odd length.

    Example: bfloat16[3] before float32[2] would put the latter at byte 6.
    """
    return -meta[1].itemsize


def in_order(weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """All pairs in the order to send them in."""
    return sorted(weights, key=lambda pair: aligned(meta_of(*pair)))


def pack(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Chunk]:
    """Broadcast buffers, made one at a time as `weights` is iterated.

    Example: tensors of 4 bytes each make buffers of 2 with limit 7, of 3 with limit 8.
    """
    metas: list[Meta] = []
    parts: list[torch.Tensor] = []
    held = 0
    for name, tensor in weights:
        metas.append(meta_of(name, tensor))
        parts.append(as_bytes(tensor))
        held += len(parts[-1])
        if held > limit:
            yield Chunk(tuple(metas), torch.cat(parts))
            metas, parts, held = [], [], 0
    if metas:
        yield Chunk(tuple(metas), torch.cat(parts))


def pack_into(
    weights: Iterable[tuple[str, torch.Tensor]], buffer_N: torch.Tensor
) -> Iterator[Chunk]:
    """Chunks written one after the other into one buffer: each must be read before the next is
    asked for. `ValueError` when a tensor alone is larger than the buffer."""
    metas: list[Meta] = []
    held = 0
    for name, tensor in weights:
        part_N = as_bytes(tensor)
        if len(part_N) > len(buffer_N):
            raise ValueError(
                f"{name} has {len(part_N)} bytes, more than the buffer's {len(buffer_N)}; "
                f"give the carrier a larger one (buffer_bytes)"
            )
        if held + len(part_N) > len(buffer_N):
            yield Chunk(tuple(metas), buffer_N[:held])
            metas, held = [], 0
        buffer_N[held : held + len(part_N)].copy_(part_N)
        metas.append(meta_of(name, tensor))
        held += len(part_N)
    if metas:
        yield Chunk(tuple(metas), buffer_N[:held])


def unpack(chunk: Chunk) -> list[tuple[str, torch.Tensor]]:
    """Inverse of `pack`: what a receiver makes of a buffer. Tensors are views of it."""
    parts = chunk.bytes_N.split(chunk.sizes)
    return [
        (name, part.view(dtype).view(shape))
        for (name, dtype, shape), part in zip(chunk.metas, parts, strict=True)
    ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
