"""Random and mutated model outputs through parsing, tools and answer checks: nothing raises, and
every call that cannot be read is counted."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastturn.config import Config, ConfigError, Data
from fastturn.envs import BadCall, Domain, load_domain
from fastturn.envs.base import CALL_FAILURES
from fastturn.envs.calls import CLOSE, OPEN, parse_action, spoken
from fastturn.envs.sandbox import Sandbox

UNREADABLE = {"bad_json", "unclosed_call", "unopened_call", "empty_call", "not_an_object"}
UNREADABLE |= {"missing_name", "bad_name", "bad_arguments"}
EVENTS = CALL_FAILURES | {"tool_call"}
EVENTS |= {"answer", "no_answer", "exact_match", "verifier_error"}


def call(name: Any, arguments: Any) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


SEEDS = (
    call("calculator", {"expression": "(37+5)*12 - 4/2"}),
    call("python", {"code": "x = [n * n for n in range(9)]\nprint(sum(x) / 3)"}),
    call("search", {"query": "vengeful spirit"}),
    call("open", {"id": "1"}) + call("open", {"id": 2}),
    call("python", '{"code": "print(1)"}'),
    call(["calculator"], None),
    f"<think>{call('python', {})}</think> so \\boxed{{\\frac{{3}}{{4}}}}",
    "The total is 12 + 30 = 42.\n\n\\boxed{42}",
    "\\boxed{x^2 + 2x + 1}",
    "\\boxed{\\left(3, \\frac{\\pi}{2}\\right)} and \\boxed{\\text{a spirit}}",
    "\\boxed{1,234.50 \\text{ dollars}}",
)
ALPHABET = "{}[]()<>\"'\\/,:.0123456789 abcxyz+-*^_$%\n\t\0é中🙂\u202e\ud800\u0663"
PIECES = (OPEN, CLOSE, "<think>", "</think>", "\\boxed{", "}", "NaN", "null", "9" * 400, "[" * 300)


def output(rng: random.Random) -> str:
    """A seed with a few mutations, or noise."""
    if rng.random() < 0.1:
        return "".join(rng.choices([*ALPHABET, *PIECES], k=rng.randrange(60)))
    text = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 6)):
        left, right = sorted(rng.choices(range(len(text) + 1), k=2))
        right = min(right, left + 12)
        text = rng.choice(
            (
                text[:left] + text[right:],
                text[:left] + rng.choice(ALPHABET) + text[left:],
                text[:left] + rng.choice(PIECES) + text[right:],
                text[:left] + text[left:right] * 3 + text[right:],
                text[:left] + rng.choice(SEEDS),
                text[:right],
            )
        )
    return text


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Domain]:
    """One of every tool and of every way to check an answer."""
    folder: Path = tmp_path_factory.mktemp("fuzz")
    answers = ["42", "\\frac{3}{4}", "x^2+2x+1", "\\left(3,\\frac{\\pi}{2}\\right)", "1234.5"]
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = [{"title": "Alû", "text": "a vengeful spirit"}, {"title": "Chess", "text": "a game"}]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    names = ["math", f"search:corpus={folder / 'c.jsonl'}", "math:tool=python", "calculator"]
    found = []
    for name in names:
        path = "" if name == "calculator" else str(folder / "q.jsonl")
        data = Data(domain=name, path=path, eval_tasks=1, tool_timeout_s=1.0)
        try:
            found.append(load_domain(Config(data=data)))
        except ConfigError:
            assert name == "math:tool=python" and not isolated()
    return found


def isolated() -> bool:
    try:
        Sandbox(1.0).close()
    except ConfigError:
        return False
    return True


def attempts(text: str) -> bool:
    """Whether a call is attempted outside the thinking."""
    return OPEN in spoken(text) or CLOSE in spoken(text)


def fuzz(domains: list[Domain], count: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    for number in range(count):
        text, domain = output(rng), domains[number % len(domains)]
        action = parse_action(text)
        assert attempts(text) == bool(action.calls)
        env = domain.env()
        env.start(domain.train_tasks[number % 4])
        observation = env.step(action)
        bad = Counter(c.event for c in action.calls if isinstance(c, BadCall))
        events = Counter(observation.events)
        assert events["tool_call"] == len(action.calls) == len(observation.messages)
        assert all(events[event] >= n for event, n in bad.items())
        assert set(events) <= EVENTS and observation.done == (not action.calls)
        assert 0.0 <= observation.reward <= 1.0
        json.dumps(observation.messages)
        seen += events
    return seen


def test_two_thousand_outputs(domains: list[Domain]) -> None:
    seen = fuzz(domains, 2_000, 1)
    assert seen["tool_call"] > 500 and seen["bad_json"] > 100 and seen["answer"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_outputs(domains: list[Domain]) -> None:
    seen = fuzz(domains, 20_000, 2)
    assert set(seen) >= EVENTS - {"exact_match", "tool_timeout", "verifier_error"}
