"""One training run of an algorithm, measured: what it reached by when, and what that cost.

    entrant (algorithm, settings) x task x seed -> Result, one line of results/races.jsonl

All entrants of a seed start from the same warm policy. Seconds are CPU seconds of this process,
with the sampler in it, so they are device-seconds of one core; warm start and evaluations are not
in them. Their parts are spans of the meter, wall-clock: on a busy machine they add up to more.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastturn import trainer
from fastturn.config import Config, ConfigError, override
from fastturn.evaluate import Evaluation
from fastturn.recipes import quickstart
from fastturn.run import Run

from .full_history import FullHistory
from .quickstarts import opened, warm_weights
from .record import RESULTS, git, require_clean
from .recorded import ForeignRow

RACES = RESULTS / "races.jsonl"
WORKSHOP = (
    "context=strip_think",
    "turns=7",
    "sampling.episode_tokens=224",
    "model.max_context=512",
)
TASKS: Mapping[str, tuple[str, ...]] = {
    "calculator": (),
    "workshop": ("data.domain=workshop:flaws=0.25", *WORKSHOP),
    "workshop-market": (
        "data.domain=workshop:flaws=0.25,market=12,take=1",
        *WORKSHOP,
        "turns=8",
        "sampling.episode_tokens=256",
    ),
    "workshop-prices": ("data.domain=workshop:flaws=0.25,prices=1000", *WORKSHOP),
    "workshop-rare": ("data.domain=workshop:flaws=0.15", *WORKSHOP),
}
# Settings that no warm start reads.
TRAINING = ("optim.", "loss.", "algorithm_options=", "group_size=", "tasks=", "trunks=")
SHOWN = ("calculator", "workshop")  # what is compared when no task is named
# What the time of a span is spent on; the rest of an iteration is "other".
PARTS = {
    "sampling": ("trunk_decode", "sibling_decode", "environment", "prefill"),
    "training": ("pack", "score", "forward_backward", "optimizer"),
    "publish": ("publish",),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """Until when a run trains: the first iteration that fills either of them. `evaluations`: how
    often success is measured on the way, evenly by rollouts (by seconds without a limit on these).
    `ConfigError` for a budget that nothing fills.

    Example: `Budget(rollouts=9600)`.
    """

    rollouts: int = 0
    seconds: float = 0.0
    evaluations: int = 5
    eval_tasks: int = 256

    def __post_init__(self) -> None:
        limits = self.rollouts, self.seconds
        if not all(0 <= limit < math.inf for limit in limits) or not any(limits):
            raise ConfigError(
                f"rollouts={self.rollouts} seconds={self.seconds:g}: such a run would never end; "
                f"expected finite limits, one above 0 and the other 0 (no limit) or more"
            )
        if self.evaluations < 1:
            raise ConfigError(f"evaluations={self.evaluations}: expected 1 or more")

    def spent(self, rollouts: float, seconds: float) -> float:
        """The share that is used up."""
        by_rollouts = rollouts / self.rollouts if self.rollouts else 0.0
        by_seconds = seconds / self.seconds if self.seconds else 0.0
        return max(by_rollouts, by_seconds)


@dataclass(frozen=True, slots=True)
class Race:
    """What is run. `entrant`: an algorithm, or `name/full_history`; `settings`: overrides beyond
    the task's own. Example: `Race("workshop", "rtpo", ("optim.lr=1e-3",), 0, 300, Budget(5000))`.
    """

    task: str
    entrant: str
    settings: tuple[str, ...]
    seed: int
    warm_steps: int
    budget: Budget

    @property
    def algorithm(self) -> str:
        name = self.entrant.partition("/")[0]
        return "grpo" if name == "trl" else name  # TRL's trainer runs GRPO

    @property
    def name(self) -> str:
        """How a table calls it. Example: "rtpo optim.lr=1e-3"."""
        return " ".join((self.entrant, *self.settings))

    @property
    def pairs(self) -> tuple[str, ...]:
        """All that it sets beyond the recipe, the algorithm excepted."""
        fixed = (f"seed={self.seed}", f"data.eval_tasks={self.budget.eval_tasks}")
        return (*TASKS[self.task], *fixed, *self.settings)

    def config(self) -> Config:
        """`ConfigError` for settings that cannot work, or that would make it another race."""
        for pair in self.settings:
            if not pair.startswith(TRAINING):
                raise ConfigError(
                    f"{pair}: entrants of a race share task, seed, budget and warm policy; "
                    f"expected settings that only training reads: {', '.join(TRAINING)}"
                )
        fixed = (f"algorithm={self.algorithm}", f"warm.steps={self.warm_steps}")
        return override(quickstart(), (*fixed, *self.pairs))


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out success at one moment."""

    rollouts: int
    seconds: float
    sampled: float
    greedy: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a race came to; `metrics` are numbers of the whole run."""

    race: Race
    curve: tuple[Point, ...]
    metrics: Mapping[str, float]


@contextmanager
def warmed(race: Race) -> Iterator[Run]:
    """An open run with the warm policy of the race's seed."""
    endless = ("warm.steps=0", "iterations=100000")
    with opened((f"algorithm={race.algorithm}", *race.pairs, *endless)) as run:
        before = tuple(pair for pair in race.pairs if not pair.startswith(TRAINING))
        run.policy.load_state_dict(warm_weights(race.warm_steps, before))
        trainer.warm_start(run)  # no steps, but from here on it trains
        if race.entrant.endswith("/full_history"):
            run.learner = FullHistory(run)
        yield run


