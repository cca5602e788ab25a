"""What overlap buys, on a clock that nothing disturbs: a run whose seconds are counted, not spent.

    .venv/bin/python scripts/bench overlap --no-record

The loop, the sampler's draws and the updates are the real ones; only their durations are assumed
(`Durations`): servers with so many slots, each token, tool call, packed token, step and publish at
a price. Serially an iteration lasts decode + train; with overlap it should last little more than
the longer of the two.

    servers   |== siblings ==|= trunks of the next iteration =|
    trainer      |wait| chunk | chunk | chunk | step | publish |wait| ...
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastturn import trainer
from fastturn.episode import Cohort
from fastturn.run import Run
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.types import Completion, Stop

from .command import one_of, options, parser, report
from .quickstarts import opened, warm_weights
from .record import Measured

Answer = tuple[Hashable, Any]
RATIO = "iteration / longer of decode, train"
WAYS = {"serial": "none", "stream": "stream", "stream+prefetch": "stream,prefetch"}


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds; of an iteration of `tasks` tasks. `slots`: completions decoded at the same time."""

    token_s: float
    tool_s: float
    packed_token_s: float
    step_s: float = 0.05
    publish_s: float = 0.05
    slots: int = 4
    tasks: int = 32


CASES = {
    "decode-bound": Durations(token_s=0.02, tool_s=0.3, packed_token_s=0.01),
    "balanced": Durations(token_s=0.02, tool_s=0.3, packed_token_s=0.02),
    # As many as the paper has: the first group and the last are less of a stage.
    "balanced, 160 tasks": Durations(token_s=0.02, tool_s=0.3, packed_token_s=0.02, tasks=160),
    "train-bound": Durations(token_s=0.02, tool_s=0.3, packed_token_s=0.04),
    "slow tools": Durations(token_s=0.02, tool_s=3.0, packed_token_s=0.02),
    "a slot for each": Durations(token_s=0.02, tool_s=0.3, packed_token_s=0.005, slots=128),
}


@dataclass(slots=True)
class Stage:
    """What a stage takes at least, however it is scheduled. `first_s`: the quickest group, alone at
    the servers; `longest_s`: the longest episode; `slot_s`: all decoding of siblings, `ahead_s` of
    trunks, summed over slots; `packed_s`: updates; `fixed_s`: step and publish, behind all else.
    """

    first_s: float = 0.0
    longest_s: float = 0.0
    slot_s: float = 0.0
    ahead_s: float = 0.0
    packed_s: float = 0.0
    fixed_s: float = 0.0

    @classmethod
    def of(cls, cohorts: Sequence[Cohort], durations: Durations) -> Stage:
        def decoding(cohort: Cohort) -> list[float]:
            tokens = [sum(len(t.completion.action_A) for t in e.turns) for e in cohort.episodes]
            return [n * durations.token_s for n in tokens]

        def lasting(cohort: Cohort) -> list[float]:
            """An action that was cut is not answered by a tool."""
            cut = [sum(t.completion.stop is Stop.LENGTH for t in e.turns) for e in cohort.episodes]
            tools = [len(e.turns) - n for e, n in zip(cohort.episodes, cut, strict=True)]
            return [d + n * durations.tool_s for d, n in zip(decoding(cohort), tools, strict=True)]

        groups = [c for c in cohorts if not c.trunk]
        return cls(
            first_s=min((max(lasting(c)) for c in groups), default=0.0),
            longest_s=max((max(lasting(c)) for c in groups), default=0.0),
            slot_s=sum(sum(decoding(c)) for c in groups),
            ahead_s=sum(sum(decoding(c)) for c in cohorts if c.trunk),
        )

    def least_s(self, slots: int) -> float:
        """The trainer has nothing before the first group; step and publish wait for all of them."""
        decode_s = max(self.slot_s / slots, self.longest_s)
        return max(self.first_s + self.packed_s, decode_s) + self.fixed_s


def least_s(stages: Sequence[Stage], slots: int) -> float:
    """No strictly on-policy schedule of these episodes and updates is shorter: a stage begins when
    the one before is published, and the servers' slots have all decoding to do, trunks too."""
    work_s = sum(stage.slot_s + stage.ahead_s for stage in stages) / slots
    return max(work_s, sum(stage.least_s(slots) for stage in stages))


