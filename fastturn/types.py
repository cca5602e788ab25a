"""The data that flows: Turn -> Trajectory -> Trunk / SiblingGroup -> (pack) -> PackedBatch.

Everything left of `pack` is made of these records: frozen, slotted, numpy only. Each fact is stored
once, by whoever knows it: the renderer writes `Boundary.kept`, the sampler writes ids,
log-probabilities and the policy version, the environment writes rewards and events.

Axis legend, used as a suffix on every array and tensor of the project:

    T  tokens the model reads (packed)      A  actions: sampled tokens that the loss scores
    U  turns                                R  rows of hidden states (one per distinct source token)
    V  vocabulary                           D  model width
    H  query heads   K  key/value heads     E  head width      B  sequences     L  layers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class Stop(StrEnum):
    """Why the sampler stopped: it drew a stop token, or the token budget ran out."""

    STOP = "stop"
    LENGTH = "length"


class Ending(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"  # the environment said so
    TRUNCATED = "truncated"  # an action was cut by its token budget
    TURNS = "turns"  # the turn limit was reached
    CONTEXT = "context"  # the next context would not fit the model
    FAILED = "failed"  # the environment raised or missed its deadline


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a turn's context follows from the running sequence (previous context + action).

    `c_k = running[:kept] + context_T`. The first turn of a trajectory has `kept = 0`.

    Example: running = [1, 2, 3, 9, 9], kept = 3, context_T = [9, 7] gives c_k = [1, 2, 3, 9, 7]:
    the renderer dropped one token of the previous action and appended an observation.
    """

    kept: int
    context_T: Ids

    def __post_init__(self) -> None:
        assert self.kept >= 0 and self.context_T.ndim == 1

    def apply(self, running_T: Ids) -> Ids:
        """The exact context ids of this turn, given the running sequence before it."""
        assert self.kept <= len(running_T)
        return np.concatenate([running_T[: self.kept], self.context_T])


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled action: ids, their log-probabilities under the distribution they were drawn from
    (temperature included), the version of the policy that drew them, and why it stopped.

    Shapes: action_A int32 [A], logprob_A float32 [A]; the stop token, if drawn, is the last id.
    Example: `Completion(action_A=[5, 2], logprob_A=[-0.1, -0.7], version=3, stop=Stop.STOP)`.
    """

    action_A: Ids
    logprob_A: Floats
    version: int
    stop: Stop

    def __post_init__(self) -> None:
        assert self.action_A.shape == self.logprob_A.shape and self.action_A.ndim == 1


class Channel(StrEnum):
    """What an action can be credited for besides the outcome: kinds of path rules."""

    PENALTY = "penalty"  # a bad move was made
    FULFILMENT = "fulfilment"  # the good move that its penalty's rule asks for was made
    PROGRESS = "progress"  # a potential of the state has changed


@dataclass(frozen=True, slots=True)
class Hit:
    """A path rule that an action met: what that is worth, and which call of the action it was.

    `span`: the tokens of that call, from start to stop within the action; None is all of them.
    Example: `Hit("dial_outside_hours", Channel.PENALTY, -0.25, call=0)`.
    """

    rule: str
    channel: Channel
    value: float
    call: int = 0
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision: where it was taken (`boundary`), what was sampled (`completion`), what the
    environment answered for it (`reward`, `events`), and the path rules it met (`path`).

    `events` are named happenings that are counted: "tool_call", "bad_json", "unknown_tool", ...
    `reward` is of the outcome alone; what rules say is in `path` and nowhere else.
    Example: a correct final answer is `Turn(boundary, completion, reward=1.0, events=("answer",))`.
    """

    boundary: Boundary
    completion: Completion
    reward: float = 0.0
    events: tuple[str, ...] = ()
    path: tuple[Hit, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Consecutive turns of one episode, beginning at turn `first_turn` of the task `task`.

    A trunk or a GRPO rollout begins at 0, an RTPO sibling of stage k begins at k; in both cases
    `turns[0].boundary.kept == 0` and its context is whole. `tree`: which of its group's trees it is
    a leaf of, where episodes were branched off each other; independent episodes are all of tree 0.
    """

    task: str
    first_turn: int
    turns: tuple[Turn, ...]
    ending: Ending
    tree: int = 0

    def __post_init__(self) -> None:
        assert self.turns and self.turns[0].boundary.kept == 0

    def contexts(self) -> Iterator[Ids]:
        """The exact context ids of every turn, in order."""
        running_T: Ids = np.empty(0, np.int32)
        for turn in self.turns:
            context_T = turn.boundary.apply(running_T)
            yield context_T
            running_T = np.concatenate([context_T, turn.completion.action_A])

    def discounted_return(self, gamma: float = 1.0, first: int = 0) -> float:
        """R = sum_h gamma^(tau_h) r_h over the turns from `first` on, tau_h the number of tokens
        sampled in those of them before h (paper: executing a macro-action consumes T_k token
        steps).

        Example: rewards (0, 1), first action 10 tokens, gamma = 0.99 gives 0.99 ** 10 = 0.904.
        """
        total, tokens = 0.0, 0
        for turn in self.turns[first:]:
            total += gamma**tokens * turn.reward
            tokens += len(turn.completion.action_A)
        return total

    @property
    def success(self) -> bool:
        """Whether the rewards of its turns add up to 1 or more (undiscounted)."""
        return sum(turn.reward for turn in self.turns) >= 1.0

    @property
    def violation_free(self) -> bool:
        """Whether no rule was broken and the episode came to its end: what is cut off or runs out
        of turns has not shown that it would have kept to the rules."""
        broken = any(hit.channel is Channel.PENALTY for turn in self.turns for hit in turn.path)
        return self.ending is Ending.FINISHED and not broken

    @property
    def clean_success(self) -> bool:
        """Whether it succeeded and broke no rule. An episode that is given up at once breaks none
        either, so `violation_free` alone does not say that rules were kept while working."""
        return self.success and self.violation_free

    @property
    def tokens_sampled(self) -> int:
        return sum(len(turn.completion.action_A) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trunk:
    """A complete trajectory grown only to visit states: never trained on, never in a baseline.

    `snapshots[k]` is the episode (environment and conversation) as it was at boundary k, before
    turn k was sampled; picklable and never mutated, so that it can be restored many times.
    """

    trajectory: Trajectory
    snapshots: tuple[Any, ...]

    def __post_init__(self) -> None:
        assert len(self.snapshots) == len(self.trajectory.turns)


@dataclass(frozen=True, slots=True)
class SiblingGroup:
    """Trajectories that share one exact state: same snapshot, same context ids `context_T`.

    RTPO: `n = G - 1` continuations from boundary `turn` of a trunk. GRPO: `n = G` episodes from
    the start of a task (`turn = 0`). `trunk` tells apart groups of the same task and turn.
    `weight`: what it counts in the mean over groups, where states were chosen to be sampled at
    with a probability (its inverse, times what the mean is over).
    """

    task: str
    trunk: int
    turn: int
    context_T: Ids
    siblings: tuple[Trajectory, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start to stop of one turn's action have this much more advantage than the turn."""

    turn: int
    start: int
    stop: int
    advantage: float


@dataclass(frozen=True, slots=True)
class Credit:
    """What the loss of one trajectory weighs: one advantage and one token weight for each turn.

    `weight_U` is the final coefficient of every token of the turn in the loss (RTPO:
    1/groups · 1/(G-1) · 1/T_jk for turn k and 0 for later turns). Shapes: float64 [U]. `spans`:
    where the tokens of one turn are to be credited differently (one call of several).
    Example, G - 1 = 2 siblings of 4 and 5 tokens, one group, only the first one rewarded:
    advantages +.5 and -.5, weights 1/8 and 1/10.
    """

    trajectory: Trajectory
    advantage_U: NDArray[np.float64]
    weight_U: NDArray[np.float64]
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        assert self.advantage_U.shape == self.weight_U.shape == (len(self.trajectory.turns),)

    @property
    def silent(self) -> bool:
        """No token of this trajectory can move the policy through the surrogate."""
        live = any(self.weight_U[span.turn] for span in self.spans)
        return not live and not np.any((self.advantage_U != 0) & (self.weight_U != 0))

    def advantage_A(self, turn: int) -> NDArray[np.float64]:
        """Of every token of a turn's action."""
        tokens = len(self.trajectory.turns[turn].completion.action_A)
        advantage_A = np.full(tokens, self.advantage_U[turn])
        for span in self.spans:
            if span.turn == turn:
                advantage_A[span.start : span.stop] += span.advantage
        return advantage_A
