"""Who holds the rows of the vocabulary: of the head, and of the embedding that is tied to it.

    WholeVocabulary    this process has every row, or FSDP gathers them for the loss
    SplitVocabulary    every rank keeps its own rows and scores the actions of all ranks with them:

        hidden states [R, D] --all-gather--> all, own rows --> statistics --all-gather--> loss
        token ids [T] --all-gather--> all, own rows or 0 --reduce-scatter--> embedded [T, D]

Split, no rank ever has the weight, its gradient or its logits whole, and the gradient is not summed
over ranks: a rank's rows have met the actions of all of them. Hidden states of actions travel
instead of the weight and its gradient.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; here ranks have data of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastturn.kernels import (
    SurrogateOutput,
    VocabularySlice,
    linear_logprob,
    turn_surrogate,
    vocabulary_parallel_logprob,
    vocabulary_parallel_surrogate,
)
from fastturn.kernels.vocabulary_slice import gather_numbers

# torch 2.13 renamed it.
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Vocabulary(Protocol):
    """What the loss asks of the head's weight [V, D] as the model holds it.

    `held`: the weight as the two ops read it. `tied`: its rows of tokens [T] as embeddings [T, D],
    and what `held` gives. `surrogate`, `logprob`: the kernels `turn_surrogate` and `linear_logprob`
    with their arguments, for the actions of this rank.
    """

    def held(self, weight_VD: Tensor) -> Tensor: ...

    def tied(self, weight_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]: ...

    def surrogate(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> SurrogateOutput: ...

    def logprob(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """Every row is here. `impl`: which implementation of the kernels."""

    impl: str = "auto"

    def held(self, weight_VD: Tensor) -> Tensor:
        return weight_VD

    def tied(self, weight_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        embedded_TD, weight_VD = Tied.apply(weight_VD, token_T)
        return embedded_TD, weight_VD

    def surrogate(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> SurrogateOutput:
        return turn_surrogate(hidden_RD, weight_VD, action_A, impl=self.impl, **terms)

    def logprob(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> tuple[Tensor, Tensor]:
        return linear_logprob(hidden_RD, weight_VD, action_A, impl=self.impl, **terms)


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """The rows of `part` are here. All ranks of its group call every method together.

    `dtype`: what the weight is computed with. `replicas`: the ranks that hold the same rows, whose
    gradients are summed; None when there are no others.
    Example: 5 rows on two ranks are rows 0 to 2 and rows 3 to 4.
    """

    part: VocabularySlice
    dtype: torch.dtype
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, mesh: DeviceMesh, rows: int, dtype: torch.dtype) -> SplitVocabulary:
        """Cut as `DTensor` cuts `rows` rows over the last dimension of the mesh."""
        last = mesh.ndim - 1
        height = -(-rows // mesh.size(last))
        stops = tuple(min(rows, height * (rank + 1)) for rank in range(mesh.size(last)))
        part = VocabularySlice(stops, mesh.get_local_rank(last), mesh.get_group(last))
        return cls(part, dtype, mesh.get_group(0) if last else None)

    def held(self, weight_VD: Tensor) -> Tensor:
        assert isinstance(weight_VD, DTensor)
        own_VD: Tensor = weight_VD.to_local().to(self.dtype)
        if self.replicas is not None and own_VD.requires_grad:
            own_VD.register_hook(self._summed)
        return own_VD

    def tied(self, weight_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        (counts,) = self._counts(token_T)
        id_S = _gather(token_T, counts, self.part) - self.part.start
        place_N = ((id_S >= 0) & (id_S < self.part.rows)).nonzero().squeeze(1)
        embedded_ND, own_VD = Tied.apply(self.held(weight_VD), id_S[place_N])
        return _Delivered.apply(embedded_ND, place_N, counts, self.part), own_VD

    def surrogate(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> SurrogateOutput:
        rows, actions = self._counts(hidden_RD, action_A)
        out = vocabulary_parallel_surrogate(
            _Everyone.apply(hidden_RD, rows, self.part),
            weight_VD,
            _gather(action_A, actions, self.part),
            part=self.part,
            **self._of_all(terms, rows, actions),
        )
        # Every rank has the loss and the sums of all; the first of the group reports them.
        once = float(self.part.rank == 0)
        own = _own(actions, self.part)
        return replace(
            out,
            loss=out.loss - (1 - once) * out.loss.detach(),
            logprob_A=out.logprob_A[own],
            entropy_A=out.entropy_A[own],
            sums={name: value * once for name, value in out.sums.items()},
        )

    def logprob(
        self, hidden_RD: Tensor, weight_VD: Tensor, action_A: Tensor, **terms: Any
    ) -> tuple[Tensor, Tensor]:
        rows, actions = self._counts(hidden_RD, action_A)
        scored = vocabulary_parallel_logprob(
            _Everyone.apply(hidden_RD, rows, self.part),
            weight_VD,
            _gather(action_A, actions, self.part),
            part=self.part,
            **self._of_all(terms, rows, actions),
        )
        logprob_A, entropy_A = (_Own.apply(x, actions, self.part) for x in scored)
        return logprob_A, entropy_A

    def _counts(self, *mine: Tensor) -> list[list[int]]:
        """The lengths of these on every rank."""
        lengths = [len(x) for x in mine]
        found = gather_numbers(lengths, self.part.group, mine[0].device)
        return [list(counts) for counts in zip(*found, strict=True)]

    def _of_all(
        self, terms: dict[str, Any], rows: Sequence[int], actions: Sequence[int]
    ) -> dict[str, Any]:
        """Arguments of a kernel for the actions of all ranks: what has an entry an action is
        gathered, rows count on through the ranks, and the bias is that of the own rows."""
        before, part = sum(rows[: self.part.rank]), self.part
        terms = terms | {"row_A": terms["row_A"] + before}
        if terms["bias_V"] is not None:
            terms["bias_V"] = terms["bias_V"][part.start : part.start + part.rows]
        of_actions = [n for n, x in terms.items() if n.endswith("_A") and x is not None]
        return terms | {name: _gather(terms[name], actions, part) for name in of_actions}

    def _summed(self, gradient_VD: Tensor) -> Tensor:
        total_VD = gradient_VD.contiguous().clone()
        dist.all_reduce(total_VD, group=self.replicas)
        return total_VD


def _own(counts: Sequence[int], part: VocabularySlice) -> slice:
    """Where this rank's entries lie among those of all."""
    start = sum(counts[: part.rank])
    return slice(start, start + counts[part.rank])


