"""What `fastturn plan` predicts of the quickstart from smaller runs, beside what it takes.

    .venv/bin/python scripts/bench calibration --no-record

RTPO and GRPO, each at all sizes of `SIZES` from one warm policy a seed, iteration by iteration in
turn, so that a slow spell of the machine hits all alike. Seconds are CPU seconds of a thread.
Speeds and lengths come from the runs named in a row, the prediction is for the quickstart, which
they have not seen; "predicted / measured" is 1 when it is right. Rows hold the mean iteration of
every run, so that the fit can be made again from them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastturn import recipes, trainer
from fastturn.calibrate import Observed, fitted, layout_of, lengths_for, observed, predicted
from fastturn.config import as_dict as config_dict
from fastturn.config import override
from fastturn.devices import device_called
from fastturn.meter import Meter
from fastturn.run import Run
from fastturn.runfiles import load
from fastturn.simulate import Lengths

from . import command
from .metering import metered
from .quickstarts import opened, warm_weights
from .record import Measured, Row

TARGET = "quickstart"
SIZES: Mapping[str, tuple[str, ...]] = {
    TARGET: (),
    "8 tasks": ("tasks=8",),
    "16 tasks, G=4": ("tasks=16", "group_size=4"),
    "16 tasks, width 96": ("tasks=16", "model.width=96"),
}
# What is predicted from: runs of the same model of other sizes, and of another model.
FROM: Mapping[str, tuple[str, ...]] = {
    "from 8 tasks and 16 tasks, G=4": ("8 tasks", "16 tasks, G=4"),
    "from 8 tasks": ("8 tasks",),
    "from 16 tasks, width 96": ("16 tasks, width 96",),
}
ALGORITHMS = ("rtpo", "grpo")
WARM_STEPS = 300


def config_pairs(algorithm: str, size: str, seed: int) -> tuple[str, ...]:
    return (f"algorithm={algorithm}", f"seed={seed}", *SIZES[size])


class Stopwatch:
    """CPU nanoseconds of this process, those between `on` and `off` only."""

    def __init__(self) -> None:
        self._ns, self._since_ns = 0, time.process_time_ns()
        self._running = False

    def __call__(self) -> int:
        now_ns = time.process_time_ns()
        if self._running:
            self._ns += now_ns - self._since_ns
        self._since_ns = now_ns
        return self._ns

    def on(self) -> None:
        self()
        self._running = True

    def off(self) -> None:
        self()
        self._running = False


def runs(algorithm: str, seed: int, iterations: int, folder: Path) -> dict[str, Observed]:
    """All sizes at once, an iteration each in turn."""
    with ExitStack() as stack:
        opened_runs = {
            size: stack.enter_context(warmed(config_pairs(algorithm, size, seed))) for size in SIZES
        }
        clocks = {size: Stopwatch() for size in SIZES}
        for size, run in opened_runs.items():
            metered(run, stack.enter_context(Meter(folder / size, clock=clocks[size])))
        for _ in range(iterations):
            for size, run in opened_runs.items():
                clocks[size].on()
                trainer.one_iteration(run)
                clocks[size].off()
        return {size: _observed(run, folder / size) for size, run in opened_runs.items()}


@contextmanager
def warmed(pairs: Sequence[str]) -> Iterator[Run]:
    """A run with the warm policy of its seed and model."""
    model = tuple(pair for pair in pairs if pair.startswith(("seed", "model")))
    with opened((*pairs, "warm.steps=0", "iterations=100000")) as run:
        run.policy.load_state_dict(warm_weights(WARM_STEPS, model))
        trainer.warm_start(run)
        yield run


def _observed(run: Run, folder: Path) -> Observed:
    files = replace(load(folder), name=folder.name, config=config_dict(run.config))
    return observed(files, partial(_count, run.tokenizer))


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def measured(algorithm: str, found: Sequence[Mapping[str, Observed]]) -> Iterator[Measured]:
    """Rows over seeds: spans and lengths of every size, and how good the predictions were."""

    def row(provider: str, metric: str, unit: str, values: Sequence[float]) -> Measured:
        config = {"pairs": config_pairs(algorithm, TARGET, 0), "warm_steps": WARM_STEPS}
        return Measured(f"calibration/{algorithm}", provider, metric, unit, tuple(values), config)

    for size in SIZES:
        sides = [one[size] for one in found]
        yield row(size, "s / iteration", "s", [run.wall_s for run in sides])
        for span in sides[0].spans:
            yield row(size, f"s / iteration, {span}", "s", [run.spans[span] for run in sides])
        for name in asdict(sides[0].lengths):
            values = [getattr(run.lengths, name) for run in sides]
            yield row(size, f"episodes, {name}", "1", values)
    for name, sizes in FROM.items():
        told = [prediction(one[TARGET], [one[size] for size in sizes]) for one in found]
        pairs = [(p, one[TARGET]) for p, one in zip(told, found, strict=True)]
        share = [sum(p.values()) / run.wall_s for p, run in pairs]
        yield row(TARGET, f"predicted / measured, {name}", "1", share)
        for span in found[0][TARGET].spans:
            share = [p.get(span, 0.0) / run.spans[span] for p, run in pairs]
            yield row(TARGET, f"predicted / measured, {name}, {span}", "1", share)


def prediction(target: Observed, known: Sequence[Observed]) -> dict[str, float]:
    """Seconds by span of the target's iteration; all that is taken from it is its recipe."""
    core = device_called("core")
    return predicted(target, lengths_for(target.config, known), core, fitted(known, core))


def from_rows(rows: Mapping[tuple[str, str, str], Row], algorithm: str, size: str) -> Observed:
    """What was recorded of a size: medians over seeds."""
    mine = {
        metric: row.p50
        for (case, provider, metric), row in rows.items()
        if case == f"calibration/{algorithm}" and provider == size
    }
    spans, lengths = (
        {metric.removeprefix(start): x for metric, x in mine.items() if metric.startswith(start)}
        for start in ("s / iteration, ", "episodes, ")
    )
    config = override(recipes.quickstart(), config_pairs(algorithm, size, 0))
    return Observed(size, config, Lengths(**lengths), layout_of(config, 1, 0), spans)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("calibration", __doc__, repeats=1)
    parser.add_argument("--iterations", type=int, default=8)
    args = command.options(parser, argv)
    args.device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        found = (
            row
            for name in ALGORITHMS
            for row in measured(
                name,
                [
                    runs(name, seed, args.iterations, Path(folder) / f"{name}{seed}")
                    for seed in range(args.repeats)
                ],
            )
        )
        return command.report("calibration", found, args)
