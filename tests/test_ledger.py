"""Device-seconds close over pools and spans, say what they waited for, and have a price."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastturn import cli
from fastturn.bill import MEANINGS, REMEDIES, SERVING, bill, device_seconds, parts, remedy, waiting
from fastturn.energy import open_energy
from fastturn.ledger import WAITS, WAITS_WITH_SERVERS, Held, curves, levels
from fastturn.meter import SPANS, Follower, Meter
from fastturn.records import read_lines
from fastturn.runfiles import load
from fastturn.sampler.members import Occupied
from fastturn.trackers import scalars

S = 1_000_000_000


@dataclass
class Busy:
    """Servers that were busy for so long."""

    devices: int = 3
    ns: int = 0

    def busy_ns(self) -> int:
        return self.ns


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**9), st.integers(0, 4 * 10**9))),
    st.integers(0, 5),
)
def test_pools_sum_to_devices_times_wall_clock(
    steps: list[tuple[str, int, int]], served_from: int
) -> None:
    """Whatever servers say, also when their clock runs ahead for a while."""
    held, servers, wall_ns = Held(2, {}), Busy(), 0
    for number, (name, ns, busy_ns) in enumerate(steps):
        if number == served_from:
            held.serve(servers)
        servers.ns += busy_ns
        held.add(name, ns)
        wall_ns += ns
    pools = held.pools()
    assert pools["trainer"]["device_seconds"] == pytest.approx(2 * wall_ns / S)
    assert sum(pools["trainer"]["spans"].values()) == pytest.approx(2 * wall_ns / S)
    if "servers" in pools:
        found = pools["servers"]
        assert found["device_seconds"] == pytest.approx(3 * wall_ns / S)
        assert found["busy"] + sum(found["idle"].values()) == pytest.approx(3 * wall_ns / S)
        assert min(found["idle"].values(), default=0) >= 0
    assert held.total_ns == (5 if "servers" in pools else 2) * wall_ns


def test_idle_is_named_by_who_waits_for_what() -> None:
    held, servers = Held(2, {}), Busy(devices=1)
    held.add("setup", 1 * S)
    held.serve(servers)
    servers.ns += 3 * S
    held.add("sibling_decode", 4 * S)
    held.add("forward_backward", 5 * S)
    held.add("environment", 1 * S)
    assert held.idle() == {
        "trainer waits for servers": 8.0,
        "servers wait for forward_backward": 5.0,
        "trainer waits for tools": 2.0,
        "servers wait for setup": 1.0,
        "servers wait for sibling_decode": 1.0,
        "servers wait for environment": 1.0,
    }


def test_a_resumed_run_on_other_devices_keeps_what_was_held() -> None:
    first = Held(4, {})
    first.add("pack", 2 * S)
    second = Held(1, json.loads(json.dumps(first.state())))
    second.add("pack", 3 * S)
    assert second.pools()["trainer"]["device_seconds"] == 4 * 2 + 1 * 3


def test_overlapping_requests_are_busy_once() -> None:
    now = [0]
    occupied = Occupied(lambda: now[0])
    with occupied:
        now[0] = 2
        with occupied:
            now[0] = 5
            assert occupied.ns() == 5
        now[0] = 6
    now[0] = 9
    assert occupied.ns() == 6


def test_levels_are_bought_by_the_first_evaluation_that_shows_them() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "eval", "success": 0.31, "device_seconds": 40.0},
        {"kind": "iteration", "success": 0.99, "rollouts_total": 500, "device_seconds": 80.0},
        {"kind": "eval", "success": 0.52, "device_seconds": 90.0},
        {"kind": "eval", "success": 0.45, "device_seconds": 120.0},
    ]
    found = levels(records)
    assert [(x["success"], x["device_seconds"], x["rollouts"]) for x in found] == [
        *((level, 40.0, 0) for level in (0.1, 0.2, 0.3)),
        *((level, 90.0, 500) for level in (0.4, 0.5)),
    ]
    assert found[-1]["gpu_hours"] == 90 / 3600


# --- energy ---------------------------------------------------------------------------------------


class Nvml(types.ModuleType):
    """NVIDIA's binding with one GPU that has used `mj`."""

    class NVMLError(Exception):
        pass

    mj, broken = 5000, False

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "GPU-12-34"
        return self.mj


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return made


def test_energy_of_all_ranks_is_added_up_and_survives_a_resume(nvml: Nvml, tmp_path: Path) -> None:
    leader = Meter(tmp_path, energy=open_energy("cuda"))
    follower = Follower(energy=open_energy("cuda"))
    for _ in range(2):
        nvml.mj += 1_800_000  # each GPU, as both read the same one here
        leader.absorb(follower.drain())
    assert leader.ledger()["energy_kwh"] == pytest.approx(2 * 3600 / 3.6e6)
    again = Meter(tmp_path, state=leader.state(), energy=open_energy("cuda"))
    nvml.mj += 3_600_000
    assert again.ledger()["energy_kwh"] == pytest.approx(3 * 3600 / 3.6e6)
    assert again.ledger()["energy_note"] == ""


