"""Device code over rows of logits: statistics, loss, coefficients, and dZ where the logits lie.

One program owns one row of a chunk of raw products r = h · Wᵀ (float32). First sweep, one
exponential an element: each lane keeps its maximum m, the sum of the others,
`rest` = Σ exp(z - m) without one maximum, and `dot` = Σ exp(z - m)(z - m). Keeping the maximum out
of the sum keeps all digits of 1 - p when a row is peaked: logsumexp = m + log1p(rest).
Second sweep: z again from r, then dZ.

    z = softcap · tanh((r + b) / softcap) / temperature
    dZ = gain / temperature · slope · (Σ_a c_a onehot(y_a) - S p - E p (log p + H))

`gain` is a power of two that keeps float16 in range; it is taken out again after the products.

Where dZ has half the width of a logit, a row of dZ is written over the first half of its own row
of logits. Tile k of dZ covers logits of tiles <= k, so one barrier between the loads and the stores
of a tile makes that safe. A row is never read by another program: no atomics, no order.

Bytes for an element of the vocabulary: 4 read, 4 read, 2 or 4 written. Offsets of rows are 64-bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

CLAMP: tl.constexpr = tl.constexpr(10.0)  # reference.CLAMP


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
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in divisible
    }
    return Configuration(name, kernel, signature, dict(constants), attrs, *launch)


@triton.jit
def _expm1(x):
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
def _log1p(x):
    """log(1 + x) for x >= 0 with relative precision: 2 atanh(x / (2 + x)) near 0."""
    s = x / (2.0 + x)
    q = s * s
    series = 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * (1.0 / 7.0 + q / 9.0))))
    return tl.where(x < 0.25, series, tl.log(1.0 + x))


@triton.jit
def _logit(raw, bias, temperature, softcap, HAS_CAP: tl.constexpr):
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
        z = softcap * t
    return z / temperature, slope


@triton.jit
def _tile(
    p_row, p_bias, o_v, m_v, temperature, softcap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Final logits of a tile, -inf beyond the vocabulary, and their slopes."""
    raw = tl.load(p_row + o_v, mask=m_v, other=0.0)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(p_bias + o_v, mask=m_v, other=0.0)
    z, slope = _logit(raw, bias, temperature, softcap, HAS_CAP)
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
    logsum = _log1p(others)
    inverse = 1.0 / (1.0 + others)
    return top, logsum, inverse, logsum - total * inverse


