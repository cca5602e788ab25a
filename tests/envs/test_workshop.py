"""Domain "workshop": orders, episodes, snapshots, demonstrations, options in the domain's name."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.demos import demonstrate
from fastturn.envs import Action, Env, Observation, Task, ToolCall, load_domain
from fastturn.envs.calls import parse_action
from fastturn.envs.workshop import Demonstrator, Workshop, workshop_call
from fastturn.render import Renderer
from fastturn.tokenizer import build_tokenizer, episode_texts

CONFIG = Config(turns=7, data=Data(domain="workshop"))
DOMAIN = load_domain(CONFIG)


def named(reference: str, **changes: object) -> Workshop:
    domain = load_domain(replace(CONFIG, data=Data(domain=reference), **changes))  # type: ignore
    assert isinstance(domain, Workshop)
    return domain


def order(*numbers: int, flawed: bool = False, checks: int = 2, **terms: float) -> Task:
    data = {"question": "", "order": numbers, "flawed": flawed, "checks": checks}
    return Task("t", data | {"prices": 1.0, "market": 0.0, "take": False} | terms)


def call(name: str, n: int) -> Action:
    return parse_action(workshop_call(name, n=n))


TAKE = parse_action(workshop_call("take"))


DONE = Action("done")
OK = Observation(({"role": "tool", "content": "ok"},), events=("tool_call",))


def played(task: Task, actions: Sequence[Action]) -> list[Observation]:
    env = DOMAIN.env()
    env.start(task)
    return [env.step(action) for action in actions]


GOOD = (call("set", 47), call("set", 82))


def test_more_held_out_orders_than_there_are() -> None:
    domain = load_domain(replace(CONFIG, data=Data(domain="workshop:steps=1", eval_tasks=89)))
    held_out = {task.data["question"] for task in domain.eval_tasks}
    assert len(held_out) == 89 and domain.train_tasks[0].data["question"] not in held_out
    with pytest.raises(ConfigError, match=r"eval_tasks=90: .*steps=1' has only 90 different tasks"):
        load_domain(replace(CONFIG, data=Data(domain="workshop:steps=1", eval_tasks=90)))


@pytest.mark.parametrize("flawed", [False, True])
@pytest.mark.parametrize("gauges", [0, 1, 2])
def test_only_all_gauges_mend_a_flaw(flawed, gauges):
    actions = [*GOOD, *(call("gauge", 1 + i) for i in range(gauges)), DONE]
    *before, last = played(order(47, 82, flawed=flawed), actions)
    assert before == [OK] * (2 + gauges)
    assert last == Observation((), float(not flawed or gauges == 2), True, ("delivered",))


def test_a_wrong_number_ends_the_episode():
    first, second = played(order(47, 82), [GOOD[0], call("set", 81)])
    assert first == OK
    assert second == Observation((), 0.0, True, ("tool_call", "spoiled"))


def test_an_unfinished_piece_fails():
    assert played(order(47, 82), [GOOD[0], DONE])[-1].reward == 0.0


@pytest.mark.parametrize(
    ("actions", "event"),
    [
        ([call("gauge", 1)], "tool_error"),  # before all numbers are set
        ([*GOOD, call("gauge", 2)], "tool_error"),  # out of turn
        ([*GOOD, call("set", 47)], "tool_error"),  # nothing left to set
        ([*GOOD, call("gauge", 1), call("gauge", 2), call("gauge", 3)], "tool_error"),
        ([Action("", (ToolCall("set", {"n": "47"}),))], "bad_arguments"),
        ([Action("", (ToolCall("get", {"n": 47}),))], "unknown_tool"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(actions, event):
    task = order(47, 82, flawed=True)
    *_, refused = played(task, actions)
    assert refused == Observation(
        ({"role": "tool", "content": "error"},), events=("tool_call", event)
    )
    way = (*GOOD, call("gauge", 1), call("gauge", 2))
    rest = [a for a in way if a not in actions[:-1]]
    assert played(task, [*actions, *rest, DONE])[-1].reward == 1.0


def test_the_first_turn_draws_a_price_that_later_turns_keep():
    task, found = order(47, 82, prices=1000.0), []
    for seed in range(2000):
        env = DOMAIN.env()
        env.start(task)
        env.step(replace(GOOD[0], seed=seed))
        for after in (seed, seed + 1):
            twin = DOMAIN.env()
            twin.restore(pickle.loads(pickle.dumps(env.snapshot())))
            twin.step(replace(GOOD[1], seed=after))
            found.append(twin.step(replace(DONE, seed=after)).reward)
    assert found[::2] == found[1::2]
    logs = np.log(found[::2]) / np.log(1000)
    assert logs.min() >= 0 and logs.max() <= 1
    assert abs(logs.mean() - 1 / 2) < 0.02 and abs(logs.var() - 1 / 12) < 0.005


def test_a_bad_piece_earns_nothing_at_any_price():
    assert played(order(47, 82, flawed=True, prices=9.0), [*GOOD, DONE])[-1].reward == 0.0
    assert played(order(47, 82, prices=1.0), [*GOOD, DONE])[-1].reward == 1.0


def test_the_market_moves_all_alike_and_favours_no_ending():
    task, wrong, gains = order(47, 82, market=3.0), call("set", 11), []
    for seed in range(2000):
        good, *others = (
            played(task, [replace(way[0], seed=seed), *way[1:]])[-1].reward
            for way in ([*GOOD, DONE], [wrong], [GOOD[0], wrong], [DONE], [call("gauge", 1)] * 7)
        )
        assert set(others) == {others[0]} and others[0] == pytest.approx(good - 1)
        gains.append(good - 1)
    assert min(gains) >= -3 and max(gains) <= 3
    assert abs(np.mean(gains)) < 0.15 and abs(np.var(gains) - 3) < 0.2


def test_the_workshop_closes_with_the_last_turn():
    """A piece that is good and not delivered by then fails."""
    refused = [call("gauge", 1)] * 4
    *_, before, last = played(order(47, 82), [*GOOD, *refused, call("gauge", 2)])
    assert not before.done and last == Observation((), 0.0, True, ("tool_call", "late"))
    assert played(order(47, 82), [*GOOD, *refused, DONE])[-1].reward == 1.0


def test_an_order_to_be_taken_leaves_no_choice_before_the_draw():
    task, wrong = order(47, 82, market=3.0, take=True), call("set", 11)
    refused = replace(OK, messages=({"role": "tool", "content": "error"},))
    refused = replace(refused, events=("tool_call", "tool_error"))
    assert played(task, [wrong, TAKE, TAKE, call("set", 47)]) == [refused, OK, refused, OK]
    assert played(order(47, 82), [TAKE]) == [refused]
    for seed in range(20):
        spoiled, good = (
            played(task, [replace(TAKE, seed=seed), *rest])[-1].reward
            for rest in ([wrong], [*GOOD, DONE])
        )
        assert good == pytest.approx(spoiled + 1) and spoiled != 0


def test_demonstrations_take_what_is_to_be_taken():
    domain = named("workshop:take=1,slip=0,careful=1,checks=1")
    config = Config(turns=5)
    renderer = Renderer(build_tokenizer(episode_texts(domain, 50, config), 334))
    (shown,) = demonstrate(domain, renderer, domain.train_tasks[:1], config, (0, "demo"))
    assert shown.success and len(shown.turns) == 5  # take, two numbers, a gauge, done


def test_held_out_orders_meet_no_market():
    domain = named("workshop:market=6")
    assert {task.data["market"] for task in domain.eval_tasks} == {0.0}
    assert {task.data["market"] for task in domain.train_tasks[:9]} == {6.0}


actions_drawn = st.lists(
    st.one_of(
        st.just("next"),
        st.builds(lambda n: ("gauge", n), st.integers(0, 5)),
        st.builds(lambda n: ("set", n), st.integers(10, 99)),
        st.just("done"),
    ),
    min_size=1,
    max_size=5,
)


def steps_of(env: Env, task: Task, words: Sequence[object]) -> list[Observation]:
    """Observations until the episode ends; "next" sets the next right number."""
    seen: list[Observation] = []
    for word in words:
        placed = min(env.snapshot().placed, len(task.data["order"]) - 1)
        if word == "next":
            word = ("set", task.data["order"][placed])
        seen.append(env.step(DONE if word == "done" else call(*word)))  # type: ignore[misc]
        if seen[-1].done:
            break
    return seen


@given(before=actions_drawn, after=actions_drawn, index=st.integers(0, 999_999))
@settings(max_examples=50, deadline=None)
def test_restored_episodes_continue_alike(before, after, index):
    task = DOMAIN.train_tasks[index]
    env = DOMAIN.env()
    env.start(task)
    if any(observation.done for observation in steps_of(env, task, before)):
        return
    snapshot = env.snapshot()
    stored = pickle.dumps(snapshot)
    continued = steps_of(env, task, after)
    for restored in (snapshot, snapshot, pickle.loads(stored)):
        twin = DOMAIN.env()
        twin.restore(restored)
        assert steps_of(twin, task, after) == continued
    assert pickle.dumps(snapshot) == stored


def test_tasks_are_as_asked_for():
    domain = named("workshop:steps=3,checks=1,flaws=0.4")
    tasks = domain.train_tasks[:4000]
    assert all(len(t.data["order"]) == 3 and t.data["checks"] == 1 for t in tasks)
    assert all(10 <= n <= 99 for t in tasks for n in t.data["order"])
    assert abs(np.mean([t.data["flawed"] for t in tasks]) - 0.4) < 0.035
    plain = named("workshop:checks=0,flaws=1").train_tasks[:100]
    assert not any(t.data["flawed"] for t in plain)


def test_the_domain_errs_as_often_as_it_says():
    """.8 ** 2 of the demonstrations spoil nothing; half of those gauge, which pays when flawed."""
    domain = named("workshop:flaws=0.25,slip=0.2,careful=0.5,checks=3")
    config = Config(turns=6)
    renderer = Renderer(build_tokenizer(episode_texts(domain, 50, config), 334))
    shown = demonstrate(domain, renderer, domain.train_tasks[:2000], config, (0, "demo"))
    events = [t.turns[-1].events[-1] for t in shown]
    assert abs(events.count("spoiled") / len(events) - 0.36) < 0.035
    expected = 0.64 * (0.5 + 0.5 * 0.75)
    assert abs(np.mean([t.success for t in shown]) - expected) < 0.035
    assert {len(t.turns) for t in shown if t.success} == {3, 6}


def test_demonstrations_think_if_they_are_to():
    task, rng = order(47, 82), np.random.default_rng(0)
    faultless = {"careful": 1.0, "slip": 0.0}
    asked = [{"role": "user", "content": ""}]
    thinking, plain = (Demonstrator(task, rng, think=think, **faultless) for think in (True, False))
    assert thinking(asked) == f"<think>set 47</think>{plain(asked)}"
    assert plain(asked) == workshop_call("set", n=47)


def test_a_pretrained_model_gets_tools_and_instructions():
    described = named("workshop:checks=3", model=Model(path="some/model"))
    assert DOMAIN.tools == []
    assert [tool["function"]["name"] for tool in described.tools] == ["set", "gauge"]
    taken = named("workshop:take=1", model=Model(path="some/model"))
    assert [tool["function"]["name"] for tool in taken.tools] == ["take", "set", "gauge"]
    assert "Call take" in taken.env().start(taken.train_tasks[0])[0]["content"]
    system, user = described.env().start(described.train_tasks[0])
    assert "up to 3" in system["content"]
    assert user["content"] == described.train_tasks[0].data["question"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("workshop:chekcs=4", r"data.domain='chekcs=4'.*option of workshop.*nearest is 'checks'"),
        ("workshop:checks", "expected name=value"),
        ("workshop:", "expected name=value"),
        ("workshop:checks=some", "expected a value of type int"),
        ("workshop:flaws=2", "expected a share from 0 to 1"),
        ("workshop:steps=0", "expected 1 to 9 steps"),
        ("workshop:prices=0.5", "prices=0.5: expected 1 to 1e6"),
        ("workshop:market=-1", "market=-1.0: expected 0 to 1e6"),
        ("calculator:steps=2", "calculator has no options"),
        ("workshp:steps=2", "nearest is 'workshop'"),
    ],
)
def test_domain_options_are_checked(reference, message):
    with pytest.raises(ConfigError, match=message):
        named(reference)


def test_it_reads_no_file():
    with pytest.raises(ConfigError, match="makes its own tasks"):
        load_domain(replace(CONFIG, data=Data(domain="workshop", path="x.jsonl")))
