"""Laws of the log-probability's Triton kernels, in Triton's interpreter: with a gradient over
chunks of logits, and without logits."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels
from fastturn.kernels import triton_epilogue, triton_logprob

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("poisoned")
OPTIONS: list[dict[str, Any]] = [
    {"softcap": 3.0, "temperature": 0.7},
    {"per_row": 4},
    {"per_row": 3, "softcap": 2.0, "bias": False},
    {"bias": False, "spread": 30.0},
]


def options_of(case: Any) -> dict[str, Any]:
    return {k: v for k, v in case.given.items() if k in ("row_A", "temperature", "softcap")}


def by_tiles(case: Any) -> dict[str, Tensor]:
    """Scores without a gradient: small widths take the kernel without logits."""
    found = kernels.linear_logprob(
        case.hidden_RD,
        case.head_VD,
        case.action_A,
        bias_V=case.bias_V,
        impl="triton",
        **options_of(case),
    )
    return dict(zip(("logprob_A", "entropy_A"), found, strict=True))


def check(oracle: Any, case: Any, dtype: torch.dtype) -> None:
    """Both kernels by the oracle, and close to each other."""
    case = case.to(dtype)
    plain, truth = case.score("reference"), case.to(DOUBLE).score("reference")
    oracle(case.score("triton"), plain, truth, dtype)
    outputs = ("logprob_A", "entropy_A")
    oracle(by_tiles(case), plain, {name: truth[name] for name in outputs}, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((0, 32, 130), SINGLE),
        ((1, 96, 300), HALF),
        ((7, 128, 4101), SINGLE),
        ((7, 128, 4101), HALF),
        ((64, 96, 1003), HALF),
        ((257, 32, 130), SINGLE),
    ],
)
def test_accuracy(case: Any, oracle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(oracle, case(*shape, dtype), dtype)


@pytest.mark.parametrize("given", OPTIONS)
def test_options(case: Any, oracle: Any, short_chunks: Any, given: dict[str, Any]) -> None:
    for dtype in (SINGLE, HALF):
        check(oracle, case(35, 32, 301, dtype, **given), dtype)


@pytest.mark.parametrize("offset", [-200.0, -110.0, 200.0])
def test_logit_offsets(case: Any, oracle: Any, offset: float) -> None:
    given = case(9, 32, 300, SINGLE)
    check(oracle, replace(given, bias_V=(given.bias_V + offset).to(SINGLE)), SINGLE)


def test_width_that_no_tile_divides(case: Any, oracle: Any) -> None:
    check(oracle, case(5, 33, 130, SINGLE), SINGLE)


def test_forbidden_columns(case: Any, oracle: Any) -> None:
    """Tiles of -inf only, and labels in the ragged last tile or forbidden themselves."""
    given = case(6, 32, 300, SINGLE)
    bias_V = given.bias_V.clone()
    bias_V[:260] = -torch.inf
    given = replace(given, bias_V=bias_V, action_A=torch.arange(6) + 294)
    check(oracle, given, SINGLE)
    forbidden = replace(given, action_A=torch.arange(6))
    assert by_tiles(forbidden)["logprob_A"].tolist() == [-math.inf] * 6
    assert forbidden.score("triton")["logprob_A"].tolist() == [-math.inf] * 6


def test_likely_label() -> None:
    """At p = .999999 the log-probability keeps its relative precision."""
    head_VD = torch.zeros(300, 4)
    head_VD[299, 0] = math.log((1 - 1e-6) / 1e-6 * 299)
    hidden_RD = torch.eye(4)[:1]
    label_A = torch.tensor([299])
    (truth, _), (got, _) = (
        kernels.linear_logprob(hidden_RD.to(d), head_VD.to(d), label_A, impl=impl)
        for d, impl in ((DOUBLE, "reference"), (SINGLE, "triton"))
    )
    torch.testing.assert_close(got.double(), truth, rtol=1e-6, atol=0)


def test_one_upstream_gradient_at_a_time(case: Any) -> None:
    """Only log-probabilities, only entropies, and upstream zeros: as plain torch differentiates."""
    given = case(12, 32, 130, SINGLE)
    grads: dict[str, list[Tensor]] = {}
    for impl in ("triton", "reference"):
        head = given.head_VD.clone().requires_grad_()
        outs = kernels.linear_logprob(given.hidden_RD, head, given.action_A, impl=impl)
        mask_A = (torch.arange(12) % 4 == 0).float()
        totals = [outs[0].sum(), outs[1].sum(), (outs[0] * mask_A).sum(), (outs[0] * 0).sum()]
        grads[impl] = [torch.autograd.grad(x, head, retain_graph=True)[0] for x in totals]
    for got, want in zip(grads["triton"], grads["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_same_numbers_as_the_surrogate(case: Any) -> None:
    """Over chunks both kernels share their softmax: the ratio of unchanged weights is exactly 1."""
    given = case(20, 32, 1003, SINGLE)
    surrogate, scored = given.run("triton"), given.score("triton")
    for name in ("logprob_A", "entropy_A"):
        assert torch.equal(surrogate[name], scored[name])
    given.given["behavior_A"] = scored["logprob_A"]
    assert given.run("triton")["peak ratio"] == 1


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_row_alone_equals_the_row_in_a_batch(
    case: Any, short_chunks: Any, dtype: torch.dtype
) -> None:
    given = case(130, 32, 300, dtype)
    whole = {"chunks": given.score("triton"), "tiles": by_tiles(given)}
    # The first rows of tiles: the interpreter's product (numpy's) rounds by the place in the tile.
    for i in (0, 128):
        part = slice(i, i + 1)
        alone = replace(given, hidden_RD=given.hidden_RD[part], action_A=given.action_A[part])
        for how, found in (("chunks", alone.score("triton")), ("tiles", by_tiles(alone))):
            for name in ("logprob_A", "entropy_A"):
                assert torch.equal(found[name], whole[how][name][part]), (how, name, i)


def test_strided_views_without_logits(case: Any) -> None:
    given = case(9, 32, 300, SINGLE)
    want = by_tiles(given)
    wide_RD, wide_VD = torch.full((9, 70), math.nan), torch.full((600, 40), math.nan)
    strided = replace(
        given,
        hidden_RD=wide_RD[:, 5:69:2].copy_(given.hidden_RD),
        head_VD=wide_VD[1::2, 3:35].copy_(given.head_VD),
    )
    for name, got in by_tiles(strided).items():
        assert torch.equal(got, want[name]), name


def test_the_choice_is_by_bytes_rows_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 2048 rows is 1.245 GB: without room for it there are no logits."""
    choose = triton_logprob.without_logits
    assert choose(8192, 576, 151936)
    assert choose(64, 4096, 151936)
    assert not choose(8192, 4096, 151936)
    assert not choose(8192, 4096, 151936, 1.25e9)
    assert choose(8192, 4096, 151936, 1.24e9)
    assert not choose(1000, 4096, 151936, 0.61e9)
    assert choose(1000, 4096, 151936, 0.6e9)
    assert not choose(8, 4095, 151936) and not choose(8, 1000, 151936)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert triton_logprob.free_bytes(cpu) == math.inf
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    assert triton_logprob.free_bytes(cuda) == 103