def test_what_counts_no_energy_is_named(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.broken = True
    assert open_energy("cuda").note == "not measured: NVML says Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in open_energy("cuda").note
    ledger = Meter(tmp_path, energy=open_energy("cpu")).ledger()
    assert ledger["energy_kwh"] is None and "this is a cpu run" in ledger["energy_note"]


# --- bill -----------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run of two trainer devices and three of servers that took 10 s."""
    now, servers = [0], Busy()
    meter = Meter(tmp_path, devices=2, clock=lambda: now[0])
    meter.serve(servers)
    for name, seconds, busy in (("sibling_decode", 2, 5), ("forward_backward", 7, 0)):
        with meter.span(name):
            now[0] += seconds * S
            servers.ns += busy * S
    now[0] += S
    meter.record("eval", {"split": "after", "iteration": 1, "success": 0.42})
    meter.summary({"successes": 25, "levels": levels(read_lines(tmp_path / "records.jsonl"))})
    meter.close()
    return tmp_path


def test_parts_are_what_devices_did_or_waited_for(out: Path) -> None:
    run = load(out)
    assert parts(run) == {
        "servers wait for forward_backward": 21.0,
        "forward_backward": 14.0,
        SERVING: 5.0,
        "trainer waits for servers": 4.0,
        "servers wait for other": 3.0,
        "other": 2.0,
        "servers wait for sibling_decode": 1.0,
    }
    assert sum(parts(run).values()) == device_seconds(run) == 50.0
    assert sum(waiting(run).values()) == 29.0


def test_a_run_without_a_summary_has_parts_and_a_price_too(out: Path) -> None:
    (out / "summary.json").unlink()
    run = load(out)
    assert device_seconds(run) == 50.0 and parts(run)["forward_backward"] == 7.0
    assert [row["what"] for row in bill(run)["rows"]][1] == "held-out success 10 %"


def test_the_bill_prices_successes_and_levels(out: Path) -> None:
    rows = {row["what"]: row for row in bill(load(out), price=7.2)["rows"]}
    assert rows["the whole run"]["money"] == pytest.approx(0.1)
    assert rows["one successful training rollout"]["seconds"] == 2.0
    assert rows["held-out success 40 %"]["hours"] == pytest.approx(50 / 3600)
    assert "held-out success 50 %" not in rows


def test_a_run_with_a_price_tells_money_in_summary_trackers_and_report(tmp_path: Path) -> None:
    now = [0]
    meter = Meter(tmp_path, devices=2, clock=lambda: now[0])
    now[0] = 900 * S
    meter.record("eval", {"split": "after", "iteration": 1, "success": 0.12})
    now[0] = 1800 * S
    reached = levels(read_lines(tmp_path / "records.jsonl"))
    summary = meter.summary({"successes": 8, "levels": reached, "price_per_gpu_hour": 1.6})
    meter.close()
    assert summary["money"] == pytest.approx(1.6) and summary["money_per_success"] == 0.2
    assert [x["money"] for x in summary["levels"]] == [pytest.approx(0.8)]
    shown = scalars(curves(summary))
    assert shown["ledger/money"] == pytest.approx(1.6)
    assert shown["ledger/money to success/0.1"] == pytest.approx(0.8)
    told = bill(load(tmp_path))
    assert told["priced"] and told["rows"][0]["money"] == pytest.approx(1.6)
    assert bill(load(tmp_path), price=3.2)["rows"][0]["money"] == pytest.approx(3.2)
    assert "money" not in meter.summary({"successes": 8})


def test_report_tells_the_largest_part_and_the_money(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(out), "--price", "7.2", "--slowest"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "largest: servers wait for forward_backward, 42.0 %; to reduce it: servers are" in shown
    page = (out / "report.html").read_text()
    assert "servers wait for forward_backward" in page and "held-out success 40" in page
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(out), "--price", "-1"])
    assert stop.value.code == 2 and "expected the price of a device-hour" in capsys.readouterr().err


def test_every_part_that_can_be_reduced_says_how() -> None:
    names = {f"trainer waits for {r}" for r in WAITS_WITH_SERVERS.values()} | {SERVING}
    spans = set(SPANS) - set(WAITS_WITH_SERVERS) - {"other", "report"}
    assert names | spans <= set(REMEDIES)
    assert all(MEANINGS[f"trainer waits for {who}"] for who in WAITS.values())
    assert set(REMEDIES) <= names | set(SPANS)
    assert remedy("servers wait for publish") and remedy("other").startswith("nothing")
