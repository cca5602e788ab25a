"""What every benchmark's command line shares: threads, repetitions, printing, recording."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from .measure import table
from .record import Measured, record, require_clean


def parser(bench: str, document: str | None, repeats: int) -> argparse.ArgumentParser:
    """Options of all benchmarks; the first line of the module's docstring describes it."""
    found = argparse.ArgumentParser(
        prog=f"bench {bench}", description=(document or "").split("\n")[0]
    )
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--repeats", type=int, default=repeats)
    found.add_argument("--no-record", action="store_true", help="print only")
    return found


def one_of(what: str, names: Collection[str]) -> Callable[[str], str]:
    """An argument's type that refuses other words, naming those that there are."""

    def word(text: str) -> str:
        if text not in names:
            expected = ", ".join(names)
            raise argparse.ArgumentTypeError(f"unknown {what} {text}: expected any of {expected}")
        return text

    return word


def options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The parsed options, ready to measure by."""
    return started(parser.parse_args(argv))


def started(args: argparse.Namespace) -> argparse.Namespace:
    """The options with the device added, and torch's threads set.

    `DirtyTree` before anything runs, when rows are to be recorded from uncommitted changes.
    """
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.no_record:
        require_clean()
    torch.set_num_threads(args.threads)
    return args


def report(bench: str, found: Iterable[Measured], args: argparse.Namespace) -> int:
    """Print every measurement when it is there, record all at the end; the exit status."""
    measured = []
    for one in found:
        measured.append(one)
        print(table([one]), flush=True)
    if not args.no_record:
        print(f"recorded in {record(bench, measured, args.device)}")
    return 0
