"""Tool calls in the text of an action: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Whatever the model writes, `parse_action` returns: a call that cannot be read becomes a `BadCall`
with its own event and a sentence for the model, never an exception and never silence.

| event           | what was wrong                                                       |
|-----------------|----------------------------------------------------------------------|
| `unclosed_call` | `<tool_call>` without `</tool_call>`                                  |
| `unopened_call` | `</tool_call>` without `<tool_call>`                                  |
| `empty_call`    | nothing between the tags                                             |
| `bad_json`      | not JSON: a brace or quote is missing, NaN, too deep, too many digits |
| `not_an_object` | JSON, but a list, string or number                                   |
| `missing_name`  | an object without "name"                                             |
| `bad_name`      | "name" is not a string, or empty                                     |
| `bad_arguments` | "arguments" is not an object, nor a JSON string of one               |
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastturn.envs.base import Action, BadCall, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
_FORM = f'write {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'


def parse_action(text: str) -> Action:
    """`text` with the calls found outside its thinking.

    Example: `parse_action('<tool_call>{"name": "f", "arguments": {}}</tool_call>').calls` is
    `(ToolCall("f", {}),)`.
    """
    if OPEN not in text and CLOSE not in text:
        return Action(text)
    return Action(text, tuple(_calls(spoken(text))))


def write_call(name: str, **arguments: Any) -> str:
    """The text of a call. Example: `write_call("calculator", expression="1+1")` is
    `<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>`."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


def spoken(text: str) -> str:
    """`text` without its thinking; an unclosed `<think>` reaches to the end.

    Example: `spoken("<think>a</think>b")` is "b".
    """
    parts = []
    while THINK in text:
        before, _, inside = text.partition(THINK)
        parts.append(before)
        _, _, text = inside.partition(END_THINK)
    return "".join([*parts, text])


_TAGS = re.compile(rb"<think>|</think>|<tool_call>|</tool_call>")


def call_spans(raw: bytes) -> list[tuple[int, int]]:
    """Where the calls of `parse_action` stand in the bytes of its text, in their order: from the
    opening tag to the closing one, or to where a call breaks off.

    Example: `call_spans(b"a<tool_call>{}</tool_call>")` is `[(1, 26)]`.
    """
    spans: list[tuple[int, int]] = []
    opened: int | None = None
    thinking = stray = False
    for tag in _TAGS.finditer(raw):
        name = tag[0].decode()
        if thinking or name == THINK:
            thinking = name != END_THINK
        elif name == OPEN:
            if opened is not None:
                spans.append((opened, tag.start()))
            opened, stray = tag.start(), False
        elif name == CLOSE and opened is not None:
            spans.append((opened, tag.end()))
            opened = None
        elif name == CLOSE and not stray:
            spans.append(tag.span())
            stray = True
    if opened is not None:
        spans.append((opened, len(raw)))
    return spans


def _calls(text: str) -> list[ToolCall | BadCall]:
    found: list[ToolCall | BadCall] = []
    head, *bodies = text.split(OPEN)
    if CLOSE in head:
        found.append(_bad("unopened_call", f"{CLOSE} without {OPEN}"))
    for body in bodies:
        inside, closed, rest = body.partition(CLOSE)
        if not closed:
            found.append(_bad("unclosed_call", f"{OPEN} without {CLOSE}"))
            continue
        found.append(_call(inside.strip()))
        if CLOSE in rest:
            found.append(_bad("unopened_call", f"{CLOSE} without {OPEN}"))
    return found


def _call(body: str) -> ToolCall | BadCall:
    if not body:
        return _bad("empty_call", "the tool call is empty")
    try:
        value = _loads(body)
    except (ValueError, RecursionError) as error:
        return _bad("bad_json", f"the tool call is not valid JSON ({error})")
    if not isinstance(value, dict):
        return _bad("not_an_object", f"the tool call is {_kind(value)}, not an object")
    if "name" not in value:
        return _bad("missing_name", 'the tool call has no "name"')
    name = value["name"]
    if not isinstance(name, str) or not name.strip():
        return _bad("bad_name", f'"name" is {_kind(name)}, not a tool\'s name')
    arguments = value.get("arguments", {})
    if "arguments" not in value and "parameters" in value:
        return _bad("bad_arguments", 'the key is "arguments", not "parameters"')
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except (ValueError, RecursionError) as error:
            return _bad("bad_arguments", f'"arguments" is a string and not valid JSON ({error})')
    if not isinstance(arguments, dict):
        return _bad("bad_arguments", f'"arguments" is {_kind(arguments)}, not an object')
    return ToolCall(name.strip(), arguments)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _bad(event: str, problem: str) -> BadCall:
    return BadCall(event, f"error: {problem}; {_FORM}")


def _kind(value: Any) -> str:
    """How JSON calls the type of `value`, with an article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
