"""Algorithms at an equal budget: what they reach, what it costs, where the time went.

    .venv/bin/python scripts/bench algorithms --no-record                        # small, both tasks
    .venv/bin/python scripts/bench algorithms rtpo grpo grpo/full_history --task workshop
    .venv/bin/python scripts/bench algorithms {rtpo,grpo}" optim.lr="{5e-4,1e-3} --seeds 10-11

An entrant is named as the table names it: the algorithm, then the settings that it differs by. Runs
are recorded one by one in results/races.jsonl and never repeated, so a long comparison can be made
in pieces (`--limit-s`). The table holds every recorded run of the task, seeds and budget, whichever
entrants were named: means over seeds with 95 % bootstrap intervals, and the difference to the first
entrant within seeds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from io import StringIO
from itertools import chain
from pathlib import Path

import numpy as np

from fastturn.algorithms import ALGORITHMS
from fastturn.config import ConfigError

from .command import one_of, options, parser
from .races import RACES, SHOWN, TASKS, Budget, Race, Result, missing, raced, record, recorded

ENTRANTS = (*ALGORITHMS, *(f"{name}/full_history" for name in ("grpo", "gspo", "seeupo")))
DRAWS = 10_000  # of a bootstrap
FEWEST = 3  # fewer seeds say nothing about how far others may lie
Interval = tuple[float, float, float]  # mean, low, high


def interval(values: Sequence[float]) -> Interval:
    """The mean and its 95 % percentile bootstrap; the same values always give the same one.

    Example: of (1, 1, 1) it is (1, 1, 1).
    """
    values_N = np.asarray(values, np.float64)
    draw_DN = np.random.default_rng(0).integers(len(values_N), size=(DRAWS, len(values_N)))
    low, high = np.quantile(values_N[draw_DN].mean(1), (0.025, 0.975))
    return float(values_N.mean()), float(low), float(high)


def compared(
    results: Sequence[Result], first: str
) -> Iterator[tuple[str, dict[str, tuple[float, ...]]]]:
    """(entrant, metric -> interval over seeds, of fewer than `FEWEST` the mean alone) of every
    entrant, with what it adds to the success of `first` and its cost over that of `first` within
    seeds. Columns that nothing was measured of are left out: peers do not tell their ratio."""
    seeds: dict[str, dict[int, Result]] = {}
    for result in results:
        seeds.setdefault(result.race.name, {})[result.race.seed] = result
    base, ratio, tokens = seeds.get(first, {}), "log ratio", "tokens / success"
    for name, by_seed in sorted(seeds.items(), key=lambda pair: (pair[0] != first, pair[0])):
        found = list(by_seed.values())
        pairs = [(by_seed[seed], base[seed]) for seed in by_seed.keys() & base.keys()]
        columns: dict[str, list[float]] = {
            "sampled": [at_budget(r, "sampled") for r in found],
            "greedy": [at_budget(r, "greedy") for r in found],
            "more than first": [at_budget(a) - at_budget(b) for a, b in pairs],
            "cost / first": [_cost(a) / _cost(b) for a, b in pairs],
            "device-s": [at_budget(r, "seconds") for r in found],
            "zero advantage": [r.metrics["zero advantage"] for r in found],
            "tool calls": [r.metrics["tool calls"] for r in found],
            "tokens / success": [r.metrics[tokens] for r in found if tokens in r.metrics],
            "truncated": [r.metrics["truncated"] for r in found],
            "ratio": [math.exp(r.metrics[ratio]) for r in found if ratio in r.metrics],
        }
        yield name, {c: _over_seeds(values) for c, values in columns.items() if values}


def _over_seeds(values: Sequence[float]) -> tuple[float, ...]:
    mean, low, high = interval(values)
    return (mean, low, high) if len(values) >= FEWEST else (mean,)


def at_budget(result: Result, what: str = "sampled") -> float:
    """Where the curve was when the budget was full: iterations end a little after it, those of some
    algorithms later than those of others, so the last two points are interpolated.

    Example: 0.6 at 9000 rollouts and 0.7 at 10000 are 0.66 at a budget of 9600.
    """
    budget, curve = result.race.budget, result.curve
    spent = [budget.spent(point.rollouts, point.seconds) for point in curve]
    return float(np.interp(1.0, spent, [getattr(point, what) for point in curve]))


def _cost(result: Result) -> float:
    return result.metrics["s / 1000 rollouts"]


PLAIN = ("tokens / success", "device-s")  # printed without decimals
BARE = ("tool calls", "truncated", *PLAIN)  # printed without their interval


def markdown(results: Sequence[Result], first: str, shown: Collection[str] = ()) -> str:
    """The table as it stands in the documentation: the columns of `compared`, or those `shown`."""
    rows, seeds = list(compared(results, first)), Counter(result.race.name for result in results)
    columns = list(dict.fromkeys(c for _, row in rows for c in row if not shown or c in shown))
    lines = ["| " + " | ".join(("entrant (seeds)", *columns)) + " |", "|---" * (len(columns) + 1)]
    lines[1] += "|"
    for name, row in rows:
        cells = [_cell(column, row[column]) if column in row else "" for column in columns]
        lines.append("| " + " | ".join((f"{name} ({seeds[name]})", *cells)) + " |")
    return "\n".join(lines)


def _cell(column: str, value: Sequence[float]) -> str:
    digits = 0 if column in PLAIN else 4 if column == "ratio" else 3
    mean, *bounds = (f"{x:.{digits}f}" for x in value)
    return f"{mean} [{', '.join(bounds)}]" if bounds and column not in BARE else mean


def plotted(results: Sequence[Result]) -> str:
    """An SVG of success against rollouts and against device-seconds: the mean over seeds at every
    evaluation, with the range of the seeds as a band. Equal results give equal text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(result.race.name for result in results))
    for name in names:
        curves = [r.curve for r in results if r.race.name == name]
        length = min(map(len, curves))
        sampled_SP = np.array([[p.sampled for p in curve[:length]] for curve in curves])
        for axes, x in zip(panels, ("rollouts", "seconds"), strict=True):
            x_P = np.mean([[getattr(p, x) for p in curve[:length]] for curve in curves], 0)
            (line,) = axes.plot(x_P, sampled_SP.mean(0), marker="o", markersize=3, label=name)
            band = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
            axes.fill_between(x_P, sampled_SP.min(0), sampled_SP.max(0), **band)
    for axes, label in zip(panels, ("rollouts", "device-seconds"), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("success, sampled at T = 1")
    panels[1].legend(fontsize=7)
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastturn"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def races(args: argparse.Namespace, task: str) -> list[Race]:
    """Seeds outside: a slow spell of the machine hits all alike."""
    budget = Budget(args.rollouts, args.seconds, args.evaluations)
    return [
        Race(task, name, settings, seed, args.warm_steps, budget)
        for seed in args.seeds
        for name, settings in args.entrants
    ]


def entrant(text: str) -> tuple[str, tuple[str, ...]]:
    """Algorithm and settings. Example: "rtpo optim.lr=1e-3" is ("rtpo", ("optim.lr=1e-3",))."""
    name, *settings = text.split()
    return one_of("entrant", ENTRANTS)(name), tuple(settings)


def seeds(text: str) -> tuple[int, ...]:
    """Example: "3" is (0, 1, 2), "10-12" is (10, 11, 12)."""
    first, dash, last = text.partition("-")
    try:
        found = range(int(first), int(last) + 1) if dash else range(int(first))
    except ValueError:
        found = range(0)
    if not found or found[0] < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected how many seeds (5: 0 to 4), or the first and the last (10-14)"
        )
    return tuple(found)


