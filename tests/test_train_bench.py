"""Training beside TRL: rows follow from recorded runs, and TRL's run is what ours is."""

from __future__ import annotations

import math

import pytest

from fastturn.bench import train
from fastturn.bench.races import Budget, Point, Race, Result

SMALL = ("tasks=4", "warm.batch=8", "group_size=4")


def result(entrant: str, seed: int, seconds: float, end: float) -> Result:
    race = Race("calculator", entrant, (), seed, 600, Budget(1000, evaluations=2))
    curve = (
        Point(0, 0.0, 0.5, 0.6),
        Point(500, seconds / 2, 0.6, 0.7),
        Point(1000, seconds, end, 0.9),
    )
    metrics = {"s / iteration": seconds / 10, "s / 1000 rollouts": seconds}
    return Result(race, curve, metrics)


def test_seconds_to_a_level_lie_between_two_evaluations() -> None:
    found = result("grpo", 0, 40.0, 0.8)
    assert train.seconds_to(found, 0.7) == pytest.approx(30.0)
    assert train.seconds_to(found, 0.55) == pytest.approx(10.0)
    assert train.seconds_to(found, 0.4) == 0.0
    assert train.seconds_to(found, 0.9) == math.inf


def test_rows_compare_runs_of_one_seed() -> None:
    results = [result("grpo", seed, 10.0 + seed, 0.82) for seed in (0, 1)]
    results += [result("trl", seed, 40.0 + 4 * seed, 0.72) for seed in (1, 0)]
    rows = {(m.provider, m.metric): m.values for m in train.measured(results)}
    assert rows["grpo", "s / iteration / trl"] == (0.25, 0.25)
    assert rows["trl", "s / iteration / grpo"] == (4.0, 4.0)
    assert rows["grpo", "success 0.8 reached"] == (1.0,)
    assert rows["trl", "success 0.8 reached"] == (0.0,)
    assert ("trl", "device-seconds to success 0.8") not in rows
    assert rows["trl", "success, sampled"] == (0.72, 0.72)
    assert not any(provider == "rtpo" for provider, _ in rows)


@pytest.mark.slow
def test_trl_trains_the_same_policy_on_the_same_tasks() -> None:
    pytest.importorskip("trl")
    budget = Budget(rollouts=48, evaluations=1, eval_tasks=24)
    ours, theirs = (
        train.raced(Race("calculator", name, SMALL, 0, 600, budget)) for name in ("grpo", "trl")
    )
    assert theirs.curve[0] == ours.curve[0]  # the same warm policy, measured in the same way
    assert theirs.curve[-1].rollouts == ours.curve[-1].rollouts == 48
    assert all(one.sampled > 0 for found in (ours, theirs) for one in found.curve)
    assert theirs.curve[-1].seconds > 0 and theirs.metrics["iterations"] == 3
    assert theirs.metrics["turns"] >= 1
    with pytest.raises(ValueError, match="task workshop: TRL runs here with the calculator"):
        train.raced(Race("workshop", "trl", SMALL, 0, 1, budget))
