"""A table of kernels from Nsight Compute, each with what limits it.

    ncu --import kernels.ncu-rep --page raw --csv > kernels.csv
    .venv/bin/python scripts/bench ncu kernels.csv

Launches of one kernel are one line: their number, the median of every metric. The note follows from
two shares of the device's peak: matrix and arithmetic units, and memory.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

NAME, TIME = "Kernel Name", "gpu__time_duration.sum"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
METRICS = (TIME, COMPUTE, MEMORY, WARPS, REGISTERS)  # what --metrics must name
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
BUSY, LOW_WARPS, MOST_REGISTERS = 60.0, 25.0, 168.0


def read(path: Path) -> dict[str, list[dict[str, float]]]:
    """Launches by kernel, times in microseconds. `SystemExit` names what the file lacks."""
    lines = [x for x in path.read_text(encoding="utf-8").splitlines() if x.startswith('"')]
    rows = list(csv.DictReader(lines))
    missing = [name for name in (NAME, *METRICS) if not rows or name not in rows[0]]
    if missing:
        raise SystemExit(
            f"{path}: expected the raw page of Nsight Compute as CSV with {', '.join(missing)}; "
            f"profile with --metrics {','.join(METRICS)}"
        )
    units, launches = rows[0], rows[1:]
    scale = MICROSECONDS[units[TIME]]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in launches:
        values = {name: float(row[name].replace(",", "")) for name in METRICS}
        found[row[NAME]].append(values | {TIME: scale * values[TIME]})
    return dict(found)


def note(values: Mapping[str, float]) -> str:
    """What limits a kernel. Example: 80 % of memory and 30 % of compute is "memory"."""
    compute, memory = values[COMPUTE], values[MEMORY]
    if max(compute, memory) >= BUSY:
        return "compute" if compute >= memory else "memory"
    if values[WARPS] >= LOW_WARPS:
        return "latency: enough warps, waiting on each other or on loads"
    if values[REGISTERS] > MOST_REGISTERS:
        return "latency: few warps, for their registers"
    return "latency: few warps, a small launch or shared memory"


def table(launches: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Kernels by the time that all their launches took, longest first."""
    lines = ["| kernel | launches | us | of all | compute | memory | warps | registers | limit |"]
    lines.append("|---" * 9 + "|")
    total = {name: sum(one[TIME] for one in many) for name, many in launches.items()}
    for name in sorted(total, key=lambda n: -total[n]):
        middle = {m: median(one[m] for one in launches[name]) for m in METRICS}
        shares = [f"{middle[m]:.0f} %" for m in (COMPUTE, MEMORY, WARPS)]
        share = f"{total[name] / sum(total.values()):.0%}"
        cells = [name, str(len(launches[name])), f"{middle[TIME]:.1f}", share, *shares]
        lines.append("| " + " | ".join([*cells, f"{middle[REGISTERS]:.0f}", note(middle)]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench ncu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path, metavar="CSV")
    print(table(read(parser.parse_args(argv).path)))
    return 0
