"""The head's gradient over micro-batches: one float32 sum, rounded once; what backward scales."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastturn.kernels as kernels
from fastturn.kernels import HeadGradient, rows, triton_rows

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
ALONE = kernels.VocabularySlice((130,), 0)
A, D, V = 128, 32, 130


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(A, D, generator=draw).to(dtype)
    head_VD = (torch.randn(V, D, generator=draw) * D**-0.5).to(dtype)
    action_A = torch.randint(V, (A,), generator=draw)
    return hidden_RD, head_VD, action_A, torch.randn(A, generator=draw) + 0.5


def surrogate(hidden: Tensor, head: Tensor, action: Tensor, advantage: Tensor, **more: Any) -> Any:
    weight_A = torch.full_like(advantage, 1 / A)
    call = kernels.vocabulary_parallel_surrogate if "part" in more else kernels.turn_surrogate
    given = {"advantage_A": advantage, "weight_A": weight_A, "clip_low": 0.2, "clip_high": 0.2}
    return call(hidden, head, action, **given, **more).loss


def logprob(hidden: Tensor, head: Tensor, action: Tensor, advantage: Tensor, **more: Any) -> Any:
    call = kernels.vocabulary_parallel_logprob if "part" in more else kernels.linear_logprob
    logprob_A, _ = call(hidden, head, action, **more)
    return -(logprob_A * advantage.to(logprob_A)).sum() / A


LOSSES: dict[str, Callable[..., Any]] = {"surrogate": surrogate, "logprob": logprob}


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("way", ["torch", "triton", "parallel"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_error_does_not_grow_with_micro_batches(name: str, way: str) -> None:
    """bfloat16: a float32 sum over micro-batches is as exact as one batch; autograd alone adds in
    bfloat16 and is several times worse."""
    loss = LOSSES[name]
    parts = inputs(HALF)
    if way == "triton":  # the interpreter is slow
        parts = (parts[0][:32], parts[1], *(x[:32] for x in parts[2:]))
    hidden, head, action, advantage = parts
    more: dict[str, Any] = {"part": ALONE} if way == "parallel" else {"impl": way}
    wide = head.double().requires_grad_()
    whole = 3 * loss(hidden.double(), wide, action, advantage, impl="reference")
    (truth,) = torch.autograd.grad(whole, wide)

    def error_of(count: int, shared: bool) -> float:
        leaf = head.clone().requires_grad_()
        total = HeadGradient(leaf)
        extra = {"head_gradient": total} if shared else {}
        for cut in zip(*(x.chunk(count) for x in (hidden, action, advantage)), strict=True):
            (3 * loss(cut[0], leaf, *cut[1:], **extra, **more)).backward()
        if shared:
            assert leaf.grad is None
            total.flush()
        assert leaf.grad is not None and leaf.grad.dtype == HALF
        return error(leaf.grad, truth)

    once = error_of(1, shared=False)
    assert error_of(8 if way == "triton" else 32, shared=True) <= 1.1 * once
    if way != "triton":  # its dZ is rounded as well
        assert once <= 1.01 * error(truth.to(HALF), truth)
        assert error_of(32, shared=False) >= 2 * once


def test_flush_adds_to_other_gradients_and_begins_anew() -> None:
    head = torch.ones(2, 3, dtype=HALF, requires_grad=True)
    total = HeadGradient(head)
    total.flush()
    assert head.grad is None
    head.grad = torch.full((2, 3), 2.0, dtype=HALF)
    before = head.grad
    for _ in range(256):
        total.add(torch.full((2, 3), 2.0**-8), torch.tensor(1.0))
    total.flush()
    assert head.grad is before and (head.grad == 3).all()
    total.flush()
    assert (head.grad == 3).all() and not total.sum_VD.any()


def test_hidden_gradients_do_not_change() -> None:
    for loss in LOSSES.values():
        hidden, head, action, advantage = inputs(SINGLE)
        hidden, head = hidden.requires_grad_(), head.requires_grad_()
        (want,) = torch.autograd.grad(loss(hidden, head, action, advantage), hidden)
        loss(hidden, head, action, advantage, head_gradient=HeadGradient(head)).backward()
        assert hidden.grad is not None and torch.equal(hidden.grad, want)


def test_wrong_sums_are_named() -> None:
    hidden, head, action, advantage = inputs(SINGLE)
    leaf = head.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"head_VD: expected a leaf .*requires_grad=False"):
        HeadGradient(head)
    with pytest.raises(ValueError, match=r"head_VD: expected a leaf .*is_leaf=False"):
        HeadGradient(2 * leaf)
    for total, match in (
        (
            HeadGradient(leaf[:9].detach().requires_grad_()),
            r"a head \[130, 32\] on cpu, got \[9, 32",
        ),
        (HeadGradient(leaf.detach().double().requires_grad_()), r"sums in torch\.float32"),
        (leaf, r"expected a HeadGradient, got Tensor"),
    ):
        with pytest.raises(ValueError, match="head_gradient: .*" + match):
            surrogate(hidden, leaf, action, advantage, head_gradient=total)
    with pytest.raises(ValueError, match="head_gradient: expected None with impl='reference'"):
        logprob(hidden, leaf, action, advantage, head_gradient=HeadGradient(leaf), impl="reference")


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("scale", [65536.0, 2.0**20, 1 / 3])
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_a_scaled_loss_rounds_once(dtype: torch.dtype, scale: float, impl: str) -> None:
    """Weights of 1e-8 a token times a loss scale, and a loss divided by 3."""
    hidden, head, action, advantage = inputs(dtype)
    if scale > 1:
        advantage = advantage * 1e-5 / scale * 65536

    def gradients(dtype: torch.dtype, impl: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        loss = surrogate(*leaves, action, advantage, impl=impl)
        return list(torch.autograd.grad(loss * scale, leaves))

    for got, truth in zip(gradients(dtype, impl), gradients(DOUBLE, "reference"), strict=True):
        floor = error(truth.to(dtype), truth)
        assert error(got, truth) <= floor + 0.6 * torch.finfo(dtype).eps * (impl == "triton") + 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_gone_when_the_head_gradient_is_rounded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At (8192, 4096, 151936) the float32 sum, its half-precision copy and the logits would be 5 GB
    together; without the logits 3.9 GB."""
    made: list[Any] = []
    real, begin = rows.rounded, triton_rows.Products.__init__

    def watch(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(weakref.ref(self.buffer_CV))

    alive: list[bool] = []

    def rounded(*args: Any) -> Any:
        gc.collect()
        alive.extend(buffer() is not None for buffer in made)
        return real(*args)

    monkeypatch.setattr(triton_rows.Products, "__init__", watch)
    for module in (rows, kernels.turn_surrogate.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "rounded", rounded)
        else:
            monkeypatch.setattr(module, "rounded", rounded)
    hidden, head, action, advantage = inputs(torch.float16)
    leaves = [x.requires_grad_() for x in (hidden, head)]
    LOSSES[name](*leaves, action, advantage, impl="triton").backward()
    assert made and alive and not any(alive)


def test_memory_of_the_largest_case() -> None:
    """What a call holds at (8192, 4096, 151936) in half precision: below 4 GB in both passes."""
    actions, width, vocab = 8192, 4096, 151936
    logits = triton_rows.chunk_rows(vocab, "cuda") * vocab * 4
    sums = 4 * (vocab * width + actions * width)
    assert sums + logits < 4e9
    assert sums + sums // 2 < 4e9


def test_parts_of_a_rounded_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROUNDED_BYTES", 300)
    sum_VD, scale = torch.randn(37, 16), torch.tensor(0.3)
    got = rows.rounded(sum_VD, HALF, scale)
    assert got is not None and torch.equal(got, (sum_VD * scale).to(HALF))
    assert rows.rounded(None, HALF, scale) is None
    assert rows.rounded(torch.zeros(0, 4), HALF, scale).shape == (0, 4)  # type: ignore[union-attr]
