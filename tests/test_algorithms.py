"""Every algorithm on the one loop: it resolves with every recipe, and trains."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastturn import cli, plan, trainer
from fastturn.algorithms import ALGORITHMS, SURROGATES, VALUES, algorithm_of
from fastturn.config import Config, ConfigError, as_dict, from_dict, override
from fastturn.loss import FUSED
from fastturn.loss import SURROGATES as LOSSES
from fastturn.recipes import RECIPES, quickstart
from fastturn.records import read_lines, untimed

PARITY = Path(__file__).with_name("parity.py")
NAMES = sorted(ALGORITHMS)
TINY = [
    *(f"data.domain={PARITY}:Graded", "data.eval_tasks=4", "turns=3", "tasks=4", "iterations=2"),
    *("warm.steps=25", "warm.batch=8", "trackers=none", "save.every=0", "sampling.turn_tokens=6"),
    *("model.width=32", "model.layers=1", "group_size=4"),
]


def run(out: Path, *pairs: str) -> dict:
    return trainer.train(override(quickstart(), [*TINY, *pairs]), quickstart(), out)


def records(out: Path, kind: str) -> list[dict]:
    return [untimed(r) for r in read_lines(out / "records.jsonl") if r["kind"] == kind]


@pytest.fixture(scope="module")
def needed(tmp_path_factory) -> dict[str, list[str]]:
    """What a recipe leaves to be set."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    lines = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = [f"data.path={file}"]
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Numbers", "text": "One, two, three."}))
    return {
        "gsm8k-smollm2": questions,
        "gsm8k-python-smollm2": questions,
        "mawps-smollm2": [*questions, "data.eval_tasks=8"],
        "hotpotqa-smollm2": [*questions, f"data.domain=search:corpus={corpus}"],
    }


