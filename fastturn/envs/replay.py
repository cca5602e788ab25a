"""Snapshots for environments that have none: what happened, carried out again.

Replayed(make): start, step ─> history of (action, digest of the observation)
                restore     ─> a new instance takes the same actions; every digest must agree
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fastturn.envs.base import Action, Message, Observation, Task


class ReplayError(RuntimeError):
    """The same actions led to other observations: names the task, the turn and both of them."""


class Playable(Protocol):
    """An episode that can be played but not copied."""

    def start(self, task: Task) -> list[Message]:
        """As in `Env`."""
        ...

    def step(self, action: Action) -> Observation:
        """As in `Env`."""
        ...


@dataclass(frozen=True, slots=True)
class History:
    """An episode so far. `digests`: of its first messages, and of the answer to each action."""

    task: Task
    digests: tuple[str, ...]
    actions: tuple[Action, ...] = ()


class Replayed:
    """An `Env` made of a `Playable`: its snapshot is the history, which restoring plays again.

    Restoring costs as much as all turns before did. What the environment answers must follow from
    the task and the actions alone, which is checked: a restored episode that takes another course
    raises `ReplayError`, and never goes on from a state that was not sampled from.

    Example: `domain.env = lambda: Replayed(Browser)` for a class with `start` and `step`.
    """

    def __init__(self, make: Callable[[], Playable]) -> None:
        self._episode = make()
        self._history: History | None = None

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        messages = self._episode.start(task)
        self._history = History(task, (digest(messages),))
        return messages

    def step(self, action: Action) -> Observation:
        """Carry out `action`."""
        assert self._history is not None, "start or restore comes before step"
        answer = self._episode.step(action)
        self._history = replace(
            self._history,
            digests=(*self._history.digests, digest(answer)),
            actions=(*self._history.actions, action),
        )
        return answer

    def snapshot(self) -> History | None:
        """The history: small, whatever the environment holds."""
        return self._history

    def restore(self, snapshot: History) -> None:
        """Play `snapshot` again, on this instance."""
        self._agree(snapshot, 0, self.start(snapshot.task))
        for turn, action in enumerate(snapshot.actions, 1):
            self._agree(snapshot, turn, self.step(action))

    def _agree(self, snapshot: History, turn: int, seen: object) -> None:
        assert self._history is not None
        if self._history.digests[turn] == snapshot.digests[turn]:
            return
        after = f"turn {turn}, {snapshot.actions[turn - 1].text!r:.80}" if turn else "the start"
        raise ReplayError(
            f"task {snapshot.task.id}: replayed, {after} was answered differently, by "
            f"{seen!r:.200}; siblings must begin at one state, so the environment must draw any "
            f"randomness from its task, or have a snapshot of its own"
        )


def digest(seen: object) -> str:
    """Of messages or an observation. Equal values have equal digests, in any process."""
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def try_replay(make: Callable[[], Playable], task: Task, actions: tuple[Action, ...]) -> None:
    """Play `task` with as many of `actions` as it takes, and play it again.

    Raises `ReplayError`, and whatever the environment raises."""
    first = Replayed(make)
    first.start(task)
    for action in actions:
        if first.step(action).done:
            break
    history = first.snapshot()
    assert history is not None
    Replayed(make).restore(history)
