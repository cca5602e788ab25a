"""The isthmus: the only file that knows both turns and tensors.

Left of here there is no torch, right of here there are no turns. `pack` writes every scored turn
`c_k + l_k` into a trie (`trie.py`), depth first, so a context is stored once for all its siblings,
siblings that begin with the same sampled tokens share those too, and the next turn of the same
trajectory continues where the last one ended. A prefix is shared if and only if its ids are equal,
whatever group or task it belongs to. Each action token writes one loss row whose source is the
token on top of the stack before it. The last token of an action is only a label.

    groups -> paths (what is read) -> sorted -> plan (`cut.py`) -> trie -> PackedBatch

One integer a token is the whole attention mask: `end_T[j]` is the packed index at which token `j`
was popped, `visible(q, k) = k <= q < end_T[k]`. `position_T` is the depth on the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from typing import Any

import numpy as np
import torch

from fastturn.cut import COST, Cost, Forest, plan
from fastturn.trie import shared_prefix, trie
from fastturn.types import Credit, Floats, Ids, Turn

ID_BYTES = 4  # of an id in a path's key


class DividedGroupError(ValueError):
    """A group does not fit one micro-batch, and its loss compares all of its turns."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: tokens to read (T), actions to score (A), turns they belong to (U).

    token_T, position_T, end_T int64 [T]; source_A int64 [A] non-decreasing index into T (the token
    whose hidden state predicts the action), action_A int64 [A], behavior_A (log-probability when it
    was sampled), advantage_A, weight_A float32 [A], turn_A int64 [A] index into U, version_U int64
    [U] (policy version that sampled the turn), trajectory_U and group_U int64 [U] (which of all the
    trajectories and groups of the step the turn belongs to). `tokens_flat`: tokens without sharing.

    The loss is `sum_A weight_A * surrogate_A`; weights are final, so any cut into micro-batches
    gives the same sum. An empty one (all axes 0) is a rank's share of a step it has no work for.

    `plans`: what attention has worked out about `end_T`, by window; filled by the first pass and
    read by the others (the reference's score, later layers, the backward pass).
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
    trajectory_U: torch.Tensor
    group_U: torch.Tensor
    tokens_flat: int
    plans: dict[int | None, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tokens_packed(self) -> int:
        return len(self.token_T)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTurn:
    """One turn as the trie sees it. `tokens_flat` is what it adds to its own unshared row."""

    tokens_T: Ids  # what the model reads: the context and all but the last sampled token
    action_A: Ids
    behavior_A: Floats
    advantage_A: Floats
    weight: float
    version: int
    tokens_flat: int

    @property
    def sources(self) -> slice:
        """Where on the stack the sources of the action tokens lie."""
        return slice(len(self.tokens_T) - len(self.action_A), len(self.tokens_T))


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """Consecutive turns of a trajectory that one sequence of ids holds: every turn's tokens are a
    beginning of the last one's. A trajectory whose history is only appended to is one path; what
    pops into tokens that an earlier turn was scored on begins another.

    `key`: the ids as bytes, which the turns' `tokens_T` are views of. Any order of bytes makes
    neighbours of equal beginnings, so the machine's byte order does.
    """

    group: int
    trajectory: int
    key: bytes
    turns: tuple[ScoredTurn, ...]

    @property
    def tokens_T(self) -> Ids:
        return self.turns[-1].tokens_T

    @property
    def actions(self) -> int:
        return sum(len(turn.action_A) for turn in self.turns)


def pack(
    groups: Sequence[Sequence[Credit]],
    budget_T: int,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    ranks: int = 1,
    whole_groups: bool = False,
    cost: Cost = COST,
) -> list[PackedBatch]:
    """The micro-batches of one rank, at most `budget_T` tokens each, on `device`.

    Over all ranks they hold every turn with a weight exactly once, and every rank has equally many
    of them: where there is less work the last ones are empty. A group (all turns of all its
    trajectories) stays in one micro-batch; a group that alone exceeds the budget is split by
    siblings (its context is read again, the loss is the same), and a single sequence over the
    budget gets a micro-batch of its own. Ranks are balanced by `cost`. All ranks must pass the same
    groups; each makes tensors for itself only. Nothing to score gives an empty list on every rank.

    Raises `ValueError` for a budget below one or a rank outside 0 .. ranks - 1, and
    `DividedGroupError` when `whole_groups` and a group had to be split.

    Example: one group with a context of 10 tokens and siblings of 4 and 5 tokens, all different,
    packs into 10 + 3 + 4 = 17 tokens and 9 actions; without sharing it is 29 tokens. With ranks = 2
    the second rank gets one empty micro-batch.
    """
    if budget_T < 1:
        raise ValueError(
            f"budget_T={budget_T}: expected the tokens of a micro-batch, at least 1; "
            f"raise pack_tokens"
        )
    if not 0 <= rank < ranks:
        raise ValueError(
            f"rank={rank}, ranks={ranks}: expected 0 <= rank < ranks; pass this process's rank and "
            f"the size of its data-parallel group"
        )
    ordered = sorted(paths(groups), key=lambda path: path.key)
    parts = plan(_forest(ordered, cost), budget_T, ranks)
    if whole_groups:
        _refuse_divided(ordered, [part.numbers for mine in parts for part in mine], budget_T)
    return [_tensors([ordered[n] for n in part.numbers], device) for part in parts[rank]]


def _refuse_divided(ordered: Sequence[Path], parts: Iterable[Sequence[int]], budget_T: int) -> None:
    home: dict[int, int] = {}
    for at, numbers in enumerate(parts):
        for group in {ordered[n].group for n in numbers}:
            if home.setdefault(group, at) != at:
                tokens = sum(len(path.tokens_T) for path in ordered if path.group == group)
                raise DividedGroupError(
                    f"pack_tokens={budget_T}: a group does not fit one micro-batch, and the loss "
                    f"of this algorithm compares all of its turns; set pack_tokens={tokens} or "
                    f"more, or make groups smaller (group_size, turns, sampling.episode_tokens)"
                )


def paths(groups: Iterable[Iterable[Credit]]) -> Iterator[Path]:
    """What must be read to score every turn with a weight, group by group."""
    number = count()
    for index, group in enumerate(groups):
        for credit in group:
            yield from _trajectory_paths((index, next(number)), credit)


def scored_turns(groups: Iterable[Iterable[Credit]]) -> Iterator[ScoredTurn]:
    """Every turn with a weight and its exact context: the same without sharing, a row a turn."""
    return chain.from_iterable(path.turns for path in paths(groups))


def _trajectory_paths(place: tuple[int, int], credit: Credit) -> Iterator[Path]:
    """Run the trajectory's stack; whenever scored tokens are popped, what was read is a path.
    `place`: numbers of its group and of itself."""
    running = bytearray()
    scored: list[tuple[int, Turn, Floats, float, int]] = []
    stop = flat = 0  # tokens that the newest scored turn reads; tokens pushed since it
    for index in range(_last_scored(credit) + 1):
        turn = credit.trajectory.turns[index]
        kept, action_A = turn.boundary.kept, turn.completion.action_A
        if scored and kept < stop:
            yield _path(place, bytes(memoryview(running)[: stop * ID_BYTES]), scored)
            scored = []
        assert kept * ID_BYTES <= len(running)
        del running[kept * ID_BYTES :]
        running += np.ascontiguousarray(turn.boundary.context_T, np.int32).data
        running += np.ascontiguousarray(action_A, np.int32).data
        flat += len(turn.boundary.context_T) + len(action_A)
        weight = float(credit.weight_U[index])
        if weight and len(action_A):
            stop = len(running) // ID_BYTES - 1
            advantage_A = credit.advantage_A(index).astype(np.float32)
            scored.append((stop, turn, advantage_A, weight, flat))
            flat = 0
    if scored:
        yield _path(place, bytes(memoryview(running)[: stop * ID_BYTES]), scored)


def _last_scored(credit: Credit) -> int:
    """Index of the last turn with a weight, -1 without one: later turns are not read."""
    found = np.flatnonzero(credit.weight_U)
    return int(found[-1]) if found.size else -1


def _path(
    place: tuple[int, int], key: bytes, scored: Sequence[tuple[int, Turn, Floats, float, int]]
) -> Path:
    all_T = np.frombuffer(key, np.int32)
    turns = tuple(
        ScoredTurn(
            tokens_T=all_T[:stop],
            action_A=turn.completion.action_A,
            behavior_A=turn.completion.logprob_A,
            advantage_A=advantage_A,
            weight=weight,
            version=turn.completion.version,
            tokens_flat=flat,
        )
        for stop, turn, advantage_A, weight, flat in scored
    )
    return Path(*place, key, turns)


def _forest(ordered: Sequence[Path], cost: Cost) -> Forest:
    shared = [shared_prefix(left.tokens_T, right.tokens_T) for left, right in pairwise(ordered)]
    return Forest(
        [len(path.tokens_T) for path in ordered],
        [0, *shared] if ordered else [],
        [path.group for path in ordered],
        [path.actions for path in ordered],
        cost,
    )


def _tensors(ordered: Sequence[Path], device: torch.device | str) -> PackedBatch:
    """The trie of sorted paths, and one row for every action in the order of their sources."""
    token_T, position_T, end_T, index = trie(path.tokens_T for path in ordered)
    turns = [turn for path in ordered for turn in path.turns]
    sources = [
        index_T[turn.sources]
        for index_T, path in zip(index, ordered, strict=True)
        for turn in path.turns
    ]
    source_A = _joined(sources, np.int64)
    order_A = np.argsort(source_A, kind="stable")
    lengths_U = np.array([len(turn.action_A) for turn in turns], np.int64)

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype)

    def rows(values_A: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return tensor(values_A[order_A], dtype)

    def of_path(numbers: Iterable[int]) -> np.ndarray:
        turns_P = np.array([len(path.turns) for path in ordered], np.int64)
        return np.repeat(np.fromiter(numbers, np.int64), turns_P)

    def each(values: Iterable[float]) -> torch.Tensor:
        return rows(np.repeat(np.fromiter(values, np.float32), lengths_U), torch.float32)

    return PackedBatch(
        token_T=tensor(token_T),
        position_T=tensor(position_T),
        end_T=tensor(end_T),
        source_A=rows(source_A),
        action_A=rows(_joined([turn.action_A for turn in turns], np.int32)),
        behavior_A=rows(_joined([turn.behavior_A for turn in turns], np.float32), torch.float32),
        advantage_A=rows(_joined([turn.advantage_A for turn in turns], np.float32), torch.float32),
        weight_A=each(turn.weight for turn in turns),
        turn_A=rows(np.repeat(np.arange(len(turns)), lengths_U)),
        version_U=tensor(np.array([turn.version for turn in turns], np.int64)),
        trajectory_U=tensor(of_path(path.trajectory for path in ordered)),
        group_U=tensor(of_path(path.group for path in ordered)),
        tokens_flat=sum(turn.tokens_flat for turn in turns),
    )


def _joined(values: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Arrays end to end; no arrays are an empty one."""
    return np.concatenate(values) if values else np.empty(0, dtype)
