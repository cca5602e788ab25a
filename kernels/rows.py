"""Chunks of logits: what `turn_surrogate` and `linear_logprob` share.

Live actions are grouped by the hidden row they are scored on (`Live`), rows are taken `chunk_rows`
at a time, and a chunk's logits [C, V] live in one buffer that is overwritten in place: logits,
shifted logits, exponentials, dZ. Elementwise work goes by tiles of a few rows that stay in cache.

Chunk and tile heights follow from (V, dtype, device) and never from the number of actions. A chunk
is padded with zero rows to a multiple of GRANULE, because a matrix product of 1 or 7 rows takes
another code path than one of 8, 16, ... and rounds otherwise; so a row alone equals the same row
in a batch bit for bit where D is a multiple of 8 (rows of an odd width start at addresses that the
library's float64 product treats differently).

Exponentials of a row are summed in float64, where 1 + rest keeps the digits of the rest, Σ exp(z -
max) without one maximum: log Σ = log1p(rest) is exact where a row is peaked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRANULE = 8
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
CHUNK_ROWS = {"cpu": 1024, "cuda": 8192}
ROUNDED_BYTES = 64 << 20
TILE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 30}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What half precision accumulates in: float32; float32 and float64 are their own."""
    return torch.promote_types(dtype, torch.float32)


