"""Environments of the package verifiers (Prime Intellect): `data.domain=verifiers:env=NAME`.

    env.rollout(row, client) ── asks its client ──> prompt: the observation of the step before
       runs on one event loop <── answers ────────── action: text and calls of the next step

A rollout of theirs is a coroutine that asks a client for every turn. Here the client is the policy
that trains: `Rollout` runs the coroutine from one question to the next, and the rubric's reward is
that of the last step. They have no snapshots, so an episode is restored by playing it again
(`fastturn.envs.replay`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import logging
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Message, Observation, Task, ToolCall, register
from fastturn.envs.replay import Replayed, ReplayError, try_replay
from fastturn.envs.rows import split_off
from fastturn.envs.tools import Tool, run_calls
from fastturn.pool import within

logger = logging.getLogger(__name__)
TRIED = (Action(""), Action("\\boxed{1}"), Action("yes"))  # before training, to see it replayed


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all episodes, on a thread of its own: clients, locks and pools that an
    environment holds belong to the loop that used them first."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


@functools.cache
def _player() -> type:
    """The client that asks the policy. `questions` gets every prompt, `answers` has the actions."""
    from verifiers.clients import Client

    class Player(Client):
        def __init__(self) -> None:
            super().__init__(None)
            self.questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self.answers: asyncio.Queue[Any] = asyncio.Queue()

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            self.questions.put(prompt)
            return await self.answers.get()

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return Player


async def _played(env: Any, row: Mapping[str, Any], player: Any) -> None:
    """A rollout and its reward, the last that `player.questions` gets; or what it raised."""
    try:
        state = await env.rollout(dict(row), player, "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        await env.rubric.score_rollout(state)
        player.questions.put(float(state["reward"]))
    except Exception as error:
        player.questions.put(error)


class Rollout:
    """One episode. Calls that cannot be carried out are answered here, and the environment does not
    see them: its own tools take whatever they are given."""

    def __init__(self, env: Any, tools: Mapping[str, Tool]) -> None:
        self._env, self._tools = env, tools
        self._player: Any = None
        self._heard: list[Message] = []  # the prompt of the last question
        self._turn = 0

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        assert self._player is None, "an environment is one episode: make a new one"
        self._player = _player()()
        playing = asyncio.run_coroutine_threadsafe(
            _played(self._env, task.data["row"], self._player), _loop()
        )
        weakref.finalize(self, playing.cancel)  # an episode that is cut off ends theirs
        asked = self._asked()
        if isinstance(asked, float):
            raise RuntimeError(f"task {task.id} ended before the first turn")
        self._heard = asked
        return asked

    def step(self, action: Action) -> Observation:
        """Answer the environment's question; its next one, or the reward, is the observation."""
        assert self._player is not None, "start comes before step, and nothing after done"
        replies = run_calls(action, self._tools, timeout_s=0.0) if self._tools else []
        events = tuple(event for reply in replies for event in reply.events)
        calls = [
            call
            for call, reply in zip(action.calls, replies, strict=False)
            if isinstance(call, ToolCall) and not reply.failed
        ]
        if replies and not calls:
            return Observation(tuple(reply.message for reply in replies), events=events)
        asked = self._answered(action.text, calls)
        if isinstance(asked, float):
            self._player = None
            return Observation((), asked, True, (*events, "answer"))
        new = iter(asked[len(self._heard) + 1 :])
        refused = [reply.message if reply.failed else next(new, None) for reply in replies]
        self._heard = asked
        return Observation((*(m for m in refused if m is not None), *new), events=events)

    def _answered(self, text: str, calls: Sequence[ToolCall]) -> list[Message] | float:
        """What they ask after this answer. Raises when the dialogue is not the one before."""
        types = importlib.import_module("verifiers.types")
        self._turn += 1
        made = [
            types.ToolCall(id=f"{self._turn}.{n}", name=c.name, arguments=json.dumps(c.arguments))
            for n, c in enumerate(calls)
        ]
        message = types.ResponseMessage(
            content=text, tool_calls=made or None, finish_reason="stop", is_truncated=False
        )
        answer = types.Response(id=str(self._turn), created=0, model="policy", message=message)
        _loop().call_soon_threadsafe(self._player.answers.put_nowait, answer)
        asked = self._asked()
        if not isinstance(asked, float) and asked[: len(self._heard)] != self._heard:
            raise RuntimeError(
                f"turn {self._turn}: the environment rewrote earlier messages; only environments "
                f"whose dialogue grows at its end can be trained on turn by turn"
            )
        return asked

    def _asked(self) -> list[Message] | float:
        """Their next question, or the reward of the whole."""
        asked = self._player.questions.get()
        if isinstance(asked, Exception):
            raise asked
        return asked if isinstance(asked, float) else [_plain(message) for message in asked]


