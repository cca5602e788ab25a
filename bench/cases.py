"""Shapes and inputs of the benchmarks; the same seed gives every provider the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastturn.kernels import linear_logprob


@dataclass(frozen=True, slots=True)
class SurrogateCase:
    """Output layer of SmolLM2-135M over one micro-batch; `half` is what every other row is.

    half "live": all rows have a gradient; "zero": advantage 0; "clipped": beyond the clip range.
    """

    half: str = "live"
    actions: int = 2048
    width: int = 576
    vocab: int = 49152

    @property
    def name(self) -> str:
        return f"surrogate/{self.half}"


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    hidden_AD: Tensor
    head_VD: Tensor
    action_A: Tensor
    behavior_A: Tensor
    advantage_A: Tensor
    weight_A: Tensor


def surrogate_inputs(case: SurrogateCase, device: str) -> SurrogateInputs:
    """Random weights; log-ratios of ±0.05 around the clip's inside, or ±1 where clipped."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(device)

    hidden_AD, head_VD = normal(case.actions, case.width), normal(case.vocab, case.width)
    head_VD *= case.width**-0.5
    action_A = torch.randint(case.vocab, (case.actions,), generator=draw).to(device)
    advantage_A = normal(case.actions)
    weight_A = torch.rand(case.actions, generator=draw).to(device) / case.actions
    with torch.no_grad():
        logprob_A, _ = linear_logprob(hidden_AD, head_VD, action_A)
    behavior_A = logprob_A + 0.05 * normal(case.actions).sign()
    if case.half == "zero":
        advantage_A[::2] = 0
    elif case.half == "clipped":
        behavior_A[::2] = (logprob_A - advantage_A.sign())[::2]
    hidden_AD.requires_grad_()
    head_VD.requires_grad_()
    return SurrogateInputs(hidden_AD, head_VD, action_A, behavior_A, advantage_A, weight_A)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Trees given as (context, siblings, tokens of each sibling), `trees` of them side by side."""

    name: str
    trees: int
    context: int
    siblings: int
    tokens: int
    heads: int
    keys: int
    width: int

    def end_T(self, device: str) -> Tensor:
        size = self.context + self.siblings * self.tokens
        tree_T = torch.full((size,), size)
        stops = torch.arange(1, self.siblings + 1) * self.tokens + self.context
        tree_T[self.context :] = stops.repeat_interleave(self.tokens)
        start_N1 = torch.arange(self.trees).unsqueeze(1) * size
        return (start_N1 + tree_T).flatten().to(device)


ATTENTION = (
    AttentionCase("attention/quickstart", 32, 41, 4, 10, 4, 2, 16),
    AttentionCase("attention/siblings", 1, 512, 8, 64, 9, 3, 64),
)


def attention_inputs(case: AttentionCase, device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = case.trees * (case.context + case.siblings * case.tokens)
    q, k, v = (
        torch.randn(tokens, n, case.width, generator=draw).to(device).requires_grad_()
        for n in (case.heads, case.keys, case.keys)
    )
    return q, k, v


@dataclass(frozen=True, slots=True)
class StepCase:
    """One group: `siblings` actions of `tokens` tokens on one context, SmolLM2-135M's shape."""

    context: int = 512
    siblings: int = 8
    tokens: int = 64
    layers: int = 30

    @property
    def name(self) -> str:
        return f"update/{self.context}+{self.siblings}x{self.tokens}"

    @property
    def ideal(self) -> float:
        """Tokens read without sharing over tokens read with it.

        Example: 8 · (512 + 64) / (512 + 8 · 64) = 4.5.
        """
        packed = self.context + self.siblings * self.tokens
        return self.siblings * (self.context + self.tokens) / packed
