"""The loop on a small task: what a run leaves, how it resumes, what it refuses and survives."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastturn import trainer
from fastturn.config import Config, ConfigError, override
from fastturn.learner import DivergedError
from fastturn.recipes import quickstart
from fastturn.records import read_lines, untimed
from fastturn.run import RunError, alone
from fastturn.sampler.local import LocalSampler

PARITY = Path(__file__).with_name("parity.py")
SMALL = [
    *(f"data.domain={PARITY}:Domain", "data.eval_tasks=32", "turns=3", "tasks=8", "iterations=2"),
    *("warm.steps=40", "warm.batch=16", "trackers=none", "save.every=1", "sampling.turn_tokens=8"),
]
NEEDED = (
    *("recipe", "algorithm", "seed", "success_before", "success_after", "greedy_before"),
    *(
        "greedy_after",
        "idle",
        "eval_tasks",
        "wall_s",
        "cpu_s",
        "gpu_hours",
        "device_seconds",
        "spans",
    ),
    *("iterations", "rollouts", "tokens_packed", "tokens_flat", "zero_advantage_share"),
    *("ratio_geomean", "commit", "versions"),
)


def small(*pairs: str) -> Config:
    return override(quickstart(), [*SMALL, *pairs])


def run(out: Path, *pairs: str, resume: bool = False) -> dict:
    return trainer.train(small(*pairs), quickstart(), out, resume)


def records(out: Path, kind: str | None = None) -> list[dict]:
    lines = read_lines(out / "records.jsonl")
    return [untimed(line) for line in lines if kind in (None, line["kind"])]


def closure(out: Path) -> float:
    """Device-seconds of all pools and spans over devices x the wall clock that stamps records, from
    the first record on."""
    lines = read_lines(out / "records.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    pools = summary["pools"]
    spans = sum(pools["trainer"]["spans"].values())
    servers = pools.get("servers", {"busy": 0.0, "idle": {}})
    spans += servers["busy"] + sum(servers["idle"].values())
    assert spans == pytest.approx(summary["device_seconds"])
    held = lines[-1]["device_seconds"] - lines[0]["device_seconds"]
    return held / (summary["devices"] * (lines[-1]["time"] - lines[0]["time"]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "whole"
    run(out)
    return out


def test_summary_ledger_model_and_report(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert not [key for key in NEEDED if key not in summary]
    assert sum(summary["spans"].values()) == pytest.approx(summary["wall_s"])
    assert closure(whole) == pytest.approx(1.0, rel=0.01)
    assert summary["levels"] and summary["successes"] > 0
    assert summary["iterations"] == 2 and summary["rollouts"] > 2 * 8 * 5
    assert "<html" in (whole / "report.html").read_text()[:200].lower()
    model = AutoModelForCausalLM.from_pretrained(whole / "final")
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert len(tokenizer) == model.config.vocab_size
    assert [path.name for path in whole.glob("checkpoints/.part*")] == []


def test_stages_are_recorded_in_reverse_and_the_ratio_is_one(whole):
    stages = records(whole, "stage")
    for iteration in (0, 1):
        turns = [r["stage"] for r in stages if r["iteration"] == iteration]
        assert turns == list(reversed(range(len(turns)))) and len(turns) >= 2
    trained = [r for r in stages if r["ratio_geomean"] is not None]
    assert trained
    for record in trained:
        assert record["abs_log_ratio_max"] <= 1e-4
        assert record["ratio_geomean"] == pytest.approx(1.0, abs=1e-3)
        assert record["clip_fraction_first"] == 0


@pytest.mark.parametrize("context", ["strip_think", "truncate:40", "summarise"])
def test_rollout_and_training_agree_under_every_context_policy(tmp_path, context):
    run(tmp_path / "run", f"context={context}", "iterations=1")
    trained = [r for r in records(tmp_path / "run", "stage") if r["actions"]]
    assert trained and all(r["abs_log_ratio_max"] <= 1e-4 for r in trained)


@pytest.mark.parametrize("algorithm", ["rtpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_it_learns(tmp_path, algorithm):
    pairs = ["iterations=12", "optim.lr=2e-3", "data.eval_tasks=128", f"algorithm={algorithm}"]
    summary = run(tmp_path / "run", *pairs)
    assert summary["success_before"] < 0.3
    assert summary["success_after"] > summary["success_before"] + 0.2


def test_the_quickstart_at_a_tenth_of_its_size(tmp_path):
    pairs = ["tasks=4", "iterations=3", "warm.steps=50", "data.eval_tasks=26"]
    config = override(quickstart(), [*pairs, "trackers=none"])
    summary = trainer.train(config, quickstart(), tmp_path / "run")
    assert summary["recipe"] == "quickstart" and summary["iterations"] == 3
    losses = [r["loss"] for r in records(tmp_path / "run", "warm")]
    assert losses[-1] < losses[0] / 2


def test_grpo_runs_on_the_same_loop(tmp_path):
    summary = run(tmp_path / "run", "algorithm=grpo", "group_size=4")
    stages = records(tmp_path / "run", "stage")
    assert [r["stage"] for r in stages] == [0, 0] and summary["rollouts"] == 2 * 8 * 4
    assert all((r["abs_log_ratio_max"] or 0) <= 1e-4 for r in stages)


def test_epochs_minibatches_several_trunks_and_kl(tmp_path):
    pairs = ["loss.epochs=2", "loss.minibatches=2", "trunks=2", "loss.kl_coef=0.02", "gamma=0.99"]
    run(tmp_path / "run", *pairs, "iterations=1")
    stages = records(tmp_path / "run", "stage")
    assert all(r["groups"] <= 16 and r["steps"] == 4 for r in stages)
    assert stages[0]["abs_log_ratio_max"] <= 1e-4
    # The reference is the policy that training started from, so KL to it is zero at first only.
    assert stages[-1]["kl_reference"] > 0
    assert (tmp_path / "run" / "reference" / "model.safetensors").exists()


def test_gradient_checkpointing_and_bfloat16_run(tmp_path):
    run(tmp_path / "a", "model.gradient_checkpointing=full", "iterations=1", "warm.steps=5")
    summary = run(tmp_path / "b", "model.dtype=bfloat16", "iterations=1", "warm.steps=5")
    assert math.isfinite(summary["success_after"])


def test_a_silent_stage_costs_no_step_and_no_new_version(tmp_path):
    """Every episode is cut at once: every group is silent, the run says so and goes on."""
    summary = run(tmp_path / "run", "sampling.turn_tokens=1")
    stages = records(tmp_path / "run", "stage")
    assert stages and all(r["groups_silent"] == r["groups"] and r["steps"] == 0 for r in stages)
    assert {r["version"] for r in stages} == {1} and summary["zero_advantage_share"] == 1.0
    assert summary["ratio_geomean"] is None


KILLED = """
import os, signal, sys
from pathlib import Path
from fastturn import run as runs, trainer
from fastturn.meter import Meter
sys.path.insert(0, {tests!r})
import test_trainer
after = int(sys.argv[2])
record = Meter.record
def counting(self, kind, values, seen=[0]):
    record(self, kind, values)
    seen[0] += 1
    if seen[0] == after:
        os.kill(os.getpid(), signal.SIGKILL)
