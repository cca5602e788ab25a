"""One matrix product in two sizes, the second too large for any register file; for test_aot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def product(p_a, p_b, p_c, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    o_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = tl.arange(0, COLUMNS)
    b_c = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        o_k = start + tl.arange(0, DEPTH)
        b_a = tl.load(p_a + o_m[:, None] * K + o_k[None, :], mask=o_m[:, None] < M, other=0.0)
        b_b = tl.load(p_b + o_k[:, None] * N + o_n[None, :], mask=o_n[None, :] < N, other=0.0)
        b_c = tl.dot(b_a, b_b, b_c)
    tl.store(p_c + o_m[:, None] * N + o_n[None, :], b_c, mask=o_m[:, None] < M)


class Launch(NamedTuple):
    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, int]
    attrs: dict[tuple[int], list[list[object]]]
    num_warps: int
    num_stages: int


def configurations() -> Iterator[Launch]:
    signature = {name: "*bf16" for name in ("p_a", "p_b")} | {"p_c": "*fp32"}
    signature |= {name: "i32" for name in "MNK"}
    for columns in (64, 512):
        sizes = {"ROWS": 64, "COLUMNS": columns, "DEPTH": 64}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
        whole = signature | dict.fromkeys(sizes, "constexpr")
        yield Launch(f"product/{columns}", product, whole, sizes, aligned, 4, 3)
