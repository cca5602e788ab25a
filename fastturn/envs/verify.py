"""Checking answers that are not plainly numbers, by `math-verify` in a process that can be killed.

A hostile answer (`9^{9^{9^9}}`) costs symbolic algebra seconds and hundreds of megabytes, and its
own time limit works in a main thread only. So one long-lived worker does the checking, under a cap
on its memory and a deadline after which it is killed; the next question starts another one.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from fastturn.envs.answers import same_number
from fastturn.envs.worker import Worker

_SCRIPT = Path(__file__).with_name("verify_worker.py")
_START_S = 60.0  # importing symbolic algebra on a busy machine
_REMEMBERED = 1 << 16  # verdicts
MAX_ANSWER_CHARS = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """`right`, and `error`: why the answer could not be checked (then it does not count as right).

    Example: `Verdict(False, "no verdict within 5 s")`.
    """

    right: bool
    error: str = ""


def installed() -> bool:
    """Whether `math-verify` can be imported."""
    return importlib.util.find_spec("math_verify") is not None


class Verifier:
    """Decides whether an answer equals the gold answer: numbers exactly and at once, everything
    else in the worker, which starts when it is first needed.

    `deadline_s`: seconds for one question; `memory_gib`: address space of the worker. Verdicts are
    remembered. Safe to call from several threads (one question at a time).

    Example: `Verifier().check("\\\\frac{1}{2}", "0.5")` is `Verdict(True)`.
    """

    def __init__(self, deadline_s: float = 5.0, memory_gib: float = 2.0) -> None:
        self._deadline_s, self._memory_gib = deadline_s, memory_gib
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Verdict] = {}
        atexit.register(self.close)

    def check(self, gold: str, answer: str) -> Verdict:
        """Whether `answer` equals `gold`, both in LaTeX or plain notation."""
        if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
            return Verdict(False)
        if answer.strip() == gold.strip():
            return Verdict(True)
        numbers = same_number(gold, answer)
        if numbers is not None:
            return Verdict(numbers)
        key = (gold, answer)
        with self._lock:
            if key not in self._known:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[key] = self._ask(gold, answer)
            return self._known[key]

    def _ask(self, gold: str, answer: str) -> Verdict:
        if not installed():
            return Verdict(False, "math-verify is not installed: pip install math-verify")
        try:
            if self._worker is None:
                self._worker = self._start()
            reply = self._worker.ask({"gold": gold, "answer": answer}, self._deadline_s)
        except (OSError, TimeoutError) as error:
            self.close()
            return Verdict(False, str(error))
        return Verdict(bool(reply.get("right")), str(reply.get("error", "")))

    def _start(self) -> Worker:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # -P: the script's own folder stays off the import path (it holds a `math.py`).
        command = [sys.executable, "-P", str(_SCRIPT), str(self._memory_gib)]
        return Worker(command, environment, _START_S)

    def close(self) -> None:
        """End the worker; a later question starts a new one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
