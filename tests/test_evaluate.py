"""`fastturn eval`: the numbers of hand-made episodes, and a model tried from the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastturn import cli
from fastturn.config import override
from fastturn.envs import load_domain
from fastturn.envs.base import DomainError, Task
from fastturn.episode import begin
from fastturn.evaluate import idle
from fastturn.policy import Policy
from fastturn.recipes import quickstart
from fastturn.run import TOKENIZER_EPISODES
from fastturn.sampler.base import SamplingParams
from fastturn.sampler.draw import draw, nucleus
from fastturn.sampler.local import LocalSampler
from fastturn.sampler.server import EngineError
from fastturn.scores import failed_calls, interval, measures, pass_at_k
from fastturn.tokenizer import build_tokenizer, episode_texts
from fastturn.types import Boundary, Completion, Ending, Stop, Trajectory, Turn


def episode(
    *events: tuple[str, ...], reward: float = 0.0, ending: Ending = Ending.FINISHED
) -> Trajectory:
    """Turns of three tokens with these events; the last one earns the reward."""
    done = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), 0, Stop.STOP)
    boundary = Boundary(0, np.ones(2, np.int32))
    rewards = [0.0] * (len(events) - 1) + [reward]
    turns = [Turn(boundary, done, r, e) for r, e in zip(rewards, events, strict=True)]
    return Trajectory("task", 0, tuple(turns), ending)


@pytest.mark.parametrize(("n", "solved", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 2), (6, 5, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, solved: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_intervals_hold_the_mean_and_shrink_with_tasks() -> None:
    few, many = interval([0.0, 1.0] * 5), interval([0.0, 1.0] * 200)
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
    assert interval([0.5] * 7) == (0.5, 0.5)


def test_measures_of_hand_made_episodes() -> None:
    right = episode(("tool_call",), ("answer",), reward=1.0)
    bad = episode(("tool_call", "bad_json", "tool_call"), ("answer",), reward=0.25)
    cut = episode(("truncated",), ending=Ending.TRUNCATED)
    found = measures([[right, bad], [cut]], samples=2)  # one episode was lost
    assert (found["pass@1"], found["pass@2"]) == (0.25, 0.5)
    assert failed_calls(bad) == 1 and found["tool_calls"] == 1.0
    assert found["tool_success"] == pytest.approx(2 / 3)
    assert found["reward"] == pytest.approx(1.25 / 3)
    assert found["reward_interval"] == (0.0, pytest.approx(0.625))  # of the tasks' 0.625 and 0
    assert found["events"] == {"answer": pytest.approx(2 / 3), "truncated": pytest.approx(1 / 3)}
    assert found["tokens_per_success"] == 15 and found["response_tokens"] == 5
    assert found["ended_truncated"] == pytest.approx(1 / 3) and found["lost"] == 1
    assert found["failures"] == {"wrong, a call failed": 0.25, "truncated": 0.25}


@pytest.mark.parametrize(
    ("events", "ending", "failed"),
    [
        (("tool_call", "spoiled"), Ending.FINISHED, 0),  # the verdict of an episode that is over
        (("tool_call", "answer"), Ending.FINISHED, 0),
        (("tool_call", "unknown_tool"), Ending.FINISHED, 1),
        (("tool_call", "bad_json", "tool_call", "late"), Ending.FINISHED, 1),
        (("tool_call", "out_of_stock"), Ending.TURNS, 1),  # a name of the environment's own
    ],
)
def test_verdicts_are_no_failed_calls(events: tuple[str, ...], ending: Ending, failed: int) -> None:
    assert failed_calls(episode(("tool_call",), events, ending=ending)) == failed


def test_a_nucleus_is_the_fewest_likeliest_ids() -> None:
    logits_RV = torch.tensor([[0.2, 0.5, 0.3], [0.98, 0.01, 0.01]]).log()
    assert nucleus(logits_RV, 0.7).isfinite().tolist() == [
        [False, True, True],
        [True, False, False],
    ]
    uniform_R = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    token_R, logprob_R = draw(logits_RV[:1].expand(50, -1), uniform_R, 1.0, top_p=0.7)
    assert set(token_R.tolist()) == {1, 2}
    assert logprob_R[token_R == 1][0].exp().item() == pytest.approx(0.625)


def test_doing_nothing_solves_no_sum() -> None:
    config = quickstart()
    domain = load_domain(config)
    assert idle(domain, list(domain.eval_tasks)[:8], config) == 0.0


BROKEN = """
import time
from fastturn.envs import Observation, Task

class Domain:
    tools = []
    def __init__(self, config):
        self.train_tasks = [Task("t", {"n": 1})]
        self.eval_tasks = [Task(f"e-{n}", {"n": n}) for n in (2, 3)]
    env = lambda self: self.Env()
    def demonstrator(self, task, rng):
        return lambda messages: "x"
    class Env:
        def start(self, task): return [{"role": "user", "content": "1+1"}]
        def snapshot(self): return 0
        def restore(self, state): pass
        def step(self, action): return Observation((), 1.0, True)

