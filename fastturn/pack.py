"""The isthmus: the only file that knows both turns and tensors.

Left of here there is no torch, right of here there are no turns. `pack` writes every scored turn
`c_k + l_k` into a trie, depth first, with a stack machine:

    pop to the longest prefix that the stack and the next sequence share, push the rest

so a context is stored once for all its siblings, siblings that begin with the same sampled tokens
share those too, and the next turn of the same trajectory continues where the last one ended. A
prefix is shared if and only if its ids are equal. Each action token writes one loss row whose
source is the token on top of the stack before it. The last token of an action is only a label.

One integer a token is the whole attention mask: `end_T[j]` is the packed index at which token `j`
was popped, `visible(q, k) = k <= q < end_T[k]`. `position_T` is the depth on the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from fastturn.types import Credit, Floats, Ids


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: tokens to read (T), actions to score (A), turns they belong to (U).

    token_T, position_T, end_T int64 [T]; source_A int64 [A] non-decreasing index into T (the token
    whose hidden state predicts the action), action_A int64 [A], behavior_A (log-probability when it
    was sampled), advantage_A, weight_A float32 [A], turn_A int64 [A] index into U, version_U int64
    [U] (policy version that sampled the turn). `tokens_flat`: tokens without any sharing.

    The loss is `sum_A weight_A * surrogate_A`; weights are final, so any cut into micro-batches
    gives the same sum.
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    end_T: torch.Tensor
    source_A: torch.Tensor
    action_A: torch.Tensor
    behavior_A: torch.Tensor
    advantage_A: torch.Tensor
    weight_A: torch.Tensor
    turn_A: torch.Tensor
    version_U: torch.Tensor
    tokens_flat: int

    @property
    def tokens_packed(self) -> int:
        return len(self.token_T)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTurn:
    """One turn as the trie sees it. `tokens_flat` is what it adds to its own unshared row."""

    group: int
    tokens_T: Ids  # what the model reads: the context and all but the last sampled token
    action_A: Ids
    behavior_A: Floats
    advantage: float
    weight: float
    version: int
    tokens_flat: int

    @property
    def sources(self) -> slice:
        """Where on the stack the sources of the action tokens lie."""
        return slice(len(self.tokens_T) - len(self.action_A), len(self.tokens_T))


def pack(
    groups: Sequence[Sequence[Credit]], budget_T: int, device: torch.device | str = "cpu"
) -> list[PackedBatch]:
    """Micro-batches of at most `budget_T` tokens holding every turn with a weight, in trie order.

    A group stays with its context in one micro-batch; a group that alone exceeds the budget is
    split by siblings (its context is read again, the loss is the same), and a single sequence over
    the budget gets a micro-batch of its own. Nothing to score gives an empty list.

    Example: one group with a context of 10 tokens and siblings of 4 and 5 tokens, all different,
    packs into 10 + 3 + 4 = 17 tokens and 9 actions; without sharing it is 29 tokens.
    """
    turns = sorted(scored_turns(groups), key=_lexicographic)
    return [_tensors(part, device) for part in _cut(turns, budget_T)]


def scored_turns(groups: Sequence[Sequence[Credit]]) -> Iterator[ScoredTurn]:
    """Every turn with a non-zero weight, with its exact context."""
    for index, group in enumerate(groups):
        for credit in group:
            flat = 0
            turns = zip(
                credit.trajectory.turns,
                credit.trajectory.contexts(),
                credit.advantage_U.tolist(),
                credit.weight_U.tolist(),
                strict=True,
            )
            for turn, context_T, advantage, weight in turns:
                done = turn.completion
                flat += len(turn.boundary.context_T) + len(done.action_A)
                if weight == 0 or len(done.action_A) == 0:
                    continue
                yield ScoredTurn(
                    group=index,
                    tokens_T=np.concatenate([context_T, done.action_A[:-1]]),
                    action_A=done.action_A,
                    behavior_A=done.logprob_A,
                    advantage=advantage,
                    weight=weight,
                    version=done.version,
                    tokens_flat=flat,
                )
                flat = 0


def shared_prefix(left_T: Ids, right_T: Ids) -> int:
    """Length of the longest common prefix. Example: [1, 2, 3] and [1, 2, 4, 5] give 2."""
    least = min(len(left_T), len(right_T))
    differs_T = left_T[:least] != right_T[:least]
    first = int(differs_T.argmax()) if least else 0
    return first if least and differs_T[first] else least


def _lexicographic(turn: ScoredTurn) -> bytes:
    """Big-endian bytes order as the ids do; a prefix comes before what continues it."""
    return turn.tokens_T.astype(">u4").tobytes()


def _cut(turns: Sequence[ScoredTurn], budget_T: int) -> Iterator[list[ScoredTurn]]:
    """Consecutive turns whose trie fits the budget; the cut falls between groups if it can."""
    part: list[ScoredTurn] = []
    size, group_start = 0, 0  # group_start: index in `part` where the newest group begins
    for turn in turns:
        if part and turn.group != part[-1].group:
            group_start = len(part)
        size += len(turn.tokens_T) - (
            shared_prefix(part[-1].tokens_T, turn.tokens_T) if part else 0
        )
        part.append(turn)
        while size > budget_T and len(part) > 1:
            at = group_start or len(part) - 1
            yield part[:at]
            part, group_start = part[at:], 0
            size = _trie_size(part)
    if part:
        yield part


def _trie_size(turns: Sequence[ScoredTurn]) -> int:
    shared = [shared_prefix(left.tokens_T, right.tokens_T) for left, right in pairwise(turns)]
    return sum(len(turn.tokens_T) for turn in turns) - sum(shared)


def _tensors(turns: Sequence[ScoredTurn], device: torch.device | str) -> PackedBatch:
    """Run the stack machine over sorted turns."""
    pushed, depths, sources = [], [], []
    closed: list[tuple[np.ndarray, int]] = []  # (packed indices, the index at which they ended)
    stack_T = np.empty(0, np.int32)  # ids on the stack
    index_T = np.empty(0, np.int64)  # their packed indices
    size = 0
    for turn in turns:
        tokens_T = turn.tokens_T
        kept = shared_prefix(stack_T, tokens_T)
        closed.append((index_T[kept:], size))
        new = len(tokens_T) - kept
        index_T = np.concatenate([index_T[:kept], np.arange(size, size + new)])
        pushed.append(tokens_T[kept:])
        depths.append(np.arange(kept, len(tokens_T)))
        sources.append(index_T[turn.sources])
        stack_T, size = tokens_T, size + new
    closed.append((index_T, size))
    end_T = np.empty(size, np.int64)
    for indices, end in closed:
        end_T[indices] = end

    lengths_U = [len(turn.action_A) for turn in turns]
    source_A = np.concatenate(sources)
    order_A = np.argsort(source_A, kind="stable")

    def rows(values: Sequence[np.ndarray] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        joined = np.concatenate(values) if isinstance(values, list) else np.asarray(values)
        return torch.from_numpy(joined[order_A]).to(device, dtype)

    def tokens(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device, torch.int64)

    return PackedBatch(
        token_T=tokens(pushed),
        position_T=tokens(depths),
        end_T=torch.from_numpy(end_T).to(device),
        source_A=rows(source_A, torch.int64),
        action_A=rows([turn.action_A for turn in turns], torch.int64),
        behavior_A=rows([turn.behavior_A for turn in turns], torch.float32),
        advantage_A=rows(np.repeat([t.advantage for t in turns], lengths_U), torch.float32),
        weight_A=rows(np.repeat([t.weight for t in turns], lengths_U), torch.float32),
        turn_A=rows(np.repeat(np.arange(len(turns)), lengths_U), torch.int64),
        version_U=torch.tensor([turn.version for turn in turns], device=device),
        tokens_flat=sum(turn.tokens_flat for turn in turns),
    )
