"""Domains "frontdesk" and "shell", what holds for every level of both: tasks, snapshots, scripts,
rules that the outcome does not need."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.envs import Action, Task, frontdesk, load_domain, shell
from fastturn.envs.calls import parse_action
from fastturn.envs.stateful import Script, StateDomain, acts, scripted
from fastturn.rules import Judged, Ruled
from fastturn.types import Channel

PROPER = {  # never wrong, always obedient
    "frontdesk": frontdesk.Habits(stops=0.0, gives_up=0.0, slips=0.0, **frontdesk.OBEYS),
    "shell": shell.Habits(stops=0.0, forgets=0.0, slips=0.0, **shell.OBEYS),
}
HASTY = {  # never wrong, never obedient
    "frontdesk": replace(PROPER["frontdesk"], **dict.fromkeys(frontdesk.OBEYS, 0.0)),
    "shell": replace(PROPER["shell"], **dict.fromkeys(shell.OBEYS, 0.0)),
}
WORK = {"frontdesk": frontdesk.work, "shell": shell.work}
TURNS = {
    "frontdesk": 6,
    "frontdesk:level=easy": 6,
    "frontdesk:level=hard": 9,
    "frontdesk:level=gate": 6,
    "shell": 5,
    "shell:level=easy": 3,
    "shell:level=hard": 9,
    "shell:level=gate": 7,
}
NEUTRAL = [level for level in TURNS if not level.endswith("gate")]


@cache
def domain(level: str, seed: int = 0, eval_tasks: int = 256) -> StateDomain[Any]:
    config = Config(seed=seed, data=Data(domain=level, eval_tasks=eval_tasks))
    ruled = load_domain(config)
    assert isinstance(ruled, Ruled) and isinstance(ruled.domain, StateDomain)
    return ruled.domain


def play(level: str, task: Task, script: Script) -> tuple[float, int, Counter[str]]:
    """Reward, turns and rules met of one scripted episode."""
    env = Judged(domain(level).env, domain(level).rules)
    messages, met = env.start(task), Counter[str]()
    for turn in range(1, 20):
        text = script(messages)
        seen = env.step(parse_action(text))
        messages = [*messages, {"role": "assistant", "content": text}, *seen.messages]
        met.update(hit.rule for hit in seen.path)
        if seen.done:
            return seen.reward, turn, met
    raise AssertionError("no end")


def script_of(level: str, task: Task, habits: Mapping[str, Any]) -> Script:
    """The scripted agent with these habits."""
    name = level.partition(":")[0]
    return scripted(WORK[name](task, np.random.default_rng(0), habits[name]))  # type: ignore[operator]


def named(level: str, channel: Channel) -> set[str]:
    return {rule.name for rule in domain(level).rules if rule.channel is channel}


def test_every_level_is_looked_at() -> None:
    levels = [name for name in frontdesk.LEVELS if name != "normal"]
    assert list(shell.LEVELS) == list(frontdesk.LEVELS)
    assert set(TURNS) == {
        *("frontdesk", "shell"),
        *(f"{name}:level={level}" for name in ("frontdesk", "shell") for level in levels),
    }


@pytest.mark.parametrize("level", TURNS)
def test_tasks_are_many_repeatable_and_apart_from_the_held_out_ones(level: str) -> None:
    tasks = domain(level, eval_tasks=512).train_tasks[:3000]
    asked = {task.data["question"] for task in tasks}
    held_out = domain(level, eval_tasks=512).eval_tasks
    assert len(asked) > 2000 and len({task.id for task in tasks}) == 3000
    assert len({task.data["question"] for task in held_out}) == 512
    assert not asked & {task.data["question"] for task in held_out}
    again = domain.__wrapped__(level, eval_tasks=512)
    assert again.eval_tasks == held_out and again.train_tasks[:500] == tasks[:500]
    other = domain(level, seed=1, eval_tasks=512)
    assert other.eval_tasks == held_out and other.train_tasks[0].data != tasks[0].data
    assert all(pickle.loads(pickle.dumps(task)) == task for task in tasks[:20])


@pytest.mark.parametrize("level", TURNS)
def test_restored_at_every_step_episodes_continue_alike(level: str) -> None:
    for number, task in enumerate(domain(level).train_tasks[:25]):
        script = domain(level).demonstrator(task, np.random.default_rng(number))
        judged = (domain(level).env, domain(level).rules)
        env = Judged(*judged)
        messages, snapshots, actions, seen = env.start(task), [], [], []
        while not seen or not seen[-1].done:
            text = script(messages)
            snapshots.append(env.snapshot())
            actions.append(parse_action(text))
            seen.append(env.step(actions[-1]))
            messages = [*messages, {"role": "assistant", "content": text}, *seen[-1].messages]
        for step, snapshot in enumerate(snapshots):
            for state in (snapshot, pickle.loads(pickle.dumps(snapshot))):
                twin = Judged(*judged)
                twin.restore(state)
                assert [twin.step(action) for action in actions[step:]] == seen[step:]


@pytest.mark.parametrize("level", TURNS)
def test_who_obeys_succeeds_and_meets_no_penalty(level: str) -> None:
    seen = Counter[str]()
    for number, task in enumerate(domain(level).train_tasks[:300]):
        reward, turns, met = play(level, task, script_of(level, task, PROPER))
        assert reward == 1.0 and turns <= TURNS[level]
        obedient = domain(level).compliant_demonstrator(task, np.random.default_rng(number))
        seen += met + play(level, task, obedient)[2]
    assert not set(seen) & named(level, Channel.PENALTY)
    if ":" not in level:
        assert set(seen) == named(level, Channel.FULFILMENT) | {"duties_met"}


@pytest.mark.parametrize("level", NEUTRAL)
def test_the_outcome_needs_none_of_the_rules(level: str) -> None:
    """Who hurries but makes no mistake solves the same tasks as who obeys: all of them."""
    seen = Counter[str]()
    for task in domain(level).train_tasks[:300]:
        reward, turns, met = play(level, task, script_of(level, task, HASTY))
        assert reward == 1.0 and turns <= TURNS[level]
        seen += met
    if ":" not in level:
        assert named(level, Channel.PENALTY) <= set(seen)


@pytest.mark.parametrize(
    ("level", "low", "high", "most_clean"),
    [
        *[("frontdesk", 0.40, 0.54, 0.12), ("frontdesk:level=easy", 0.37, 0.54, 0.15)],
        *[("frontdesk:level=hard", 0.13, 0.29, 0.02), ("frontdesk:level=gate", 0.0, 0.004, 0.004)],
        *[("shell", 0.42, 0.57, 0.12), ("shell:level=easy", 0.44, 0.60, 0.15)],
        *[("shell:level=hard", 0.12, 0.28, 0.02), ("shell:level=gate", 0.0, 0.004, 0.004)],
    ],
)
def test_demonstrators_err_and_hurry(
    level: str, low: float, high: float, most_clean: float
) -> None:
    """Shares of solved episodes, and of episodes that are solved without a violation."""
    played = [
        play(level, task, domain(level).demonstrator(task, np.random.default_rng(number)))
        for number, task in enumerate(domain(level).train_tasks[:800])
    ]
    penalties = named(level, Channel.PENALTY)
    solved = [reward == 1.0 for reward, _, _ in played]
    clean = [reward == 1.0 and not penalties & set(met) for reward, _, met in played]
    assert low <= np.mean(solved) <= high and np.mean(clean) <= most_clean


@pytest.mark.parametrize("level", ["frontdesk", "shell"])
def test_a_pretrained_model_gets_tools_and_instructions(level: str) -> None:
    described = load_domain(Config(model=Model(path="some/model"), data=Data(domain=level)))
    task = described.train_tasks[0]
    system, user = described.env().start(task)
    assert "House rules" in system["content"] and user["content"] == task.data["question"]
    brief = domain(level)
    assert brief.tools == [] and brief.env().start(task) == [user]
    called = {
        call.name
        for number, task in enumerate(brief.train_tasks[:200])
        for call in calls_of(level, task, number)
    }
    assert called <= {tool["function"]["name"] for tool in described.tools}


def calls_of(level: str, task: Task, number: int) -> Sequence[Any]:
    """The calls that the compliant script makes."""
    script = domain(level).compliant_demonstrator(task, np.random.default_rng(number))
    env = domain(level).env()
    messages, calls = env.start(task), []
    while True:
        action = parse_action(script(messages))
        calls += action.calls
        seen = env.step(action)
        if seen.done:
            return calls
        messages = [*messages, *seen.messages]


@pytest.mark.parametrize("level", ["frontdesk", "shell"])
def test_levels_are_told_apart_by_name_and_make_their_own_tasks(level: str) -> None:
    with pytest.raises(ConfigError, match=r"level='hrad': .*; the nearest is 'hard'"):
        load_domain(Config(data=Data(domain=f"{level}:level=hrad")))
    with pytest.raises(ConfigError, match=r"data\.path='x\.jsonl'.*leave data\.path empty"):
        load_domain(Config(data=Data(domain=level, path="x.jsonl")))


def test_silence_is_an_event() -> None:
    env = domain("shell").env()
    env.start(domain("shell").train_tasks[0])
    end = env.step(Action("<think>done</think> "))
    assert end.done and end.reward == 0.0 and end.events == ("no_answer",)


def test_a_function_of_a_state_as_a_tool() -> None:
    @acts(to="string", kind=("a", "b"))
    def send(state: Any, to: str, kind: str) -> tuple[Any, str]:
        """Sends it.

        More about it.
        """
        return state, f"{to} {kind}"

    assert send.schema["function"] == {
        "name": "send",
        "description": "Sends it.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string"},
                "kind": {"type": "string", "enum": ["a", "b"]},
            },
            "required": ["to", "kind"],
        },
    }
    assert send.function(1, to="x", kind="a") == (1, "x a")
