"""`fastturn check-env`: each way to break the contract is found by the check of that name."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastturn import conformance
from fastturn.cli import main
from fastturn.config import Config, ConfigError, Data
from fastturn.conformance import conform
from fastturn.envs import Action, Message, Observation, Task
from fastturn.envs.tools import Tool, run_calls
from fastturn.findings import FAIL, PASS, SKIP, WARN
from fastturn.recorded import Subject, probes

ADD = Tool(
    "add",
    "",
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    lambda n: "ok",
    bounded=True,
)
CALL = '<tool_call>{"name": "add", "arguments": {"n": 2}}</tool_call>'


class Counter:
    """Calls add to a list; the first action without one ends the episode."""

    def start(self, task: Task) -> list[Message]:
        self.task, self.seen, self.over = task, [], False
        return [{"role": "user", "content": f"count to {task.data['n']}"}]

    def step(self, action: Action) -> Observation:
        assert not self.over
        self.seen = [*self.seen, *(call.name for call in action.calls if hasattr(call, "name"))]
        if not action.calls:
            self.over = True
            return Observation((), float(len(self.seen) == self.task.data["n"]), True, ("answer",))
        replies = run_calls(action, {"add": ADD}, 1.0)
        messages = ({"role": "tool", "content": str(len(self.seen))},)
        return Observation(messages, events=tuple(e for r in replies for e in r.events))

    def snapshot(self) -> Any:
        return self.task, self.seen, self.over

    def restore(self, snapshot: Any) -> None:
        self.task, self.seen, self.over = snapshot


class Counting:
    def __init__(self, env: type[Counter] = Counter, shared: bool = False) -> None:
        self.tools, self.env = [ADD.schema], env
        self.train_tasks: Sequence[Task] = [Task(f"t{n}", {"n": n}) for n in range(1, 4)]
        self.eval_tasks: Sequence[Task] = [Task("e", {"n": 1 if shared else 0})]

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Any:
        return lambda messages: CALL if len(messages) < 2 * task.data["n"] else "done"


def lines(domain: Any, **data: Any) -> dict[str, tuple[str, str]]:
    found = conform(domain, Config(data=Data(**data), turns=5))
    return {line.check: (line.status, line.measured) for line in found}


def failed(domain: Any, **data: Any) -> set[str]:
    return {name for name, (status, _) in lines(domain, **data).items() if status == FAIL}


def test_a_sound_environment_passes() -> None:
    assert {status for status, _ in lines(Counting()).values()} == {PASS}


class Drawing(Counter):
    def step(self, action: Action) -> Observation:
        answer = super().step(action)
        return Observation(
            ({"role": "tool", "content": str(random.random())},) * len(answer.messages),
            answer.reward,
            answer.done,
            answer.events,
        )


class Forgetting(Counter):
    def snapshot(self) -> Any:
        return self.task, [], self.over


class ForgettingLater(Counter):
    """Only an instance that was restored forgets."""

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.forgets = True

    def snapshot(self) -> Any:
        return self.task, [] if hasattr(self, "forgets") else self.seen, self.over


class Aliasing(Counter):
    def step(self, action: Action) -> Observation:
        mine, self.seen = self.seen, list(self.seen)
        answer = super().step(action)
        mine[:] = self.seen
        self.seen = mine
        return answer


class Shared(Counter):
    """A class attribute that every instance writes."""

    live: Any = None

    def start(self, task: Task) -> list[Message]:
        messages = super().start(task)
        Shared.live = self
        return messages

    def step(self, action: Action) -> Observation:
        time.sleep(0.002)
        assert Shared.live is self, "another instance is live"
        return super().step(action)

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        Shared.live = self


class Endless(Counter):
    def step(self, action: Action) -> Observation:
        self.over = False
        return super().step(action)


class Raising(Counter):
    def step(self, action: Action) -> Observation:
        assert action.calls == () or action.call is not None, "cannot read the call"
        return super().step(action)


class Silent(Counter):
    def step(self, action: Action) -> Observation:
        answer = super().step(action)
        return Observation(answer.messages, answer.reward, answer.done, ())


class Formless(Counter):
    def start(self, task: Task) -> list[Message]:
        super().start(task)
        return [{"role": "user", "content": None}]


class HangingStep(Counter):
    def step(self, action: Action) -> Observation:
        if not action.text:
            time.sleep(3)
        return super().step(action)


class HangingStart(Counter):
    def start(self, task: Task) -> list[Message]:
        time.sleep(3)
        return super().start(task)


class HangingRestore(Counter):
    def restore(self, snapshot: Any) -> None:
        time.sleep(0.2)


class Holding(Counter):
    """A lock in the state, once something was counted."""

    def snapshot(self) -> Any:
        return (*super().snapshot(), threading.Lock() if self.seen else None)

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot[:3])


class SlowStep(Counter):
    def step(self, action: Action) -> Observation:
        time.sleep(0.002)
        return super().step(action)


class SlowSnapshot(Counter):
    def snapshot(self) -> Any:
        time.sleep(0.002)
        return super().snapshot()


class SlowRestore(Counter):
    def restore(self, snapshot: Any) -> None:
        time.sleep(0.002)
        super().restore(snapshot)


class Large(Holding):
    def snapshot(self) -> Any:
        return (*super().snapshot()[:3], bytes(2 << 20))


@pytest.mark.parametrize(
    ("env", "checks"),
    [
        (Holding, {"pickling"}),
        (Drawing, {"determinism", "snapshot round trip", "restore after restore"}),
        (Forgetting, {"snapshot round trip", "restore after restore"}),
        (ForgettingLater, {"restore after restore"}),
        (Aliasing, {"snapshots stay"}),
        (Shared, {"concurrent instances"}),
        (Endless, {"step after end"}),
        (Raising, {"observations"}),
        (Formless, {"observations"}),
    ],
)
def test_what_is_broken_is_named(env: type[Counter], checks: set[str]) -> None:
    found = failed(Counting(env))
    assert checks <= found
    assert found <= checks | {"concurrent instances"}  # what varies, varies there as well


@pytest.mark.parametrize(
    ("env", "limit", "most", "remedy"),
    [
        (SlowStep, "SLOW_STEP_S", 0.0015, "rollouts wait for steps"),
        (SlowSnapshot, "SLOW_STATE_S", 0.0015, "every boundary keeps a snapshot"),
        (SlowRestore, "SLOW_STATE_S", 0.0015, "every sibling restores one"),
        (Large, "LARGE_STATE", 1 << 20, "keep in it what changes"),
    ],
)
def test_what_is_slow_or_large_is_a_warning(
    env: type[Counter], limit: str, most: float, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, limit, most)
    found = {line.check: line for line in conform(Counting(env), Config(turns=5))}
    assert found["timing"].status == WARN and remedy in found["timing"].remedy
    assert not [line for line in found.values() if line.status == FAIL]


def test_calls_that_are_not_counted_are_a_warning() -> None:
    status, measured = lines(Counting(Silent))["calls counted"]
    assert status == WARN and "1 calls, events ()" in measured


@pytest.mark.parametrize(
    ("env", "call"), [(HangingStep, "step(Action(text=''"), (HangingStart, "start(Task(id='t1'")]
)
def test_a_call_that_hangs_is_named_after_one_deadline(env: type[Counter], call: str) -> None:
    start = time.monotonic()
    found = lines(Counting(env), env_timeout_s=0.3)
    assert time.monotonic() - start < 2.0
    status, measured = found.pop("calls return")
    assert status == FAIL and measured.startswith(call)
    assert measured.endswith("has not returned within 0.3 s")
    assert found.pop("tasks")[0] == found.pop("held-out tasks")[0] == PASS
    assert {status for status, _ in found.values()} == {SKIP}


def test_a_restore_that_hangs_fails_what_restores() -> None:
    found = failed(Counting(HangingRestore), env_timeout_s=0.1)
    assert found == {"snapshot round trip", "restore after restore", "snapshots stay"}


def test_tasks() -> None:
    assert "held-out tasks are training" in lines(Counting(shared=True))["held-out tasks"][1]
    twice = Counting()
    twice.eval_tasks = [Task("t1", {"n": 0})]
    assert "'t1' belongs to several" in lines(twice)["held-out tasks"][1]
    twice.eval_tasks = []
    found = lines(twice)
    assert found.pop("tasks") == (FAIL, "3 training tasks, 0 held out")
    assert {status for status, _ in found.values()} == {SKIP}


def test_without_demonstrations_probes_are_enough() -> None:
    class Bare(Counting):
        def demonstrator(self, task: Task, rng: np.random.Generator) -> Any:
            raise ConfigError("there are no demonstrations; set warm.steps=0")

    subject = Subject(Bare(), Config())
    assert not subject.shown and len(subject.tasks) == 4 and len(subject.records) == 10
    assert lines(Bare())["rewards"][0] in (PASS, SKIP)


def test_probes_follow_the_schema() -> None:
    texts = list(probes([ADD.schema]))
    assert [json.loads(t[11:-12])["arguments"] for t in texts] == [{}, {}, {"n": 7}]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "calculator", "data.eval_tasks=4"]) == 0
    shown = capsys.readouterr().out
    assert "restore after restore" in shown and "14 pass" in shown
    file = tmp_path / "broken.py"
    file.write_text(
        "from fastturn.envs import Observation, Task\n"
        "class Env:\n"
        "    def start(self, task): return [{'role': 'user', 'content': 'x'}]\n"
        "    def step(self, action): raise KeyError('y')\n"
        "    def snapshot(self): return None\n"
        "    def restore(self, snapshot): pass\n"
        "class Broken:\n"
        "    tools = []\n"
        "    train_tasks, eval_tasks = [Task('a', {'n': 1})], [Task('b')]\n"
        "    def __init__(self, config): self.env = Env\n"
        "    def demonstrator(self, task, rng): return lambda messages: 'x'\n"
    )
    assert main(["check-env", f"{file}:Broken", "--json"]) == 1
    found = {line["check"]: line for line in json.loads(capsys.readouterr().out)}
    assert "KeyError: 'y'" in found["observations"]["measured"]
    assert main(["check-env", "calculater"]) == 2
    assert "'calculator'" in capsys.readouterr().err
