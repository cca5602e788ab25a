"""Runs of recipes that leave nothing behind, for benchmarks of the loop."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from fastturn import recipes, trainer
from fastturn.config import override
from fastturn.dist import World
from fastturn.learner import Learner
from fastturn.progress import Progress
from fastturn.run import Run, open_run


@contextmanager
def opened(pairs: Sequence[str], recipe: str = "quickstart") -> Iterator[Run]:
    """A run of a recipe that leaves nothing behind and says nothing."""
    fixed = ("data.eval_tasks=1", "save.every=0", "trackers=none")
    config = override(recipes.RECIPES[recipe](), (*fixed, *pairs))
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        Progress(quiet=True, stream=nowhere) as progress,
        open_run(config, config, Path(folder), False, progress, world=World.single("cpu")) as run,
    ):
        yield run


class Varied(Learner):
    """The learner of a run, which a subclass varies: `run.learner = Kind(run)`, when the warm start
    is done."""

    def __init__(self, run: Run) -> None:
        super().__init__(**{f.name: getattr(run.learner, f.name) for f in fields(Learner)})


@functools.cache
def warm_weights(
    steps: int, pairs: tuple[str, ...] = (), recipe: str = "quickstart"
) -> dict[str, Tensor]:
    """Of a policy that solves some tasks, so that groups have something to teach."""
    with opened([f"warm.steps={steps}", *pairs], recipe) as run:
        trainer.warm_start(run)
        return {name: value.clone() for name, value in run.policy.state_dict().items()}
