"""Tasks that are drawn when they are asked for, a million of them, and those that are held out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from fastturn.config import ConfigError, Data
from fastturn.envs.base import Task

TRAIN_TASKS = 1_000_000
PATIENCE = 10_000  # draws in a row that bring nothing new, after which there is nothing more
_EVAL_SEED = "held-out"  # the same held-out tasks for every run, whatever its seed

Draw = Callable[[random.Random], Mapping[str, Any]]


class TrainTasks(Sequence[Task]):
    """`TRAIN_TASKS` tasks made on demand; number i of a seed is always the same, and none asks what
    a held-out task asks (its "question").

    Example: `TrainTasks(draw, 0, held_out)[17].id` is "train-0-17".
    """

    def __init__(self, draw: Draw, seed: int, held_out: Sequence[Task]) -> None:
        self._draw, self._seed = draw, seed
        self._held_out = frozenset(task.data["question"] for task in held_out)

    def __len__(self) -> int:
        return TRAIN_TASKS

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        rng = random.Random(f"train {self._seed} {number}")
        while True:
            data = self._draw(rng)
            if data["question"] not in self._held_out:
                return Task(f"train-{self._seed}-{number}", data)


def held_out_tasks(draw: Draw, data: Data) -> list[Task]:
    """`data.eval_tasks` tasks that ask different questions, the same in every run.

    Raises `ConfigError` when there are no more, or none would be left to train on.
    """
    rng = random.Random(_EVAL_SEED)
    tasks: dict[str, Task] = {}
    while len(tasks) <= data.eval_tasks:  # the last one is left to train on
        draws = (draw(rng) for _ in range(PATIENCE))
        new = next((drawn for drawn in draws if drawn["question"] not in tasks), None)
        if new is None:
            raise ConfigError(
                f"data.eval_tasks={data.eval_tasks}: data.domain={data.domain!r} has only "
                f"{len(tasks)} different tasks, and some are needed to train on; set "
                f"data.eval_tasks={len(tasks) // 2}, or options that make more tasks"
            )
        tasks[new["question"]] = Task(f"eval-{len(tasks)}", new)
    return list(tasks.values())[: data.eval_tasks]
