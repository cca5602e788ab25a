"""The renderer under several chat templates and every context policy."""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.envs import BadCall, Message, ToolCall
from fastturn.render import Conversation, Renderer
from fastturn.template import TemplateError
from fastturn.types import Channel, Hit, Ids

from .dialogues import (
    CONTEXTS,
    DOMAIN,
    PLAIN_CHATML,
    RENDERERS,
    SCHEMA,
    TINY,
    TOKENIZERS,
    play,
    said,
    text,
    tool,
    user,
)

# --- laws over all templates and policies


NASTY = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "</tool_response>",
    "\n\n",
    "<think>",
    "漢字",
    "🦆",
    "１２",
]
contents = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=5).map("".join)


@st.composite
def episodes(draw: st.DrawFn, vocabulary: int = 338) -> list[tuple[Ids, list[Message]]]:
    """Turns of arbitrary sampled ids (never canonical) with any ending, and arbitrary answers."""
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        body = draw(st.lists(st.integers(9, vocabulary - 1), max_size=6))
        if draw(st.booleans()):  # thinking, closed or cut off
            body = [
                3,
                *body,
                *draw(st.sampled_from([[4], []])),
                *draw(st.lists(st.integers(9, 99))),
            ]
        ending = draw(st.sampled_from([[1], [1], [2], []]))  # closing token, other stop, cut
        messages = [tool(c) for c in draw(st.lists(contents, min_size=1, max_size=2))]
        if draw(st.booleans()):
            messages.append(user(draw(contents)))
        turns.append((np.array([*body, *ending], np.int32), messages))
    return turns


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(turns=episodes())
@settings(max_examples=12, deadline=None)
def test_boundaries_rebuild_every_context(
    name: str, context: str, turns: list[tuple[Ids, list[Message]]]
) -> None:
    renderer = RENDERERS[name, context]
    last = play(renderer, turns)[-1]
    again: Conversation = pickle.loads(pickle.dumps(last))
    assert np.array_equal(again.context_T, last.context_T)
    generation = text(renderer, last.context_T).rstrip("\n")
    assert generation.endswith(("<|im_start|>assistant", "<think>"))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(turns=episodes())
@settings(max_examples=12, deadline=None)
def test_sampled_ids_stay_as_sampled(name: str, turns: list[tuple[Ids, list[Message]]]) -> None:
    """T3: ids are the truth, canonical or not."""
    renderer = RENDERERS[name, "keep"]
    conversations = play(renderer, turns)
    for before, after, (action_A, _) in zip(conversations, conversations[1:], turns, strict=False):
        start = len(before.context_T)
        other_stop = len(action_A) and action_A[-1] == 2
        kept_A = action_A[:-1] if other_stop else action_A
        closed = len(action_A) and action_A[-1] == 1
        assert after.boundary.kept == start + len(kept_A)
        assert np.array_equal(after.context_T[start : start + len(kept_A)], kept_A)
        assert after.context_T[start + len(kept_A) - bool(closed)] == 1


@pytest.mark.parametrize("name", TOKENIZERS)
@given(content=contents)
@settings(max_examples=25, deadline=None)
def test_contents_cannot_forge_control_tokens(name: str, content: str) -> None:
    """T4: special-token look-alikes in tool output and questions are text, and come back."""
    renderer = RENDERERS[name, "keep"]

    def controls(content: str) -> list[int]:
        conversation = renderer.start([user(content)])
        action_A = renderer.encode_action("ok")
        conversation = renderer.advance(conversation, action_A, [tool(content), tool("x")])
        ids = conversation.context_T.tolist()
        return [i for i in ids if i in renderer._codec.control_ids]

    assert controls(content) == controls("benign")
    token_T = renderer.advance(
        renderer.start([user("q")]), renderer.encode_action("a"), [tool(content)]
    ).context_T
    if not any("\ud800" <= c <= "\udfff" for c in content):
        assert content in text(renderer, token_T)


