"""The small tokenizer: numbers digit by digit, short boilerplate, exact text, reload."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.config import Config
from fastturn.envs import load_domain
from fastturn.envs.calculator import calculator_call
from fastturn.tokenizer import build_tokenizer, episode_texts, render_text

TEXTS = list(episode_texts(load_domain(Config()), 200, Config()))
TOKENIZER = build_tokenizer(TEXTS, vocab_size=400)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_numbers_are_digits_and_boilerplate_is_short() -> None:
    pieces = [TOKENIZER.decode([i]) for i in encode(calculator_call("37*12"))]
    assert pieces[2:7] == ["3", "7", "*", "1", "2"]
    assert len(pieces) == 9
    assert [TOKENIZER.decode([i]) for i in encode("\\boxed{48}")] == ["\\boxed{", "4", "8", "}"]


def test_episodes_are_tiny() -> None:
    lengths = [len(encode(text)) for text in TEXTS]
    assert len(TOKENIZER) <= 400
    assert sum(lengths) / len(lengths) < 60


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_reloads_also_beside_a_model_config(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3Config

    Qwen3Config(vocab_size=len(TOKENIZER)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [TOKENIZER.encode(text) for text in TEXTS]
    assert (again.eos_token, again.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert again.chat_template == TOKENIZER.chat_template


def test_template_prints_tools_only_when_asked() -> None:
    user = {"role": "user", "content": "2*3"}
    tool = {"type": "function", "function": {"name": "f"}}
    assert render_text([user]) == "<|im_start|>user\n2*3<|im_end|>"
    with_system = render_text([{"role": "system", "content": "Be brief."}, user])
    assert with_system == "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\n2*3<|im_end|>"
    with_tools = render_text([{"role": "system", "content": "Be brief."}, user], [tool])
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\nTools")
    assert '{"type": "function", "function": {"name": "f"}}' in with_tools
    assert with_tools.count("<|im_start|>system") == 1


def test_template_writes_structured_calls_like_text() -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    structured = render_text([{"role": "assistant", "content": "", "tool_calls": [call]}])
    text = render_text([{"role": "assistant", "content": calculator_call("1+1")}])
    assert structured == text


def test_too_small_a_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"model.vocabulary=100: .* need 265"):
        build_tokenizer(TEXTS, vocab_size=100)
