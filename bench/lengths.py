"""Lengths of prompts, thoughts, calls and observations, fitted to data or to transcripts of a run.

    .venv/bin/python scripts/bench lengths --data DIR --no-record
    .venv/bin/python scripts/bench lengths --run runs/first --no-record

DIR holds public data as it is published: sft/glaive_toolcall_en_demo.json, math/gsm8k_train.jsonl,
qa/hotpotqa100_clean.jsonl and qa/hotpotqa100_corpus.jsonl. Tokens are those of SmolLM2's tokenizer,
of a run those of its own. Rows hold the fitted lognormal and its distance from the data; what is
printed last goes behind `fastturn plan --lengths`, or is the table in `fastturn/lengths.py`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fastturn.config import ConfigError
from fastturn.lengths import FEWEST, Fitted, as_lengths, counter, fit, parts_of
from fastturn.models import smollm2_folder
from fastturn.runfiles import load

from . import command
from .record import Measured

Texts = Mapping[str, Sequence[str]]
METRICS = {"median": "tokens", "spread": "1", "distance": "1", "tail": "1", "n": "1"}


def tool_dialogues(data: Path) -> Texts:
    """What was asked first with the tools there are; calls, their results, answers."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    names = {"function_call": "call", "observation": "observation", "gpt": "call"}
    for dialogue in json.loads((data / "sft" / "glaive_toolcall_en_demo.json").read_text()):
        messages = dialogue["conversations"]
        found["prompt"].append(dialogue["tools"] + messages[0]["value"])
        for message in messages[1:]:
            if message["from"] in names:
                found[names[message["from"]]].append(message["value"])
    return found


def gsm8k(data: Path) -> Texts:
    """Worked solutions without their calculator's annotations, which are the calls."""
    rows = lines(data / "math" / "gsm8k_train.jsonl")
    calls = [call for row in rows for call in re.findall("<<(.*?)>>", row["answer"])]
    return {
        "prompt": [row["question"] for row in rows],
        "think": [re.sub("<<.*?>>", "", row["answer"]) for row in rows],
        "call": calls,
        "observation": [call.partition("=")[2] for call in calls],
    }


def hotpotqa(data: Path) -> Texts:
    """Questions and the paragraphs that a search finds."""
    questions = lines(data / "qa" / "hotpotqa100_clean.jsonl")
    paragraphs = lines(data / "qa" / "hotpotqa100_corpus.jsonl")
    return {
        "prompt": [row["question"] for row in questions],
        "observation": [f"{row['title']}: {row['text']}" for row in paragraphs],
    }


SETS: Mapping[str, Callable[[Path], Texts]] = {
    "tool-dialogues": tool_dialogues,
    "gsm8k": gsm8k,
    "hotpotqa": hotpotqa,
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_data(data: Path) -> dict[str, dict[str, Fitted]]:
    """Fits by set and part. `ConfigError` for a file that is missing or not as it is published."""
    found: dict[str, Texts] = {}
    for name, read in SETS.items():
        try:
            found[name] = read(data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--data {data}: expected the files of {name} as they are published "
                f"({type(error).__name__}: {error}); download them again"
            ) from error
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    return {
        name: {
            part: fit([len(ids) for ids in tokenizer(list(told))["input_ids"]])
            for part, told in texts.items()
        }
        for name, texts in found.items()
    }


def of_run(folder: Path) -> dict[str, Fitted]:
    """Fits by part; parts of which there is too little are named and left out."""
    count = counter(folder)
    if count is None:
        raise ConfigError(f"{folder}: expected a run with a tokenizer in it; let it begin first")
    found = {}
    for part, lengths in parts_of(load(folder).samples, count).items():
        if len(lengths) < FEWEST:
            print(f"{part}: {len(lengths)} in the transcripts, {FEWEST} are needed; left out")
        else:
            found[part] = fit(lengths)
    return found


def measured(fits: Mapping[str, Mapping[str, Fitted]]) -> Iterator[Measured]:
    for name, parts in fits.items():
        for part, one in parts.items():
            for metric, unit in METRICS.items():
                value = float(asdict(one)[metric])
                yield Measured(f"lengths/{name}", part, metric, unit, (value,), {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("lengths", __doc__, repeats=1)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR", help="public data")
    source.add_argument("--run", type=Path, metavar="DIR", help="a run of yours; nothing recorded")
    args = parser.parse_args(argv)
    args.no_record |= args.run is not None
    args = command.started(args)
    fits = of_data(args.data) if args.data else {args.run.name: of_run(args.run)}
    status = command.report("lengths", measured(fits), args)
    for name, parts in fits.items():
        print(f"{name}:", ",".join(f"{k}={v:.4g}" for k, v in as_lengths(parts).items()))
    return status
