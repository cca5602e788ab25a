"""Rollouts as trees: grow trunks, fork siblings at their boundaries, walk the stages in reverse.

    tasks -> roots -> grow -> trunks -> stages (k = K-1 ... 0) -> fork -> sibling groups

Everything starts from a `Point`: one exact state (environment snapshot and conversation) from which
any number of episodes can be played (`play.py`); episodes at the same point are one request, so
their context is read once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from fastturn.beside import Beside, Inline
from fastturn.config import Config
from fastturn.envs.base import Domain, Task
from fastturn.episode import Cohort, Episode, Point, begin
from fastturn.play import Clock, Play
from fastturn.pool import Inbox
from fastturn.render import Renderer
from fastturn.sampler.base import Sampler, SamplingParams, Streaming
from fastturn.types import SiblingGroup, Trunk

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Peers(Protocol):
    """The processes that share a rollout: each plays its own items, all know all results."""

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """The items that this process is to play."""
        ...

    def join(self, results: Sequence[T]) -> list[T]:
        """The results of all items in their order, from one result for each of `mine`."""
        ...

    def relay(self, chunks: Iterable[list[T]]) -> Iterator[list[T]]:
        """The chunks of the process that plays, as they come; all go through them together."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One process plays everything."""

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        return items

    def join(self, results: Sequence[T]) -> list[T]:
        return list(results)

    def relay(self, chunks: Iterable[list[T]]) -> Iterator[list[T]]:
        yield from chunks


