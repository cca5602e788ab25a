"""What changed between two revisions, or between two files of recorded rows, beyond noise.

    .venv/bin/fastturn bench pack --compare HEAD~1 HEAD
    .venv/bin/fastturn bench --compare old.jsonl new.jsonl
    .venv/bin/python scripts/bench compare HEAD~1 HEAD ops attention --repeats 3

Revisions are measured now, round by round, A and B taking turns, each in processes of its own; the
third form takes any benchmark with its options. Intervals are Student's, of the logarithm of the
ratio of both medians within a round, and hold together at 95 %: of twenty comparisons of equal
revisions one marks anything. Of files there is only what they hold: the ratio of the medians,
between the ratios of the outer percentiles.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from .record import ROOT, Row
from .recorded import ForeignRow, read, require_history
from .suites import BenchError, Words

NOISE = 0.02  # a change smaller than this is none
WRONG = 0.05  # how often a table of nothing but noise has a mark
Key = tuple[str, str, str]  # case, provider, metric
# Runs a suite of whatever revision is on the path, and prints medians as JSON.
MEDIANS = """
import importlib, json, sys
from fastturn.bench import command
def report(bench, found, args):
    print(json.dumps([[m.case, m.provider, m.metric, m.percentile(0.5)] for m in found]))
    return 0
command.report = report
raise SystemExit(importlib.import_module("fastturn.bench." + sys.argv[1]).main(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True)
class Change:
    """B over A: the ratio and its interval. Example: (1.5, 1.4, 1.6) is a change, (1, .9, 1.2) is
    noise."""

    ratio: float
    low: float
    high: float

    @property
    def beyond_noise(self) -> bool:
        return self.low > 1 + NOISE or self.high < 1 - NOISE


def of_rounds(
    a: Sequence[Mapping[Key, float]], b: Sequence[Mapping[Key, float]]
) -> dict[Key, Change]:
    """What both measured in every round, of at least two."""
    ratios: dict[Key, list[float]] = defaultdict(list)
    for one, other in zip(a, b, strict=True):
        for key in one.keys() & other.keys():
            if one[key] > 0 and other[key] > 0:
                ratios[key].append(other[key] / one[key])
    whole = {key: r for key, r in sorted(ratios.items()) if len(r) == len(a)}
    wide = student(1 - WRONG / max(1, len(whole)), len(a) - 1)
    return {key: _change(r, wide) for key, r in whole.items()}


def _change(ratios: Sequence[float], wide: float) -> Change:
    log_R = np.log(ratios)
    middle, far = log_R.mean(), wide * log_R.std(ddof=1) / math.sqrt(len(log_R))
    low, ratio, high = np.exp([middle - far, middle, middle + far]).tolist()
    return Change(ratio, low, high)


def student(share: float, freedom: int) -> float:
    """Within how many standard errors of 0 that share of Student's distribution lies: with
    t = √freedom · tan θ its density is that of cos θ to the power freedom - 1.

    Example: (0.95, 4) is 2.776.
    """
    angle_N = np.linspace(0.0, math.pi / 2, 100_001)
    held_N = np.cumsum(np.cos(angle_N) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(np.interp(share, held_N / held_N[-1], angle_N))


def of_files(a: Path, b: Path) -> dict[Key, Change]:
    """What both hold of the same case on the same device, the newest rows of each."""
    newest = []
    for path in (a, b):
        rows = {(r.case, r.provider, r.metric): r for r in read(path)}
        require_history(rows.values())
        newest.append(rows)
    first, second = newest
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ForeignRow(f"{a} and {b} have no case in common; compare files of one benchmark")
    return {key: _of_rows(first[key], second[key]) for key in common if first[key].p50 > 0}


def _of_rows(a: Row, b: Row) -> Change:
    if (a.device, a.config_hash) != (b.device, b.config_hash):
        raise ForeignRow(
            f"{a.case} of {a.provider}: recorded on {a.device} ({a.config_hash}) and on {b.device} "
            f"({b.config_hash}); only rows of one device and one configuration can be compared"
        )
    spread = (b.p20 / a.p80, b.p80 / a.p20) if a.p20 > 0 else (0.0, float("inf"))
    return Change(b.p50 / a.p50, *spread)


def package(revision: str, folder: Path) -> Path:
    """The revision as an importable package in `folder`; what goes on the path."""
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise ForeignRow(
            f"--compare {revision}: neither a file nor a revision ({done.stderr.decode().strip()})"
        )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder / "tree", filter="data")
    path, tree = folder / "path", folder / "tree"
    (path / "fastturn").mkdir(parents=True)
    for part in (*(tree / "fastturn").iterdir(), tree / "kernels", tree / "bench"):
        (path / "fastturn" / part.name).symlink_to(part)
    return path


def measured(path: Path, words: Words) -> dict[Key, float]:
    """Medians of one run of a benchmark."""
    command = [sys.executable, "-c", MEDIANS, *words, "--no-record"]
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True)
    if done.returncode:
        raise ForeignRow(f"{' '.join(words)} failed in {path}: {done.stderr.strip()[-600:]}")
    return {(c, p, m): v for c, p, m, v in json.loads(done.stdout.splitlines()[-1])}


def of_revisions(a: str, b: str, every: Sequence[Words], rounds: int) -> dict[Key, Change]:
    """Both measured `rounds` times, in turn."""
    if rounds < 2:
        raise BenchError(f"--rounds {rounds}: one round does not show noise; take two or more")
    with tempfile.TemporaryDirectory() as folder:
        paths = [package(name, Path(folder) / str(i)) for i, name in enumerate((a, b))]
        found: list[list[dict[Key, float]]] = [[], []]
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                medians = {}
                for words in every:
                    medians |= measured(paths[side], words)
                found[side].append(medians)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        return of_rounds(*found)


def lines(changes: Mapping[Key, Change]) -> Iterator[str]:
    """One a metric; what lies beyond noise is marked."""
    for (case, provider, metric), change in changes.items():
        mark = "CHANGED" if change.beyond_noise else ""
        numbers = f"{change.ratio:7.3f} [{change.low:.3f}, {change.high:.3f}]"
        yield f"{case:34} {provider:14} {metric:27} {numbers} {mark}".rstrip()


def compare(a: str, b: str, every: Sequence[Words], rounds: int = 5) -> int:
    """Print B over A; status 1 when something has changed beyond noise."""
    files = [Path(name).is_file() for name in (a, b)]
    if any(files) and not all(files):
        missing = (a, b)[files.index(False)]
        raise ForeignRow(
            f"--compare {missing}: expected a file beside the other one; there is none"
        )
    changes = of_files(Path(a), Path(b)) if all(files) else of_revisions(a, b, every, rounds)
    print("\n".join(lines(changes)))
    changed = sum(change.beyond_noise for change in changes.values())
    print(f"{len(changes)} metrics compared, {changed} changed beyond noise")
    return int(changed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("a", metavar="A", help="a revision")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("name", metavar="NAME", help="a benchmark; its options follow")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="OPTION ...")
    parser.add_argument("--rounds", type=int, default=5, help="before A")
    args = parser.parse_args(argv)
    return compare(args.a, args.b, [(args.name, *args.options)], args.rounds)
