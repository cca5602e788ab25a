# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels of the output layer share: one row's softmax statistics, and the form in
which a launch is handed to the compiler ahead of time.

Statistics of a row are (m, rest, dot) a lane: the maximum, Σ exp(z - m) without one maximum, and
Σ exp(z - m)(z - m). Keeping the maximum out of the sum keeps all digits of 1 - p when a row is
peaked: logsumexp = m + log1p(rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Configuration:
    """One launch as the compiler sees it: types, constants, divisible arguments, warps, stages."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int


def configuration(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: tuple[str, ...],
    launch: tuple[int, int],
) -> Configuration:
    """Arguments in the kernel's order. `divisible` are integers that are multiples of 16; pointers
    of whole allocations always are. `launch` is (warps, stages)."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in divisible
    }
    return Configuration(name, kernel, signature, dict(constants), attrs, *launch)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0 with relative precision: a series near 0, where the difference of two
    close numbers would lose digits."""
    s = 1.0 + x * (1.0 / 9.0)
    s = 1.0 + x * (1.0 / 8.0) * s
    s = 1.0 + x * (1.0 / 7.0) * s
    s = 1.0 + x * (1.0 / 6.0) * s
    s = 1.0 + x * (1.0 / 5.0) * s
    s = 1.0 + x * (1.0 / 4.0) * s
    s = 1.0 + x * (1.0 / 3.0) * s
    s = 1.0 + x * (1.0 / 2.0) * s
    return tl.where(tl.abs(x) < 0.5, x * s, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 with relative precision: 2 atanh(x / (2 + x)) near 0."""
    s = x / (2.0 + x)
    q = s * s
    series = 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * (1.0 / 7.0 + q / 9.0))))
    return tl.where(x < 0.25, series, tl.log(1.0 + x))


@triton.jit
def final_logit(raw, bias, temperature, softcap, HAS_CAP: tl.constexpr):
    """The final logit, and the derivative of the softcap at it."""
    z = raw + bias
    slope = 1.0
    if HAS_CAP:
        x = z / softcap
        q = x * x
        e = tl.exp(-2.0 * tl.abs(x))
        odd = q * (-1.0 / 3.0 + q * (2.0 / 15.0 + q * (-17.0 / 315.0 + q * (62.0 / 2835.0))))
        far = tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)
        near = tl.abs(x) < 0.25
        t = tl.where(near, x + x * odd, far)
        slope = tl.where(near, 1.0 - t * t, 4.0 * e / ((1.0 + e) * (1.0 + e)))
        z = tl.where(z == float("-inf"), z, softcap * t)  # a forbidden id stays forbidden
    return z / temperature, slope


@triton.jit
def logits_tile(
    p_row, p_bias, o_v, m_v, temperature, softcap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Final logits of a tile, -inf beyond the vocabulary, and their slopes."""
    raw = tl.load(p_row + o_v, mask=m_v, other=0.0)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(p_bias + o_v, mask=m_v, other=0.0)
    z, slope = final_logit(raw, bias, temperature, softcap, HAS_CAP)
    return tl.where(m_v, z, float("-inf")), slope


@triton.jit
def combine(m, rest, dot):
    """Lanes (m, rest, dot) -> maximum, logsumexp - maximum, 1 / Σ exp(z - max), entropy.

    An empty lane has m = -inf. A row without a finite logit gives NaN.
    """
    top = tl.max(m, 0)
    scale = tl.where(m == float("-inf"), 0.0, tl.exp(m - top))
    apart = tl.where(scale == 0.0, 0.0, m - top)
    total = tl.sum(scale * (dot + apart * (1.0 + rest)), 0)
    tied = tl.sum(tl.where(m == top, 1.0, 0.0), 0) - 1.0
    others = tl.sum(scale * rest + tl.where(m == top, 0.0, scale), 0) + tied
    others = tl.where(top == float("-inf"), float("nan"), others)
    logsum = log1p(others)
    inverse = 1.0 / (1.0 + others)
    return top, logsum, inverse, logsum - total * inverse


@triton.jit
def sweep(
    p_row,
    p_bias,
    vocab,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_b = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        o_v = start + o_b
        z, _ = logits_tile(p_row, p_bias, o_v, o_v < vocab, temperature, softcap, HAS_BIAS, HAS_CAP)
        d = tl.where(z == float("-inf"), float("-inf"), z - m)
        e = tl.exp(-tl.abs(d))
        finite = tl.where(e == 0.0, 0.0, d)  # 0 · inf at the first logit of a lane
        up = d > 0
        dot = tl.where(up, e * (dot - finite * (rest + 1.0)), dot + e * finite)
        rest = tl.where(up, (rest + 1.0) * e, rest + e)
        m = tl.where(up, z, m)
    return combine(m, rest, dot)
