"""The doctor: every check passes where nothing is wrong, and finds what was made wrong."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastturn import cli, engines, patient, run
from fastturn.checks import CHECKS
from fastturn.config import override
from fastturn.doctor import examine
from fastturn.findings import Line, show
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.recipes import quickstart
from fastturn.sampler.local import LocalSampler
from fastturn.tokenizer import build_tokenizer

SMALL = ("turns=3", "sampling.turn_tokens=8", "data.eval_tasks=4", "model.layers=1")
SICK = """
import dataclasses, importlib.util, random
spec = importlib.util.spec_from_file_location("parity_of_doctor", {parity!r})
parity = importlib.util.module_from_spec(spec)
import sys
sys.modules[spec.name] = parity
spec.loader.exec_module(parity)

class Env(parity.GradedParity):
    def step(self, action):
        answer = super().step(action)
        {step}

    def snapshot(self):
        {snapshot}

    def restore(self, snapshot):
        {restore}

class Domain(parity.Domain):
    def env(self):
        return Env()
"""
HEALTHY = {
    "step": "return answer",
    "snapshot": "return super().snapshot()",
    "restore": "super().restore(snapshot)",
}


@pytest.fixture
def check_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Line]]:
    """Findings by check, of a recipe whose environment is healthy but for some lines."""
    monkeypatch.setattr(patient, "TASKS", 4)

    def examined(*pairs: str, **sick: str) -> dict[str, Line]:
        parity = str(Path(__file__).with_name("parity.py"))
        file = tmp_path / f"domain_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(SICK.format(parity=parity, **HEALTHY | sick))
        config = override(quickstart(), (*SMALL, f"data.domain={file}:Domain", *pairs))
        lines = examine(config, Progress(quiet=True, stream=io.StringIO()))
        assert [line.check for line in lines] == [name for name, *_ in CHECKS]
        assert all(line.remedy for line in lines if line.status in ("warn", "fail"))
        return {line.check: line for line in lines}

    return examined


def test_nothing_fails_on_a_healthy_recipe(check_up):
    lines = check_up("group_size=12", "sampling.turn_tokens=3")
    assert not [line for line in lines.values() if line.status == "fail"]
    for check in ("settings", "opening", "chat template", "context kept", "agreement"):
        assert lines[check].status == "pass", lines[check]
    for check in ("publish round trip", "snapshots", "demonstrations"):
        assert lines[check].status == "pass", lines[check]
    for check in ("servers answer", "server flags", "log-probabilities"):
        assert lines[check].status == "skip" and "local" in lines[check].measured


def test_the_weights_are_those_of_before(check_up, monkeypatch):
    seen: list[tuple[Policy, dict[str, Any]]] = []
    build = Policy.build.__func__

    def remembered(cls: Any, *args: Any) -> Policy:
        made = build(cls, *args)
        seen.append((made, {n: t.clone() for n, t in made.state_dict().items()}))
        return made

    monkeypatch.setattr(Policy, "build", classmethod(remembered))
    assert check_up()["publish round trip"].status == "pass"
    ((policy, before),) = seen
    assert all((before[n] == t).all() for n, t in policy.state_dict().items())


def test_an_environment_that_answers_by_chance(check_up):
    line = check_up(step="return dataclasses.replace(answer, reward=random.random())")["snapshots"]
    assert line.status == "fail" and "the same action gave" in line.measured
    assert "restore must bring back" in line.remedy


def test_an_environment_that_plays_on_in_its_snapshot(check_up):
    leak = {"snapshot": "return self", "restore": "self.__dict__ = snapshot.__dict__"}
    line = check_up(**leak)["snapshots"]
    assert line.status == "fail" and "the same action gave" in line.measured


def test_an_environment_that_changes_its_snapshot(check_up):
    line = check_up(
        snapshot="return {'state': super().snapshot(), 'restored': []}",
        restore="super().restore(snapshot['state']); snapshot['restored'].append(1)",
    )["snapshots"]
    assert line.status == "fail" and "changed the snapshot" in line.measured
    assert "copy" in line.remedy


def test_an_environment_whose_restore_forgets(check_up, stopping):
    line = check_up(
        step="self.count = getattr(self, 'count', 0) + 1; "
        "return dataclasses.replace(answer, done=False, reward=float(self.count))",
    )["snapshots"]
    assert line.status == "fail" and "in the episode it was" in line.measured


def test_an_environment_that_raises(check_up):
    lines = check_up(
        restore="super().restore(snapshot); self.restored = True",
        step="return [][0] if hasattr(self, 'restored') else answer",
    )
    assert lines["snapshots"].status == "fail" and "IndexError" in lines["snapshots"].measured
    assert lines["demonstrations"].status == "pass"
    assert check_up(step="return [][0]")["opening"].status == "fail"


def test_rewards_that_nobody_can_earn(check_up):
    sick = {"step": "return dataclasses.replace(answer, reward=0.0)"}
    lines = check_up("warm.steps=0", **sick)
    assert lines["demonstrations"].status == "fail"
    assert lines["outcome reached"].status == "fail"
    assert "equal returns" in lines["outcome reached"].remedy
    assert lines["mixed groups"].status == "warn" and "0%" in lines["mixed groups"].measured
    early = check_up("warm.steps=5", **sick)["outcome reached"]
    assert early.status == "warn" and "warm start" in early.remedy


SAID = """return dataclasses.replace(answer, done=False, reward=float(len(action.text) % 2),
                                     events=("tool_call",))"""


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler whose actions end at every other id, so that an untrained policy ends them."""
    draw = LocalSampler.sample

    def sample(self: LocalSampler, requests: Any, params: Any) -> Any:
        return draw(self, requests, replace(params, stop_ids=tuple(range(0, 300, 2))))

    monkeypatch.setattr(LocalSampler, "sample", sample)


