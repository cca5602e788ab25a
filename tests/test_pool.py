"""The inbox: answers in the order they came, errors kept apart, a stuck call abandoned in time."""

from __future__ import annotations

import threading
import time
from functools import partial

from fastturn.pool import DeadlineError, Inbox


def answers(inbox: Inbox, n: int) -> dict:
    found = dict(inbox.get())
    while len(found) < n:
        found |= dict(inbox.get())
    return found


def test_every_call_is_answered_once_under_its_key():
    inbox = Inbox(1.0)
    for i in range(50):
        inbox.call(i, partial(int, i * i))
    assert answers(inbox, 50) == {i: i * i for i in range(50)}


def test_what_others_put_comes_in_its_turn():
    inbox = Inbox(1.0)
    inbox.put("first", 1)
    inbox.put("second", 2)
    assert inbox.get() == [("first", 1), ("second", 2)]


def test_an_exception_takes_the_place_of_its_result():
    inbox = Inbox(1.0)
    for key, call in {"a": lambda: 1, "b": lambda: 1 // 0, "c": lambda: 3}.items():
        inbox.call(key, call)
    found = answers(inbox, 3)
    assert (found["a"], found["c"]) == (1, 3) and isinstance(found["b"], ZeroDivisionError)


def test_stuck_calls_are_abandoned_and_the_rest_is_answered():
    release = threading.Event()
    inbox = Inbox(deadline_s=0.2, workers=2)
    start_s = time.monotonic()
    for i, call in enumerate([release.wait, release.wait, *[partial(int, i) for i in range(5)]]):
        inbox.call(i, call)
    found = answers(inbox, 7)
    elapsed_s = time.monotonic() - start_s
    release.set()
    assert [type(found[i]) for i in (0, 1)] == [DeadlineError, DeadlineError]
    assert [found[i] for i in range(2, 7)] == [0, 1, 2, 3, 4] and elapsed_s < 5


def test_calls_run_at_the_same_time_and_never_on_more_threads_than_allowed():
    together = threading.Barrier(3)
    inbox = Inbox(5.0, workers=3)
    busy, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        together.wait(5)
        with lock:
            busy -= 1

    for i in range(9):
        inbox.call(i, call)
    assert answers(inbox, 9) == dict.fromkeys(range(9)) and most == 3


def test_a_late_answer_of_an_abandoned_call_is_ignored():
    release = threading.Event()
    inbox = Inbox(deadline_s=0.05)

    def late() -> int:
        release.wait()
        return 7

    inbox.call("late", late)
    ((key, answer),) = inbox.get()
    release.set()
    time.sleep(0.05)
    inbox.put("next", 1)
    assert key == "late" and isinstance(answer, DeadlineError) and inbox.get() == [("next", 1)]