@dataclass(slots=True)
class Time:
    """Two clocks, `servers_s` and `trainer_s`, and what is going to happen at the servers."""

    durations: Durations
    servers_s: float = 0.0
    trainer_s: float = 0.0
    waited_s: float = 0.0
    slots_busy_s: float = 0.0  # summed over slots
    events: list[tuple[float, int, Callable[[], Answer | None]]] = field(default_factory=list)
    number: Iterator[int] = field(default_factory=itertools.count)
    stages: list[Stage] = field(default_factory=lambda: [Stage()])

    def after(self, seconds: float, happens: Callable[[], Answer | None]) -> None:
        """Something that happens at the servers, and may be an answer."""
        event = (self.servers_s + seconds, next(self.number), happens)
        heapq.heappush(self.events, event)

    def answer(self) -> Answer:
        """The next answer, at its time."""
        while True:
            self.servers_s, _, happens = heapq.heappop(self.events)
            if (found := happens()) is not None:
                return found

    def train(self, tokens: int) -> None:
        seconds = self.durations.packed_token_s * tokens
        self.trainer_s += seconds
        self.stages[-1].packed_s += seconds

    def pause(self, seconds: float) -> None:
        """Step or publish: neither decoding nor updates of the stage go on beside it."""
        self.trainer_s += seconds
        self.stages[-1].fixed_s += seconds

    def wait_until(self, when_s: float) -> float:
        """The trainer waits; returns how long."""
        waited_s = max(0.0, when_s - self.trainer_s)
        self.waited_s += waited_s
        self.trainer_s += waited_s
        return waited_s


@dataclass(slots=True)
class SimulatedInbox:
    """`pool.Inbox` on the servers' clock: the next answer is the earliest one."""

    time: Time

    def put(self, key: Hashable, answer: Any) -> None:
        self.time.after(0.0, lambda: (key, answer))

    def call(self, key: Hashable, function: Callable[[], Any]) -> None:
        answer = function()
        self.time.after(self.time.durations.tool_s, lambda: (key, answer))

    def get(self) -> list[Answer]:
        return [self.time.answer()]


@dataclass(slots=True)
class SimulatedServers:
    """A `Streaming` sampler: draws as `inner` does, in the time that its slots would take."""

    inner: LocalSampler
    time: Time

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def stats(self) -> Any:
        return self.inner.stats

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Any:
        return self.inner.sample(requests, params)

    def publish(self, version: int) -> None:
        if version != self.version:
            self.time.pause(self.time.durations.publish_s)
        self.inner.publish(version)

    def close(self) -> None:
        self.inner.close()

    def stream(self, params: SamplingParams, answer: Callable[[Any, Any], None]) -> SimulatedStream:
        """Answers come through `Time`, each at its moment, and not by `answer`."""
        return SimulatedStream(self, params, self.time.durations.slots)


@dataclass(slots=True)
class SimulatedStream:
    """Completions wait for a slot in the order of their keys, as the client's requests do."""

    servers: SimulatedServers
    params: SamplingParams
    free: int
    fresh: dict[Any, Request] = field(default_factory=dict)  # not drawn yet
    drawn: dict[Any, list[Completion]] = field(default_factory=dict)
    left: Counter[Any] = field(default_factory=Counter)  # completions that are not decoded
    waiting: list[tuple[Any, int]] = field(default_factory=list)

    def submit(self, key: Any, request: Request) -> None:
        self.fresh[key] = request
        self.left[key] = len(request.seeds)
        for place in range(len(request.seeds)):
            heapq.heappush(self.waiting, (key, place))
        # Behind everything else of this moment, so that what comes together is drawn together.
        self.servers.time.after(0.0, self._fill)

    def settle(self) -> None:
        """Requests are on their way already."""

    def close(self) -> None:
        """Nothing is left to stop."""

    def _fill(self) -> None:
        time = self.servers.time
        while self.free and self.waiting:
            key, place = heapq.heappop(self.waiting)
            if key in self.fresh:
                answers = self.servers.inner.sample(list(self.fresh.values()), self.params)
                self.drawn.update(zip(self.fresh, answers, strict=True))
                self.fresh.clear()
            seconds = time.durations.token_s * len(self.drawn[key][place].action_A)
            self.free -= 1
            time.slots_busy_s += seconds
            time.after(seconds, functools.partial(self._decoded, key))

    def _decoded(self, key: Any) -> Answer | None:
        self.free += 1
        self._fill()
        self.left[key] -= 1
        return None if self.left[key] else (key, self.drawn.pop(key))


