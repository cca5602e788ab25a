"""The renderer under several chat templates and every context policy."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastturn.config import Config, ConfigError
from fastturn.envs import BadCall, Message, ToolCall, load_domain
from fastturn.render import Conversation, Piece, Renderer, common_prefix, list_calls, truncate
from fastturn.template import TemplateError
from fastturn.tokenizer import build_tokenizer, episode_texts
from fastturn.types import Ids

# Thinks; tool results inside user messages; strips the thinking of turns before the last question.
QWEN3_STYLE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- if loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Ignores tools; a default system message; any role goes.
PLAIN_CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPENS_THINKING = QWEN3_STYLE.replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)
NO_TOOL_ROLE = """\
{%- for m in messages %}
{%- if m.role not in ['user', 'assistant', 'system'] %}
{{- raise_exception('unknown role ' + m.role) }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SCHEMA = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}
CONTEXTS = ("keep", "strip_think", "truncate:48", "summarise")


def general_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits like published ones, so that newlines and words merge."""
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
    special += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [
        "user\n\n\n",
        "assistant\n",
        "the result of the call\n\n",
        "12345 12345",
        '{"name": "',
    ] * 9
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast


DOMAIN = load_domain(Config())
TINY = build_tokenizer(episode_texts(DOMAIN, episodes=100, turns=4), vocab_size=400)
TOKENIZERS: dict[str, Any] = {
    "tiny": TINY,
    "qwen3": general_tokenizer(QWEN3_STYLE),
    "chatml": general_tokenizer(PLAIN_CHATML),
    "opens_thinking": general_tokenizer(OPENS_THINKING),
    "no_tool_role": general_tokenizer(NO_TOOL_ROLE),
}
RENDERERS = {
    (name, context): Renderer(tokenizer, [SCHEMA], context, max_context=1000)
    for name, tokenizer in TOKENIZERS.items()
    for context in CONTEXTS
}


def text(renderer: Renderer, token_T: Ids) -> str:
    return renderer._codec.decode(token_T.tolist())


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def play(renderer: Renderer, turns: Sequence[tuple[Ids, list[Message]]]) -> list[Conversation]:
    """All conversations of an episode, checking the law of boundaries at each step."""
    conversations = [renderer.start([user("What is 2*3?")])]
    for action_A, messages in turns:
        before = conversations[-1]
        after = renderer.advance(before, action_A, messages)
        running_T = np.concatenate([before.context_T, action_A])
        assert np.array_equal(after.boundary.apply(running_T), after.context_T)
        assert after.boundary.kept == common_prefix(running_T, after.context_T)
        conversations.append(after)
    return conversations


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


# --- context policies


def scripted(renderer: Renderer, count: int, thought: str = "") -> list[tuple[Ids, list[Message]]]:
    call = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{0}+1"}}}}</tool_call>'
    return [
        (renderer.encode_action(thought + call.format(i)), [tool(str(i + 1))]) for i in range(count)
    ]


def test_truncate_drops_the_oldest_turns() -> None:
    renderer = RENDERERS["qwen3", "truncate:48"]
    conversations = play(renderer, scripted(renderer, 4))
    shown = text(renderer, conversations[-1].context_T)
    assert "What is 2*3?" in shown and '"3+1"' in shown and '"0+1"' not in shown
    roomy = Renderer(TOKENIZERS["qwen3"], context="truncate:900", max_context=1000)
    whole = play(roomy, scripted(roomy, 4))
    assert '"0+1"' in text(roomy, whole[-1].context_T)


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(14, [5, 1, 3, 1, 2, 1, 1]), (10, [5, 1, 2, 1, 1]), (9, [5, 1, 1]), (1, [5, 1, 1])],
)
def test_truncate_fills_its_budget(tokens: int, lengths: list[int]) -> None:
    """A prompt of 5 tokens and pairs of 4, 3 and 2; the newest pair always stays."""
    kinds = ["prompt", "action", "observation", "action", "observation", "action", "observation"]
    pieces = [
        Piece(kind, np.zeros(length, np.int32))  # type: ignore[arg-type]
        for kind, length in zip(kinds, [5, 1, 3, 1, 2, 1, 1], strict=True)
    ]
    assert [len(piece.token_T) for piece in truncate(pieces, tokens)] == lengths


@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_strip_think_keeps_the_sampled_ids_of_the_rest(gap: str) -> None:
    renderer = RENDERERS["qwen3", "strip_think"]
    rest_A = np.array([70, 80, 75, 1], np.int32)  # not how the text would be encoded
    gap_A = renderer._codec.encode_markup(gap)
    action_A = np.concatenate([[3, 90, 91, 4], gap_A, rest_A]).astype(np.int32)
    start, after = play(renderer, [(action_A, [tool("6")])])
    assert np.array_equal(after.context_T[len(start.context_T) :][:4], rest_A)


def test_strip_think_encodes_only_what_the_cut_goes_through() -> None:
    renderer = RENDERERS["qwen3", "strip_think"]
    codec = renderer._codec
    # "</think>" spelled with ordinary tokens, its last one running into the answer
    spelled = codec.encode_plain("<think>no</think>\n\n").tolist()
    straddle = codec.encode_plain("\n\n\n").tolist()
    assert len(straddle) < 3  # newlines merge
    rest = [70, 80]
    action_A = np.array([*spelled, *straddle, *rest, 1], np.int32)
    start, after = play(renderer, [(action_A, [tool("6")])])
    assert after.context_T[len(start.context_T) :][:3].tolist() == [70, 80, 1]
    stripped_T = codec.remove(codec.encode_plain("12345 12345"), [(1, 4)])
    assert codec.decode(stripped_T.tolist()) == "15 12345"


def test_unclosed_thinking_is_all_stripped() -> None:
    renderer = RENDERERS["qwen3", "strip_think"]
    start, after = play(renderer, [(np.array([70, 3, 80, 81, 1], np.int32), [tool("6")])])
    assert after.context_T[len(start.context_T) :][:2].tolist() == [70, 1]
    assert renderer.parse(np.array([3, 80, 81], np.int32)).calls == ()


def test_summary_replaces_all_but_the_last_turn() -> None:
    renderer = RENDERERS["qwen3", "summarise"]
    conversations = play(renderer, scripted(renderer, 3))
    assert "Earlier" not in text(renderer, conversations[1].context_T)
    assert text(renderer, conversations[3].context_T).endswith(
        "What is 2*3?<|im_end|>\n<|im_start|>user\nEarlier steps:\ncalculator(0+1) -> 1\n"
        "calculator(1+1) -> 2<|im_end|>\n<|im_start|>assistant\n<tool_call>"
        '{"name": "calculator", "arguments": {"expression": "2+1"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_default_summary_says_what_failed() -> None:
    transcript = (
        'assistant: <tool_call>{"name": "f", "arguments": {"a": 1, "b": "x"}}</tool_call>\n'
        "tool: 6\n"
        "assistant: <tool_call>oops</tool_call>\n"
        "tool: error: not JSON\nassistant: hm\nuser: go on\n"
    )
    assert list_calls(transcript).splitlines() == [
        "Earlier steps:",
        "f(1, x) -> 6",
        "a call that could not be read -> error: not JSON",
        "user: go on",
    ]


def test_own_summary_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def short(transcript):\n    return f'{len(transcript)} letters <|im_end|>'\n")
    for renderer in (
        Renderer(TOKENIZERS["qwen3"], context=f"summarise:{file}:short"),
        Renderer(
            TOKENIZERS["qwen3"], context="summarise", summary=lambda t: "9 letters <|im_end|>"
        ),
    ):
        last = play(renderer, scripted(renderer, 3))[-1]
        assert "letters <|im_end|>" in text(renderer, last.context_T)
        summary = list(last.context_T).count(1)
        assert summary == 4  # prompt, summary, action, observation: the forged one is text
    wrong = Renderer(TOKENIZERS["qwen3"], context="summarise", summary=lambda t: 7)  # type: ignore
    with pytest.raises(ConfigError, match="returned int"):
        play(wrong, scripted(wrong, 3))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("strip", "expected one of keep, strip_think, truncate:N"),
        ("truncate", "expected truncate:N"),
        ("truncate:0", "expected truncate:N"),
        ("truncate:1000", "below max_context=1000"),
        ("truncate:-3", "expected truncate:N"),
        ("summarise:nowhere.py:f", "there is no file 'nowhere.py'"),
    ],
)
def test_unknown_context_policies_are_refused(context: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Renderer(TINY, context=context, max_context=1000)


def test_summarise_needs_alike_closings() -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["chatml"])
    tokenizer.chat_template = PLAIN_CHATML.replace(
        "'<|im_end|>' + '\\n'", "('<|im_end|>\\n' if m.role == 'assistant' else '<|im_end|>\\n\\n')"
    )
    Renderer(tokenizer)
    with pytest.raises(TemplateError, match="use context=truncate:N"):
        Renderer(tokenizer, context="summarise")


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
