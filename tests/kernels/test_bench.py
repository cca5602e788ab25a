"""The benchmark harness: rows, the clean-tree rule, correctness before timing, memory, work."""

from __future__ import annotations

import subprocess
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastturn.bench import cases, layouts, measure, memory, ops, record, steps
from fastturn.pack import pack


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


def test_providers_alternate_after_warming() -> None:
    calls: list[str] = []
    run = {name: lambda name=name: calls.append(name) or [] for name in ("a", "b")}
    ticks = iter(range(100))
    times = measure.seconds(run, repeats=2, warm=1, clock=lambda: float(next(ticks)))
    assert calls == ["a", "b"] * 3 and times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


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


SMALL = cases.StepCase(
    context=20, siblings=3, tokens=8, layers=1, shape=cases.ModelShape(300, 48, 64, 3, 1)
)


def test_all_layouts_give_one_loss_and_gradient() -> None:
    run = layouts.Update(SMALL).providers()
    assert tuple(run) == layouts.LAYOUTS
    (loss, *gradients) = run["rows"]()
    assert abs(loss) > 1e-3 and len(gradients) == len(layouts.WATCHED)
    measure.check_equal(run, "rows", 1e-5)


def test_an_absent_peer_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts.importlib.util, "find_spec", lambda name: None)
    assert layouts.PEER not in layouts.Update(SMALL).providers()
    assert "prefix-grouper: left out" in capsys.readouterr().out


def test_work_is_counted() -> None:
    """By hand, and against the batch that is packed."""
    assert SMALL.lengths == (4, 8, 12)
    assert SMALL.packed == cases.Work(20 + 3 + 7 + 11, 210 + 66 + 168 + 286, 24)
    assert SMALL.rows == cases.Work(23 + 27 + 31, 276 + 378 + 496, 24)
    (batch,) = pack([layouts.group(SMALL)], budget_T=1 << 20)
    i_T = torch.arange(len(batch.end_T))
    seen_TT = (i_T <= i_T.unsqueeze(1)) & (i_T.unsqueeze(1) < batch.end_T)
    found = cases.Work(len(i_T), int(seen_TT.sum()), len(batch.action_A))
    assert found == SMALL.packed


def test_operations_are_those_that_torch_counts() -> None:
    """A forward and backward pass of the model as it comes, with all pairs and all logits."""
    model = layouts.random_model(SMALL.shape, layers=2)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as seen:
        model(torch.zeros(1, 30, dtype=torch.int64)).logits.sum().backward()
    assert cases.Work(30, 30 * 30, 30).flops(SMALL.shape, 2) == seen.get_total_flops()


def test_sibling_lengths_keep_their_mean() -> None:
    for siblings, tokens in product((2, 8, 16), (64, 256)):
        case = cases.StepCase(siblings=siblings, tokens=tokens)
        assert sum(case.lengths) == siblings * tokens
        assert (min(case.lengths), max(case.lengths)) == (tokens // 2, 3 * tokens // 2)
    assert cases.StepCase(siblings=1, tokens=5).lengths == (5,)


def test_speed_up_is_relative_to_the_counted_ratio() -> None:
    times = {"padded": [9.0], "rows": [8.0], "packed": [2.0]}
    rows = {
        m.metric: m.values for m in steps.speeds(SMALL, times, "time") if m.provider == "packed"
    }
    assert rows["speed-up over padded"] == (4.5,)
    assert rows["speed-up / flop ratio"] == (4 / SMALL.flop_ratio,)


def test_peak_memory_of_a_process_of_its_own() -> None:
    """Gradients of all parameters are alive at the end, so the peak is above them."""
    wide = replace(SMALL, shape=cases.ModelShape(8000, 512, 512, 4, 4))
    parameters = 8000 * 512 + 4 * 512 * 512 + 3 * 512 * 512
    peak = memory.peak_bytes(wide, "packed", threads=1)
    assert 4 * parameters <= peak <= 4 * parameters + (32 << 20)


def test_points_are_read_and_wrong_ones_named(capsys: Any) -> None:
    assert steps.point("512+8x64") == (512, 8, 64)
    assert set(map(steps.point, steps.USUAL)) < set(steps.GRID)
    with pytest.raises(SystemExit):
        steps.main(["--points", "512x8", "--no-record"])
    assert "'512x8': expected context+siblingsxtokens" in capsys.readouterr().err


def test_unknown_op_is_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        ops.main(["soft"])
    assert "unknown op soft: expected any of surrogate, attention" in capsys.readouterr().err
