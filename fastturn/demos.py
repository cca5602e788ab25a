"""Scripted demonstrations as trajectories; the warm start trains on what the renderer shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Domain, DomainError, Message, Task
from fastturn.episode import stream_seed
from fastturn.pool import DeadlineError, Inbox
from fastturn.render import Renderer
from fastturn.rules import RuleError
from fastturn.template import TemplateError
from fastturn.types import Boundary, Completion, Ending, Stop, Trajectory, Turn

T = TypeVar("T")
NAMED = (ConfigError, DomainError, RuleError, TemplateError)  # they say what is wrong themselves


def demonstrate(
    domain: Domain,
    renderer: Renderer,
    tasks: Sequence[Task],
    config: Config,
    key: tuple[object, ...],
) -> list[Trajectory]:
    """The scripted policy of the domain, played through environment and renderer, a task each.

    Log-probabilities are 0 and the version is -1: nothing sampled these actions. Raises
    `DomainError` when an environment hangs.
    """

    def play(task: Task) -> Trajectory:
        rng = np.random.default_rng(stream_seed(*key, task.id))
        return _play(domain, renderer, task, config.turns, rng)

    return list(in_time(play, tasks, config))


def in_time(play: Callable[[Task], T], tasks: Iterable[Task], config: Config) -> Iterator[T]:
    """`play` of every task, an episode of scripted actions; raises `DomainError` for one that
    fails, and what has a name of its own.

    An episode may take as long as all of its environment steps. One that takes longer has failed:
    nothing may hang before training has begun.
    """
    inbox = Inbox(config.turns * config.data.env_timeout_s, workers=1)
    for task in tasks:
        inbox.call(task.id, partial(play, task))
        ((_, answer),) = inbox.get()
        if isinstance(answer, DeadlineError):
            raise DomainError(
                f"task {task.id}: a scripted episode of at most {config.turns} turns has not ended "
                f"within {inbox.deadline_s:g} s; look for what its environment or a rule waits "
                f"for, or raise data.env_timeout_s={config.data.env_timeout_s:g}"
            ) from answer
        if isinstance(answer, NAMED):
            raise answer
        if isinstance(answer, Exception):
            raise DomainError(
                f"task {task.id}: its scripted episode raised {type(answer).__name__}: {answer}; "
                f"fastturn check-env shows what is wrong with its environment"
            ) from answer
        yield answer


def _play(
    domain: Domain, renderer: Renderer, task: Task, most: int, rng: np.random.Generator
) -> Trajectory:
    env, script = domain.env(), domain.demonstrator(task, rng)
    messages: list[Message] = env.start(task)
    conversation = renderer.start(messages)
    boundary = Boundary(0, conversation.context_T)
    turns: list[Turn] = []
    ending = Ending.TURNS
    while len(turns) < most:
        text = script(messages)
        action_A = renderer.encode_action(text)
        answer = env.step(renderer.parse(action_A))
        done = Completion(action_A, np.zeros(len(action_A), np.float32), -1, Stop.STOP)
        turns.append(Turn(boundary, done, answer.reward, answer.events, answer.path))
        if answer.done:
            ending = Ending.FINISHED
            break
        messages = [*messages, {"role": "assistant", "content": text}, *answer.messages]
        conversation = renderer.advance(conversation, action_A, answer.messages)
        boundary = conversation.boundary
    return Trajectory(task.id, 0, tuple(turns), ending)
