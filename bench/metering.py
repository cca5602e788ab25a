"""What measuring costs: iterations of the quickstart with the meter and without it.

    .venv/bin/python scripts/bench metering grpo --meters on --no-record

The same iteration again and again (a learning rate that moves nothing, the cursor set back),
in CPU seconds. Other users of a machine change what a second is worth many times a second, so the
meter is on and off in turns that are shorter than that: it changes at every forward of a module and
at every event. A pair is two iterations in which all turns are the other way round, so each piece
of the work is in it once with the meter and once without. Beside it stands what is counted: spans
of an iteration x nanoseconds of a span, over the iteration. `trace` has the timeline on too.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastturn import trainer
from fastturn.meter import Follower, Meter
from fastturn.run import Run
from fastturn.timeline import Timeline, Watcher

from . import command
from .algorithms import interval
from .quickstarts import opened, warm_weights
from .record import Measured

WARM_STEPS, SPANS = 300, 20_000
ALGORITHMS, METERS = ("grpo", "rtpo"), ("on", "trace")
STILL = ("optim.lr=1e-15", "iterations=100000", "warm.steps=0")  # weights stay


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


class Turns:
    """Two meters of which one measures and then the other. `change` is called when they change;
    `spent_s` are the CPU seconds of each."""

    def __init__(self, *meters: Any) -> None:
        self.meters, self.turn, self.changes = meters, 0, 0
        self.spent_s = [0.0, 0.0]
        self._since_s = time.process_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.meters[self.turn], name)

    def change(self, *ignored: Any) -> None:
        now_s = time.process_time()
        self.spent_s[self.turn] += now_s - self._since_s
        self.turn, self.changes, self._since_s = 1 - self.turn, self.changes + 1, now_s

    def count(self, name: str, n: int = 1) -> None:
        self.change()
        self.meters[self.turn].count(name, n)

    def of(self, run: Callable[[], Any]) -> tuple[float, ...]:
        """CPU seconds with each meter: `run` twice, the second time with all turns exchanged."""
        self.spent_s, changes = [0.0, 0.0], []
        for first in range(2):
            self.turn, self.changes, self._since_s = first, 0, time.process_time()
            run()
            changes.append(self.changes)
            self.change()
        assert changes[0] == changes[1], f"not the same work twice: {changes} turns"
        return tuple(self.spent_s)


def metered(run: Run, meter: Any) -> None:
    """Let `meter` take all that is measured."""
    run.meter = run.learner.clock = meter
    run.rollout = replace(run.rollout, clock=meter)


def again(run: Run, meter: Any) -> Callable[[], None]:
    """The first iteration of the run, as often as it is called."""
    metered(run, meter)

    def iteration() -> None:
        run.cursor.iteration, run.cursor.tally, run.trunks = 0, Counter(), []
        trainer.one_iteration(run)

    return iteration


def paired(run: Run, meter: Meter, repeats: int) -> list[tuple[float, ...]]:
    """CPU seconds of an iteration without and with the meter, `repeats` times."""
    turns = Turns(Silent(), meter)
    iteration = again(run, turns)
    hooks = [m.register_forward_pre_hook(turns.change) for m in run.policy.model.modules()]
    try:
        turns.of(iteration)  # warms up
        return [turns.of(iteration) for _ in range(repeats)]
    finally:
        for hook in hooks:
            hook.remove()


def spans_of(run: Run) -> int:
    counting = Counting()
    again(run, counting)()
    return counting.spans


def span_s(meter: Meter) -> float:
    """CPU seconds of one span."""
    start_s = time.process_time()
    for _ in range(SPANS):
        with meter.span("pack"):
            pass
    return (time.process_time() - start_s) / SPANS


def measure(
    case: MeteringCase, meters: Sequence[str], repeats: int, folder: Path
) -> Iterator[Measured]:
    with opened((f"algorithm={case.algorithm}", *STILL)) as run:
        run.policy.load_state_dict(warm_weights(WARM_STEPS))
        trainer.warm_start(run)
        spans = spans_of(run)
        for name in meters:
            out = folder / name
            out.mkdir(parents=True)
            watchers: list[Watcher] = [Timeline(0, out / "trace.json")] if name == "trace" else []
            with Meter(out, watchers=watchers) as meter:
                yield from rows(case, name, paired(run, meter, repeats), (spans, span_s(meter)))


def rows(
    case: MeteringCase,
    name: str,
    pairs: Sequence[tuple[float, ...]],
    counted: tuple[int, float],
) -> Iterator[Measured]:
    """Of pairs of seconds without and with the meter `name`. `counted`: spans, seconds of one.

    The overhead is a mean of logarithms, so that it is 0 of two meters that are alike.
    """

    def row(provider: str, metric: str, unit: str, *values: float) -> Measured:
        return Measured(case.name, provider, metric, unit, values, asdict(case))

    spans, one_s = counted
    off_s = [off for off, _ in pairs]
    ratios = [on / off for off, on in pairs]
    mean, low, high = (100 * math.expm1(x) for x in interval([math.log(x) for x in ratios]))
    yield row("off", "cpu time", "s", *off_s)
    yield row(name, "cpu time / off", "1", *ratios)
    yield row(name, "overhead", "%", mean)
    yield row(name, "overhead, 95 % from", "%", low)
    yield row(name, "overhead, 95 % to", "%", high)
    yield row(name, "spans", "1", float(spans))
    yield row(name, "time of a span", "us", 1e6 * one_s)
    yield row(name, "spans x their time / iteration", "1", *(spans * one_s / x for x in off_s))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("metering", __doc__, repeats=150)
    known = command.one_of("algorithm", ALGORITHMS)
    parser.add_argument("algorithms", nargs="*", type=known, metavar="|".join(ALGORITHMS))
    parser.add_argument("--meters", nargs="+", choices=METERS, default=METERS)
    args = command.options(parser, argv)
    args.device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        found = (
            one
            for name in args.algorithms or ALGORITHMS
            for one in measure(MeteringCase(name), args.meters, args.repeats, Path(folder) / name)
        )
        return command.report("metering", found, args)
