"""The tool `python`: programs of the model, run in `sandbox.Sandbox`.

A call is a program of its own (`python_tool`), so the tool has no state and a snapshot is free. In
a `NotebookEnv` calls are cells of one notebook: the earlier cells run again before each new one. So
its state is the text of its cells, a snapshot is that text, restoring is free as well, and siblings
that were forked from one snapshot see the same values. Random generators start at the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastturn.envs.base import Message, Task
from fastturn.envs.sandbox import MOST_CHARS, Outcome, Sandbox
from fastturn.envs.tools import Grade, Tool, ToolEnv, ToolError

NAME = "python"


def python_tool(run: Callable[[str], str], kept: str = "Nothing is kept between calls.") -> Tool:
    """The tool around `run` (a program's text -> what the model reads). It bounds its own time.

    Example: `python_tool(lambda code: "5").schema["function"]["name"]` is "python".
    """
    return Tool(
        name=NAME,
        description=f"Runs a Python program and returns what it prints. {kept}",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "for example print(37*12)"}},
            "required": ["code"],
        },
        function=lambda code: run(code),
        bounded=True,
    )


def python_call(code: str) -> str:
    """The text of a call. Example: `python_call("print(1)")` is
    `<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>`."""
    return f"<tool_call>{json.dumps({'name': NAME, 'arguments': {'code': code}})}</tool_call>"


def run_program(sandbox: Sandbox, code: str) -> str:
    """What the model reads of a program of its own. Raises as `told`."""
    return told(_run(sandbox, (), code))


def told(outcome: Outcome) -> str:
    """The output of a program that ended well. Raises `ToolError` for one that did not, and
    `TimeoutError` for one that was late, with what it had printed."""
    if outcome.finished:
        return outcome.output or "(no output)"
    if outcome.ending == "raised":
        raise ToolError(outcome.output)
    problem = {
        "timeout": "the program did not end in time",
        "output": "the program was stopped because it printed too much",
        "lost": "the interpreter was lost",
    }.get(outcome.ending, f"the program ended with {outcome.ending}")
    kind = TimeoutError if outcome.ending == "timeout" else ToolError
    raise kind(f"{problem}; output: {outcome.output}" if outcome.output else problem)


def _run(sandbox: Sandbox, cells: tuple[str, ...], code: str) -> Outcome:
    if len(code) > MOST_CHARS:
        raise ToolError(f"the program is longer than {MOST_CHARS} characters")
    return sandbox.run([*cells, code])


class NotebookEnv(ToolEnv):
    """A `ToolEnv` with the tool `python`, whose calls are cells of one notebook.

    A cell that raised stays, as in other notebooks; one that was stopped or killed leaves no trace.
    The deadline of a call covers the earlier cells as well.

    Example: after the cell `x = 2`, the cell `x + 1` prints 3.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        prompt: Callable[[Task], list[Message]],
        grade: Callable[[Task, str], Grade],
        timeout_s: float,
    ) -> None:
        self._sandbox = sandbox
        self._cells: tuple[str, ...] = ()
        tool = python_tool(self._cell, "Variables are kept between calls.")
        super().__init__({tool.name: tool}, prompt, grade, timeout_s)

    def _cell(self, code: str) -> str:
        outcome = _run(self._sandbox, self._cells, code)
        if outcome.ending in ("finished", "raised"):
            self._cells += (code,)
        return told(outcome)

    def snapshot(self) -> tuple[Any, tuple[str, ...]]:
        """The task and the text of the cells so far."""
        return super().snapshot(), self._cells

    def restore(self, snapshot: tuple[Any, tuple[str, ...]]) -> None:
        """Continue from `snapshot`."""
        task, self._cells = snapshot
        super().restore(task)
