"""The quickstart's domain: chained arithmetic, one tool call an operation, learned in a minute.

A task is a start value and two or three operations, written `37*12 then +45 then -20` and meant
from left to right: the word "then" between steps leaves no precedence to guess. The calculator does
one operation a call, so the answer, as `\\boxed{469}`, takes three or four turns. Reward 1 if it is
right, 0 if not.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.arithmetic import CALCULATOR, calculate
from fastturn.envs.base import Env, Message, Task, register
from fastturn.envs.calls import spoken, write_call
from fastturn.envs.drawn import TrainTasks, held_out_tasks
from fastturn.envs.tools import Grade, ToolEnv, ToolError

_STEP = re.compile(r"\s*-?\d+(?:\.\d+)?\s*[-+*/]\s*-?\d+(?:\.\d+)?\s*")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_INSTRUCTIONS = (
    "Work from left to right: the result of each step is the input of the next. Call the "
    "calculator for one operation at a time. Then answer with the final number as \\boxed{number}."
)

Steps = tuple[tuple[str, int], ...]


def one_operation(expression: str) -> str:
    """The result of a single operation. Example: `one_operation("37*12")` is "444"."""
    if not _STEP.fullmatch(expression):
        raise ToolError("one operation on two numbers at a time, for example 37*12")
    return calculate(expression)


_TOOL = dataclasses.replace(
    CALCULATOR,
    description="Does one operation (+ - * /) on two numbers.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example 37*12"}},
        "required": ["expression"],
    },
    function=one_operation,
)


def draw(rng: random.Random) -> dict[str, Any]:
    """A start value 10-99, two or three steps with at least one product, and the answer; every
    value on the way is 0-9999.

    Example: `{"question": "37*12 then +45", "start": 37, "steps": (("*", 12), ("+", 45)), "answer":
    489}`.
    """
    while True:
        start, count = rng.randint(10, 99), rng.randint(2, 3)
        signs = [rng.choice("*+-") for _ in range(count)]
        steps = tuple(
            (sign, rng.randint(11, 29) if sign == "*" else rng.randint(11, 99)) for sign in signs
        )
        values = list(running_values(start, steps))
        if "*" in signs and all(0 <= value <= 9999 for value in values):
            asked = question(start, steps)
            return {"question": asked, "start": start, "steps": steps, "answer": values[-1]}


def running_values(start: int, steps: Steps) -> Iterator[int]:
    """The value after each step. Example: `(37, (("*", 12), ("+", 45)))` gives 444, 489."""
    value = start
    for sign, operand in steps:
        value = value * operand if sign == "*" else value + (operand if sign == "+" else -operand)
        yield value


def question(start: int, steps: Steps) -> str:
    """Example: `question(37, (("*", 12), ("+", 45)))` is "37*12 then +45"."""
    return f"{start}" + " then ".join(f"{sign}{operand}" for sign, operand in steps)


def grade(task: Task, text: str) -> Grade:
    """1 if the last box holds the answer. Without a box the event is "no_answer"."""
    boxes = _BOXED.findall(spoken(text))
    if not boxes:
        return Grade(0.0, ("no_answer",))
    return Grade(float(boxes[-1].strip() == str(task.data["answer"])), ("answer",))


@register("calculator")
class CalculatorDomain:
    """Domain "calculator". Schemas and instructions go into the prompt only for a model that can
    read them (`model.path` is set); the small model built in a run learns the calls from
    demonstrations, and its prompt is the question alone (about 15 tokens)."""

    def __init__(self, config: Config) -> None:
        if config.data.path:
            raise ConfigError(
                f"data.path={config.data.path!r}: the domain 'calculator' makes its own tasks; "
                f"leave data.path empty, or set data.domain=math to read them from a file"
            )
        self._described = bool(config.model.path)
        self._timeout_s = config.data.tool_timeout_s
        self.tools: list[dict[str, Any]] = [_TOOL.schema] if self._described else []
        self.eval_tasks: Sequence[Task] = held_out_tasks(draw, config.data)
        self.train_tasks: Sequence[Task] = TrainTasks(draw, config.seed, self.eval_tasks)

    def env(self) -> Env:
        """One episode."""
        tools = {_TOOL.name: _TOOL}
        return ToolEnv(tools, self._prompt, grade, self._timeout_s, brief=not self._described)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["question"]}]
        if self._described:
            messages.insert(0, {"role": "system", "content": _INSTRUCTIONS})
        return messages

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """A policy that knows the way and errs on purpose, so that a model that imitates it has
        something to learn from rewards: it answers early before step 1, 2, 3 with probability
        .10, .15, .60, calls a wrong operand with .12, and boxes a wrong number with .05."""
        return Demonstrator(task, rng)


@dataclasses.dataclass(slots=True)
class Demonstrator:
    """See `CalculatorDomain.demonstrator`. Reads where the episode is from the messages alone."""

    task: Task
    rng: np.random.Generator
    early: tuple[float, ...] = (0.10, 0.15, 0.60)
    wrong_operand: float = 0.12
    wrong_box: float = 0.05

    def __call__(self, messages: Sequence[Message]) -> str:
        results = [
            m["content"] for m in messages if m["role"] == "tool" and m["content"][:5] != "error"
        ]
        value = results[-1] if results else str(self.task.data["start"])
        steps: Steps = self.task.data["steps"]
        done = len(results)
        if done == len(steps) or self.rng.random() < self.early[min(done, len(self.early) - 1)]:
            return self._answer(value)
        sign, operand = steps[done]
        if self.rng.random() < self.wrong_operand:
            span = 19 if sign == "*" else 89  # operands are 11-29 and 11-99
            operand = 11 + (operand - 11 + int(self.rng.integers(1, span))) % span
        return calculator_call(f"{value}{sign}{operand}")

    def _answer(self, value: str) -> str:
        if self.rng.random() < self.wrong_box:
            at = int(self.rng.choice([i for i, c in enumerate(value) if c.isdigit()]))
            wrong = (int(value[at]) + int(self.rng.integers(1, 10))) % 10
            value = f"{value[:at]}{wrong}{value[at + 1 :]}"
        return f"\\boxed{{{value}}}"


def calculator_call(expression: str) -> str:
    """The text of a call. Example: `calculator_call("1+1")` is
    `<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>`."""
    return write_call(CALCULATOR.name, expression=expression)
