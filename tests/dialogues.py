"""Templates, tokenizers and renderers that tests of the renderer share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastturn.config import Config
from fastturn.envs import Message, load_domain
from fastturn.render import Conversation, Renderer, common_prefix
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
TINY = build_tokenizer(episode_texts(DOMAIN, 100, Config()), vocab_size=400)
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
