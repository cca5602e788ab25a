"""What `fastturn check-env` asks of an environment: the contract that training relies on.

    domain -> episodes, recorded once (scripts and probes) -> CHECKS play them again -> lines

Probes are texts that policies write sooner or later: answers, broken calls, calls of every tool
with and without arguments. Nothing is sampled: no model is needed, every check is repeatable.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Domain, Env, Message, Observation, Task
from fastturn.envs.calls import CLOSE, OPEN, parse_action
from fastturn.findings import FAIL, PASS, SKIP, WARN, Finding, Line
from fastturn.pool import Inbox

PROBES = ("", "7", "\\boxed{7}", "yes", f"{OPEN}{{", f"{OPEN}[]{CLOSE}", f"<think>{OPEN}</think>")
EXAMPLES = {"string": "7", "integer": 7, "number": 7.5, "boolean": True, "array": [], "object": {}}
SLOW_STEP_S, SLOW_STATE_S, LARGE_STATE = 1.0, 0.05, 1 << 20
Script = Callable[[Sequence[Message]], str]
CONTRACT = 'docs/environments.md, "What the trainer relies on"'


def step(env: Env, action: Action, deadline_s: float) -> Observation | Exception:
    """What `env` makes of `action`: its observation, what it raised, or `DeadlineError`."""
    inbox = Inbox(deadline_s)
    inbox.call("step", lambda: env.step(action))
    answer: Observation | Exception = inbox.get()[0][1]
    return answer


@dataclass(slots=True)
class Record:
    """An episode as it was played: `states` holds the pickled snapshot before every action, up to
    the first that could not be pickled, for the reason `unpicklable`."""

    task: Task
    first: list[Message]
    unpicklable: str = ""
    actions: list[Action] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"start": [], "step": [], "snapshot": [], "restore": []}
    )

    @property
    def where(self) -> str:
        return f"task {self.task.id}"

    @property
    def ended(self) -> bool:
        return (
            bool(self.answers)
            and isinstance(self.answers[-1], Observation)
            and (self.answers[-1].done)
        )

    @property
    def total(self) -> float:
        return sum(a.reward for a in self.answers if isinstance(a, Observation))


class Subject:
    """A domain and the episodes that its checks play again. `tasks`: how many of each part."""

    def __init__(self, domain: Domain, config: Config, tasks: int = 4) -> None:
        self.domain, self.config = domain, config
        train, held_out = domain.train_tasks, domain.eval_tasks
        self.tasks = [
            *(train[i] for i in range(min(tasks, len(train)))),
            *(held_out[i] for i in range(min(tasks, len(held_out)))),
        ]

    @cached_property
    def shown(self) -> list[Record]:
        """Demonstrations; none where the domain has none."""
        try:
            scripts = [
                self.domain.demonstrator(task, np.random.default_rng(n))
                for n, task in enumerate(self.tasks)
            ]
        except ConfigError:
            return []
        return [self.play(task, script) for task, script in zip(self.tasks, scripts, strict=True)]

    @cached_property
    def records(self) -> list[Record]:
        """Demonstrations, and an episode that begins with each probe and goes on with others."""
        texts = [*PROBES, *probes(self.domain.tools)]
        played = list(self.shown)
        for number, text in enumerate(texts):
            others = random.Random(number).choices(texts, k=self.config.turns)
            task = self.tasks[number % len(self.tasks)]
            played.append(self.play(task, _saying([text, *others])))
        return played

    def play(self, task: Task, script: Script) -> Record:
        """An episode of `task` by `script`, until it ends, fails, or has used up its turns."""
        env = self.domain.env()
        start = time.perf_counter()
        messages = list(env.start(task))
        record = Record(task, list(messages))
        record.seconds["start"].append(time.perf_counter() - start)
        for _ in range(self.config.turns):
            text = script(messages)
            answer = self.take(record, env, parse_action(text))
            if isinstance(answer, Exception) or answer.done:
                break
            messages += [{"role": "assistant", "content": text}, *answer.messages]
        return record

    def take(self, record: Record, env: Env, action: Action) -> Observation | Exception:
        """One recorded turn."""
        start = time.perf_counter()
        state = env.snapshot()
        record.seconds["snapshot"].append(time.perf_counter() - start)
        record.actions.append(action)
        if not record.unpicklable:
            try:
                record.states.append(pickle.dumps(state))
            except Exception as error:  # whatever a class raises when it is asked
                record.unpicklable = f"turn {len(record.actions)}: {type(error).__name__}: {error}"
        start = time.perf_counter()
        answer = step(env, action, self.config.data.env_timeout_s)
        record.seconds["step"].append(time.perf_counter() - start)
        record.answers.append(answer)
        return answer

    def restored(self, state: bytes) -> Env:
        env = self.domain.env()
        env.restore(pickle.loads(state))
        return env

    def replay(self, env: Env, record: Record, first: int = 0) -> list[Any]:
        """What `env` answers to the recorded actions from `first` on."""
        deadline_s = self.config.data.env_timeout_s
        return [step(env, action, deadline_s) for action in record.actions[first:]]


def probes(tools: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Calls of every tool, with nothing and with an example of every required argument, and of a
    tool that is not there."""
    yield _call("no_such_tool", {})
    for tool in tools:
        function = tool["function"]
        yield _call(function["name"], {})
        properties = function.get("parameters", {}).get("properties", {})
        yield _call(function["name"], {name: _example(p) for name, p in properties.items()})


