"""Rollouts as trees: grow trunks, fork siblings at their boundaries, walk the stages in reverse.

    tasks -> roots -> grow -> trunks -> stages (k = K-1 ... 0) -> fork -> sibling groups

Everything starts from a `Point`: one exact state (environment snapshot and conversation) from which
any number of episodes can be played. Episodes advance in lockstep, one sampler call a turn for all
of them; episodes at the same point are one request, so their context is read once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from fastturn.config import Config
from fastturn.envs.base import Domain, Env, Observation, Task
from fastturn.pool import DeadlineError, run_all
from fastturn.render import Conversation, Renderer
from fastturn.sampler.base import Request, Sampler, SamplingParams
from fastturn.types import (
    Boundary,
    Completion,
    Ending,
    Ids,
    SiblingGroup,
    Stop,
    Trajectory,
    Trunk,
    Turn,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


def stream_seed(*key: object) -> int:
    """A 63-bit seed for one random stream, a pure function of its name.

    Example: `stream_seed(0, "fork", 3, "task-17", 2)`; the same key always gives the same draw,
    whatever else is sampled beside it, which is what makes a resumed run repeat an unbroken one.
    """
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Point:
    """One exact state at a turn boundary; picklable, never mutated.

    `turn`: index of the turn to be sampled next; `tokens_sampled`: by all turns before it.
    """

    task: Task
    trunk: int
    turn: int
    tokens_sampled: int
    env_state: Any
    conversation: Conversation


@dataclass(slots=True)
class Episode:
    """An episode being played from a point; `stream` names its random stream."""

    origin: Point
    env: Env
    stream: tuple[object, ...]
    conversation: Conversation
    boundary: Boundary
    tokens_sampled: int
    turns: list[Turn] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def turn(self) -> int:
        return self.origin.turn + len(self.turns)

    @property
    def context_T(self) -> Ids:
        return self.conversation.context_T

    def point(self) -> Point:
        """The state it is in now."""
        return replace(
            self.origin,
            turn=self.turn,
            tokens_sampled=self.tokens_sampled,
            env_state=self.env.snapshot(),
            conversation=self.conversation,
        )

    def trajectory(self) -> Trajectory:
        assert self.ending is not None
        return Trajectory(self.origin.task.id, self.origin.turn, tuple(self.turns), self.ending)


class Clock(Protocol):
    """What rollouts need of the meter: time spans and event counts."""

    def span(self, name: str) -> AbstractContextManager[Any]: ...

    def count(self, name: str, n: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Unmetered:
    """A clock for work that is one span of its own and whose events are not those of training."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    def count(self, name: str, n: int = 1) -> None:
        """Not counted."""