class SimulatedBeside:
    """`beside.Beside` on two clocks: what the servers finish by the trainer's time is there.

    All is drawn at once, with the weights of this moment, as servers keep those they were given.
    """

    def __init__(self, items: Iterator[Cohort], time: Time) -> None:
        self._time = time
        self._start_s = time.servers_s = time.trainer_s
        self._made = deque((time.servers_s, item) for item in items)
        self.made_s = self.waited_s = 0.0
        time.stages.append(Stage.of([item for _, item in self._made], time.durations))

    def take(self) -> list[Cohort]:
        taken: list[Cohort] = []
        time = self._time
        while self._made and (not taken or self._made[0][0] <= time.trainer_s):
            when_s, item = self._made.popleft()
            self.waited_s += time.wait_until(when_s)
            self.made_s = when_s - self._start_s
            taken.append(item)
        return taken


def simulated(run: Run, durations: Durations) -> Time:
    """Put a run's rollouts and updates on counted time."""
    time = Time(durations)
    inner = run.rollout.sampler
    assert isinstance(inner, LocalSampler)
    run.rollout = replace(
        run.rollout,
        sampler=SimulatedServers(inner, time),
        inbox=lambda deadline_s: SimulatedInbox(time),
        beside=lambda items: SimulatedBeside(items, time),
    )

    def trained(module: Any, inputs: Any, output: Any) -> None:
        time.train(inputs[0].tokens_packed)

    run.policy.register_forward_hook(trained)
    first = run.learner.optimizers.members[0]
    first.register_step_post_hook(lambda *_: time.pause(durations.step_s))
    return time


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the iterations between two moments. `least_s`: what the shortest on-policy schedule of the
    same work takes; `train_s`: updates, steps and publishes."""

    wall_s: float
    least_s: float
    waited_s: float
    slots_busy: float  # share of slots x wall-clock
    records: tuple[dict[str, Any], ...]

    @property
    def train_s(self) -> float:
        return self.wall_s - self.waited_s


def outcome(
    durations: Durations, overlap: str, iterations: int = 3, warm_steps: int = 300
) -> Outcome:
    """Of the iterations between the first, which nothing could be prefetched for, and the last,
    which has nothing to prefetch."""
    weights = warm_weights(warm_steps)
    marks: list[tuple[float, float, float, int]] = []
    records: list[dict[str, Any]] = []
    pairs = (
        f"tasks={durations.tasks}",
        f"rollout.overlap={overlap}",
        f"iterations={iterations}",
        "warm.steps=0",
    )
    with opened(pairs) as run:
        run.policy.load_state_dict(weights)
        trainer.warm_start(run)  # no steps, but from here on it trains
        time = simulated(run, durations)
        while run.cursor.iteration < iterations:
            records.append(trainer.one_iteration(run))
            marks.append((time.trainer_s, time.waited_s, time.slots_busy_s, len(time.stages)))
    (start_s, waited_s, busy_s, first), (end_s, waited_end_s, busy_end_s, end) = marks[0], marks[-2]
    wall_s = end_s - start_s
    return Outcome(
        wall_s / (iterations - 2),
        least_s(time.stages[first:end], durations.slots) / (iterations - 2),
        (waited_end_s - waited_s) / (iterations - 2),
        (busy_end_s - busy_s) / (wall_s * durations.slots),
        tuple(records),
    )


def measure(name: str, durations: Durations) -> Iterator[Measured]:
    """Seconds of an iteration with and without overlap, how they compare to its two halves, and the
    least that any on-policy schedule of the episodes and updates of the last way takes."""
    config = asdict(durations)
    serial = outcome(durations, WAYS["serial"])
    longer_s = max(serial.waited_s, serial.train_s)
    for way, overlap in WAYS.items():
        found = serial if way == "serial" else outcome(durations, overlap)
        for metric, unit, value in (
            ("iteration", "s", found.wall_s),
            (RATIO, "1", found.wall_s / longer_s),
            ("trainer idle", "1", found.waited_s / found.wall_s),
            ("slots idle", "1", 1 - found.slots_busy),
        ):
            yield Measured(f"overlap/{name}", way, metric, unit, (value,), config)
    least = (("iteration", "s", found.least_s), (RATIO, "1", found.least_s / longer_s))
    for metric, unit, value in least:
        yield Measured(f"overlap/{name}", "least on policy", metric, unit, (value,), config)


def main(argv: Sequence[str] | None = None) -> int:
    found, kind = parser("overlap", __doc__, repeats=1), one_of("case", CASES)
    found.add_argument("cases", nargs="*", type=kind, default=list(CASES), help=", ".join(CASES))
    args = options(found, argv)
    args.device = "cpu"
    return report("overlap", (m for name in args.cases for m in measure(name, CASES[name])), args)
