"""Tool calls in text: what is read, and what each way of getting it wrong is called."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.envs import BadCall, ToolCall
from fastturn.envs.calls import call_spans, parse_action, spoken

GOOD = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (GOOD, {"a": 1}),
        (f"\n{GOOD}\n", {"a": 1}),
        ('{"name": " f ", "arguments": {}}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"arguments": {"a": [1, {"b": null}]}, "name": "f", "id": 3}', {"a": [1, {"b": None}]}),
        ('{"name": "f", "arguments": {"a": "<|im_end|> \\u00e9 🦆"}}', {"a": "<|im_end|> é 🦆"}),
    ],
)
def test_well_formed_calls(body: str, arguments: dict[str, object]) -> None:
    assert parse_action(f"so <tool_call>{body}</tool_call>").calls == (ToolCall("f", arguments),)


BAD = [
    ('{"name": "f", "arguments": {"a": 1}', "bad_json", "delimiter"),  # T5
    ('{"name": "f", "arguments": {"a": 1}}}', "bad_json", "Extra data"),
    ('{"name": "f", "arguments": {"a": 1}} then', "bad_json", "Extra data"),
    ('{name: "f"}', "bad_json", "property name"),
    ("{'name': 'f'}", "bad_json", "property name"),
    ('{"name": "f", "arguments": {"a": }}', "bad_json", "Expecting value"),
    ('{"name": "f", "arguments": {"a": 1,}}', "bad_json", ""),
    ('{"name": "f", "arguments": {"a": "x}}', "bad_json", "Unterminated string"),
    ('{"name": "f", "arguments": {"a": "\n"}}', "bad_json", "control character"),
    ('{"name": "f", "arguments": {"a": NaN}}', "bad_json", "NaN is not JSON"),
    ('{"name": "f", "arguments": {"a": -Infinity}}', "bad_json", "-Infinity is not JSON"),
    ('{"name": "f", "arguments": {"a": 01}}', "bad_json", "delimiter"),
    ("[" * 100_000, "bad_json", ""),
    ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "bad_json", "digits"),
    ("f(a=1)", "bad_json", "Expecting value"),
    ("", "empty_call", "is empty"),
    (" \n ", "empty_call", "is empty"),
    (f"[{GOOD}]", "not_an_object", "a list, not an object"),
    ('"f"', "not_an_object", "a string, not an object"),
    ("37", "not_an_object", "a number, not an object"),
    ("null", "not_an_object", "null, not an object"),
    ("true", "not_an_object", "a boolean, not an object"),
    ('{"arguments": {"a": 1}}', "missing_name", 'no "name"'),
    ('{"function": "f", "arguments": {}}', "missing_name", 'no "name"'),
    ('{"name": 7, "arguments": {}}', "bad_name", "a number"),
    ('{"name": "", "arguments": {}}', "bad_name", "a string"),
    ('{"name": null, "arguments": {}}', "bad_name", "null"),
    ('{"name": "f", "arguments": [1]}', "bad_arguments", "a list, not an object"),
    ('{"name": "f", "arguments": 1}', "bad_arguments", "a number, not an object"),
    ('{"name": "f", "arguments": null}', "bad_arguments", "null, not an object"),
    ('{"name": "f", "arguments": "{"}', "bad_arguments", "a string and not valid JSON"),
    ('{"name": "f", "arguments": "[1]"}', "bad_arguments", "a list, not an object"),
    ('{"name": "f", "parameters": {"a": 1}}', "bad_arguments", 'not "parameters"'),
]


@pytest.mark.parametrize(("body", "event", "message"), BAD)
def test_malformed_calls(body: str, event: str, message: str) -> None:
    (call,) = parse_action(f"<tool_call>{body}</tool_call>").calls
    assert isinstance(call, BadCall)
    assert call.event == event
    assert message in call.message and call.message.startswith("error: ")
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in call.message


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"<tool_call>{GOOD}", ["unclosed_call"]),
        (f"<tool_call>{GOOD}<tool_call>{GOOD}</tool_call>", ["unclosed_call", "f"]),
        (f"{GOOD}</tool_call>", ["unopened_call"]),
        (f"<tool_call>{GOOD}</tool_call></tool_call>", ["f", "unopened_call"]),
        ("<tool_call>", ["unclosed_call"]),
        ("</tool_call><tool_call>", ["unopened_call", "unclosed_call"]),
        (f"<tool_call>{GOOD}</tool_call> and <tool_call>oops</tool_call>", ["f", "bad_json"]),
        (f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>", ["f", "f"]),
        (f"<think><tool_call>{GOOD}</tool_call></think>\\boxed{{1}}", []),
        (f"<think>a</think><tool_call>{GOOD}</tool_call><think>{GOOD}</tool_call>", ["f"]),
        (f"<think>never closed <tool_call>{GOOD}</tool_call>", []),
        (GOOD, []),
        ("", []),
    ],
)
def test_calls_are_found_in_order_and_outside_thinking(text: str, events: list[str]) -> None:
    action = parse_action(text)
    assert action.text == text
    assert [c.event if isinstance(c, BadCall) else c.name for c in action.calls] == events


def test_thinking_is_not_spoken() -> None:
    assert spoken("a<think>b</think>c<think>d</think>e") == "ace"
    assert spoken("a<think>b") == "a"
    assert spoken("b</think>c") == "b</think>c"


fragments = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", GOOD, "{", '"', "}"]
        ),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


@given(fragments)
@settings(max_examples=300, deadline=None)
def test_any_text_parses_and_no_attempt_is_lost(text: str) -> None:
    calls = parse_action(text).calls
    heard = spoken(text)
    opened, closed = heard.count("<tool_call>"), heard.count("</tool_call>")
    assert len(calls) >= opened
    assert bool(calls) == bool(opened or closed)


@given(fragments)
@settings(max_examples=300, deadline=None)
def test_calls_are_found_where_they_stand(text: str) -> None:
    calls, spans = parse_action(text).calls, call_spans(text.encode())
    assert len(spans) == len(calls)
    assert all(a < b for a, b in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    for call, (start, stop) in zip(calls, spans, strict=True):
        if isinstance(call, ToolCall):
            assert parse_action(text.encode()[start:stop].decode()).calls == (call,)
