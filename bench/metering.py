"""What measuring costs: iterations of the quickstart with the meter and without it.

    .venv/bin/python scripts/bench metering --no-record

The same short iteration again and again (a learning rate that moves nothing, the cursor set back),
with and without in pairs whose order alternates, in CPU seconds: the median over all pairs, of
which a row holds bootstrap draws, resolves what one pair cannot. Beside it stands what is counted:
spans of an iteration x nanoseconds of a span, over the iteration. `trace` has the timeline on too.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastturn import trainer
from fastturn.meter import Follower, Meter
from fastturn.run import Run
from fastturn.timeline import Timeline

from . import command
from .quickstarts import opened, warm_weights
from .record import Measured

WARM_STEPS, SPANS, DRAWS = 300, 20_000, 1000
# Weights stay as they are.
STILL = (
    "tasks=4",
    "optim.lr=1e-15",
    "iterations=100000",
    "warm.steps=0",
)  # weights stay as they are


@dataclass(frozen=True, slots=True)
class MeteringCase:
    algorithm: str

    @property
    def name(self) -> str:
        return f"metering/{self.algorithm}"


class Silent(Follower):
    """No span, no count, no record."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, n: int = 1) -> None:
        """Nothing counts."""

    def drain(self) -> dict[str, Any]:
        return {}

    def sample(self, values: Mapping[str, Any]) -> None:
        """Nothing is kept."""


class Counting(Silent):
    """How many spans there are."""

    spans = 0

    def span(self, name: str) -> AbstractContextManager[Any]:
        self.spans += 1
        return nullcontext()


def metered(run: Run, meter: Any) -> None:
    """Let `meter` take all that is measured."""
    run.meter = run.learner.clock = meter
    run.rollout = replace(run.rollout, clock=meter)


def again(run: Run, meter: Any) -> Callable[[], list[Any]]:
    """The first iteration of the run, as often as it is called."""

    def iteration() -> list[Any]:
        metered(run, meter)
        run.cursor.iteration, run.cursor.tally, run.trunks = 0, Counter(), []
        trainer.one_iteration(run)
        return []

    return iteration


def span_s(meter: Any) -> float:
    """CPU seconds of one span."""
    start = time.process_time()
    for _ in range(SPANS):
        with meter.span("pack"):
            pass
    return (time.process_time() - start) / SPANS


def measure(case: MeteringCase, repeats: int, folder: Path) -> Iterator[Measured]:
    config = asdict(case)
    with (
        opened((f"algorithm={case.algorithm}", *STILL)) as run,
        Meter(folder / "on") as on,
        Meter(folder / "trace", watchers=[Timeline(0, folder / "trace.json")]) as trace,
    ):
        run.policy.load_state_dict(warm_weights(WARM_STEPS))
        trainer.warm_start(run)
        counting = Counting()
        again(run, counting)()
        kinds = {"off": Silent(), "on": on, "trace": trace}
        run_of = {name: again(run, meter) for name, meter in kinds.items()}
        pairs = {name: paired(run_of["off"], run_of[name], repeats) for name in ("on", "trace")}
        costs = {name: span_s(meter) for name, meter in (("on", on), ("trace", trace))}
    off_s = tuple(off for off, _ in pairs["on"])
    yield Measured(case.name, "off", "cpu time", "s", off_s, config)
    yield Measured(case.name, "on", "spans", "1", (float(counting.spans),), config)
    for name, one_s in costs.items():
        share = tuple(counting.spans * one_s / x for x in off_s)
        yield Measured(case.name, name, "time of a span", "us", (1e6 * one_s,), config)
        yield Measured(case.name, name, "spans x their time / iteration", "1", share, config)
        metric = f"cpu time / off, median of {repeats} pairs"
        yield Measured(case.name, name, metric, "1", medians(pairs[name]), config)


def paired(
    one: Callable[[], Any], other: Callable[[], Any], repeats: int
) -> list[tuple[float, float]]:
    """CPU seconds of both, run one after the other, every second time in the other order."""
    found = []
    for place in range(-2, repeats):  # the first two warm up
        order = (one, other) if place % 2 else (other, one)
        spent = {run: _cpu_s(run) for run in order}
        if place >= 0:
            found.append((spent[one], spent[other]))
    return found


def _cpu_s(run: Callable[[], Any]) -> float:
    start_s = time.process_time()
    run()
    return time.process_time() - start_s


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Bootstrap draws of the median ratio, second over first.

    Example: of equal pairs each is 1.
    """
    ratio_N = np.array([second / first for first, second in pairs])
    chosen_DN = np.random.default_rng(0).integers(len(ratio_N), size=(DRAWS, len(ratio_N)))
    return tuple(np.median(ratio_N[chosen_DN], axis=1).tolist())


def main(argv: Sequence[str] | None = None) -> int:
    args = command.options(command.parser("metering", __doc__, repeats=100), argv)
    args.device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        found = (
            one
            for name in ("grpo", "rtpo")
            for one in measure(MeteringCase(name), args.repeats, Path(folder) / name)
        )
        return command.report("metering", found, args)
