"""Domain "math": word problems from a jsonl file or a Hugging Face dataset, with a calculator, with
Python (`math:tool=python`), or with Python whose variables are kept (`math:tool=notebook`).

The answer is `\\boxed{...}`; reward 1 if it equals the gold answer, 0 if not. An action without a
call ends the episode. Known formats are rows of the table `FORMATS`; a new one is one more row.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np

from fastturn.config import Config
from fastturn.envs import verify
from fastturn.envs.answers import as_number, boxed
from fastturn.envs.arithmetic import calculate
from fastturn.envs.base import DomainError, Env, Message, Task, register
from fastturn.envs.calls import spoken
from fastturn.envs.rows import read_rows, split
from fastturn.envs.tools import Grade, ToolError
from fastturn.envs.toolsets import toolset

_INSTRUCTIONS = (
    "Solve the problem step by step. {advice} When you know the result, answer with "
    "\\boxed{{result}}."
)
_ANNOTATION = re.compile(r"<<([^<>=]+)=[^<>]*>>")
_QUANTITY = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Format:
    """How one published format names its parts: the keys that make up the question (joined by a
    space), the key of the gold answer, and where a calculation for demonstrations comes from: a key
    that holds an equation, or the numbers of the question."""

    question: tuple[str, ...]
    answer: str
    equation: str = ""
    one_step: bool = False  # one operation on two numbers of the question solves it

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(key) is not None for key in (*self.question, self.answer))


FORMATS = (
    Format(("question",), "answer"),  # GSM8K ("... #### 42"), MATH-500, AMC
    Format(("problem",), "answer"),  # AIME, MATH with extracted answers
    Format(("problem",), "solution"),  # MATH: the answer is boxed in the solution
    Format(("Body", "Question"), "Answer", "Equation"),  # SVAMP
    Format(("Question",), "Answer", "Equation"),
    Format(("input",), "target", one_step=True),  # MAWPS
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as read: where from (for messages), the question, the gold answer, and the
    expressions that lead to it (for demonstrations; may be empty).

    Example: `Problem("train.jsonl:1", "Natalia sold ...", "72", ("48/2", "48+24"))`.
    """

    origin: str
    question: str
    answer: str
    expressions: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """What makes two problems the same: the words of the question."""
        return " ".join(self.question.split()).casefold()


def read_problem(row: Any, origin: str) -> Problem:
    """`row` through the table of formats. Raises `DomainError` naming keys found and expected."""
    form = next((form for form in FORMATS if form.fits(row)), None)
    if form is None:
        known = "; ".join(" + ".join((*f.question, f.answer)) for f in FORMATS)
        raise DomainError(
            f"{origin}: found the keys {', '.join(sorted(map(str, row))) or '(none)'}; expected "
            f"one of these sets: {known}. Rename the keys, or add a row to "
            "fastturn.envs.math.FORMATS"
        )
    question = " ".join(str(row[key]).strip() for key in form.question)
    worked = row[form.answer]
    answer = _gold(worked, form.answer, origin)
    if not question:
        raise DomainError(f"{origin}: the question is empty; remove the row or fill it in")
    expressions: Sequence[str] = _ANNOTATION.findall(worked) if isinstance(worked, str) else ()
    if form.equation and row.get(form.equation):
        expressions = (re.sub(r"\.0\b", "", str(row[form.equation]).strip()),)
    elif form.one_step:
        expressions = infer(question, answer)
    return Problem(origin, question, answer, tuple(e.strip() for e in expressions))


