"""A bounded pool for environment steps with a deadline that a stuck step cannot break.

Python threads cannot be killed, so a step that misses its deadline is abandoned: its worker is
replaced, its result is ignored when it comes, and the caller gets `DeadlineError` for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class DeadlineError(TimeoutError):
    """A step did not return within its deadline."""


@dataclass(slots=True)
class _Batch:
    """One call of `run_all`: the queue, the results, and which item each worker is busy with."""

    calls: Sequence[Callable[[], Any]]
    results: list[Any]
    condition: threading.Condition = field(default_factory=threading.Condition)
    next_index: int = 0
    unfinished: int = 0
    started_s: dict[int, float] = field(default_factory=dict)

    def work(self) -> None:
        """Take calls until none is left, or until the one in hand has been abandoned."""
        while True:
            with self.condition:
                if self.next_index == len(self.calls):
                    return
                index = self.next_index
                self.next_index += 1
                self.started_s[index] = time.monotonic()
            try:
                result = self.calls[index]()
            except Exception as error:  # handed to the caller as this item's result
                result = error
            with self.condition:
                if self.started_s.pop(index, None) is None:
                    return
                self.results[index] = result
                self.unfinished -= 1
                self.condition.notify()


def run_all(calls: Sequence[Callable[[], Any]], deadline_s: float, workers: int = 4) -> list[Any]:
    """The result of every call, in order; an exception stands in the place of a failed call's
    result, and `DeadlineError` in that of a call that took longer than `deadline_s`.

    Example: `run_all([lambda: 1, lambda: 1 / 0], 1.0)` is `[1, ZeroDivisionError(...)]`.
    """
    batch = _Batch(calls, results=[None] * len(calls), unfinished=len(calls))
    for _ in range(min(workers, len(calls))):
        threading.Thread(target=batch.work, daemon=True).start()
    with batch.condition:
        while batch.unfinished:
            now_s = time.monotonic()
            oldest_s = min(batch.started_s.values(), default=now_s)
            batch.condition.wait(max(0.001, oldest_s + deadline_s - now_s))
            late_s = time.monotonic() - deadline_s
            for index in [i for i, start_s in batch.started_s.items() if start_s <= late_s]:
                del batch.started_s[index]
                batch.results[index] = DeadlineError(f"no answer within {deadline_s:g} s")
                batch.unfinished -= 1
                threading.Thread(target=batch.work, daemon=True).start()
    return batch.results
