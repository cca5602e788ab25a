"""Speeds as runs measured them: what was simulated with other speeds is found and predicted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fastturn import cli
from fastturn.bench import calibration
from fastturn.bench.recorded import Results
from fastturn.calibrate import (
    Observed,
    fitted,
    layout_of,
    lengths_for,
    observed,
    predicted,
    simulated_spans,
)
from fastturn.config import Config, as_dict, override
from fastturn.devices import device_called
from fastturn.recipes import quickstart
from fastturn.runfiles import RunFiles
from fastturn.simulate import Layout, Lengths, Speed

CORE = device_called("core")
ONES = Speed(**{field.name: 1.0 for field in fields(Speed)})
TRUTH = replace(
    ONES, step_s=0.5, sequence_s=3.0, prefill_s=2.0, train_s=0.7, publish_s=0.1, turn_s=4.0
)
LENGTHS = Lengths(prompt=40, action=9, spread=0.3, answer=6, played=0.7, silent=0.5)


def ran(*pairs: str, lengths: Lengths = LENGTHS) -> Observed:
    """A run of a core that is as `TRUTH` says."""
    config = override(quickstart(), pairs)
    blank = Observed(" ".join(pairs), config, lengths, layout_of(config, 1, 0), {})
    return replace(blank, spans=predicted(blank, lengths, CORE, TRUTH))


@pytest.mark.parametrize("algorithm", ["rtpo", "grpo"])
def test_other_sizes_follow_from_the_fit(algorithm: str) -> None:
    name = f"algorithm={algorithm}"
    known = [ran(name, "tasks=8"), ran(name, "tasks=16", "group_size=4")]
    target, factors = ran(name, "tasks=48"), fitted(known, CORE)
    for run in known:
        assert predicted(run, LENGTHS, CORE, factors) == pytest.approx(run.spans, rel=1e-3)
    found = predicted(target, LENGTHS, CORE, factors)
    assert sum(found.values()) == pytest.approx(target.wall_s, rel=0.03)
    sheet = predicted(target, LENGTHS, CORE, ONES)
    assert max(abs(sheet[name] / seconds - 1) for name, seconds in target.spans.items()) > 0.25


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_span_that_the_data_sheet_has_far_off_is_fitted_like_any_other(factor: float) -> None:
    one = ran("tasks=8")
    optimizer = factor * predicted(one, LENGTHS, CORE, ONES)["optimizer"]
    odd = replace(one, spans={**one.spans, "optimizer": optimizer})
    found = predicted(odd, LENGTHS, CORE, fitted([odd], CORE))
    assert found == pytest.approx(odd.spans, rel=1e-3)


def test_what_no_run_shows_stays_as_the_data_sheet_has_it() -> None:
    one = ran("tasks=8")
    quiet = replace(one, spans={"optimizer": 2 * predicted(one, LENGTHS, CORE, ONES)["optimizer"]})
    assert fitted([quiet], CORE) == replace(
        ONES, update_s=pytest.approx(2.0), publish_s=pytest.approx(1.0)
    )


def test_lengths_are_means_and_silence_follows_the_group_size() -> None:
    runs = [ran(lengths=replace(LENGTHS, action=a)) for a in (8.0, 12.0)]
    same = lengths_for(quickstart(), runs)
    assert same.action == 10.0 and same.silent == pytest.approx(0.5)
    larger = lengths_for(override(quickstart(), ["group_size=9"]), runs)
    assert larger.silent < 0.4 < lengths_for(override(quickstart(), ["group_size=3"]), runs).silent


def files(config: Config) -> RunFiles:
    """Two iterations of two stages, and a third that has only begun."""

    def record(kind: str, iteration: int, **spans: float) -> dict[str, object]:
        return {"kind": kind, "iteration": iteration, "spans": spans}

    counted = {"turns_mean": 2.0, "whole_turns_mean": 3.1, "action_tokens_mean": 20.0}
    counted |= {"zero_advantage_share": 0.6, "rollouts": 100}
    stages = [
        record("stage", i, sibling_decode=1.0, forward_backward=0.5, pack=0.1, other=0.2)
        for i in (0, 1)
        for _ in range(2)
    ]
    whole = [record("iteration", i, other=0.2, evaluation=50.0) | counted for i in (0, 1)]
    begun = record("stage", 2, sibling_decode=90.0)
    return RunFiles("r", [*stages, *whole, begun], [], {}, as_dict(config), {})


def test_a_run_says_what_a_mean_iteration_took() -> None:
    found = observed(files(quickstart()))
    assert found.spans == pytest.approx(
        {"sibling_decode": 2.0, "forward_backward": 1.0, "host": 0.8}
    )
    assert found.lengths.played == pytest.approx(0.7) and found.layout.together
    assert simulated_spans({"publish": 1e-9, "pack": 1.0}, 1) == {"host": 1.0}


def test_servers_of_a_run_are_part_of_its_layout() -> None:
    pools = {"trainer": {"devices": 2}, "servers": {"devices": 6}}
    served = [
        "rollout.engine=vllm",
        "rollout.urls=http://a:1",
        "rollout.overlap=stream",
    ]
    run = replace(files(override(quickstart(), served)), summary={"pools": pools})
    layout = observed(run).layout
    assert layout == Layout(2, 6, frozenset({"silent", "share", "stream"}))


def test_plan_shows_predicted_beside_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = files(quickstart())
    (tmp_path / "config.json").write_text(json.dumps({"config": run.config}))
    lines = "".join(json.dumps(record) + "\n" for record in run.records)
    (tmp_path / "records.jsonl").write_text(lines)
    words = ["plan", "quickstart", "--device", "core", "--gpus", "1"]
    known = ["--calibrate", str(tmp_path), "--predict", str(tmp_path)]
    assert cli.main([*words, *known]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "calibrated on" in shown and "predicted, s" in shown and "measured, s" in shown
    assert cli.main([*words, *known, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spans"]["sibling_decode"] == pytest.approx(2.0, rel=0.02)
    assert cli.main([*words, "--predict", str(tmp_path)]) == 2
    assert "name other runs by --calibrate" in capsys.readouterr().err
    assert cli.main([*words, "--calibrate", str(tmp_path / "none")]) == 2
    assert "expected the folder of a run, but there is no such" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text("")
    assert cli.main([*words, "--calibrate", str(tmp_path)]) == 2
    assert "expected a run with whole iterations, it has none" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "--slowest"]) == 2
    assert "expected a run with a finished step" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text('{"kind": 3, "x":\n')
    for command in ([*words, "--run"], ["report"]):
        assert cli.main([*command, str(tmp_path)]) == 2
        assert "line 1: expected one JSON object a line" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", calibration.ALGORITHMS)
def test_recorded_runs_of_two_sizes_foretell_the_quickstart(algorithm: str) -> None:
    """The fit is made again from recorded seconds, which the target's are no part of."""
    rows = Results.load().rows
    runs = {size: calibration.from_rows(rows, algorithm, size) for size in calibration.SIZES}
    target = runs[calibration.TARGET]
    for name, sizes in calibration.FROM.items():
        found = calibration.prediction(target, [runs[size] for size in sizes])
        ratio = sum(found.values()) / target.wall_s
        if len(sizes) > 1:
            assert ratio == pytest.approx(1.0, abs=0.2)
        key = f"calibration/{algorithm}", calibration.TARGET, f"predicted / measured, {name}"
        assert ratio == pytest.approx(rows[key].p50, rel=0.15)  # medians of spans, not of ratios
