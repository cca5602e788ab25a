"""Speeds of a device as runs measured them, which replace those of its data sheet in `simulate.py`.

    runs -> Observed (recipe, lengths of episodes, seconds by span) ─┐
    data sheet -> Speed of a shape ──────────────────────────────────┴─> fitted -> factors of Speed

The fit is the smallest change of the data sheet's speeds, in proportion to themselves, that makes
the simulated spans those of the runs (Gauss-Newton on logarithms of both, so that a span a hundred
times off counts like any other). What no run shows keeps its value. Factors hold for other sizes of
the same device, as far as its shares of the data sheet do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fastturn.config import Config, from_dict
from fastturn.devices import Device
from fastturn.forecast import shape_known, silent_share, success_of, work_of
from fastturn.lengths import run_lengths
from fastturn.runfiles import RunFiles
from fastturn.simulate import SAVINGS, Layout, Lengths, Speed, iteration

# The span of a simulated iteration that each span of the meter belongs to.
BOOKED = {
    "trunk_decode": "trunk_decode",
    "sibling_decode": "sibling_decode",
    "prefill": "sibling_decode",
    "forward_backward": "forward_backward",
    "score": "forward_backward",
    "optimizer": "optimizer",
    "publish": "publish",
    **dict.fromkeys(("environment", "exchange", "pack", "other"), "host"),
}
ROUNDS, STEP = 6, 1e-3  # of Gauss-Newton; the relative change that a derivative is taken over
FAINT = 5e-4
WEAK = 0.02  # directions in which spans hardly change keep the data sheet's value
MOST = np.log(5.0)  # that the logarithm of a speed changes in one round
NEVER = 1e-9  # stands for the ratio of a span that is not simulated


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run says: seconds of a mean iteration by simulated span. `layout`: who did what."""

    name: str
    config: Config
    lengths: Lengths
    layout: Layout
    spans: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.spans.values())

    @property
    def siblings(self) -> int:
        return work_of(self.config).siblings


def observed(run: RunFiles, count: Callable[[str], int] | None = None) -> Observed:
    """Of a run with whole iterations, else `ConfigError`. `count`: tokens of a text."""
    lengths = run_lengths(run, count)
    whole = len(run.of("iteration"))
    seconds: Counter[str] = Counter()
    for record in run.of("iteration") + run.of("stage"):
        if record.get("iteration", whole) < whole:
            seconds.update(record.get("spans") or {})
    pools = run.summary.get("pools") or {}
    trainers, servers = (
        pools.get(name, {}).get("devices", least)
        for name, least in (("trainer", 1), ("servers", 0))
    )
    config = from_dict(run.config)
    layout = layout_of(config, trainers, servers)
    return Observed(run.name, config, lengths, layout, simulated_spans(seconds, whole))


def simulated_spans(seconds: Mapping[str, float], iterations: int) -> dict[str, float]:
    """A mean iteration's; time that is no iteration's (evaluation, saving) is left out, and spans
    of less than `FAINT` of it, which no simulated span can be held to.

    Example: `{"pack": 2.0, "other": 1.0, "evaluation": 9.0}` of 2 iterations is `{"host": 1.5}`.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        if name in BOOKED:
            found[BOOKED[name]] += value / iterations
    return {name: value for name, value in found.items() if value > FAINT * sum(found.values())}


def layout_of(config: Config, trainers: int, servers: int) -> Layout:
    """How that run worked: its overlaps, and all episodes together without servers."""
    overlap = config.rollout.overlap if servers else ()
    savings = frozenset(name for name in SAVINGS if name in ("silent", "share", *overlap))
    return Layout(trainers, servers, savings, together=not servers)


def fitted(runs: Sequence[Observed], device: Device) -> Speed:
    """The factors of the data sheet's speeds at which simulated iterations take what the runs took.

    Example: 2.0 in `step_s` when every decode step takes twice what the data sheet says.
    """
    names = [field.name for field in fields(Speed)]
    factors = Speed(**dict.fromkeys(names, 1.0))
    for _ in range(ROUNDS):
        base = log_ratios(runs, device, factors)
        columns = []
        for name in names:
            other = replace(factors, **{name: getattr(factors, name) * (1 + STEP)})
            columns.append((log_ratios(runs, device, other) - base) / np.log1p(STEP))
        change = np.linalg.lstsq(np.stack(columns, 1), -base, rcond=WEAK)[0]
        scale = dict(zip(names, np.exp(np.clip(change, -MOST, MOST)).tolist(), strict=True))
        factors = factors.times(Speed(**scale))
    return factors


def log_ratios(runs: Sequence[Observed], device: Device, factors: Speed) -> NDArray[np.float64]:
    """Logarithms of simulated over measured seconds, of every span of every run."""
    found = []
    for run in runs:
        simulated = predicted(run, run.lengths, device, factors)
        found += [simulated.get(name, 0.0) / seconds for name, seconds in run.spans.items()]
    return np.log(np.maximum(found, NEVER))


def predicted(run: Observed, lengths: Lengths, device: Device, factors: Speed) -> dict[str, float]:
    """Simulated seconds of that run's iteration by span."""
    speed = Speed.of(device, shape_known(run.config)).times(factors)
    return iteration(work_of(run.config), lengths, speed, run.layout).spans


def show_fit(runs: Sequence[Observed], device: Device, factors: Speed, console: Console) -> None:
    """Print what was measured in the runs beside what is simulated at the fitted speeds."""
    for run in runs:
        title = f"calibrated on {run.name}"
        found = predicted(run, run.lengths, device, factors)
        console.print(beside(title, "simulated", found, run))


def show_prediction(
    run: Observed, runs: Sequence[Observed], device: Device, factors: Speed, console: Console
) -> None:
    """Print what was predicted of a run from others, which tell lengths and speeds, beside it."""
    found = predicted(run, lengths_for(run.config, runs), device, factors)
    console.print(beside(f"{run.name}, predicted from these", "predicted", found, run))


def beside(title: str, head: str, found: Mapping[str, float], run: Observed) -> Table:
    table = Table("span", f"{head}, s", "measured, s", "ratio", title=title, title_justify="left")
    both = {name: (found.get(name, 0.0), seconds) for name, seconds in run.spans.items()}
    both["an iteration"] = sum(found.values()), run.wall_s
    for name, (ours, theirs) in both.items():
        table.add_row(name, f"{ours:,.4g}", f"{theirs:,.4g}", f"{ours / theirs:.2f}")
    return table


def lengths_for(config: Config, runs: Sequence[Observed]) -> Lengths:
    """Of episodes of another recipe with the same tasks and policy: means over the runs, and the
    share of silent groups that follows from their rates of success at its group size."""
    means = {
        field.name: float(np.mean([getattr(run.lengths, field.name) for run in runs]))
        for field in fields(Lengths)
    }
    siblings = work_of(config).siblings
    for name in ("silent", "silent_whole"):
        shares = [
            silent_share(success_of(getattr(run.lengths, name), run.siblings), siblings)
            for run in runs
        ]
        means[name] = float(np.mean(shares))
    return Lengths(**means)
