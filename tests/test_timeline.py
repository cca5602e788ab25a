"""The timeline holds every span of every rank; ranges and profiles open and close in pairs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from fastturn import cli
from fastturn.config import ConfigError
from fastturn.meter import Follower, Meter
from fastturn.timeline import FOREIGN, Nvtx, Profile, Timeline, align, open_watchers


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def test_spans_nest_and_add_up_to_the_ledger(tmp_path: Path) -> None:
    meter = Meter(tmp_path, watchers=open_watchers(("trace", "none"), tmp_path, 0))
    with meter.span("sibling_decode"), meter.span("environment"):
        pass
    with meter.span("forward_backward"):
        pass
    meter.record("stage", {"iteration": 3, "stage": 1})
    spans = meter.ledger()["spans"]
    meter.close()
    found = {event["name"]: event for event in events(tmp_path / "trace.json", "X")}
    outer, inner = found["sibling_decode"], found["environment"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
    own = {n: e["dur"] for n, e in found.items()} | {"sibling_decode": outer["dur"] - inner["dur"]}
    assert {n: us / 1e6 for n, us in own.items()} == pytest.approx(
        {n: spans[n] for n in own}, abs=1e-9
    )
    (mark,) = events(tmp_path / "trace.json", "i")
    assert mark["name"] == "stage" and mark["args"] == {"iteration": 3, "stage": 1}


def test_another_rank_and_another_thread_have_lanes_of_their_own(tmp_path: Path) -> None:
    leader = Meter(tmp_path, watchers=open_watchers(("trace",), tmp_path, 0))
    follower = Follower(open_watchers(("trace",), tmp_path, 1))

    def play() -> None:
        with leader.aside("environment"):
            pass

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    with follower.span("pack"):
        pass
    follower.record("stage", {"iteration": 0, "stage": 2})
    leader.absorb(follower.drain())
    assert "environment" not in leader.ledger()["spans"]
    leader.close()
    lanes = {(e["name"], e["pid"], e["tid"]) for e in events(tmp_path / "trace.json", "X")}
    assert lanes == {("environment", 0, 1), ("pack", 1, 0)}
    names = {(e["pid"], e["args"]["name"]) for e in events(tmp_path / "trace.json", "M")}
    assert {(0, "rank 0"), (1, "rank 1"), (0, "rollouts beside it")} <= names


def test_a_killed_run_leaves_a_timeline_that_a_resumed_one_continues(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    killed = Timeline(0, path)
    killed.end("first", 0, 1000)
    killed.flush()
    with path.open("ab") as file:
        file.write(b'{"name": "half')
    again = Timeline(0, path)
    again.end("second", 2000, 3000)
    again.close()
    third = Timeline(0, path)
    third.end("third", 4000, 5000)
    third.close()
    assert [event["name"] for event in events(path, "X")] == ["first", "second", "third"]


@pytest.mark.parametrize("name", ["server.json", "server.json.gz"])
def test_a_trace_of_another_program_is_put_where_it_happened(tmp_path: Path, name: str) -> None:
    """Written by torch.profiler, as vLLM's are, while a span was open."""
    timeline = Timeline(0, tmp_path / "trace.json")
    with Meter(tmp_path, watchers=[timeline]) as meter, meter.span("sibling_decode"):
        time.sleep(0.01)
        with profile() as profiler:
            torch.ones(3).sum()
        time.sleep(0.01)
    profiler.export_chrome_trace(str(tmp_path / name))
    assert cli.main(["report", str(tmp_path), "--servers", str(tmp_path / name)]) == 0
    events = json.loads((tmp_path / "trace-aligned.json").read_text())
    (span,) = (e for e in events if e["name"] == "sibling_decode")
    others = [e for e in events if e["name"] == "aten::sum"]
    assert others and all(e["pid"] >= FOREIGN for e in others)
    for event in others:
        assert span["ts"] < event["ts"] and event["ts"] + event["dur"] < span["ts"] + span["dur"]


def test_what_cannot_be_aligned_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no timeline to align with; train with trackers=trace"):
        align(tmp_path, [])
    Timeline(0, tmp_path / "trace.json").close()
    (tmp_path / "old.json").write_text('{"traceEvents": []}')
    for name, reason in (("old.json", "baseTimeNanoseconds"), ("none.json", "No such file")):
        with pytest.raises(ConfigError, match=f"{name}: expected a trace .*{reason}"):
            align(tmp_path, [tmp_path / name])
    assert not (tmp_path / "trace-aligned.json").exists()


def test_ranges_of_nvtx_are_pushed_and_popped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    follower = Follower([Nvtx()])
    with follower.span("publish"), follower.span("pack"):
        pass
    assert calls == ["fastturn", "publish", "pack", "pop", "pop"]


def test_a_torch_without_nvtx_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(text: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", absent)
    with pytest.raises(ConfigError, match=r"trackers=nvtx.*expected a CUDA build.*trace"):
        open_watchers(("nvtx",), tmp_path, 0)


def test_the_second_stage_is_profiled_with_spans_as_ranges(tmp_path: Path) -> None:
    profile = Profile(0, tmp_path / "profile")
    follower = Follower([profile])
    for stage in range(3):
        with follower.span(f"forward_backward {stage}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        follower.record("iteration", {})
        follower.record("stage", {"stage": stage})
    with follower:
        pass
    names = [e["name"] for e in json.loads((tmp_path / "profile" / "rank-0.json").read_text())[
        "traceEvents"
    ]]  # fmt: skip
    assert "forward_backward 1" in names and "aten::mm" in names
    assert not {"forward_backward 0", "forward_backward 2"} & set(names)


def test_a_run_too_short_to_profile_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Follower([Profile(0, tmp_path)]) as follower:
        follower.record("stage", {"stage": 0})
    assert "ended after 1; no profile was written" in caplog.text
    assert not list(tmp_path.iterdir())
