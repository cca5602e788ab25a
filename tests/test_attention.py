"""Which implementation of attention runs, that its first use is checked, and that a wrong one is
replaced and said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastturn import attention
from fastturn.attention import Backend, Choice, Sample, Scores, TreeAttention, choose, recorded
from fastturn.config import ConfigError
from fastturn.kernels import TreePlan, torch_attention

CPU = torch.device("cpu")


def rows(file: Path, *values: tuple[str, str, str, float]) -> Path:
    """Result rows of (device, case, provider, seconds)."""
    lines = [
        json.dumps({"device": d, "case": c, "provider": p, "metric": "time", "p50": t})
        for d, c, p, t in values
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_cpu_takes_torch():
    assert choose("auto", CPU) == Choice("torch", "the one for a CPU")


def test_a_name_is_taken_as_it_is():
    assert choose("reference", CPU).impl == "reference"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash", "attention='flash': .*CUDA"),
        ("flex", "attention='flex': expected a CUDA device, got cpu; use auto, or torch"),
        ("flsh", "expected one of auto, .*triton.*torch"),
    ],
)
def test_a_name_that_cannot_run_says_why(name, message):
    with pytest.raises(ConfigError, match=message):
        choose(name, CPU)


def test_recorded_results_decide(tmp_path, monkeypatch):
    """Only rows of this device, only cases that all have, the newest row of each."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    reasons = {"triton": None, "flex": None, "flash": "not installed", "torch": None}
    monkeypatch.setattr(attention, "attention_implementations", lambda device: reasons)
    file = rows(
        tmp_path / "gpu.jsonl",
        ("NVIDIA H200", "attention/a", "fastturn triton", 9e-3),
        ("NVIDIA H200", "attention/a", "fastturn triton", 2e-3),
        ("NVIDIA H200", "attention/a", "fastturn flex", 1e-3),
        ("NVIDIA H200", "attention/a", "fastturn flash", 1e-4),
        ("NVIDIA H200", "attention/b", "fastturn triton", 2e-3),
        ("NVIDIA H200", "attention/b", "fastturn flex", 2e-3),
        ("NVIDIA H200", "attention/b", "fastturn flash", 2e-3),
        ("NVIDIA H200", "attention/c", "fastturn triton", 1e-9),
        ("NVIDIA H200", "attention/a", "sdpa, dense mask", 1e-9),
        ("NVIDIA A100", "attention/a", "fastturn triton", 1e-9),
    )
    assert recorded(file, "NVIDIA H200")["triton"] == pytest.approx(2e-3)
    cuda = torch.device("cuda")
    found = choose("auto", cuda, file)
    assert found.impl == "flex" and "triton 1.41x" in found.why and "flash" not in found.why
    assert choose("auto", cuda, tmp_path / "none").impl == "triton"
    assert "scripts/gpu_check" in choose("auto", cuda, tmp_path / "none").why


def tree() -> tuple[Tensor, Tensor]:
    """A context of 6 with three siblings, one of them with two branches of its own."""
    end_T = torch.tensor([16] * 6 + [9] * 3 + [14, 14, 12, 14, 14] + [16] * 2)
    position_T = torch.tensor([*range(6), 6, 7, 8, 6, 7, 8, 8, 9, 6, 7])
    return end_T, position_T


def qkv(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, tokens, 8, generator=draw).to(dtype) for n in (4, 2, 2)]


SCORES = [
    Scores(),
    Scores(0.5, window=3),
    Scores(softcap=2.0),
    Scores(0.2, 4, 3.0),
    Scores(window=1),
]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_right_implementations_pass_their_check(scores, dtype, caplog):
    backend = Backend("torch")
    TreeAttention(*tree(), backend)(0, *qkv(16, dtype), scores)
    assert set(backend.checked.values()) == {"torch"} and not caplog.records


@pytest.mark.parametrize("seed", range(8))
def test_rounding_of_large_scores_is_no_fault(seed: int, caplog):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 3, 16, 64, generator=draw) * size for size in (4.0, 4.0, 1.0))
    backend = Backend("torch")
    TreeAttention(*tree(), backend)(0, q, k, v, Scores())
    assert set(backend.checked.values()) == {"torch"} and not caplog.records


def test_the_check_runs_once_for_each_kind_of_input(monkeypatch):
    checks: list[Any] = []
    monkeypatch.setattr(Sample, "disagreement", lambda self, impl: checks.append(impl))
    backend = Backend()
    for _ in range(2):
        for scores in SCORES[:2]:
            TreeAttention(*tree(), backend)(0, *qkv(16), scores)
            TreeAttention(*tree(), backend)(1, *qkv(16, torch.float64), scores)
    assert checks == ["torch"] * 4


@pytest.mark.parametrize("fault", ["out", "dq", "dk", "dv", "raises", "nan"])
def test_a_wrong_implementation_is_replaced_loudly(fault, monkeypatch, caplog):
    """Each output and gradient on its own; the answer is right from the first call on."""
    right = torch_attention.attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no such instruction")
        out = right(q, k, v, *rest)
        off = {"dq": q, "dk": k, "dv": v}.get(fault)
        if off is not None:  # the value stays, the gradient does not
            return out + 0.01 * (off - off.detach()).sum()
        return out * torch.nan if fault == "nan" else out + 0.01

    inputs, scores = qkv(16), Scores()
    want = TreeAttention(*tree(), Backend("reference"))(0, *inputs, scores)
    monkeypatch.setattr(torch_attention, "attend", wrong)
    backend = Backend("torch")
    with caplog.at_level(logging.WARNING):
        got = TreeAttention(*tree(), backend)(0, *inputs, scores)
    torch.testing.assert_close(got, want)
    assert set(backend.checked.values()) == {"reference"}
    assert "'torch' is wrong" in caplog.text and "falling back to 'reference'" in caplog.text
    assert (fault in caplog.text) or fault in ("nan", "raises")


def test_a_sample_of_a_large_layout_is_small_and_a_tree():
    tokens, context = 3000, 1000
    end_T = torch.tensor([tokens] * context + [context + 20 * (i // 20 + 1) for i in range(2000)])
    inputs = tuple(torch.randn(tokens, 2, 4) for _ in range(3))
    position_T = torch.cat([torch.arange(context), context + torch.arange(2000) % 20])
    sample = Sample.of(inputs, TreePlan(end_T, None, position_T), Scores())
    assert len(sample.inputs[0]) == attention.SAMPLE and len(sample.paths) == attention.LEAVES
    for path in sample.paths:
        leaf = int(path[-1])
        seen_T = (sample.plan.end_T > leaf) & (torch.arange(len(sample.inputs[0])) <= leaf)
        assert torch.equal(seen_T.nonzero().flatten(), path) and len(path) > 100
    assert sample.disagreement("torch") is None
