"""Context policies: what earlier turns look like, and what a policy cannot do."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from fastturn.config import ConfigError
from fastturn.envs import Message
from fastturn.render import Piece, Renderer, list_calls, truncate
from fastturn.template import TemplateError
from fastturn.types import Ids

from .dialogues import (
    PLAIN_CHATML,
    RENDERERS,
    TINY,
    TOKENIZERS,
    play,
    text,
    tool,
)


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