PACKAGES = {"airline-smollm2": "tau2", "gym-smollm2": "reasoning_gym"}  # that bring the tasks


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_resolves_with_every_recipe(capsys, needed, name, recipe):
    if recipe in PACKAGES:
        pytest.importorskip(PACKAGES[recipe])
    pairs = [f"algorithm={name}", *needed.get(recipe, ())]
    assert cli.main(["train", recipe, *pairs, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert name in shown and "dry run" in shown
    for key, value in ALGORITHMS[name].presets.items():
        config = override(RECIPES[recipe](), [f"algorithm={name}"])
        assert as_dict(config)[key] == as_dict(override(Config(), [f"{key}={value}"]))[key]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_trains(tmp_path, name):
    summary = run(tmp_path / "run", f"algorithm={name}")
    stages = records(tmp_path / "run", "stage")
    iterations = records(tmp_path / "run", "iteration")
    assert [r["iteration"] for r in iterations] == [0, 1]
    assert sum(r["steps"] for r in stages) >= 1
    for record in stages:
        assert math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        assert record["skipped"] == 0 and (record["abs_log_ratio_max"] or 0) <= 1e-4
    assert summary["algorithm"] == name and math.isfinite(summary["success_after"])
    config = override(quickstart(), [*TINY, f"algorithm={name}"])
    assert max(r["rollouts"] for r in iterations) <= plan.derive(config)["rollouts_iteration"]


def test_options_that_choose_samples_train(tmp_path):
    """Fewer siblings than without them, and steps whose weights add up."""
    plain = run(tmp_path / "plain", "group_size=5")
    chosen = "agreed=0.5,boundaries=0.6,continuations=1,leave_one_out=1"
    summary = run(tmp_path / "run", f"algorithm_options={chosen}", "group_size=5")
    assert 0 < summary["rollouts"] < 0.9 * plain["rollouts"]
    stages = records(tmp_path / "run", "stage")
    assert sum(r["steps"] for r in stages) >= 1
    for record in stages:
        assert math.isfinite(record["loss"]) and (record["abs_log_ratio_max"] or 0) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_learns(tmp_path, name):
    pairs = ["iterations=14", "optim.lr=2e-3", "data.eval_tasks=128", "warm.steps=80", "tasks=8"]
    summary = run(tmp_path / "run", *pairs, f"algorithm={name}")
    assert summary["success_before"] < 0.3
    assert summary["success_after"] > summary["success_before"] + 0.2


@pytest.mark.parametrize("name", ["gspo", "cispo", "refuel", "dapo"])
def test_several_steps_a_stage(tmp_path, name):
    """The policy moves between them, so ratios leave 1."""
    pairs = ["loss.epochs=2", "loss.minibatches=2", "loss.kl_coef=0.02", "optim.lr=5e-3"]
    run(tmp_path / "run", f"algorithm={name}", "iterations=1", *pairs)
    (stage,) = records(tmp_path / "run", "stage")
    assert 2 <= stage["steps"] <= 4 and stage["kl_behavior"] > 0 and stage["kl_reference"] > 0


def versions(out: Path) -> list[list[tuple[int, bool]]]:
    """Of every iteration's stages: the version trained, and whether it was the one that sampled."""
    stages = [r for r in records(out, "stage") if r["steps"]]
    return [
        [(r["version"], r["abs_log_ratio_max"] < 1e-4) for r in stages if r["iteration"] == i]
        for i in (0, 1)
    ]


@pytest.mark.slow
def test_rtpo_publishes_every_stage_every_few_or_when_the_policy_has_moved(tmp_path):
    moving = ["optim.lr=3e-3", "optim.warmup_steps=0", "tasks=12", "warm.steps=80"]
    run(tmp_path / "each", *moving)
    for iteration in versions(tmp_path / "each"):
        assert [fresh for _, fresh in iteration] == [True, True, True]
    run(tmp_path / "second", *moving, "algorithm_options=publish_every=2")
    for iteration in versions(tmp_path / "second"):
        assert [fresh for _, fresh in iteration] == [True, False, True]
        assert [version - iteration[0][0] for version, _ in iteration] == [0, 1, 2]
    run(tmp_path / "never", *moving, "algorithm_options=publish_every=9")
    for iteration in versions(tmp_path / "never"):
        assert [fresh for _, fresh in iteration] == [True, False, False]
    # The first stale stage shows how far the policy has moved; the next publish follows it.
    run(tmp_path / "moved", *moving, "algorithm_options=publish_every=9,publish_kl=1e-9")
    for iteration in versions(tmp_path / "moved"):
        assert [fresh for _, fresh in iteration] == [True, False, True]


def test_a_sampler_that_may_fall_behind_has_weights_of_its_own():
    late = override(quickstart(), ["algorithm_options=publish_every=2"])
    assert algorithm_of(late).lags and not algorithm_of(quickstart()).lags
    assert "weights to sample from" in plan.memory_gib(late)[0]
    assert "weights to sample from" not in plan.memory_gib(quickstart())[0]


def test_presets_come_before_all_other_overrides():
    config = override(quickstart(), ["loss.clip_high=0.5", "algorithm=dapo"])
    assert config.loss.clip_high == 0.5 and config.loss.normalize_std
    assert override(quickstart(), ["algorithm=dapo", "algorithm=rtpo"]) == quickstart()
    assert from_dict(as_dict(config)) == config


def test_options_reach_the_functions():
    config = override(Config(), ["algorithm=gigpo", "algorithm_options=step_weight=0.5"])
    assert algorithm_of(config).credit.keywords == {"step_weight": 0.5}
    config = override(Config(), ["algorithm=rtpo", "algorithm_options=surrogate=mask"])
    assert algorithm_of(config).surrogate == "mask"
    config = override(Config(), ["algorithm=arpo", "algorithm_options=tokens=3,initial=1"])
    assert algorithm_of(config).sample.keywords == {"initial": 1.0, "tokens": 3}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["algorithm=dappo"], "algorithm='dappo': expected one of .*; the nearest is 'dapo'"),
        (["algorithm=tree-grpo"], "the nearest is 'tree_grpo'"),
        (
            ["algorithm=gigpo", "algorithm_options=step_wight=1"],
            r"algorithm_options='step_wight=1': expected name=value with an option of gigpo "
            r"\(step_weight=1.0, step_discount=0.95, surrogate=clip\); "
            "the nearest is 'step_weight'",
        ),
        (["algorithm_options=eta=1"], "with an option of rtpo"),
        (["algorithm=refuel", "algorithm_options=eta"], "expected name=value"),
        (
            ["algorithm=refuel", "algorithm_options=eta=high"],
            "eta='high': expected a value of",
        ),
        (["algorithm_options=surrogate=clop"], "surrogate='clop': .*; the nearest is 'clip'"),
    ],
)
def test_what_is_unknown_names_the_nearest(pairs, message):
    with pytest.raises(ConfigError, match=message):
        override(quickstart(), pairs)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("rtpo", "agreed=0", "agreed=0.0: expected a share above 0 and at most 1"),
        ("rtpo", "boundaries=1.5", "boundaries=1.5: expected a share"),
        ("arpo", "initial=0", "initial=0.0: expected a share"),
        ("dapo", "overlong=-1", "overlong=-1.0: expected a number from 0 to 1"),
        ("gigpo", "step_discount=2", "step_discount=2.0: expected a number from 0 to 1"),
        ("refuel", "eta=0", "eta=0.0: expected a number above 0"),
        ("refuel", "eta=nan", "eta=nan: expected a number above 0"),
        ("seeupo", "bound=-1", "bound=-1.0: expected a number above 0"),
        ("tree_grpo", "rounds=0", "rounds=0: expected 1 or more"),
        ("arpo", "tokens=0", "tokens=0: expected 1 or more"),
        ("rtpo", "best=-1", "best=-1: expected 0 or more"),
        ("rtpo", "leave_one_out=2", r"leave_one_out=2: expected 0 \(off\) or 1 \(on\)"),
        ("arpo", "threshold=inf", "threshold=inf: expected a finite number"),
        ("rtpo_off_policy", "least=3", "least=3 is above most=2: .*; exchange them"),
        ("rtpo", "publish_kl=0.1", "publish_kl=0.1 does nothing .* set publish_every=4"),
        ("rtpo", "best=1", "best=1 chooses among trunks=1 trunks a task: .* raise trunks"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(name, option, message):
    with pytest.raises(ConfigError, match=f"algorithm_options: {message}"):
        override(quickstart(), [f"algorithm={name}", f"algorithm_options={option}"])


def test_every_number_among_the_options_says_what_it_must_be():
    numbers = {
        name
        for algorithm in ALGORITHMS.values()
        for name, default in algorithm.options.items()
        if not isinstance(default, str)
    }
    asked = [name for _, _, names in VALUES for name in names]
    assert sorted(asked) == sorted(numbers)
    for algorithm in ALGORITHMS.values():
        for _, holds, names in VALUES:
            assert all(holds(algorithm.options[n]) for n in names if n in algorithm.options)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_has_nothing_to_compare_is_refused(name):
    few = ALGORITHMS[name].least_group_size - 1
    with pytest.raises(ConfigError, match=f"group_size={few}: {name} needs at least {few + 1}"):
        override(quickstart(), [f"algorithm={name}", "trunks=1", f"group_size={few}"])


@pytest.mark.parametrize("name", ["gspo", "seeupo", "refuel"])
def test_a_budget_that_no_group_fits_is_refused(name):
    """Where the loss compares all turns of a group; elsewhere groups are divided."""
    pairs = [f"algorithm={name}", "pack_tokens=64"]
    with pytest.raises(ConfigError, match=rf"pack_tokens=64: the loss of {name} .*tokens=1280"):
        override(quickstart(), pairs)
    assert override(quickstart(), [*pairs, "model.max_context=64"]).pack_tokens == 64
    assert override(quickstart(), ["algorithm=grpo", "pack_tokens=64"]).pack_tokens == 64


def test_more_trees_than_leaves_are_refused():
    pairs = ["algorithm=tree_grpo", "trunks=9"]
    with pytest.raises(ConfigError, match=r"trunks=9: tree_grpo .* set trunks=5 or less"):
        override(quickstart(), pairs)
    assert override(quickstart(), [*pairs, "group_size=9"]).trunks == 9


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_has_every_algorithm_with_all_that_it_can_be_told(name):
    text = (PARITY.parents[1] / "docs" / "algorithms.md").read_text()
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    section, algorithm = sections[name], ALGORITHMS[name]
    assert "Source:" in section and ("Deviation" in section or "deviate" in section)
    for key, value in algorithm.presets.items():
        assert f"`{key}={value}`" in section
    for option in algorithm.options.keys() - {"surrogate"}:
        assert re.search(rf"`[^`]*\b{option}\b[^`]*`", section), option


def test_names_of_surrogates_are_recorded_twice_and_alike():
    assert set(SURROGATES) == {FUSED, *LOSSES}
    assert all(algorithm.surrogate in SURROGATES for algorithm in ALGORITHMS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "seeupo", "tree_grpo", "arpo", "refuel"])
def test_two_ranks_sample_and_train_what_one_does(tmp_path, name):
    """Plans make the same choices on every rank, and sums over ranks are those of one."""
    first = []
    for ranks in ("1", "2"):
        out = tmp_path / ranks
        pairs = [*TINY, f"algorithm={name}", "iterations=1", "loss.kl_coef=0.01"]
        pairs += ["tasks=12", "warm.steps=60"]
        command = [sys.executable, "-P", "-m", "fastturn.cli", "train", "quickstart", *pairs]
        launched = [*command, "--nproc", ranks, "--out", str(out)]
        done = subprocess.run(launched, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        first.append((records(out, "stage")[0], records(out, "iteration")[0]))
    (alone, whole), (together, iteration) = first
    for key in ("groups", "siblings", "actions", "steps", "tokens_flat"):
        assert alone[key] == together[key], key
    for key in ("return_mean", "loss", "grad_norm", "entropy", "kl_behavior"):
        assert alone[key] == pytest.approx(together[key], rel=1e-3, abs=1e-6), key
    assert whole["rollouts"] == iteration["rollouts"] and alone["grad_norm"] > 1e-2
