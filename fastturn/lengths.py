"""How long episodes are: assumed, fitted to data, or those of a run.

Prompts, thoughts, calls and observations have long tails: each is taken for a lognormal, fitted by
the mean and the deviation of the logarithm. How far that is from the data stands beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastturn.config import ConfigError
from fastturn.options import chosen
from fastturn.runfiles import RunFiles, mean
from fastturn.simulate import Lengths, lognormal_mean

# What a field of `Lengths` is called in data, with the name of its spread.
PARTS = {
    "prompt": ("prompt", "prompt_spread"),
    "think": ("think", "think_spread"),
    "call": ("action", "spread"),
    "observation": ("answer", "answer_spread"),
}
# Medians and spreads in tokens of SmolLM2's tokenizer, as `scripts/bench lengths` fits them to
# public data: `tool-dialogues`, 300 dialogues of LLaMA-Factory's glaive_toolcall_en_demo
# (Apache-2.0), prompts with their tools; `gsm8k`, its training set (MIT), worked solutions as
# thoughts and their arithmetic as calls; `hotpotqa`, 100 questions and 994 paragraphs (CC BY-SA
# 4.0), a paragraph an observation.
FITTED: dict[str, dict[str, float]] = {
    "tool-dialogues": {
        **{"prompt": 96.15, "prompt_spread": 0.7295, "action": 52.84, "spread": 1.008},
        **{"answer": 21.14, "answer_spread": 0.828},
    },
    "gsm8k": {
        **{"prompt": 56.72, "prompt_spread": 0.3453, "think": 84.51, "think_spread": 0.4393},
        **{"action": 8.158, "spread": 0.3, "answer": 2.112, "answer_spread": 0.4469},
    },
    "hotpotqa": {
        **{"prompt": 22.12, "prompt_spread": 0.3822},
        **{"answer": 124.4, "answer_spread": 0.528},
    },
}
FEWEST = 20  # observations that a run's distribution is taken from
# Most of a field by how its name ends: shares, and spreads, of which 4 means that one length of a
# hundred is 11,000 times the median.
MOST = {"silent": 1.0, "silent_whole": 1.0, "played": 1.0, "spread": 4.0}
LONGEST = 1e7  # tokens, seconds


@dataclass(frozen=True, slots=True)
class Fitted:
    """A lognormal and how well it describes `n` lengths. `distance`: the largest difference between
    both distribution functions (Kolmogorov-Smirnov). `tail`: the 99th percentile of the data over
    that of the fit."""

    median: float
    spread: float
    n: int
    distance: float
    tail: float


def fit(lengths: Sequence[float]) -> Fitted:
    """Of positive lengths, at least two. Lengths are whole: half a token is allowed around each.

    Example: of draws of a lognormal its median and spread, a distance near 0 and a tail near 1.
    """
    log_N = np.sort(np.log([x for x in lengths if x > 0]))
    centre, spread = float(log_N.mean()), float(log_N.std(ddof=1))
    value_M, count_M = np.unique(np.exp(log_N), return_counts=True)
    data_M = np.cumsum(count_M) / len(log_N)
    fit_M = [
        0.5 * math.erfc((centre - math.log(v + 0.5)) / (math.sqrt(2) * max(spread, 1e-9)))
        for v in value_M
    ]
    tail = float(np.quantile(np.exp(log_N), 0.99)) / math.exp(centre + 2.326 * spread)
    distance = float(np.abs(data_M - fit_M).max())
    return Fitted(math.exp(centre), spread, len(log_N), distance, tail)


def as_lengths(fits: Mapping[str, Fitted]) -> dict[str, float]:
    """Fields of `Lengths` by part. Example: a call of median 40, spread .5: action=40, spread=.5"""
    found: dict[str, float] = {}
    for part, one in fits.items():
        found |= dict(zip(PARTS[part], (one.median, one.spread), strict=True))
    return found


def parts_of(
    samples: Sequence[Mapping[str, Any]], count: Callable[[str], int]
) -> dict[str, list[int]]:
    """Lengths of the parts of transcripts (lines of samples.jsonl), by `count` of a text.

    An observation is what a context has beyond the one before and its action; contexts that do not
    begin with these (dropped thoughts, old turns) tell none.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        before = ""
        for place, turn in enumerate(sample["turns"]):
            context = turn["context"]
            if not place and not sample["stage"]:
                found["prompt"].append(count(context))
            if before and context.startswith(before):
                found["observation"].append(count(context[len(before) :]))
            thought, closed, said = turn["action"].rpartition("</think>")
            if closed:
                found["think"].append(count(thought + closed))
            found["call"].append(count(said))
            before = context + turn["action"]
    return dict(found)


def run_lengths(run: RunFiles, count: Callable[[str], int] | None = None) -> Lengths:
    """What a run says of its episodes, assumptions elsewhere: mean actions and turns and shares of
    silent groups by its records, distributions by its transcripts if `count` tells a text's tokens.
    `ConfigError` for a run without a whole iteration."""
    records = run.of("iteration")
    turns, whole, tokens, silent = (
        mean(r.get(key) for r in records)
        for key in ("turns_mean", "whole_turns_mean", "action_tokens_mean", "zero_advantage_share")
    )
    if not turns or tokens is None or silent is None:
        raise ConfigError(f"{run.name}: expected a run with whole iterations, it has none yet")
    reverse = run.config.get("algorithm", "rtpo").startswith("rtpo")
    rollouts = sum(r.get("rollouts", 0) for r in records)
    behind = run.config.get("turns", 1) - 1
    played = min(1.0, max(0.0, (whole or turns) - 1) / behind) if behind else 1.0
    waited = run.spans.get("environment", 0.0) / max(1.0, rollouts * turns)
    parts = parts_of(run.samples, count) if count else {}
    fits = {name: fit(x) for name, x in parts.items() if len(x) >= FEWEST}
    known = replace(Lengths(), **as_lengths(fits))
    said = tokens / turns - lognormal_mean(known.think, known.think_spread)
    median = max(1.0, said / lognormal_mean(1.0, known.spread))
    found = {"action": median, "tool_s": waited, "played": played}
    return replace(known, **found, **{"silent" if reverse else "silent_whole": silent})


def lengths_of(words: Sequence[str], known: Lengths | None = None) -> Lengths:
    """`known` (assumptions, without), changed by words in turn: a name of `FITTED`, `name=value`.
    Errors are `ConfigError`s.

    Example: `lengths_of(["gsm8k", "action=300"]).action` is 300.
    """
    lengths = known or Lengths()
    for word in words:
        if word in FITTED:
            lengths = replace(lengths, **FITTED[word])
            continue
        owner = f"an episode, or one of {', '.join(FITTED)}" if "=" not in word else "an episode"
        ((name, value),) = chosen([word], asdict(lengths), "--lengths", owner).items()
        lengths = replace(lengths, **{name: float(value)})
    return _checked(lengths)


def _checked(lengths: Lengths) -> Lengths:
    for field in fields(lengths):
        value = getattr(lengths, field.name)
        least = 1.0 if field.name == "action" else 0.0
        most = next((MOST[end] for end in MOST if field.name.endswith(end)), LONGEST)
        if not least <= value <= most:
            raise ConfigError(
                f"--lengths {field.name}={value:g}: expected a number from {least:g} to {most:g}"
            )
    return lengths


def counter(folder: Path) -> Callable[[str], int] | None:
    """Tokens of a text by the tokenizer in a run's folder; None when it holds none yet."""
    for place in ("tokenizer", "final"):
        path = folder / place / "tokenizer.json"
        if path.exists():
            tokenizer = Tokenizer.from_file(str(path))
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    return None
