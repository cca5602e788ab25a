"""The ledger is exact, records survive kills, and two runs can be compared without their times."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn import provenance
from fastturn.meter import SPANS, Meter
from fastturn.provenance import commit, versions
from fastturn.records import TIMING_KEYS, plain, read_lines, untimed, write_json

S = 1_000_000_000


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- spans and ledger -----------------------------------------------------------------------------


def test_nested_spans_subtract_from_their_parent(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, devices=4, clock=clock)
    clock.pass_s(0.5)
    with meter.span("sibling_decode"):
        clock.pass_s(1)
        with meter.span("environment"):
            clock.pass_s(2)
            with meter.span("sibling_decode"):  # the same name again, deeper
                clock.pass_s(4)
        clock.pass_s(8)
    ledger = meter.ledger()
    assert ledger["spans"] == {"sibling_decode": 13.0, "environment": 2.0, "other": 0.5}
    assert ledger["wall_s"] == 15.5
    assert ledger["device_seconds"] == 62.0
    assert ledger["gpu_hours"] == 62.0 / 3600
    assert (ledger["devices"], ledger["device_kind"]) == (4, "cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 10**10)), max_size=40))
def test_spans_sum_to_wall_clock_exactly(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, int]]
) -> None:
    """Any sequence of entering (0 … 5) and leaving (-1), records in between."""
    clock = Clock()
    meter = Meter(tmp_path_factory.mktemp("run"), clock=clock)
    open_spans: list[Any] = []
    own_ns = dict.fromkeys([*map(str, range(6)), "other"], 0)
    names: list[str] = []
    for move, duration_ns in moves:
        clock.now_ns += duration_ns
        own_ns[names[-1] if names else "other"] += duration_ns
        if move >= 0:
            span = meter.span(str(move))
            span.__enter__()
            open_spans.append(span)
            names.append(str(move))
        elif open_spans:
            open_spans.pop().__exit__(None, None, None)
            names.pop()
        else:
            meter.record("stage", {})
    state = meter.state()
    assert sum(state["spans_ns"].values()) == clock.now_ns
    assert {name: n for name, n in state["spans_ns"].items() if n} == {
        name: n for name, n in own_ns.items() if n
    }
    meter.record("last", {})
    records = read_lines(meter.out / "records.jsonl")
    for record in records:
        assert sum(record["spans"].values()) == pytest.approx(record["wall_s"], abs=1e-6)
    assert sum(record["wall_s"] for record in records) == pytest.approx(clock.now_ns / S)
    meter.close()


def test_a_span_ends_when_its_body_raises(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, clock=clock)
    with pytest.raises(RuntimeError, match="broken"), meter.span("publish"):
        clock.pass_s(1)
        raise RuntimeError("broken")
    clock.pass_s(2)
    assert meter.ledger()["spans"] == {"publish": 1.0, "other": 2.0}


def test_the_real_clock_agrees_with_the_wall(tmp_path: Path) -> None:
    begin = time.perf_counter()
    meter = Meter(tmp_path)
    with meter.span("pack"):
        time.sleep(0.05)
    ledger = meter.ledger()
    assert 0.05 <= ledger["wall_s"] <= time.perf_counter() - begin
    assert abs(sum(ledger["spans"].values()) - ledger["wall_s"]) < 1e-8
    assert ledger["peak_rss_gib"] > 0.01


def test_cpu_time_counts_children(tmp_path: Path) -> None:
    meter = Meter(tmp_path)
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert meter.ledger()["cpu_s"] >= 0.19


def test_canonical_spans_come_in_their_order(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, clock=clock)
    for name in ("zebra", *reversed(SPANS), "apple"):
        if name != "other":
            with meter.span(name):
                clock.pass_s(1)
    clock.pass_s(1)
    assert list(meter.ledger()["spans"]) == [*SPANS, "apple", "zebra"]


# --- records --------------------------------------------------------------------------------------


def test_counts_go_to_the_next_record_once(tmp_path: Path) -> None:
    meter = Meter(tmp_path)
    meter.count("bad_json")
    meter.count("tool_call", 5)
    meter.record("stage", {"stage": 1, "counts": {"tool_call": 2}})
    meter.record("stage", {"stage": 0})
    meter.count("late")
    first, second = read_lines(tmp_path / "records.jsonl")
    assert first["counts"] == {"bad_json": 1, "tool_call": 7}
    assert second["counts"] == {}
    assert meter.summary({})["counts"] == {"bad_json": 1, "late": 1, "tool_call": 7}


def test_nan_and_inf_become_null_and_are_counted(tmp_path: Path) -> None:
    meter = Meter(tmp_path)
    values = {"loss": float("nan"), "norm": np.float32("inf"), "list": [1.0, -np.inf], "ok": 2}
    meter.record("stage", values)
    (record,) = read_lines(tmp_path / "records.jsonl")
    assert (record["loss"], record["norm"], record["list"], record["ok"]) == (
        *(None, None, [1.0, None], 2),
    )
    assert record["counts"] == {"nonfinite_values": 3}
    summary = meter.summary({"ratio": float("nan")})
    assert summary["ratio"] is None
    assert summary["counts"] == {"nonfinite_values": 4}
    for name in ("records.jsonl", "summary.json"):
        text = (tmp_path / name).read_text()
        assert not any(word in text for word in ("NaN", "Infinity"))


def test_plain_takes_arrays_tensors_and_names_what_it_cannot_take() -> None:
    torch = pytest.importorskip("torch")
    values = {
        1: np.int32(3),
        "array": np.array([1.5, np.nan]),
        "tensor": torch.tensor(2.5, dtype=torch.bfloat16),
        "path": Path("a/b"),
        "ending": {"x": (True, None)},
    }
    assert plain(values) == (
        {"1": 3, "array": [1.5, None], "tensor": 2.5, "path": "a/b", "ending": {"x": [True, None]}},
        1,
    )
    with pytest.raises(TypeError, match=r"stage\.rows\[1\]"):
        plain({"rows": [1, object()]}, "stage")


def test_untimed_leaves_what_two_runs_have_in_common(tmp_path: Path) -> None:
    found = []
    for name, pause_s in (("a", 0.0), ("b", 0.02)):
        meter = Meter(tmp_path / name)
        with meter.span("pack" if pause_s else "score"):
            time.sleep(pause_s)
        speed = 1 / (1 + pause_s)
        rates = {"tokens_per_s": speed, "overlap_saved_s": {"stream": pause_s}}
        meter.record("stage", {"loss": 0.5, **rates, "inner": {"time": pause_s}})
        found += read_lines(meter.out / "records.jsonl")
    assert found[0] != found[1]
    assert (
        untimed(found[0])
        == untimed(found[1])
        == {**{"kind": "stage", "loss": 0.5, "inner": {}, "counts": {}}}
    )
    assert set(found[0]) - set(untimed(found[0])) == TIMING_KEYS


def test_half_a_line_is_left_out_and_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"a": 1}\n{"b": "\xc3')
    assert read_lines(path) == [{"a": 1}]
    path.write_text('{"a": 1}\nbroken\n{"b": 2}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2"):
        read_lines(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="one JSON object"):
        read_lines(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(tmp_path)
    meter.record("stage", {"n": 1})
    meter.count("kept")
    real = meter._records._file

    class Full:
        def write(self, data: bytes) -> int:
            if len(data) < 60:
                raise OSError(28, "No space left on device")
            return real.write(data[:50])  # a short write, then none

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(meter._records, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        meter.record("stage", {"n": 2})
    monkeypatch.undo()
    meter.record("stage", {"n": 3})
    records = read_lines(tmp_path / "records.jsonl")
    assert [record["n"] for record in records] == [1, 3]
    assert records[1]["counts"] == {"kept": 1}


# --- resume ---------------------------------------------------------------------------------------


def play(meter: Meter, clock: Clock, steps: range) -> None:
    for step in steps:
        with meter.span("forward_backward"):
            clock.pass_s(2)
        clock.pass_s(1)
        meter.count("tool_call", step)
        meter.record("stage", {"step": step})
        meter.sample({"step": step})


def test_a_killed_and_resumed_run_equals_one_that_was_not(tmp_path: Path) -> None:
    whole = Meter(tmp_path / "whole", clock=(clock := Clock()))
    play(whole, clock, range(6))
    first = Meter(tmp_path / "killed", clock=(clock := Clock()))
    play(first, clock, range(3))
    state = json.loads(json.dumps(first.state()))
    play(first, clock, range(3, 5))  # lost: after the checkpoint
    with (first.out / "records.jsonl").open("ab") as file:
        file.write(b'{"kind": "st')
    second = Meter(first.out, state=state, clock=(clock := Clock()))
    play(second, clock, range(3, 6))
    for name in ("records.jsonl", "samples.jsonl"):
        left = [untimed(r) for r in read_lines(whole.out / name)]
        assert left == [untimed(r) for r in read_lines(second.out / name)]
    a, b = whole.summary({}), second.summary({})
    assert a["counts"] == b["counts"] == {"tool_call": 15}
    assert b["spans"] == {"forward_backward": 12.0, "lost": 6.0, "other": 6.0}
    assert a["wall_s"] == 18.0 and b["wall_s"] == 24.0  # the two lost steps were paid for


def test_events_and_time_of_a_half_stage_are_in_the_state(tmp_path: Path, clock: Clock) -> None:
    first = Meter(tmp_path, clock=clock)
    with first.span("trunk_decode"):
        clock.pass_s(3)
    first.count("tool_call", 2)
    second = Meter(tmp_path, state=first.state(), clock=(later := Clock()))
    later.pass_s(1)
    second.record("stage", {})
    (record,) = read_lines(tmp_path / "records.jsonl")
    assert record["counts"] == {"tool_call": 2}
    assert record["spans"] == {"trunk_decode": 3.0, "other": 1.0}


def test_without_a_state_the_files_begin_anew(tmp_path: Path, clock: Clock) -> None:
    play(Meter(tmp_path, clock=clock), clock, range(2))
    again = Meter(tmp_path, clock=clock)
    assert (tmp_path / "records.jsonl").read_bytes() == b""
    assert again.ledger()["spans"] == {"lost": 6.0}


def test_a_file_shorter_than_the_state_is_an_error(tmp_path: Path, clock: Clock) -> None:
    first = Meter(tmp_path, clock=clock)
    play(first, clock, range(2))
    state = first.state()
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"records\.jsonl holds 0 bytes"):
        Meter(tmp_path, state=state)


# --- summary --------------------------------------------------------------------------------------


def test_summary_is_written_whole_with_versions_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(tmp_path, devices=2)
    returned = meter.summary({"recipe": "quickstart", "wall_s": "the ledger's wins"})
    assert returned == json.loads((tmp_path / "summary.json").read_text())
    assert returned["device_seconds"] == 2 * returned["wall_s"]
    assert returned["versions"]["numpy"] == np.__version__
    assert set(returned["versions"]) == {"python", "torch", "transformers", "numpy", "fastturn"}
    assert returned["commit"] == commit()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "summary.json", {"half": True})
    assert json.loads((tmp_path / "summary.json").read_text()) == returned


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout_and_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "fastturn").mkdir(parents=True)
    (tree / "fastturn" / "provenance.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(tree / "fastturn" / "provenance.py"))
    installed = versions()["fastturn"] or "unknown"
    assert commit() == installed  # not a repository
    git(tree, "init", "-q")
    assert commit() == installed  # no commit yet
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    head = git(tree, "rev-parse", "HEAD")
    assert commit() == head
    (tree / "new.py").write_text("")
    assert commit() == head + "+dirty"
    # Installed inside somebody's repository: that repository's commit says nothing of ours.
    site = tree / ".venv" / "site-packages" / "fastturn"
    site.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(site / "provenance.py"))
    assert commit() == installed
    monkeypatch.setenv("PATH", "")
    assert commit() == installed  # no git
