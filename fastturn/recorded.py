"""Episodes of a domain, recorded once, so that they can be played again and compared.

    domain -> Subject: demonstrations and probes -> Record (what was said, what was answered)

Probes are texts that policies write sooner or later: answers, broken calls, calls of every tool
with and without arguments. Nothing is sampled: no model is needed, every record is repeatable.
"""

from __future__ import annotations

import json
import pickle
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Domain, Env, Message, Observation, Task
from fastturn.envs.calls import CLOSE, OPEN, parse_action
from fastturn.pool import DeadlineError, within

PROBES = ("", "7", "\\boxed{7}", "yes", f"{OPEN}{{", f"{OPEN}[]{CLOSE}", f"<think>{OPEN}</think>")
EXAMPLES = {"string": "7", "integer": 7, "number": 7.5, "boolean": True, "array": [], "object": {}}
Script = Callable[[Sequence[Message]], str]
Answer = Observation | Exception  # of a step: what it returned, or raised


@dataclass(frozen=True, slots=True)
class Timed:
    """An instance whose calls have a deadline; how long they took goes to `seconds`, by name.

    Raises `DeadlineError` for a call that does not return in time, and what the call raises.
    """

    env: Env
    deadline_s: float
    seconds: dict[str, list[float]]

    def start(self, task: Task) -> list[Message]:
        return list(self._call("start", task))

    def step(self, action: Action) -> Answer:
        try:
            answer: Answer = self._call("step", action)
            return answer
        except DeadlineError:
            raise
        except Exception as error:  # the answer of an environment that fails
            return error

    def snapshot(self) -> Any:
        return self._call("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._call("restore", snapshot)

    def _call(self, name: str, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return within(self.deadline_s, partial(getattr(self.env, name), *arguments))
        except DeadlineError:
            given = "".join(f"{argument!r:.100}" for argument in arguments)
            told = f"{name}({given}) has not returned within {self.deadline_s:g} s"
            raise DeadlineError(told) from None
        finally:
            self.seconds[name].append(time.perf_counter() - start)


@dataclass(slots=True)
class Record:
    """An episode as it was played: its first messages, and an answer to each action."""

    task: Task
    first: list[Message]
    actions: list[Action] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"task {self.task.id}"

    @property
    def ended(self) -> bool:
        return any(isinstance(a, Observation) and a.done for a in self.answers[-1:])

    @property
    def total(self) -> float:
        return sum(a.reward for a in self.answers if isinstance(a, Observation))


class Subject:
    """A domain and the episodes that its checks play again. `tasks`: how many of each part."""

    def __init__(self, domain: Domain, config: Config, tasks: int = 4) -> None:
        self.domain, self.config = domain, config
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.tasks = [
            part[i]
            for part in (domain.train_tasks, domain.eval_tasks)
            for i in range(min(tasks, len(part)))
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

    @cached_property
    def states(self) -> list[tuple[Record, list[bytes]]]:
        """Every record, with the pickled snapshot before each of its actions."""
        return [(record, self._states(record)) for record in self.records]

    def _states(self, record: Record) -> list[bytes]:
        env, found = self.begun(record), []
        for turn, action in enumerate(record.actions, 1):
            state = env.snapshot()
            try:
                found.append(pickle.dumps(state))
            except Exception as error:  # whatever a class raises when it is asked
                raise pickle.PicklingError(
                    f"the snapshot of {record.where}, turn {turn}: {type(error).__name__}: {error}"
                ) from error
            env.step(action)
        return found

    def env(self) -> Timed:
        """A new instance."""
        return Timed(self.domain.env(), self.config.data.env_timeout_s, self.seconds)

    def begun(self, record: Record) -> Timed:
        """A new instance in which the record's task has begun."""
        env = self.env()
        env.start(record.task)
        return env

    def restored(self, state: bytes) -> Timed:
        """A new instance in a pickled state."""
        env = self.env()
        env.restore(pickle.loads(state))
        return env

    def play(self, task: Task, script: Script) -> Record:
        """An episode of `task` by `script`, until it ends, fails, or has used up its turns."""
        env = self.env()
        messages = env.start(task)
        record = Record(task, list(messages))
        for _ in range(self.config.turns):
            text = within(self.config.data.env_timeout_s, partial(script, list(messages)))
            record.actions.append(parse_action(text))
            answer = env.step(record.actions[-1])
            record.answers.append(answer)
            if not isinstance(answer, Observation) or answer.done:
                break
            messages += [{"role": "assistant", "content": text}, *answer.messages]
        return record


def replay(env: Timed, record: Record, first: int = 0) -> list[Answer]:
    """What `env` answers to the recorded actions from `first` on."""
    return [env.step(action) for action in record.actions[first:]]


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