def _height(vocab: int, itemsize: int, budget: int, most: int) -> int:
    fits = max(budget // max(vocab * itemsize, 1), 1)
    return min(max(1 << (fits.bit_length() - 1), GRANULE), most)


def chunk_rows(vocab: int, itemsize: int, device: str) -> int:
    """Largest power of two of rows whose logits fit the byte budget, in [GRANULE, most].

    Example: `chunk_rows(49152, 4, "cpu")` is 256 (48 MiB of 64).
    """
    kind = device if device in CHUNK_BYTES else "cuda"
    return _height(vocab, itemsize, CHUNK_BYTES[kind], CHUNK_ROWS[kind])


def tile_rows(vocab: int, itemsize: int, device: str) -> int:
    """Rows of elementwise work done at once; a power of two, at most a chunk."""
    kind = device if device in TILE_BYTES else "cuda"
    return _height(vocab, itemsize, TILE_BYTES[kind], CHUNK_ROWS[kind])


def padded(rows: int) -> int:
    return -(-rows // GRANULE) * GRANULE


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start:stop` of `Live.row_R` and the live actions `first:last` that they score."""

    start: int
    stop: int
    first: int
    last: int
    row_C: Tensor  # hidden rows
    slot_A: Tensor  # row of each action within the chunk
    label_A: Tensor
    tiles: list[tuple[int, int, int, int]]  # rows r0:r1 of the chunk, its actions a0:a1


@dataclass(frozen=True, slots=True)
class Live:
    """Live actions grouped by hidden row.

    Example: row_A = [4, 4, 7] gives row_R = [4, 7] and slot_A = [0, 0, 1].
    """

    label_A: Tensor
    row_R: Tensor
    slot_A: Tensor
    shared: bool  # some row carries several actions

    @classmethod
    def of(cls, label_A: Tensor, row_A: Tensor) -> Live:
        row_R, slot_A = torch.unique_consecutive(row_A, return_inverse=True)
        return cls(label_A, row_R, slot_A, len(row_R) < len(row_A))

    def chunks(self, rows: int, tile: int) -> Iterator[Chunk]:
        total = len(self.row_R)
        marks = list(range(0, total, tile))
        if self.shared:
            mark_M = torch.tensor(marks, device=self.slot_A.device)
            firsts = torch.searchsorted(self.slot_A, mark_M).tolist()
        else:
            firsts = list(marks)
        firsts.append(len(self.slot_A))
        for start in range(0, total, rows):
            stop = min(start + rows, total)
            low, high = start // tile, -(-stop // tile)
            first, last = firsts[low], firsts[high]
            tiles = [
                (
                    (i - low) * tile,
                    min((i - low + 1) * tile, padded(stop - start)),
                    firsts[i] - first,
                    firsts[i + 1] - first,
                )
                for i in range(low, high)
            ]
            yield Chunk(
                start,
                stop,
                first,
                last,
                self.row_R[start:stop],
                self.slot_A[first:last] - start,
                self.label_A[first:last],
                tiles,
            )


def own_rows(row_A: Tensor | None, action_A: Tensor) -> Tensor:
    """`row_A`, or the a-th row for action a."""
    return torch.arange(len(action_A), device=action_A.device) if row_A is None else row_A


class Head:
    """The output layer over chunks of hidden rows, and the buffers that the chunks share.

    Half precision on CPU is computed from float32 copies of the operands (head: V · D · 4 bytes
    once a call), because CPU matmuls round half-precision results; on CUDA the operands stay half
    and the result is float32.
    """

    def __init__(
        self,
        head_VD: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        softcap: float | None,
        rows: int,
    ) -> None:
        self.wide = wide_dtype(head_VD.dtype)
        self.narrow = head_VD.dtype != self.wide and head_VD.device.type != "cpu"
        self.head_VD = head_VD.detach() if self.narrow else head_VD.detach().to(self.wide)
        self.bias_V = None if bias_V is None else bias_V.detach().to(self.wide)
        self.temperature, self.softcap = temperature, softcap
        vocab, device = head_VD.shape[0], head_VD.device
        itemsize = self.wide.itemsize
        # Forbidden ids stay forbidden behind a softcap, which is finite.
        self.forbidden_V = None
        if self.bias_V is not None and softcap is not None:
            shut_V = self.bias_V == -torch.inf
            if bool(shut_V.any()):
                self.forbidden_V = torch.where(shut_V, -torch.inf, 0.0).to(self.wide)
        self.chunk = chunk_rows(vocab, itemsize, device.type)
        self.tile = min(tile_rows(vocab, itemsize, device.type), self.chunk)
        height = min(self.chunk, padded(rows))
        self.buffer_CV = torch.empty(height, vocab, dtype=self.wide, device=device)
        self.scratch_TV = torch.empty_like(self.buffer_CV[: self.tile])
        self._slope = torch.empty_like(self.buffer_CV) if softcap is not None else None

    def hidden(self, hidden_RD: Tensor, row_C: Tensor) -> Tensor:
        """Rows `row_C` in operand dtype, zero rows below: [padded(C), D]."""
        dtype = hidden_RD.dtype if self.narrow else self.wide
        count, width = len(row_C), hidden_RD.shape[1]
        x_CD = torch.empty(padded(count), width, dtype=dtype, device=hidden_RD.device)
        x_CD[:count] = hidden_RD[row_C]
        x_CD[count:] = 0
        return x_CD

    def exponentials(self, x_CD: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """exp_CV = exp(z - max) in the shared buffer, its sum_C, log_C = log sum_C with all digits
        of a peaked row, the entropy_C of each row; shifted_A = z[label] - max of each action."""
        z_CV = self.buffer_CV[: len(x_CD)]
        self.matmul(x_CD, self.head_VD.T, z_CV)
        sum_C, log_C, dot_C = (
            torch.empty(len(x_CD), dtype=self.wide, device=z_CV.device) for _ in range(3)
        )
        shifted_A = torch.empty(len(chunk.label_A), dtype=self.wide, device=z_CV.device)
        lowest = torch.finfo(self.wide).min
        for r0, r1, a0, a1 in chunk.tiles:
            z_V, product_V = z_CV[r0:r1], self.scratch_TV[: r1 - r0]
            self.finish(z_V, r0, r1)
            z_V.sub_(z_V.amax(1, keepdim=True))
            shifted_A[a0:a1] = z_V[chunk.slot_A[a0:a1] - r0, chunk.label_A[a0:a1]]
            torch.clamp(z_V, min=lowest, out=product_V)  # 0 · (-inf) below
            z_V.exp_()
            exact_C = z_V.sum(1, dtype=torch.float64)
            sum_C[r0:r1] = exact_C
            log_C[r0:r1] = torch.log1p(exact_C - 1)
            product_V.mul_(z_V)
            torch.sum(product_V, 1, out=dot_C[r0:r1])
        return z_CV, sum_C, log_C, log_C - dot_C / sum_C, shifted_A

    def finish(self, z_V: Tensor, r0: int, r1: int) -> None:
        """Raw products -> logits: bias, softcap (its slope is kept), temperature."""
        if self.bias_V is not None:
            z_V.add_(self.bias_V)
        if self.softcap is not None and self._slope is not None:
            z_V.div_(self.softcap).tanh_()
            torch.addcmul(z_V.new_ones(()), z_V, z_V, value=-1, out=self._slope[r0:r1])
            z_V.mul_(self.softcap)
            if self.forbidden_V is not None:
                z_V.add_(self.forbidden_V)
        if self.temperature != 1.0:
            z_V.div_(self.temperature)

    def keep(self, exp_CV: Tensor, scale_C: Tensor, row_N: Tensor | None, count: int) -> Tensor:
        """exp · scale (· slope) of the rows `row_N`, moved to the front; zero rows to a granule.

        In place by tiles: `row_N` increases, so a row is read before its place is written.
        """
        for start in range(0, count, self.tile):
            stop = min(start + self.tile, count)
            at = slice(start, stop) if row_N is None else row_N[start:stop]
            moved = exp_CV[at] if row_N is None else self._select(exp_CV, row_N[start:stop])
            torch.mul(moved, scale_C[at].unsqueeze(1), out=exp_CV[start:stop])
            if self._slope is not None:
                exp_CV[start:stop] *= self._slope[at]
        exp_CV[count : padded(count)] = 0
        return exp_CV[: padded(count)]

    def _select(self, exp_CV: Tensor, row_N: Tensor) -> Tensor:
        return torch.index_select(exp_CV, 0, row_N, out=self.scratch_TV[: len(row_N)])

    def keep_entropy(
        self, exp_CV: Tensor, sum_C: Tensor, shift_C: Tensor, total_C: Tensor, gain_C: Tensor
    ) -> Tensor:
        """p · (-total - gain · (log p + entropy)) / temperature (· slope), in place; `shift_C` is
        entropy - log sum."""
        lowest = torch.finfo(self.wide).tiny  # p = 0: 0 · log(tiny), not 0 · (-inf)
        over_C = 1 / (sum_C * self.temperature)
        for start in range(0, len(exp_CV), self.tile):
            at = slice(start, min(start + self.tile, len(exp_CV)))
            exp_V = exp_CV[at]
            factor_V = torch.clamp(exp_V, min=lowest, out=self.scratch_TV[: len(exp_V)]).log_()
            factor_V.add_(shift_C[at].unsqueeze(1)).mul_(-gain_C[at].unsqueeze(1))
            factor_V.sub_(total_C[at].unsqueeze(1)).mul_(over_C[at].unsqueeze(1))
            exp_V.mul_(factor_V)
            if self._slope is not None:
                exp_V.mul_(self._slope[at])
        return exp_CV

    def at_labels(self, slot_A: Tensor, label_A: Tensor, dlogit_A: Tensor) -> Tensor:
        """Gradient by the final logits at the labels -> by the raw products."""
        if self._slope is not None:
            dlogit_A = dlogit_A * self._slope[slot_A, label_A]
        return dlogit_A / self.temperature

    def grad_hidden(self, dz_CV: Tensor) -> Tensor:
        out_CD = dz_CV.new_empty(len(dz_CV), self.head_VD.shape[1])
        return self.matmul(self._operand(dz_CV), self.head_VD, out_CD)

    def add_grad_head(self, dz_CV: Tensor, x_CD: Tensor, sum_VD: Tensor) -> None:
        """sum_VD += dzᵀ · x, accumulated in the wide dtype."""
        if self.narrow:
            sum_VD += torch.mm(self._operand(dz_CV).T, x_CD, out_dtype=self.wide)
        else:
            sum_VD.addmm_(dz_CV.T, x_CD)

    def _operand(self, dz_CV: Tensor) -> Tensor:
        return dz_CV.to(self.head_VD.dtype)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.narrow:
            return out.copy_(torch.mm(a, b, out_dtype=self.wide))
        return torch.mm(a, b, out=out)


class Gradients:
    """Sums of dhidden, dhead and dbias over chunks; None where nobody wants one.

    All are in the wide dtype, to be scaled and rounded once by `rounded`. With `shared_VD` the
    head's gradient is added to that tensor, which is not ours to return.
    """

    def __init__(
        self,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        wants: Sequence[bool],
        shared_VD: Tensor | None = None,
    ) -> None:
        wide = wide_dtype(head_VD.dtype)
        self.dtypes = hidden_RD.dtype, head_VD.dtype, None if bias_V is None else bias_V.dtype
        self.shared = shared_VD is not None
        self.dhidden_RD = torch.zeros_like(hidden_RD, dtype=wide) if wants[0] else None
        self.dhead_VD = shared_VD if wants[1] else None
        if wants[1] and shared_VD is None:
            self.dhead_VD = torch.zeros_like(head_VD, dtype=wide)
        self.dbias_V = None
        if bias_V is not None and wants[2]:
            self.dbias_V = torch.zeros_like(bias_V, dtype=wide)

    def add(self, head: Head, row_N: Tensor, dz_NV: Tensor, x_ND: Tensor) -> None:
        """dz_NV and x_ND belong to hidden rows `row_N`, padded with zero rows."""
        if self.dhidden_RD is not None:
            self.dhidden_RD[row_N] = head.grad_hidden(dz_NV)[: len(row_N)]
        if self.dhead_VD is not None:
            head.add_grad_head(dz_NV, x_ND, self.dhead_VD)
        if self.dbias_V is not None:
            self.dbias_V += dz_NV.sum(0)

    def sums(self) -> tuple[Tensor | None, ...]:
        """(dhidden, dhead, dbias) in the wide dtype."""
        return self.dhidden_RD, None if self.shared else self.dhead_VD, self.dbias_V

    def result(self) -> tuple[Tensor | None, ...]:
        """The sums in the dtypes of the arguments."""
        return tuple(map(rounded, self.sums(), self.dtypes))


def rounded(
    sum_N: Tensor | None, dtype: torch.dtype | None, scale: Tensor | None = None
) -> Tensor | None:
    """sum · scale in the dtype of the sum, rounded to `dtype` once; parts of 64 MiB, so that CPU
    needs no second copy in the wide dtype."""
    if sum_N is None or dtype is None:
        return None
    if scale is None or sum_N.dtype == dtype:
        return (sum_N if scale is None else sum_N * scale).to(dtype)
    out_N = torch.empty_like(sum_N, dtype=dtype)
    step = max(ROUNDED_BYTES * len(sum_N) // max(sum_N.nbytes, 1), 1)
    for start in range(0, len(sum_N), step):
        part = slice(start, start + step)
        torch.mul(sum_N[part], scale, out=out_N[part])
    return out_N


def label_gradient(
    dz_CV: Tensor,
    at: tuple[Tensor, Tensor],
    logprob_A: Tensor,
    coef_A: Tensor,
    total_A: Tensor,
    shared: bool,
) -> Tensor:
    """dZ at the labels `at` (row, id): -C · expm1(logp) - (S - C) · p, where C sums `coef_A` over
    the actions of one row and one label, and S = `total_A` over all of the row's actions.

    p - 1 comes from expm1, never from p already rounded. Equal entries get equal values, so the
    caller may write them in any order. The places `at` of `dz_CV` are overwritten if `shared`.
    """
    same_A = coef_A
    if shared:
        dz_CV[at] = 0
        same_A = dz_CV.index_put_(at, coef_A, accumulate=True)[at]
    return -same_A * torch.expm1(logprob_A) - (total_A - same_A) * logprob_A.exp()