def test_half_precision_tiles_take_every_width_of_32(case: Any, oracle: Any) -> None:
    for width in (32, 160):
        check(oracle, case(5, width, 130, HALF), HALF)


STRIDES = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from fastturn.kernels import triton_epilogue, triton_logprob

for c in (triton_epilogue.configurations()[0], triton_logprob.configurations()[0]):
    made = triton.compile(
        ASTSource(c.kernel, c.signature, c.constexprs, c.attrs),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": c.num_warps, "num_stages": c.num_stages},
    )
    for line in made.asm["ttir"].splitlines():
        for name in ("z", "dz", "x", "w"):
            if f" %stride_{name} " in line and "tt.func" not in line:
                print(name, line)
"""


def test_row_strides_are_widened_before_they_are_multiplied() -> None:
    """In the compiler's intermediate language, for a GPU, outside of the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", STRIDES],
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    uses = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert {name for name, _ in uses} == {"z", "dz", "x", "w"}
    assert all("arith.extsi" in line and "i32 to i64" in line for _, line in uses), uses


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Row 5 of a buffer with a stride of 2^29 + 16: an offset of 32 bits would wrap. The pages in
    between are reserved, never touched."""
    stride, vocab = (1 << 29) + 16, 130
    size = 4 * (5 * stride + vocab)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, size, flags=flags) as pages:
        z_CV = torch.frombuffer(pages, dtype=SINGLE).as_strided((6, vocab), (stride, 1))
        z_CV.copy_(torch.randn(6, vocab))
        want_A = z_CV.log_softmax(1)[:, 129].clone()
        logprob_A, entropy_A = torch.zeros(6), torch.zeros(6)
        triton_epilogue.upstream_rows[(6,)](
            z_CV,
            z_CV,
            z_CV,
            torch.full((6,), 129),
            torch.arange(7),
            z_CV,
            z_CV,
            logprob_A,
            entropy_A,
            z_CV,
            0,
            vocab,
            stride,
            stride,
            1.0,
            1.0,
            1.0,
            HAS_BIAS=False,
            HAS_CAP=False,
            HAS_ENTROPY=False,
            GRADIENT=False,
            **triton_epilogue.launch(vocab),
        )
        del z_CV
    torch.testing.assert_close(logprob_A, want_A)
