"""The environments of the documentation run as printed."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from fastturn.cli import main
from fastturn.config import Config, Data
from fastturn.envs import Action, Task, ToolCall, load_domain

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
GUESS, LAMP, CAPITAL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_a_domain_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(GUESS)
    domain = load_domain(Config(data=Data(domain=f"{file}:Guess")))
    env = domain.env()
    env.start(domain.train_tasks[5])
    assert env.step(Action("3")).events == ("higher",)
    twin = domain.env()
    twin.restore(pickle.loads(pickle.dumps(env.snapshot())))
    for each in (env, twin):
        assert each.step(Action("x")).events == ("a_digit",)
        found = each.step(Action("5"))
        assert found.done and found.reward == 1.0 and found.events == ("found_in_3",)


def test_the_guide_keeps_to_its_own_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(bool(line.strip()) for line in GUESS.splitlines()) <= 30
    (command,) = re.findall(r"^ +fastturn (check-env .*)$", TEXT, re.MULTILINE)
    (tmp_path / "guess.py").write_text(GUESS)
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--json"]) == 0
    lines = {line["check"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines.pop("calls counted")["status"] == "skip"  # it has no tools
    assert {line["status"] for line in lines.values()} == {"pass"}


def test_an_environment_that_cannot_be_copied() -> None:
    names: dict[str, Any] = {}
    exec(LAMP, names)
    env, twin = names["lamp_env"](), names["lamp_env"]()
    env.start(Task("t"))
    assert env.step(Action("switch")).messages[0]["content"] == "It is on."
    twin.restore(pickle.loads(pickle.dumps(env.snapshot())))
    assert [each.step(Action("")).reward for each in (env, twin)] == [1.0, 1.0]


def test_stateless_tools() -> None:
    names: dict[str, Any] = {}
    exec(CAPITAL, names)
    env = names["make_env"]()
    env.start(Task("t", {"country": "France", "answer": "Paris"}))
    calls = tuple(ToolCall("capital", {"country": c}) for c in ("France", "Atlantis"))
    observation = env.step(Action("", calls))
    assert [m["content"] for m in observation.messages] == [
        "Paris",
        "error: no entry for 'Atlantis'",
    ]
    assert env.step(Action("Paris")).reward == 1.0
