"""Programs that a model wrote, run where they can do no harm.

A program is a forked child of a warm interpreter. It reaches no network, makes no process, signals
nobody, writes no file, and reads the interpreter's own files only; its memory, processor time, wall
time and output are bounded. The system call filter is always there. What hides files is the first
wall that this machine can have:

| wall | needs | what a program can read |
|---|---|---|
| `bubblewrap` | the program bwrap, user name spaces | the interpreter's files and `/usr` |
| `landlock` | Linux 5.13 or newer | the same (names of other files can be probed) |
| `uid` | root | what everybody on the machine can read |

Without any of them nothing is run.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import queue
import shutil
import site
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastturn.config import ConfigError
from fastturn.envs.worker import Worker

logger = logging.getLogger(__name__)
WALLS = ("bubblewrap", "landlock", "uid")  # the best first
MEMORY_GIB = 0.5  # of a program, beyond the interpreter and the modules that are loaded already
MOST_CHARS = 20_000  # of a program
_SCRIPT = Path(__file__).with_name("sandbox_worker.py")
_START_S = 60.0  # importing numpy and sympy on a busy machine
_GRACE_S = 30.0  # beyond a program's own deadline: large imports on a busy machine


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended and what it printed.

    `ending`: "finished", "raised", "timeout", "output" (too much of it), "status N" (it left by
    itself), the signal that killed it, or "lost" (no answer came).

    Example: `Outcome("finished", "2\\n")`.
    """

    ending: str
    output: str

    @property
    def finished(self) -> bool:
        return self.ending == "finished"


class Sandbox:
    """Runs programs, each in a process of its own. Warm interpreters are started as threads ask
    at once, and kept; `wall` is the one in use.

    `timeout_s`: wall-clock seconds of one program. Raises `ConfigError` where no wall can be had.

    Example: `Sandbox(5.0).run(["x = 20", "x + 1"]).output` is "21\\n".
    """

    def __init__(self, timeout_s: float, walls: Sequence[str] = WALLS) -> None:
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self.wall, first = self._choose(walls)
        self._idle.put(first)
        atexit.register(self.close)
        logger.info("programs run behind a system call filter and the wall %r", self.wall)

    def run(self, cells: Sequence[str]) -> Outcome:
        """Run `cells` one after the other in a fresh interpreter; the output is the last one's."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = start(self.wall)
        question = {"cells": list(cells), "timeout_s": self._timeout_s}
        try:
            reply = worker.ask(question, self._timeout_s + _GRACE_S)
        except (OSError, TimeoutError) as error:
            worker.close()
            return Outcome("lost", str(error))
        self._idle.put(worker)
        return Outcome(reply["ending"], reply["output"])

    def close(self) -> None:
        """End all idle interpreters; a later program starts a new one."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    @staticmethod
    def _choose(walls: Sequence[str]) -> tuple[str, Worker]:
        reasons = []
        for wall in walls:
            try:
                return wall, start(wall)
            except (OSError, TimeoutError) as error:
                reasons.append(f"{wall}: {error}")
        raise ConfigError(
            "programs of a model cannot be isolated on this machine, so none is run "
            f"({'; '.join(reasons)}); install bubblewrap, or choose a domain with another tool, "
            "for example data.domain=math"
        )


@functools.lru_cache
def shared(timeout_s: float) -> Sandbox:
    """The sandbox that all domains of this process use, with its warm interpreters."""
    return Sandbox(timeout_s)


def start(wall: str) -> Worker:
    """A warm interpreter behind `wall`. Raises `OSError` saying what is missing."""
    readable = _readable()
    options = {"wall": wall, "readable": readable, "memory_gib": MEMORY_GIB}
    # Nothing of this process's environment: it may hold secrets. One hash seed for all interpreters
    # makes the order of sets a function of the program.
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # -s, -P: nothing of the user's, nothing of the script's folder (it holds a `math.py`).
    command = [sys.executable, "-s", "-P", "-B", str(_SCRIPT), json.dumps(options)]
    if wall == "bubblewrap":
        command = [*_bubblewrap([*readable, str(_SCRIPT)]), *command]
    worker = Worker(command, environment, _START_S)
    if "error" in worker.hello:
        worker.close()
        raise OSError(worker.hello["error"])
    return worker


def _readable() -> list[str]:
    """What an interpreter and its packages need."""
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    own = [sys.prefix, sys.base_prefix, *site.getsitepackages()]
    return sorted({path for path in [*system, *own] if os.path.exists(path)})


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """All name spaces new, and a file system of `readable` alone.

    Not --die-with-parent: it follows the thread that started the process. The interpreter ends when
    its input does.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("bwrap is not installed")
    binds = [word for path in readable for word in ("--ro-bind", path, path)]
    return [program, "--unshare-all", *binds, "--proc", "/proc", "--dev", "/dev", "--chdir", "/"]
