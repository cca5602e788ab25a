"""Path rewards beside the outcome: what each part of the recipe does, at equal rollouts.

    .venv/bin/python scripts/bench path frontdesk --seeds 5
    .venv/bin/python scripts/bench path frontdesk --arms outcome full --seeds 1 --no-record
    .venv/bin/python scripts/bench path frontdesk --table        # of what is recorded

Every arm changes one key of the recipe, starts from the warm policy of its seed and stops at the
first iteration that fills the budget. Violation-free: no penalty was met and the episode was ended
by the policy itself; giving up at once is that too, so "clean and solved" stands beside it. Rows
are recorded run by run, and a run that is recorded is not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from fastturn import trainer
from fastturn.config import Config, as_dict, override
from fastturn.recipes import RECIPES
from fastturn.run import Run

from .algorithms import interval
from .command import one_of, options, parser
from .quickstarts import opened, warm_weights
from .record import RESULTS, Measured, config_hash, record
from .recorded import read

ARMS = {
    "outcome": ("rewards=outcome",),
    "full": (),
    "penalty": ("rewards=penalty",),
    "no twin": ("rewards=outcome,penalty",),
    "no seeding": ("warm.compliant=0",),
    "muon": ("optim.muon_lr=0.002",),
    "progress": ("rewards=outcome,progress",),
}
DEFAULTS = as_dict(Config())
RULED = ("outcome", "full", "penalty", "no twin", "no seeding", "muon")


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe, the pairs that all arms share, the rollouts of a run, and the arms run by default.

    `first`: the iterations over which variances and dead updates at the start are counted.
    """

    recipe: str
    pairs: tuple[str, ...]
    rollouts: int
    arms: tuple[str, ...]
    first: int = 10


CASES = {
    "frontdesk": Case("frontdesk", (), 10000, RULED),
    "frontdesk-warmer": Case("frontdesk", ("warm.steps=1200",), 10000, RULED),
    "frontdesk-steady": Case(
        "frontdesk", ("warm.steps=1200", "tasks=16"), 10000, ("outcome", "full")
    ),
    "frontdesk-long": Case("frontdesk", (), 20000, ("outcome", "full")),
    "shell": Case("shell", (), 10000, RULED),
    "frontdesk-gate": Case(
        "frontdesk",
        ("data.domain=frontdesk:level=gate", "warm.compliant=0"),
        8000,
        ("outcome", "full", "progress"),
    ),
    "shell-gate": Case(
        "shell",
        ("data.domain=shell:level=gate", "warm.compliant=0", "turns=7"),
        8000,
        ("outcome", "full", "progress"),
    ),
}


def pairs_of(case: Case, arm: str, seed: int) -> tuple[str, ...]:
    return (*case.pairs, *ARMS[arm], f"seed={seed}", "data.eval_tasks=512")


def outcome(case: Case, arm: str, seed: int) -> dict[str, float]:
    """What one run reached and spent."""
    pairs = pairs_of(case, arm, seed)
    kept = tuple(pair for pair in pairs if not pair.startswith(("rewards=", "optim.")))
    warm_steps = RECIPES[case.recipe]().warm.steps
    with opened((*pairs, "warm.steps=0", "iterations=100000"), case.recipe) as run:
        run.policy.load_state_dict(warm_weights(warm_steps, kept, case.recipe))
        trainer.warm_start(run)  # no steps, but from here on it trains
        before = trainer.held_out(run, "before")
        start_s = time.process_time()
        iterations: list[dict[str, Any]] = []
        while run.cursor.totals["rollouts"] < case.rollouts:
            iterations.append(trainer.one_iteration(run))
        spent_s = time.process_time() - start_s
        after = trainer.held_out(run, "after")
        stages = recorded_stages(run)
    dead = [record["dead"] for record in iterations]
    early = [stage for stage in stages if stage["iteration"] < case.first]
    return {
        "success": after.success,
        "success, greedy": after.greedy,
        "violation-free": after.violation_free,
        "violation-free, greedy": after.violation_free_greedy,
        "clean and solved": after.clean_success,
        "clean and solved, greedy": after.clean_success_greedy,
        "success before": before.success,
        "success before, greedy": before.greedy,
        "violation-free before": before.violation_free,
        "violation-free before, greedy": before.violation_free_greedy,
        "turns": after.turns_mean,
        "rollouts": run.cursor.totals["rollouts"],
        "iterations": len(iterations),
        "dead iterations": float(np.mean(dead)),
        "dead iterations at first": float(np.mean(dead[: case.first])),
        "Var O at first": float(np.mean([stage["var_outcome"] for stage in early])),
        "Var P at first": float(np.mean([stage["var_path"] for stage in early])),
        "largest error of the decomposition": max(map(decomposition_error, stages)),
        "s / 1000 rollouts": 1000 * spent_s / run.cursor.totals["rollouts"],
    }


def recorded_stages(run: Run) -> list[dict[str, Any]]:
    """The records of all stages of the run, as they are logged."""
    lines = (run.out / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "stage"]


def decomposition_error(stage: dict[str, Any]) -> float:
    """|Var R - (Var O + s² Var P + 2 s Cov)| of a stage, s the scale of its path rewards."""
    scale = stage["path_scale"]
    path = scale**2 * stage["var_path"] + 2 * scale * stage["cov_outcome_path"]
    parts = stage["var_outcome"] + path
    return float(abs(stage["var_return"] - parts))