def _saying(texts: Sequence[str]) -> Script:
    """A policy that says one after the other, whatever it reads."""
    rest = iter(texts)
    return lambda messages: next(rest)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


def _example(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind if isinstance(kind, str) else kind[0])


# --- The checks -----------------------------------------------------------------------------------


def tasks_differ(subject: Subject) -> Finding:
    """Ids are unique, contents picklable, and no held-out task is trained on."""
    train, held_out = subject.domain.train_tasks, subject.domain.eval_tasks
    if not len(train) or not len(held_out):
        return Finding(FAIL, f"{len(train)} training, {len(held_out)} held-out tasks", CONTRACT)
    some = [train[i] for i in range(min(len(train), 2000))]
    ids = [task.id for task in [*some, *held_out]]
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        return Finding(FAIL, f"the id {twice!r} belongs to several tasks", "give each its own id")
    asked = {pickle.dumps(dict(task.data)) for task in some}
    common = [task.id for task in held_out if pickle.dumps(dict(task.data)) in asked]
    if common:
        return Finding(
            FAIL,
            f"{len(common)} held-out tasks are training tasks as well, such as {common[0]}",
            "keep them apart: success on them would show memory",
        )
    return Finding(PASS, f"{len(train):,} training tasks, {len(held_out):,} held out")


def answers_are_observations(subject: Subject) -> Finding:
    """Whatever the policy says is answered by an observation of the right form."""
    for record in subject.records:
        wrong = _form(record.first, True) or next(
            (problem for answer in record.answers if (problem := _wrong(answer))), ""
        )
        if wrong:
            return Finding(FAIL, f"{record.where}: {wrong}", "mend start or step")
    steps = sum(len(record.answers) for record in subject.records)
    return Finding(PASS, f"{len(subject.records)} episodes, {steps} steps")


def _wrong(answer: Any) -> str:
    """What is wrong with an answer, or nothing."""
    if isinstance(answer, Exception):
        return f"the step raised {type(answer).__name__}: {answer}"
    if not isinstance(answer, Observation):
        return f"step returned {type(answer).__name__}, expected an Observation"
    if not math.isfinite(answer.reward):
        return f"the reward is {answer.reward}"
    return _form(answer.messages, not answer.done)


def _form(messages: Sequence[Message], needed: bool) -> str:
    if needed and not messages:
        return "no message for the policy, and the episode is not over"
    for message in messages:
        if message.get("role") not in ("system", "user", "tool"):
            return f"a message of role {message.get('role')!r}, expected system, user or tool"
        if not isinstance(message.get("content"), str):
            return f"a message whose content is {type(message.get('content')).__name__}, no string"
    return ""