def raced(race: Race) -> Result:
    """Run it."""
    with warmed(race) as run:
        return trained(run, race)


def trained(run: Run, race: Race) -> Result:
    """From the warm policy to the end of the budget."""
    before, found = spans(run), trainer.held_out(run, "before")
    records, curve = [], [point(0, 0.0, found)]
    spent_s = share = 0.0
    while share < 1:
        start_s = time.process_time()
        records.append(trainer.one_iteration(run))
        spent_s += time.process_time() - start_s
        drawn = run.cursor.totals["rollouts"]
        share = race.budget.spent(drawn, spent_s)
        if share >= min(1, len(curve) / race.budget.evaluations):
            found = trainer.held_out(run, "during")
            curve.append(point(drawn, spent_s, found))
    used = spans(run)
    used.subtract(before)
    calls = {"tool calls": found.tool_calls_mean, "turns": found.turns_mean}
    return Result(race, tuple(curve), calls | metrics(run, records, used, spent_s))


def spans(run: Run) -> Counter[str]:
    """Nanoseconds by span until now."""
    return Counter(run.meter.state()["spans_ns"])


def point(rollouts: int, seconds: float, found: Evaluation) -> Point:
    return Point(rollouts, seconds, found.success, found.greedy)


def metrics(
    run: Run, records: Sequence[Mapping[str, Any]], spans_ns: Mapping[str, int], spent_s: float
) -> dict[str, float]:
    """Of all iterations together; what nothing was measured of is left out."""
    totals = run.cursor.totals
    drawn = totals["rollouts"]
    solved = sum(r["success"] * r["rollouts"] for r in records)
    tokens = sum(r["action_tokens_mean"] * r["rollouts"] for r in records)
    cut = sum(r["endings"].get("truncated", 0) for r in records)
    scored = totals["actions_first"]
    parts = {name: sum(spans_ns[span] for span in of) / 1e9 for name, of in PARTS.items()}
    return {
        "s / 1000 rollouts": 1000 * spent_s / drawn,
        "s / iteration": spent_s / len(records),
        **{f"s / 1000 rollouts, {name}": 1000 * s / drawn for name, s in parts.items()},
        "zero advantage": totals["groups_silent"] / max(1, totals["groups"]),
        **({"tokens / success": tokens / solved} if solved else {}),
        "truncated": cut / drawn,
        **({"log ratio": totals["log_ratio_sum"] / scored} if scored else {}),
        "tokens packed / rollout": totals["tokens_packed"] / drawn,
        "iterations": len(records),
    }


def recorded(path: Path = RACES) -> list[Result]:
    """Everything in the file. `ForeignRow` names a line that is no result."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(_result(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ForeignRow(
                f"{path}, line {number}: expected the result of a race ({type(error).__name__}: "
                f"{error}); restore the file, or delete the line and run its race again"
            ) from error
    return found


def _result(text: bytes) -> Result:
    line = json.loads(text)
    race = dict(line["race"])
    race["settings"] = tuple(race["settings"])
    race["budget"] = Budget(**race["budget"])
    curve = tuple(Point(**point) for point in line["curve"])
    return Result(Race(**race), curve, line["metrics"])


def record(result: Result, path: Path = RACES) -> None:
    """Append a line, with the commit that ran; `DirtyTree` when the tree is not that commit."""
    require_clean()
    line = {**asdict(result), "commit": git("rev-parse", "HEAD")}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def missing(races: Sequence[Race], known: Sequence[Result]) -> Iterator[Race]:
    """Those that nothing is recorded of."""
    done = {result.race for result in known}
    return (race for race in races if race not in done)