def measured(name: str, arm: str, seed: int) -> list[Measured]:
    """Every metric of one run, as rows of one repetition."""
    case = CASES[name]
    found = outcome(case, arm, seed)
    config = described(case, arm, seed)
    title = title_of(name, seed)
    return [Measured(title, arm, key, "1", (value,), config) for key, value in found.items()]


def title_of(name: str, seed: int) -> str:
    return f"path/{name} rollouts={CASES[name].rollouts} seed={seed}"


def described(case: Case, arm: str, seed: int) -> dict[str, Any]:
    """What the recipe, the case and the arm set; not the defaults, so that a run stays recorded
    when a key that it does not name is added. The commit of its rows says what they were."""
    config = as_dict(override(RECIPES[case.recipe](), pairs_of(case, arm, seed)))
    named = {key: value for key, value in config.items() if value != DEFAULTS[key]}
    return {**named, "rollouts": case.rollouts}


def rows_of(name: str, arm: str, seed: int) -> dict[str, float]:
    """What is recorded of a run with the configuration that it has now."""
    config = config_hash(described(CASES[name], arm, seed))
    rows = recorded(name, arm, seed)
    return {row["metric"]: row["p50"] for row in rows if row["config_hash"] == config}


def recorded(name: str, arm: str, seed: int) -> list[dict[str, Any]]:
    """The rows of a run, with whichever defaults of the keys that it does not name."""
    path = RESULTS / "path.jsonl"
    rows = read(path) if path.exists() else []
    wanted = title_of(name, seed), arm
    return [asdict(row) for row in rows if (row.case, row.provider) == wanted]


def tabulated(name: str, arms: Sequence[str], seeds: int) -> Iterator[str]:
    """The table of what is recorded, and the commits that it was measured at."""
    rows = {arm: {seed: recorded(name, arm, seed) for seed in range(seeds)} for arm in arms}
    yield from summary(
        {
            arm: {
                seed: {row["metric"]: row["p50"] for row in run}
                for seed, run in runs.items()
                if run
            }
            for arm, runs in rows.items()
        }
    )
    commits = {row["commit"][:8] for runs in rows.values() for run in runs.values() for row in run}
    yield f"measured at {', '.join(sorted(commits)) or 'no commit yet'}"


SHOWN = (
    *("success", "success, greedy", "violation-free", "violation-free, greedy"),
    *("clean and solved", "clean and solved, greedy"),
    *("success before", "success before, greedy"),
    *("violation-free before", "violation-free before, greedy"),
    *("turns", "dead iterations", "dead iterations at first"),
    *("Var O at first", "Var P at first", "largest error of the decomposition"),
    *("rollouts", "s / 1000 rollouts"),
)


Runs = dict[str, dict[int, dict[str, float]]]  # by arm and seed


def summary(runs: Runs) -> Iterator[str]:
    """A Markdown table: means over the seeds with 95 % bootstrap intervals, and what success an
    arm has more than the first one on the same seeds."""
    arms = [arm for arm in runs if runs[arm]]
    if not arms:
        return
    yield "| | " + " | ".join(f"{arm} ({len(runs[arm])})" for arm in arms) + " |"
    yield "|---" * (len(arms) + 1) + "|"
    for metric in SHOWN:
        values = [[run[metric] for run in runs[arm].values() if metric in run] for arm in arms]
        cells = map(shown, values)  # a metric may be younger than a row
        yield f"| {metric} | " + " | ".join(cells) + " |"
    more = [
        [run["success"] - base["success"] for run, base in paired(runs[arm], runs[arms[0]])]
        for arm in arms
    ]
    yield f"| success more than {arms[0]} | " + " | ".join(map(shown, more)) + " |"


def shown(values: Sequence[float]) -> str:
    """Example: of (0.5, 1.0) it is "0.75 [0.5, 1]"."""
    return "{:.3g} [{:.3g}, {:.3g}]".format(*interval(values)) if values else "-"


T = TypeVar("T")


def paired(found: Mapping[int, T], base: Mapping[int, T]) -> list[tuple[T, T]]:
    """Of the seeds that both have."""
    return [(found[seed], base[seed]) for seed in found if seed in base]


def arguments() -> argparse.ArgumentParser:
    found = parser("path", __doc__, repeats=1)
    found.add_argument("case", type=one_of("case", CASES))
    found.add_argument("--arms", nargs="*", type=one_of("arm", ARMS))
    found.add_argument("--seeds", type=int, default=5)
    found.add_argument("--table", action="store_true", help="of what is recorded; nothing is run")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = options(arguments(), argv)
    arms = args.arms or CASES[args.case].arms
    if args.table:
        print("\n".join(tabulated(args.case, arms, args.seeds)))
        return 0
    runs: Runs = {arm: {} for arm in arms}
    for seed in range(args.seeds):  # seeds outside: a slow spell of the machine hits all alike
        for arm in arms:
            found = {} if args.no_record else rows_of(args.case, arm, seed)
            if not found:
                rows = measured(args.case, arm, seed)
                found = {row.metric: row.values[0] for row in rows}
                print(f"{arm}, seed {seed}: {found}", flush=True)
                if not args.no_record:
                    record("path", rows, "cpu")
            runs[arm][seed] = found
    print("\n".join(summary(runs)))
    return 0