class Starts(Domain):
    class Env(Domain.Env):
        def start(self, task): raise KeyError("boom")
class Steps(Domain):
    class Env(Domain.Env):
        def step(self, action): raise KeyError("boom")
class Hangs(Domain):
    class Env(Domain.Env):
        def step(self, action): time.sleep(60)
class Empty(Domain):
    def __init__(self, config): self.train_tasks = self.eval_tasks = []
class Made(Domain):
    def __init__(self, config): raise RuntimeError("no database")
class Bare:
    def __init__(self, config): self.tools = []
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Starts", "task e-2: its environment does not start (KeyError: 'boom')"),
        ("Hangs", "task e-2: a scripted episode of at most 4 turns has not ended within"),
        ("Empty", "it has no held-out tasks to try"),
        ("Made", "it raised RuntimeError: no database"),
        ("Bare", "it made a Bare without train_tasks, eval_tasks, env, demonstrator"),
    ],
)
def test_a_broken_environment_is_named(
    name: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    limits = ["model.max_context=512", "data.env_timeout_s=0.1"]
    asked = ["eval", str(model), "--tasks", f"{file}:{name}", "--out", str(tmp_path / "out")]
    assert cli.main([*asked, *limits]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Starts", "task t: its scripted episode raised KeyError: 'boom'"),
        ("Hangs", "task t: a scripted episode of at most 4 turns has not ended within"),
        ("Empty", "it has 0 training and 0 held-out tasks; a run needs some of both"),
    ],
)
@pytest.mark.parametrize("command", ["train", "probe"])
def test_no_run_begins_in_a_broken_environment(
    command: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    out = ["--out", str(tmp_path / "out")] if command == "train" else []
    pairs = [f"data.domain={file}:{name}", "data.env_timeout_s=0.1", "trackers=none"]
    assert cli.main([command, "quickstart", *out, *pairs]) == 2
    assert message in capsys.readouterr().err


PARTS = """
class Alike(Domain):
    def __init__(self, config):
        super().__init__(config)
        self.eval_tasks = [Task("e", {"n": n}) for n in (2, 3)]

class Texts(Domain):
    def __init__(self, config): self.train_tasks, self.eval_tasks = ["a"], ["b"]

class Generated(Domain):
    def __init__(self, config):
        super().__init__(config)
        self.train_tasks = iter(self.train_tasks)

class Named(Domain):
    tools = ["search"]

class Says(Domain):
    class Env(Domain.Env):
        def start(self, task): return "hello"

class Stateless(Domain):
    class Env(Domain.Env):
        def snapshot(self): raise OSError("no state")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Alike", "2 held-out tasks have the id 'e', by which episodes are told apart"),
        ("Texts", "one of its tasks is str, expected a fastturn.envs.Task"),
        ("Generated", "its train_tasks are list_iterator, expected a list"),
        ("Named", "one of its tools is str, expected its schema"),
        ("Says", "does not start (TypeError: the messages are str, expected a list of messages)"),
        ("Stateless", "does not start (OSError: no state)"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval", "check-env"])
def test_a_domain_of_the_wrong_kind_is_named(
    command: str,
    name: str,
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "parts.py", str(tmp_path / "out")
    file.write_text(BROKEN + PARTS)
    asked = {
        "train": ["train", "quickstart", "--out", out, f"data.domain={file}:{name}"],
        "eval": ["eval", str(model), "--tasks", f"{file}:{name}", "--out", out],
        "check-env": ["check-env", f"{file}:{name}"],
    }[command]
    status = cli.main(asked)
    told = capsys.readouterr()
    if command == "check-env" and name in ("Says", "Stateless"):
        assert status == 1  # it says more of them than this line
    else:
        scripted = (command, name) == ("train", "Says")  # the warm start meets it first
        named = "its scripted episode raised AttributeError" if scripted else message
        assert status == 2 and named in told.err


ANSWERS = {
    "Nothing": "None",
    "NotFinite": "Observation((), float('nan'), True)",
    "Worded": "Observation((), '1', True)",
    "Bare": "Observation(('hi',))",
    "Numbered": "Observation(({'role': 'user', 'content': 5},))",
    "Assisting": "Observation(({'role': 'assistant', 'content': 'x'},))",
    "Spelled": "Observation((), 1.0, True, events='answer')",
}


def test_an_answer_of_the_wrong_kind_loses_its_episode(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.py"
    file.write_text(
        BROKEN
        + "".join(
            f"\nclass {name}(Domain):\n    class Env(Domain.Env):\n"
            f"        def step(self, action): return {answer}\n"
            for name, answer in ANSWERS.items()
        )
    )
    for name in ANSWERS:
        out = tmp_path / name
        asked = ["eval", str(model), "--tasks", f"{file}:{name}", "--out", str(out)]
        limits = [
            "model.max_context=512",
            "sampling.turn_tokens=400",
            "sampling.episode_tokens=400",
        ]
        assert cli.main([*asked, *limits, "--settings", "train", "--samples", "4"]) == 0
        (subject,) = json.loads((out / "eval.json").read_text())["models"]
        tried = subject["settings"]["train"]
        assert tried["lost"] > 0 and tried["pass@1"] == 0.0, name
        kept = [episode for several in tried["episodes"].values() for episode in several]
        assert {episode["ending"] for episode in kept} <= {"truncated"}, name


def test_an_environment_that_starts_too_late_is_named(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        BROKEN
        + """
class Late(Domain):
    class Env(Domain.Env):
        def start(self, task): time.sleep(60)
"""
    )
    config = override(quickstart(), [f"data.domain={file}:Late", "data.env_timeout_s=0.1"])
    with pytest.raises(DomainError, match=r"task e: .*does not start \(DeadlineError: no answer"):
        begin(load_domain(config), Task("e"), config)


def test_an_environment_that_fails_loses_its_episodes_and_no_more(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    asked = ["eval", str(model), "--tasks", f"{file}:Steps", "--out", str(tmp_path)]
    limits = ["model.max_context=512", "sampling.turn_tokens=400", "sampling.episode_tokens=400"]
    assert cli.main([*asked, *limits, "--settings", "train", "--samples", "4"]) == 0
    (found,) = json.loads((tmp_path / "eval.json").read_text())["models"]
    tried = found["settings"]["train"]
    assert tried["lost"] > 0 and tried["idle"] == 0.0
    assert tried["lost"] + sum(map(len, tried["episodes"].values())) == 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the quickstart, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = override(quickstart(), ["model.layers=1", "model.width=32", "model.max_context=512"])
    texts = episode_texts(load_domain(config), TOKENIZER_EPISODES, config)
    tokenizer = build_tokenizer(texts, config.model.vocabulary)
    Policy.build(config, tokenizer).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_models_are_tried_and_written_down(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["model.max_context=512", "sampling.turn_tokens=8", "data.eval_tasks=3"]
    asked = ["eval", str(model), "--beside", str(model), "--tasks", "calculator", "--samples", "2"]
    assert cli.main([*asked, "--out", str(tmp_path), *limits]) == 0
    assert "pass@1" in capsys.readouterr().out
    found = json.loads((tmp_path / "eval.json").read_text())
    one, other = (m["settings"] for m in found["models"])
    assert one == other and set(one) == {"greedy", "paper"}
    assert one["paper"]["top_p"] == 0.95 and one["paper"]["idle"] == 0.0
    assert [len(tries) for tries in one["paper"]["episodes"].values()] == [2, 2, 2]
    assert [len(tries) for tries in one["greedy"]["episodes"].values()] == [1, 1, 1]
    assert "| pass@2 |" in (tmp_path / "eval.md").read_text()
    page = (tmp_path / "eval.html").read_text()
    assert page.count('class="card"') == 6 and "<script" not in page
    assert page.count(f'<div class="model">{model}</div>') == 6


def test_a_setting_that_is_not_there(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(model), "--settings", "greed"]) == 2
    assert "expected some of greedy, paper, train" in capsys.readouterr().err


def run(*words: object) -> int:
    limits = ("model.max_context=512", "sampling.turn_tokens=8", "data.eval_tasks=3")
    return cli.main(["eval", *map(str, words), "--tasks", "calculator", *limits])


def test_what_was_finished_is_written_when_the_rest_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = LocalSampler.sample

    def dies(sampler: LocalSampler, requests: Any, params: SamplingParams) -> Any:
        if params.temperature:
            raise EngineError("no rollout server came back", phase="sample", url="http://a:1")
        return sample(sampler, requests, params)

    monkeypatch.setattr(LocalSampler, "sample", dies)
    assert run(model, "--settings", "greedy,paper", "--out", tmp_path) == 1
    said = capsys.readouterr()
    assert "no rollout server came back" in said.err and str(tmp_path / "eval.json") in said.out
    (found,) = json.loads((tmp_path / "eval.json").read_text())["models"]
    assert set(found["settings"]) == {"greedy"} and found["settings"]["greedy"]["lost"] == 0
    assert (tmp_path / "eval.html").read_text().count('class="card"') == 3


def test_what_cannot_be_tried_is_said_before_anything_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for words, message in (
        ([tmp_path / "nowhere"], "there is no such folder"),
        ([tmp_path], "it holds no config.json"),
        ([model, "--beside", tmp_path / "nowhere"], "there is no such folder"),
        ([model, "--out", tmp_path / "file"], "no folder can be made there"),
        ([model, "model.path=other"], "model.path=other: eval takes the model from"),
        ([model, "--samples", "0"], "'0': expected a whole number, at least 1"),
    ):
        try:
            assert run(*words) == 2
        except SystemExit as stopped:
            assert stopped.code == 2
        assert message in capsys.readouterr().err
