"""Chunks of logits for the Triton path: the matrix products around `triton_epilogue`.

Logits of a chunk are float32 in one buffer. Operands keep the head's dtype: dZ in half precision
lies in the first half of each row of the buffer, and rows that stay are gathered into the second
half, so a chunk never needs another [C, V] buffer. Where a bias wants its gradient, dZ stays
float32 and is summed before it is rounded into a copy for the products. Rows of the buffer are
multiples of 64 bytes, whatever the vocabulary, so the matrix products see aligned operands.

CUDA: products of half-precision operands with float32 results; dW accumulates in float32 inside the
product (`addmm` with out_dtype) where torch has that, or else by slices of the vocabulary.
CPU (Triton's interpreter): the same numbers from float32 copies of the half-precision operands.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import rows
from .rows import GRANULE, Gradients, Live, padded

ALIGN = 16  # elements of float32: 64 bytes
# dW costs 8 bytes an element and chunk: at 2048 rows that is hidden behind the products on A100 to
# H200 (their balance is at 300 to 600 rows). At A = 8192, D = 4096, V = 151936 a call holds dW
# (2.49 GB) and dh (0.13 GB), both float32, and the buffer (1.25 GB): 3.87 GB. The buffer is gone
# when backward rounds dW and dh into half-precision copies (1.25 and 0.07 GB): 3.94 GB.
CHUNK_BYTES = 5 << 28
CHUNK_ROWS = 8192
SLICE_BYTES = 256 << 20


def chunk_rows(vocab: int, device: str) -> int:
    """Rows of a chunk, a power of two, from the vocabulary and never from the number of actions.

    Example: `chunk_rows(151936, "cuda")` is 2048 (1.16 GiB).
    """
    if device == "cpu":
        return rows.chunk_rows(vocab, 4, device)
    fits = max(CHUNK_BYTES // max(vocab * 4, 1), GRANULE)
    return min(1 << (fits.bit_length() - 1), CHUNK_ROWS)


class Products:
    """The head, its buffer of logits, and the three matrix products of a chunk."""

    def __init__(
        self, head_VD: Tensor, bias_V: Tensor | None, count: int, *, wide: bool = False
    ) -> None:
        """`wide`: dZ is written in float32 whatever the head's dtype."""
        self.dtype, self.device = head_VD.dtype, head_VD.device
        self.vocab, self.width = head_VD.shape
        self.on_cpu = self.device.type == "cpu"
        self.half = self.dtype != torch.float32
        self.dz_dtype = torch.float32 if wide else self.dtype
        self.head_VD = self._operand(head_VD.detach())
        self.bias_V = None if bias_V is None else bias_V.detach().float().contiguous()
        self.chunk = chunk_rows(self.vocab, self.device.type)
        self.stride = -(-self.vocab // ALIGN) * ALIGN
        height = min(self.chunk, padded(count))
        self.buffer_CV = torch.empty(height, self.stride, device=self.device)

    def _operand(self, x: Tensor) -> Tensor:
        return x.float() if self.on_cpu else x

    def hidden(self, hidden_RD: Tensor, row_C: Tensor) -> Tensor:
        """Rows `row_C`, zero rows below to a multiple of GRANULE."""
        x_CD = torch.empty(padded(len(row_C)), self.width, dtype=self.dtype, device=self.device)
        x_CD[: len(row_C)] = hidden_RD[row_C]
        x_CD[len(row_C) :] = 0
        return self._operand(x_CD)

    def logits(self, x_CD: Tensor) -> Tensor:
        """Raw products in the buffer."""
        z_CV = self.buffer_CV[: len(x_CD), : self.vocab]
        if self.half and not self.on_cpu:
            return torch.mm(x_CD, self.head_VD.T, out_dtype=torch.float32, out=z_CV)
        return torch.mm(x_CD, self.head_VD.T, out=z_CV)

    @property
    def dz_CV(self) -> Tensor:
        """Where the kernel writes dZ: the buffer, or the first halves of its rows."""
        return self.buffer_CV.view(self.dz_dtype)[:, : self.vocab]

    def all_rows(self, count: int) -> Tensor:
        """dZ of the chunk's `count` rows, zero rows below to a granule."""
        dz_NV = self.dz_CV[: padded(count)]
        dz_NV[count:] = 0
        return dz_NV

    def kept(self, row_N: Tensor, count: int) -> Tensor:
        """dZ of rows `row_N` of the chunk's `count` rows, zero rows below to a granule."""
        if len(row_N) == count:
            return self.all_rows(count)
        height = padded(len(row_N))
        if self.dz_dtype != torch.float32:
            dz_NV = self.buffer_CV.view(self.dz_dtype)[:height, self.stride :][:, : self.vocab]
            dz_NV[: len(row_N)] = self.dz_CV[row_N]
        else:
            dz_NV = self.dz_CV.new_empty(height, self.vocab)
            torch.index_select(self.dz_CV, 0, row_N, out=dz_NV[: len(row_N)])
        dz_NV[len(row_N) :] = 0
        return dz_NV

    def operand(self, dz_NV: Tensor) -> Tensor:
        """dZ, rounded to the head's dtype, for `grad_hidden` and `add_grad_head`."""
        return self._operand(dz_NV.to(self.dtype))

    def grad_hidden(self, dz_NV: Tensor) -> Tensor:
        """float32 [N, D]."""
        if self.half and not self.on_cpu:
            return torch.mm(dz_NV, self.head_VD, out_dtype=torch.float32)
        return torch.mm(dz_NV, self.head_VD)

    def add_grad_head(self, dz_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, alpha: float) -> None:
        """sum_VD += alpha · dzᵀ · x in float32."""
        if not self.half or self.on_cpu:
            sum_VD.addmm_(dz_NV.T, x_ND, alpha=alpha)
        elif accumulates(self.device, self.dtype):
            torch.addmm(sum_VD, dz_NV.T, x_ND, out_dtype=torch.float32, alpha=alpha, out=sum_VD)
        else:
            step = max(SLICE_BYTES // (4 * self.width), 1)
            for start in range(0, self.vocab, step):
                part = slice(start, start + step)
                product = torch.mm(dz_NV[:, part].T, x_ND, out_dtype=torch.float32)
                sum_VD[part].add_(product, alpha=alpha)


@cache
def accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of half-precision operands to a float32 sum in place.

    Asked once with numbers whose result is exact: 1 + 2 · (16 · 1) = 33.
    """
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, alpha=2.0, out=total)
    except (RuntimeError, TypeError):  # no such overload, or not for this device
        return False
    return bool((total == 33).all())


def add_rows(
    gradients: Gradients,
    products: Products,
    row_N: Tensor,
    dz_NV: Tensor,
    x_ND: Tensor,
    gain: float,
) -> None:
    """Adds the gradients of hidden rows `row_N`, to which dz_NV (times gain) and x_ND belong."""
    if gradients.dbias_V is not None:
        gradients.dbias_V.add_(dz_NV.sum(0, dtype=torch.float32), alpha=1.0 / gain)
    dz_NV = products.operand(dz_NV)
    if gradients.dhidden_RD is not None:
        dx_ND = products.grad_hidden(dz_NV)[: len(row_N)]
        gradients.dhidden_RD[row_N] = dx_ND.div_(gain)
    if gradients.dhead_VD is not None:
        products.add_grad_head(dz_NV, x_ND, gradients.dhead_VD, 1.0 / gain)


def first_actions(live: Live) -> Tensor:
    """[R + 1] int64: actions first[r] : first[r + 1] are scored on the r-th live row."""
    count = len(live.row_R)
    if not live.shared:
        return torch.arange(count + 1, device=live.slot_A.device)
    return torch.searchsorted(live.slot_A, torch.arange(count + 1, device=live.slot_A.device))


def float16_gain(dtype: torch.dtype, size_A: Tensor, live: Live, temperature: float) -> float:
    """The power of two by which dZ is scaled so that float16 neither loses small coefficients nor
    overflows. `size_A` bounds each action's coefficient for a ratio of 1; an entry of dZ is at most
    the sum over a row's actions / temperature, which becomes at most 1/8, and ratios are at most
    exp(10), which gives 2754 of float16's 65504.

    Example: float16, one action of 3e-6 and temperature 1 give 32768; other dtypes give 1.
    """
    if dtype != torch.float16 or not len(size_A):
        return 1.0
    sum_R = torch.zeros(len(live.row_R), dtype=torch.float64, device=size_A.device)
    largest = float(sum_R.index_add_(0, live.slot_A, size_A.double()).max()) / temperature
    if not 0 < largest < float("inf"):
        return 1.0
    exponent = torch.frexp(torch.tensor(largest, dtype=torch.float64))[1]
    return 2.0 ** max(min(-3 - int(exponent), 100), -100)  # finite in float32
