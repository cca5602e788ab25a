"""Everything on one GPU: correctness, then time and peak memory beside other libraries.

    python scripts/gpu_check [--out DIR] [--dry] [--minutes 8] [--only SECTION ...]

Sections have shares of the time; what one leaves over the next may use, and what does not fit is
named as left out. A provider that is absent or fails is named too; a failure of ours makes the exit
status 1. Times alternate between providers after one uncounted repetition of each; results are
compared before anything is timed; peak memory is a separate pass. --dry does all of it at toy size
on the CPU, Triton kernels through the interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from . import record
from .gpu_sections import SECTIONS, Check, free
from .record import Measured, Row


class OutOfTime(BaseException):
    """The section's time is over. No `Exception`, so that nothing between takes it for an error."""


def run_sections(check: Check, names: Sequence[str], total_s: float) -> Iterator[str]:
    """Run sections one after another, each until its share of the time ends; yields their names."""
    start, share = time.monotonic(), 0.0
    whole = sum(SECTIONS[name][0] for name in names)

    def stop(*_: object) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        for name in names:
            share += SECTIONS[name][0] / whole
            check.ends = start + share * total_s
            check.say(f"== {name} ({max(check.remaining_s, 0):.0f} s)")
            # Sections stop by themselves; the alarm is for a call that takes longer than its rest.
            signal.setitimer(signal.ITIMER_REAL, max(check.remaining_s + 3, 0.1))
            try:
                check.attempt(name, partial(SECTIONS[name][1], check), ours=True)
            except OutOfTime:
                check.leave_out(f"the rest of {name}: out of time")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            free()
            yield name
    finally:
        signal.signal(signal.SIGALRM, previous)


def rows(measured: Sequence[Measured], device: str, commit: str | None) -> list[Row]:
    """Rows of a checkout; of a copy without git when the commit is stated."""
    if commit is None:
        return record.rows("gpu", measured, device)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [
        Row(
            bench="gpu",
            case=m.case,
            provider=m.provider,
            metric=m.metric,
            unit=m.unit,
            p50=m.percentile(0.5),
            p20=m.percentile(0.2),
            p80=m.percentile(0.8),
            n=len(m.values),
            device=record.device_name(device),
            driver=record.driver(device),
            torch=torch.__version__,
            triton=record.version("triton"),
            commit=commit,
            config_hash=record.config_hash(m.config),
            date=now,
        )
        for m in measured
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="gpu_check", description=summary)
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of gpu.jsonl")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU, in a minute")
    parser.add_argument("--minutes", type=float, default=7.5, help="when the last section ends")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--commit", help="of a copy without git: the commit that it was made from")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args(argv)
    if args.dry and args.out == record.RESULTS:
        args.no_record = True  # toy sizes are no results
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = "cpu" if args.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, found none; --dry runs toy sizes on the CPU")
        return 2
    if not args.no_record and args.commit is None:
        record.require_clean()
    check = Check(device, args.dry)
    check.say(f"{record.device_name(device)}; torch {torch.__version__}")
    # A kernel that never ends cannot be interrupted: then the process ends, with the rows so far.
    faulthandler.dump_traceback_later(args.minutes * 60 + 20, exit=True)
    done = 0
    for _ in run_sections(check, args.only, args.minutes * 60):
        if args.no_record:
            continue
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            for row in rows(check.measured[done:], device, args.commit):
                file.write(json.dumps(asdict(row)) + "\n")
        done = len(check.measured)
    faulthandler.cancel_dump_traceback_later()
    check.say(f"{len(check.measured)} rows, {len(check.left_out)} left out")
    check.say("\n".join(["failed:", *check.failures]) if check.failures else "all correct")
    return int(bool(check.failures))
