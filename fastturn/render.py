"""Messages to tokens and back: the only user of the tokenizer while episodes run.

A conversation is a row of pieces: prompt, action, observation, action, observation, ... Sampled ids
go into it exactly as sampled; nothing is ever decoded and encoded again to build a context. What
the chat template puts around the contents is found once by rendering stand-in contents and cutting
the text at them, so any template works whose output for a message does not depend on later ones.

    running = previous context + action           what the sampler has seen
    context = policy(pieces)                      keep, strip_think, truncate:N, summarise
    Boundary(kept, context[kept:])                kept = common prefix of the two

Contents are encoded piece by piece with control tokens as plain text: a tool that prints
`<|im_end|>` cannot end a turn, and nothing merges across a join.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastturn.config import ConfigError
from fastturn.envs.base import Action, BadCall, Message, ToolCall
from fastturn.envs.calls import END_THINK, THINK, call_spans, parse_action
from fastturn.envs.loading import load_function
from fastturn.template import ChatTemplate, Codec
from fastturn.template import TemplateError as TemplateError
from fastturn.types import Boundary, Hit, Ids

if TYPE_CHECKING:
    pass

_log = logging.getLogger("fastturn")
_CONTEXTS = ("keep", "strip_think", "truncate:N", "summarise", "summarise:file.py:function")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation. An action's `token_T` are the sampled ids; an observation begins
    with whatever closes the action before it and ends with the next generation prompt; `messages`
    are those an observation or prompt was made of.

    Example: `Piece("action", [9, 4, 2])`.
    """

    kind: Literal["prompt", "action", "observation", "summary"]
    token_T: Ids
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode as tokens, at the moment before a turn is sampled. Immutable; forks share it.

    `pieces`: everything that happened, unshortened. `context_T`: the exact ids of this turn's
    context. `boundary`: how they follow from the previous context and action.
    """

    pieces: tuple[Piece, ...]
    context_T: Ids
    boundary: Boundary


ContextPolicy = Callable[[Sequence[Piece]], Sequence[Piece]]


def check_context(context: str, max_context: int) -> tuple[str, str]:
    """The name of a context policy and what follows its colon; `ConfigError` for no policy.

    Example: `check_context("truncate:64", 512)` is `("truncate", "64")`.
    """
    name, _, value = context.partition(":")
    if name == "truncate" and not (value.isdigit() and 0 < int(value) < max_context):
        raise ConfigError(
            f"context={context!r}: expected truncate:N with N tokens from 1 to below "
            f"max_context={max_context}, for example truncate:{max_context // 2}"
        )
    if name not in ("truncate", "summarise") and context not in _CONTEXTS:
        raise ConfigError(f"context={context!r}: expected one of {', '.join(_CONTEXTS)}")
    if name == "summarise" and value:
        load_function(value, "context")
    return name, value


class Renderer:
    """Turns messages into contexts and sampled ids into actions, for one tokenizer and template.

    `tools`: schemas given to the chat template; if it ignores them, they are described in the
    system message (said once in the log and kept in `notes`). `context`: keep, strip_think,
    truncate:N, summarise or summarise:file.py:function; `summary`: a function from the transcript
    of the older turns to its summary, instead of the named one. `max_context`: tokens that the
    model can read.

    Example, with the small tokenizer: `start([{"role": "user", "content": "2*3"}]).context_T` reads
    `<|im_start|>user\\n2*3<|im_end|><|im_start|>assistant\\n`.
    Raises `TemplateError` for an unusable template, `ConfigError` for an unknown context policy.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[dict[str, Any]] = (),
        context: str = "keep",
        max_context: int = 1 << 30,
        summary: Callable[[str], str] | None = None,
    ) -> None:
        self.max_context = max_context
        self.notes: list[str] = []
        self._codec = Codec(tokenizer)
        self._template = ChatTemplate(tokenizer, tools, self._codec, self.notes)
        self.stop_ids = self._template.stop_ids
        self._stops = frozenset(self.stop_ids)
        self._keep = context == "keep"
        self._policy = self._context_policy(context, summary)
        for note in self.notes:
            _log.warning("%s", note)

    def start(self, messages: Sequence[Message]) -> Conversation:
        """The first context: `messages` and the generation prompt; `boundary.kept` is 0."""
        token_T = self._template.prompt(messages)
        piece = Piece("prompt", token_T, tuple(messages))
        return Conversation((piece,), token_T, Boundary(0, token_T))

    def parse(self, action_A: Ids) -> Action:
        """The text of sampled ids without their stop token, and the tool calls in it. Never raises:
        a call that cannot be read is a `BadCall`. When the generation prompt opens `<think>`, the
        text begins with that tag, so that it says what is thinking by itself."""
        ids = action_A.tolist()
        if ids and ids[-1] in self._stops:
            del ids[-1]
        text = self._codec.decode(ids)
        return parse_action(f"{THINK}\n{text}" if self._template.opens_thinking else text)

    def located(self, action_A: Ids, hits: tuple[Hit, ...]) -> tuple[Hit, ...]:
        """`hits` on an action of several calls, each with the tokens of its call."""
        if not hits:
            return hits
        raw = [self._codec.raw([token]) for token in action_A.tolist()]
        opening = f"{THINK}\n".encode() if self._template.opens_thinking else b""
        spans = call_spans(opening + b"".join(raw))
        if not max(hit.call for hit in hits) < len(spans) > 1:
            return hits
        ends_A = len(opening) + np.cumsum([len(piece) for piece in raw])

        def tokens(start: int, stop: int) -> tuple[int, int]:
            first, last = np.searchsorted(ends_A, [start, stop - 1], side="right").tolist()
            return first, last + 1

        return tuple(replace(hit, span=tokens(*spans[hit.call])) for hit in hits)

    def encode_action(self, text: str) -> Ids:
        """The ids of a scripted action, its stop token included: the inverse of `parse`. An action
        without thinking closes the `<think>` that a generation prompt opened.

        Example: "7" gives 2 ids.
        """
        if self._template.opens_thinking:
            opened = text.startswith(THINK)
            text = (
                text.removeprefix(THINK).removeprefix("\n") if opened else f"{END_THINK}\n\n{text}"
            )
        return np.append(self._codec.encode_markup(text), self.stop_ids[0]).astype(np.int32)

    def fits(self, conversation: Conversation) -> bool:
        """Whether at least one token can be sampled after this context."""
        return len(conversation.context_T) + 1 <= self.max_context

    def advance(
        self, conversation: Conversation, action_A: Ids, messages: Sequence[Message]
    ) -> Conversation:
        """The conversation after `action_A` was sampled and `messages` answered it.

        An action without the template's own closing token (cut by its budget, or ended by another
        stop token, which is popped) is closed the way the template does.
        `boundary.apply(conversation.context_T + action_A)` is the new `context_T`, always.
        """
        spoken_A, tail_T = self._close(action_A, self._template.observation(messages))
        action = Piece("action", spoken_A)
        observation = Piece("observation", tail_T, tuple(messages))
        pieces = (*conversation.pieces, action, observation)
        if self._keep:
            kept = len(conversation.context_T) + len(spoken_A)
            context_T = np.concatenate([conversation.context_T, spoken_A, tail_T])
            return Conversation(pieces, context_T, Boundary(kept, tail_T))
        shown = self._policy(pieces)
        context_T = np.concatenate([piece.token_T for piece in shown])
        running_T = np.concatenate([conversation.context_T, action_A])
        kept = common_prefix(running_T, context_T)
        return Conversation(pieces, context_T, Boundary(kept, context_T[kept:]))

    def _close(self, action_A: Ids, tail_T: Ids) -> tuple[Ids, Ids]:
        """The action as it stays in the conversation, and what follows it."""
        last = int(action_A[-1]) if len(action_A) else -1
        if last == self.stop_ids[0]:
            return action_A, tail_T[1:]
        return (action_A[:-1] if last in self._stops else action_A), tail_T

    def template_difference(self, messages: Sequence[Message]) -> str | None:
        """Where this dialogue, built turn by turn, differs from the chat template applied to the
        whole of it at once (up to the last message that is not the assistant's); None if nowhere.

        Differences are legitimate (templates strip old thinking, tokens merge across joins): the
        model is trained at exactly the contexts it sampled from. They matter when a model trained
        here is served through the template.
        """
        turns = list(messages)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        built_T = self._build(turns)
        whole = self._template.render(self._template.prepare(turns), generation=True)
        built = self._codec.decode(built_T.tolist())
        if built != whole:
            at = _first_difference(built, whole)
            here = slice(max(0, at - 20), at + 40)
            return (
                f"text differs at character {at}: turn by turn {built[here]!r}, "
                f"whole dialogue {whole[here]!r}"
            )
        whole_T = self._codec.encode_markup(whole)
        if np.array_equal(built_T, whole_T):
            return None
        at = common_prefix(built_T, whole_T)
        return (
            f"same text, other tokens from token {at} on: turn by turn "
            f"{self._codec.pieces(built_T[at : at + 4])}, whole dialogue "
            f"{self._codec.pieces(whole_T[at : at + 4])}"
        )

    def _build(self, messages: Sequence[Message]) -> Ids:
        """The context of `messages` made by start and advance; they end with an observation."""
        said = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        first = said[0] if said else len(messages)
        conversation = self.start(messages[:first])
        ends = [*said[1:], len(messages)][: len(said)]
        for here, after in zip(said, ends, strict=True):
            action_A = self.encode_action(messages[here]["content"])
            conversation = self.advance(conversation, action_A, messages[here + 1 : after])
        return conversation.context_T

    def _context_policy(self, context: str, summary: Callable[[str], str] | None) -> ContextPolicy:
        name, value = check_context(context, self.max_context)
        if name == "keep":
            return lambda pieces: pieces
        if name == "strip_think":
            return self._strip_think
        if name == "truncate":
            return lambda pieces: truncate(pieces, int(value))
        function = load_function(value, "context") if value else summary or list_calls
        self._template.check_summaries()
        return lambda pieces: self._summarise(pieces, function)

    def _strip_think(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Every action without its thinking, and without the `<think>` that a prompt opened."""
        shown = list(pieces)
        for i, piece in enumerate(pieces):
            if piece.kind == "action":
                shown[i] = Piece("action", self._without_thinking(piece.token_T))
                if self._template.opens_thinking:
                    before = shown[i - 1]
                    length = len(before.token_T) - self._template.think_tail
                    shown[i - 1] = Piece(before.kind, before.token_T[:length], before.messages)
        return shown

    def _without_thinking(self, action_A: Ids) -> Ids:
        ended = len(action_A) and int(action_A[-1]) in self._stops
        body_A, stop_A = (action_A[:-1], action_A[-1:]) if ended else (action_A, action_A[:0])
        pattern = _OPENED_THINKING if self._template.opens_thinking else _THINKING
        spans = [m.span() for m in pattern.finditer(self._codec.raw(body_A.tolist()))]
        if not spans:
            return action_A
        return np.concatenate([self._codec.remove(body_A, spans), stop_A])

    def _summarise(
        self, pieces: Sequence[Piece], function: Callable[[str], str]
    ) -> Sequence[Piece]:
        """Turns before the last one become one user message after the prompt."""
        prompt, *turns = pieces
        if len(turns) <= 2:
            return pieces
        text = function(self.transcript(turns[:-2]))
        if not isinstance(text, str):
            raise ConfigError(
                f"context=summarise: the summary function returned {type(text).__name__}, "
                "expected the summary as a string"
            )
        head_T, tail_T = self._template.summary_frame
        summary_T = np.concatenate([head_T, self._codec.encode_plain(text), tail_T])
        cut = len(prompt.token_T) - self._template.generation_tokens
        opening = Piece("prompt", prompt.token_T[:cut], prompt.messages)
        return [opening, Piece("summary", summary_T), *turns[-2:]]

    def transcript(self, pieces: Sequence[Piece]) -> str:
        """Actions and observations as text, a "role: content" paragraph for each message.

        Example: "assistant: <tool_call>...</tool_call>\\ntool: 444\\n".
        """
        lines = []
        for piece in pieces:
            if piece.kind == "action":
                lines.append(f"assistant: {self.parse(piece.token_T).text}\n")
            lines.extend(f"{m['role']}: {m['content']}\n" for m in piece.messages)
        return "".join(lines)


_THINKING = re.compile(rb"<think>.*?(?:</think>\n*|\Z)", re.DOTALL)
_OPENED_THINKING = re.compile(rb"(?:\A|<think>).*?(?:</think>\n*|\Z)", re.DOTALL)
_PARAGRAPH = re.compile(r"^(assistant|tool|user|system): ", re.MULTILINE)


def common_prefix(left_T: Ids, right_T: Ids) -> int:
    """Length of the common prefix. Example: `[1, 2, 3]` and `[1, 2, 4, 5]` give 2."""
    length = min(len(left_T), len(right_T))
    different = np.flatnonzero(left_T[:length] != right_T[:length])
    return int(different[0]) if len(different) else length


def truncate(pieces: Sequence[Piece], tokens: int) -> list[Piece]:
    """`pieces` without the oldest action-observation pairs, until at most `tokens` are left; the
    prompt and the newest pair always stay.

    Example: a prompt of 5 and pairs of 4, 3 and 2 tokens at `tokens=10` become 5, 3, 2.
    """
    prompt, *turns = pieces
    total = sum(len(piece.token_T) for piece in pieces)
    while total > tokens and len(turns) > 2:
        total -= len(turns[0].token_T) + len(turns[1].token_T)
        turns = turns[2:]
    return [prompt, *turns]


def list_calls(transcript: str) -> str:
    """The default summary: every call with its result, a line each.

    Example: "Earlier steps:\\ncalculator(37*12) -> 444".
    """
    lines = ["Earlier steps:"]
    pending: list[str] = []
    _, *parts = _PARAGRAPH.split(transcript)
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        content = content.strip()
        if role == "assistant":
            lines += pending
            pending = [_call_line(call) for call in parse_action(content).calls]
        elif role == "tool" and pending:
            lines.append(f"{pending.pop(0)} -> {content}")
        else:
            lines.append(f"{role}: {content}")
    return "\n".join([*lines, *pending])


def _call_line(call: ToolCall | BadCall) -> str:
    if isinstance(call, BadCall):
        return "a call that could not be read"
    values = ", ".join(v if isinstance(v, str) else json.dumps(v) for v in call.arguments.values())
    return f"{call.name}({values})"


def _first_difference(left: str, right: str) -> int:
    same = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(same, min(len(left), len(right)))
