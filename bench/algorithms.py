"""Algorithms at an equal number of rollouts: what they reach, what it costs, where the time went.

    .venv/bin/python scripts/bench algorithms rtpo grpo --seeds 5 --rollouts 9600 --no-record

Every algorithm of one seed starts from the same warm policy and stops at the first iteration that
fills the budget; evaluation and warm start are not counted. Seconds are those of this process, with
the sampler in it, so they are device-seconds of one core.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fastturn import trainer
from fastturn.algorithms import ALGORITHMS
from fastturn.run import Run

from .command import one_of, options, parser, report
from .quickstarts import opened, warm_weights
from .record import Measured

# What the time of a span is spent on; the rest of an iteration is "other".
PARTS = {
    "sampling": ("trunk_decode", "sibling_decode", "environment", "prefill"),
    "training": ("pack", "score", "forward_backward", "optimizer"),
    "publish": ("publish",),
}


def outcome(algorithm: str, seed: int, rollouts: int, warm_steps: int) -> dict[str, float]:
    """What one run reached and spent."""
    pairs = (f"algorithm={algorithm}", f"seed={seed}", "warm.steps=0", "data.eval_tasks=256")
    with opened((*pairs, "iterations=100000")) as run:
        run.policy.load_state_dict(warm_weights(warm_steps, seed))
        trainer.warm_start(run)  # no steps, but from here on it trains
        before, start_s = spans(run), time.process_time()
        records: list[dict[str, Any]] = []
        while run.cursor.totals["rollouts"] < rollouts:
            records.append(trainer.one_iteration(run))
        spent_s = time.process_time() - start_s
        after = spans(run)
        after.subtract(before)
        reached = trainer.held_out(run, "after")
        totals = run.cursor.totals
    share = {name: sum(after[span] for span in of) / 1e9 for name, of in PARTS.items()}
    drawn = totals["rollouts"]
    solved = sum(r["success"] * r["rollouts"] for r in records)
    tokens = sum(r["action_tokens_mean"] * r["rollouts"] for r in records)
    cut = sum(r["endings"].get("truncated", 0) for r in records)
    return {
        "success, sampled": reached.success,
        "success, greedy": reached.greedy,
        "rollouts": drawn,
        "iterations": len(records),
        "s / 1000 rollouts": 1000 * spent_s / drawn,
        **{f"s / 1000 rollouts, {name}": 1000 * s / drawn for name, s in share.items()},
        "silent groups": totals["groups_silent"] / max(1, totals["groups"]),
        "tokens packed / rollout": totals["tokens_packed"] / drawn,
        "tokens / success": tokens / max(1.0, solved),
        "truncated": cut / drawn,
    }


def spans(run: Run) -> Counter[str]:
    """Nanoseconds by span until now."""
    return Counter(run.meter.state()["spans_ns"])


def measure(names: Sequence[str], seeds: int, rollouts: int, warm_steps: int) -> Iterator[Measured]:
    """Every metric of every algorithm over the seeds, and its cost beside the first one's."""
    config = {"rollouts": rollouts, "warm_steps": warm_steps}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(seeds):  # seeds outside: a slow spell of the machine hits all alike
        for name in names:
            found[name].append(outcome(name, seed, rollouts, warm_steps))
    case = f"algorithms/quickstart rollouts={rollouts}"
    first = found[names[0]]
    for name in names:
        for metric in first[0]:
            values = tuple(one[metric] for one in found[name])
            yield Measured(case, name, metric, "1", values, config)
        pairs = zip(found[name], first, strict=True)
        cost = tuple(a["s / 1000 rollouts"] / b["s / 1000 rollouts"] for a, b in pairs)
        yield Measured(case, name, f"cost / {names[0]}", "1", cost, config)


def arguments() -> argparse.ArgumentParser:
    found = parser("algorithms", __doc__, repeats=1)
    found.add_argument(
        "names", nargs="*", type=one_of("algorithm", ALGORITHMS), help="the first is the measure"
    )
    found.add_argument("--seeds", type=int, default=5)
    found.add_argument("--rollouts", type=int, default=9600)
    found.add_argument("--warm-steps", type=int, default=600)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = options(arguments(), argv)
    args.device = "cpu"
    names = args.names or ["grpo", "rtpo"]
    rows = measure(names, args.seeds, args.rollouts, args.warm_steps)
    return report("algorithms", rows, args)
