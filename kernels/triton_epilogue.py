# mypy: disable-error-code="no-untyped-def"
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

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .triton_softmax import Configuration, configuration, expm1, final_logit, logits_tile, sweep

CLAMP: tl.constexpr = tl.constexpr(10.0)  # reference.CLAMP


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
    z, slope = final_logit(tl.load(p_row + label), bias, temperature, softcap, HAS_CAP)
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
        z, slope = logits_tile(p_row, p_bias, o_v, m_v, temperature, softcap, HAS_BIAS, HAS_CAP)
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
        g = -same * expm1(logprob) - (total - same) * p
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
        grow = -expm1(-tl.abs(bounded))  # exp(d) - 1 = (1 - exp(-d)) · exp(d) for d > 0
        grow = tl.where(bounded > 0, grow * tl.exp(bounded), -grow)
        each += kl_coef * (grow - bounded)
        slope -= kl_coef * tl.where(tl.abs(d) <= CLAMP, grow, 0.0)
    # Minima and maxima of the device drop NaN; a row that is not finite must show.
    bad = logprob != logprob
    return tl.where(bad, float("nan"), each), tl.where(bad, float("nan"), slope)


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
    top, logsum, inverse, entropy = sweep(
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
    top, logsum, inverse, entropy = sweep(
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


ALL = ("HAS_BIAS", "HAS_CAP", "HAS_REFERENCE", "HAS_ENTROPY")
# Flags that are on; HAS_BEHAVIOR and GRADIENT are, unless they are named with a minus.
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "full": ALL,
    "score": ("-GRADIENT",),
    "bias": ("HAS_BIAS",),
    "cap": ("HAS_CAP",),
    "reference": ("HAS_REFERENCE",),
    "entropy": ("HAS_ENTROPY",),
    "on policy": ("-HAS_BEHAVIOR",),
}


def configurations() -> list[Configuration]:
    """The launches at the vocabularies of SmolLM2 and Qwen3 in every dtype of dZ, plain and with
    all options; single options at one; GPT-2's ragged vocabulary."""
    usual = ("plain", "full", "score")
    launches = [(v, n, o) for v in (49152, 151936) for n in ("bf16", "fp32") for o in usual]
    launches += [(151936, "fp16", o) for o in ("plain", "full")]
    launches += [(50257, "bf16", o) for o in ("plain", "full")]
    found = [
        _configuration(kernel, *launch)
        for launch in launches
        for kernel in (surrogate_rows, upstream_rows)
    ]
    for option in [name for name in OPTIONS if name not in usual]:
        kernel = upstream_rows if option == "entropy" else surrogate_rows
        found.append(_configuration(kernel, 151936, "bf16", option))
    return found


def _configuration(kernel: Any, vocab: int, narrow: str, options: str) -> Configuration:
    tile = launch(vocab)
    on = OPTIONS[options]
    flags: dict[str, Any] = {name: name in on for name in ALL}
    flags |= {name: f"-{name}" not in on for name in ("HAS_BEHAVIOR", "GRADIENT")}
    flags["BLOCK"] = tile["BLOCK"]
    whole = () if vocab % 16 else ("vocab",)  # the launch tells the compiler what 16 divides
    return configuration(
        f"{kernel.__name__}/V{vocab}/{narrow}/{options}",
        kernel,
        _types(kernel, narrow),
        {k: v for k, v in flags.items() if k in kernel.arg_names},
        (*whole, "stride_z", "stride_dz"),
        (tile["num_warps"], 1),
    )


def _types(kernel: Any, narrow: str) -> dict[str, str]:
    special = {"p_dz": f"*{narrow}", "p_label": "*i64", "p_first": "*i64", "p_kept": "*i32"}
    integers = dict.fromkeys(("first_row", "vocab", "stride_z", "stride_dz"), "i32")
    scalars = ("temperature", "softcap", "low", "high", "kl_coef", "gain")
    types = special | integers | dict.fromkeys(scalars, "fp32")
    return {n: types.get(n, "*fp32") for n in kernel.arg_names}