def _gold(value: Any, key: str, origin: str) -> str:
    """The bare gold answer: after "####", or in the last box, or the value itself."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DomainError(
            f"{origin}: {key!r} is {type(value).__name__}, expected a string or a number"
        )
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif key == "solution" or "\\boxed{" in text:
        text = boxed(text) or ""
    if not text.strip():
        raise DomainError(
            f"{origin}: no answer in {key!r}; expected a value, '... #### value' or "
            "'... \\boxed{value}'"
        )
    return text.strip()


def read_problems(path: str, key: str) -> list[Problem]:
    """All problems of a jsonl file or a dataset id, see `rows.read_rows`.

    Raises `DomainError` when there are none.
    """
    return [read_problem(row, origin) for origin, row in read_rows(path, key)]


@register("math")
class MathDomain:
    """Domain "math"; the option `tool` is calculator, python or notebook. `data.path` (and
    `data.eval_path`): a jsonl file or a dataset id; without `data.eval_path`, `data.eval_tasks`
    problems are held out. Training problems that are also held out are dropped. As in "calculator",
    schemas and instructions go into the prompt only for a pretrained model (`model.path` is set).
    """

    def __init__(self, config: Config, *, tool: str = "calculator") -> None:
        data = config.data
        training, held_out = split(data, read_problems)
        _require_verifier([*training, *held_out])
        random.Random(f"order {config.seed}").shuffle(training)
        self.train_tasks: Sequence[Task] = _tasks("train", training)
        self.eval_tasks: Sequence[Task] = _tasks("eval", held_out)
        self._described = bool(config.model.path)
        self._toolset = toolset(tool, data.tool_timeout_s)
        self.tools: list[dict[str, Any]] = [self._toolset.tool.schema] if self._described else []
        self._calls = config.turns - 1
        self._verifier = verify.Verifier(deadline_s=data.tool_timeout_s)

    def env(self) -> Env:
        """One episode."""
        return self._toolset.env(self._prompt, self._grade)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["question"]}]
        if self._described:
            instructions = _INSTRUCTIONS.format(advice=self._toolset.advice)
            messages.insert(0, {"role": "system", "content": instructions})
        return messages

    def _grade(self, task: Task, text: str) -> Grade:
        answer = boxed(spoken(text))
        if answer is None:
            return Grade(0.0, ("no_answer",))
        verdict = self._verifier.check(task.data["answer"], answer)
        errors = ("verifier_error",) if verdict.error else ()
        return Grade(float(verdict.right), ("answer", *errors))

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """Replays the calculations that come with the gold solution (`<<48/2=24>>`, an equation),
        one call a turn and at most `turns - 1` calls, then boxes the gold answer. Needs no
        randomness."""
        usable = [e for e in task.data["expressions"] if _computes(e)][: self._calls]

        def policy(messages: Sequence[Message]) -> str:
            done = sum(message["role"] == "tool" for message in messages)
            if done < len(usable):
                return self._toolset.call(usable[done])
            return f"\\boxed{{{task.data['answer']}}}"

        return policy


def _require_verifier(problems: Sequence[Problem]) -> None:
    symbolic = next((p for p in problems if as_number(p.answer) is None), None)
    if symbolic is not None and not verify.installed():
        raise DomainError(
            f"{symbolic.origin}: the answer {symbolic.answer!r} is not a plain number and "
            "comparing it needs math-verify: pip install math-verify, or remove such problems"
        )


def _tasks(part: str, problems: Sequence[Problem]) -> list[Task]:
    return [
        Task(
            f"{part}-{number}",
            {
                "question": problem.question,
                "answer": problem.answer,
                "expressions": problem.expressions,
                "origin": problem.origin,
            },
        )
        for number, problem in enumerate(problems)
    ]


def _computes(expression: str) -> bool:
    try:
        calculate(expression)
    except ToolError:
        return False
    return True


def infer(question: str, answer: str) -> tuple[str, ...]:
    """One operation on two numbers of `question` that gives `answer`, if there is one.

    Example: `infer("70 seashells, she has 27 left", "43")` is `("70-27",)`.
    """
    gold = as_number(answer)
    numbers = _QUANTITY.findall(question)
    for left, right in permutations(numbers, 2):
        a, b = Fraction(left.replace(",", "")), Fraction(right.replace(",", ""))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}
        for sign, value in results.items():
            if gold is not None and value == gold:
                return (f"{left}{sign}{right}".replace(",", ""),)
    return ()
