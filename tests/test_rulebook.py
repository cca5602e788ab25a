"""What `fastturn rules` and `fastturn probe` find: good rules pass, each fault has its own line."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fastturn import cli
from fastturn.config import Config, Data, Warm
from fastturn.demos import demonstrate
from fastturn.envs import load_domain
from fastturn.envs.base import DomainError
from fastturn.findings import FAIL, PASS, SKIP, WARN
from fastturn.probe import measured
from fastturn.render import Renderer
from fastturn.rulebook import references, review, scripted
from fastturn.rules import Ruled
from fastturn.tokenizer import build_tokenizer, episode_texts

from .test_channels import episode, group, turn

TEXT = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
DOMAIN = """
from dataclasses import dataclass, replace
from fastturn.envs import Observation, Task

@dataclass(frozen=True)
class State:
    calls: int = 0

class Env:
    state = State()

    def start(self, task):
        return [{"role": "user", "content": "go"}]

    def step(self, action):
        if not action.calls:
            return Observation((), 1.0, True)
        self.state = replace(self.state, calls=self.state.calls + 1)
        return Observation(({"role": "tool", "content": "ok"},))

    def snapshot(self):
        return self.state

    def restore(self, state):
        self.state = state

class Make:
    tools, eval_tasks = [], [Task("e")]
    train_tasks = [Task(str(i)) for i in range(40)]

    def __init__(self, config):
        pass

    def env(self):
        return Env()

    def demonstrator(self, task, rng):
        called = rng.random() < 0.5
        def script(messages):
            if called and len(messages) == 1:
                return '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
            return "done"
        return script
"""
HEAD = "from fastturn.rules import fulfilment, penalty, progress\n"
PAIR = """
@penalty({0}, twin="good")
def bad(state, action):
    {1}

@fulfilment({0}, twin="bad")
def good(state, action):
    {2}
