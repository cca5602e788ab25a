"""What a chat template writes around contents, and text to ids and back.

The template is a program, so its glue is found by running it: dialogues of stand-in contents are
rendered and cut at the stand-ins. Everything between them is glue, encoded once with the special
tokens recognised; contents are encoded apart, with special tokens as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastturn.envs.base import Message
from fastturn.envs.calls import THINK
from fastturn.types import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CACHED_CHARS = 64  # contents up to this length are encoded once (numbers, short results)
_TOOL_HEADER = (
    "You can use these tools. Each line describes one of them as a JSON schema:\n{schemas}\n"
    'To use one, write <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call> with the '
    "name of the tool and an object of its arguments, then stop. The result follows in the next "
    "message."
)


class TemplateError(ValueError):
    """A tokenizer or chat template that cannot carry tool dialogues: says what and the remedy."""


class ChatTemplate:
    """What the chat template writes around contents, as token ids, found with stand-in contents."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[dict[str, Any]], codec: Codec, notes: list[str]
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template; use an instruct model, or set "
                "tokenizer.chat_template"
            )
        self._tokenizer, self._codec = tokenizer, codec
        self._tools: list[dict[str, Any]] | None = list(tools) or None
        self._header = ""  # describes the tools when the template ignores them
        self._system_role = self._tool_role = True
        self._cache: dict[Any, list[Ids]] = {}
        user = [_message("user", 0)]
        self._cut(user)
        self._find_support(user, notes)
        self._find_generation(user)
        self._find_stops()

    def _find_support(self, user: list[Message], notes: list[str]) -> None:
        """What the template lacks is done by hand, and noted."""
        answered = [*user, _message("assistant", 1)]
        if not self._prints([_message("system", 2), *user]):
            self._system_role = False
            notes.append(
                "the chat template has no system messages: they begin the first user message"
            )
        if not self._prints([*answered, _message("tool", 2)]):
            self._tool_role = False
            notes.append(
                "the chat template has no tool messages: results are sent as user messages inside "
                "<tool_response> tags"
            )
        tools, with_tools = self._tools, self.render(user, True)
        self._tools = None
        if tools and self.render(user, True) != with_tools:
            self._tools = tools
        elif tools:
            schemas = "\n".join(json.dumps(tool) for tool in tools)
            self._header = _TOOL_HEADER.format(schemas=schemas)
            notes.append(
                "the chat template ignores tools: they are described in the system message"
            )

    def _prints(self, messages: list[Message]) -> bool:
        try:
            self._cut(messages)
        except TemplateError:
            return False
        return True

    def _find_generation(self, user: list[Message]) -> None:
        closed, opened = self.render(user, False), self.render(user, True)
        if not opened.startswith(closed) or opened == closed:
            raise TemplateError(
                "add_generation_prompt=True does not append to what the chat template writes "
                f"without it ({closed[-40:]!r} against {opened[-40:]!r}); fix the template so that "
                "the generation prompt is a suffix"
            )
        generation = opened[len(closed) :]
        self.generation_tokens = len(self._codec.encode_markup(generation))
        self.opens_thinking = generation.rstrip().endswith(THINK)
        tail = generation[generation.rfind(THINK) :] if self.opens_thinking else ""
        self.think_tail = len(self._codec.encode_markup(tail))
        self._after_user = closed[closed.index(_stand_in(0)) + len(_stand_in(0)) :]

    def _find_stops(self) -> None:
        """The token that closes an assistant message, and the others that end a generation."""
        first_T = self.observation([{"role": "user", "content": ""}])[:1]
        if not len(first_T) or int(first_T[0]) not in self._codec.control_ids:
            raise TemplateError(
                "the chat template does not close an assistant message with a special token "
                f"(it writes {self._codec.pieces(first_T)}), so the end of an action cannot be "
                "sampled; use a template such as ChatML that does"
            )
        eos = self._tokenizer.eos_token_id
        others = [eos, self._codec.control_ids_by_text.get("<|endoftext|>")]
        ids = [int(first_T[0]), *(int(i) for i in others if i is not None)]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    def render(self, messages: Sequence[Message], generation: bool) -> str:
        """The template's text; what it raises becomes a `TemplateError`."""
        from jinja2 import TemplateError as JinjaError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (JinjaError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template refuses the messages [{roles}]: {error}; change the order of "
                "the messages or the template"
            ) from error
        assert isinstance(text, str)
        return text

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` as given to the template: tools described, roles that it lacks replaced."""
        prepared = list(messages)
        if self._header:
            own = prepared.pop(0)["content"] if _begins(prepared, "system") else ""
            content = f"{own}\n\n{self._header}" if own else self._header
            prepared.insert(0, {"role": "system", "content": content})
        if not self._system_role and _begins(prepared, "system") and _begins(prepared[1:], "user"):
            system, user = prepared[:2]
            content = f"{system['content']}\n\n{user['content']}"
            prepared[:2] = [{"role": "user", "content": content}]
        return prepared if self._tool_role else _results_as_user_messages(prepared)

    def prompt(self, messages: Sequence[Message]) -> Ids:
        """Ids of a whole prompt, generation prompt included."""
        key = ("prompt", *map(_shape, messages))
        if key not in self._cache:
            texts = self._cut(_stand_ins(messages, 0))
            self._cache[key] = [self._codec.encode_markup(text) for text in texts]
        return self._fill(self._cache[key], messages)

    def observation(self, messages: Sequence[Message]) -> Ids:
        """Ids of what follows an action without its stop token, generation prompt included."""
        key = tuple(map(_shape, messages))
        if key not in self._cache:
            head = [_message("user", 0), _message("assistant", 1)]
            texts = self._cut([*head, *_stand_ins(messages, 2)])[2:]
            self._cache[key] = [self._codec.encode_markup(text) for text in texts]
        return self._fill(self._cache[key], messages)

    def _fill(self, glue: list[Ids], messages: Sequence[Message]) -> Ids:
        """Contents between glue. Only the assistant's own words may hold markup tokens."""
        parts = [glue[0]]
        filled = (m for m in messages if m["content"] is not None)
        for message, after in zip(filled, glue[1:], strict=True):
            content = message["content"]
            own = message["role"] == "assistant"
            parts.append(
                self._codec.encode_markup(content) if own else self._codec.encode_plain(content)
            )
            parts.append(after)
        return np.concatenate(parts)

    def _cut(self, messages: Sequence[Message]) -> list[str]:
        """The template's text around the stand-ins of `messages`: one more than there are."""
        rest = self.render(self.prepare(messages), True)
        texts = []
        for message in messages:
            content = message["content"]
            if content is None:
                continue
            if rest.count(content) != 1:
                raise TemplateError(
                    f"the chat template prints the content of a {message['role']!r} message "
                    f"{rest.count(content)} times, or out of order; it must print each content "
                    "once, in the order of the messages"
                )
            before, _, rest = rest.partition(content)
            texts.append(before)
        return [*texts, rest]

    def check_summaries(self) -> None:
        """Find what stands around a user message that follows another one directly."""
        head = [_message("user", 0), _message("assistant", 1), _message("user", 2)]
        before, after = self._cut(head)[2:]
        if not before.startswith(self._after_user):
            raise TemplateError(
                "context=summarise needs a template that closes user and assistant messages alike "
                f"(it writes {self._after_user!r} after a user message, {before!r} between an "
                "assistant and a user message); use context=truncate:N"
            )
        opening = before[len(self._after_user) :]
        self.summary_frame = (
            self._codec.encode_markup(opening),
            self._codec.encode_markup(after),
        )


def _begins(messages: Sequence[Message], role: str) -> bool:
    return bool(messages) and messages[0]["role"] == role


def _results_as_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Adjacent results share one message: templates without a tool role often want roles to
    alternate."""
    shown: list[Message] = []
    previous = ""
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if previous == "tool":
                text = f"{shown.pop()['content']}\n{text}"
            shown.append({"role": "user", "content": text})
        else:
            shown.append(message)
        previous = message["role"]
    return shown


def _stand_in(index: int) -> str:
    return f"zqCONTENT{index}qz"


def _message(role: str, index: int) -> Message:
    return {"role": role, "content": _stand_in(index)}


def _stand_ins(messages: Sequence[Message], first: int) -> list[Message]:
    return [
        {**m, "content": None if m["content"] is None else _stand_in(first + i)}
        for i, m in enumerate(messages)
    ]


def _shape(message: Message) -> str:
    """All of a message but its content, which the template must not look at."""
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise TypeError(
            f"the content of a {message.get('role')!r} message is {type(content).__name__}, "
            "expected a string"
        )
    if len(message) == 2:
        return str(message["role"])
    rest = {key: value for key, value in message.items() if key != "content"}
    return json.dumps([rest, content is None], sort_keys=True)


class Codec:
    """Text to ids and back through the tokenizer's backend.

    `encode_markup` knows every added token (template text, the assistant's own words);
    `encode_plain` knows none, so contents cannot forge one.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; load it with "
                "AutoTokenizer.from_pretrained(path, use_fast=True)"
            )
        self._backend: Tokenizer = backend
        spec = json.loads(backend.to_str())
        self.control_ids_by_text = {t["content"]: int(t["id"]) for t in spec["added_tokens"]}
        self.control_ids = frozenset(self.control_ids_by_text.values())
        byte_level = '"ByteLevel"' in json.dumps(spec["decoder"])
        self._bytes = _TokenBytes(backend, self.control_ids, byte_level)
        spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain: Tokenizer = Tokenizer.from_str(json.dumps(spec))
        self._short = lru_cache(maxsize=16384)(self._encode_plain)
        self._check_plain()

    def _check_plain(self) -> None:
        for text in self.control_ids_by_text:
            if not self.control_ids.isdisjoint(self.encode_plain(text).tolist()):
                raise TemplateError(
                    f"the tokenizer turns the text {text!r} into a control token even as content, "
                    "so a tool could forge it; use a tokenizer with byte-level BPE"
                )

    def encode_markup(self, text: str) -> Ids:
        """Ids with added tokens recognised."""
        return _frozen(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> Ids:
        """Ids with every added token as plain text."""
        return self._short(text) if len(text) <= _CACHED_CHARS else self._encode_plain(text)

    def _encode_plain(self, text: str) -> Ids:
        return _frozen(self._plain.encode(text, add_special_tokens=False).ids)

    def raw(self, ids: Sequence[int]) -> bytes:
        """The bytes that `ids` stand for."""
        return b"".join([self._bytes[i] for i in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included; bytes that are no character become U+FFFD."""
        return self.raw(ids).decode(errors="replace")

    def pieces(self, token_T: Ids) -> list[str]:
        """The text of each id, for messages."""
        return [self.decode([i]) for i in token_T.tolist()]

    def remove(self, token_T: Ids, spans: Sequence[tuple[int, int]]) -> Ids:
        """`token_T` without the byte ranges `spans`. Ids outside stay as they are; of a token that
        an edge cuts through, the rest is encoded anew."""
        kept: list[int] = []
        offset = 0
        for token in token_T.tolist():
            raw = self._bytes[token]
            left = _outside(raw, offset, spans)
            offset += len(raw)
            if left == raw:
                kept.append(token)
            elif left:
                kept.extend(self.encode_plain(left.decode(errors="replace")).tolist())
        return np.array(kept, np.int32)


def _outside(raw: bytes, offset: int, spans: Sequence[tuple[int, int]]) -> bytes:
    """The bytes of `raw`, which begins at `offset`, that lie in none of `spans`."""
    for start, end in reversed(spans):
        low, high = max(start - offset, 0), min(end - offset, len(raw))
        if low < high:
            raw = raw[:low] + raw[high:]
    return raw


def _frozen(ids: list[int]) -> Ids:
    array = np.array(ids, np.int32)
    array.setflags(write=False)
    return array


class _TokenBytes(dict[int, bytes]):
    """Id -> bytes, filled as asked. Ids that the tokenizer lacks (padded vocabularies) read as
    U+FFFD."""

    def __init__(self, backend: Tokenizer, control_ids: frozenset[int], byte_level: bool) -> None:
        self._backend, self._control_ids = backend, control_ids
        self._alphabet = _byte_alphabet() if byte_level else None

    def __missing__(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            raw = b"\xef\xbf\xbd"
        elif token in self._control_ids:
            raw = text.encode()
        elif self._alphabet is not None:
            raw = bytes(self._alphabet[character] for character in text)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            raw = bytes([int(text[3:5], 16)])
        else:
            raw = text.replace("\u2581", " ").encode()
        self[token] = raw
        return raw


def _byte_alphabet() -> Mapping[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies: printable Latin-1 characters
    stand for themselves, the others are numbered from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
