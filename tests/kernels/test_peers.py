"""The peer benchmark: every provider computes one loss, errors are judged, absence is named."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from fastturn.bench import gpu_sections, measure, peers, roofline

SMALL = peers.PeerCase(4, 6, 16, 70, "float32")


def test_providers_agree_with_plain_torch() -> None:
    inputs = peers.peer_inputs(SMALL, "cpu")
    run = peers.providers(inputs, compiled=False)
    assert list(run) == ["fastturn", "liger", "trl"]
    plain = {"plain": lambda: peers.step(peers.plain_loss, inputs)}
    measure.check_equal(plain | run, "plain", 1e-5)


@pytest.mark.parametrize("seed", [0, 1, 11])
def test_gradient_errors_are_those_of_one_rounding(seed: int) -> None:
    """64 sequences in bfloat16. Nothing in that dtype is closer to the truth: that can be promised,
    and no share of Liger's error of dhidden. The head's gradient is rounded once here, and once a
    sequence there."""
    found = peers.errors_of(peers.ERROR, "cpu", seed)
    for gradient in ("dhidden", "dhead"):
        ours = found["fastturn"][gradient]
        assert ours <= 1.01 * found["rounding"][gradient], gradient
        assert ours <= found["plain"][gradient], gradient
        assert ours < found["liger"][gradient], gradient
    assert found["fastturn"]["dhead"] <= 0.5 * found["liger"]["dhead"]


def test_share_of_the_floor_on_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """(8192, 4096, 151936) has a floor of 30.91 ms on an H200: half of the time at 61.82 ms. A
    device without an entry has only its share of the measured ceiling."""
    work = roofline.surrogate(8192, 4096, 151936)
    for device, metrics in (
        ("NVIDIA H200", ["time", "fraction of ceiling", "fraction_of_floor"]),
        ("NVIDIA Unknown", ["time", "fraction of ceiling"]),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=device: name)
        check = gpu_sections.Check("cuda", dry=False, ceiling_flops_s=700e12)
        times = {"fastturn": [0.06182, 0.03091], "absent": []}
        gpu_sections.rows_of_times(check, "case", times, work, {})
        assert [m.metric for m in check.measured] == metrics
        ceiling = check.measured[1].values
        assert ceiling == pytest.approx([0.7069, 1.4138], rel=1e-3)
        if len(metrics) == 3:
            assert check.measured[2].values == pytest.approx([0.5, 1.0], rel=1e-3)


def test_no_token_is_clipped() -> None:
    """All rows have a gradient, so that nothing is skipped while peers compute everything."""
    inputs = peers.peer_inputs(SMALL, "cpu")
    (_, dhidden_BTD, _) = peers.step(peers.fastturn_loss, inputs)
    assert dhidden_BTD.abs().sum(-1).min() > 0


def test_rows_of_a_run(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PARTS, "error", (peers.errors, SMALL))
    monkeypatch.setattr(peers, "SEEDS", 2)
    assert peers.main(["error", "--no-record"]) == 0
    printed = capsys.readouterr().out
    for metric in ("dhead error / liger", "dhidden error / trl", "grpo/4x6/float32"):
        assert metric in printed


def test_an_absent_peer_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trl" else there(name)
    )
    assert list(peers.losses(compiled=False)) == ["fastturn", "liger"]
    assert "trl: left out, trl is not installed" in capsys.readouterr().out


def test_times_and_their_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a provider and one ratio a peer; the peer's compiler is left out of this test."""
    whole = peers.providers
    monkeypatch.setattr(peers, "providers", lambda inputs, compiled: whole(inputs, compiled=False))
    case = peers.PeerCase(2, 4, 8, 40, "float32")
    rows = {(m.provider, m.metric): m for m in peers.times(case, 3, "cpu")}
    ratios = {("fastturn", "time / liger"), ("fastturn", "time / trl")}
    each = {(n, m) for n in ("fastturn", "liger", "trl") for m in ("time", "fraction of floor")}
    assert set(rows) == each | ratios
    assert all(share > 0 for share in rows["trl", "fraction of floor"].values)
    ours, theirs = (rows[name, "time"].values for name in ("fastturn", "liger"))
    want = tuple(x / y for x, y in zip(ours, theirs, strict=True))
    assert rows["fastturn", "time / liger"].values == want


def test_unknown_part_is_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        peers.main(["speed"])
    assert "unknown part speed: expected any of time, error" in capsys.readouterr().err


def test_float64_copies_hold_the_same_numbers() -> None:
    inputs = peers.peer_inputs(peers.PeerCase(2, 3, 8, 40, "bfloat16"), "cpu")
    wide = inputs.to(torch.float64)
    assert (wide.hidden_BTD.dtype, wide.behavior_BT.dtype) == (torch.float64, torch.float64)
    assert torch.equal(wide.head_VD.detach(), inputs.head_VD.detach().double())
