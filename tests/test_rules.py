"""Path rules: what they say of actions, at which state, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fastturn.config import Config, ConfigError, Data, Warm, override
from fastturn.envs import Action, BadCall, Message, Observation, Task, ToolCall, load_domain
from fastturn.rules import Judged, Rule, RuleError, checked, fulfilment, penalty, progress
from fastturn.types import Channel, Hit


@dataclass(frozen=True, slots=True)
class Door:
    locked: bool = True
    opened: int = 0


class Hall:
    """Doors are opened, locked or not; the third opening ends the episode."""

    def __init__(self) -> None:
        self.state = Door()

    def start(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "open"}]

    def step(self, action: Action) -> Observation:
        for call in action.calls:
            if isinstance(call, ToolCall) and call.name == "unlock":
                self.state = replace(self.state, locked=False)
            elif isinstance(call, ToolCall) and self.state.opened < 3:
                self.state = Door(True, self.state.opened + 1)
        done = self.state.opened == 3
        return Observation(({"role": "tool", "content": "ok"},), float(done), done)

    def snapshot(self) -> Door:
        return self.state

    def restore(self, snapshot: Door) -> None:
        self.state = snapshot


def opens(action: Action) -> bool:
    return action.call is not None and action.call.name == "open"


@penalty(0.25, twin="opens_unlocked")
def opens_locked(state: Door, action: Action) -> bool:
    """Opens a door that is locked.

    Only that.
    """
    return opens(action) and state.locked


@fulfilment(0.125, twin="opens_locked")
def opens_unlocked(state: Door, action: Action) -> bool:
    return opens(action) and not state.locked


@progress(0.5)
def way(state: Door) -> float:
    return state.opened / 3


RULES = (opens_locked, opens_unlocked, way)
UNLOCK, OPEN = ToolCall("unlock", {}), ToolCall("open", {})


def judged(*rules: Rule) -> Judged:
    env = Judged(Hall, rules or RULES)
    env.start(Task("t"))
    return env


def path(env: Judged, *calls: ToolCall | BadCall) -> tuple[Hit, ...]:
    return env.step(Action("", calls)).path


def test_a_rule_says_what_it_is_and_can_be_called():
    assert (opens_locked.name, opens_locked.channel) == ("opens_locked", Channel.PENALTY)
    assert opens_locked.description == "Opens a door that is locked."
    assert opens_locked(Door(), Action("", (OPEN,))) is True
    assert way(Door(opened=3)) == 1.0


def test_actions_are_judged_at_the_state_before_them():
    env = judged()
    assert path(env, UNLOCK) == ()
    opened = path(env, OPEN)
    assert opened == (
        Hit("opens_unlocked", Channel.FULFILMENT, 0.125),
        Hit("way", Channel.PROGRESS, 0.5 / 3),
    )
    assert [hit.rule for hit in path(env, OPEN)] == ["opens_locked", "way"]


def test_of_several_calls_each_is_judged_at_its_own_state():
    env = judged()
    hits = path(env, UNLOCK, OPEN, OPEN)
    assert [(hit.rule, hit.call) for hit in hits] == [
        ("opens_unlocked", 1),
        ("way", 1),
        ("opens_locked", 2),
        ("way", 2),
    ]
    assert env.snapshot() == Door(True, 2)


def test_calls_after_the_end_are_not_judged():
    env = judged()
    hits = path(env, OPEN, OPEN, OPEN, OPEN)
    assert [hit.call for hit in hits if hit.rule == "opens_locked"] == [0, 1, 2]


def test_answers_and_unreadable_calls_are_judged_without_a_call():
    env = judged()
    assert path(env) == () and path(env, BadCall("bad_json", "error")) == ()


def test_outcomes_are_those_of_the_environment():
    env, plain = judged(), Hall()
    for _ in range(3):
        answer = env.step(Action("", (OPEN,)))
        assert replace(answer, path=()) == plain.step(Action("", (OPEN,)))


def test_judged_episodes_are_restored_like_others():
    env = judged()
    env.step(Action("", (UNLOCK,)))
    state = pickle.loads(pickle.dumps(env.snapshot()))
    for _ in range(2):
        other = Judged(Hall, RULES)
        other.restore(state)
        assert [hit.rule for hit in path(other, OPEN)] == ["opens_unlocked", "way"]


def test_a_rule_that_raises_is_named_with_the_action():
    @penalty(0.25, twin="opens_unlocked")
    def broken(state: Door, action: Action) -> bool:
        return action.call.arguments["door"] == 1  # type: ignore[union-attr]

    with pytest.raises(RuleError, match=r"rule broken raised KeyError: 'door'.*'now'"):
        judged(broken).step(Action("now", (OPEN,)))


def test_a_potential_that_is_no_number_is_named():
    @progress(0.5)
    def lost(state: Door) -> float:
        return float("nan")

    with pytest.raises(RuleError, match="rule lost gave nan"):
        judged(lost).step(Action("", (OPEN,)))


def test_rules_that_cannot_be_trained_on_are_refused():
    loud = replace(opens_locked, magnitude=1.0)
    alone = replace(opens_locked, twin="opens_slowly")
    with pytest.raises(ConfigError, match=r"opens_locked.*magnitude 1.0"):
        checked([loud, opens_unlocked])
    with pytest.raises(ConfigError, match=r"twin 'opens_slowly'.*opens_unlocked"):
        checked([alone, opens_unlocked])
    with pytest.raises(ConfigError, match=r"names the twin 'opens_unlocked'.*there is none"):
        checked([opens_locked])
    with pytest.raises(ConfigError, match=r"opens_locked.*magnitude '0.25'"):
        checked([replace(opens_locked, magnitude="0.25"), opens_unlocked])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="declared 2 times"):
        checked([way, way])
    assert checked(RULES) == RULES


OWN = '''
"""Rules of one's own."""
from fastturn.rules import fulfilment, penalty