"""
ANY = "return bool(action.text)"
WELL = ("return not action.calls and bool(action.text)", "return action.call is not None")


def domain(tmp_path: Path, rules: str) -> tuple[Ruled, Config]:
    made, own = tmp_path / "made.py", tmp_path / "own.py"
    made.write_text(DOMAIN)
    own.write_text(rules)
    config = Config(data=Data(domain=f"{made}:Make", rules=str(own)))
    found = load_domain(config)
    assert isinstance(found, Ruled)
    return found, config


def statuses(tmp_path: Path, rules: str) -> dict[str, str]:
    found, config = domain(tmp_path, rules)
    _, lines = review(found.rules, scripted(found, config, 0.0), deadline_s=9.0)
    return {line.check: line.status for line in lines}


def test_the_documented_rules_pass_on_a_domain_that_has_what_they_read(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found, config = domain(tmp_path, example)
    tried, lines = review(found.rules, scripted(found, config, 0.0), deadline_s=9.0)
    assert {line.status for line in lines[:-1]} == {PASS}, lines
    rates = {rule.name: tried.rate(rule) for rule in tried.rules}
    assert rates["answers_unchecked"] + rates["checks_first"] == pytest.approx(1.0)
    assert 0.2 < rates["checks_first"] < 0.8 and rates["half_way"] == rates["checks_first"]


@pytest.mark.parametrize(
    ("check", "status", "rules"),
    [
        ("answers", FAIL, PAIR.format(0.25, "return action.call.name == 'g'", WELL[1])),
        (
            "deterministic",
            FAIL,
            "import itertools\nticks = itertools.count()\n"
            + PAIR.format(0.25, "return next(ticks) % 2 == 0", WELL[1]),
        ),
        (
            "deterministic",
            FAIL,
            "seen = set()\n"
            + PAIR.format(
                0.25,
                "key = state, action.text; new = key not in seen; seen.add(key); return new",
                WELL[1],
            ),
        ),
        (
            "pure",
            FAIL,
            PAIR.format(0.25, "[c.arguments.update(x=1) for c in action.calls]; return False", ANY),
        ),
        (
            "answers",
            FAIL,
            PAIR.format(0.25, *WELL) + "\n@progress(0.5)\ndef p(s): return 9 * s.calls",
        ),
        (
            "pure",
            FAIL,
            PAIR.format(0.25, "object.__setattr__(state, 'seen', 1); return False", WELL[1]),
        ),
        ("1 commission, not omission", FAIL, PAIR.format(0.25, "return not action.calls", WELL[1])),
        ("2 outcome is the driver", FAIL, PAIR.format(0.9, ANY, "return False")),
        ("2 outcome is the driver", FAIL, PAIR.format(0.9, ANY, ANY)),  # the sum of both is 0
        ("2 outcome is the driver", WARN, PAIR.format(0.4, ANY, "return False")),
        ("4 compliance is reachable", FAIL, PAIR.format(0.25, WELL[0], "return False")),
        ("penalties are met", WARN, PAIR.format(0.25, "return False", WELL[1])),
    ],
)
def test_every_fault_has_its_line(tmp_path, check: str, status: str, rules: str):
    assert statuses(tmp_path, HEAD + rules)[check] == status


def test_a_rule_that_changes_states_does_not_put_others_to_blame(tmp_path):
    bad = "object.__setattr__(state, 'calls', 7); return False"
    found = statuses(tmp_path, HEAD + PAIR.format(0.25, bad, "return state.calls == 0"))
    assert (found["pure"], found["deterministic"]) == (FAIL, PASS)


def test_rules_that_punish_the_reference_are_named_with_its_tasks(tmp_path):
    unchecked = f"{WELL[0]} and not state.calls"
    found, config = domain(tmp_path, HEAD + PAIR.format(0.25, unchecked, WELL[1]))
    shown = references(found, config)
    line = review(found.rules, shown, shown, deadline_s=9.0)[1][-1]
    bad = [episode.task for episode in shown if len(episode.moves) == 1]
    assert (line.check, line.status) == ("references comply", WARN)
    assert f"bad: {len(bad)}, such as {', '.join(bad[:5])}" in line.measured
    kept = [episode for episode in shown if episode.task not in bad]
    assert review(found.rules, shown, kept, deadline_s=9.0)[1][-1].status == PASS
    failed = [replace(episode, solved=False) for episode in shown]
    assert review(found.rules, shown, failed, deadline_s=9.0)[1][-1].status == SKIP


def test_a_rule_that_hangs_is_named(tmp_path):
    hanging = "import time\nwhile state.calls: time.sleep(0.01)"
    found, config = domain(tmp_path, HEAD + PAIR.format(0.25, hanging.replace("\n", "\n    "), ANY))
    tried, lines = review(found.rules, scripted(found, config, 0.0), deadline_s=0.05)
    assert not tried.episodes
    assert [(line.check, line.status) for line in lines] == [("answers", FAIL)]
    assert "the rule bad has not judged" in lines[0].measured and "0.05 s" in lines[0].measured


def test_an_environment_that_hangs_is_named_wherever_scripts_play(tmp_path, monkeypatch):
    found, config = domain(tmp_path, HEAD + PAIR.format(0.25, *WELL))
    config = replace(config, turns=2, data=replace(config.data, env_timeout_s=0.05))
    renderer = Renderer(build_tokenizer(episode_texts(found, 20, config), 334))
    release = threading.Event()
    step = type(found.domain.env()).step

    def stuck(env, action):
        release.wait(20 if action.calls else 0)
        return step(env, action)

    monkeypatch.setattr(type(found.domain.env()), "step", stuck)
    plays = {
        "tokenizer": lambda: list(episode_texts(found, 20, config)),
        "warm start": lambda: demonstrate(found, renderer, found.train_tasks, config, (0,)),
        "rules": lambda: scripted(found, config, 0.0),
    }
    try:
        for play in plays.values():
            with pytest.raises(DomainError, match=r"task \d+: .* 0\.1 s; .*env_timeout_s=0\.05"):
                play()
    finally:
        release.set()


def test_the_command_lists_rules_and_fails_for_a_fault(tmp_path, capsys):
    _, config = domain(tmp_path, HEAD + PAIR.format(0.25, *WELL))
    pairs = [f"data.domain={config.data.domain}", f"data.rules={config.data.rules}"]
    assert cli.main(["rules", "quickstart", *pairs]) == 0
    text = capsys.readouterr().out
    assert "bad" in text and "fulfilment" in text and "7 pass" in text
    assert "rewards=outcome: rules are counted only" in " ".join(text.split())
    Path(config.data.rules).write_text(HEAD + PAIR.format(0.25, "return not action.calls", WELL[1]))
    other = Path(config.data.rules).rename(tmp_path / "other.py")
    assert cli.main(["rules", "quickstart", pairs[0], f"data.rules={other}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [rule["rule"] for rule in found["rules"]] == ["bad", "good"]
    assert cli.main(["rules", "quickstart"]) == 2
    assert "has no path rules" in capsys.readouterr().err


def test_a_probe_measures_each_reward_on_its_own():
    failed = group(episode(turn(0.0, -0.25)), episode(turn(0.0)))
    mixed = group(episode(turn(1.0)), episode(turn(0.0)))
    trained = ("outcome", "penalty", "fulfilment")
    found = measured([failed, mixed], Config(tasks=2, rewards=trained, warm=Warm()))
    assert (found.episodes, found.success, found.violation_free) == (4, 0.25, 0.75)
    assert found.hits == {"bad": 0.25}
    assert found.channels["outcome"].variance == 0.125
    assert found.channels["outcome"].live_groups == 0.5
    assert found.channels["outcome"].dead_updates == 0.25
    assert found.channels["penalty"].variance == 0.015625 / 2
    assert not found.channels["progress"].reachable
    assert found.trained.live_groups == 1.0 and found.trained.dead_updates == 0.0


@pytest.mark.parametrize(("name", "said"), [("a.xyz", "ends in one of"), ("b/a.svg", "no folder")])
def test_a_plot_that_cannot_be_written_is_named_before_anything_runs(
    tmp_path, capsys, name: str, said: str
):
    assert cli.main(["probe", "quickstart", "--plot", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_probe_runs_on_a_recipe(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(HEAD + PAIR.format(0.25, *WELL))
    plot = tmp_path / "probe.svg"
    pairs = ["warm.steps=20", f"data.rules={own}", "model.layers=1", "tasks=4"]
    assert cli.main(["probe", "quickstart", *pairs, "--json", "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"] == 64 * 5 and found["channels"]["path"]["variance"] > 0
    assert "<svg" in plot.read_text()
