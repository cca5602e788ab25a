"""Scripted demonstrations as trajectories; the warm start trains on what the renderer shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastturn.envs.base import Domain, Message, Task
from fastturn.episode import stream_seed
from fastturn.render import Renderer
from fastturn.types import Boundary, Completion, Ending, Stop, Trajectory, Turn


def demonstrate(
    domain: Domain, renderer: Renderer, tasks: Sequence[Task], turns: int, key: tuple[object, ...]
) -> list[Trajectory]:
    """The scripted policy of the domain, played through environment and renderer, a task each.

    Log-probabilities are 0 and the version is -1: nothing sampled these actions.
    """
    return [
        _play(domain, renderer, task, turns, np.random.default_rng(stream_seed(*key, task.id)))
        for task in tasks
    ]


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