def _gather(own: Tensor, counts: Sequence[int], part: VocabularySlice) -> Tensor:
    """The entries of all ranks, `counts[r]` of rank r, in the order of ranks."""
    most = max(counts)
    if not most:
        return own
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    all_R = part.gather(padded.flatten()).unflatten(1, padded.shape)
    return torch.cat([entries[:count] for entries, count in zip(all_R, counts, strict=True)])


class _Everyone(torch.autograd.Function):
    """The entries of all ranks; their gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: Sequence[int], part: VocabularySlice) -> Tensor:
        ctx.own = _own(counts, part)
        return _gather(own, counts, part)

    @staticmethod
    def backward(ctx: Any, dall: Tensor) -> tuple[Tensor, None, None]:
        return dall[ctx.own], None, None


class _Own(torch.autograd.Function):
    """This rank's entries of what is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, counts: Sequence[int], part: VocabularySlice) -> Tensor:
        ctx.counts, ctx.part = counts, part
        return whole[_own(counts, part)].clone()

    @staticmethod
    def backward(ctx: Any, down: Tensor) -> tuple[Tensor, None, None]:
        return _gather(down, ctx.counts, ctx.part), None, None


class _Delivered(torch.autograd.Function):
    """Embeddings [N, D] that this rank has looked up, at `place_N` of the tokens of all ranks ->
    those of its own tokens [T, D]. Each token is looked up by one rank, so sums are exact."""

    @staticmethod
    def forward(
        ctx: Any,
        embedded_ND: Tensor,
        place_N: Tensor,
        counts: Sequence[int],
        part: VocabularySlice,
    ) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.counts, ctx.part = counts, part
        most, width = max(counts), embedded_ND.shape[1]
        # Token i of rank r at r * most + i.
        padding = [rank * most - sum(counts[:rank]) for rank in range(len(counts))]
        shift_S = torch.tensor(padding, device=place_N.device).repeat_interleave(
            torch.tensor(counts, device=place_N.device)
        )
        all_PD = embedded_ND.new_zeros(most * len(counts), width)
        all_PD[place_N + shift_S[place_N]] = embedded_ND
        own_PD = embedded_ND.new_empty(most, width)
        SCATTER(own_PD, all_PD, group=part.group)
        return own_PD[: counts[part.rank]]

    @staticmethod
    def backward(ctx: Any, dembedded_TD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        return _gather(dembedded_TD, ctx.counts, ctx.part)[place_N], None, None, None


class Tied(torch.autograd.Function):
    """One weight [V, D] as embedding and as head: (embedded_TD, weight_VD).

    The gradients of the few embedded rows are added to the head's gradient where it lies. Left to
    themselves, the two uses make a gradient [V, D] each, the embedding's almost all zeros: twice
    the memory at what is often the peak. Where the head hands over the very tensor that it saved, a
    second backward pass through one graph is refused by autograd, because the first wrote to it.

    Example: V = 3, D = 1, tokens [2, 2] with gradients [1, 2], head gradient [0, 1, 1]: [0, 1, 4].
    """

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token_T)
        embedded_TD = nn.functional.embedding(token_T, weight_VD)
        return embedded_TD, weight_VD.view_as(weight_VD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dembedded_TD: Tensor, dweight_VD: Tensor) -> tuple[Tensor, None]:
        (token_T,) = ctx.saved_tensors
        id_N, place_T = torch.unique(token_T, return_inverse=True)
        # Each row is added once, in one order: the sum is the same bits in every run.
        sum_ND = torch.ops.aten.embedding_dense_backward(
            dembedded_TD, place_T, len(id_N), -1, False
        )
        return dweight_VD.index_add_(0, id_N, sum_ND), None