class Peers(Protocol):
    """The processes that share a rollout: each plays its own items, all know all results."""

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """The items that this process is to play."""
        ...

    def join(self, results: Sequence[T]) -> list[T]:
        """The results of all items in their order, from one result for each of `mine`."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One process plays everything."""

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        return items

    def join(self, results: Sequence[T]) -> list[T]:
        return list(results)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The sampling side of a run: tasks in, trunks and sibling groups out."""

    domain: Domain
    renderer: Renderer
    sampler: Sampler
    config: Config
    clock: Clock
    on_turn: Callable[[int, int], None] = lambda ended, tokens: None  # progress, after each turn
    peers: Peers = Alone()

    def roots(self, tasks: Sequence[Task], trunks: int = 1) -> list[Point]:
        """The start of every task, `trunks` times over: the boundaries of turn 0. Tasks that leave
        no room for an answer are left out (said, and counted as `task_too_long`)."""
        found: list[list[Point]] = []  # of every task
        with self.clock.span("environment"):
            for task in self.peers.mine(tasks):
                found.append([])
                env = self.domain.env()
                conversation = self.renderer.start(env.start(task))
                if not self.renderer.fits(conversation):
                    logger.warning(
                        "task %s begins with %d tokens, the model reads %d (model.max_context); "
                        "the task is left out",
                        task.id,
                        len(conversation.context_T),
                        self.config.model.max_context,
                    )
                    self.clock.count("task_too_long")
                    continue
                for trunk in range(trunks):
                    found[-1].append(Point(task, trunk, 0, 0, env.snapshot(), conversation))
        return [point for points in self.peers.join(found) for point in points]

    def grow(self, roots: Sequence[Point], key: tuple[object, ...]) -> list[Trunk]:
        """One complete trajectory from every root, with the point of every boundary on its way."""
        own = self.peers.mine(roots)
        episodes = [self._resume(root, (*key, root.task.id, root.trunk)) for root in own]
        self._play([[episode] for episode in episodes], self._params(), "trunk_decode", True)
        return self.peers.join([Trunk(e.trajectory(), tuple(e.points)) for e in episodes])

    def fork(
        self,
        points: Sequence[Point],
        n: int,
        key: tuple[object, ...],
        temperature: float | None = None,
        span: str = "sibling_decode",
    ) -> list[SiblingGroup]:
        """`n` episodes from every point, each played to its end with the current policy.

        Siblings whose environment failed are left out (counted as `ending_failed`); a group that
        keeps fewer than two of several siblings has nothing to compare and is left out as well
        (counted as `group_lost`).
        """
        own = self.peers.mine(points)
        cohorts = [
            [self._resume(point, (*key, point.task.id, point.trunk, j)) for j in range(n)]
            for point in own
        ]
        self._play(cohorts, self._params(temperature), span, False)
        groups: list[SiblingGroup | None] = []
        for point, cohort in zip(own, cohorts, strict=True):
            siblings = [e.trajectory() for e in cohort if e.ending is not Ending.FAILED]
            if len(siblings) < min(n, 2):
                self.clock.count("group_lost")
                groups.append(None)
                continue
            context_T = point.conversation.context_T
            groups.append(
                SiblingGroup(point.task.id, point.trunk, point.turn, context_T, tuple(siblings))
            )
        return [group for group in self.peers.join(groups) if group is not None]

    def _params(self, temperature: float | None = None) -> SamplingParams:
        if temperature is None:
            temperature = self.config.sampling.temperature
        return SamplingParams(temperature, tuple(self.renderer.stop_ids))

    def _resume(self, point: Point, stream: tuple[object, ...]) -> Episode:
        env = self.domain.env()
        env.restore(point.env_state)
        boundary = Boundary(0, point.conversation.context_T)
        return Episode(point, env, stream, point.conversation, boundary, point.tokens_sampled)

    def _play(
        self, cohorts: list[list[Episode]], params: SamplingParams, span: str, record: bool
    ) -> None:
        """Play every episode to its end. A cohort is episodes at one point: one request."""
        while cohorts:
            episodes = [episode for cohort in cohorts for episode in cohort]
            if record:
                for episode in episodes:
                    episode.points.append(episode.point())
            with self.clock.span(span):
                completions = self.sampler.sample([self._request(c) for c in cohorts], params)
            flat = [completion for group in completions for completion in group]
            with self.clock.span("environment"):
                self._step(episodes, flat)
            cohorts = [[episode] for episode in episodes if episode.ending is None]
            ended = len(episodes) - len(cohorts)
            self.on_turn(ended, sum(len(done.action_A) for done in flat))

    def _request(self, cohort: Sequence[Episode]) -> Request:
        first = cohort[0]
        limits, room = self.config.sampling, self.config.model.max_context - len(first.context_T)
        budget = min(limits.turn_tokens, limits.episode_tokens - first.tokens_sampled, room)
        seeds = tuple(stream_seed(self.config.seed, *e.stream, e.turn) for e in cohort)
        return Request(first.context_T, budget, seeds)

    def _step(self, episodes: Sequence[Episode], completions: Sequence[Completion]) -> None:
        """Let the environments answer; actions cut by their budget end the episode unanswered."""
        whole = []
        for episode, completion in zip(episodes, completions, strict=True):
            episode.tokens_sampled += len(completion.action_A)
            if completion.stop is Stop.LENGTH:
                self._end_turn(episode, completion, 0.0, ("truncated",), Ending.TRUNCATED)
            else:
                action = self.renderer.parse(completion.action_A)
                whole.append((episode, completion, partial(episode.env.step, action)))
        answers = run_all([call for _, _, call in whole], self.config.data.env_timeout_s)
        for (episode, completion, _), answer in zip(whole, answers, strict=True):
            if isinstance(answer, Exception):
                self._fail(episode, completion, answer)
            else:
                self._answer(episode, completion, answer)

    def _fail(self, episode: Episode, completion: Completion, error: Exception) -> None:
        event = "env_timeout" if isinstance(error, DeadlineError) else "env_error"
        logger.warning(
            "task %s, turn %d: the environment failed (%s: %s); the episode is not trained on",
            episode.origin.task.id,
            episode.turn,
            type(error).__name__,
            error,
            exc_info=error,
        )
        self._end_turn(episode, completion, 0.0, (event,), Ending.FAILED)

    def _answer(self, episode: Episode, completion: Completion, answer: Observation) -> None:
        """Book the turn, then either end the episode or move on to the next boundary."""
        config = self.config
        ending: Ending | None = None
        if answer.done:
            ending = Ending.FINISHED
        elif episode.turn + 1 >= config.turns:
            ending = Ending.TURNS
        else:
            following = self.renderer.advance(
                episode.conversation, completion.action_A, answer.messages
            )
            if not self.renderer.fits(following):
                ending = Ending.CONTEXT
            elif episode.tokens_sampled >= config.sampling.episode_tokens:
                ending = Ending.TRUNCATED
        self._end_turn(episode, completion, answer.reward, answer.events, ending)
        if ending is None:
            episode.conversation, episode.boundary = following, following.boundary

    def _end_turn(
        self,
        episode: Episode,
        completion: Completion,
        reward: float,
        events: tuple[str, ...],
        ending: Ending | None,
    ) -> None:
        episode.turns.append(Turn(episode.boundary, completion, reward, events))
        episode.ending = ending
        for event in events:
            self.clock.count(event)
        if ending is not None:
            self.clock.count(f"ending_{ending}")


def stages(trunks: Sequence[Trunk]) -> Iterator[tuple[int, list[Point]]]:
    """(k, the boundaries of turn k) for k = K-1 ... 0; shorter trunks join when k reaches them.

    Example: trunks of 3 and 2 turns give (2, [p2]), (1, [p1, q1]), (0, [p0, q0]).
    """
    deepest = max((len(trunk.snapshots) for trunk in trunks), default=0)
    for k in reversed(range(deepest)):
        yield k, [trunk.snapshots[k] for trunk in trunks if k < len(trunk.snapshots)]
