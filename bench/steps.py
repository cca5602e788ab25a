"""The update of one group in four layouts: padded, separate rows, PrefixGrouper, packed.

    .venv/bin/python scripts/bench steps --no-record
    .venv/bin/python scripts/bench steps --points 512+8x64 --layers 30 --no-record
    .venv/bin/python scripts/bench steps --all --no-record

SmolLM2-135M's shape with random weights, float32, forward and backward. Every layout scores the
same actions with the same loss kernel; losses and gradients must agree before timing, which
alternates between layouts in one process. Peak memory is a separate pass, one process each.
At few layers and tokens the peak is the gradients of all parameters, the same in every layout.
"speed-up / flop ratio" is the share of the ideal speed-up over separate rows that was reached:
`Work.flops` counts the operations of both.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product

from . import command, memory
from .cases import StepCase
from .layouts import Update
from .measure import check_equal, ratios, seconds
from .record import Measured

TOLERANCE = 1e-3  # float32 through 30 layers, relative to the largest gradient
GRID = tuple(product((512, 1024, 2048), (2, 8, 16), (64, 256)))
# "cpu time" is that of the process: on a shared machine it repeats where the wall clock does not.
CLOCKS = {"time": time.perf_counter, "cpu time": time.process_time}
USUAL = ("512+2x64", "512+8x64", "512+2x256", "1024+8x64", "2048+2x256")


def measure(case: StepCase, args: argparse.Namespace) -> Iterator[Measured]:
    config = asdict(case)
    run = Update(case).providers()
    check_equal(run, "rows", TOLERANCE)  # warms all shapes too
    times = seconds(run, args.repeats, warm=0, clock=CLOCKS[args.clock])
    yield from speeds(case, times, args.clock)
    names = list(run)
    del run  # its model would stay resident beside those of the processes
    peaks = {name: memory.peak_bytes(case, name, args.threads) for name in names}
    for name, peak in peaks.items():
        yield Measured(case.name, name, "peak memory", "MiB", (peak / 2**20,), config)
        if name != "packed":
            share = (peaks["packed"] / peak,)
            yield Measured(case.name, "packed", f"peak memory / {name}", "1", share, config)


def speeds(case: StepCase, times: Mapping[str, Sequence[float]], clock: str) -> Iterator[Measured]:
    """Times, the packed layout's speed-up over each other, and its share of the counted ratio."""
    config = asdict(case) | {"clock": clock}
    for name, values in times.items():
        yield Measured(case.name, name, clock, "s", tuple(values), config)
    for name in times:
        if name != "packed":
            gain = ratios(times[name], times["packed"])
            yield Measured(case.name, "packed", f"speed-up over {name}", "1", gain, config)
    gain = ratios(times["rows"], times["packed"])
    yield Measured(case.name, "packed", "flop ratio", "1", (case.flop_ratio,), config)
    share = tuple(x / case.flop_ratio for x in gain)
    yield Measured(case.name, "packed", "speed-up / flop ratio", "1", share, config)


def point(text: str) -> tuple[int, int, int]:
    """Context, siblings and tokens. Example: "512+8x64" is (512, 8, 64)."""
    parts = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)x([1-9]\d*)", text)
    if not parts:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected context+siblingsxtokens such as 512+8x64"
        )
    context, siblings, tokens = map(int, parts.groups())
    return context, siblings, tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("steps", __doc__, repeats=3)
    usual = [point(text) for text in USUAL]
    parser.add_argument("--points", nargs="+", type=point, default=usual, help="such as 512+8x64")
    parser.add_argument("--all", action="store_true", help=f"the {len(GRID)} points of the grid")
    parser.add_argument("--clock", choices=list(CLOCKS), default="time")
    parser.add_argument("--layers", type=int, default=StepCase().layers)
    args = command.options(parser, argv)
    chosen = GRID if args.all else args.points
    cases = [StepCase(*numbers, layers=args.layers) for numbers in chosen]
    found = (one for case in cases for one in measure(case, args))
    return command.report("steps", found, args)
