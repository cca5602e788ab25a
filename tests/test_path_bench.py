"""Benchmark "path": what its arms are, what is recorded, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastturn import trainer
from fastturn.bench import path
from fastturn.bench.quickstarts import opened
from fastturn.bench.record import rows
from fastturn.channels import PATIENCE
from fastturn.config import as_dict, override
from fastturn.recipes import RECIPES


@pytest.mark.parametrize("name", path.CASES)
def test_an_arm_changes_one_key_of_the_recipe(name: str) -> None:
    case = path.CASES[name]
    shared = as_dict(override(RECIPES[case.recipe](), path.pairs_of(case, "full", 0)))
    for arm in case.arms:
        config = as_dict(override(RECIPES[case.recipe](), path.pairs_of(case, arm, 0)))
        differs = [key for key in config if config[key] != shared[key]]
        assert len(differs) == (arm != "full"), f"{arm} changes {differs}"


def test_a_recorded_run_is_found_again_until_its_configuration_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "RESULTS", tmp_path)
    monkeypatch.setattr(path, "outcome", lambda case, arm, seed: {"success": 0.25 + seed})
    assert path.rows_of("frontdesk", "full", 1) == {}
    found = rows("path", path.measured("frontdesk", "full", 1), "cpu")
    lines = [json.dumps({name: getattr(row, name) for name in row.__slots__}) for row in found]
    (tmp_path / "path.jsonl").write_text("\n".join(lines))
    assert path.rows_of("frontdesk", "full", 1) == {"success": 1.25}
    assert path.rows_of("frontdesk", "outcome", 1) == path.rows_of("frontdesk", "full", 0) == {}
    monkeypatch.setitem(path.ARMS, "full", ("optim.lr=1e-2",))
    assert path.rows_of("frontdesk", "full", 1) == {}


def test_the_table_has_means_with_intervals_and_differences_within_seeds() -> None:
    runs: path.Runs = {
        "outcome": {seed: dict.fromkeys(path.SHOWN, 0.5) for seed in (0, 1)},
        "full": {1: dict.fromkeys(path.SHOWN, 0.75), 2: dict.fromkeys(path.SHOWN, 1.0)},
        "penalty": {},
    }
    head, rule, first, *_, last = path.summary(runs)
    assert head == "| | outcome (2) | full (2) |" and rule == "|---|---|---|"
    assert first == "| success | 0.5 [0.5, 0.5] | 0.875 [0.75, 1] |"
    assert last == "| success more than outcome | 0 [0, 0] | 0.25 [0.25, 0.25] |"


def test_the_variances_of_a_stage_add_up() -> None:
    """Var R = Var O + Var P + 2 Cov: outcomes (1, 0) and path returns (-.25, 0)."""
    stage = {"var_outcome": 0.25, "var_path": 0.015625, "cov_outcome_path": -0.0625}
    stage["path_scale"] = 1.0
    assert path.decomposition_error({**stage, "var_return": 0.140625}) == 0.0
    assert path.decomposition_error({**stage, "var_return": 0.25}) == 0.109375
    halved = {**stage, "path_scale": 0.5, "var_return": 0.19140625}
    assert path.decomposition_error(halved) == 0.0


@pytest.mark.parametrize("recipe", ["frontdesk", "shell"])
def test_recipes_with_house_rules_train_both_channels(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run: demonstrations are imitated, rules are met, and a step is taken."""
    small = ("warm.steps=30", "tasks=6", "data.eval_tasks=8", "iterations=1", "warm.batch=16")
    with opened(small, recipe) as run:
        trainer.warm_start(run)
        record = trainer.one_iteration(run)
        run.cursor.streak = PATIENCE + 2
        faded = trainer.one_iteration(run)["iteration"]
        assert run.cursor.streak == 0  # nothing asks for it: path rewards are whole again
        monkeypatch.setattr(trainer, "held", lambda violation_free, anneal: True)
        trainer.one_iteration(run)
        assert run.cursor.streak == 1
        stages = path.recorded_stages(run)
        lines = map(json.loads, (run.out / "records.jsonl").read_text().splitlines())
        shown = [line for line in lines if line["kind"] == "warm"]
    assert {s["path_scale"] for s in stages if s["iteration"] == faded} == {0.25}
    assert [line["demonstrations"] for line in shown] == [160, 320, 480]
    assert all(line["clean_success"] <= line["violation_free"] < 1 for line in shown)
    assert any(line["clean_success"] for line in shown)
    assert stages and record["rollouts"] > 0
    assert {"var_outcome", "var_path", "cov_outcome_path", "iteration"} <= stages[0].keys()
    assert max(map(path.decomposition_error, stages)) < 1e-9
