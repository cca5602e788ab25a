"""What measuring costs: meters that take turns share the work evenly, and spans stay few."""

from __future__ import annotations

import time

import pytest

from fastturn.bench.metering import STILL, MeteringCase, Silent, Turns, paired, rows, spans_of
from fastturn.bench.quickstarts import opened
from fastturn.meter import Meter


def test_each_piece_of_the_work_is_measured_once_by_each_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of 1, 2, 4 and 8 seconds; the second meter takes .5 more in each."""
    now_s = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now_s[0])
    turns = Turns(Silent(), Silent())

    def work() -> None:
        for place, seconds in enumerate((1, 2, 4, 8)):
            if place:
                turns.change()
            now_s[0] += seconds + 0.5 * turns.turn

    assert turns.of(work) == (15.0, 17.0)


def test_work_that_is_not_the_same_twice_is_refused() -> None:
    turns = Turns(Silent(), Silent())
    calls = iter((1, 2))

    def work() -> None:
        for _ in range(next(calls)):
            turns.count("event")

    with pytest.raises(AssertionError, match="not the same work twice"):
        turns.of(work)


def test_a_meter_that_costs_a_tenth_is_seen() -> None:
    pairs = [(2.0, 2.2), (4.0, 4.4), (1.0, 1.1)]
    found = {m.metric: m.values for m in rows(MeteringCase("grpo"), "on", pairs, (30, 2e-6))}
    for metric in ("overhead", "overhead, 95 % from", "overhead, 95 % to"):
        assert found[metric] == pytest.approx((10.0,))
    assert found["spans x their time / iteration"] == pytest.approx((3e-5, 1.5e-5, 6e-5))


def test_spans_do_not_grow_with_episodes(tmp_path) -> None:
    """Answers that are there are taken in one span, however many they are."""
    spans, few = [], [pair for pair in STILL if not pair.startswith("tasks=")]
    for tasks in (4, 32):
        with opened(("algorithm=grpo", f"tasks={tasks}", "model.layers=1", *few)) as run:
            spans.append(spans_of(run))
            with Meter(tmp_path / str(tasks)) as meter:
                ((off_s, on_s),) = paired(run, meter, 1)
                assert off_s > 0 and on_s > 0 and meter.ledger()["spans"]["sibling_decode"] > 0
    assert spans[1] < 3 * spans[0] < 300
