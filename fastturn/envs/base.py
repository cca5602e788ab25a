"""What an environment is: tasks in, messages and rewards out. Text only, no tokens, no tensors.

An `Env` is one episode, a `Domain` is what episodes of one kind share: tools, training and held-out
tasks, and a scripted policy for the warm start. A new domain is a function from a `Config` to a
`Domain` under `@register("name")`, or in a file of one's own: `data.domain=file.py:function`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fastturn.config import ConfigError
from fastturn.types import Hit

Message = dict[str, Any]


class DomainError(ValueError):
    """Tasks that cannot be used: names the file, the line, what is expected and the remedy."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `id` is unique within its domain, also when two tasks ask the same thing;
    `data` is whatever the environment needs, picklable.

    Example: `Task("train-0-17", {"start": 37, "operations": (("*", 12),), "answer": 444})`.
    """

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call; whether the tool exists and the arguments fit is the tool layer's
    business. Example: `ToolCall("calculator", {"expression": "37*12"})`."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """An attempted call that cannot be read: the event that is counted, and what the model is told.

    Example: `BadCall("bad_json", "error: the tool call is not valid JSON: ...")`.
    """

    event: str
    message: str


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said, without its stop token, and the calls found in it, in order.

    `text` keeps the thinking; calls inside the thinking are not calls. `seed`: what an environment
    with chance of its own draws from in this step. Every turn of every episode has another one, a
    pure function of the run's seed, so episodes of one task differ by chance too, and what was
    drawn before a snapshot is shared by all that restore it.
    """

    text: str
    calls: tuple[ToolCall | BadCall, ...] = ()
    seed: int = 0

    @property
    def call(self) -> ToolCall | None:
        """The call of an action that makes one; None for an answer, or a call that is unreadable.

        Path rules see actions of at most one call. Example: `Action("21")` has none.
        """
        first = self.calls[0] if self.calls else None
        return first if isinstance(first, ToolCall) else None


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one action: messages for the next turn, the reward of this turn, whether the
    episode is over, the named events to count, and the path rules that the action met (`rules.py`
    fills them in; an environment leaves them out).

    Events of calls come first, in call order, and the events of each call begin with "tool_call"
    (`events_by_call` takes them apart). Example: a call that worked and one that was not JSON give
    `("tool_call", "tool_call", "bad_json")`.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    events: tuple[str, ...] = ()
    path: tuple[Hit, ...] = ()


def unusable(answer: Any) -> str:
    """What makes the answer of a `step` none that an episode can go on with, or nothing.

    Example: `unusable(Observation(reward=nan, done=True))` is "the reward is nan, expected a finite
    number".
    """
    if not isinstance(answer, Observation):
        return f"step returned {type(answer).__name__}, expected an Observation"
    reward: Any = answer.reward
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return f"the reward is {reward!r}, expected a finite number"
    events: Any = answer.events
    if isinstance(events, str) or not all(isinstance(event, str) for event in events):
        return f"the events are {events!r}, expected a tuple of names"
    return unreadable(answer.messages, False)


def unreadable(messages: Any, needed: bool) -> str:
    """What is wrong with messages for the policy, or nothing. `needed`: there have to be some."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return f"the messages are {type(messages).__name__}, expected a list of messages"
    if needed and not messages:
        return "no message for the policy, and the episode is not over"
    for message in messages:
        if not isinstance(message, Mapping):
            return f"a message that is {type(message).__name__}, expected role and content"
        if message.get("role") not in ("system", "user", "tool"):
            return f"a message of role {message.get('role')!r}, expected system, user or tool"
        if not isinstance(message.get("content"), str):
            return f"a message whose content is {type(message.get('content')).__name__}, no string"
    return ""


class Env(Protocol):
    """One episode. Single use: `start` or `restore` once, then `step` until `done`."""

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns the first messages (system, user)."""
        ...

    def step(self, action: Action) -> Observation:
        """Carry out `action`."""
        ...

    def snapshot(self) -> Any:
        """The state now: picklable and never changed by later steps."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Continue from `snapshot`, instead of `start`. One snapshot serves many instances, and the
        same action, its seed included, from it gives the same observation in each."""
        ...


class Domain(Protocol):
    """What all episodes of one kind share.

    `tools` are the schemas that the chat template prints (OpenAI style); `train_tasks` and
    `eval_tasks` share no content. `demonstrator` returns a policy "messages so far -> text of the
    next action" (without stop token); a domain that has none raises `ConfigError`.
    """

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    @property
    def train_tasks(self) -> Sequence[Task]: ...

    @property
    def eval_tasks(self) -> Sequence[Task]: ...

    def env(self) -> Env: ...

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]: ...


Factory = Callable[..., Domain]
DOMAINS: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a domain selectable by `data.domain=name`, and the keyword-only arguments of
    its function by `data.domain=name:option=value,...`."""

    def add(factory: Factory) -> Factory:
        if name in DOMAINS:
            raise ConfigError(f"the domain {name!r} is registered twice; choose another name")
        DOMAINS[name] = factory
        return factory

    return add


# What the tool layer says of a call that was not carried out.
CALL_FAILURES = frozenset(
    {
        *("bad_json", "unclosed_call", "unopened_call", "empty_call"),
        *("not_an_object", "missing_name", "bad_name", "bad_arguments"),
        *("unknown_tool", "tool_error", "tool_timeout"),
    }
)


def events_by_call(events: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The events of each call of one turn, in call order (credit for one call of several).

    Example: `("tool_call", "tool_call", "bad_json")` gives
    `(("tool_call",), ("tool_call", "bad_json"))`.
    """
    groups: list[list[str]] = []
    for event in events:
        if event == "tool_call":
            groups.append([])
        if groups:
            groups[-1].append(event)
    return tuple(tuple(group) for group in groups)
