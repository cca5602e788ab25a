"""The accuracy oracle, inputs for the output-layer kernels, and small chunk heights."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

# Triton's kernels run in its interpreter here, on CPU tensors. It is read when triton is first
# imported, which importing the kernels does not do.
os.environ.setdefault("TRITON_INTERPRET", "1")

import fastturn.kernels as kernels

ROWS = sys.modules["fastturn.kernels.rows"]
Named = Mapping[str, Tensor]


def relative_error(value: Tensor, truth: Tensor) -> float:
    if not truth.numel():
        return 0.0
    scale = max(float(truth.abs().max()), torch.finfo(torch.float64).tiny)
    return float((value.double() - truth).abs().max()) / scale


def as_accurate(kernel: Named, plain: Named, truth: Named, dtype: torch.dtype) -> None:
    """Every output and gradient by name: at most twice the error of plain torch in the same dtype,
    plus 8 ulps of the accumulator."""
    wide = torch.promote_types(dtype, torch.float32)
    for name in truth:
        assert not kernel[name].isnan().any(), name
        got, peer = (relative_error(x[name], truth[name]) for x in (kernel, plain))
        assert got <= 2 * peer + 8 * torch.finfo(wide).eps, (name, got, peer)


@dataclass(frozen=True)
class Case:
    """Arguments of `turn_surrogate`; half of the actions are outside the clip range."""

    hidden_RD: Tensor
    head_VD: Tensor
    action_A: Tensor
    bias_V: Tensor | None
    given: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Case:
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return replace(
            self, hidden_RD=self.hidden_RD.to(dtype), head_VD=self.head_VD.to(dtype), bias_V=bias_V
        )

    def run(self, impl: str) -> dict[str, Tensor]:
        """Outputs and gradients of `turn_surrogate`, by name."""
        leaves = self._leaves()
        out = kernels.turn_surrogate(
            leaves["hidden"],
            leaves["head"],
            self.action_A,
            bias_V=leaves.get("bias"),
            impl=impl,
            **self.given,
        )
        grads = torch.autograd.grad(out.loss, list(leaves.values()))
        named = {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
        named |= {"loss": out.loss.detach(), "logprob_A": out.logprob_A, "entropy_A": out.entropy_A}
        named |= {f"sum {name}": x for name, x in out.sums.items()}
        return named | {f"peak {name}": x for name, x in out.peaks.items()}

    def score(self, impl: str) -> dict[str, Tensor]:
        """Outputs of `linear_logprob`, and gradients of an arbitrary function of them."""
        leaves = self._leaves()
        given = {k: v for k, v in self.given.items() if k in ("row_A", "temperature", "softcap")}
        logprob_A, entropy_A = kernels.linear_logprob(
            leaves["hidden"],
            leaves["head"],
            self.action_A,
            bias_V=leaves.get("bias"),
            impl=impl,
            **given,
        )
        wave_A = torch.cos(torch.arange(len(self.action_A), dtype=logprob_A.dtype))
        total = (logprob_A * wave_A).sum() + (entropy_A * wave_A.flip(0)).sum()
        grads = torch.autograd.grad(total, list(leaves.values()))
        named = {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
        return named | {"logprob_A": logprob_A.detach(), "entropy_A": entropy_A.detach()}

    def _leaves(self) -> dict[str, Tensor]:
        named = {"hidden": self.hidden_RD, "head": self.head_VD}
        if self.bias_V is not None:
            named["bias"] = self.bias_V
        return {name: x.detach().clone().requires_grad_() for name, x in named.items()}


def make_case(
    actions: int,
    width: int,
    vocab: int,
    dtype: torch.dtype = torch.float64,
    *,
    per_row: int = 1,
    bias: bool = True,
    spread: float = 1.0,
    **given: Any,
) -> Case:
    draw = torch.Generator().manual_seed(actions + width + vocab)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    rows = -(-actions // per_row)
    hidden_RD = normal(rows, width).to(dtype)
    head_VD = (normal(vocab, width) * spread * width**-0.5).to(dtype)
    bias_V = normal(vocab).to(dtype) if bias else None
    action_A = torch.randint(vocab, (actions,), generator=draw)
    row_A = torch.arange(actions) // per_row
    logprob_A, _ = kernels.linear_logprob(
        hidden_RD.double(),
        head_VD.double(),
        action_A,
        row_A=row_A,
        bias_V=None if bias_V is None else bias_V.double(),
        impl="reference",
        **{k: v for k, v in given.items() if k in ("temperature", "softcap")},
    )
    # Log-ratios away from the edges log .8 and log 1.2, so that rounding moves no action across.
    shift_A = torch.tensor([-0.5, -0.05, 0.05, 0.5], dtype=torch.float64)[
        torch.randint(4, (actions,), generator=draw)
    ]
    defaults: dict[str, Any] = {
        "behavior_A": logprob_A - shift_A,
        "advantage_A": normal(actions),
        "weight_A": torch.rand(actions, generator=draw, dtype=torch.float64) + 0.1,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.05,
        "reference_A": logprob_A + 0.3 * normal(actions),
    }
    if per_row > 1:
        defaults["row_A"] = row_A
    return Case(hidden_RD, head_VD, action_A, bias_V, defaults | given)


@pytest.fixture
def case() -> Callable[..., Case]:
    return make_case


@pytest.fixture
def oracle() -> Callable[..., None]:
    return as_accurate


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Chunks of 16 rows and tiles of 8, whatever the vocabulary: (16, 8)."""
    monkeypatch.setattr(ROWS, "chunk_rows", lambda *_: 16)
    monkeypatch.setattr(ROWS, "tile_rows", lambda *_: 8)
    return 16, 8


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN, or the lowest integer."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
