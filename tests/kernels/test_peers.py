"""The peer benchmark: every provider computes one loss, errors are judged, absence is named."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from fastturn.bench import measure, peers

SMALL = peers.PeerCase(4, 6, 16, 70, "float32")


def test_providers_agree_with_plain_torch() -> None:
    inputs = peers.peer_inputs(SMALL, "cpu")
    run = peers.providers(inputs, compiled=False)
    assert list(run) == ["fastturn", "liger", "trl"]
    plain = {"plain": lambda: peers.step(peers.plain_loss, inputs)}
    measure.check_equal(plain | run, "plain", 1e-5)


def test_gradient_error_is_at_most_half_of_liger_s() -> None:
    """64 sequences in bfloat16: the head's gradient is rounded once here, and once a sequence
    there."""
    found = peers.errors_of(peers.ERROR, "cpu")
    for gradient in ("dhidden", "dhead"):
        assert found["fastturn"][gradient] <= 0.5 * found["liger"][gradient], gradient
        assert found["fastturn"][gradient] <= found["plain"][gradient], gradient


def test_no_token_is_clipped() -> None:
    """All rows have a gradient, so that nothing is skipped while peers compute everything."""
    inputs = peers.peer_inputs(SMALL, "cpu")
    (_, dhidden_BTD, _) = peers.step(peers.fastturn_loss, inputs)
    assert dhidden_BTD.abs().sum(-1).min() > 0


def test_rows_of_a_run(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PARTS, "error", (peers.errors, SMALL))
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
    assert set(rows) == {(name, "time") for name in ("fastturn", "liger", "trl")} | ratios
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
