"""The benchmark harness: rows, the clean-tree rule, correctness before timing, memory, work."""

from __future__ import annotations

import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fastturn.bench import cases, measure, ops, record, steps


def commit(root: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=root, check=True)


def test_a_dirty_tree_is_refused(tmp_path: Path) -> None:
    """New results are no change; a changed or new file is, by name."""
    (tmp_path / "code.py").write_text("1")
    commit(tmp_path)
    record.require_clean(tmp_path)
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/ops.jsonl").write_text("{}")
    record.require_clean(tmp_path)
    (tmp_path / "code.py").write_text("2")
    with pytest.raises(record.DirtyTree, match=r"code\.py.*--no-record"):
        record.require_clean(tmp_path)


def test_without_git_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(record.DirtyTree, match="--no-record"):
        record.require_clean(tmp_path)


def test_row_schema() -> None:
    want = (
        "bench case provider metric unit p50 p20 p80 n device driver torch triton commit "
        "config_hash date"
    )
    assert [field.name for field in fields(record.Row)] == want.split()
    measured = record.Measured("c", "p", "time", "s", (4.0, 1.0, 2.0), {"a": 1})
    (row,) = record.rows("ops", [measured], "cpu")
    assert (row.p50, row.n, row.config_hash) == (2.0, 3, record.config_hash({"a": 1}))
    assert row.p20 < row.p50 < row.p80
    assert row.config_hash != record.config_hash({"a": 2})
    assert len(row.commit) == 40


def test_wrong_results_are_not_timed() -> None:
    right, wrong = torch.ones(3), torch.tensor([1.0, 1.0, 1.1])
    measure.check_equal({"a": lambda: [right], "b": lambda: [right * 1.00001]}, "a", 1e-3)
    with pytest.raises(measure.WrongResult, match=r"b: result 0 differs from a by 0\.1"):
        measure.check_equal({"a": lambda: [right], "b": lambda: [wrong]}, "a", 1e-3)


def test_peak_memory_counts_what_is_alive_together() -> None:
    def provider() -> list[torch.Tensor]:
        first = torch.empty(1 << 20)
        second = first + 1
        del first
        return [torch.add(second, 1)]

    assert 8 << 20 <= measure.peak_bytes(provider) < 9 << 20


def test_surrogate_memory_is_a_quarter_of_plain() -> None:
    case = cases.SurrogateCase(actions=2048, width=16, vocab=16384)
    run = ops.surrogate_providers(cases.surrogate_inputs(case, "cpu"))
    peaks = {name: measure.peak_bytes(provider) for name, provider in run.items()}
    assert peaks["fastturn"] <= 0.25 * peaks["plain"]


@pytest.mark.parametrize("half", ["live", "zero", "clipped"])
def test_surrogate_providers_agree(half: str) -> None:
    case = cases.SurrogateCase(half, actions=64, width=16, vocab=300)
    run = ops.surrogate_providers(cases.surrogate_inputs(case, "cpu"))
    measure.check_equal(run, "plain", ops.TOLERANCE)


def test_attention_providers_agree() -> None:
    case = cases.AttentionCase("small", 3, 150, 4, 10, 4, 2, 8)
    assert case.end_T("cpu")[[0, 150, 159, 190]].tolist() == [190, 160, 160, 380]
    measure.check_equal(ops.attention_providers(case, "cpu"), "dense", ops.TOLERANCE)


def test_packed_and_unpacked_updates_agree() -> None:
    run = steps.step_providers(cases.StepCase(context=20, siblings=3, tokens=5, layers=1))
    measure.check_equal(run, "rows", steps.TOLERANCE)


def test_ideal_speed_up_counts_tokens() -> None:
    assert cases.StepCase().ideal == 4.5


def test_unknown_op_is_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        ops.main(["soft"])
    assert "unknown op soft: expected any of surrogate, attention" in capsys.readouterr().err
