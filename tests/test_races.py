"""Algorithms side by side: what a run's record holds, that it is kept, and what contexts it scores
when it is told to score full histories."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastturn import trainer
from fastturn.bench import algorithms, attribution, races
from fastturn.bench.full_history import FullHistory, with_history
from fastturn.bench.quickstarts import opened
from fastturn.bench.races import Budget, Point, Race, Result
from fastturn.bench.recorded import ForeignRow
from fastturn.demos import demonstrate
from fastturn.render import Renderer

PARITY = Path(__file__).with_name("parity.py")
SMALL = ("model.width=32", "model.layers=1", "tasks=4", "warm.batch=8", "group_size=4")
FORGETS = (f"data.domain={PARITY}:Graded", "turns=3", "context=truncate:12")
TASK = (*races.TASKS["workshop"], *SMALL, "data.eval_tasks=8")
BUDGET = Budget(rollouts=64, evaluations=2, eval_tasks=8)


def race(entrant: str, seed: int = 0) -> Race:
    return Race("parity", entrant, SMALL, seed, 20, BUDGET)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "TASKS", {"parity": FORGETS})
        return {name: races.raced(race(name)) for name in ("rtpo", "grpo", "grpo/full_history")}


def test_a_run_ends_with_its_budget(results):
    for result in results.values():
        rollouts = [point.rollouts for point in result.curve]
        assert rollouts[0] == 0 and rollouts[-1] >= BUDGET.rollouts
        assert all(a < b for a, b in pairwise(rollouts))
        seconds = [point.seconds for point in result.curve]
        assert seconds[0] == 0 and all(a < b for a, b in pairwise(seconds))
        metrics = result.metrics
        parts = sum(metrics[f"s / 1000 rollouts, {part}"] for part in races.PARTS)
        assert parts > 0
        assert all(math.isfinite(value) for value in metrics.values())
        assert 0 <= metrics["zero advantage"] <= 1 and metrics["turns"] >= 1
    first = {result.curve[0].sampled for result in results.values()}
    assert len(first) == 1, "all start from the same policy"


def test_exact_contexts_have_ratio_one_and_full_histories_have_not(results):
    """RTPO eq. 2 and 5: the same rollouts, scored where they were drawn or in the whole history."""
    assert abs(math.exp(results["rtpo"].metrics["log ratio"]) - 1) < 1e-4
    assert abs(math.exp(results["grpo"].metrics["log ratio"]) - 1) < 1e-4
    assert abs(math.exp(results["grpo/full_history"].metrics["log ratio"]) - 1) > 1e-3


@pytest.mark.parametrize("context", ["keep", "strip_think", "truncate:40", "summarise"])
def test_full_histories_keep_everything(context):
    """Every context is the one before it, the action, and the answer; where nothing is forgotten
    they are the contexts that were sampled from, id by id."""
    with opened((*TASK, f"context={context}")) as run:
        tasks = trainer.pick(run, 0, 12, "train")
        shown = demonstrate(run.domain, run.rollout.renderer, tasks, run.config, (0,))
        renderer = Renderer(run.tokenizer, run.domain.tools)
        longer = []
        for task, trajectory in zip(tasks, shown, strict=True):
            whole = with_history(run.domain, renderer, task, trajectory)
            assert [t.completion for t in whole.turns] == [t.completion for t in trajectory.turns]
            running_T = np.empty(0, np.int32)
            for told_T, read_T, turn in zip(
                whole.contexts(), trajectory.contexts(), trajectory.turns, strict=True
            ):
                assert told_T[: len(running_T)].tolist() == running_T.tolist()
                if context == "keep":
                    assert told_T.tolist() == read_T.tolist()
                running_T = np.concatenate([told_T, turn.completion.action_A])
            longer.append(len(told_T) - len(read_T))
        assert max(longer) == 0 if context == "keep" else max(longer) > 0


def test_only_contexts_differ():
    """Where contexts forget nothing, training on full histories is the same training."""
    found = []
    remembers = (*FORGETS[:2], "context=keep", *SMALL, "warm.steps=20", "algorithm=grpo")
    for full in (False, True):
        with opened(remembers) as run:
            trainer.warm_start(run)
            if full:
                run.learner = FullHistory(run)
            trainer.one_iteration(run)
            assert run.cursor.totals["groups_silent"] < run.cursor.totals["groups"]
            found.append({n: v.clone() for n, v in run.policy.state_dict().items()})
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


@pytest.mark.parametrize("way", [w for w in attribution.WAYS if w != "everything"])
def test_what_is_switched_off_changes_the_work_and_not_the_result(way):
    """One stage of one iteration: the same samples and the same step, up to rounding."""
    found = []
    pairs = (*FORGETS[:2], "context=keep", *SMALL, "warm.steps=20", "turns=1", "tasks=8")
    for each in ("everything", way):
        with opened(pairs) as run:
            trainer.warm_start(run)
            with attribution.WAYS[each](run):
                trainer.one_iteration(run)
            totals = run.cursor.totals
            state = {n: v.clone() for n, v in run.policy.state_dict().items()}
            counts = totals["rollouts"], totals["groups_silent"], totals["groups"]
            found.append((counts, totals["tokens_packed"], state))
    (counts, packed, state), (same, others, other) = found
    assert counts == same and 0 < counts[1] < counts[2]
    assert all((state[name] - other[name]).abs().max() < 1e-5 for name in state)
    reads_more = way in ("silent groups trained", "contexts not shared")
    assert others > packed if reads_more else others == packed


def result(entrant: str, seed: int, sampled: float) -> Result:
    metrics = {
        name: 1.0
        for name in ("zero advantage", "tool calls", "tokens / success", "truncated", "log ratio")
    }
    curve = (Point(0, 0.0, 0.2, 0.3), Point(64, 2.0, sampled, 0.9))
    return Result(race(entrant, seed), curve, metrics | {"s / 1000 rollouts": 4.0 - seed})


def test_results_are_kept_and_never_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(races, "require_clean", lambda: None)
    path = tmp_path / "races.jsonl"
    assert races.recorded(path) == []
    kept = [result("rtpo", 0, 0.5), result("grpo", 0, 0.25)]
    for one in kept:
        races.record(one, path)
    assert races.recorded(path) == kept
    wanted = [race("rtpo"), race("rtpo", 1), race("grpo"), replace(race("grpo"), settings=())]
    assert list(races.missing(wanted, kept)) == [wanted[1], wanted[3]]


@pytest.mark.parametrize("damage", ["{", "[]", '{"race": {}}', '{"race": 3}', "null"])
def test_a_damaged_line_is_named(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(races, "require_clean", lambda: None)
    path = tmp_path / "races.jsonl"
    races.record(result("rtpo", 0, 0.5), path)
    path.write_text(path.read_text() + damage + "\n")
    with pytest.raises(ForeignRow, match=r"races\.jsonl, line 2: expected the result of a race"):
        races.recorded(path)


def test_the_table_compares_within_seeds():
    results = [result("grpo", 0, 0.25), result("rtpo", 0, 0.5)]
    results += [result("grpo", 1, 0.5), result("rtpo", 1, 0.75), result("rtpo", 2, 0.5)]
    rows = dict(algorithms.compared(results, results[0].race.name))
    first, second = (rows[race(name).name] for name in ("grpo", "rtpo"))
    assert first["more than first"] == (0,) and first["cost / first"] == (1,)  # of two seeds
    assert second["more than first"] == (0.25,)
    mean, low, high = second["sampled"]  # of three
    assert mean == pytest.approx(1.75 / 3) and low == 0.5 and high == 0.75
    table = algorithms.markdown(results, results[0].race.name).splitlines()
    assert len(table) == 4 and {line.count("|") for line in table} == {table[0].count("|")}
    assert "| 0.583 [0.500, 0.750] |" in table[3] and "| 0.250 | 1.000 |" in table[3]
    assert table[2].startswith(f"| {race('grpo').name} (2) |")
    assert table[3].startswith(f"| {race('rtpo').name} (3) |")
    few = algorithms.markdown(results, results[0].race.name, ("sampled",))
    assert few.splitlines()[0] == "| entrant (seeds) | sampled |"


def test_what_was_not_measured_is_blank():
    """Nothing was solved and nothing scored: no tokens a success, no ratio."""
    some, none = result("grpo", 0, 0.25), result("rtpo", 0, 0.0)
    gone = ("tokens / success", "log ratio")
    none = replace(none, metrics={k: v for k, v in none.metrics.items() if k not in gone})
    head, _, first, second = algorithms.markdown([some, none], some.race.name).splitlines()
    shown = {
        name: (a.strip(), b.strip())
        for name, a, b in zip(
            *(line.split("|")[1:-1] for line in (head, first, second)), strict=True
        )
    }
    assert shown[" tokens / success "] == ("1", "")
    assert shown[" ratio "] == ("2.7183", "")


def test_entrants_are_compared_at_the_budget_itself():
    """However far beyond it their last iteration went."""
    one = result("rtpo", 0, 0.5)
    points = (Point(0, 0.0, 0.2, 0.3), Point(48, 2.0, 0.4, 0.6), Point(80, 4.0, 0.6, 0.8))
    late = replace(one, curve=points)
    assert algorithms.at_budget(late) == pytest.approx(0.5)
    assert algorithms.at_budget(late, "greedy") == pytest.approx(0.7)
    assert algorithms.at_budget(late, "seconds") == pytest.approx(3.0)
    assert algorithms.at_budget(one) == 0.5


def test_intervals_cover_what_they_should():
    """Of 400 samples of 20 normal values, the 95 % interval misses the truth in 2 % to 11 %."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        _, low, high = algorithms.interval(rng.normal(3.0, 2.0, 20))
        missed += not low <= 3.0 <= high
    assert 0.02 < missed / 400 < 0.11
    assert algorithms.interval([0.5]) == (0.5, 0.5, 0.5)


