"""A process that answers lines of JSON, and can be killed: for work that may hang or run out of
memory."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Worker:
    """A process, in a group of its own, that says one line when it is ready and then answers one
    line a question. `hello` is its first line.

    After an exception nothing more can be asked: close it and start another.

    Example: `Worker([sys.executable, "script.py"], os.environ, 60.0).ask({"n": 1}, 5.0)`.
    Raises `OSError` when it ends, `TimeoutError` when it is late.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], start_s: float
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            self.hello = self._receive(start_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The answer to `question`, when it comes within `deadline_s` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end, received = time.monotonic() + deadline_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"no answer within {deadline_s:g} s")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise OSError("the process ended (out of memory, or killed)")
                received += chunk
        reply: dict[str, Any] = json.loads(received)
        return reply

    def close(self) -> None:
        """Kill the process with its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Closing flushes what the killed process never read.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
