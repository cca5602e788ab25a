"""A generator that runs beside its consumer, in a thread of its own, or in front of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Inline(Generic[T]):
    """`take()` runs `items` to its end and returns all it makes; [] from then on. `made_s` and
    `waited_s` as in `Beside`: here all of it is waiting."""

    def __init__(self, items: Iterator[T]) -> None:
        self.made_s = self.waited_s = 0.0
        self._items = items

    def take(self) -> list[T]:
        start_s = time.monotonic()
        taken = list(self._items)
        self.waited_s += time.monotonic() - start_s
        self.made_s = self.waited_s
        return taken


class Beside(Generic[T]):
    """`take()` returns all that `items` has made since the last call, at least one; [] at its end.

    What `items` raises is raised by `take`, after what was made before. The thread takes hold of
    `items` alone and closes it. `made_s`: seconds from the start until the newest item taken was
    made; `waited_s`: seconds spent in `take`. Their difference is what running beside has saved.
    Example: `Beside(iter([1, 2])).take()` is `[1]` or `[1, 2]`, as the thread comes along.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.made_s = self.waited_s = 0.0
        self._start_s = time.monotonic()
        self._made: queue.SimpleQueue[tuple[float, list[T] | Exception]] = queue.SimpleQueue()
        self._over = False
        threading.Thread(target=self._run, args=(items,), name="rollouts", daemon=True).start()

    def take(self) -> list[T]:
        taken: list[T] = []
        start_s = time.monotonic()
        while not self._over and (not taken or not self._made.empty()):
            at_s, made = self._made.get()
            if isinstance(made, Exception):
                if taken:  # first what was made before
                    self._made.put((at_s, made))
                    break
                self._over = True
                raise made
            self._over = not made
            if made:
                self.made_s = at_s - self._start_s
            taken += made
        self.waited_s += time.monotonic() - start_s
        return taken

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._made.put((time.monotonic(), [item]))
            self._made.put((time.monotonic(), []))
        except Exception as error:  # raised where it is waited for
            self._made.put((time.monotonic(), error))
