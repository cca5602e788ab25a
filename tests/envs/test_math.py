"""Domain "math": loading, splitting, answer checking, demonstrations."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from fastturn.config import Config, ConfigError, Data
from fastturn.envs import Action, DomainError, Message, Observation, load_domain, verify
from fastturn.envs.answers import as_number, boxed, same_number
from fastturn.envs.calls import parse_action
from fastturn.envs.math import infer, read_problem, read_problems
from fastturn.envs.verify import Verdict, Verifier

GSM8K = "Half of 48 is 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {n} plus {n}?", "answer": f"<<{n}+{n}={2 * n}>> #### {2 * n}"}
        for n in range(first, first + count)
    ]


def config(path: str, **data: Any) -> Config:
    return Config(data=Data(domain="math", path=path, **{"eval_tasks": 4, **data}))


# --- reading


@pytest.mark.parametrize(
    ("row", "question", "answer", "expressions"),
    [
        ({"question": "Q", "answer": GSM8K}, "Q", "72", ("48/2", "48+24")),
        ({"question": "Q", "answer": "#### 1,234"}, "Q", "1,234", ()),
        ({"question": "Q", "answer": "\\frac{1}{2}"}, "Q", "\\frac{1}{2}", ()),
        ({"problem": "P", "question": "P", "answer": 27.0}, "P", "27", ()),
        ({"problem": "P", "solution": "so", "answer": 204}, "P", "204", ()),
        ({"problem": "P", "solution": "so \\boxed{\\frac{1}{2}}."}, "P", "\\frac{1}{2}", ()),
        (
            {
                "Body": "A has 290.",
                "Question": "How many?",
                "Answer": 145.0,
                "Equation": "( 290.0 / 2.0 )",
            },
            "A has 290. How many?",
            "145",
            ("( 290 / 2 )",),
        ),
        (
            {"input": "70 shells , 27 left ?", "target": 43.0},
            "70 shells , 27 left ?",
            "43",
            ("70-27",),
        ),
        ({"input": "no numbers", "target": 0.125}, "no numbers", "0.125", ()),
    ],
)
def test_known_formats(
    row: dict[str, Any], question: str, answer: str, expressions: tuple[str, ...]
) -> None:
    problem = read_problem(row, "f:1")
    assert (problem.question, problem.answer) == (question, answer)
    assert problem.expressions == expressions


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "P", "gold": 1},
            r"f:3: found the keys gold, prompt; expected one of these sets",
        ),
        ({}, r"found the keys \(none\)"),
        ({"question": "Q", "answer": None}, "found the keys"),
        ({"question": "Q", "answer": ["a"]}, "'answer' is list, expected a string or a number"),
        ({"question": "Q", "answer": True}, "'answer' is bool"),
        ({"question": "Q", "answer": "so #### "}, "no answer in 'answer'"),
        ({"problem": "P", "solution": "unclear"}, "no answer in 'solution'"),
        ({"question": " ", "answer": "1"}, "the question is empty"),
    ],
)
def test_rows_that_cannot_be_used(row: Any, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        read_problem(row, "f:3")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match="No such file or directory; give a jsonl file"):
        load_domain(config(str(tmp_path / "missing.jsonl")))
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        load_domain(config(""))
    with pytest.raises(DomainError, match="nothing in it"):
        load_domain(config(write(tmp_path / "empty.jsonl", [])))
    with pytest.raises(DomainError, match=r"list\.jsonl:1: expected a JSON object, found list"):
        load_domain(config(write(tmp_path / "list.jsonl", [[1]])))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "Q", "answer": "1"}\n\n{"question": \n')
    with pytest.raises(DomainError, match=r"broken\.jsonl:3: not valid JSON .* repair or remove"):
        load_domain(config(str(broken)))
    broken.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DomainError, match="not UTF-8"):
        load_domain(config(str(broken)))
    with pytest.raises(DomainError, match="Is a directory"):
        load_domain(config(str(tmp_path)))


def test_datasets_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, split: str) -> list[dict[str, Any]]:
        asked.append((*names, split))
        return sums(2)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    problems = read_problems("openai/gsm8k:main", "data.path")
    assert [p.origin for p in problems] == ["openai/gsm8k:main:1", "openai/gsm8k:main:2"]
    read_problems("owner/set::test", "data.path")
    assert asked == [("openai/gsm8k", "main", "train"), ("owner/set", None, "test")]

    def offline(*names: Any, split: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(
        DomainError, match=r"cannot be loaded \(no route\); check the id and the net"
    ):
        read_problems("owner/set", "data.path")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DomainError, match="pip install datasets"):
        read_problems("owner/set", "data.path")


# --- splitting


def test_held_out_problems_are_disjoint_by_content(tmp_path: Path) -> None:
    rows = sums(20)
    rows += [{**row, "question": f"  {row['question'].upper()} "} for row in rows]
    path = write(tmp_path / "a.jsonl", rows)
    domain = load_domain(config(path))

    def contents(tasks: Any) -> list[str]:
        return [" ".join(task.data["question"].lower().split()) for task in tasks]

    assert len(domain.eval_tasks) == len(set(contents(domain.eval_tasks))) == 4
    assert len(domain.train_tasks) == 32
    assert not set(contents(domain.eval_tasks)) & set(contents(domain.train_tasks))
    assert len({t.id for t in [*domain.train_tasks, *domain.eval_tasks]}) == 36


def test_the_seed_orders_training_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", sums(20))
    one, two = (
        load_domain(Config(seed=seed, data=Data(domain="math", path=path, eval_tasks=4)))
        for seed in (1, 2)
    )
    assert list(one.eval_tasks) == list(two.eval_tasks)
    assert [t.data for t in one.train_tasks] != [t.data for t in two.train_tasks]


def test_an_own_held_out_file(tmp_path: Path) -> None:
    train, held_out = (
        write(tmp_path / "a.jsonl", sums(20)),
        write(tmp_path / "b.jsonl", sums(9, 15)),
    )
    domain = load_domain(config(train, eval_path=held_out, eval_tasks=6))
    assert len(domain.eval_tasks) == 6 and len(domain.train_tasks) == 15
    with pytest.raises(DomainError, match="every problem is held out"):
        load_domain(config(train, eval_path=train, eval_tasks=100))
    with pytest.raises(DomainError, match=r"has 20 different problems and data\.eval_tasks=256"):
        load_domain(config(train, eval_tasks=256))


# --- answers


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{1} or \\boxed{ \\frac{1}{2} }.", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{4", None),
        ("42", None),
        ("", None),
    ],
)
def test_boxes(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("42", "42.0"),
        ("1234", "1,234"),
        ("1234", "$1,234.00"),
        ("1234567", "1{,}234{,}567"),
        ("50", "50%"),
        ("50", "50\\%"),
        ("-3", "\u22123"),
        ("-3", "- 3".replace(" ", "")),
        ("0.5", "1/2"),
        ("0.5", "\\frac{1}{2}"),
        ("-0.5", "-\\dfrac{1}{2}"),
        ("7", "7."),
        ("7", "+7"),
        ("7", "007"),
        ("18", "\\$18"),
        ("18", "18\\text{ dollars}"),
        (".5", "0.50"),
    ],
)
def test_same_numbers(left: str, right: str) -> None:
    assert same_number(left, right) is True


@pytest.mark.parametrize(
    "text", ["", "x", "12 apples", "1,23", "1.2.3", "--1", "1e3", "1/0", "-", "."]
)
def test_not_plainly_numbers(text: str) -> None:
    assert as_number(text) is None
    assert same_number("1", text) is None


def test_long_digits_are_not_numbers() -> None:
    assert as_number("9" * 1_000_000) is None
    assert same_number("42", "41") is False


@pytest.fixture(scope="module")
def verifier() -> Any:
    with_worker = Verifier(deadline_s=20.0)
    yield with_worker
    with_worker.close()


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("42", "x = 42", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "3", False),
        ("x+1", "1+x", True),
        ("\\sqrt{2}", "1", False),
        ("42", "}{", False),
    ],
)
def test_symbolic_answers(verifier: Verifier, gold: str, answer: str, right: bool) -> None:
    assert verifier.check(gold, answer) == Verdict(right)


def test_numbers_need_no_worker() -> None:
    fast = Verifier()
    assert fast.check("42", "42.0") == fast.check("\\pi", "\\pi") == Verdict(True)
    assert fast.check("42", "43") == fast.check("42", " ") == Verdict(False)
    assert fast.check("42", "x" * 1000) == Verdict(False)
    assert fast._worker is None


def test_a_hostile_answer_is_killed_and_the_next_one_answered(verifier: Verifier) -> None:
    assert verifier.check("x+1", "1+x").right  # the worker runs
    worker = verifier._worker
    verifier._deadline_s = 0.5
    verdict = verifier.check("2", "9^{9^{9^9}}")
    assert not verdict.right and "no answer within 0.5 s" in verdict.error
    assert worker is not None and not psutil.pid_exists(worker.pid)
    verifier._deadline_s = 20.0
    assert verifier.check("x+2", "2+x") == Verdict(True)


def test_a_dead_worker_is_an_error_not_a_crash(verifier: Verifier) -> None:
    assert verifier.check("x+3", "3+x").right
    assert verifier._worker is not None
    os.kill(verifier._worker.pid, signal.SIGKILL)
    assert verifier.check("x+4", "4+x").error
    assert verifier.check("x+5", "5+x") == Verdict(True)


# --- episodes


def test_an_episode(tmp_path: Path) -> None:
    domain = load_domain(config(write(tmp_path / "a.jsonl", sums(9))))
    task = domain.train_tasks[0]
    env = domain.env()
    assert env.start(task) == [{"role": "user", "content": task.data["question"]}]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "(2+3)*4"}}</tool_call>'
    observation = env.step(parse_action(call))
    assert observation.messages == ({"role": "tool", "content": "20"},) and not observation.done
    twin = domain.env()
    twin.restore(pickle.loads(pickle.dumps(env.snapshot())))
    for each in (env, twin):
        right = each.step(Action(f"so \\boxed{{{task.data['answer']}.0}}"))
        assert right == Observation((), 1.0, True, ("answer",))


def test_wrong_missing_and_unchecked_answers_end_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = load_domain(config(write(tmp_path / "a.jsonl", sums(9))))
    monkeypatch.setattr(verify, "installed", lambda: False)
    for text, events in (
        ("\\boxed{-1}", ("answer",)),
        ("done", ("no_answer",)),
        ("\\boxed{twelve}", ("answer", "verifier_error")),
    ):
        env = domain.env()
        env.start(domain.train_tasks[0])
        assert env.step(Action(text)) == Observation((), 0.0, True, events)


def test_symbolic_golds_need_the_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*sums(9), {"question": "pi?", "answer": "\\pi"}]
    path = write(tmp_path / "a.jsonl", rows)
    load_domain(config(path))
    monkeypatch.setattr(verify, "installed", lambda: False)
    with pytest.raises(DomainError, match=r"a\.jsonl:10: .* pip install math-verify"):
        load_domain(config(path))


@pytest.mark.parametrize(("turns", "calls"), [(4, 2), (2, 1), (1, 0)])
def test_demonstrations_replay_the_gold_solution(tmp_path: Path, turns: int, calls: int) -> None:
    rows = [{"question": f"{n}: half of 48 and 48?", "answer": GSM8K} for n in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    data = Data(domain="math", path=path, eval_tasks=4)
    domain = load_domain(Config(turns=turns, data=data))
    task = domain.train_tasks[0]
    policy = domain.demonstrator(task, np.random.default_rng(0))
    env = domain.env()
    messages: list[Message] = env.start(task)
    counts: Counter[str] = Counter()
    for _ in range(calls + 1):
        text = policy(messages)
        observation = env.step(parse_action(text))
        counts.update(observation.events)
        messages += [{"role": "assistant", "content": text}, *observation.messages]
    assert observation.done and observation.reward == 1.0
    assert counts["tool_call"] == calls and counts["tool_error"] == 0


def test_inferred_steps() -> None:
    assert infer("70 seashells, 27 left", "43") == ("70-27",)
    assert infer("1,000 and 2", "500") == ("1000/2",)
    assert infer("3 and 4", "100") == ()
    assert infer("0 and 4", "x") == ()
