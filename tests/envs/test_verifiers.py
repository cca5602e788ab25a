"""Domain "verifiers": rollouts turn by turn, restored by replay; on a stand-in, and on theirs."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastturn.config import Config, ConfigError, Data
from fastturn.conformance import conform
from fastturn.envs import Action, Observation, Task, load_domain
from fastturn.envs import verifiers as adapter
from fastturn.envs.calls import parse_action, write_call
from fastturn.envs.replay import Replayed, ReplayError
from fastturn.findings import FAIL, PASS

STANDIN = Path(__file__).parent / "standin"
REAL = importlib.util.find_spec("verifiers") is not None
PACKAGES = [
    "stand-in",
    pytest.param(
        "package",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not REAL, reason="the package verifiers is not installed"),
        ],
    ),
]
HEAD = """
import asyncio
import random
import verifiers as vf

rows = list
if hasattr(vf, "XMLParser"):  # the package, which wants data sets
    from datasets import Dataset
    rows = Dataset.from_list

def digits(numbers):
    return rows([
        {"prompt": [{"role": "user", "content": f"Above {n - 1}, below {n + 1}?"}],
         "answer": str(n), "example_id": n}
        for n in numbers
    ])

def right(completion, answer):
    last = completion[-1]
    return float(answer == (last["content"] if isinstance(last, dict) else last.content))

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state):
        state["guesses"] += 1
        return [{"role": "user", "content": f"No, {4 - state['guesses']} left."}]

    @vf.stop
    async def found(self, state):
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        return last is not None and last.content == state["input"]["answer"]
"""
GUESS = """
def load_environment():
    return Guess(dataset=digits(range(8)), eval_dataset=digits(range(6, 10)), max_turns=4,
                 rubric=vf.Rubric(funcs=[right]))
"""
SOURCES = {
    "guess": GUESS,
    "add": """
def add(a: int, b: int) -> int:
    "The sum of two numbers."
    return a + b

def load_environment():
    return vf.ToolEnv(tools=[add], dataset=digits(range(9)), max_turns=5,
                      rubric=vf.Rubric(funcs=[right]))
""",
    "drawn": GUESS
    + """
class Guess(Guess):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": str(random.random())}]
""",
    "rewritten": GUESS
    + """
class Guess(Guess):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": str(len(state["trajectory"]))}]
""",
    "stuck": GUESS
    + """
class Guess(Guess):
    async def env_response(self, messages, state):
        await asyncio.sleep(60)
""",
    "together": GUESS.replace("[right]", "[best]")
    + """
def best(states):
    return [1.0 for _ in states]
""",
    "unready": """
def load_environment():
    raise KeyError("SOME_API_KEY")
""",
}


@pytest.fixture(params=PACKAGES)
def package(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The package or its stand-in, with environments `ft-NAME` installed beside it."""

    def forget() -> None:
        theirs = request.param == "package" and sys.modules
        for name in list(sys.modules):
            if name.startswith("ft_") or (not theirs and name.partition(".")[0] == "verifiers"):
                del sys.modules[name]
        adapter._player.cache_clear()

    for name, source in SOURCES.items():
        (tmp_path / f"ft_{name}.py").write_text(HEAD + source)
    monkeypatch.syspath_prepend(tmp_path)
    if request.param == "stand-in":
        monkeypatch.syspath_prepend(STANDIN)
    forget()
    yield
    forget()


def loaded(name: str, **data: Any) -> adapter.Hub:
    config = Config(data=Data(domain=f"verifiers:env=ft-{name}", **{"eval_tasks": 2} | data))
    domain = load_domain(config)
    assert isinstance(domain, adapter.Hub)
    return domain


def said(env: Any, *texts: str) -> Observation:
    for text in texts:
        answer: Observation = env.step(parse_action(text))
    return answer


def test_a_rollout_is_played_turn_by_turn(package: None) -> None:
    domain = loaded("guess")
    assert [t.data["row"]["answer"] for t in domain.train_tasks] == list("012345")
    assert [t.data["row"]["answer"] for t in domain.eval_tasks] == list("67")
    env = domain.env()
    (first,) = env.start(domain.train_tasks[3])
    assert first == {"role": "user", "content": "Above 2, below 4?"}
    assert said(env, "5").messages == ({"role": "user", "content": "No, 3 left."},)
    state = pickle.loads(pickle.dumps(env.snapshot()))
    twins = [domain.env(), domain.env()]
    for twin in twins:
        twin.restore(state)
    assert said(env, "3") == said(twins[0], "3") == Observation((), 1.0, True, ("answer",))
    assert said(twins[1], "4").messages[0]["content"] == "No, 2 left."
    assert said(twins[1], "4", "5") == Observation((), 0.0, True, ("answer",))
    with pytest.raises(AssertionError, match="nothing after done"):
        env.step(Action("3"))


