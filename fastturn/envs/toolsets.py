"""What a domain of questions with one answer may give its policy: a calculator, or Python.

A `Toolset` is everything that depends on that choice, so that a domain takes one and has no branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastturn.config import ConfigError
from fastturn.envs.arithmetic import CALCULATOR
from fastturn.envs.base import Env, Message, Task
from fastturn.envs.calculator import calculator_call
from fastturn.envs.python import NotebookEnv, python_call, python_tool, run_program
from fastturn.envs.sandbox import shared
from fastturn.envs.tools import Grade, Tool, ToolEnv
from fastturn.options import nearest

Prompt = Callable[[Task], list[Message]]
Grader = Callable[[Task, str], Grade]


@dataclass(frozen=True, slots=True)
class Toolset:
    """`tool` is what the prompt prints, `advice` what it says, `call` the text of a call that
    computes an expression (for demonstrations), `env` makes an episode of a prompt and a grade.

    Example: `calculator(5.0).call("1+1")` is the text of a call of the calculator.
    """

    tool: Tool
    advice: str
    call: Callable[[str], str]
    env: Callable[[Prompt, Grader], Env]


def calculator(timeout_s: float) -> Toolset:
    """Arithmetic expressions, a few microseconds each."""

    def env(prompt: Prompt, grade: Grader) -> Env:
        return ToolEnv({CALCULATOR.name: CALCULATOR}, prompt, grade, timeout_s)

    return Toolset(CALCULATOR, "Use the calculator for arithmetic.", calculator_call, env)


def python(timeout_s: float) -> Toolset:
    """Programs, each on its own. Raises `ConfigError` where they cannot be isolated."""
    tool = python_tool(partial(run_program, shared(timeout_s)))

    def env(prompt: Prompt, grade: Grader) -> Env:
        return ToolEnv({tool.name: tool}, prompt, grade, timeout_s)

    return Toolset(tool, "Use Python for calculations; print what you need.", _printing, env)


def notebook(timeout_s: float) -> Toolset:
    """Programs that keep their variables until the episode ends. Raises as `python`."""
    sandbox = shared(timeout_s)

    def env(prompt: Prompt, grade: Grader) -> Env:
        return NotebookEnv(sandbox, prompt, grade, timeout_s)

    tool = python_tool(partial(run_program, sandbox), "Variables are kept between calls.")
    return Toolset(tool, "Use Python for calculations; print what you need.", _printing, env)


TOOLSETS = {"calculator": calculator, "python": python, "notebook": notebook}


def toolset(name: str, timeout_s: float) -> Toolset:
    """The toolset `name`. Raises `ConfigError` for an unknown name, and as `python`."""
    if name not in TOOLSETS:
        raise ConfigError(
            f"data.domain: tool={name!r}: expected one of {', '.join(TOOLSETS)}; the nearest is "
            f"{nearest(name, TOOLSETS)!r}"
        )
    return TOOLSETS[name](timeout_s)


def _printing(expression: str) -> str:
    return python_call(f"print({expression})")