Meter.record = counting
test_trainer.run(Path(sys.argv[1]), "iterations=3")
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "three"
    run(out, "iterations=3")
    return out


SLOW = pytest.mark.slow


@pytest.mark.parametrize("after", [pytest.param(2, marks=SLOW), 8, pytest.param(14, marks=SLOW)])
def test_killed_anywhere_and_resumed_equals_never_killed(tmp_path, three, after):
    out = tmp_path / "killed"
    code = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, str(out), str(after)], timeout=240, check=False
    )
    assert done.returncode == -signal.SIGKILL
    run(out, "iterations=3", resume=True)
    assert records(out) == records(three)
    assert (out / "samples.jsonl").read_text() == (three / "samples.jsonl").read_text()


@pytest.mark.parametrize("phase", ["warm", "stage"])
def test_interrupted_in_the_middle_saves_and_resumes_at_the_exact_step(
    tmp_path, three, phase, monkeypatch
):
    out = tmp_path / "stopped"
    original = trainer.stop_if_asked

    def ask(run):
        cursor = run.cursor
        middle = cursor.phase == "warm" and cursor.warm_step == 20
        if phase == "stage":
            middle = (cursor.iteration, cursor.stage) == (1, 2)
        if middle:
            run.stop.set()
        original(run)

    monkeypatch.setattr(trainer, "stop_if_asked", ask)
    with pytest.raises(KeyboardInterrupt):
        run(out, "iterations=3")
    monkeypatch.setattr(trainer, "stop_if_asked", original)
    run(out, "iterations=3", resume=True)
    assert records(out) == records(three)


