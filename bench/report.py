"""The tables of README.md, docs/benchmarks.md and docs/algorithms.md, and their pictures, made from
what was recorded and never typed.

    .venv/bin/python scripts/bench report             # writes them
    .venv/bin/python scripts/bench report --check     # status 1 when they are not what is written

A block stands between `<!-- bench: NAME -->` and `<!-- end -->`. Every row that is shown must have
been recorded at a commit of this history.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path

from . import calibration, savings
from .algorithms import plotted
from .comparisons import COMPARED
from .record import ROOT, Row
from .recorded import ForeignRow, Results, require_history
from .suites import ON_GPU, every_benchmark

TRAIN = "train/calculator rollouts=9600"
ENTRANTS = {"rtpo": "RTPO, fastturn", "grpo": "GRPO, fastturn", "trl": "GRPO, TRL"}
SHOWN_LEVELS = ("0.7", "0.8", "0.85")
BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SCRIPTS = {"gpu": "scripts/gpu_check"}  # of benchmarks that have one of their own


def number(value: float) -> str:
    """Three digits. Example: 1234.5 is "1,234", 0.06789 is "0.0679"."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(row: Row) -> str:
    """Example: "1.5 [1.4, 1.7]", and of one measurement "1.5"."""
    middle = number(row.p50)
    return middle if row.n == 1 else f"{middle} [{number(row.p20)}, {number(row.p80)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def headline(results: Results) -> str:
    """Four rows: what one may want to know first."""

    def beside(what: str, unit: str, pairs: tuple[Row, Row], ratio: Row) -> list[str]:
        ours, theirs = (f"{number(row.p50)}{unit}" for row in pairs)
        return [what, ours, theirs, spread(ratio)]

    def of(name: str, metric: str) -> Row:
        return results.row(TRAIN, name, metric)

    step, case = "update/512+8x64/layers=4", "surrogate/live"
    rows = [
        beside(
            "GRPO iteration, 160 rollouts with tool calls; TRL's GRPOTrainer",
            " s",
            (of("grpo", "s / iteration"), of("trl", "s / iteration")),
            of("grpo", "s / iteration / trl"),
        ),
        beside(
            "RTPO, a thousand rollouts; our GRPO",
            " s",
            (of("rtpo", "s / 1000 rollouts"), of("grpo", "s / 1000 rollouts")),
            of("rtpo", "s / 1000 rollouts / grpo"),
        ),
        beside(
            "update of 8 siblings on one context, packed; one row a sibling",
            " s",
            (results.row(step, "packed", "time"), results.row(step, "rows", "time")),
            results.row(step, "packed", "speed-up over rows"),
        ),
        beside(
            "memory of loss and gradients at a vocabulary of 49152; plain torch",
            " MiB",
            (
                results.row(case, "fastturn", "peak extra memory"),
                results.row(case, "plain", "peak extra memory"),
            ),
            results.row(case, "fastturn", "peak extra memory / plain"),
        ),
    ]
    rows[2][3] += "× faster"
    return table(("what; beside what", "fastturn", "beside it", "ratio [20 %, 80 %]"), rows)


def training(results: Results) -> str:
    """What training came to, over seeds."""
    rows = []
    for name, label in ENTRANTS.items():
        found = {m: results.row(TRAIN, name, m) for m in (
            *("success, sampled, before", "success, sampled", "success, greedy"),
            *("s / iteration", "s / 1000 rollouts", "peak memory"),
        )}  # fmt: skip
        times = []
        for level in SHOWN_LEVELS:
            reached = results.row(TRAIN, name, f"success {level} reached")
            known = reached.p50 == 1.0
            metric = f"device-seconds to success {level}"
            times.append(spread(results.row(TRAIN, name, metric)) if known else "not by all")
        rows.append([label, *map(spread, found.values()), *times])
    head = ("", "before", "sampled", "greedy", "s / iteration", "s / 1000 rollouts", "peak, MiB")
    return table((*head, *(f"s to {level}" for level in SHOWN_LEVELS)), rows)


def saved(results: Results) -> str:
    """What each saving does to the cost of RTPO beside GRPO, by scenario."""
    rows = []
    for scenario in savings.SCENARIOS:
        names = ("naive", *savings.SAVINGS)
        cells = [results.row(scenario.name, name, savings.METRIC) for name in names]
        rows.append([scenario.name.partition("/")[2], *map(spread, cells)])
    return table(("GPU-hours / GRPO's", "naive", *(f"+ {x}" for x in savings.SAVINGS)), rows)


