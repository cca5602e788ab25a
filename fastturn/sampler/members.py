"""One server of a fleet: its connections, one request on it, how it is doing, how long to wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastturn.sampler import wire
from fastturn.sampler.line import CutShort, Line
from fastturn.sampler.server import EngineError, Server, ServerInfo

PROBE_FIRST_S, PROBE_LAST_S = 0.25, 10.0
SAY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing arrived: `kind` is what is counted, `gone` that the server may not be there, or
    may not be the same, any more."""

    kind: str
    message: str
    gone: bool = False


@dataclass(slots=True)
class Traffic:
    """Sums over all calls. `client_s`: CPU seconds of the client thread, for building requests,
    HTTP, reading and checking answers; `wait_s`: wall-clock of the calls."""

    requests: int = 0
    completions: int = 0
    resampled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    client_s: float = 0.0
    wait_s: float = 0.0


class Occupied:
    """How long something has had work: enter with each piece of it, from any thread.

    Example: pieces from 1 s to 3 s and from 2 s to 5 s are 4 s.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._pieces = self._total_ns = self._since_ns = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._pieces:
                self._since_ns = self._clock()
            self._pieces += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._pieces -= 1
            if not self._pieces:
                self._total_ns += self._clock() - self._since_ns

    def ns(self) -> int:
        with self._lock:
            return self._total_ns + (self._clock() - self._since_ns if self._pieces else 0)


class Member:
    """One server. Made anywhere, used in the fleet's thread.

    completions, load: completions and tokens of the requests in flight. benched: why it is not
    used, empty while it is. tag: the weight version it named when its weights were proved.
    occupied: while any request is in flight.
    """

    def __init__(
        self, index: int, server: Server, info: ServerInfo, model: str | None, traffic: Traffic
    ) -> None:
        self.index, self.server, self.info, self.traffic = index, server, info, traffic
        self.model = model or info.model or ""
        self.path = wire.GENERATE if info.generate_route else wire.COMPLETIONS
        self.completions, self.load, self.failures = 0, 0.0, 0
        self.occupied = Occupied()
        self.benched, self.tag = "", None  # type: str, str | None
        self.probe: asyncio.Task[None] | None = None
        self.admitting = False
        self.probe_wait_s, self.probe_at = PROBE_FIRST_S, 0.0
        self._lines: list[Line] = []  # idle

    @property
    def url(self) -> str:
        return self.server.url

    def wait_for_probe(self, wait_s: float) -> None:
        self.probe_at = time.monotonic() + wait_s
        self.probe_wait_s = min(2 * wait_s, PROBE_LAST_S)

    async def attempt(
        self, ask: wire.Ask, vocabulary: int, deadline_s: float
    ) -> wire.Reply | Failure | EngineError:
        """One request. A `Failure` may be asked again; an `EngineError` would come again."""
        url = self.url + self.path
        data = wire.body(ask, self.model, self.info.generate_route)
        self.traffic.requests += 1
        self.traffic.bytes_sent += len(data)
        try:
            with self.occupied:
                async with asyncio.timeout(deadline_s):
                    status, content = await self._post(data)
        except TimeoutError:
            return Failure("deadline", f"no whole answer within {deadline_s:g} s")
        except CutShort as error:
            return Failure("truncated", str(error))
        except OSError as error:
            return Failure("connection", f"{type(error).__name__}: {error}", gone=True)
        self.traffic.bytes_received += len(content)
        if status >= 500 or status == 429:
            return Failure(f"http_{status}", str(wire.refused(status, content, url)))
        if status != 200:
            return wire.refused(status, content, url)
        try:
            return wire.read(content, ask, vocabulary, url)
        except wire.BrokenAnswer as error:
            return Failure("truncated", f"the answer is not whole: {error}")
        except EngineError as error:
            return error

    async def _post(self, data: bytes) -> tuple[int, bytes]:
        line = self._lines.pop() if self._lines else Line(self.url)
        try:
            return await line.post(self.path, data)
        finally:
            self._lines.append(line)

    def close(self) -> None:
        for line in self._lines:
            line.close()


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of servers, those that are away included (`ledger.Servers`)."""

    members: Sequence[Member]

    @property
    def devices(self) -> int:
        return sum(member.info.devices for member in self.members)

    def busy_ns(self) -> int:
        return sum(member.info.devices * member.occupied.ns() for member in self.members)


class Countdown:
    """Says how long it goes on waiting for servers, and ends in an `EngineError`."""

    def __init__(self, patience_s: float, say: Callable[[str], None]) -> None:
        self.patience_s, self.say = patience_s, say
        self.since = time.monotonic()
        self.said = float("-inf")

    def tick(self, members: Sequence[Member], phase: str) -> None:
        """Call it often while no server is in use."""
        now = time.monotonic()
        left_s = self.since + self.patience_s - now
        reasons = "; ".join(f"{member.url}: {member.benched}" for member in members)
        if left_s <= 0:
            raise EngineError(
                f"no rollout server came back within {self.patience_s:g} s ({reasons}); restart "
                f"the servers, or name others with rollout.urls",
                phase=phase,
                url=members[0].url,
            )
        if now - self.said >= SAY_EVERY_S:
            self.said = now
            self.say(
                f"no rollout server can be used ({reasons}); waiting {left_s:.0f} s more, then "
                f"the run saves and stops"
            )