def picklable(subject: Subject) -> Finding:
    """Every snapshot can be pickled: siblings and checkpoints get copies."""
    for record in subject.records:
        if record.unpicklable:
            return Finding(
                FAIL,
                f"the snapshot of {record.where}, {record.unpicklable}",
                "keep in the snapshot plain data and classes of a module: no functions, locks, "
                "open files, connections",
            )
    return Finding(PASS, f"{sum(len(record.states) for record in subject.records)} snapshots")


def repeatable(subject: Subject) -> Finding:
    """The same task and actions give the same answers in another instance."""
    for record in subject.records:
        env = subject.domain.env()
        if list(env.start(record.task)) != record.first:
            return Finding(FAIL, f"{record.where} began differently the second time", _DRAW)
        if found := _difference(record, subject.replay(env, record)):
            return Finding(FAIL, found, _DRAW)
    return Finding(PASS, f"{len(subject.records)} episodes, twice each")


_DRAW = "draw any randomness from the task, or keep the generator in the state"
_ALL = "restore must bring back all that step reads (random state, files, clocks)"


def _difference(record: Record, answers: Sequence[Any], first: int = 0) -> str:
    """Where `answers` differ from the recorded ones, or nothing."""
    for turn, (was, now) in enumerate(zip(record.answers[first:], answers, strict=True), first + 1):
        if repr(was) != repr(now):
            return f"{record.where}, turn {turn}: {was!r:.100} the first time, then {now!r:.100}"
    return ""


def snapshots_carry_all(subject: Subject) -> Finding:
    """From every snapshot, pickled and restored, the episode goes on as it did."""
    count = 0
    for record in subject.records:
        for turn, state in enumerate(record.states):
            start = time.perf_counter()
            env = subject.restored(state)
            record.seconds["restore"].append(time.perf_counter() - start)
            if found := _difference(record, subject.replay(env, record, turn), turn):
                return Finding(FAIL, f"restored: {found}", _ALL)
            count += 1
    return Finding(PASS, f"{count} snapshots, each played to its end")


def restored_again(subject: Subject) -> Finding:
    """A snapshot of a restored instance is as good as the one it was restored from."""
    for record in subject.records:
        for turn, state in enumerate(record.states):
            again = subject.restored(pickle.dumps(subject.restored(state).snapshot()))
            if found := _difference(record, subject.replay(again, record, turn), turn):
                return Finding(FAIL, f"restored twice: {found}", _ALL)
    return Finding(PASS, f"{sum(len(r.states) for r in subject.records)} snapshots of snapshots")


def snapshots_stay(subject: Subject) -> Finding:
    """Neither the instance a snapshot was taken of nor those restored from it change it."""
    for record in subject.records:
        env = subject.domain.env()
        env.start(record.task)
        for turn in range(len(record.actions)):
            state = env.snapshot()
            before = pickle.dumps(state)
            twin = subject.domain.env()
            twin.restore(state)
            for each in (env, twin):
                step(each, record.actions[turn], subject.config.data.env_timeout_s)
                if pickle.dumps(state) != before:
                    return Finding(
                        FAIL,
                        f"{record.where}, turn {turn + 1}: a step changed the snapshot before it",
                        "snapshot must return a copy, and restore must copy it again",
                    )
    return Finding(PASS, "steps leave them alone")


def instances_are_apart(subject: Subject) -> Finding:
    """Episodes that are played at once, on threads, are answered as they are alone."""

    def again(record: Record) -> str:
        env = subject.domain.env()
        env.start(record.task)
        return _difference(record, subject.replay(env, record))

    with ThreadPoolExecutor(8) as pool:
        found = next(filter(None, pool.map(again, subject.records * 2)), "")
    if found:
        return Finding(FAIL, f"beside others: {found}", "share no state between instances")
    return Finding(PASS, f"{2 * len(subject.records)} episodes, eight at a time")


def nothing_after_the_end(subject: Subject) -> Finding:
    """A step after the end raises, or earns nothing and ends again."""
    over = [record for record in subject.records if record.ended]
    for record in over:
        env = subject.domain.env()
        env.start(record.task)
        subject.replay(env, record)
        more = step(env, record.actions[-1], subject.config.data.env_timeout_s)
        if isinstance(more, Observation) and (more.reward or not more.done):
            return Finding(
                FAIL,
                f"{record.where}: a step after the end earns {more.reward:g}, done={more.done}",
                "raise an error, or answer with reward 0 and done=True",
            )
    if not over:
        return Finding(SKIP, "no episode came to its end")
    return Finding(PASS, f"{len(over)} ended episodes")