def foretold(results: Results) -> str:
    """Seconds of the quickstart's iteration, and what was predicted of them over that."""
    rows = []
    for algorithm in calibration.ALGORITHMS:
        case, target = f"calibration/{algorithm}", calibration.TARGET
        measured = results.row(case, target, "s / iteration")
        ratios = [
            results.row(case, target, f"predicted / measured, {name}") for name in calibration.FROM
        ]
        rows.append([algorithm, f"{spread(measured)} s", *map(spread, ratios)])
    return table(("", "measured", *calibration.FROM), rows)


def everything(results: Results) -> str:
    """All newest rows, one table a benchmark."""
    parts = []
    chosen = sorted(results.rows.values(), key=lambda r: (r.bench, r.case, r.provider, r.metric))
    for bench, group in groupby(chosen, key=lambda r: r.bench):
        rows = list(group)
        for row in rows:
            results.row(row.case, row.provider, row.metric)
        place = sorted({f"{row.device}, torch {row.torch}" for row in rows})
        lines = [
            [r.case, r.provider, r.metric, spread(r), r.unit, str(r.n), r.commit[:8]] for r in rows
        ]
        head = ("case", "provider", "metric", "p50 [p20, p80]", "unit", "n", "commit")
        told = "\n".join(f"    {command}" for command in commands(bench))
        parts.append(f"## {bench}\n\n{told}\n\n{'; '.join(place)}\n\n{table(head, lines)}")
    return "\n".join(parts)


def commands(bench: str) -> list[str]:
    """What makes the rows of a benchmark; `ForeignRow` when nothing does any more."""
    every = [*every_benchmark("cpu"), ("lengths", "--data", "DIR"), *ON_GPU["ops"]]
    found = [words for words in every if words[0] == bench]
    if not found:
        raise ForeignRow(f"{bench}.jsonl: no benchmark of that name makes rows; delete the file")
    script = SCRIPTS.get(bench, f"scripts/bench {bench}")
    return [f"{script} {shlex.join(options)}".rstrip() for _, *options in found]


def plot(results: Results) -> str:
    """Device-seconds to a success level as bars. The same rows give the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    labels = list(ENTRANTS.values())[::-1]
    for axes, level in zip(panels, SHOWN_LEVELS[1:], strict=True):
        for place, name in enumerate(list(ENTRANTS)[::-1]):
            if results.row(TRAIN, name, f"success {level} reached").p50 < 1.0:
                axes.text(0.0, place, " not by all seeds", va="center", fontsize=8)
                continue
            row = results.row(TRAIN, name, f"device-seconds to success {level}")
            axes.barh(place, row.p50, color="#8899aa" if name == "trl" else "#2467c9")
            axes.text(row.p50, place, f" {number(row.p50)} s", va="center", fontsize=8)
        axes.set_title(f"device-seconds to {float(level):.0%} held-out success", fontsize=9)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastturn"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


BLOCKS: Mapping[str, Callable[[Results], str]] = {
    "headline": headline,
    "training": training,
    "everything": everything,
    "savings": saved,
    "calibration": foretold,
    **{name: lambda _, one=one: one.table() for name, one in COMPARED.items()},
}
FILES = ("README.md", "docs/benchmarks.md", "docs/algorithms.md", "docs/planning.md")
PLOTS: Mapping[str, Callable[[Results], str]] = {
    "docs/train.svg": plot,
    **{
        f"docs/algorithms-{name}.svg": lambda _, name=name: plotted(COMPARED[name].results())
        for name in ("workshop", "calculator")
    },
}


def filled(text: str, results: Results) -> str:
    """`text` with every block made anew."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](results) + found[3], text)


def written(root: Path = ROOT) -> tuple[dict[Path, str], Results]:
    """What every file should hold, and the rows that it shows; `ForeignRow` for rows that cannot be
    shown."""
    results = Results.load()
    found = {root / name: filled((root / name).read_text(), results) for name in FILES}
    found |= {root / name: drawn(results) for name, drawn in PLOTS.items()}
    require_history(results.shown.values())
    return found, results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    files, results = written()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'not what the rows say' if args.check else 'written'}")
        if not args.check:
            path.write_text(files[path])
    print(f"{len(results.shown)} rows shown")
    return int(bool(stale) and args.check)