def arguments() -> argparse.ArgumentParser:
    found = parser("algorithms", __doc__, repeats=1)
    found.add_argument(
        "entrants",
        nargs="*",
        type=entrant,
        default=[entrant("grpo"), entrant("rtpo")],
        metavar="'NAME KEY=VALUE ...'",
        help="default: grpo rtpo; the first is the measure",
    )
    found.add_argument("--task", choices=TASKS, action="append", help=f"default: {SHOWN}")
    found.add_argument("--seeds", type=seeds, default=(0, 1), help="how many, or FIRST-LAST")
    found.add_argument("--rollouts", type=int, default=4800, help="0: only --seconds ends a run")
    found.add_argument("--seconds", type=float, default=0.0, help="device-seconds; 0: no limit")
    found.add_argument("--warm-steps", type=int, default=300)
    found.add_argument("--evaluations", type=int, default=5, help="on the way, evenly")
    found.add_argument("--limit-s", type=float, default=math.inf, help="begin no run after it")
    found.add_argument("--plot", type=Path, help="folder for a picture of each task")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parsed = arguments()
    args = options(parsed, argv)
    begun_s = time.perf_counter()
    try:  # everything, before the first is run
        plans = {task: races(args, task) for task in args.task or SHOWN}
        for race in chain(*plans.values()):
            race.config()
        if args.plot is not None:
            args.plot.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        parsed.error(str(error))
    for task, wanted in plans.items():
        known = [] if args.no_record else recorded(RACES)
        for race in missing(wanted, known):
            if time.perf_counter() - begun_s > args.limit_s:
                print("time is up: the same command goes on with what is missing")
                break
            known.append(raced(race))
            if not args.no_record:
                record(known[-1])
            print(said(known[-1]), flush=True)
        table = {_table(race) for race in wanted}
        shown(task, [r for r in known if _table(r.race) in table], wanted[0].name, args.plot)
    return 0


def _table(race: Race) -> tuple[object, ...]:
    """What the runs of one table have in common, whoever runs."""
    return race.task, race.seed, race.warm_steps, race.budget


def said(result: Result) -> str:
    race, last = result.race, result.curve[-1]
    return (
        f"{race.task} {race.name} seed {race.seed}: {last.sampled:.3f} sampled, "
        f"{last.greedy:.3f} greedy, {last.rollouts} rollouts, {last.seconds:.0f} s"
    )


def shown(task: str, results: Sequence[Result], first: str, folder: Path | None) -> None:
    """Print the table of a task, and draw it."""
    if results:
        print(f"\n{task}\n{markdown(results, first)}", flush=True)
    if results and folder is not None:
        (folder / f"algorithms-{task}.svg").write_text(plotted(results))
