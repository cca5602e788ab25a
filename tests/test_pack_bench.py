"""The packing benchmark: its two layouts agree, and a million tokens take less than a second."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from fastturn.bench import pack as bench
from fastturn.pack import pack


def small(case: bench.PackCase) -> bench.PackCase:
    context = (case.context[0] // 100, case.context[1] // 100)
    return replace(
        case,
        groups=3,
        siblings=2,
        turns=min(case.turns, 4),
        context=context,
        action=12,
        observed=min(case.observed, 16),
        dropped=min(case.dropped, 7),
        budget=256,
    )


@pytest.mark.parametrize("case", [*map(small, bench.CASES)], ids=lambda case: case.name)
def test_layouts_agree_and_everything_is_measured(case: bench.PackCase) -> None:
    found = {(m.provider, m.metric): m.values for m in bench.measure(case, repeats=1)}
    assert found["8 ranks", "waiting included / mean"] >= found["8 ranks", "dearest rank / mean"]
    assert found["fastturn", "tokens"] < found["rows", "tokens"]


def test_the_summary_sees_a_wrong_depth() -> None:
    batches = pack(bench.groups(small(bench.CASES[1])), 256)
    moved = [replace(batch, source_A=(batch.source_A - 1).clamp(min=0)) for batch in batches]
    differ = torch.stack(bench.summary(batches)) != torch.stack(bench.summary(moved))
    assert differ.tolist() == [False, True, False, False]


def test_unknown_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["everything", "--no-record"])
    assert "unknown case everything: expected any of siblings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_million_tokens_in_a_second(case: bench.PackCase, ranks: int) -> None:
    credits, seconds = bench.groups(case), []
    for _ in range(3):
        start = time.process_time()
        batches = pack(credits, case.budget, ranks=ranks)
        seconds.append(time.process_time() - start)
    packed = sum(batch.tokens_packed for batch in batches)
    assert packed * ranks > 0.9e6 and min(seconds) < packed * ranks / 1e6