def test_ctrl_c_finishes_the_step_and_says_how_to_resume(tmp_path):
    out = tmp_path / "run"
    command = [Path(sys.executable).with_name("fastturn"), "train", "quickstart", "--out", out]
    process = subprocess.Popen(
        [*command, *SMALL, "iterations=50"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and len(read_lines(out / "records.jsonl")) < 8:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in output, output
    assert list((out / "checkpoints").glob("0*"))


def test_a_folder_with_a_run_is_refused_without_resume(whole):
    before = (whole / "records.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"already holds a run.*--resume"):
        run(whole)
    assert (whole / "records.jsonl").read_bytes() == before


def test_another_configuration_is_named_on_resume(whole):
    with pytest.raises(RunError, match=r"tasks: was 8, is 5"):
        run(whole, "tasks=5", resume=True)


def test_a_finished_run_resumes_to_nothing_and_can_be_extended(whole, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    summary = run(out, resume=True)
    assert records(out) == records(whole) and summary["iterations"] == 2
    before = (out / "final" / "model.safetensors").read_bytes()
    assert run(out, "iterations=4", "optim.lr=5e-4", resume=True)["iterations"] == 4
    assert len(records(out, "iteration")) == 4
    assert [r["iteration"] for r in records(out, "eval")] == [0, 2, 4]
    assert (out / "final" / "model.safetensors").read_bytes() != before


def test_two_processes_never_share_a_folder(tmp_path):
    with alone(tmp_path), pytest.raises(RunError, match="another process is running"):
        run(tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


def test_contexts_without_room_are_refused_at_the_start_and_left_out_later(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"model\.max_context=4: the shortest of 32 tasks"):
        run(tmp_path / "a", "model.max_context=4")
    run(tmp_path / "b", "model.max_context=12", "iterations=1", "warm.steps=2")
    assert "the task is left out" in caplog.text or records(tmp_path / "b", "iteration")


def test_the_reference_of_a_kl_run_must_be_there_to_resume(tmp_path):
    out = tmp_path / "run"
    run(out, "loss.kl_coef=0.02", "iterations=1")
    shutil.rmtree(out / "reference")
    with pytest.raises(RunError, match="reference is missing"):
        run(out, "loss.kl_coef=0.02", "iterations=2", resume=True)


def test_non_finite_steps_are_skipped_kept_and_end_the_run(tmp_path, monkeypatch):
    from fastturn.policy import Policy

    forward = Policy.forward

    def poisoned(self, batch, objective, reference_A=None):
        output = forward(self, batch, objective, reference_A)
        return output if objective.on_policy else replace(output, loss=output.loss * math.nan)

    monkeypatch.setattr(Policy, "forward", poisoned)
    with pytest.raises(DivergedError, match=r"3 optimiser steps in a row.*Lower optim\.lr"):
        run(tmp_path / "run", "loss.epochs=3", "loss.kl_coef=0.01")
    kept = sorted((tmp_path / "run" / "bad").glob("*/step.pt"))
    assert len(kept) == 3
    saved = torch.load(kept[0], weights_only=True)
    assert len(saved["batches"][0]["token_T"]) > 0
    assert all(torch.isfinite(value).all() for value in saved["model"].values())


def test_a_sampler_with_other_weights_is_found_out(tmp_path, monkeypatch):
    from fastturn.publish import PublishError

    sample = LocalSampler.sample

    def stale(self, requests, params):
        answers = sample(self, requests, params)
        for completions in answers:
            for completion in completions:
                completion.logprob_A[:1] -= 0.3
        return answers

    monkeypatch.setattr(LocalSampler, "sample", stale)
    with pytest.raises(PublishError, match="other weights"):
        run(tmp_path / "run", "tasks=8")


def test_truncation_of_most_episodes_is_said_loudly(tmp_path, capsys):
    run(tmp_path / "run", "sampling.turn_tokens=1", "iterations=1")
    assert "raise sampling.turn_tokens (now 1)" in capsys.readouterr().out
    (record,) = records(tmp_path / "run", "iteration")
    assert record["endings"] == {"truncated": record["rollouts"] - 8}  # all but the trunks


def test_a_checkpoint_that_cannot_be_written_is_said_and_the_run_goes_on(
    tmp_path, capsys, monkeypatch
):
    from fastturn import checkpoint

    def full(folder, *rest, **named):
        raise checkpoint.CheckpointError(f"could not write {folder}: No space left on device")

    monkeypatch.setattr(checkpoint, "begin", full)
    summary = run(tmp_path / "run", "iterations=1")
    assert summary["iterations"] == 1 and "No space left" in capsys.readouterr().out


def test_every_task_is_visited_once_an_epoch():
    for length in (1, 2, 7, 30):
        walk = [trainer.shuffled(length, 3, offset) for offset in range(length)]
        assert sorted(walk) == list(range(length))
    assert [trainer.shuffled(30, 3, i) for i in range(9)] != [
        trainer.shuffled(30, 4, i) for i in range(9)
    ]
