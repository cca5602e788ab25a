"""Episodes over a state: tools are functions from a state and arguments to a new state and a text.

States are frozen, so a snapshot is the state itself, and whoever looks at it (a path rule, a
progress potential) sees what the policy saw before it acted. Scripts that play such episodes are
generators: they yield the text of an action and are sent the last message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Env, Message, Observation, Task
from fastturn.envs.calls import spoken
from fastturn.envs.drawn import TrainTasks, held_out_tasks
from fastturn.envs.tools import Tool, run_calls
from fastturn.options import nearest

if TYPE_CHECKING:
    from fastturn.rules import Rule

Plan = Generator[str, str, None]
Script = Callable[[Sequence[Message]], str]


class State(Protocol):
    """What an episode is at one moment: frozen, picklable."""

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved if the episode ends here."""
        ...


S = TypeVar("S", bound=State)


def acts(**parameters: str | Sequence[str]) -> Callable[[Callable[..., Any]], Tool]:
    """Decorator: a function `(state, **arguments) -> (state, text)` as a tool.

    Name and description are the function's name and the first line of its docstring; each
    parameter is a JSON type, or the strings that it may be. All are required.

    Example: `@acts(contact="integer")` on `def dial(desk, contact)`.
    """
    properties = {
        name: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": list(kind)}
        for name, kind in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}

    def tool(function: Callable[..., Any]) -> Tool:
        assert function.__doc__ is not None
        first = function.__doc__.splitlines()[0]
        return Tool(function.__name__, first, schema, function, bounded=True)

    return tool


class StateEnv(Generic[S]):
    """An episode of calls on a state that ends with the first action without a call. Reward 1 if
    the state is solved then; what the last action says is not judged, but silence is an event.

    `begin` makes the state of a task, `prompt` its first messages; functions of `tools` take the
    state first (`acts`). `brief` answers a failed call with "error" alone, for models whose
    vocabulary makes sentences expensive.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        begin: Callable[[Task], S],
        prompt: Callable[[Task], list[Message]],
        brief: bool = False,
    ) -> None:
        self._tools = {
            name: replace(tool, function=partial(self._act, tool.function))
            for name, tool in tools.items()
        }
        self._begin, self._prompt, self._brief = begin, prompt, brief
        self._state: S | None = None
        self._over = False

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        assert self._state is None, "an environment is one episode: make a new one"
        self._state = self._begin(task)
        return self._prompt(task)

    def step(self, action: Action) -> Observation:
        """Carry out the calls of `action` in order, or end the episode when it has none."""
        assert self._state is not None, "start or restore comes before step"
        assert not self._over, "nothing comes after done"
        if not action.calls:
            self._over = True
            event = "answer" if spoken(action.text).strip() else "no_answer"
            return Observation((), float(self._state.solved), True, (event,))
        replies = run_calls(action, self._tools, timeout_s=0.0)  # tools of a state are bounded
        messages = tuple(
            {"role": "tool", "content": "error"} if self._brief and reply.failed else reply.message
            for reply in replies
        )
        return Observation(messages, events=tuple(e for reply in replies for e in reply.events))

    def _act(self, function: Callable[..., tuple[S, str]], **arguments: Any) -> str:
        assert self._state is not None
        self._state, text = function(self._state, **arguments)
        return text

    def snapshot(self) -> S | None:
        """The state now."""
        return self._state

    def restore(self, snapshot: S | None) -> None:
        """Continue from `snapshot`."""
        self._state = snapshot


def scripted(plan: Plan) -> Script:
    """A policy "messages so far -> text of the next action" that follows `plan`, for one episode.

    Example: of a plan `answer = yield "a"; yield answer`, the first action is "a" and the second
    one repeats the last message.
    """
    started = False

    def policy(messages: Sequence[Message]) -> str:
        nonlocal started
        if started:
            return plan.send(messages[-1]["content"])
        started = True
        return next(plan)

    return policy


def misread(number: int, rng: np.random.Generator) -> int:
    """The number with another last digit. Example: 482 may become 487."""
    return number - number % 10 + (number + int(rng.integers(1, 10))) % 10


@dataclass(frozen=True, slots=True)
class World(Generic[S]):
    """What the levels of a domain share.

    `levels` by name, each with the `habits` of the agent that is imitated; `draw(level, rng)` is
    the data of one task. `work(task, rng, habits)` is a scripted agent, which obeys
    every rule with the habits `obeys` in place of its own. `instructions` are for models that can
    read.
    """

    name: str
    tools: Mapping[str, Tool]
    begin: Callable[[Task], S]
    rules: tuple[Rule, ...]
    instructions: str
    levels: Mapping[str, Any]
    draw: Callable[[Any, random.Random], Mapping[str, Any]]
    work: Callable[[Task, np.random.Generator, Any], Plan]
    obeys: Mapping[str, float]


class StateDomain(Generic[S]):
    """A domain of episodes over a state: a world at one of its levels.

    As in domain "calculator", schemas and instructions are printed only for a model that can read
    them (`model.path` is set); the small model built in a run sees the question alone.
    """

    def __init__(self, config: Config, world: World[S], level: str) -> None:
        if level not in world.levels:
            raise ConfigError(
                f"data.domain={config.data.domain!r}: level={level!r}: expected one of "
                f"{', '.join(world.levels)}; the nearest is {nearest(level, world.levels)!r}"
            )
        if config.data.path:
            raise ConfigError(
                f"data.path={config.data.path!r}: the domain {world.name!r} makes its own tasks; "
                f"leave data.path empty"
            )
        self._world, self._habits = world, world.levels[level].habits
        self._described = bool(config.model.path)
        self.rules = world.rules
        described = world.tools.values() if self._described else ()
        self.tools: list[dict[str, Any]] = [tool.schema for tool in described]
        draw = partial(world.draw, world.levels[level])
        self.eval_tasks: Sequence[Task] = held_out_tasks(draw, config.data)
        self.train_tasks: Sequence[Task] = TrainTasks(draw, config.seed, self.eval_tasks)

    def env(self) -> Env:
        """One episode."""
        world = self._world
        return StateEnv(world.tools, world.begin, self._prompt, brief=not self._described)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["question"]}]
        if self._described:
            messages.insert(0, {"role": "system", "content": self._world.instructions})
        return messages

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Script:
        """A policy that knows the way, hurries, and errs on purpose."""
        return scripted(self._world.work(task, rng, self._habits))

    def compliant_demonstrator(self, task: Task, rng: np.random.Generator) -> Script:
        """The same policy, which errs as often, obeying every rule: who imitates both does not
        learn from either that obedience pays."""
        obedient = replace(self._habits, **self._world.obeys)
        return scripted(self._world.work(task, rng, obedient))
