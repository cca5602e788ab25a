"""A small tokenizer for models built in a run: byte-level BPE with numbers digit by digit.

Digits, arithmetic operators and parentheses are always tokens of their own, so a copied number is a
copied sequence of digits; everything else may merge, across spaces too, so the boilerplate of a
tool call becomes one or two tokens. Needs `tokenizers` and `transformers`, both imported when used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.demos import in_time
from fastturn.envs.base import Domain, Message, Task
from fastturn.envs.calls import parse_action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = ("<|im_start|>", END, PAD)
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_ALONE = r"[0-9+\-*/()=.]"

# ChatML without the newline after <|im_end|>: at 60 tokens an episode, every token counts.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
Tools, one JSON schema a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{%- elif messages and messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function or call -%}
{{- '<tool_call>{"name": ' + f.name | tojson + ', "arguments": ' + f.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries trained on `texts` (rendered episodes).

    Any text can be encoded and comes back exactly. `<|im_end|>` ends a turn (eos), `<|endoftext|>`
    is padding. The chat template knows system, user, assistant and tool messages and prints a
    system block only for a system message or `tools=`. Loads again by `AutoTokenizer`.

    Example: with 334 entries, `calculator_call("37*12")` is 9 tokens. Raises `ValueError` when
    `vocab_size` has no room for the bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*CONTROL_TOKENS, *MARKUP_TOKENS]
    least = 256 + len(special)
    if vocab_size < least:
        raise ConfigError(
            f"model.vocabulary={vocab_size}: bytes and special tokens need {least} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_ALONE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Merges must not cross what is never encoded together: special tokens, which are taken out of
    # a text first, and the join between a role line and the content after it.
    between = re.compile("|".join(map(re.escape, special)) + r"|((?<=<\|im_start\|>)\w+\n)")
    parts = (part for text in texts for part in between.split(text) if part)
    tokenizer.train_from_iterator(parts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def render_text(messages: list[Message], tools: list[Any] | None = None) -> str:
    """`messages` in the chat template of `build_tokenizer`, as text.

    Example: `render_text([{"role": "user", "content": "2*3"}])` is
    `<|im_start|>user\\n2*3<|im_end|>`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([messages], tools=tools, chat_template=CHAT_TEMPLATE)
    return str(rendered[0][0])


def episode_texts(domain: Domain, episodes: int, config: Config) -> Iterator[str]:
    """Rendered demonstrations of the first `episodes` training tasks, or their first messages where
    the domain has no demonstrations: what to train a tokenizer on.

    Example: `build_tokenizer(episode_texts(domain, 400, config), vocab_size=334)`. Raises
    `DomainError` when an environment hangs.
    """
    numbers = count()

    def text_of(task: Task) -> str:
        env = domain.env()
        messages = env.start(task)
        policy = _script(domain, task, np.random.default_rng([0, next(numbers)]))
        for _ in range(config.turns if policy else 0):
            text = policy(messages)
            messages.append({"role": "assistant", "content": text})
            observation = env.step(parse_action(text))
            messages.extend(observation.messages)
            if observation.done:
                break
        return render_text(messages, domain.tools or None)

    yield from in_time(text_of, islice(domain.train_tasks, episodes), config)


def _script(domain: Domain, task: Task, rng: np.random.Generator) -> Any:
    """The scripted policy of `task`, None where the domain has none."""
    try:
        return domain.demonstrator(task, rng)
    except ConfigError:
        return None