@triton.jit
def _sweep(
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
        z, _ = _tile(p_row, p_bias, o_v, o_v < vocab, temperature, softcap, HAS_BIAS, HAS_CAP)
        d = tl.where(z == float("-inf"), float("-inf"), z - m)
        e = tl.exp(-tl.abs(d))
        finite = tl.where(e == 0.0, 0.0, d)  # 0 · inf at the first logit of a lane
        up = d > 0
        dot = tl.where(up, e * (dot - finite * (rest + 1.0)), dot + e * finite)
        rest = tl.where(up, (rest + 1.0) * e, rest + e)
        m = tl.where(up, z, m)
    return combine(m, rest, dot)


@triton.jit
def _score(
    p_row,
    p_bias,
    label,
    top,
    logsum,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Log-probability of one label, and the slope of the softcap there."""
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(p_bias + label)
    z, slope = _logit(tl.load(p_row + label), bias, temperature, softcap, HAS_CAP)
    return (z - top) - logsum, slope


@triton.jit
def _write_row(
    p_row,
    p_out,
    p_bias,
    vocab,
    top,
    logsum,
    inverse,
    entropy,
    total,
    total_entropy,
    scale,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dZ of a row as if no column were a label. May overwrite the logits that it reads."""
    o_b = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        o_v = start + o_b
        m_v = o_v < vocab
        z, slope = _tile(p_row, p_bias, o_v, m_v, temperature, softcap, HAS_BIAS, HAS_CAP)
        shifted = tl.where(z == float("-inf"), float("-inf"), z - top)
        p = tl.exp(shifted) * inverse
        g = -total * p
        if HAS_ENTROPY:
            g -= total_entropy * p * tl.where(p == 0.0, 0.0, (shifted - logsum) + entropy)
        g = g * slope * scale
        tl.debug_barrier()  # every load of this tile before any store over it
        tl.store(p_out + o_v, g.to(p_out.dtype.element_ty), mask=m_v)
    tl.debug_barrier()  # the labels' entries are stored last


@triton.jit
def _write_labels(
    p_out,
    p_label,
    p_logprob,
    p_coef,
    p_slope,
    a_first,
    a_last,
    entropy,
    total,
    total_entropy,
    scale,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """dZ at the labels: -C · expm1(logp) - (S - C) · p, where C sums over actions of one label.

    Equal labels get equal values, so the order of these stores does not matter.
    """
    for a in range(a_first, a_last):
        label = tl.load(p_label + a)
        same = 0.0
        for other in range(a_first, a_last):
            same += tl.where(tl.load(p_label + other) == label, tl.load(p_coef + other), 0.0)
        logprob = tl.load(p_logprob + a)
        p = tl.exp(logprob)
        g = -same * _expm1(logprob) - (total - same) * p
        if HAS_ENTROPY:
            g -= total_entropy * p * tl.where(p == 0.0, 0.0, logprob + entropy)
        if HAS_CAP:
            g *= tl.load(p_slope + a)
        tl.store(p_out + label, (g * scale).to(p_out.dtype.element_ty))


@triton.jit
def _objective(
    logprob,
    behavior,
    advantage,
    reference,
    low,
    high,
    kl_coef,
    HAS_BEHAVIOR: tl.constexpr,
    HAS_REFERENCE: tl.constexpr,
):
    """Loss of one action before its weight, and its derivative by the log-probability."""
    if HAS_BEHAVIOR:
        raw = logprob - behavior
        ratio = tl.exp(tl.minimum(tl.maximum(raw, -CLAMP), CLAMP))
        clipped = tl.minimum(tl.maximum(ratio, low), high)
        each = -tl.minimum(ratio * advantage, clipped * advantage)
        flat = (((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))) | (
            tl.abs(raw) > CLAMP
        )
        slope = tl.where(flat, 0.0, -ratio * advantage)
    else:
        each = -advantage
        slope = -advantage
    if HAS_REFERENCE:
        d = reference - logprob
        bounded = tl.minimum(tl.maximum(d, -CLAMP), CLAMP)
        grow = -_expm1(-tl.abs(bounded))  # exp(d) - 1 = (1 - exp(-d)) · exp(d) for d > 0
        grow = tl.where(bounded > 0, grow * tl.exp(bounded), -grow)
        each += kl_coef * (grow - bounded)
        slope -= kl_coef * tl.where(tl.abs(d) <= CLAMP, grow, 0.0)
    return each, slope


@triton.jit(do_not_specialize=["first_row"])
def surrogate_rows(
    p_z,
    p_dz,
    p_bias,
    p_label,
    p_first,
    p_behavior,
    p_advantage,
    p_weight,
    p_reference,
    p_logprob,
    p_entropy,
    p_loss,
    p_coef,
    p_slope,
    p_kept,
    first_row,
    vocab,
    stride_z,
    stride_dz,
    temperature,
    softcap,
    low,
    high,
    kl_coef,
    gain,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BEHAVIOR: tl.constexpr,
    HAS_REFERENCE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i of the chunk scores actions first[first_row + i] : first[first_row + i + 1]."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_z + i_row * stride_z
    p_out = p_dz + i_row * stride_dz
    a_first = tl.load(p_first + first_row + i_row)
    a_last = tl.load(p_first + first_row + i_row + 1)
    top, logsum, inverse, entropy = _sweep(
        p_row, p_bias, vocab, temperature, softcap, HAS_BIAS, HAS_CAP, BLOCK
    )
    total = 0.0
    nonzero = 0
    for a in range(a_first, a_last):
        logprob, cap_slope = _score(
            p_row,
            p_bias,
            tl.load(p_label + a),
            top,
            logsum,
            temperature,
            softcap,
            HAS_BIAS,
            HAS_CAP,
        )
        behavior = 0.0
        reference = 0.0
        if HAS_BEHAVIOR:
            behavior = tl.load(p_behavior + a)
        if HAS_REFERENCE:
            reference = tl.load(p_reference + a)
        each, slope = _objective(
            logprob,
            behavior,
            tl.load(p_advantage + a),
            reference,
            low,
            high,
            kl_coef,
            HAS_BEHAVIOR,
            HAS_REFERENCE,
        )
        weight = tl.load(p_weight + a)
        coef = weight * slope
        total += coef
        nonzero += (coef != 0.0).to(tl.int32)
        tl.store(p_logprob + a, logprob)
        tl.store(p_entropy + a, entropy)
        tl.store(p_loss + a, weight * each)
        tl.store(p_coef + a, coef)
        if HAS_CAP:
            tl.store(p_slope + a, cap_slope)
    tl.store(p_kept + i_row, nonzero)
    if GRADIENT:  # noqa: SIM102 - a constant: without it the code below is not compiled
        if nonzero > 0:
            scale = gain / temperature
            _write_row(
                p_row,
                p_out,
                p_bias,
                vocab,
                top,
                logsum,
                inverse,
                entropy,
                total,
                0.0,
                scale,
                temperature,
                softcap,
                HAS_BIAS,
                HAS_CAP,
                False,
                BLOCK,
            )
            _write_labels(
                p_out,
                p_label,
                p_logprob,
                p_coef,
                p_slope,
                a_first,
                a_last,
                entropy,
                total,
                0.0,
                scale,
                HAS_CAP,
                False,
            )


@triton.jit(do_not_specialize=["first_row"])
def upstream_rows(
    p_z,
    p_dz,
    p_bias,
    p_label,
    p_first,
    p_glogprob,
    p_gentropy,
    p_logprob,
    p_entropy,
    p_slope,
    first_row,
    vocab,
    stride_z,
    stride_dz,
    temperature,
    softcap,
    gain,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probabilities and entropies; with GRADIENT also dZ for given upstream gradients."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_z + i_row * stride_z
    p_out = p_dz + i_row * stride_dz
    a_first = tl.load(p_first + first_row + i_row)
    a_last = tl.load(p_first + first_row + i_row + 1)
    top, logsum, inverse, entropy = _sweep(
        p_row, p_bias, vocab, temperature, softcap, HAS_BIAS, HAS_CAP, BLOCK
    )
    total = 0.0
    total_entropy = 0.0
    for a in range(a_first, a_last):
        logprob, cap_slope = _score(
            p_row,
            p_bias,
            tl.load(p_label + a),
            top,
            logsum,
            temperature,
            softcap,
            HAS_BIAS,
            HAS_CAP,
        )
        tl.store(p_logprob + a, logprob)
        tl.store(p_entropy + a, entropy)
        if GRADIENT:
            total += tl.load(p_glogprob + a)
            if HAS_ENTROPY:
                total_entropy += tl.load(p_gentropy + a)
            if HAS_CAP:
                tl.store(p_slope + a, cap_slope)
    if GRADIENT:
        scale = gain / temperature
        _write_row(
            p_row,
            p_out,
            p_bias,
            vocab,
            top,
            logsum,
            inverse,
            entropy,
            total,
            total_entropy,
            scale,
            temperature,
            softcap,
            HAS_BIAS,
            HAS_CAP,
            HAS_ENTROPY,
            BLOCK,
        )
        _write_labels(
            p_out,
            p_label,
            p_logprob,
            p_glogprob,
            p_slope,
            a_first,
            a_last,
            entropy,
            total,
            total_entropy,
            scale,
            HAS_CAP,
            HAS_ENTROPY,
        )


def launch(vocab: int) -> dict[str, int]:
    """Tile of columns and warps of a row program, from the vocabulary only.

    Example: `launch(151936)` is {"BLOCK": 4096, "num_warps": 8}.
    """
    block = min(4096, max(128, triton.next_power_of_2(vocab)))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def configurations() -> list[Configuration]:
    """The launches at the vocabularies of SmolLM2 and Qwen3: every dtype of dZ, plain and with all
    options."""
    found = []
    for vocab in (49152, 151936):
        tile = launch(vocab)
        for dtype in (torch.bfloat16, torch.float32):
            narrow = "bf16" if dtype == torch.bfloat16 else "fp32"
            for options in ("plain", "full", "score"):
                full = options == "full"
                for kernel in (surrogate_rows, upstream_rows):
                    flags = {
                        "HAS_BIAS": full,
                        "HAS_CAP": full,
                        "HAS_BEHAVIOR": True,
                        "HAS_REFERENCE": full,
                        "HAS_ENTROPY": full,
                        "GRADIENT": options != "score",
                        "BLOCK": tile["BLOCK"],
                    }
                    found.append(
                        configuration(
                            f"{kernel.__name__}/V{vocab}/{narrow}/{options}",
                            kernel,
                            _types(kernel, narrow),
                            {k: v for k, v in flags.items() if k in kernel.arg_names},
                            ("vocab", "stride_z", "stride_dz"),
                            (tile["num_warps"], 1),
                        )
                    )
    return found


def _types(kernel: Any, narrow: str) -> dict[str, str]:
    special = {"p_dz": f"*{narrow}", "p_label": "*i64", "p_first": "*i64", "p_kept": "*i32"}
    integers = dict.fromkeys(("first_row", "vocab", "stride_z", "stride_dz"), "i32")
    scalars = ("temperature", "softcap", "low", "high", "kl_coef", "gain")
    types = special | integers | dict.fromkeys(scalars, "fp32")
    return {n: types.get(n, "*fp32") for n in kernel.arg_names}
