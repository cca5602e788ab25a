"""The environments of the documentation run as printed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastturn.config import Config, ConfigError, Data
from fastturn.envs import Action, Task, ToolCall, load_domain

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
GUESS, CAPITAL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


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
        assert each.step(Action("x")).events == ("no_digit",)
        assert each.step(Action("5")).reward == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match=r"warm\.steps=0"):
        domain.demonstrator(domain.train_tasks[0], np.random.default_rng(0))


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
