"""Many requests on several servers: who gets what, what is asked again, and when to give up.

    jobs ─ pending ─ router ─> server: POST, deadline ─┬─> Reply ──> places filled
              ^                                        ├─> beginning of a completion: continued
              └──── asked again, on any server <───────┴─> failure: counted; server benched
                                                           benched: probed, proved, back in use

One thread with an event loop and kept connections serves all calls; `Fleet.run` itself blocks.

What is asked again, and why that changes no distribution: a request of which nothing arrived is
drawn anew as a whole; a completion that arrived is kept; one that the server gave up is continued
from the ids it has, at the same weights. (One bias is left: a server that dies has finished short
completions and not long ones, and the short ones are kept. `engine_resampled` counts what was
drawn anew, an upper bound of the completions concerned.)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fastturn.sampler import wire
from fastturn.sampler.base import SamplingParams
from fastturn.sampler.calls import Ask, Call, Found, Job
from fastturn.sampler.members import PROBE_FIRST_S, Countdown, Failure, Member, Traffic
from fastturn.sampler.routing import Router
from fastturn.sampler.server import EngineError, Server, ServerInfo
from fastturn.types import Ids

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_FAILURES = 3  # in a row, until a server is benched; one refused connection is enough
MOST_ATTEMPTS = 6  # of one request on servers that were thought to be alive
LOOK_AHEAD = 8  # pending requests that are searched for one whose server is warm and free


class Fleet:
    """The servers of a run and the thread that talks to them.

    concurrency: most completions in flight on one server. deadline_s: of one request, queueing in
    the server included. patience_s: how long to wait while no server is in use. `admit(member)`
    makes a server that was away hold the right weights, or raises `EngineError`; it runs in a
    thread of its own. `on_event(name, n)` counts what happened, `say(text)` tells it.
    Example: `Fleet(servers, infos, 256, 300.0, 600.0).run([(ids, 8, 2)], params, "v1", V)`
    gives two choices.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        infos: Sequence[ServerInfo],
        concurrency: int,
        deadline_s: float,
        patience_s: float,
        *,
        model: str | None = None,
        admit: Callable[[Member], None] = lambda member: None,
        on_event: Callable[[str, int], None] = lambda name, n: None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.concurrency, self.deadline_s, self.patience_s = concurrency, deadline_s, patience_s
        self.admit, self.on_event, self.say = admit, on_event, say
        self.router, self.traffic = Router(), Traffic()
        self.loop = asyncio.new_event_loop()
        self.members = [
            Member(index, server, info, model, self.traffic)
            for index, (server, info) in enumerate(zip(servers, infos, strict=True))
        ]
        thread = threading.Thread(target=self.loop.run_forever, name="rollout", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self.loop, thread)

    def close(self) -> None:
        """Close the connections and end the thread; harmless twice."""
        if self._finalizer.alive:
            self._await(self._close_clients())
            self._finalizer()

    def run(
        self,
        asks: Sequence[Ask],
        params: SamplingParams,
        salt: str,
        vocabulary: int,
    ) -> list[Found]:
        """`n` choices for every (context, most tokens, n), and the servers that gave them.

        Raises `EngineError` for an answer that the trainer cannot use, for a request that failed
        `MOST_ATTEMPTS` times, and when no server came back within the patience.
        """
        start = time.monotonic()
        answers: dict[int, list[Found]] = {}
        line = self.open(params, salt, vocabulary, answers.__setitem__)
        line.submit(dict(enumerate(asks)))
        line.finish()
        self.traffic.wait_s += time.monotonic() - start
        return [found for index in range(len(asks)) for found in answers.get(index, [])]

    def open(
        self,
        params: SamplingParams,
        salt: str,
        vocabulary: int,
        answer: Callable[[Any, list[Found]], None],
    ) -> OpenCall:
        """A call that takes jobs one by one; `answer` is called in the client's thread."""
        return OpenCall(self, Call(params, salt, vocabulary, answer))

    def ask(self, member: Member, ask: wire.Ask, vocabulary: int, deadline_s: float) -> wire.Reply:
        """One request on one server, benched or not; every failure is an `EngineError`."""

        async def once() -> wire.Reply:
            got = await member.attempt(ask, vocabulary, deadline_s)
            if isinstance(got, wire.Reply):
                return got
            if isinstance(got, Failure):
                raise EngineError(got.message, phase=wire.PHASE, url=member.url + member.path)
            raise got

        return self._await(once())

    # Benching; from the client's thread or, in publish, while that thread has nothing to do

    def bench(self, member: Member, reason: str) -> None:
        """Use a server no longer until a probe finds it alive and right."""
        if not member.benched:
            self.on_event("engine_benched", 1)
            self.say(f"rollout server {member.url} is not used for now: {reason}")
        member.benched = reason
        member.wait_for_probe(PROBE_FIRST_S)
        self.router.forget(member.index)

    def unbench(self, member: Member) -> None:
        if member.benched:
            self.on_event("engine_back", 1)
            self.say(f"rollout server {member.url} is back")
        member.benched, member.failures = "", 0

    def reachable(self, phase: str) -> list[Member]:
        """The servers that answer now, benched before or not; waits while there are none."""
        countdown = Countdown(self.patience_s, self.say)
        while True:
            alive = []
            for member in self.members:
                if member.server.healthy():
                    alive.append(member)
                else:
                    self.bench(member, "it does not answer /health")
            if alive:
                return alive
            countdown.tick(self.members, phase)
            time.sleep(PROBE_FIRST_S)

    # One call

    async def _run(self, call: Call) -> None:
        """Serve a call until it is sealed and nothing of it is left."""
        cpu_s = time.thread_time()
        countdown: Countdown | None = None
        try:
            while call.orders or not call.sealed:
                self._dispatch(call)
                self._probe_those_due()
                if any(not member.benched for member in self.members):
                    countdown = None
                else:
                    countdown = countdown or Countdown(self.patience_s, self.say)
                    countdown.tick(self.members, wire.PHASE)
                await self._next(call)
        finally:
            for task in call.tasks:
                task.cancel()
            await self._settle()
            self.traffic.client_s += time.thread_time() - cpu_s
        self.traffic.completions += call.places

    def _dispatch(self, call: Call) -> None:
        """Start as many pending requests as the servers have room for."""
        while (picked := self._pick(call.pending)) is not None:
            job, member = picked
            self.router.learn(job.keys, member.index)
            member.completions += len(job.places)
            member.load += job.cost
            task = self.loop.create_task(self._serve(call, member, job))
            call.tasks.add(task)
            task.add_done_callback(call.tasks.discard)

    def _pick(self, pending: deque[Job]) -> tuple[Job, Member] | None:
        """The next request and its server: the first one in sight that is warm on a server with
        room, else the first one that any server has room for, on the least loaded."""
        cold: tuple[int, int] | None = None
        for place in range(min(len(pending), LOOK_AHEAD)):
            job = pending[place]
            load = self._load_with_room(len(job.places))
            if not load:
                continue
            server = self.router.warm(job.keys, job.cost, load)
            if server is None and len(self.members) > 1:
                cold = cold or (place, self.router.choose(job.keys, job.cost, load))
                continue
            del pending[place]
            return job, self.members[server or 0]
        if cold is None:
            return None
        job = pending[cold[0]]
        del pending[cold[0]]
        return job, self.members[cold[1]]

    def _load_with_room(self, n: int) -> dict[int, float]:
        """Server -> tokens in flight, of those that can take `n` completions more."""
        return {
            m.index: m.load
            for m in self.members
            if not m.benched and (not m.completions or m.completions + n <= self.concurrency)
        }

    async def _serve(self, call: Call, member: Member, job: Job) -> None:
        """One request from start to end; its outcome, whatever it is, goes to the queue."""
        context_T = job.context_T if job.begun is None else _joined(job.context_T, job.begun[0])
        ask = wire.Ask(context_T, len(job.places), job.max_tokens, call.params, call.salt)
        outcome: wire.Reply | Failure | Exception
        try:
            outcome = await member.attempt(ask, call.vocabulary, self.deadline_s)
        except Exception as error:  # raised again where the call is waited for
            outcome = error
        finally:
            member.completions -= len(job.places)
            member.load -= job.cost
        call.ended.put_nowait((member, job, outcome))

    async def _next(self, call: Call) -> None:
        """Wait for an outcome, for not too long while a server is to be probed, and book it."""
        tick_s = PROBE_FIRST_S / 2 if any(m.benched for m in self.members) else None
        try:
            async with asyncio.timeout(tick_s):
                ended = await call.ended.get()
        except TimeoutError:
            return
        while True:
            if ended is not None:
                self._book(call, *ended)
            if call.ended.empty():
                return
            ended = call.ended.get_nowait()

    def _book(
        self, call: Call, member: Member, job: Job, outcome: wire.Reply | Failure | Exception
    ) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, wire.Reply):
            other = {c.tag for c in outcome.choices} - {None, member.tag}
            if member.tag is None or not other:
                self._arrived(call, member, job, outcome)
                return
            outcome = Failure(
                "version", f"it answers with weights of version {other.pop()}", gone=True
            )
        self._failed(call, member, job, outcome)

    def _arrived(self, call: Call, member: Member, job: Job, reply: wire.Reply) -> None:
        """Keep what is whole; continue what has begun; draw anew what is missing."""
        member.failures = 0
        self.traffic.prompt_tokens += reply.prompt_tokens
        self.traffic.cached_tokens += reply.cached_tokens or 0
        missing = job.places[len(reply.choices) :]
        if missing:
            self.on_event("engine_missing", len(missing))
        for place, choice in zip(job.places, reply.choices, strict=False):
            if job.begun is not None:
                action_A = _joined(job.begun[0], choice.action_A)
                logprob_A = np.concatenate([job.begun[1], choice.logprob_A])
                choice = replace(choice, action_A=action_A, logprob_A=logprob_A)
            if choice.stop is not None:
                call.keep(place, choice, member)
                continue
            self.on_event("engine_abort", 1)
            fresh = len(choice.action_A) - (0 if job.begun is None else len(job.begun[0]))
            if not 0 < fresh < job.max_tokens:
                missing.append(place)
                continue
            begun = choice.action_A, choice.logprob_A
            rest = Job(job.context_T, job.max_tokens - fresh, [place], job.rank, job.keys, begun)
            self._again(call, rest, job.attempts, Failure("abort", "the server gave it up"))
        if missing:
            self._again(call, job, job.attempts, Failure("missing", "it is missing"), missing)

    def _failed(self, call: Call, member: Member, job: Job, failure: Failure) -> None:
        """Count it, bench the server when it is gone or fails on and on, ask again."""
        self.on_event(f"engine_{failure.kind}", 1)
        member.failures += 1
        if failure.gone or member.failures >= MOST_FAILURES:
            self.bench(member, failure.message)
        self._again(call, job, job.attempts, failure, job.places, member.url)

    def _again(
        self,
        call: Call,
        job: Job,
        attempts: int,
        failure: Failure,
        places: list[int] | None = None,
        url: str = "",
    ) -> None:
        """Put the job, or only these of its places, back among the pending."""
        where = url or self.members[0].url
        if attempts + 1 >= MOST_ATTEMPTS:
            raise EngineError(
                f"a request failed {MOST_ATTEMPTS} times, the last time because {failure.message}; "
                f"look at the server's log",
                phase=wire.PHASE,
                url=where,
            )
        if places is not None:
            self.on_event("engine_resampled", len(places))
            self.traffic.resampled += len(places)
        again = replace(job, places=job.places if places is None else places, attempts=attempts + 1)
        call.wait(again)

    # Probing

    def _probe_those_due(self) -> None:
        now = time.monotonic()
        for member in self.members:
            if member.benched and member.probe is None and now >= member.probe_at:
                member.probe = self.loop.create_task(self._probe(member))

    async def _probe(self, member: Member) -> None:
        """Take a server back when it is alive and has been made to hold the right weights."""
        try:
            if await asyncio.to_thread(member.server.healthy):
                member.admitting = True
                await asyncio.to_thread(self.admit, member)
                self.unbench(member)
        except EngineError as error:
            member.benched = str(error)
        finally:
            member.admitting, member.probe = False, None
            member.wait_for_probe(member.probe_wait_s)

    async def _settle(self) -> None:
        """After a call nothing may still send weights, for they are about to change."""
        probes = [m.probe for m in self.members if m.probe is not None]
        for member in self.members:
            if member.probe is not None and not member.admitting:
                member.probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _close_clients(self) -> None:
        await self._settle()
        for member in self.members:
            member.close()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the client's thread, from any other thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class OpenCall:
    """The other threads' end of a call in the client's thread."""

    def __init__(self, fleet: Fleet, call: Call) -> None:
        self._fleet, self._call = fleet, call
        self._future = asyncio.run_coroutine_threadsafe(fleet._run(call), fleet.loop)

    def submit(self, asks: Mapping[Any, Ask]) -> None:
        """Completions of each key are answered together. What comes in one call is looked at
        together when servers are chosen."""
        self._tell(lambda: self._add(asks))

    def on_failure(self, tell: Callable[[BaseException], None]) -> None:
        """`tell` gets what ends the call before `close`; in the client's thread."""

        def ended(future: concurrent.futures.Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                tell(error)

        self._future.add_done_callback(ended)

    def finish(self) -> None:
        """Wait for all that was submitted; raises what ended the call before that."""
        self._tell(self._seal)
        try:
            self._future.result()
        except BaseException:
            self._future.cancel()
            raise

    def close(self) -> None:
        """End the call, whatever is still unanswered; nothing of it goes on behind this."""
        self._tell(self._drop)
        with contextlib.suppress(EngineError, concurrent.futures.CancelledError):
            self._future.result()

    def _tell(self, act: Callable[[], None]) -> None:
        self._fleet.loop.call_soon_threadsafe(act)

    # In the client's thread

    def _add(self, asks: Mapping[Any, Ask]) -> None:
        for key, (context_T, max_tokens, n) in asks.items():
            self._call.add(key, context_T, max_tokens, n, self._fleet.router.keys(context_T))
        self._call.ended.put_nowait(None)

    def _seal(self) -> None:
        self._call.sealed = True
        self._call.ended.put_nowait(None)

    def _drop(self) -> None:
        self._call.orders.clear()
        self._call.pending.clear()
        self._seal()


def _joined(a_T: Ids, b_T: Ids) -> Ids:
    return np.concatenate([a_T, b_T])


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1.0)
    if not thread.is_alive():
        loop.close()
