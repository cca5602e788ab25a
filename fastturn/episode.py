"""An exact state at a turn boundary, and the episodes that are played from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from fastturn.config import Config, ConfigError
from fastturn.envs.base import (
    Action,
    Domain,
    DomainError,
    Env,
    Message,
    Observation,
    Task,
    unreadable,
    unusable,
)
from fastturn.pool import within
from fastturn.render import Conversation
from fastturn.types import Boundary, Ending, Ids, SiblingGroup, Trajectory, Trunk, Turn


def stream_seed(*key: object) -> int:
    """A 63-bit seed for one random stream, a pure function of its name.

    Example: `stream_seed(0, "fork", 3, "task-17", 2)`; the same key always gives the same draw,
    whatever else is sampled beside it, which is what makes a resumed run repeat an unbroken one.
    """
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def begin(domain: Domain, task: Task, config: Config) -> tuple[Any, list[Message]]:
    """The state of an environment in which `task` has begun, and its first messages.

    Raises `DomainError` for one that cannot begin, or takes longer than a step may: no episode of
    it is possible.
    """

    def start() -> tuple[Any, list[Message]]:
        env = domain.env()
        messages = env.start(task)
        if wrong := unreadable(messages, True):
            raise TypeError(wrong)
        return env.snapshot(), messages

    try:
        return within(config.data.env_timeout_s, start)
    except (ConfigError, DomainError):
        raise
    except Exception as error:
        raise DomainError(
            f"task {task.id}: its environment does not start ({type(error).__name__}: {error}); "
            f"fastturn check-env shows what is wrong with it"
        ) from error


@dataclass(frozen=True, slots=True)
class Point:
    """One exact state at a turn boundary; picklable, never mutated.

    `turn`: index of the turn to be sampled next; `tokens_sampled`: by all turns before it;
    `weight`: what the group sampled here counts (`SiblingGroup.weight`).
    """

    task: Task
    trunk: int
    turn: int
    tokens_sampled: int
    env_state: Any
    conversation: Conversation
    weight: float = 1.0


@dataclass(slots=True)
class Episode:
    """An episode being played from a point; `stream` names its random stream, `state` is the
    environment's at the boundary that was kept last."""

    origin: Point
    env: Env
    state: Any
    stream: tuple[object, ...]
    conversation: Conversation
    boundary: Boundary
    tokens_sampled: int
    turns: list[Turn] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    ending: Ending | None = None

    @classmethod
    def resume(cls, domain: Domain, point: Point, stream: tuple[object, ...]) -> Episode:
        """A new episode that goes on from `point`."""
        boundary = Boundary(0, point.conversation.context_T)
        parts = point.env_state, stream, point.conversation, boundary, point.tokens_sampled
        return cls(point, domain.env(), *parts)

    def act(self, action: Action, keep: bool = False) -> Observation:
        """What the environment makes of the next action; its first one finds it restored. `keep`:
        the state that it leads to is wanted.

        Everything an environment may take long for, or fail at, happens here, where callers set a
        deadline: a restore may replay a whole episode.
        """
        if not self.turns:
            self.env.restore(self.state)
        answer = self.env.step(action)
        if wrong := unusable(answer):
            raise TypeError(f"{wrong}; fastturn check-env shows what is wrong with it")
        if keep and not answer.done:
            self.state = self.env.snapshot()
        return answer

    @property
    def turn(self) -> int:
        return self.origin.turn + len(self.turns)

    @property
    def context_T(self) -> Ids:
        return self.conversation.context_T

    def point(self) -> Point:
        """The boundary it is at, when the state there was kept."""
        return replace(
            self.origin,
            turn=self.turn,
            tokens_sampled=self.tokens_sampled,
            env_state=self.state,
            conversation=self.conversation,
        )

    def trajectory(self) -> Trajectory:
        assert self.ending is not None
        return Trajectory(self.origin.task.id, self.origin.turn, tuple(self.turns), self.ending)


@dataclass(slots=True)
class Cohort:
    """Episodes from one point; their first turn is one request. `trunk`: the point of every
    boundary on the way is kept."""

    point: Point
    episodes: Sequence[Episode]
    trunk: bool = False

    @property
    def ended(self) -> bool:
        return all(episode.ending is not None for episode in self.episodes)

    def as_trunk(self) -> Trunk:
        (episode,) = self.episodes
        return Trunk(episode.trajectory(), tuple(episode.points))

    def as_group(self) -> SiblingGroup | None:
        """The siblings whose environment held; None when of several fewer than two are left."""
        held = [e.trajectory() for e in self.episodes if e.ending is not Ending.FAILED]
        if len(held) < min(len(self.episodes), 2):
            return None
        point = self.point
        context_T = point.conversation.context_T
        return SiblingGroup(
            *(point.task.id, point.trunk, point.turn, context_T, tuple(held)), point.weight
        )
