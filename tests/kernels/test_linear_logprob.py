"""Laws of the log-probability kernel: accuracy under any upstream gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def check(oracle: Any, case: Any, dtype: torch.dtype) -> None:
    case = case.to(dtype)
    oracle(case.score("torch"), case.score("reference"), case.to(DOUBLE).score("reference"), dtype)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, DOUBLE])
@pytest.mark.parametrize(
    "shape", [(0, 32, 130), (1, 96, 300), (7, 32, 4101), (64, 96, 1003), (257, 32, 300)]
)
def test_accuracy(case: Any, oracle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(oracle, case(*shape, dtype), dtype)


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 3.0, "temperature": 0.7},
        {"per_row": 4},
        {"per_row": 3, "softcap": 2.0},
        {"bias": False, "spread": 30.0},
    ],
)
def test_options(case: Any, oracle: Any, short_chunks: Any, given: dict[str, Any]) -> None:
    for dtype in (SINGLE, HALF):
        check(oracle, case(70, 32, 301, dtype, **given), dtype)


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_logit_offsets(case: Any, oracle: Any, offset: float) -> None:
    given = case(9, 32, 300, SINGLE)
    check(oracle, replace(given, bias_V=(given.bias_V + offset).to(SINGLE)), SINGLE)


def test_forbidden_columns(case: Any, oracle: Any) -> None:
    given = case(6, 32, 300, SINGLE)
    bias_V = given.bias_V.clone()
    bias_V[:260] = -torch.inf
    given = replace(given, bias_V=bias_V, action_A=torch.arange(6) + 270)
    check(oracle, given, SINGLE)
    forbidden = replace(given, action_A=torch.arange(6))
    assert forbidden.score("torch")["logprob_A"].tolist() == [-torch.inf] * 6


def test_gradcheck(case: Any) -> None:
    for given in (case(8, 3, 11, softcap=4.0, temperature=0.8), case(9, 3, 11, per_row=3)):
        options = {k: v for k, v in given.given.items() if k in ("row_A", "temperature", "softcap")}

        def both(hidden: Tensor, head: Tensor, bias: Tensor, given: Any = given, o: Any = options):  # type: ignore[no-untyped-def]
            return kernels.linear_logprob(hidden, head, given.action_A, bias_V=bias, **o)

        leaves = (given.hidden_RD, given.head_VD, given.bias_V)
        assert torch.autograd.gradcheck(both, [x.clone().requires_grad_() for x in leaves])


def test_one_upstream_gradient_at_a_time(case: Any) -> None:
    """Only log-probabilities, only entropies, and upstream zeros: as plain torch differentiates."""
    given = case(30, 32, 130)
    grads: dict[str, list[Tensor]] = {}
    for impl in ("torch", "reference"):
        head = given.head_VD.clone().requires_grad_()
        outs = kernels.linear_logprob(given.hidden_RD, head, given.action_A, impl=impl)
        mask_A = (torch.arange(30) % 4 == 0).double()
        totals = [outs[0].sum(), outs[1].sum(), (outs[0] * mask_A).sum(), (outs[0] * 0).sum()]
        grads[impl] = [torch.autograd.grad(x, head, retain_graph=True)[0] for x in totals]
    for got, want in zip(grads["torch"], grads["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_same_numbers_as_the_surrogate(case: Any) -> None:
    """Both kernels share their softmax: log-probabilities are equal bit for bit, so a ratio of
    unchanged weights is exactly 1."""
    given = case(257, 32, 1003, SINGLE)
    surrogate, scored = given.run("torch"), given.score("torch")
    for name in ("logprob_A", "entropy_A"):
        assert torch.equal(surrogate[name], scored[name])
    given.given["behavior_A"] = scored["logprob_A"]
    assert given.run("torch")["peak ratio"] == 1


def test_a_row_alone_equals_the_row_in_a_batch(case: Any, short_chunks: Any) -> None:
    given = case(100, 96, 300, SINGLE)
    whole = given.score("torch")
    for i in (0, 7, 50, 99):
        part = slice(i, i + 1)
        alone = replace(given, hidden_RD=given.hidden_RD[part], action_A=given.action_A[part])
        got = kernels.linear_logprob(
            alone.hidden_RD, alone.head_VD, alone.action_A, bias_V=alone.bias_V
        )
        for name, value in zip(("logprob_A", "entropy_A"), got, strict=True):
            assert torch.equal(value, whole[name][part])


def test_bad_input_is_named() -> None:
    hidden, head = torch.zeros(2, 4), torch.zeros(10, 4)
    with pytest.raises(ValueError, match=r"action_A.*\[0, 10\).*10"):
        kernels.linear_logprob(hidden, head, torch.tensor([0, 10]))
    with pytest.raises(ValueError, match=r"impl='x'.*auto, torch, reference"):
        kernels.linear_logprob(hidden, head, torch.tensor([0, 1]), impl="x")
