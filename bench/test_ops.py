"""The op rows as pytest-benchmark entries: `pytest bench/ --benchmark-only`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastturn.bench import cases, ops
from fastturn.bench.measure import Provider, check_equal

SMALL = replace(cases.SurrogateCase("live"), actions=256, vocab=8192)


def providers() -> dict[str, dict[str, Provider]]:
    found = {"surrogate": ops.surrogate_providers(cases.surrogate_inputs(SMALL, "cpu"))}
    for case in cases.ATTENTION[:1]:
        found[case.name] = ops.attention_providers(case, "cpu")
    return found


RUN = providers()
PAIRS = [(case, name) for case, run in RUN.items() for name in run]


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_time(benchmark: Any, case: str, name: str) -> None:
    run = RUN[case]
    truth = next(other for other in run if other != "fastturn")
    check_equal(run, truth, ops.TOLERANCE)
    benchmark.group = case
    benchmark(run[name])
