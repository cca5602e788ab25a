"""`fastturn bench`: the usual sets of benchmarks, what they run beside, two revisions compared.

    ops       kernels beside plain torch, Liger and TRL; on a GPU everything of scripts/gpu_check
    pack      packing
    rollout   sampling beside `model.generate` of transformers
    step      the update beside padding, rows and PrefixGrouper
    train     whole training runs beside TRL's GRPOTrainer

`scripts/bench SUITE --help` has what else each of them can be told, and further benchmarks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Sequence

from .record import require_clean

SUITES: dict[str, tuple[str, ...]] = {
    "ops": ("ops", "peers"),
    "pack": ("pack",),
    "rollout": ("rollouts",),
    "step": ("steps",),
    "train": ("train",),
}
ON_GPU = {"ops": ("gpu",)}
# name -> the package, and the suites that it is compared in
PEERS = {
    "liger": ("liger_kernel", ("ops",)),
    "trl": ("trl", ("ops", "train")),
    "prefix-grouper": ("prefix_grouper", ("step",)),
    "hf": ("transformers", ("rollout",)),
    "cce": ("cut_cross_entropy", ("ops",)),
}
GPU_ONLY = {"cce"}
# What needs a server of its own, which no suite starts.
SERVED = {
    "vllm": "start a server (fastturn serve RECIPE --run) and run scripts/bench client --url URL "
    "--vocabulary N: its rate through our client beside a bare load generator's"
}


class BenchError(ValueError):
    """A benchmark that cannot run as it was asked for."""


def check_peers(against: Sequence[str], suites: Sequence[str], device: str) -> None:
    """`BenchError` for a peer that is unknown, not compared in these suites, or not installed."""
    for name in against:
        if name in SERVED:
            raise BenchError(f"--against {name}: it is a server, not a package; {SERVED[name]}")
        if name not in PEERS:
            raise BenchError(f"--against {name}: expected any of {', '.join(PEERS)}")
        package, where = PEERS[name]
        if not set(where) & set(suites):
            raise BenchError(f"--against {name}: it is compared in {', '.join(where)} only")
        if name in GPU_ONLY and device != "cuda":
            raise BenchError(f"--against {name}: it runs on GPUs only; use --device cuda")
        if importlib.util.find_spec(package) is None:
            raise BenchError(
                f"--against {name}: the package {package} is missing; install fastturn[bench], or "
                f"leave {name} out"
            )


def choose_device(asked: str | None) -> str:
    """The device of the benchmarks; with "cpu", GPUs are hidden from what runs from here on."""
    if asked == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    there = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and there != "cuda":
        raise BenchError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return there


def run(options: argparse.Namespace) -> int:
    """Run what the command line says; the worst exit status."""
    suites = list(SUITES) if options.suite == "all" else [options.suite]
    device = choose_device(options.device)
    modules = [
        module
        for suite in suites
        for module in ((ON_GPU if device == "cuda" else {}).get(suite) or SUITES[suite])
    ]
    check_peers(options.against, suites, device)
    if options.compare:
        from .compare import compare

        return compare(*options.compare, modules)
    if not options.no_record:
        require_clean()
    argv = ["--no-record"] if options.no_record else []
    return max(importlib.import_module(f"fastturn.bench.{m}").main(argv) for m in modules)