def test_episodes_that_differ_and_end_by_themselves(check_up, stopping):
    lines = check_up("warm.steps=0", "sampling.turn_tokens=24", step=SAID)
    for check in ("outcome reached", "mixed groups", "truncation", "tool calls", "context kept"):
        assert lines[check].status == "pass", lines[check]
    assert lines["mixed groups"].measured.endswith(f"of {quickstart().group_size}")


def test_contexts_that_begin_anew_every_turn(check_up, stopping, monkeypatch):
    monkeypatch.setattr("fastturn.checks.LEAST_KEPT", 1.01)
    line = check_up(step=SAID)["context kept"]
    assert line.status == "warn" and "context=keep" in line.remedy


def test_calls_that_cannot_be_read(check_up, stopping):
    bad = SAID.replace('("tool_call",)', '("tool_call", "bad_json")')
    line = check_up(step=bad)["tool calls"]
    assert line.status == "warn" and "most often: bad_json" in line.measured


def test_weights_that_do_not_arrive(check_up, monkeypatch):
    class Stale(LocalSampler):
        """Keeps the weights that it was made with."""

        def __init__(self, policy: Policy) -> None:
            model = copy.deepcopy(policy.model)
            super().__init__(Policy(model, policy.backend.attention))

    monkeypatch.setitem(engines.ENGINES, "local", lambda config, policy, *_: Stale(policy))
    lines = check_up()
    assert lines["agreement"].status == "pass"
    assert lines["publish round trip"].status == "fail"
    assert "off the uniform" in lines["publish round trip"].measured


def test_one_tensor_that_does_not_arrive(check_up, monkeypatch):
    """All weights zero look right when one stays behind a zero; changed ones do not."""

    class Behind(LocalSampler):
        def __init__(self, policy: Policy) -> None:
            self.source = policy
            super().__init__(Policy(copy.deepcopy(policy.model), policy.backend.attention))

        def publish(self, version: int) -> None:
            late = "layers.0.mlp.down_proj.weight"
            state = {n: t for n, t in self.source.state_dict().items() if late not in n}
            self.policy.load_state_dict(state, strict=False)
            super().publish(version)

    monkeypatch.setitem(engines.ENGINES, "local", lambda config, policy, *_: Behind(policy))
    line = check_up()["publish round trip"]
    assert line.status == "fail" and "nats" in line.measured and "other weights" in line.remedy