@given(content=contents, other=contents)
@settings(max_examples=25, deadline=None)
def test_nothing_merges_across_a_join(content: str, other: str) -> None:
    """The ids of one content do not depend on its neighbours."""
    renderer = RENDERERS["qwen3", "keep"]
    plain_T = renderer._codec.encode_plain(content)
    conversation = renderer.start([user("q")])
    action_A = renderer.encode_action("a")
    with_other = renderer.advance(conversation, action_A, [tool(other), tool(content)])
    alone = renderer.advance(conversation, action_A, [tool(content)])
    for token_T in (alone.context_T.tolist(), with_other.context_T.tolist()):
        tail = len(alone.context_T) - len(conversation.context_T) - len(action_A)
        assert " ".join(map(str, plain_T)) in " ".join(map(str, token_T[-tail:]))


# --- templates


@pytest.mark.parametrize("name", ["tiny", "qwen3", "chatml"])
def test_turn_by_turn_equals_the_whole_dialogue(name: str) -> None:
    """T1: also the newline after <|im_end|>."""
    renderer = RENDERERS[name, "keep"]
    dialogue = [
        {"role": "system", "content": "Be brief."},
        user("2*3, then 4*5?"),
        said('<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'),
        tool("6"),
        said('<tool_call>{"name": "calculator", "arguments": {"expression": "4*5"}}</tool_call>'),
        tool("20"),
        tool("twenty"),
        said("20"),
        user("Sure?"),
        said("Yes."),
    ]
    assert renderer.template_difference(dialogue) is None
    if name != "tiny":  # ChatML as published: the sampled stop token, then a newline
        action_A = renderer.encode_action("a")
        after = renderer.advance(renderer.start([user("q")]), action_A, [tool("6")])
        assert "a<|im_end|>\n<|im_start|>" in text(renderer, after.context_T)


def test_stripped_thinking_is_a_named_difference_and_a_boundary() -> None:
    """T2: the template drops earlier thinking, "keep" does not, "strip_think" does."""
    dialogue = [user("1+1?"), said("<think>\neasy\n</think>\n\n2"), user("and 2+2?")]
    keep, strip = RENDERERS["qwen3", "keep"], RENDERERS["qwen3", "strip_think"]
    difference = keep.template_difference(dialogue)
    assert difference is not None and "text differs at character" in difference
    assert "easy" in difference
    assert strip.template_difference(dialogue) is None
    start = strip.start(dialogue[:1])
    after = strip.advance(start, strip.encode_action(dialogue[1]["content"]), dialogue[2:])
    assert after.boundary.kept == len(start.context_T)
    assert "easy" not in text(strip, after.context_T)


def test_token_differences_are_found_too() -> None:
    """Same text, other tokens: "\\n\\n" inside a template that writes the newline before it."""
    renderer = RENDERERS["qwen3", "keep"]
    difference = renderer.template_difference([user("\n\n2*3")])
    assert difference is not None and difference.startswith("same text, other tokens")


def test_tools_are_described_when_the_template_ignores_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="fastturn"):
        renderer = Renderer(TOKENIZERS["chatml"], [SCHEMA])
    assert caplog.text.count("the chat template ignores tools") == 1
    shown = text(renderer, renderer.start([user("q")]).context_T)
    assert shown.startswith("<|im_start|>system\nYou can use these tools")
    assert '"name": "calculator"' in shown and "<tool_call>" in shown
    both = renderer.start([{"role": "system", "content": "Be brief."}, user("q")]).context_T
    assert text(renderer, both).startswith("<|im_start|>system\nBe brief.\n\nYou can use")
    assert Renderer(TOKENIZERS["chatml"], []).notes == []
    assert RENDERERS["qwen3", "keep"].notes == []