def test_calls_are_checked_and_carried_out(package: None) -> None:
    domain = loaded("add", eval_tasks=3)
    assert (len(domain.train_tasks), len(domain.eval_tasks)) == (6, 3)
    assert [tool["function"]["name"] for tool in domain.tools] == ["add"]
    env = domain.env()
    env.start(domain.train_tasks[0])
    good, short = write_call("add", a=1, b=2), write_call("add", a=1)
    assert said(env, short).events == ("tool_call", "bad_arguments")
    both = said(env, short + good)
    assert [m["role"] for m in both.messages] == ["tool", "tool"]
    assert both.messages[0]["content"].startswith("error: add needs") and "3" in str(both.messages)
    assert both.events == ("tool_call", "bad_arguments", "tool_call")
    answer = domain.train_tasks[0].data["row"]["answer"]
    assert said(env, good, answer) == Observation((), 1.0, True, ("answer",))


@pytest.mark.parametrize("name", ["guess", "add"])
def test_the_contract(package: None, name: str) -> None:
    config = Config(turns=5, data=Data(domain=f"verifiers:env=ft-{name}", eval_tasks=2))
    lines = {line.check: line for line in conform(load_domain(config), config)}
    assert not [line for line in lines.values() if line.status == FAIL]
    assert lines["restore after restore"].status == PASS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drawn", r"ft-drawn is not replayable: task train-0: replayed, turn 1.*differently"),
        ("rewritten", r"ft-rewritten cannot be played \(RuntimeError: .*rewrote earlier messages"),
        ("stuck", r"ft-stuck cannot be played \(DeadlineError: .*time \(data\.env_timeout_s\)"),
        ("together", r"ft-together compares rollouts of a group"),
        ("unready", r"env=ft-unready: .*SOME_API_KEY"),
        ("gone", r"env=ft-gone: Could not import .*name an environment whose package is installed"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(package: None, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(name, env_timeout_s=2.0)


def test_loading_leaves_signals_alone(package: None) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    loaded("guess")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_episode_that_is_cut_off_ends_theirs(package: None) -> None:
    domain = loaded("guess")
    before = asyncio.all_tasks(adapter._loop())
    env = domain.env()
    env.start(domain.train_tasks[0])
    (rollout,) = asyncio.all_tasks(adapter._loop()) - before
    assert not rollout.done()
    del env
    gc.collect()
    deadline = time.monotonic() + 5
    while not rollout.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rollout.cancelled()


def test_what_is_not_installed_or_too_new_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "fastturn\[verifiers\]"'):
        loaded("guess")
    monkeypatch.undo()
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text('__version__ = "0.4.0"\n')
    monkeypatch.syspath_prepend(tmp_path)
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "verifiers"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"version 0\.4\.0 has no .*pip install 'verifiers<0\.4'"):
        loaded("guess")
    sys.modules.pop("verifiers", None)
    with pytest.raises(ConfigError, match=r"data\.path='x'.*leave data\.path empty"):
        loaded("guess", path="x")


class Counting:
    """Counts over all episodes, which a replay finds out."""

    steps = 0

    def start(self, task: Task) -> list[dict[str, Any]]:
        return [{"role": "user", "content": task.id}]

    def step(self, action: Action) -> Observation:
        Counting.steps += action.text == "count"
        return Observation(({"role": "user", "content": str(Counting.steps)},))


def test_a_replay_that_takes_another_course_is_refused() -> None:
    env = Replayed(Counting)
    env.start(Task("t"))
    said(env, "wait", "wait")
    Replayed(Counting).restore(env.snapshot())  # type: ignore[arg-type]
    said(env, "count")
    with pytest.raises(ReplayError, match=r"task t: replayed, turn 1, 'wait' was answered diff"):
        Replayed(Counting).restore(env.snapshot())  # type: ignore[arg-type]
