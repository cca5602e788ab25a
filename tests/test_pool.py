"""Environment steps: in order, errors kept apart, a stuck one abandoned at its deadline."""

from __future__ import annotations

import threading
import time
from functools import partial

from fastturn.pool import DeadlineError, run_all


def test_results_come_in_order():
    assert run_all([partial(int, i) for i in range(50)], 1.0) == list(range(50))
    assert run_all([], 1.0) == []


def test_an_exception_takes_the_place_of_its_result():
    before, error, after = run_all([lambda: 1, lambda: 1 // 0, lambda: 3], 1.0)
    assert (before, after) == (1, 3) and isinstance(error, ZeroDivisionError)


def test_stuck_calls_are_abandoned_and_the_rest_is_answered():
    release = threading.Event()
    calls = [release.wait, release.wait, *[partial(int, i) for i in range(5)]]
    start_s = time.monotonic()
    results = run_all(calls, deadline_s=0.2, workers=2)
    elapsed_s = time.monotonic() - start_s
    release.set()
    assert [type(result) for result in results[:2]] == [DeadlineError, DeadlineError]
    assert results[2:] == [0, 1, 2, 3, 4] and elapsed_s < 5


def test_a_late_answer_of_an_abandoned_call_is_ignored():
    release = threading.Event()

    def late() -> int:
        release.wait()
        return 7

    (result,) = run_all([late], deadline_s=0.05)
    release.set()
    time.sleep(0.05)
    assert isinstance(result, DeadlineError)
