"""Whole training, beside TRL's GRPOTrainer: device-seconds, success levels, peak memory.

    .venv/bin/fastturn bench train --against trl --no-record

GRPO and RTPO of ours and GRPO of TRL from the same warm policies of the quickstart, to an equal
number of rollouts (`trl_grpo.py` says what is the same and what is not). Runs are kept one by one
in results/races.jsonl, so `--limit-s` cuts a long measurement into pieces; the rows are made of all
of them when the last has been run. Seconds are CPU seconds of one thread, device-seconds of one
core, without warm start and evaluations, which are ours for all.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import numpy as np
import torch

from fastturn.run import Run

from . import command, trl_grpo
from .measure import ratios
from .memory import MMAP_THRESHOLD, resident_peak, restart_peak
from .races import Budget, Race, Result, missing, record, recorded, trained, warmed
from .record import Measured

RUNNERS: Mapping[str, Callable[[Run, Race], Result]] = {
    "grpo": trained,
    "rtpo": trained,
    "trl": trl_grpo.trained,
}
PEER = "trl"
LEVELS = (0.7, 0.8, 0.85)
MEMORY = Budget(rollouts=480, evaluations=1, eval_tasks=2)  # evaluations are ours for all: few


def raced(race: Race) -> Result:
    with warmed(race) as run:
        return RUNNERS[race.entrant](run, race)


def seconds_to(result: Result, level: float) -> float:
    """Device-seconds until the held-out success (sampled) first reached `level`, between two
    evaluations by interpolation; infinite when it never did.

    Example: .6 at 10 s and .8 at 20 s reach .7 at 15 s.
    """
    for before, after in zip(result.curve, result.curve[1:], strict=False):
        if after.sampled >= level > before.sampled:
            share = (level - before.sampled) / (after.sampled - before.sampled)
            return before.seconds + share * (after.seconds - before.seconds)
    return 0.0 if result.curve[0].sampled >= level else math.inf


def peak_bytes(race: Race) -> int:
    """Resident memory at its highest while it trains, beyond what was resident before."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_peak, race).result()


def _peak(race: Race) -> int:
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    torch.set_num_threads(1)
    with warmed(race) as run:
        before = restart_peak()
        RUNNERS[race.entrant](run, race)
        return resident_peak() - before


def measured(results: Sequence[Result]) -> Iterator[Measured]:
    """Rows over seeds: of every entrant, and of ours relative to TRL's of the same seed."""
    by_entrant = {
        name: sorted((r for r in results if r.race.entrant == name), key=lambda r: r.race.seed)
        for name in RUNNERS
    }
    for name, found in by_entrant.items():
        if not found:
            continue
        for metric, unit, values in columns(found):
            yield _row(found[0].race, name, metric, unit, values)
        for other in RUNNERS:
            pairs = [(r, o) for r in found for o in by_entrant[other] if r.race.seed == o.race.seed]
            if other == name or not pairs:
                continue
            for metric in ("s / iteration", "s / 1000 rollouts"):
                mine, theirs = (
                    [x.metrics[metric] for x in side] for side in zip(*pairs, strict=True)
                )
                share = ratios(mine, theirs)
                yield _row(found[0].race, name, f"{metric} / {other}", "1", share)


def columns(found: Sequence[Result]) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    """Metric, unit and values over seeds."""
    for metric in ("s / iteration", "s / 1000 rollouts"):
        yield metric, "s", tuple(r.metrics[metric] for r in found)
    for level in LEVELS:
        times = tuple(seconds_to(r, level) for r in found)
        yield f"success {level:g} reached", "1", (sum(map(math.isfinite, times)) / len(times),)
        if all(map(math.isfinite, times)):
            yield f"device-seconds to success {level:g}", "s", times
    budget = found[0].race.budget
    for name in ("sampled", "greedy"):
        spent = [[budget.spent(p.rollouts, p.seconds) for p in r.curve] for r in found]
        ends = [np.interp(1.0, x, [getattr(p, name) for p in r.curve])
                for x, r in zip(spent, found, strict=True)]  # fmt: skip
        yield f"success, {name}", "1", tuple(map(float, ends))
    yield "success, sampled, before", "1", tuple(r.curve[0].sampled for r in found)


def _row(race: Race, provider: str, metric: str, unit: str, values: Sequence[float]) -> Measured:
    config = {"warm_steps": race.warm_steps, **asdict(race.budget)}
    case = f"train/{race.task} rollouts={race.budget.rollouts}"
    return Measured(case, provider, metric, unit, tuple(values), config)


def races(seeds: int, rollouts: int, entrants: Sequence[str]) -> list[Race]:
    """Seeds outside: a slow spell of the machine hits all alike."""
    budget = Budget(rollouts, evaluations=10)
    return [
        Race("calculator", name, (), seed, 600, budget)
        for seed in range(seeds)
        for name in entrants
    ]


def memory(entrants: Sequence[str], rollouts: int) -> Iterator[Measured]:
    peaks = {
        name: peak_bytes(Race("calculator", name, (), 0, 300, MEMORY)) / 2**20 for name in entrants
    }
    shown = Race("calculator", "", (), 0, 300, Budget(rollouts))
    for name, peak in peaks.items():
        yield _row(shown, name, "peak memory", "MiB", (peak,))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("train", __doc__, repeats=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=9600)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no run after it")
    args = command.options(parser, argv)
    entrants = [name for name in RUNNERS if name != PEER or importlib.util.find_spec("trl")]
    if PEER not in entrants:
        print("trl: left out, trl is not installed")
    wanted, begun_s = races(args.seeds, args.rollouts, entrants), time.perf_counter()
    known = [] if args.no_record else [r for r in recorded() if r.race in wanted]
    for race in missing(wanted, known):
        if time.perf_counter() - begun_s > args.limit_s:
            print("time is up: the same command goes on with what is missing")
            return 0
        known.append(raced(race))
        if not args.no_record:
            record(known[-1])
        last = known[-1].curve[-1]
        print(
            f"{race.entrant} seed {race.seed}: {last.sampled:.3f}, {last.seconds:.1f} s", flush=True
        )
    rows = (*measured(known), *memory(entrants, args.rollouts))
    return command.report("train", rows, args)