def test_the_picture_is_drawn():
    results = [result("grpo", 0, 0.25), result("rtpo", 0, 0.5), result("rtpo", 1, 0.75)]
    text = algorithms.plotted(results)
    for said in ("device-seconds", "rollouts", results[0].race.name, results[1].race.name):
        assert f">{said}<" in text
    assert algorithms.plotted(results) == text


@pytest.mark.parametrize(
    ("spent", "share"), [((2400, 1.0), 0.5), ((480, 9.0), 0.9), ((0, 0.0), 0.0)]
)
def test_a_budget_is_spent_by_what_is_used_up_first(spent, share):
    assert Budget(rollouts=4800, seconds=10.0).spent(*spent) == share


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "--rollouts", "0"], "would never end"),
        (["grpo", "--rollouts", "0", "--seconds", "-1"], "would never end"),
        (["grpo", "--rollouts", "0", "--seconds", "inf"], "would never end"),
        (["grpo", "--seconds", "nan"], "would never end"),
        (["grpo seed=4"], "seed=4: entrants of a race share task, seed, budget and warm policy"),
        (["grpo algorithm=rtpo"], "algorithm=rtpo: entrants of a race share"),
        (["grpo data.domain=shell"], "data.domain=shell: entrants of a race share"),
        (["--evaluations", "0"], "evaluations=0: expected 1 or more"),
        (["--warm-steps", "-1"], "warm.steps=-1: expected zero or more"),
        (["--plot", __file__], "File exists"),
        (["grop"], "unknown entrant grop: expected any of rtpo"),
        (["grpo optim.rate=1"], "unknown key 'optim.rate'"),
        (["grpo", "rtpo group_size=2"], "group_size=2: rtpo needs at least 3"),
        (["--seeds", "4-3"], r"expected how many seeds (5: 0 to 4), or the first and the last"),
        (["--seeds", "few"], "'few': expected how many seeds"),
        (["--seeds", "0"], "'0': expected how many seeds"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(capsys, monkeypatch, words, message):
    monkeypatch.setattr(algorithms, "raced", lambda race: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        algorithms.main([*words, "--no-record"])
    assert message in capsys.readouterr().err


def test_entrants_and_seeds_are_those_that_are_named(capsys, monkeypatch):
    ran = []

    def raced(race: Race) -> Result:
        ran.append((race.name, race.seed))
        return replace(result("rtpo", race.seed, 0.5), race=race)

    monkeypatch.setattr(algorithms, "raced", raced)
    named = ["rtpo optim.lr=1e-3", "grpo"]
    options = ["--task", "workshop", "--seeds", "10-11", "--no-record"]
    assert algorithms.main([*named, *options]) == 0
    assert ran == [(name, seed) for seed in (10, 11) for name in named]
    shown = capsys.readouterr().out
    assert "| rtpo optim.lr=1e-3 (2) |" in shown and "| grpo (2) |" in shown
    assert algorithms.seeds("3") == (0, 1, 2)


def test_one_warm_start_serves_all_rates(monkeypatch):
    """What only training reads is no part of what the warm start is known by."""
    asked = []

    def weights(steps, pairs):
        asked.append((steps, pairs))
        raise InterruptedError

    monkeypatch.setattr(races, "warm_weights", weights)
    for settings in ((), ("optim.lr=1e-3",), ("loss.epochs=2", "tasks=9", "group_size=3")):
        one = Race("workshop", "grpo", settings, 0, 20, BUDGET)
        with pytest.raises(InterruptedError), races.warmed(one):
            pass
    assert len(set(asked)) == 1
    assert races.TASKS["workshop"][0] in asked[0][1] and "seed=0" in asked[0][1]
