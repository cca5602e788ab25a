"""Tools: a schema and a function; calls are checked, bounded in time, and always answered.

`run_calls` turns every call of an action into one message and its events; `ToolEnv` is the episode
that most domains need: a prompt, tools, and a grade for the final answer.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastturn.envs.base import Action, BadCall, Message, Observation, Task, ToolCall

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(ValueError):
    """Raised by a tool for input it refuses; the model reads the message after "error: "."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call by name.

    `parameters` is a JSON schema of type object (its properties, required and enum are checked).
    `bounded` says that the function itself bounds its time: it is called directly, which saves the
    thread (about 60 us) that otherwise enforces the deadline; it raises `TimeoutError` when it is
    late. Results that are not strings are written as JSON, and cut at `max_chars` characters.

    Example: `Tool("add", "a + b", {"type": "object", "properties": {"a": {"type": "integer"}, "b":
    {"type": "integer"}}, "required": ["a", "b"]}, lambda a, b: a + b)`.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    bounded: bool = False
    max_chars: int = 4000

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI-style schema that chat templates print."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Reply:
    """One call answered: the message for the model and the events, beginning with "tool_call"."""

    message: Message
    events: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return len(self.events) > 1


def run_calls(action: Action, tools: Mapping[str, Tool], timeout_s: float) -> list[Reply]:
    """Carry out the calls of `action` in order; as many replies as calls.

    Events beyond "tool_call": those of `BadCall`, "unknown_tool", "bad_arguments", "tool_timeout",
    "tool_error". A tool that does not answer within `timeout_s` seconds is left behind in a daemon
    thread (Python cannot stop it) and the episode goes on.

    Example: one call of a tool that raises gives
    `[Reply({"role": "tool", "content": "error: ..."}, ("tool_call", "tool_error"))]`.
    """
    return [_reply(*_run(call, tools, timeout_s)) for call in action.calls]


def _reply(content: str, event: str) -> Reply:
    events = ("tool_call", event) if event else ("tool_call",)
    return Reply({"role": "tool", "content": content}, events)


def _run(call: ToolCall | BadCall, tools: Mapping[str, Tool], timeout_s: float) -> tuple[str, str]:
    """(content, event); the event is empty when the call worked."""
    if isinstance(call, BadCall):
        return call.message, call.event
    tool = tools.get(call.name)
    if tool is None:
        return (
            f"error: there is no tool {call.name!r}; {_nearest(call.name, tools)}",
            "unknown_tool",
        )
    problem = check_arguments(tool, call.arguments)
    if problem:
        return f"error: {problem}", "bad_arguments"
    outcome = _invoke(tool, call.arguments, None if tool.bounded else timeout_s)
    if outcome is None:
        return f"error: tool {tool.name} did not answer within {timeout_s:g} s", "tool_timeout"
    if isinstance(outcome, TimeoutError):
        return _cut(f"error: {outcome}", tool.max_chars), "tool_timeout"
    if isinstance(outcome, Exception):
        name = "" if isinstance(outcome, ToolError) else f"{type(outcome).__name__}: "
        return _cut(f"error: {name}{outcome}", tool.max_chars), "tool_error"
    return _cut(outcome, tool.max_chars), ""


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"the nearest is {near[0]!r}" if near else "there are no tools here"


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with `arguments`, or an empty string: unknown and missing names, types, enum.

    Example: `check_arguments(add, {"a": 1})` is "add needs the argument 'b' (integer)".
    """
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    open_ended = bool(tool.parameters.get("additionalProperties", False))
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            kind = properties.get(name, {}).get("type", "any type")
            return f"{tool.name} needs the argument {name!r} ({kind})"
    for name, value in arguments.items():
        if name not in properties:
            if open_ended:
                continue
            return f"{tool.name} has no argument {name!r}; {_nearest(name, properties)}"
        problem = _check_type(value, properties[name])
        if problem:
            return f"the argument {name!r} of {tool.name} {problem}"
    return ""


def arguments_of(action: Action, tools: Mapping[str, Tool], *names: str) -> Mapping[str, Any]:
    """The arguments of the action's call, if it is of one of these tools and fits it; else none.

    Example: `arguments_of(action, tools, "dial")` is `{"contact": 4821}`, or `{}` for any action
    that is not a well-formed call of dial. For rules, which look at one call at a time.
    """
    call = action.call
    if call is None or call.name not in names or check_arguments(tools[call.name], call.arguments):
        return {}
    return call.arguments


def _check_type(value: Any, schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    allowed = tuple(t for kind in kinds for t in _TYPES.get(kind, (object,)))
    boolean_as_number = isinstance(value, bool) and bool not in allowed and object not in allowed
    if kinds and (boolean_as_number or not isinstance(value, allowed)):
        return f"must be of type {' or '.join(kinds)}, not {json.dumps(value)[:40]}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {json.dumps(schema['enum'])}, not {json.dumps(value)[:40]}"
    return ""


def _invoke(
    tool: Tool, arguments: dict[str, Any], timeout_s: float | None
) -> str | Exception | None:
    """The result as text, the exception, or None after `timeout_s` (None: called directly)."""
    if timeout_s is None:
        return _attempt(tool, arguments)
    box: list[str | Exception] = []
    thread = threading.Thread(
        target=lambda: box.append(_attempt(tool, arguments)),
        name=f"tool {tool.name}",
        daemon=True,
    )
    thread.start()
    thread.join(timeout_s)
    if box:
        return box[0]
    return None if thread.is_alive() else RuntimeError(f"tool {tool.name} ended without a result")


def _attempt(tool: Tool, arguments: dict[str, Any]) -> str | Exception:
    """An exception of a tool is an observation: it is returned, told to the model and counted."""
    try:
        result = tool.function(**arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:
        return error


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} ... ({len(text) - max_chars} more characters)"


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on a final answer. Example: `Grade(1.0, ("answer",))`."""

    reward: float
    events: tuple[str, ...]


class ToolEnv:
    """An episode of tool calls that ends with the first action without a call, which is graded.

    `prompt` gives the first messages of a task, `grade` judges the final text. Tools are taken to
    be stateless: the only state is the task, so a snapshot is free; an environment with a state of
    its own implements `Env` instead. `brief` answers a failed call with "error" alone, for models
    whose vocabulary makes sentences expensive.

    Example: `ToolEnv({"calculator": tool}, prompt, grade, timeout_s=5.0).start(task)`.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        prompt: Callable[[Task], list[Message]],
        grade: Callable[[Task, str], Grade],
        timeout_s: float = 5.0,
        brief: bool = False,
    ) -> None:
        self._tools = tools
        self._prompt = prompt
        self._grade = grade
        self._timeout_s = timeout_s
        self._brief = brief
        self._task: Task | None = None

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        assert self._task is None, "an environment is one episode: make a new one"
        self._task = task
        return self._prompt(task)

    def step(self, action: Action) -> Observation:
        """Run the calls of `action`, or grade it when it has none."""
        assert self._task is not None, "start or restore comes before step, and nothing after done"
        if not action.calls:
            grade = self._grade(self._task, action.text)
            self._task = None
            return Observation((), grade.reward, True, grade.events)
        replies = run_calls(action, self._tools, self._timeout_s)
        messages = tuple(
            {"role": "tool", "content": "error"} if self._brief and reply.failed else reply.message
            for reply in replies
        )
        return Observation(messages, events=tuple(e for reply in replies for e in reply.events))

    def snapshot(self) -> Any:
        """The task (frozen), or None when the episode is over."""
        return self._task

    def restore(self, snapshot: Any) -> None:
        """Continue from `snapshot`."""
        self._task = snapshot
