"""Success on held-out tasks: of a run while it trains, and of finished models, tried several times.

model -> Opened (policy, tasks, sampler) -> tries under each of SETTINGS -> scores.measures
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastturn.config import SMOLLM2, Config, ConfigError, from_dict, override
from fastturn.demos import in_time
from fastturn.engines import ENGINES
from fastturn.envs import load_domain
from fastturn.envs.base import Action, Domain, Task, unusable
from fastturn.episode import Point, begin
from fastturn.meter import Follower
from fastturn.models import smollm2_folder
from fastturn.play import Unmetered
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.render import Renderer
from fastturn.scores import measures
from fastturn.tree import Rollout
from fastturn.types import Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Shares and means over tasks; a task whose environment failed counts as not solved."""

    success: float  # sampled at temperature 1
    greedy: float
    eval_tasks: int
    tool_calls_mean: float  # of the sampled episodes
    turns_mean: float
    violation_free: float  # no path rule broken, and ended; sampled
    violation_free_greedy: float
    clean_success: float  # solved, and no path rule broken; sampled
    clean_success_greedy: float
    hits: dict[str, float]  # path rules met, per sampled episode
    idle: float  # success of doing nothing

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def evaluate(rollout: Rollout, tasks: Sequence[Task]) -> Evaluation:
    """One sampled and one greedy episode a task; the draws are the same at every evaluation.

    Spans and event counts of `rollout` are left alone.
    """
    rollout = replace(rollout, clock=Unmetered())
    roots = rollout.roots(tasks)
    sampled, greedy = _play(rollout, roots, 1.0), _play(rollout, roots, 0.0)
    hits = Counter(hit.rule for t in sampled for turn in t.turns for hit in turn.path)
    calls = [sum(turn.events.count("tool_call") for turn in t.turns) for t in sampled]
    return Evaluation(
        success=sum(t.success for t in sampled) / len(tasks),
        greedy=sum(t.success for t in greedy) / len(tasks),
        eval_tasks=len(tasks),
        tool_calls_mean=sum(calls) / max(1, len(calls)),
        turns_mean=sum(len(t.turns) for t in sampled) / max(1, len(sampled)),
        violation_free=sum(t.violation_free for t in sampled) / len(tasks),
        violation_free_greedy=sum(t.violation_free for t in greedy) / len(tasks),
        clean_success=sum(t.clean_success for t in sampled) / len(tasks),
        clean_success_greedy=sum(t.clean_success for t in greedy) / len(tasks),
        hits={rule: n / max(1, len(sampled)) for rule, n in sorted(hits.items())},
        idle=idle(rollout.domain, tasks, rollout.config),
    )


def idle(domain: Domain, tasks: Sequence[Task], config: Config) -> float:
    """Share of the tasks that are solved by saying nothing, turn after turn. One whose environment
    fails at that is not; `DomainError` for one that hangs."""

    def solved(task: Task) -> bool:
        state, _ = begin(domain, task, config)
        env, reward = domain.env(), 0.0
        for turn in range(config.turns):
            try:
                if not turn:
                    env.restore(state)
                answer = env.step(Action(""))
            except Exception:  # whatever it is, the sampled episodes tell
                return False
            if unusable(answer):
                return False
            reward += answer.reward
            if answer.done:
                break
        return reward >= 1.0

    return sum(in_time(solved, tasks, config)) / len(tasks)


def _play(rollout: Rollout, roots: Sequence[Point], temperature: float) -> list[Trajectory]:
    """One episode from every root."""
    params = rollout.params(temperature)
    groups = rollout.fork(roots, 1, ("evaluation", temperature), params)
    return [group.siblings[0] for group in groups]


# --- finished models ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """How actions are drawn. Greedily one try says everything."""

    temperature: float
    top_p: float = 1.0

    def samples(self, asked: int) -> int:
        return asked if self.temperature else 1


# "paper": what Reverse-Turn Policy Optimization is tested with.
SETTINGS = {"greedy": Setting(0.0), "paper": Setting(0.6, 0.95), "train": Setting(1.0)}


