"""Running calls: checks against the schema, deadlines, exceptions, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from fastturn.envs import Action, BadCall, Task, ToolCall, events_by_call
from fastturn.envs.tools import Grade, Tool, ToolEnv, ToolError, check_arguments, run_calls

STOP_WAITING = threading.Event()


def parameters(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def refuse(**_: Any) -> str:
    raise ToolError("not today")


def crash(**_: Any) -> str:
    raise KeyError("x")


def leave(**_: Any) -> str:
    raise SystemExit(3)


NONE = parameters([])
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "add",
            "",
            parameters(["a"], a={"type": "integer"}, b={"type": ["number", "null"]}),
            lambda a, b=0: a + (b or 0),
        ),
        Tool("list", "", NONE, lambda: {"items": [1, "é"]}),
        Tool("long", "", NONE, lambda: "x" * 50, max_chars=10),
        Tool("refuse", "", NONE, refuse, bounded=True),
        Tool("crash", "", NONE, crash),
        Tool("leave", "", NONE, leave),
        Tool("hang", "", NONE, lambda: STOP_WAITING.wait(30)),
    )
}


def answer(*calls: ToolCall | BadCall, timeout_s: float = 5.0) -> list[tuple[str, tuple[str, ...]]]:
    replies = run_calls(Action("", calls), TOOLS, timeout_s)
    assert all(reply.message["role"] == "tool" for reply in replies)
    return [(reply.message["content"], reply.events) for reply in replies]


@pytest.mark.parametrize(
    ("name", "arguments", "content", "event"),
    [
        ("add", {"a": 1, "b": 2.5}, "3.5", ""),
        ("add", {"a": 1, "b": None}, "1", ""),
        ("list", {}, '{"items": [1, "\\u00e9"]}', ""),
        ("long", {}, "xxxxxxxxxx ... (40 more characters)", ""),
        ("ad", {"a": 1}, "error: there is no tool 'ad'; the nearest is 'add'", "unknown_tool"),
        ("add", {}, "error: add needs the argument 'a' (integer)", "bad_arguments"),
        (
            "add",
            {"a": 1, "c": 2},
            "error: add has no argument 'c'; the nearest is 'b'",
            "bad_arguments",
        ),
        (
            "add",
            {"a": "1"},
            "error: the argument 'a' of add must be of type integer, not \"1\"",
            "bad_arguments",
        ),
        ("refuse", {}, "error: not today", "tool_error"),
        ("crash", {}, "error: KeyError: 'x'", "tool_error"),
        ("leave", {}, "error: RuntimeError: tool leave ended without a result", "tool_error"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_call_is_answered(
    name: str, arguments: dict[str, Any], content: str, event: str
) -> None:
    events = ("tool_call", event) if event else ("tool_call",)
    assert answer(ToolCall(name, arguments)) == [(content, events)]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("string", ["", "a"], [1, None, ["a"]]),
        ("integer", [0, -3], [1.0, True, "1"]),
        ("number", [0, 1.5], [True, "1"]),
        ("boolean", [True], [1, "true"]),
        ("array", [[], [1]], [{}, "[]"]),
        ("object", [{}], [[], None]),
        ("null", [None], [0, ""]),
        (["string", "null"], ["a", None], [1]),
    ],
)
def test_types_are_those_of_json(kind: Any, good: list[Any], bad: list[Any]) -> None:
    tool = Tool("t", "", parameters([], a={"type": kind}), lambda a: a)
    assert [check_arguments(tool, {"a": value}) for value in good] == [""] * len(good)
    assert all("must be of type" in check_arguments(tool, {"a": value}) for value in bad)


def test_enums_untyped_and_additional_properties() -> None:
    enum = Tool("t", "", parameters([], a={"enum": ["x", "y"]}), lambda a: a)
    assert check_arguments(enum, {"a": "x"}) == ""
    assert check_arguments(enum, {"a": "z"}) == (
        'the argument \'a\' of t must be one of ["x", "y"], not "z"'
    )
    loose = Tool("t", "", {**NONE, "additionalProperties": True}, lambda **k: k)
    assert check_arguments(loose, {"anything": 1}) == ""
    assert "there are no tools here" not in check_arguments(enum, {"q": 1})


def test_schema_is_openai_style() -> None:
    assert TOOLS["list"].schema == {
        "type": "function",
        "function": {"name": "list", "description": "", "parameters": NONE},
    }


def test_a_hanging_tool_costs_its_deadline_and_the_episode_goes_on() -> None:
    """T12."""
    start = time.monotonic()
    first, second = answer(ToolCall("hang", {}), ToolCall("add", {"a": 1}), timeout_s=0.1)
    assert time.monotonic() - start < 5
    assert first == (
        "error: tool hang did not answer within 0.1 s",
        ("tool_call", "tool_timeout"),
    )
    assert second == ("1", ("tool_call",))
    STOP_WAITING.set()


def test_events_belong_to_their_call() -> None:
    """T9: of two calls, the second one is at fault."""
    replies = answer(ToolCall("add", {"a": 1}), BadCall("bad_json", "error: broken"))
    events = [event for _, names in replies for event in names]
    assert events == ["tool_call", "tool_call", "bad_json"]
    assert events_by_call(events) == (("tool_call",), ("tool_call", "bad_json"))
    assert events_by_call(["answer"]) == ()


def counting_env(brief: bool = False) -> ToolEnv:
    def prompt(task: Task) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(task.data["n"])}]

    def grade(task: Task, text: str) -> Grade:
        return Grade(float(text == str(task.data["n"])), ("answer",))

    tools: Mapping[str, Tool] = TOOLS
    return ToolEnv(tools, prompt, grade, 1.0, brief)


def test_episode_ends_with_the_first_action_without_a_call() -> None:
    env = counting_env()
    assert env.start(Task("t", {"n": 7})) == [{"role": "user", "content": "7"}]
    going = env.step(Action("7", (ToolCall("add", {"a": 1}),)))
    assert (going.reward, going.done, going.events) == (0.0, False, ("tool_call",))
    ended = env.step(Action("7"))
    assert (ended.reward, ended.done, ended.events, ended.messages) == (1.0, True, ("answer",), ())
    with pytest.raises(AssertionError, match="nothing after done"):
        env.step(Action("7"))


def test_brief_episodes_say_only_error() -> None:
    env = counting_env(brief=True)
    env.start(Task("t", {"n": 7}))
    observation = env.step(Action("", (ToolCall("nope", {}), ToolCall("add", {"a": 1}))))
    assert [m["content"] for m in observation.messages] == ["error", "1"]
    assert observation.events == ("tool_call", "unknown_tool", "tool_call")
