"""The timeline holds every span of every rank; ranges and profiles open and close in pairs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fastturn.config import ConfigError
from fastturn.meter import Follower, Meter
from fastturn.timeline import Nvtx, Profile, Timeline, open_watchers


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
