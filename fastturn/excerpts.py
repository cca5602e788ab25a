"""Episodes that a report shows: which ones, and their text with its parts marked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from fastturn.runfiles import Record

SAMPLES = 5
_MOST_CHARACTERS = 6000  # of one piece of text
_UNFOLDED = 1200  # characters of a context that are shown without a click
_TAIL = 300  # about as many stay in sight of a longer one that has no messages
_PROMPT = 60  # at most as many belong to the header of the reply

_ROLE = (
    r"<\|im_start\|>\w*\n?"
    r"|<\|start_header_id\|>\w*<\|end_header_id\|>\n*"
    r"|<start_of_turn>\w*\n?"
)
_MARKS = re.compile(
    rf"(?P<role>{_ROLE})"
    r"|(?P<call><tool_call>.*?(?:</tool_call>|$))"
    r"|(?P<observation><tool_response>.*?(?:</tool_response>|$)"
    r"|(?<=<\|im_start\|>tool\n).+?(?=<\|im_end\|>|$))"
    r"|(?P<think><think>.*?(?:</think>|$))"
    r"|(?P<control><[|｜][^<>\n]{1,40}[|｜]>|<end_of_turn>)",
    re.DOTALL,
)


def transcripts(samples: Sequence[Record]) -> list[dict[str, Any]]:
    """Five episodes: the run in five parts, of each the one with the largest advantage, in every
    second part the one with the smallest."""
    parts = min(SAMPLES, len(samples))
    cuts = [round(i * len(samples) / parts) for i in range(parts + 1)] if parts else []
    chosen = []
    for place, (a, b) in enumerate(itertools.pairwise(cuts)):
        pick = max if place % 2 == 0 else min
        chosen.append(pick(samples[a:b], key=_advantage))
    return [_transcript(sample) for sample in chosen]


def _advantage(sample: Record) -> float:
    """The advantage of the first trained turn, 0 without one."""
    known = (turn.get("advantage") for turn in sample.get("turns") or [])
    return float(next((advantage for advantage in known if advantage), 0.0))


def _transcript(sample: Record) -> dict[str, Any]:
    first = sample.get("stage") or 0
    turns = enumerate(sample.get("turns") or [], start=first)
    return {
        **{key: str(sample.get(key, "")) for key in ("task", "ending")},
        **{key: sample.get(key) for key in ("iteration", "stage", "return")},
        "turns": [_turn(turn, number) for number, turn in turns],
    }


def _turn(turn: Record, number: int) -> dict[str, Any]:
    earlier, context = folded(str(turn.get("context", "")))
    return {
        "number": number,
        "earlier": marked(earlier),
        "earlier_characters": len(earlier),
        "context": marked(context),
        "action": marked(str(turn.get("action", ""))),
        "reward": turn.get("reward"),
        "advantage": turn.get("advantage"),
        "events": turn.get("events") or [],
    }


def folded(text: str) -> tuple[str, str]:
    """A context as what is hidden behind a click and what stays in sight: its last messages.

    Example: at most 1200 characters stay whole, `folded("short")` gives `("", "short")`.
    """
    if len(text) <= _UNFOLDED:
        return "", text
    starts = [match.start() for match in re.finditer(_ROLE, text[:-_PROMPT])]
    if starts and starts[-1] > 0:
        cut = starts[-1]
    else:
        cut = text.rfind("\n", 0, -_TAIL) + 1 or len(text) - _TAIL
    return text[:cut], text[cut:]


def marked(text: str) -> Markup:
    """`text`, escaped, with roles, tool calls, observations, thoughts and control tokens marked.

    The middle of a very long text is left out and the omission is said.
    """
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
    pieces, end = [], 0
    for match in _MARKS.finditer(text):
        pieces.append(escape(text[end : match.start()]))
        pieces.append(Markup('<span class="{}">{}</span>').format(match.lastgroup, match.group()))
        end = match.end()
    pieces.append(escape(text[end:]))
    return Markup("").join(pieces)