def test_another_distribution_than_the_recipes(check_up, monkeypatch):
    class Hot(LocalSampler):
        def sample(self, requests: Any, params: Any) -> Any:
            return super().sample(requests, replace(params, temperature=1.5))

    monkeypatch.setitem(engines.ENGINES, "local", lambda config, policy, *_: Hot(policy))
    line = check_up()["agreement"]
    assert line.status == "fail" and "top-p" in line.remedy and "last" in line.measured


THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_drops_thinking_is_named_with_its_policy(check_up, monkeypatch):
    def stripping(*args: Any) -> Any:
        tokenizer = build_tokenizer(*args)
        tokenizer.chat_template = THINKING
        return tokenizer

    monkeypatch.setattr(run, "build_tokenizer", stripping)
    line = check_up()["chat template"]
    assert line.status == "warn" and "context=strip_think" in line.remedy
    assert check_up("context=strip_think")["chat template"].status == "pass"


def test_budgets_that_cut(check_up):
    line = check_up("sampling.turn_tokens=1", "warm.steps=0")["truncation"]
    assert line.status == "warn" and "sampling.turn_tokens (now 1)" in line.remedy


def test_settings_that_the_dry_run_refuses_leave_the_rest_untried(check_up):
    lines = check_up("device=cuda")
    assert lines["settings"].status == "fail" and "CUDA" in lines["settings"].measured
    assert lines["opening"].status == "fail"
    assert lines["agreement"].status == "skip" and "opened" in lines["agreement"].measured


def test_a_server_that_is_not_there(check_up):
    lines = check_up("rollout.engine=vllm", "rollout.urls=http://127.0.0.1:9")
    assert (
        lines["servers answer"].status == "fail"
        and "127.0.0.1:9" in lines["servers answer"].measured
    )
    assert lines["server flags"].status == "skip" and lines["opening"].status == "fail"


def test_the_command_prints_a_table_and_says_by_its_status(capsys, monkeypatch):
    monkeypatch.setattr(patient, "TASKS", 2)
    assert cli.main(["doctor", "quickstart", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["check"] for line in found] == [name for name, *_ in CHECKS]
    assert cli.main(["doctor", "quickstart", "device=cuda"]) == 1
    text = capsys.readouterr().out
    assert "publish round trip" in text and "fail" in text
    assert cli.main(["doctor", "quickstar"]) == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits(width):
    lines = [Line("agreement", "warn", "off by 1e-3 " * 9, "start it with another flag " * 5)]
    console = Console(file=io.StringIO(), width=width)
    show("doctor", lines, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "->" in text and "1 warn" in text


RULES = """
from fastturn.rules import fulfilment, penalty

@penalty(0.9, twin="good")
def bad(state, action):
    {bad}

@fulfilment(0.25, twin="bad")
def good(state, action):
    return bool(action.text)
"""


@pytest.mark.parametrize(
    ("bad", "check", "status", "measured"),
    [
        ("return not action.text", "path rules", "pass", "hits an episode: bad 0.00"),
        ("return action.call.name == 'x'", "opening", "fail", "rule bad raised AttributeError"),
        ("import random; return random.random() < 0.5", "path rules", "fail", "bad gave"),
        ("return bool(action.text)", "path rules", "warn", "path returns are worth"),
    ],
)
def test_path_rules_are_tried_on_what_the_policy_does(
    check_up, tmp_path: Path, bad: str, check: str, status: str, measured: str
):
    file = tmp_path / "rules.py"
    file.write_text(RULES.format(bad=bad))
    line = check_up(f"data.rules={file}")[check]
    assert (line.status, measured in line.measured) == (status, True), line


def test_tasks_without_rules_are_skipped(check_up):
    assert check_up()["path rules"].status == "skip"
