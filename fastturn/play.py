"""How episodes advance: sampler answers and environment answers, handled as they come.

    request ──> sampler ── completion ──> parse ──> environment, on threads
       ^                                                     │
       └──── next context <── render <── observation ────────┘     ended: to the cohort

A sampler that answers request by request keeps every episode at its own pace: a slow tool holds up
nothing but its own episode. One that answers whole batches is asked when nothing else is on its
way, so all episodes take their turns together and a batch never depends on timing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from fastturn.config import Config
from fastturn.envs.base import Observation
from fastturn.episode import Cohort, Episode, stream_seed
from fastturn.pool import DeadlineError, Inbox
from fastturn.render import Renderer
from fastturn.sampler.base import Batches, Request, Sampler, SamplingParams, Stream, Streaming
from fastturn.types import Completion, Ending, Stop, Turn

logger = logging.getLogger(__name__)
Key = tuple[int, int]  # a cohort and one of its episodes; -1: all of them


class Clock(Protocol):
    """What rollouts need of the meter: time spans and event counts."""

    def span(self, name: str) -> AbstractContextManager[Any]: ...

    def aside(self, name: str) -> AbstractContextManager[Any]: ...

    def count(self, name: str, n: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Unmetered:
    """A clock for work that is one span of its own and whose events are not those of training."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    aside = span

    def count(self, name: str, n: int = 1) -> None:
        """Not counted."""


@dataclass(frozen=True, slots=True)
class Play:
    """What playing takes, apart from the episodes. `on_turn(episodes ended, tokens sampled)`."""

    renderer: Renderer
    sampler: Sampler
    config: Config
    clock: Clock
    on_turn: Callable[[int, int], None]
    inbox: Callable[[float], Inbox] = Inbox

    def run(self, cohorts: Sequence[Cohort], params: SamplingParams, span: str) -> Iterator[Cohort]:
        """Play all episodes to their ends; yields a cohort when its last one has ended. Time that
        is not the environments' goes to `span`."""
        inbox = self.inbox(self.config.data.env_timeout_s)
        stream = open_stream(self.sampler, params, inbox.put)
        table = _Table(self, cohorts, stream, inbox)
        try:
            for index in range(len(cohorts)):
                table.ask((index, -1))
            while table.asked or table.acting:
                if not table.acting:
                    with self.clock.span(span):
                        stream.settle()
                with self.clock.span(span if table.asked else "environment"):
                    came = inbox.get()
                with self.clock.span("environment"):
                    ended = [cohort for pair in came for cohort in table.take(*pair)]
                yield from ended
        finally:
            stream.close()


def open_stream(
    sampler: Sampler, params: SamplingParams, answer: Callable[[Any, Any], None]
) -> Stream:
    """The sampler's own stream, or one that collects batches for it."""
    if isinstance(sampler, Streaming):
        return sampler.stream(params, answer)
    return Batches(sampler, params, answer)


class _Table:
    """The episodes in play: what is asked of the sampler and what of environments."""

    def __init__(self, play: Play, cohorts: Sequence[Cohort], stream: Stream, inbox: Inbox) -> None:
        self.play, self.cohorts, self.stream, self.inbox = play, cohorts, stream, inbox
        self.asked: set[Key] = set()  # requests at the sampler
        self.acting: dict[Key, Completion] = {}  # actions at environments

    def episodes(self, key: Key) -> Sequence[Episode]:
        cohort, sibling = key
        episodes = self.cohorts[cohort].episodes
        return episodes if sibling < 0 else [episodes[sibling]]

    def ask(self, key: Key) -> None:
        """Ask for the next turn of an episode, or for the first one of a cohort."""
        episodes = self.episodes(key)
        if self.cohorts[key[0]].trunk:
            for episode in episodes:
                episode.points.append(episode.point())
        self.asked.add(key)
        self.stream.submit(key, self._request(episodes))

    def take(self, key: Key | None, answer: Any) -> Iterator[Cohort]:
        """Handle what came; yields its cohort when this has ended the last episode of it."""
        if key is None:  # the sampler cannot go on
            raise answer
        tokens = 0
        if key in self.acting:
            self._observe(key, self.acting.pop(key), answer)
        else:
            self.asked.remove(key)
            self._act(key, answer)
            tokens = sum(len(done.action_A) for done in answer)
        ended = sum(episode.ending is not None for episode in self.episodes(key))
        self.play.on_turn(ended, tokens)
        if ended and self.cohorts[key[0]].ended:
            yield self.cohorts[key[0]]

    def _request(self, cohort: Sequence[Episode]) -> Request:
        config = self.play.config
        first = cohort[0]
        limits, room = config.sampling, config.model.max_context - len(first.context_T)
        budget = min(limits.turn_tokens, limits.episode_tokens - first.tokens_sampled, room)
        seeds = tuple(stream_seed(config.seed, *e.stream, e.turn) for e in cohort)
        return Request(first.context_T, budget, seeds)

    def _act(self, key: Key, completions: Sequence[Completion]) -> None:
        """Let the environments answer; actions cut by their budget end the episode unanswered."""
        first, keep = max(0, key[1]), self.cohorts[key[0]].trunk
        for place, episode in enumerate(self.episodes(key), first):
            completion = completions[place - first]
            episode.tokens_sampled += len(completion.action_A)
            if completion.stop is Stop.LENGTH:
                unanswered = Observation(events=("truncated",))
                self._end_turn(episode, completion, unanswered, Ending.TRUNCATED)
                continue
            action = self.play.renderer.parse(completion.action_A)
            named = self.play.config.seed, "environment", *episode.stream, episode.turn
            action = replace(action, seed=stream_seed(*named))
            self.acting[key[0], place] = completion
            self.inbox.call((key[0], place), partial(episode.act, action, keep))

    def _observe(self, key: Key, completion: Completion, answer: Observation | Exception) -> None:
        (episode,) = self.episodes(key)
        if isinstance(answer, Exception):
            self._fail(episode, completion, answer)
        else:
            self._answer(episode, completion, answer)
        if episode.ending is None:
            self.ask(key)

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
        self._end_turn(episode, completion, Observation(events=(event,)), Ending.FAILED)

    def _answer(self, episode: Episode, completion: Completion, answer: Observation) -> None:
        """Book the turn, then either end the episode or move on to the next boundary."""
        config, renderer = self.play.config, self.play.renderer
        ending: Ending | None = None
        if answer.done:
            ending = Ending.FINISHED
        elif episode.turn + 1 >= config.turns:
            ending = Ending.TURNS
        else:
            following = renderer.advance(episode.conversation, completion.action_A, answer.messages)
            if not renderer.fits(following):
                ending = Ending.CONTEXT
            elif episode.tokens_sampled >= config.sampling.episode_tokens:
                ending = Ending.TRUNCATED
        self._end_turn(episode, completion, answer, ending)
        if ending is None:
            episode.conversation, episode.boundary = following, following.boundary

    def _end_turn(
        self,
        episode: Episode,
        completion: Completion,
        answer: Observation,
        ending: Ending | None,
    ) -> None:
        clock = self.play.clock
        path = self.play.renderer.located(completion.action_A, answer.path)
        episode.turns.append(Turn(episode.boundary, completion, answer.reward, answer.events, path))
        episode.ending = ending
        for event in (*answer.events, *(f"{hit.channel}_{hit.rule}" for hit in path)):
            clock.count(event)
        if ending is not None:
            clock.count(f"ending_{ending}")
