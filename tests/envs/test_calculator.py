"""Domain "calculator": tasks, episodes, snapshots, demonstrations."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.envs import Action, Env, Message, Observation, Task, ToolCall, load_domain
from fastturn.envs.calculator import Demonstrator, Steps, calculator_call, question, running_values
from fastturn.envs.calls import parse_action

CONFIG = Config()
DOMAIN = load_domain(CONFIG)


def call(expression: str) -> Action:
    return parse_action(calculator_call(expression))


def test_tasks_are_as_promised() -> None:
    tasks = [*DOMAIN.train_tasks[:500], *DOMAIN.eval_tasks]
    for task in tasks:
        steps: Steps = task.data["steps"]
        values = list(running_values(task.data["start"], steps))
        assert 10 <= task.data["start"] <= 99 and len(steps) in (2, 3)
        assert any(sign == "*" for sign, _ in steps)
        assert all(11 <= operand <= (29 if sign == "*" else 99) for sign, operand in steps)
        assert all(0 <= value <= 9999 for value in values)
        assert values[-1] == task.data["answer"]
        assert task.data["question"] == question(task.data["start"], steps)
    assert {len(task.data["steps"]) for task in tasks} == {2, 3}
    assert question(37, (("*", 12), ("+", 45))) == "37*12 then +45"


def test_train_tasks_are_lazy_and_repeatable() -> None:
    again = load_domain(CONFIG).train_tasks
    assert len(again) == 1_000_000
    assert again[17] == DOMAIN.train_tasks[17]
    assert again[-1].id == "train-0-999999"
    assert again[3:6] == [again[3], again[4], again[5]]
    with pytest.raises(IndexError, match="1000000"):
        again[1_000_000]


def test_the_seed_orders_training_and_leaves_the_held_out_tasks_alone() -> None:
    other = load_domain(replace(CONFIG, seed=1))
    assert other.eval_tasks == DOMAIN.eval_tasks
    assert other.train_tasks[0].data != DOMAIN.train_tasks[0].data
    assert other.train_tasks[0].id != DOMAIN.train_tasks[0].id


def test_training_never_asks_what_is_held_out() -> None:
    """With many held-out tasks, collisions happen and are skipped."""
    many = load_domain(replace(CONFIG, data=Data(eval_tasks=8_000)))
    held_out = [task.data["question"] for task in many.eval_tasks]
    assert len(set(held_out)) == 8_000
    asked = set(held_out)
    free = DOMAIN.train_tasks[:4000]
    skipped = many.train_tasks[:4000]
    assert any(task.data["question"] in asked for task in free)
    assert not any(task.data["question"] in asked for task in skipped)


def test_equal_questions_are_different_tasks() -> None:
    """T11: ids tell tasks apart, not their text."""
    tasks = DOMAIN.train_tasks[:20_000]
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.data["question"] for task in tasks}) < len(tasks)


def test_an_episode_from_question_to_reward() -> None:
    task = Task("t", {"question": "37*12 then +45", "answer": 489})
    env = DOMAIN.env()
    assert env.start(task) == [{"role": "user", "content": "37*12 then +45"}]
    first = env.step(call("37*12"))
    assert first == Observation(({"role": "tool", "content": "444"},), 0.0, False, ("tool_call",))
    env.step(call("444+45"))
    assert env.step(Action("\\boxed{489}")) == Observation((), 1.0, True, ("answer",))


@pytest.mark.parametrize(
    ("text", "reward", "event"),
    [
        ("\\boxed{489}", 1.0, "answer"),
        ("It is \\boxed{1}, no, \\boxed{ 489 }", 1.0, "answer"),
        ("\\boxed{488}", 0.0, "answer"),
        ("\\boxed{}", 0.0, "answer"),
        ("489", 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
        ("<think>\\boxed{489}</think>", 0.0, "no_answer"),
    ],
)
def test_answers(text: str, reward: float, event: str) -> None:
    env = DOMAIN.env()
    env.start(Task("t", {"question": "", "answer": 489}))
    assert env.step(Action(text)) == Observation((), reward, True, (event,))


def test_steps_from_a_negative_value_work() -> None:
    env = DOMAIN.env()
    env.start(DOMAIN.train_tasks[0])
    assert env.step(call("-13*16")).messages[0]["content"] == "-208"


@pytest.mark.parametrize("expression", ["37*12+45", "37", "37**2", "(1+1)", "1/0", "a+b", ""])
def test_one_operation_a_call(expression: str) -> None:
    env = DOMAIN.env()
    env.start(DOMAIN.train_tasks[0])
    observation = env.step(call(expression))
    assert observation.messages == ({"role": "tool", "content": "error"},)
    assert observation.events == ("tool_call", "tool_error") and not observation.done


# --- snapshots


def steps_of(env: Env, actions: Sequence[Action]) -> list[Observation]:
    seen = []
    for action in actions:
        seen.append(env.step(action))
        if seen[-1].done:
            break
    return seen


actions = st.lists(
    st.one_of(
        st.builds(lambda a, b: call(f"{a}*{b}"), st.integers(0, 99), st.integers(0, 99)),
        st.just(Action("", (ToolCall("nope", {}),))),
        st.builds(lambda n: Action(f"\\boxed{{{n}}}"), st.integers(0, 9999)),
    ),
    min_size=1,
    max_size=4,
)


@given(before=actions, after=actions, index=st.integers(0, 999_999))
@settings(max_examples=50, deadline=None)
def test_restored_episodes_continue_alike(
    before: list[Action], after: list[Action], index: int
) -> None:
    env = DOMAIN.env()
    env.start(DOMAIN.train_tasks[index])
    if any(observation.done for observation in steps_of(env, before)):
        return
    snapshot = env.snapshot()
    stored = pickle.dumps(snapshot)
    continued = steps_of(env, after)
    for restored in (snapshot, snapshot, pickle.loads(stored)):
        twin = DOMAIN.env()
        twin.restore(restored)
        assert steps_of(twin, after) == continued
    assert pickle.dumps(snapshot) == stored


# --- demonstrations


def demonstrate(task: Task, policy: Demonstrator) -> tuple[float, int]:
    env = DOMAIN.env()
    messages: list[Message] = env.start(task)
    for turn in range(1, 9):
        text = policy(messages)
        observation = env.step(parse_action(text))
        messages += [{"role": "assistant", "content": text}, *observation.messages]
        if observation.done:
            return observation.reward, turn
    raise AssertionError("no end")


def test_a_faultless_demonstrator_is_always_right() -> None:
    for task in DOMAIN.train_tasks[:200]:
        policy = Demonstrator(task, np.random.default_rng(0), (0.0, 0.0, 0.0), 0.0, 0.0)
        assert demonstrate(task, policy) == (1.0, len(task.data["steps"]) + 1)


def test_the_demonstrator_errs_as_often_as_documented() -> None:
    """Right with .90·.85·.88²·.95 after two steps, and ·.40·.88 more after three."""
    for steps, expected in ((2, 0.563), (3, 0.198)):
        tasks = [t for t in DOMAIN.train_tasks[:6000] if len(t.data["steps"]) == steps][:2000]
        right = [
            demonstrate(task, DOMAIN.demonstrator(task, np.random.default_rng(i)))[0]  # type: ignore
            for i, task in enumerate(tasks)
        ]
        assert abs(np.mean(right) - expected) < 0.04


def test_the_demonstrator_reads_where_it_is_from_messages() -> None:
    task = Task("t", {"start": 37, "steps": (("*", 12), ("+", 45)), "answer": 489})
    policy = Demonstrator(task, np.random.default_rng(0), (0.0, 0.0, 0.0), 0.0, 0.0)
    user = {"role": "user", "content": ""}
    error, result = {"role": "tool", "content": "error"}, {"role": "tool", "content": "440"}
    assert policy([user]) == policy([user, error]) == calculator_call("37*12")
    assert policy([user, error, result]) == calculator_call("440+45")
    assert policy([user, result, {"role": "tool", "content": "485"}]) == "\\boxed{485}"


# --- domain


def test_a_pretrained_model_gets_tools_and_instructions() -> None:
    described = load_domain(replace(CONFIG, model=Model(path="some/model")))
    assert DOMAIN.tools == []
    assert described.tools[0]["function"]["name"] == "calculator"
    system, user = described.env().start(described.train_tasks[0])
    assert system["role"] == "system" and "\\boxed{number}" in system["content"]
    assert user["content"] == described.train_tasks[0].data["question"]
    env = described.env()
    env.start(described.train_tasks[0])
    (message,) = env.step(call("1+1+1")).messages
    assert message["content"].startswith("error: one operation")


def test_unknown_domains_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest is 'calculator'"):
        load_domain(replace(CONFIG, data=Data(domain="calcluator")))


OWN = """
from dataclasses import dataclass
from fastturn.envs import Task

@dataclass(frozen=True)
class State:
    n: int

class Own:
    tools, train_tasks, eval_tasks = [], [Task("a")], [Task("b")]
    def __init__(self, config): self.seed = config.seed
    def env(self): ...
    def demonstrator(self, task, rng): ...

number = 3
"""


def test_a_domain_in_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "math.py"  # shadows nothing
    file.write_text(OWN)
    domain = load_domain(replace(CONFIG, seed=5, data=Data(domain=f"{file}:Own")))
    assert domain.seed == 5  # type: ignore[attr-defined]
    module = __import__("sys").modules[type(domain).__module__]
    state = module.State(3)
    assert pickle.loads(pickle.dumps(state)) == state
    for name, message in ((f"{file}:Other", "no function 'Other'"), (f"{file}:number", "number")):
        with pytest.raises(ConfigError, match=message):
            load_domain(replace(CONFIG, data=Data(domain=name)))
    with pytest.raises(ConfigError, match=r"there is no file 'x\.py'"):
        load_domain(replace(CONFIG, data=Data(domain="x.py:Own")))