def bad_calls_count(subject: Subject) -> Finding:
    """Calls are counted, those that cannot be read as well."""
    if not subject.domain.tools:
        return Finding(SKIP, "the domain describes no tools")
    for record in subject.records:
        for action, answer in zip(record.actions, record.answers, strict=True):
            if isinstance(answer, Observation) and len(action.calls) != answer.events.count(
                "tool_call"
            ):
                return Finding(
                    WARN,
                    f"{record.where}: {len(action.calls)} calls, events {answer.events!r:.80}",
                    "begin the events of every call with tool_call (envs.tools.run_calls does)",
                )
    return Finding(PASS, "every call is an event")


def rewards_differ(subject: Subject) -> Finding:
    """Demonstrations earn something, and not everything earns the same."""
    totals = sorted(record.total for record in subject.records)
    measured = f"returns {totals[0]:.3g} to {totals[-1]:.3g}"
    shown = subject.shown
    if shown:
        solved = sum(record.total >= 1.0 for record in shown)
        measured += f"; {solved} of {len(shown)} demonstrations succeed"
        if not solved:
            return Finding(WARN, measured, "a demonstration should earn 1 or more in all")
    if totals[0] == totals[-1] and not shown:
        return Finding(SKIP, f"{measured}; there are no demonstrations to show more")
    return Finding(PASS, measured)


def timing(subject: Subject) -> Finding:
    """How long calls take, and how large a state is."""
    spent: dict[str, list[float]] = {}
    for record in subject.records:
        for name, seconds in record.seconds.items():
            spent.setdefault(name, []).extend(seconds)
    median = {name: float(np.median(seconds or [0.0])) for name, seconds in spent.items()}
    size = max((len(state) for record in subject.records for state in record.states), default=0)
    told = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in median.items())
    measured = f"medians: {told}; a state has up to {size:,} bytes"
    if median["step"] > SLOW_STEP_S:
        return Finding(WARN, measured, "rollouts wait for steps: make them faster")
    if max(median["snapshot"], median["restore"]) > SLOW_STATE_S or size > LARGE_STATE:
        return Finding(
            WARN,
            measured,
            "every boundary keeps a snapshot and every sibling restores one: keep in it what "
            "changes, and in the domain what does not",
        )
    return Finding(PASS, measured)


CHECKS: tuple[tuple[str, Callable[[Subject], Finding]], ...] = (
    ("tasks", tasks_differ),
    ("observations", answers_are_observations),
    ("pickling", picklable),
    ("determinism", repeatable),
    ("snapshot round trip", snapshots_carry_all),
    ("restore after restore", restored_again),
    ("snapshots stay", snapshots_stay),
    ("concurrent instances", instances_are_apart),
    ("step after end", nothing_after_the_end),
    ("calls counted", bad_calls_count),
    ("rewards", rewards_differ),
    ("timing", timing),
)


RESTORING = {"snapshot round trip", "restore after restore", "snapshots stay"}  # need pickling


def conform(domain: Domain, config: Config) -> list[Line]:
    """Every check, one after the other.

    Example: of an environment that draws its hints from the global generator,
    `Line("determinism", "fail", "task train-0, turn 1: ...", "draw any randomness from ...")`.
    """
    subject = Subject(domain, config)
    lines: list[Line] = []
    for name, check in CHECKS:
        try:
            failed = {line.check for line in lines if line.status == FAIL}
            if name in RESTORING and "pickling" in failed:
                found = Finding(SKIP, "needs snapshots that can be pickled")
            else:
                found = check(subject)
            lines.append(Line(name, found.status, found.measured, found.remedy))
        except Exception as error:  # whatever it is, it is this check's finding
            lines.append(Line(name, FAIL, f"{type(error).__name__}: {error}", CONTRACT))
    return lines