@dataclass(frozen=True, slots=True)
class Untimed:
    """A clock for another thread: events count, time there is not the run's but may be watched."""

    clock: Clock

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self.clock.aside(name)

    def aside(self, name: str) -> AbstractContextManager[Any]:
        return self.clock.aside(name)

    def count(self, name: str, n: int = 1) -> None:
        self.clock.count(name, n)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The sampling side of a run: tasks in, trunks and sibling groups out."""

    domain: Domain
    renderer: Renderer
    sampler: Sampler
    config: Config
    clock: Clock
    on_turn: Callable[[int, int], None] = lambda ended, tokens: None  # (ended, tokens sampled)
    peers: Peers = Alone()
    inbox: Callable[[float], Inbox] = Inbox
    beside: Callable[[Iterator[Any]], Beside[Any]] = Beside

    def roots(self, tasks: Sequence[Task], trunks: int = 1) -> list[Point]:
        """The start of every task, `trunks` times over: the boundaries of turn 0. Tasks that leave
        no room for an answer are left out (said, and counted as `task_too_long`).

        Points of one task are numbered through, as streams of random numbers are named by task and
        number: a task that comes twice is played twice, not copied.
        """
        found: list[list[Point]] = []  # of every task
        with self.clock.span("environment"):
            for task in self.peers.mine(tasks):
                found.append([])
                state, messages = begin(self.domain, task, self.config)
                conversation = self.renderer.start(messages)
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
                for _ in range(trunks):
                    found[-1].append(Point(task, 0, 0, 0, state, conversation))
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        joined = [point for points in self.peers.join(found) for point in points]
        return [replace(point, trunk=next(numbers[point.task.id])) for point in joined]

    def grow(self, roots: Sequence[Point], key: tuple[object, ...]) -> list[Trunk]:
        """One complete trajectory from every root, with the point of every boundary on its way."""
        return self._start(self._trunks(roots, key), self.params(), "trunk_decode").trunks()

    def fork(
        self,
        points: Sequence[Point],
        n: int,
        key: tuple[object, ...],
        params: SamplingParams | None = None,
    ) -> list[SiblingGroup]:
        """`n` episodes from every point, each played to its end with the current policy, drawn as
        in training unless `params` say how.

        Siblings whose environment failed are left out (counted as `ending_failed`); a group that
        keeps fewer than two of several siblings has nothing to compare and is left out as well
        (counted as `group_lost`).
        """
        unfolding = self._start(
            self._siblings(points, n, key), params or self.params(), "sibling_decode"
        )
        return [group for chunk in unfolding.groups(at_once=True) for group in chunk]

    def unfold(
        self,
        points: Sequence[Point],
        n: int,
        key: tuple[object, ...],
        ahead: Sequence[Point] = (),
        ahead_key: tuple[object, ...] = (),
    ) -> Unfolding:
        """What `fork` gives, while it is being sampled, and then the trunks of the roots `ahead`,
        which are grown beside the siblings by the same policy. Only a `Streaming` sampler works
        while the caller does something else."""
        cohorts = self._siblings(points, n, key) + self._trunks(ahead, ahead_key)
        return self._start(cohorts, self.params(), "sibling_decode")

    def params(self, temperature: float | None = None, top_p: float = 1.0) -> SamplingParams:
        """How to draw actions; at the temperature of training unless it is given."""
        if temperature is None:
            temperature = self.config.sampling.temperature
        return SamplingParams(temperature, tuple(self.renderer.stop_ids), top_p)

    def _start(self, cohorts: list[Cohort], params: SamplingParams, span: str) -> Unfolding:
        """Beside the caller when the sampler has devices of its own, else when the caller asks."""
        if not isinstance(self.sampler, Streaming):
            return Unfolding(self, cohorts, Inline(self._play(cohorts, params, span)), span)
        elsewhere = replace(self, clock=Untimed(self.clock))
        items = elsewhere._play(cohorts, params, span)
        return Unfolding(self, cohorts, self.beside(items), span)

    def _trunks(self, roots: Sequence[Point], key: tuple[object, ...]) -> list[Cohort]:
        return [
            Cohort(root, [self._resume(root, (*key, root.task.id, root.trunk))], trunk=True)
            for root in self.peers.mine(roots)
        ]

    def _siblings(self, points: Sequence[Point], n: int, key: tuple[object, ...]) -> list[Cohort]:
        return [
            Cohort(p, [self._resume(p, (*key, p.task.id, p.trunk, j)) for j in range(n)])
            for p in self.peers.mine(points)
        ]

    def _resume(self, point: Point, stream: tuple[object, ...]) -> Episode:
        return Episode.resume(self.domain, point, stream)

    def _play(
        self, cohorts: Sequence[Cohort], params: SamplingParams, span: str
    ) -> Iterator[Cohort]:
        """Cohorts as they end."""
        parts = self.renderer, self.sampler, self.config, self.clock, self.on_turn, self.inbox
        return Play(*parts).run(cohorts, params, span)


@dataclass(slots=True)
class Unfolding:
    """Cohorts being played: take all `groups`, then the `trunks`.

    `saved_s`, known when both are taken: seconds that the caller did something else while groups
    were sampled ("stream") and while trunks grew, beside the groups or behind them ("prefetch").
    """

    rollout: Rollout
    cohorts: Sequence[Cohort]
    source: Beside[Cohort] | Inline[Cohort]
    span: str  # what waiting for siblings is booked as
    saved_s: dict[str, float] = field(default_factory=lambda: {"stream": 0.0, "prefetch": 0.0})

    def groups(self, at_once: bool = False) -> Iterator[list[SiblingGroup]]:
        """Chunks of groups in the order in which they become whole, or one chunk in the order of
        their points. Groups that lost their siblings are left out."""
        peers = self.rollout.peers
        if not at_once:
            yield from peers.relay(map(self._held, self._ended()))
            return
        for _ in self._ended():
            pass
        own = [self._group(cohort) for cohort in self.cohorts if not cohort.trunk]
        groups = [group for group in peers.join(own) if group is not None]
        if groups:
            yield groups

    def trunks(self) -> list[Trunk]:
        """All trunks in the order of their roots; waits for those that are not grown."""
        source, waited_s = self.source, self.source.waited_s
        with self.rollout.clock.span("trunk_decode"):
            while source.take():
                pass
        grown = [cohort.as_trunk() for cohort in self.cohorts if cohort.trunk]
        if grown:
            self.saved_s["prefetch"] = source.made_s - (source.waited_s - waited_s)
        return self.rollout.peers.join(grown)

    def _ended(self) -> Iterator[list[Cohort]]:
        """Cohorts of siblings as they end."""
        left = sum(not cohort.trunk for cohort in self.cohorts)
        while left:
            with self.rollout.clock.span(self.span):
                ended = [cohort for cohort in self.source.take() if not cohort.trunk]
            left -= len(ended)
            self.saved_s["stream"] = self.source.made_s - self.source.waited_s
            yield ended

    def _held(self, cohorts: Sequence[Cohort]) -> list[SiblingGroup]:
        groups = map(self._group, cohorts)
        return [group for group in groups if group is not None]

    def _group(self, cohort: Cohort) -> SiblingGroup | None:
        group = cohort.as_group()
        if group is None:
            self.rollout.clock.count("group_lost")
        return group


@dataclass(frozen=True, slots=True)
class Gathered:
    """An `Unfolding` of groups that are there already."""

    whole: Sequence[SiblingGroup]
    saved_s: Mapping[str, float] = field(default_factory=dict)

    def groups(self, at_once: bool = True) -> Iterator[Sequence[SiblingGroup]]:
        yield self.whole

    def trunks(self) -> list[Trunk]:
        """None were asked for."""
        return []


def stages(trunks: Sequence[Trunk]) -> Iterator[tuple[int, list[Point]]]:
    """(k, the boundaries of turn k) for k = K-1 ... 0; shorter trunks join when k reaches them.

    Example: trunks of 3 and 2 turns give (2, [p2]), (1, [p1, q1]), (0, [p0, q0]).
    """
    deepest = max((len(trunk.snapshots) for trunk in trunks), default=0)
    for k in reversed(range(deepest)):
        yield k, [trunk.snapshots[k] for trunk in trunks if k < len(trunk.snapshots)]


def room(stages: Sequence[tuple[int, Sequence[Point]]]) -> list[int]:
    """How much servers can do beside each stage, in numbers that only compare: boundaries times
    turns read, as the trainer's work on them grows. (Early stages play the last turns only and
    leave servers the most time.) Stages below the mean have none: a trunk takes a whole episode,
    however many grow at once, and would outlast them.

    Example: 6, 28, 32 and 32 boundaries of turns 3, 2, 1 and 0 give 0, 84, 64 and 0.
    """
    work = [(turn + 1) * len(points) for turn, points in stages]
    return [size if size * len(work) >= sum(work) else 0 for size in work]


def divided(items: Sequence[Point], shares: Sequence[int]) -> list[Sequence[Point]]:
    """Consecutive parts in proportion to `shares`.

    Example: 10 items in shares 3, 2, 1 are parts of 5, 3 and 2.
    """
    ends = np.round(np.cumsum(shares) / max(1, sum(shares)) * len(items)).astype(int)
    return [items[start:end] for start, end in pairwise([0, *ends.tolist()])]
