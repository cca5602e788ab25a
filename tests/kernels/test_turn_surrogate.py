"""Laws of the surrogate kernel: accuracy, exact sparsity, determinism, hostile numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastturn.kernels as kernels

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
SHAPES = [
    (0, 32, 130),
    (1, 96, 300),
    (7, 32, 4101),
    (64, 96, 1003),
    (257, 32, 300),
    (257, 96, 130),
]


def check(oracle: Any, case: Any, dtype: torch.dtype) -> None:
    case = case.to(dtype)
    oracle(case.run("torch"), case.run("reference"), case.to(DOUBLE).run("reference"), dtype)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.float16, DOUBLE])
@pytest.mark.parametrize("shape", SHAPES)
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
    for dtype in (SINGLE, HALF):
        check(oracle, case(70, 32, 301, dtype, **given), dtype)


@pytest.mark.parametrize("offset", [-200.0, -110.0, 200.0])
def test_logit_offsets(case: Any, oracle: Any, offset: float) -> None:
    given = case(9, 32, 300, SINGLE)
    assert given.bias_V is not None
    check(oracle, replace(given, bias_V=(given.bias_V + offset).to(SINGLE)), SINGLE)


@pytest.mark.parametrize("label", [0, 255, 256, 298, 299])
def test_label_at_the_edges(case: Any, oracle: Any, label: int) -> None:
    given = case(5, 32, 300, SINGLE)
    check(oracle, replace(given, action_A=torch.full((5,), label)), SINGLE)


def test_forbidden_columns(case: Any, oracle: Any) -> None:
    """A first stretch of columns is all -inf: exact, the entropy finite, no gradient there."""
    given = case(6, 32, 300, SINGLE)
    bias_V = given.bias_V.clone()
    bias_V[:260] = -torch.inf
    given = replace(given, bias_V=bias_V, action_A=torch.arange(6) + 270)
    check(oracle, given, SINGLE)
    out = given.run("torch")
    assert out["entropy_A"].isfinite().all()
    assert not out["dhead"][:260].any()
    assert not out["dbias"][:260].any()


def test_one_column_left() -> None:
    bias_V = torch.full((130,), -torch.inf)
    bias_V[129] = 3.0
    hidden, head = torch.randn(2, 8, requires_grad=True), torch.randn(130, 8)
    out = kernels.turn_surrogate(
        hidden,
        head,
        torch.tensor([129, 129]),
        advantage_A=torch.ones(2),
        weight_A=torch.ones(2),
        clip_low=0.2,
        clip_high=0.2,
        bias_V=bias_V,
    )
    out.loss.backward()
    assert out.logprob_A.tolist() == [0.0, 0.0]
    assert out.entropy_A.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_likely_label_in_half_precision(p: float) -> None:
    """The gradient of the true class keeps its relative precision: one rounding."""
    logit = math.log(p / (1 - p) * 99)
    head_VD = torch.zeros(100, 4, dtype=HALF)
    head_VD[7, 0] = logit
    hidden_RD = torch.zeros(1, 4, dtype=HALF)
    hidden_RD[0, 0] = 1
    grads = {}
    for dtype, impl in ((HALF, "torch"), (DOUBLE, "reference")):
        head = head_VD.to(dtype).requires_grad_()
        out = kernels.turn_surrogate(
            hidden_RD.to(dtype),
            head,
            torch.tensor([7]),
            advantage_A=torch.ones(1),
            weight_A=torch.ones(1),
            clip_low=0.2,
            clip_high=0.2,
            impl=impl,
        )
        (grads[impl],) = torch.autograd.grad(out.loss, head)
    got, truth = grads["torch"][7, 0].double(), grads["reference"][7, 0]
    assert abs(got - truth) <= abs(truth) * torch.finfo(HALF).eps


def test_head_gradient_is_rounded_once(case: Any, short_chunks: Any) -> None:
    """The error of dhead in bfloat16 does not grow with the number of chunks."""
    for actions in (16, 1600):
        given = case(actions, 32, 130, HALF)
        got = given.run("torch")["dhead"].double()
        truth = given.to(DOUBLE).run("reference")["dhead"]
        error = (got - truth).abs().max() / truth.abs().max()
        assert error <= 1.1 * torch.finfo(HALF).eps / 2, actions


GARBAGE = [math.nan, math.inf, -math.inf, -1000.0]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_unscored_actions_are_as_if_absent(case: Any, short_chunks: Any, garbage: float) -> None:
    """Weight 0, or advantage 0 without KL: bit for bit what the others give alone."""
    given = case(60, 32, 300, SINGLE, kl_coef=0.0, reference_A=None)
    kept_A = torch.arange(60) % 3 == 0
    dirty = {name: x.clone() for name, x in given.given.items() if isinstance(x, Tensor)}
    dirty["weight_A"][1::3] = 0
    dirty["advantage_A"][1::3] = garbage
    dirty["advantage_A"][2::3] = 0
    dirty["behavior_A"][~kept_A] = garbage
    hidden_RD = given.hidden_RD.clone()
    hidden_RD[~kept_A] = math.nan
    alone = {name: x[kept_A] for name, x in dirty.items()}
    small = replace(
        given,
        hidden_RD=hidden_RD[kept_A],
        action_A=given.action_A[kept_A],
        given={**given.given, **alone},
    ).run("torch")
    whole = replace(given, hidden_RD=hidden_RD, given={**given.given, **dirty}).run("torch")
    for name in ("dhidden", "logprob_A", "entropy_A"):
        assert torch.equal(whole[name][kept_A], small[name]), name
        assert not whole[name][~kept_A].any(), name
    for name in set(whole) - {"dhidden", "logprob_A", "entropy_A"}:
        assert torch.equal(whole[name], small[name]), name
    assert whole["sum actions"] == 20


@pytest.mark.parametrize("actions", [0, 5])
def test_nothing_to_score(case: Any, actions: int) -> None:
    given = case(actions, 32, 130, SINGLE)
    given.given["weight_A"].zero_()
    given.given["behavior_A"].fill_(math.nan)
    for value in given.run("torch").values():
        assert not value.any()


def test_clipped_rows_have_no_gradient_but_are_reported(case: Any, oracle: Any) -> None:
    given = case(40, 32, 300, SINGLE, kl_coef=0.0, reference_A=None)
    sign_A = given.given["advantage_A"].sign()
    logprob_A = given.run("torch")["logprob_A"].double()
    given.given["behavior_A"] = logprob_A - sign_A  # beyond the clip on the side that stops
    out = given.run("torch")
    assert not out["dhidden"].any()
    assert not out["dhead"].any()
    assert out["sum clipped_low"] == (sign_A < 0).sum()
    assert out["sum clipped_high"] == (sign_A > 0).sum()
    assert torch.equal(out["logprob_A"].double(), logprob_A)
    given.given["behavior_A"][::2] += sign_A[::2]
    check(oracle, given, SINGLE)


def test_clamped_log_ratios_are_constant(case: Any, oracle: Any) -> None:
    """Beyond ±10 a ratio is finite and has no gradient, on both sides and for both signs."""
    given = case(8, 32, 300, SINGLE, kl_coef=0.0, reference_A=None)
    logprob_A = given.run("torch")["logprob_A"].double()
    raw_A = torch.tensor([200.0, -200.0, 11.0, -11.0], dtype=DOUBLE).repeat(2)
    given.given["advantage_A"] = torch.tensor([1.0, -1.0], dtype=DOUBLE).repeat_interleave(4)
    given.given["behavior_A"] = logprob_A - raw_A
    check(oracle, given, SINGLE)
    assert not given.run("torch")["dhidden"].any()
    given.given.update(kl_coef=0.1, reference_A=logprob_A + raw_A)
    check(oracle, given, SINGLE)
    assert not given.run("torch")["dhidden"].any()


def test_reported_numbers(case: Any) -> None:
    """Sums and peaks from their definitions, on numbers that touch every rule."""
    given = case(5, 32, 130, DOUBLE)
    logprob_A = given.run("reference")["logprob_A"]
    raw_A = torch.tensor([0.1, 0.5, -0.5, 200.0, -0.1], dtype=DOUBLE)
    d_A = torch.tensor([0.2, -0.1, 0.0, 0.3, -200.0], dtype=DOUBLE)
    given.given.update(
        {
            "behavior_A": logprob_A - raw_A,
            "reference_A": logprob_A + d_A,
            "advantage_A": torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0], dtype=DOUBLE),
        }
    )
    out = given.run("torch")
    log_A, d_A = raw_A.clamp(-10, 10), d_A.clamp(-10, 10)
    want = {
        "sum actions": 5.0,
        "sum log_ratio": float(log_A.sum()),
        "sum abs_log_ratio": float(log_A.abs().sum()),
        "sum kl_behavior": float((torch.exp(-log_A) + log_A - 1).sum()),
        "sum kl_reference": float((torch.exp(d_A) - d_A - 1).sum()),
        "sum clipped_low": 1.0,
        "sum clipped_high": 1.0,
        "sum clamped": 1.0,
        "sum entropy": float(out["entropy_A"].sum()),
        "sum logprob": float(logprob_A.sum()),
        "peak abs_log_ratio": 200.0,
        "peak ratio": math.exp(10),
    }
    assert {name: float(out[name]) for name in want} == pytest.approx(want, rel=1e-9)
    assert all(value.isfinite().all() for value in out.values())


def test_on_policy_ratio_is_one(case: Any) -> None:
    """Without behaviour the ratio is exactly 1 and the gradient is that of -A w logp."""
    given = case(20, 32, 300, DOUBLE, behavior_A=None, kl_coef=0.0, reference_A=None)
    out = given.run("torch")
    assert out["peak ratio"] == 1
    assert out["sum abs_log_ratio"] == 0
    hidden = given.hidden_RD.clone().requires_grad_()
    logprob_A, _ = kernels.linear_logprob(
        hidden, given.head_VD, given.action_A, bias_V=given.bias_V, impl="reference"
    )
    coef_A = given.given["advantage_A"] * given.given["weight_A"]
    (want,) = torch.autograd.grad(-(coef_A * logprob_A).sum(), hidden)
    torch.testing.assert_close(out["dhidden"], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, DOUBLE])
def test_labels_on_one_row_equal_duplicated_rows(
    case: Any, short_chunks: Any, dtype: torch.dtype
) -> None:
    """Siblings that share a hidden row: same numbers as a copy of the row for each."""
    given = case(90, 32, 300, dtype, per_row=5)
    given.action_A[5:8] = given.action_A[5]  # one label three times
    row_A = given.given["row_A"]
    copied = replace(given, hidden_RD=given.hidden_RD[row_A])
    copied = replace(copied, given={**given.given, "row_A": None})
    packed, copies = given.run("torch"), copied.run("torch")
    for name in ("logprob_A", "entropy_A", "loss"):
        assert torch.equal(packed[name], copies[name]), name
    summed = torch.zeros(18, 32, dtype=DOUBLE)
    summed.index_add_(0, row_A, copies["dhidden"].double())
    rtol = 40 * torch.finfo(dtype).eps
    for name, want in (("dhidden", summed), ("dhead", copies["dhead"].double())):
        atol = rtol * float(want.abs().max())
        torch.testing.assert_close(packed[name].double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, DOUBLE])
@pytest.mark.parametrize(("width", "vocab"), [(32, 130), (96, 1003), (64, 334), (40, 77)])
def test_a_row_alone_equals_the_row_in_a_batch(
    case: Any, short_chunks: Any, dtype: torch.dtype, width: int, vocab: int
) -> None:
    given = case(257, width, vocab, dtype)
    whole = given.run("torch")
    for size, start in ((1, 0), (1, 100), (1, 256), (3, 9), (7, 40), (13, 200), (64, 150)):
        part = slice(start, start + size)
        chosen = {k: v[part] if isinstance(v, Tensor) else v for k, v in given.given.items()}
        alone = replace(
            given,
            hidden_RD=given.hidden_RD[part],
            action_A=given.action_A[part],
            given=chosen,
        ).run("torch")
        for name in ("logprob_A", "entropy_A", "dhidden"):
            assert torch.equal(alone[name], whole[name][part]), (name, size, start)


def test_run_to_run_equal(case: Any) -> None:
    given = case(257, 32, 1003, SINGLE, per_row=2)
    first, second = given.run("torch"), given.run("torch")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_gradcheck(case: Any, impl: str) -> None:
    """Numerical derivatives through both sides of the clip, the KL, softcap and shared rows."""
    for given in (
        case(8, 3, 11, DOUBLE, softcap=4.0, temperature=0.8),
        case(9, 3, 11, DOUBLE, per_row=3),
    ):

        def loss(hidden: Tensor, head: Tensor, bias: Tensor, given: Any = given) -> Tensor:
            return kernels.turn_surrogate(
                hidden, head, given.action_A, bias_V=bias, impl=impl, **given.given
            ).loss

        inputs = [x.clone().requires_grad_() for x in (given.hidden_RD, given.head_VD)]
        assert torch.autograd.gradcheck(loss, (*inputs, given.bias_V.clone().requires_grad_()))


def test_gradient_scales_with_upstream_and_repeats(case: Any) -> None:
    given = case(9, 32, 130, SINGLE)
    hidden, head = given.hidden_RD.clone().requires_grad_(), given.head_VD.clone().requires_grad_()
    loss = kernels.turn_surrogate(hidden, head, given.action_A, **given.given).loss
    once = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, (hidden, head), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, head))
    for one, three, other in zip(once, thrice, again, strict=True):
        assert torch.equal(3 * one, three)
        assert torch.equal(one, other)


def test_frozen_head_and_no_grad(case: Any) -> None:
    given = case(9, 32, 130, SINGLE)
    hidden = given.hidden_RD.clone().requires_grad_()
    out = kernels.turn_surrogate(hidden, given.head_VD, given.action_A, **given.given)
    out.loss.backward()
    assert hidden.grad is not None
    assert not out.logprob_A.requires_grad
    with torch.no_grad():
        quiet = kernels.turn_surrogate(hidden, given.head_VD, given.action_A, **given.given)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, out.loss.detach())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, and the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.flops = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return out


def test_work_and_memory(case: Any, short_chunks: tuple[int, int]) -> None:
    """6·R·D·V operations and one chunk of logits; rows that cannot matter are never multiplied."""
    actions, width, vocab = 96, 32, 1003
    given = case(actions, width, vocab, SINGLE, behavior_A=None, kl_coef=0.0, reference_A=None)
    unit = 2 * width * vocab

    def measure() -> Largest:
        with Largest() as seen:
            given.run("torch")
        return seen

    full = measure()
    assert full.flops == 3 * actions * unit
    assert full.numel == max(short_chunks[0], width) * vocab
    given.given["advantage_A"][::2] = 0
    assert measure().flops == 3 * (actions // 2) * unit
    given = case(actions, width, vocab, SINGLE, kl_coef=0.0, reference_A=None)
    sign_A = given.given["advantage_A"].sign()
    given.given["behavior_A"] = given.run("torch")["logprob_A"].double()
    given.given["behavior_A"][::2] -= sign_A[::2]
    assert measure().flops == (actions + 2 * (actions // 2)) * unit


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("action outside", {"action_A": torch.tensor([0, 1, 130])}, r"action_A.*\[0, 130\).*130"),
    ("action negative", {"action_A": torch.tensor([0, -1, 1])}, r"action_A.*\[0, 130\).*-1"),
    ("action dtype", {"action_A": torch.zeros(3)}, r"action_A.*int64.*float32"),
    ("action count", {"action_A": torch.zeros(2, dtype=torch.int64)}, r"action_A.*3 rows.*got 2"),
    ("hidden shape", {"hidden_RD": torch.zeros(3)}, r"hidden_RD.*\[any, any\].*\[3\]"),
    ("hidden dtype", {"hidden_RD": torch.zeros(3, 8, dtype=torch.int64)}, r"hidden_RD.*int64"),
    ("head width", {"head_VD": torch.zeros(130, 9)}, r"head_VD.*\[any, 8\].*\[130, 9\]"),
    ("head dtype", {"head_VD": torch.zeros(130, 8, dtype=HALF)}, r"head_VD.*float32.*bfloat16"),
    ("head device", {"head_VD": torch.zeros(130, 8, device="meta")}, r"head_VD.*cpu.*meta"),
    ("weight length", {"weight_A": torch.ones(2)}, r"weight_A.*\[3\].*\[2\]"),
    ("weight NaN", {"weight_A": torch.tensor([1.0, math.nan, 1.0])}, r"weight_A.*finite.*nan at 1"),
    ("advantage inf", {"advantage_A": torch.tensor([1.0, 1.0, math.inf])}, r"advantage_A.*inf"),
    ("behaviour NaN", {"behavior_A": torch.tensor([math.nan, 0, 0])}, r"behavior_A.*finite.*nan"),
    ("bias length", {"bias_V": torch.zeros(3)}, r"bias_V.*\[130\].*\[3\]"),
    ("temperature", {"temperature": 0.0}, r"temperature.*> 0.*0"),
    ("softcap", {"softcap": -1.0}, r"softcap.*> 0.*-1"),
    ("clip", {"clip_low": -0.1}, r"clip_low.*>= 0.*-0.1"),
    ("KL without reference", {"kl_coef": 0.1}, r"reference_A.*kl_coef=0.1.*None"),
    (
        "rows unsorted",
        {"row_A": torch.tensor([0, 2, 1])},
        r"row_A.*non-decreasing.*2 before 1 at 1",
    ),
    ("rows outside", {"row_A": torch.tensor([0, 1, 3])}, r"row_A.*\[0, 3\).*3"),
    ("impl", {"impl": "cuda"}, r"impl='cuda'.*auto, torch, reference"),
]


@pytest.mark.parametrize(("change", "message"), [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "hidden_RD": torch.zeros(3, 8),
        "head_VD": torch.zeros(130, 8),
        "action_A": torch.tensor([0, 1, 2]),
        "advantage_A": torch.ones(3),
        "weight_A": torch.ones(3),
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    with pytest.raises(ValueError, match=message):
        kernels.turn_surrogate(**(good | change))
