"""A rank's rows of the output layer: who holds which ids, its part of the statistics, their sum.

The equations, and which collectives run when, are in `vocabulary_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import rows
from .rows import Chunk, Head

# torch 2.13 renamed it.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_numbers(
    mine: list[int], group: dist.ProcessGroup | None, device: str | torch.device
) -> list[list[int]]:
    """Every rank's integers, by rank."""
    mine_N = torch.tensor(mine, dtype=torch.int64, device=device)
    all_RN = mine_N.new_empty(dist.get_world_size(group), len(mine))
    GATHER(all_RN.view(-1), mine_N, group=group)
    numbers: list[list[int]] = all_RN.tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """Which ids the ranks of `group` hold: rank r those in [stops[r - 1], stops[r]).

    Example: ranks with 130, 0 and 170 rows have stops (130, 130, 300); rank 2 starts at 130.
    """

    stops: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, rows: int, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu"
    ) -> VocabularySlice:
        """The slices when this rank holds `rows` rows; every rank of `group` calls it, once.

        group   None: all processes
        device  where the group's collectives run ("cuda" for NCCL)
        """
        if not dist.is_initialized():
            raise ValueError(
                "group: expected torch.distributed to be initialised, and it is not; call "
                "init_process_group first, or use the ops without `vocabulary_parallel_`"
            )
        counts = [count for (count,) in gather_numbers([rows], group, device)]
        return cls(tuple(accumulate(counts)), dist.get_rank(group), group)

    @property
    def start(self) -> int:
        return self.stops[self.rank - 1] if self.rank else 0

    @property
    def rows(self) -> int:
        return self.stops[self.rank] - self.start

    @property
    def total(self) -> int:
        return self.stops[-1]

    @property
    def largest(self) -> int:
        return max(stop - start for start, stop in zip((0, *self.stops), self.stops, strict=False))

    def gather(self, mine_N: Tensor) -> Tensor:
        """[ranks, N], the same on every rank."""
        if len(self.stops) == 1:
            return mine_N.unsqueeze(0)
        all_RN = mine_N.new_empty(len(self.stops), len(mine_N))
        GATHER(all_RN.view(-1), mine_N, group=self.group)
        return all_RN

    def add(self, mine: Tensor | None) -> None:
        """Sum over ranks, in place; None on all ranks is none."""
        if mine is not None and mine.numel() and len(self.stops) > 1:
            dist.all_reduce(mine, group=self.group)


class Whole(NamedTuple):
    """Statistics over the whole vocabulary: of rows [C], of actions [A]."""

    max_C: Tensor
    sum_C: Tensor
    log_C: Tensor
    entropy_C: Tensor
    logprob_A: Tensor


class Shard:
    """This rank's rows of the head over chunks of hidden rows."""

    def __init__(self, head: Head, part: VocabularySlice, kind: str) -> None:
        self.head, self.part = head, part
        self.chunk = rows.chunk_rows(part.largest, head.wide.itemsize, kind)
        self.tile = min(head.tile, self.chunk)

    def owned(self, label_A: Tensor) -> Tensor:
        """Indices of the actions whose label this rank holds."""
        at_A = label_A - self.part.start
        return ((at_A >= 0) & (at_A < self.part.rows)).nonzero().squeeze(1)

    def logits(self, x_CD: Tensor, chunk: Chunk) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Tiles of final logits in the shared buffer, and their bounds (see `Chunk.tiles`)."""
        z_CV = self.head.buffer_CV[: len(x_CD)]
        self.head.matmul(x_CD, self.head.head_VD.T, z_CV)
        for tile in chunk.tiles:
            z_V = z_CV[tile[0] : tile[1]]
            self.head.finish(z_V, tile[0], tile[1])
            yield z_V, tile

    def exponentials(self, x_CD: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """exp(z - m_r) in the shared buffer; (m_r, s_r - 1, d_r) as [3, C], where s_r - 1 keeps
        the digits of a peaked row; z[label] - m_r of the actions whose label this rank holds, 0 for
        the others."""
        head = self.head
        stat_3C = torch.zeros(3, len(x_CD), dtype=head.wide, device=x_CD.device)
        shifted_A = torch.zeros(len(chunk.label_A), dtype=head.wide, device=x_CD.device)
        lowest = torch.finfo(head.wide).min
        stat_3C[1] = -1
        stat_3C[0] = lowest  # of no row, or of forbidden ones only: finite, exp(m_r - M) is 0
        owned_A, at_A = self.owned(chunk.label_A), chunk.label_A - self.part.start
        for z_V, (r0, r1, a0, a1) in self.logits(x_CD, chunk):
            if not self.part.rows:
                continue
            torch.clamp(z_V.amax(1), min=lowest, out=stat_3C[0, r0:r1])
            z_V.sub_(stat_3C[0, r0:r1].unsqueeze(1))
            mine_A = owned_A[(owned_A >= a0) & (owned_A < a1)]
            shifted_A[mine_A] = z_V[chunk.slot_A[mine_A] - r0, at_A[mine_A]]
            product_V = torch.clamp(z_V, min=lowest, out=head.scratch_TV[: r1 - r0])
            z_V.exp_()
            stat_3C[1, r0:r1] = z_V.sum(1, dtype=torch.float64) - 1
            torch.sum(product_V.mul_(z_V), 1, out=stat_3C[2, r0:r1])
        return head.buffer_CV[: len(x_CD)], stat_3C, shifted_A

    def whole(self, stat_3C: Tensor, shifted_A: Tensor, slot_A: Tensor, label_A: Tensor) -> Whole:
        """The one collective: every rank's statistics, combined in rank order."""
        count = stat_3C.shape[1]
        all_RN = self.part.gather(torch.cat([stat_3C.flatten(), shifted_A]))
        stat_R3C = all_RN[:, : 3 * count].unflatten(1, (3, count)).double()
        max_C = stat_R3C[:, 0].amax(0)
        sum_C, dot_C = torch.zeros_like(max_C), torch.zeros_like(max_C)
        for m_C, rest_C, d_C in stat_R3C:
            scale_C = (m_C - max_C).exp()
            sum_C += scale_C * (1 + rest_C)
            dot_C += scale_C * (d_C + (1 + rest_C) * (m_C - max_C))
        log_C = torch.log1p(sum_C - 1)
        stops_R = torch.tensor(self.part.stops, device=label_A.device)
        owner_A = torch.searchsorted(stops_R, label_A, right=True)
        action_A = torch.arange(len(label_A), device=label_A.device)
        mine_A = all_RN[owner_A, 3 * count + action_A]
        apart_A = stat_R3C[owner_A, 0, slot_A] - max_C[slot_A]
        logprob_A = mine_A + apart_A - log_C[slot_A]
        found = (max_C, sum_C, log_C, log_C - dot_C / sum_C, logprob_A)
        return Whole(*(x.to(stat_3C.dtype) for x in found))