@penalty(0.25, twin="answers_late")
def answers_early(state, action):
    """Answers without a call."""
    return not action.calls

@fulfilment(0.25, twin="answers_early")
def answers_late(state, action):
    return bool(action.calls)
'''


def test_rules_come_from_a_file_of_ones_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    domain = load_domain(Config(data=Data(rules=str(file))))
    env = domain.env()
    env.start(domain.train_tasks[0])
    answer = env.step(Action("\\boxed{1}"))
    assert answer.path == (Hit("answers_early", Channel.PENALTY, -0.25),)
    assert domain.tools == load_domain(Config()).tools


def test_a_rule_that_is_imported_as_well_is_the_same_rule(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from fastturn.envs.desk_rules import dials_in_hours\n" + OWN)
    plain, own = (
        load_domain(Config(data=Data(domain="frontdesk", rules=rules))) for rules in ("", str(file))
    )
    assert len(own.rules) == len(plain.rules) + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = = 1\n", "SyntaxError.*line 1"),
        ("\nimport no_such_module\n", "ModuleNotFound.*line 2"),
        ("raise SystemExit(5)\n", "SystemExit: 5.*line 1"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(tmp_path, text: str, message: str):
    file = tmp_path / "own.py"
    file.write_text(text)
    for data in (Data(rules=str(file)), Data(domain=f"{file}:make")):
        with pytest.raises(ConfigError, match=rf"own\.py.*cannot be loaded.*{message}"):
            load_domain(Config(data=data))


def test_rules_that_are_not_there_are_refused(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for rules, message in ((str(empty), "declares no rule"), ("gone.py", "no such file")):
        with pytest.raises(ConfigError, match=message):
            load_domain(Config(data=Data(rules=rules)))
    with pytest.raises(ConfigError, match=r"rewards=outcome,penalty.*has no path rules"):
        load_domain(Config(rewards=("outcome", "penalty")))
    with pytest.raises(ConfigError, match="has no compliant_demonstrator"):
        load_domain(Config(warm=Warm(compliant=0.5)))
    assert load_domain(Config(rewards=("outcome",)))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("rewards=outcome,penalties", "expected any of"),
        ("rewards=", "rewards is empty"),
        ("rewards=gated", "rewards is empty"),
        ("rewards=outcome,gated,fulfilment", "leave one of them out"),
        ("anneal=1.5", "a share between 0 and 1"),
        ("warm.compliant=-1", "a share between 0 and 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(pair: str, message: str):
    with pytest.raises(ConfigError, match=message):
        override(Config(), [pair])


GUIDED = """
from fastturn.envs import Task

class Guided:
    tools, rules = [], ()
    train_tasks = eval_tasks = [Task(str(i)) for i in range(400)]

    def env(self): ...

    def demonstrator(self, task, rng):
        return lambda messages: "sloppy"

    def compliant_demonstrator(self, task, rng):
        return lambda messages: "compliant"

def make(config):
    return Guided()
"""


def test_demonstrations_are_compliant_as_often_as_asked(tmp_path):
    file = tmp_path / "guided.py"
    file.write_text(GUIDED)
    domain = load_domain(Config(data=Data(domain=f"{file}:make"), warm=Warm(compliant=0.25)))
    rng = np.random.default_rng(0)
    shown = [domain.demonstrator(task, rng)([]) for task in domain.train_tasks]
    assert shown.count("compliant") == pytest.approx(100, abs=30)
