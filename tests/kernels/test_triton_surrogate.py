"""Laws of the surrogate's Triton kernel, in Triton's interpreter: accuracy, sparsity, determinism,
hostile numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels
from fastturn.kernels import triton_epilogue, triton_rows
from fastturn.kernels.dispatch import choose
from fastturn.kernels.rows import Live

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("poisoned")


def check(oracle: Any, case: Any, dtype: torch.dtype) -> None:
    """Outputs and gradients. The reported sums and peaks are functions of `logprob_A` that all
    implementations share, some of them differences that nearly cancel; `test_options` compares
    them with the torch path."""
    case = case.to(dtype)
    truth = case.to(DOUBLE).run("reference")
    truth = {name: x for name, x in truth.items() if not name.startswith(("sum ", "peak "))}
    oracle(case.run("triton"), case.run("reference"), truth, dtype)


def rows_of(case: Any, part: Any) -> Any:
    """The case with some of its actions and their rows (one action a row)."""
    chosen = {k: v[part] if isinstance(v, Tensor) else v for k, v in case.given.items()}
    return replace(case, hidden_RD=case.hidden_RD[part], action_A=case.action_A[part], given=chosen)


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


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 3.0, "temperature": 0.7},
        {"temperature": 1.3, "kl_coef": 0.0, "reference_A": None},
        {"behavior_A": None},
        {"bias": False},
        {"per_row": 4},
        {"per_row": 3, "softcap": 2.0, "behavior_A": None},
        {"spread": 30.0},
    ],
)
def test_options(case: Any, oracle: Any, short_chunks: Any, given: dict[str, Any]) -> None:
    """Against float64 by the oracle, and against the torch path in float32."""
    for dtype in (SINGLE, HALF):
        check(oracle, case(35, 32, 301, dtype, **given), dtype)
    single = case(35, 32, 301, SINGLE, **given)
    got, want = single.run("triton"), single.run("torch")
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [-200.0, -110.0, 200.0])
def test_logit_offsets(case: Any, oracle: Any, offset: float) -> None:
    given = case(9, 32, 300, SINGLE)
    check(oracle, replace(given, bias_V=(given.bias_V + offset).to(SINGLE)), SINGLE)


@pytest.mark.parametrize("label", [0, 511, 512, 4095, 4096, 4100])
def test_label_at_the_edges(case: Any, oracle: Any, label: int) -> None:
    """First and last columns of tiles, and of the ragged last one."""
    given = case(3, 32, 4101, SINGLE)
    check(oracle, replace(given, action_A=torch.full((3,), label)), SINGLE)


def test_forbidden_columns(case: Any, oracle: Any) -> None:
    """The first tile of columns is all -inf: exact, the entropy finite, no gradient there."""
    given = case(3, 32, 4101, SINGLE)
    bias_V = given.bias_V.clone()
    bias_V[:4098] = -torch.inf
    given = replace(given, bias_V=bias_V, action_A=torch.arange(3) + 4098)
    check(oracle, given, SINGLE)
    out = given.run("triton")
    assert out["entropy_A"].isfinite().all()
    assert not out["dhead"][:4098].any()
    assert not out["dbias"][:4098].any()


@pytest.mark.parametrize("rarity", [1e-1, 1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_likely_label(rarity: float, dtype: torch.dtype) -> None:
    """Where p = 1 - rarity, the log-probability and the gradient of the label keep their relative
    precision: plain torch has lost all digits of 1 - p in float32 at 1e-6."""
    logit = math.log((1 - rarity) / rarity * 99)
    head_VD = torch.zeros(100, 4, dtype=dtype)
    head_VD[7, 0] = logit
    hidden_RD = torch.zeros(1, 4, dtype=dtype)
    hidden_RD[0, 0] = 1
    found = {}
    for as_dtype, impl in ((dtype, "triton"), (DOUBLE, "reference")):
        head = head_VD.to(as_dtype).requires_grad_()
        out = kernels.turn_surrogate(
            hidden_RD.to(as_dtype),
            head,
            torch.tensor([7]),
            advantage_A=torch.ones(1),
            weight_A=torch.ones(1),
            clip_low=0.2,
            clip_high=0.2,
            impl=impl,
        )
        (grad,) = torch.autograd.grad(out.loss, head)
        found[impl] = grad[7, 0].double(), out.logprob_A.double()[0]
    single = 8 * torch.finfo(SINGLE).eps
    (grad, logprob), (true_grad, true_logprob) = found["triton"], found["reference"]
    assert abs(logprob - true_logprob) <= abs(true_logprob) * single
    step = 2.0**-24 if dtype == HALF else 0.0  # the smallest float16
    assert abs(grad - true_grad) <= abs(true_grad) * max(torch.finfo(dtype).eps, single) + step


def test_tiny_weights_survive_half_precision(case: Any, oracle: Any) -> None:
    """Weights of 1e-7 a token are below float16: dZ is scaled by a power of two and back."""
    given = case(20, 32, 300, HALF, bias=False)
    given.given["weight_A"] *= 1e-7
    grads = {}
    for dtype, impl in ((HALF, "triton"), (DOUBLE, "reference")):
        head = given.head_VD.to(dtype).double().requires_grad_()
        out = kernels.turn_surrogate(
            given.hidden_RD.to(dtype), head.to(dtype), given.action_A, impl=impl, **given.given
        )
        grads[impl] = torch.autograd.grad(out.loss, head)[0]
    got, truth = grads["triton"], grads["reference"]
    # The result itself is float16, whose smallest step is 2^-24.
    assert (got - truth).abs().max() <= 2.0**-24 + 2e-3 * truth.abs().max()
    one = Live.of(torch.tensor([0]), torch.tensor([0]))
    assert triton_rows.float16_gain(HALF, torch.tensor([1e-7]), one, 1.0) == 2.0**20
    assert triton_rows.float16_gain(torch.bfloat16, torch.tensor([1e-7]), one, 1.0) == 1.0


def test_head_gradient_is_rounded_once(case: Any, short_chunks: Any) -> None:
    """The error of dhead does not grow with the number of chunks."""
    errors = []
    for actions in (16, 160):
        given = case(actions, 32, 130, HALF)
        got = given.run("triton")["dhead"].double()
        truth = given.to(DOUBLE).run("reference")["dhead"]
        errors.append((got - truth).abs().max() / truth.abs().max())
    assert errors[1] <= 1.1 * torch.finfo(HALF).eps


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e4, 1e4])
def test_unscored_actions_are_as_if_absent(case: Any, short_chunks: Any, garbage: float) -> None:
    """Weight 0, or advantage 0 without KL: bit for bit what the others give alone."""
    given = case(30, 32, 130, SINGLE, kl_coef=0.0, reference_A=None)
    kept_A = torch.arange(30) % 3 == 0
    dirty = {name: x.clone() for name, x in given.given.items() if isinstance(x, Tensor)}
    dirty["weight_A"][1::3] = 0
    dirty["advantage_A"][1::3] = garbage
    dirty["advantage_A"][2::3] = 0
    dirty["behavior_A"][~kept_A] = garbage
    hidden_RD = given.hidden_RD.clone()
    hidden_RD[~kept_A] = math.nan
    given = replace(given, hidden_RD=hidden_RD, given={**given.given, **dirty})
    small, whole = rows_of(given, kept_A).run("triton"), given.run("triton")
    for name in ("dhidden", "logprob_A", "entropy_A"):
        assert torch.equal(whole[name][kept_A], small[name]), name
        assert not whole[name][~kept_A].any(), name
    for name in set(whole) - {"dhidden", "logprob_A", "entropy_A"}:
        assert torch.equal(whole[name], small[name]), name


@pytest.mark.parametrize("actions", [0, 5])
def test_nothing_to_score(case: Any, actions: int) -> None:
    given = case(actions, 32, 130, SINGLE)
    given.given["weight_A"].zero_()
    given.given["behavior_A"].fill_(math.nan)
    for value in given.run("triton").values():
        assert not value.any()


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_clipped_rows_leave_before_the_gradients(
    case: Any, oracle: Any, short_chunks: Any, dtype: torch.dtype
) -> None:
    """Rows without a coefficient are reported, and compacted away in the same buffer."""
    given = case(40, 32, 300, dtype, kl_coef=0.0, reference_A=None)
    sign_A = given.given["advantage_A"].sign()
    logprob_A = given.run("triton")["logprob_A"].double()
    given.given["behavior_A"] = logprob_A - sign_A  # beyond the clip on the side that stops
    out = given.run("triton")
    assert not out["dhidden"].any()
    assert not out["dhead"].any()
    assert torch.equal(out["logprob_A"].double(), logprob_A)
    given.given["behavior_A"][::2] += sign_A[::2]
    check(oracle, given, dtype)


def test_huge_ratios(case: Any, oracle: Any) -> None:
    """Beyond ±10 a log-ratio is clamped and has no gradient, in the ratio and in the KL term."""
    given = case(8, 32, 300, SINGLE, kl_coef=0.0, reference_A=None)
    logprob_A = given.run("triton")["logprob_A"].double()
    raw_A = torch.tensor([200.0, -200.0, 11.0, -11.0], dtype=DOUBLE).repeat(2)
    given.given["advantage_A"] = torch.tensor([1.0, -1.0], dtype=DOUBLE).repeat_interleave(4)
    given.given["behavior_A"] = logprob_A - raw_A
    given.given.update(kl_coef=0.1, reference_A=logprob_A + raw_A)
    check(oracle, given, SINGLE)
    assert not given.run("triton")["dhidden"].any()


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_labels_on_one_row_equal_duplicated_rows(
    case: Any, short_chunks: Any, dtype: torch.dtype
) -> None:
    given = case(45, 32, 300, dtype, per_row=5)
    given.action_A[5:8] = given.action_A[5]  # one label three times
    row_A = given.given["row_A"]
    copied = replace(given, hidden_RD=given.hidden_RD[row_A])
    copied = replace(copied, given={**given.given, "row_A": None})
    packed, copies = given.run("triton"), copied.run("triton")
    for name in ("logprob_A", "entropy_A", "loss"):
        assert torch.equal(packed[name], copies[name]), name
    summed = torch.zeros(9, 32, dtype=DOUBLE)
    summed.index_add_(0, row_A, copies["dhidden"].double())
    rtol = 40 * torch.finfo(dtype).eps
    for name, want in (("dhidden", summed), ("dhead", copies["dhead"].double())):
        atol = rtol * float(want.abs().max())
        torch.testing.assert_close(packed[name].double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_row_alone_equals_the_row_in_a_batch(
    case: Any, short_chunks: Any, dtype: torch.dtype
) -> None:
    given = case(33, 96, 1003, dtype)
    whole = given.run("triton")
    for size, start in ((1, 0), (1, 32), (3, 9), (13, 20)):
        part = slice(start, start + size)
        alone = rows_of(given, part).run("triton")
        for name in ("logprob_A", "entropy_A"):
            assert torch.equal(alone[name], whole[name][part]), (name, size, start)
        if dtype == SINGLE:  # float16 scales by the largest coefficient of the call
            assert torch.equal(alone["dhidden"], whole["dhidden"][part]), (size, start)


def test_run_to_run_equal(case: Any) -> None:
    given = case(40, 32, 1003, SINGLE, per_row=2)
    first, second = given.run("triton"), given.run("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strided_and_offset_views(case: Any) -> None:
    """Views of larger tensors full of NaN give the numbers of their copies."""
    given = case(9, 32, 300, SINGLE)
    want = given.run("triton")

    def view(x: Tensor) -> Tensor:
        wide = torch.full([3 * n + 5 for n in x.shape], math.nan, dtype=x.dtype)
        part = wide[tuple(slice(3, 3 + 2 * n, 2) for n in x.shape)]
        return part.copy_(x)

    leaves = [view(x).requires_grad_() for x in (given.hidden_RD, given.head_VD, given.bias_V)]
    others = {k: view(v) if isinstance(v, Tensor) else v for k, v in given.given.items()}
    action_A = torch.zeros(18, dtype=torch.int64)[::2].copy_(given.action_A)
    out = kernels.turn_surrogate(
        leaves[0], leaves[1], action_A, bias_V=leaves[2], impl="triton", **others
    )
    grads = torch.autograd.grad(out.loss, leaves)
    assert torch.equal(out.logprob_A, want["logprob_A"])
    for got, name in zip(grads, ("dhidden", "dhead", "dbias"), strict=True):
        torch.testing.assert_close(got, want[name], rtol=1e-5, atol=1e-6)


def test_frozen_head_no_grad_and_upstream_scale(case: Any) -> None:
    given = case(9, 32, 130, SINGLE)
    hidden = given.hidden_RD.clone().requires_grad_()

    def call() -> Tensor:
        return kernels.turn_surrogate(
            hidden, given.head_VD, given.action_A, impl="triton", **given.given
        ).loss

    loss = call()
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, hidden)
    assert torch.equal(3 * once, thrice)
    with torch.no_grad():
        quiet = call()
    assert not quiet.requires_grad
    assert torch.equal(quiet, loss.detach())


def test_chunk_heights() -> None:
    """Powers of two within the byte budget, whatever the number of actions."""
    assert triton_rows.chunk_rows(151936, "cuda") == 2048
    assert triton_rows.chunk_rows(49152, "cuda") == 4096
    assert triton_rows.chunk_rows(130, "cuda") == 8192
    assert triton_epilogue.launch(151936) == {"BLOCK": 4096, "num_warps": 8}


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"torch": test_chunk_heights, "triton": test_run_to_run_equal}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose("auto", table, cpu, SINGLE) is table["torch"]
    assert choose("auto", table, cuda, SINGLE) is table["triton"]
    assert choose("auto", table, cuda, DOUBLE) is table["torch"]
    with pytest.raises(ValueError, match=r"float64.*impl='torch'"):
        choose("triton", table, cuda, DOUBLE)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"CUDA tensor.*TRITON_INTERPRET=1"):
        choose("triton", table, cpu, SINGLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose("auto", table, cuda, SINGLE) is table["torch"]
    with pytest.raises(ValueError, match=r"package triton.*pip install triton"):
        choose("triton", table, cuda, SINGLE)


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys, fastturn.kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