def _plain(message: Any) -> Message:
    """Role and text of one of their messages. Raises `ValueError` for pictures and sounds."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has parts other than text; only text can be trained on")
        content = "".join(part["text"] for part in content)
    return {"role": fields["role"], "content": content}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of their data set; two with the same prompt are the same task."""

    origin: str
    data: Mapping[str, Any]

    @property
    def content(self) -> str:
        return json.dumps(self.data["prompt"], default=str, sort_keys=True)


class Hub:
    """A domain made of an environment of theirs, for arguments that a name cannot give:
    `def make(config): return Hub(config, verifiers.load_environment("wordle", games=50))`.

    Raises `ConfigError` for one that cannot be trained on turn by turn.
    """

    def __init__(self, config: Config, env: Any) -> None:
        name = env.env_id or type(env).__name__
        if getattr(env, "requires_group_rollouts", False):
            raise ConfigError(
                f"data.domain=verifiers: {name} compares rollouts of a group with each other, and "
                f"siblings here are rewarded one by one; choose another environment"
            )
        self._env = env
        train, held_out = _parts(env, config.data.eval_tasks)
        self.train_tasks: Sequence[Task] = _tasks("train", train)
        self.eval_tasks: Sequence[Task] = _tasks("eval", held_out)
        self._tools = {tool.name: _tool(tool) for tool in env.tool_defs or ()}
        self.tools = [tool.schema for tool in self._tools.values()]
        try:
            first = self.train_tasks[0]
            trial = functools.partial(try_replay, self._rollout, first, TRIED)
            within(config.data.env_timeout_s, trial)
        except ReplayError as error:
            raise ConfigError(
                f"data.domain=verifiers: {name} is not replayable: {error}"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"data.domain=verifiers: {name} cannot be played ({type(error).__name__}: "
                f"{error}); see what it needs: keys, servers, arguments, time (data.env_timeout_s)"
            ) from error

    def _rollout(self) -> Rollout:
        return Rollout(self._env, self._tools)

    def env(self) -> Replayed:
        """One episode."""
        return Replayed(self._rollout)

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """Raises `ConfigError`: these environments show no solutions."""
        raise ConfigError("environments of verifiers have no demonstrations; set warm.steps=0")


def _parts(env: Any, most: int) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows: its own, or `most` split off where it has one set only."""
    sets = [env.build_dataset(), env.build_eval_dataset()]
    train, held_out = (
        [Row(f"{env.env_id}:{n}", row) for n, row in enumerate(rows or ())] for rows in sets
    )
    if not train or not held_out:
        return split_off(train or held_out, most)
    held_out = held_out[:most]
    contents = {row.content for row in held_out}
    return [row for row in train if row.content not in contents], held_out


def _tasks(part: str, rows: Sequence[Row]) -> list[Task]:
    return [Task(f"{part}-{number}", {"row": row.data}) for number, row in enumerate(rows)]


def _tool(tool: Any) -> Tool:
    """Their tool for `run_calls` to check calls against; the environment carries them out."""
    return Tool(tool.name, tool.description, tool.parameters, lambda **_: "", bounded=True)


def load(name: str) -> Any:
    """Their environment `name`, loaded as they do.

    Raises `ConfigError` when the package is not installed or too new, and for a name that it does
    not know. Loading replaces the handlers of SIGINT and SIGTERM, which are put back.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            "data.domain=verifiers needs the package verifiers, which is not installed; run: "
            'pip install "fastturn[verifiers]"'
        )
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"data.domain=verifiers: version {verifiers.__version__} has no environments that are "
            f"played turn by turn; run: pip install 'verifiers<0.4'"
        )
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        return verifiers.load_environment(name)
    except Exception as error:
        raise ConfigError(
            f"data.domain=verifiers:env={name}: {error}; name an environment whose package is "
            f"installed, for example by `prime env install OWNER/NAME`, or load it with arguments "
            f"in a file of your own (docs/environments.md)"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)


@register("verifiers")
def by_name(config: Config, *, env: str = "") -> Hub:
    """Domain "verifiers". Option: `env`, the name of an environment that is installed."""
    if config.data.path:
        raise ConfigError(
            f"data.path={config.data.path!r}: an environment of verifiers has its own tasks; leave "
            "data.path empty"
        )
    return Hub(config, load(env))