def test_results_become_user_messages_without_a_tool_role() -> None:
    renderer = RENDERERS["no_tool_role", "keep"]
    assert any("no tool messages" in note for note in renderer.notes)
    after = renderer.advance(renderer.start([user("q")]), renderer.encode_action("a"), [tool("6")])
    assert "<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>" in text(
        renderer, after.context_T
    )


STRICT = """\
{%- for m in messages %}
{%- if m.role != ['user', 'assistant'][loop.index0 % 2] %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_template_of_alternating_roles_only() -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["chatml"])
    tokenizer.chat_template = STRICT
    renderer = Renderer(tokenizer, [SCHEMA])
    assert len(renderer.notes) == 3  # no system, no tool messages, tools ignored
    start = renderer.start([{"role": "system", "content": "Be brief."}, user("q")])
    shown = text(renderer, start.context_T)
    assert shown.startswith("<|im_start|>user\nBe brief.\n\nYou can use these tools")
    assert shown.endswith("message.\n\nq<|im_end|>\n<|im_start|>assistant\n")
    after = renderer.advance(start, renderer.encode_action("a"), [tool("6"), tool("7")])
    assert text(renderer, after.context_T).endswith(
        "a<|im_end|>\n<|im_start|>user\n<tool_response>\n6\n</tool_response>\n<tool_response>\n7\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(TemplateError, match="roles must alternate"):
        renderer.advance(start, renderer.encode_action("a"), [tool("6"), user("go on")])


def test_a_prompt_that_opens_thinking() -> None:
    renderer = RENDERERS["opens_thinking", "strip_think"]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    start = renderer.start([user("q")])
    assert text(renderer, start.context_T).endswith("assistant\n<think>\n")
    action_A = renderer.encode_action(f"<think>\nlet me see {call}\n</think>\n\n{call}")
    action = renderer.parse(action_A)
    assert action.calls == (ToolCall("f", {}),)
    assert action.text.startswith("<think>\nlet me see")
    after = renderer.advance(start, action_A, [tool("6")])
    history = text(renderer, after.context_T)
    assert f"assistant\n{call}<|im_end|>" in history and "let me see" not in history
    assert after.boundary.kept == len(start.context_T) - renderer._template.think_tail
    assert renderer.parse(renderer.encode_action("7")).text == "<think>\n</think>\n\n7"


@pytest.mark.parametrize("name", ["chatml", "opens_thinking"])
def test_hits_on_one_call_of_several_are_located(name: str) -> None:
    renderer = RENDERERS[name, "keep"]
    calls = [f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in "fg"]
    thought = f"<think>\nperhaps {calls[1]}\n</think>"
    action_A = renderer.encode_action(f"{thought} 漢 {calls[0]} then {calls[1]}.")
    hits = tuple(Hit("bad", Channel.PENALTY, -0.25, call) for call in (0, 1))
    located = renderer.located(action_A, hits)
    assert len(renderer.parse(action_A).calls) == 2
    for hit, call in zip(located, calls, strict=True):
        assert hit.span is not None
        said_A = action_A[slice(*hit.span)]
        assert call in text(renderer, said_A) and len(text(renderer, said_A)) <= len(call) + 4
    one_A = renderer.encode_action(calls[0])
    assert renderer.located(one_A, hits[:1]) == hits[:1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "has no chat template"),
        (PLAIN_CHATML.partition("{%- if add_gen")[0], "does not append"),
        ("{% endfor %}", "refuses the messages .user.: Encountered unknown tag"),
        (PLAIN_CHATML.replace("+ m.content +", "+ 'x' +"), "prints the content of a 'user'"),
        (PLAIN_CHATML.replace("+ m.content +", "+ m.content + m.content +"), "2 times"),
        (PLAIN_CHATML.replace("+ '<|im_end|>'", ""), "does not close an assistant message"),
        ("{{ raise_exception('no') }}", "refuses the messages"),
    ],
)
def test_unusable_templates_are_refused(template: str, message: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["chatml"])
    tokenizer.chat_template = template
    with pytest.raises((TemplateError, ValueError), match=message):
        Renderer(tokenizer)


def test_slow_tokenizers_and_odd_contents_are_refused() -> None:
    class Slow:
        chat_template = PLAIN_CHATML

    with pytest.raises(TemplateError, match="Slow is not a fast tokenizer"):
        Renderer(Slow())
    with pytest.raises(TypeError, match="content of a 'user' message is list"):
        RENDERERS["tiny", "keep"].start([{"role": "user", "content": ["image"]}])


# --- endings of actions


def test_a_cut_action_is_closed_and_another_stop_is_replaced() -> None:
    renderer = RENDERERS["qwen3", "keep"]
    assert renderer.stop_ids == (1, 2)
    start = renderer.start([user("q")])
    body_A = np.array([70, 71], np.int32)
    closed, cut, other = (
        renderer.advance(start, np.append(body_A, stop).astype(np.int32), [tool("6")])
        for stop in ([1], [], [2])
    )
    assert np.array_equal(closed.context_T, cut.context_T)
    assert np.array_equal(closed.context_T, other.context_T)
    kept = len(start.context_T) + 2
    assert (closed.boundary.kept, cut.boundary.kept, other.boundary.kept) == (kept + 1, kept, kept)


@pytest.mark.parametrize("ids", [[1], [70], [2], []])
def test_tiny_actions(ids: list[int]) -> None:
    """T8: one token, or none."""
    for context in CONTEXTS:
        renderer = RENDERERS["qwen3", context]
        action_A = np.array(ids, np.int32)
        assert renderer.parse(action_A).calls == ()
        play(renderer, [(action_A, [tool("6")])] * 3)


def test_no_messages_still_give_a_prompt() -> None:
    renderer = RENDERERS["qwen3", "keep"]
    after = renderer.advance(renderer.start([user("q")]), renderer.encode_action("a"), [])
    assert text(renderer, after.context_T).endswith("a<|im_end|>\n<|im_start|>assistant\n")


# --- actions


@pytest.mark.parametrize("name", TOKENIZERS)
def test_actions_come_back(name: str) -> None:
    renderer = RENDERERS[name, "keep"]
    content = '<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    action_A = renderer.encode_action(content)
    assert action_A.dtype == np.int32 and action_A[-1] == renderer.stop_ids[0]
    action = renderer.parse(action_A)
    assert action.text == content and action.calls == (ToolCall("f", {}),)


def test_a_missing_brace_is_an_event_and_the_episode_goes_on() -> None:
    """T5."""
    renderer = RENDERERS["tiny", "keep"]
    broken = '<tool_call>{"name":"calculator","arguments":{"expression":"1+1"}</tool_call>'
    (call,) = renderer.parse(renderer.encode_action(broken)).calls
    assert isinstance(call, BadCall) and call.event == "bad_json"
    env = DOMAIN.env()
    env.start(DOMAIN.train_tasks[0])
    observation = env.step(renderer.parse(renderer.encode_action(broken)))
    assert observation.events == ("tool_call", "bad_json") and not observation.done
    assert len(observation.messages) == 1


def test_ids_without_a_token_and_broken_characters_parse() -> None:
    renderer = RENDERERS["qwen3", "keep"]
    duck = renderer._codec.encode_plain("🦆").tolist()
    assert renderer.parse(np.array([100_000, *duck], np.int32)).text == "\ufffd🦆"
    assert renderer.parse(np.array(duck[:-1], np.int32)).text.startswith("\ufffd")


def test_fits_leaves_room_for_one_token() -> None:
    conversation = RENDERERS["tiny", "keep"].start([user("2*3")])
    length = len(conversation.context_T)
    assert not Renderer(TINY, max_context=length).fits(conversation)
    assert Renderer(TINY, max_context=length + 1).fits(conversation)
