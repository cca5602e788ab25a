"""Where answers arrive: from outside, or from calls made on a bounded number of threads here.

Python threads cannot be killed, so a call that misses its deadline is abandoned: its thread is
replaced, its result is ignored when it comes, and `DeadlineError` is its answer.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
WORKERS = max(4, min(32, 2 * (os.cpu_count() or 1)))  # environments mostly wait for something


class DeadlineError(TimeoutError):
    """A call did not return within its deadline."""


class Inbox:
    """(key, answer) pairs in the order in which they came.

    `put` files an answer of somebody else, from any thread; `call` runs a function on one of
    `workers` threads and files its result, the exception it raised, or `DeadlineError` when it ran
    longer than `deadline_s`; `get` waits until there are some pairs and takes all of them.
    Example: after `inbox.call("a", lambda: 1 / 0)`, `inbox.get()` is [("a", ZeroDivisionError())].
    """

    def __init__(self, deadline_s: float, workers: int = WORKERS) -> None:
        self.deadline_s, self.workers = deadline_s, workers
        self._answers: queue.SimpleQueue[tuple[Hashable, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self._running: dict[object, tuple[Hashable, float]] = {}  # with the time of its start
        self._threads = 0  # that take calls; abandoned ones do not count

    def put(self, key: Hashable, answer: Any) -> None:
        self._answers.put((key, answer))

    def call(self, key: Hashable, function: Callable[[], Any]) -> None:
        with self._lock:
            self._waiting.append((key, function))
            self._staff()

    def get(self) -> list[tuple[Any, Any]]:
        while True:
            try:
                first = self._answers.get(timeout=self._until_deadline_s())
            except queue.Empty:
                self._expire()
                continue
            return [first, *(self._answers.get_nowait() for _ in range(self._answers.qsize()))]

    def _staff(self) -> None:
        """As many threads as there is work for; under the lock."""
        while self._threads < min(self.workers, len(self._waiting) + len(self._running)):
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        """Take calls until none is left, or until the one in hand has been abandoned."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                key, function = self._waiting.popleft()
                ticket = object()
                self._running[ticket] = key, time.monotonic()
            try:
                answer = function()
            except Exception as error:  # handed over as this call's answer
                answer = error
            with self._lock:
                if self._running.pop(ticket, None) is None:
                    return
            self.put(key, answer)

    def _until_deadline_s(self) -> float:
        with self._lock:
            oldest_s = min((start_s for _, start_s in self._running.values()), default=None)
        if oldest_s is None:
            return self.deadline_s  # a call that starts now is not late before then
        return max(0.001, oldest_s + self.deadline_s - time.monotonic())

    def _expire(self) -> None:
        """Abandon the calls that are late."""
        late_s = time.monotonic() - self.deadline_s
        with self._lock:
            late = [t for t, (_, start_s) in self._running.items() if start_s <= late_s]
            keys = [self._running.pop(ticket)[0] for ticket in late]
            self._threads -= len(late)
            self._staff()
        for key in keys:
            self.put(key, DeadlineError(f"no answer within {self.deadline_s:g} s"))


def within(deadline_s: float, function: Callable[[], T]) -> T:
    """What `function` returns, or raises; `DeadlineError` when it takes longer than `deadline_s`.

    Example: `within(1.0, lambda: 6 * 7)` is 42.
    """
    inbox = Inbox(deadline_s, workers=1)
    inbox.call(None, function)
    ((_, answer),) = inbox.get()
    if isinstance(answer, Exception):
        raise answer
    result: T = answer
    return result
