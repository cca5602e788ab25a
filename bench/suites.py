"""`fastturn bench`: the usual sets of benchmarks, what they run beside, two revisions compared.

    ops       kernels beside plain torch, Liger and TRL; on a GPU everything of scripts/gpu_check
    pack      packing
    rollout   sampling beside `model.generate` of transformers and a vLLM server
    step      the update beside padding, rows and PrefixGrouper
    train     whole training runs beside TRL's GRPOTrainer
    all       these and `FURTHER`: every number of README.md and of the tables in docs/, which are
              written at the end. Hours; training runs that are recorded are not repeated, and
              one that fails is named and does not end the others.

`scripts/bench NAME --help` has what else each of them can be told, and further benchmarks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from . import served
from .record import require_clean

FAILED = 1
Words = tuple[str, ...]  # a benchmark and its options, as behind scripts/bench

SUITES: dict[str, tuple[Words, ...]] = {
    "ops": (("ops",), ("peers",)),
    "pack": (("pack",),),
    "rollout": (("rollouts",),),
    "step": (("steps",),),
    "train": (("train",),),
}
# What else the documents show; the comparisons of algorithms are in `comparisons.py`.
FURTHER: tuple[Words, ...] = tuple(
    tuple(shlex.split(line))
    for line in (
        "steps --clock 'cpu time' --points 512+2x64 512+2x256 2048+2x256 512+16x64",
        "savings",
        "overlap",
        "attribution --seeds 1 --iterations 2",
        "metering grpo --meters on --repeats 800",
        "metering rtpo --meters on --repeats 100",
        "metering --meters trace --repeats 200",
        "calibration --repeats 3",
        "path frontdesk",
        "path frontdesk-warmer --arms outcome full",
        "path frontdesk-steady",
        "path frontdesk-long",
        "path frontdesk-gate",
        "path shell --arms outcome full",
    )
)
ON_GPU: dict[str, tuple[Words, ...]] = {"ops": (("gpu",),)}


class BenchError(ValueError):
    """A benchmark that cannot run as it was asked for."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`suites` that it is compared in; whether it is installed, and what to do when it is not."""

    suites: tuple[str, ...]
    is_there: Callable[[], bool]
    remedy: str
    gpu_only: bool = False


def _package(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


EXTRA = "install fastturn[bench]"
PEERS = {
    "liger": Peer(("ops",), _package("liger_kernel"), EXTRA),
    "cce": Peer(("ops",), _package("cut_cross_entropy"), "install cut-cross-entropy", True),
    "trl": Peer(("ops", "train"), _package("trl"), EXTRA),
    "prefix-grouper": Peer(("step",), _package("prefix_grouper"), EXTRA),
    "hf": Peer(("rollout",), _package("transformers"), "install transformers"),
    "vllm": Peer(("rollout",), lambda: served.engine() is not None, served.REMEDY),
}


def check_peers(against: Sequence[str], suites: Sequence[str], device: str) -> None:
    """`BenchError` for a peer that is unknown, not compared in these suites, or not installed."""
    for name in against:
        if name not in PEERS:
            raise BenchError(f"--against {name!r}: expected any of {', '.join(PEERS)}")
        peer = PEERS[name]
        if not set(peer.suites) & set(suites):
            raise BenchError(f"--against {name}: it is compared in {', '.join(peer.suites)} only")
        if peer.gpu_only and device != "cuda":
            raise BenchError(f"--against {name}: it runs on GPUs only; use --device cuda")
        if not peer.is_there():
            raise BenchError(f"--against {name}: not installed; {peer.remedy}, or leave it out")


def choose_device(asked: str | None) -> str:
    """The device of the benchmarks; with "cpu", GPUs are hidden from what runs from here on."""
    if asked == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    there = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and there != "cuda":
        raise BenchError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return there


def benchmarks(suites: Sequence[str], device: str) -> list[Words]:
    """What the suites run on a device."""
    there = SUITES | (ON_GPU if device == "cuda" else {})
    return [words for suite in suites for words in there[suite]]


def every_benchmark(device: str) -> list[Words]:
    """What fills all tables, those on public data apart (`lengths`, which needs their folder)."""
    from .comparisons import COMPARED

    return [
        *benchmarks(list(SUITES), device),
        *FURTHER,
        *(("algorithms", *chain(*one.options())) for one in COMPARED.values()),
    ]


def chosen(options: argparse.Namespace, device: str) -> list[Words]:
    """What the command line names."""
    if options.suite != "all":
        if options.data is not None:
            raise BenchError(f"--data {options.data}: only all reads it; leave it out")
        return benchmarks([options.suite], device)
    if options.data is None:
        print("lengths: left out, name the folder of public data by --data DIR (bench/lengths.py)")
        return every_benchmark(device)
    return [("lengths", "--data", str(options.data)), *every_benchmark(device)]


def run(options: argparse.Namespace) -> int:
    """Run what the command line says; the worst exit status."""
    device = choose_device(options.device)
    suites = list(SUITES) if options.suite == "all" else [options.suite]
    check_peers(options.against, suites, device)
    every = chosen(options, device)
    if options.compare:
        from .compare import compare

        return compare(*options.compare, every)
    if not options.no_record:
        require_clean()
    own: Words = ("--no-record",) if options.no_record else ()
    status = max(_status((*words, *own), alone=options.suite != "all") for words in every)
    if options.suite == "all" and not options.no_record:
        main_of("report")([])
    return status


def _status(words: Words, *, alone: bool) -> int:
    """Of one benchmark. Hours of others are not lost with one that fails: it is named."""
    name, *argv = words
    try:
        return main_of(name)(argv)
    except Exception as error:
        if alone:
            raise
        traceback.print_exc()
        print(f"error: bench {shlex.join(words)}: {error}; the others go on", file=sys.stderr)
        return FAILED


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    main: Callable[[Sequence[str]], int] = importlib.import_module(f"fastturn.bench.{name}").main
    return main