@dataclass(frozen=True, slots=True)
class Tried:
    """A model under one setting: what it comes to, and its episodes, a list for each task."""

    setting: str
    measures: dict[str, Any]
    episodes: list[list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that was evaluated: where it is, its configuration, what it was asked and said."""

    path: Path
    config: Config
    tokenizer: Any
    tasks: list[Task]
    tried: list[Tried]


def configuration(path: Path, pairs: Sequence[str] = ()) -> tuple[Config, Path]:
    """The configuration that the model at `path` is evaluated by, and where its weights are. It is
    a run's own, so that tasks look as in training, or for a model alone the defaults (name
    `data.domain` and `data.path`); `pairs` override it.

    Raises `ConfigError` when `path` holds neither, or `pairs` name another model.
    """
    if named := [pair for pair in pairs if pair.startswith("model.path=")]:
        raise ConfigError(f"{named[0]}: eval takes the model from its first word; leave this out")
    if str(path) == SMOLLM2:
        path = smollm2_folder()
    if path.name == "final" and (path.parent / "config.json").exists():
        path = path.parent  # the model of a run is evaluated as the run was trained
    run = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    if "config" in run and not (path / "final").is_dir():
        raise ConfigError(f"{path} has no final model yet; finish the run with --resume")
    if "config" not in run and "model_type" not in run:
        raise ConfigError(f"{path} is neither a run nor a model in Hugging Face format")
    weights = path / "final" if "config" in run else path
    config = override(from_dict(run.get("config", {})), pairs)
    return (config if "config" in run else _with_model(config, weights)), weights


def _with_model(config: Config, weights: Path) -> Config:
    return replace(config, model=replace(config.model, path=str(weights)))


def examine(
    path: Path, pairs: Sequence[str], settings: Sequence[str], samples: int, progress: Progress
) -> Iterator[Subject]:
    """Try every held-out task under each of `settings` (of `SETTINGS`), `samples` times where
    actions are drawn; after each, the subject with what was tried so far. The sampler is the
    configuration's: this process, or servers, which get the model's weights first.
    """
    config, weights = configuration(path, pairs)
    torch.set_num_threads(config.threads)
    domain = load_domain(config)
    tasks = list(domain.eval_tasks)
    if not tasks:
        raise ConfigError(f"data.domain={config.data.domain!r}: it has no held-out tasks to try")
    policy, tokenizer = Policy.load(_with_model(config, weights))
    renderer = Renderer(tokenizer, domain.tools, config.context, config.model.max_context)
    sampler = ENGINES[config.rollout.engine](config, policy, Follower(), progress)
    try:
        sampler.publish(0)
        rollout = Rollout(domain, renderer, sampler, config, Unmetered())
        nothing = idle(domain, tasks, config)
        tried = []
        for name in settings:
            total = len(tasks) * SETTINGS[name].samples(samples)
            with progress.task(f"{path.name}: {name}", total) as bar:
                watched = replace(rollout, on_turn=lambda ended, tokens: bar.advance(ended))
                tried.append(_tried(watched, tasks, name, samples, nothing))
            yield Subject(path, config, tokenizer, tasks, list(tried))
    finally:
        sampler.close()


def _tried(
    rollout: Rollout, tasks: Sequence[Task], name: str, samples: int, nothing: float
) -> Tried:
    setting = SETTINGS[name]
    params = rollout.params(setting.temperature, setting.top_p)
    roots, samples = rollout.roots(tasks), setting.samples(samples)
    episodes: dict[str, list[Trajectory]] = {task.id: [] for task in tasks}
    for number in range(
        samples
    ):  # apart, so that an environment that fails loses its episode alone
        for group in rollout.fork(roots, 1, ("evaluation", name, number), params):
            episodes[group.task].append(group.siblings[0])
    tries = list(episodes.values())
    return Tried(name, {**measures(tries, samples), "idle": nothing}, tries)
