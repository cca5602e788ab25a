"""The tool `python`: what the model reads, what is counted, and notebooks that fork."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.envs import Observation, Task, load_domain
from fastturn.envs.calls import parse_action
from fastturn.envs.python import NotebookEnv, python_call, python_tool, run_program
from fastturn.envs.sandbox import Sandbox
from fastturn.envs.tools import Grade, ToolEnv


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    try:
        made = Sandbox(1.0)
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def prompt(task: Task) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}]


def grade(task: Task, text: str) -> Grade:
    return Grade(1.0, ("answer",))


def notebook(box: Sandbox) -> NotebookEnv:
    return NotebookEnv(box, prompt, grade, 1.0)


def say(env: ToolEnv, code: str) -> tuple[str, tuple[str, ...]]:
    observation: Observation = env.step(parse_action(python_call(code)))
    (message,) = observation.messages
    return message["content"], observation.events


@pytest.mark.parametrize(
    ("code", "content", "event"),
    [
        ("print(6 * 7)", "42\n", ""),
        ("x = 1", "(no output)", ""),
        ("1 / 0", "ZeroDivisionError: division by zero\n", "tool_error"),
        (
            "print('so far')\nwhile True: pass",
            "did not end in time; output: so far\n",
            "tool_timeout",
        ),
        ("while True: print('x' * 1000)", "because it printed too much; output: xxx", "tool_error"),
        ("import os; os._exit(3)", "error: the program ended with status 3", "tool_error"),
        (
            "import ctypes; ctypes.string_at(0)",
            "error: the program ended with SIGSEGV",
            "tool_error",
        ),
        ("#" * 30_000, "error: the program is longer than 20000 characters", "tool_error"),
    ],
)
def test_what_the_model_reads(box: Sandbox, code: str, content: str, event: str) -> None:
    tool = python_tool(lambda code: run_program(box, code))
    env = ToolEnv({tool.name: tool}, prompt, grade, 1.0)
    env.start(Task("t"))
    got, events = say(env, code)
    assert content in got and len(got) < 4200
    assert events == (("tool_call", event) if event else ("tool_call",))


def test_calls_are_programs_of_their_own(box: Sandbox) -> None:
    tool = python_tool(lambda code: run_program(box, code))
    env = ToolEnv({tool.name: tool}, prompt, grade, 1.0)
    env.start(Task("t"))
    say(env, "x = 2")
    assert "NameError" in say(env, "x")[0]


def test_a_notebook_keeps_variables_and_forks(box: Sandbox) -> None:
    env = notebook(box)
    env.start(Task("t"))
    say(env, "import random\nx = [random.random()]")
    assert "NameError" in say(env, "x.append(7)\nnever_defined")[0]  # what it did before stays
    assert say(env, "while True: x.append(1)")[1][-1] in ("tool_timeout", "tool_error")  # no trace
    state = pickle.dumps(env.snapshot())
    siblings = [notebook(box) for _ in range(2)]
    for sibling in siblings:
        sibling.restore(pickle.loads(state))
    seen = {say(each, "print(x)")[0] for each in (env, *siblings)}
    assert len(seen) == 1 and ", 7]" in seen.pop()
    say(siblings[0], "x = 'mine'")
    assert say(siblings[0], "x")[0] == "'mine'\n" and say(env, "len(x)")[0] == "2\n"
    assert pickle.dumps(siblings[1].snapshot()) != state  # one more cell


@pytest.mark.parametrize("tool", ["python", "notebook"])
def test_word_problems_with_python(box: Sandbox, tmp_path: Path, tool: str) -> None:
    rows = [
        {"question": f"{n} and 3?", "answer": f"<<{n}+3={n + 3}>> #### {n + 3}"} for n in range(9)
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(domain=f"math:tool={tool}", path=str(file), eval_tasks=2)
    domain = load_domain(Config(data=data, model=Model(path="somewhere")))
    assert [tool["function"]["name"] for tool in domain.tools] == ["python"]
    task, env = domain.train_tasks[0], domain.env()
    messages = env.start(task)
    assert "Use Python" in messages[0]["content"] and "\\boxed{result}" in messages[0]["content"]
    policy = domain.demonstrator(task, np.random.default_rng(0))
    called = env.step(parse_action(policy(messages)))
    assert called.messages[0]["content"] == task.data["answer"] + "\n" and not called.done
    ended = env.step(parse_action(policy([*messages, *called.messages])))
    assert ended.done and ended.reward == 1.0


def test_an_unknown_tool_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "1?", "answer": "1"}\n{"question": "2?", "answer": "2"}\n')
    data = Data(domain="math:tool=pyton", path=str(file), eval_tasks=1)
    with pytest.raises(ConfigError, match=r"tool='pyton': expected one of .*nearest is 'python'"):
        load_domain(Config(data=data))
