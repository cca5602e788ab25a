"""Shapes and inputs of the benchmarks; the same seed gives every provider the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastturn.kernels import linear_logprob


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated MLPs and an output layer tied to the embedding."""

    vocab: int
    width: int
    inner: int  # of the MLP
    heads: int
    keys: int  # key/value heads


SMOLLM2 = ModelShape(vocab=49152, width=576, inner=1536, heads=9, keys=3)  # SmolLM2-135M: 30 layers
QWEN3_1_7B = ModelShape(vocab=151936, width=2048, inner=6144, heads=16, keys=8)  # 28 layers
TOY = ModelShape(vocab=130, width=32, inner=48, heads=4, keys=2)


@dataclass(frozen=True, slots=True)
class SurrogateCase:
    """Output layer of SmolLM2-135M over one micro-batch; `half` is what every other row is.

    half "live": all rows have a gradient; "zero": advantage 0; "clipped": beyond the clip range.
    """

    half: str = "live"
    actions: int = 2048
    width: int = SMOLLM2.width
    vocab: int = SMOLLM2.vocab

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
class Work:
    """What one update reads: tokens, visible query-key pairs of a layer, rows of the output layer.

    `tokens` and `pairs` include padding where the batch has any.
    """

    tokens: int
    pairs: int
    rows: int

    def flops(self, shape: ModelShape, layers: int) -> int:
        """Floating-point operations of forward and backward: the matrix products alone.

        A product of [n, a] and [a, b] is 2·n·a·b, and its backward is two such products, so

            6 · tokens · layers · (2·D·D + 2·D·D·K/H + 3·D·I)      projections and MLP
          + 12 · pairs · layers · D                                q·k and p·v
          + 6 · rows · D · V                                       output layer

        with D the width, H and K the query and key heads, I the inner width, V the vocabulary.
        What an implementation computes twice to save memory is counted once.

        Example: width 2, 1 of 1 heads, inner 3, vocabulary 5, one layer: 10 tokens, 20 pairs and
        4 rows are 6·10·34 + 12·20·2 + 6·4·10 = 2760.
        """
        d = shape.width
        layer = 2 * d * d + 2 * d * d * shape.keys // shape.heads + 3 * d * shape.inner
        attention = 12 * self.pairs * d
        return layers * (6 * self.tokens * layer + attention) + 6 * self.rows * d * shape.vocab


@dataclass(frozen=True, slots=True)
class StepCase:
    """One group on one context: `siblings` actions of `tokens` tokens on average.

    Lengths lie evenly between half and one and a half times `tokens`, so that a batch has padding.
    """

    context: int = 512
    siblings: int = 8
    tokens: int = 64
    layers: int = 4
    shape: ModelShape = SMOLLM2

    @property
    def name(self) -> str:
        return f"update/{self.context}+{self.siblings}x{self.tokens}/layers={self.layers}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each action. Example: 3 siblings of 8 tokens are (4, 8, 12)."""
        last = self.siblings - 1
        share = [number / last - 0.5 if last else 0 for number in range(self.siblings)]
        return tuple(self.tokens + round(x * self.tokens) for x in share)

    @property
    def packed(self) -> Work:
        """The context once; the last token of an action is only a label."""
        read = [length - 1 for length in self.lengths]
        pairs = _causal(self.context) + sum(n * self.context + _causal(n) for n in read)
        return Work(self.context + sum(read), pairs, sum(self.lengths))

    @property
    def rows(self) -> Work:
        """The context once for each sibling, without padding."""
        read = [self.context + length - 1 for length in self.lengths]
        return Work(sum(read), sum(map(_causal, read)), sum(self.lengths))

    @property
    def flop_ratio(self) -> float:
        """Operations of separate rows over those of the packed group: the ideal speed-up."""
        rows, packed = (w.flops(self.shape, self.layers) for w in (self.rows, self.packed))
        return rows / packed


def _causal(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
