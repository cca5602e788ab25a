"""Success on held-out tasks: sampled at temperature 1 and greedy, with tool statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastturn.config import Config, ConfigError, from_dict, override
from fastturn.envs import load_domain
from fastturn.envs.base import Task
from fastturn.episode import Point
from fastturn.play import Unmetered
from fastturn.policy import Policy
from fastturn.render import Renderer
from fastturn.sampler.local import LocalSampler
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
    )


def evaluate_path(path: Path, pairs: Sequence[str] = ()) -> dict[str, Any]:
    """`Evaluation.record()` of a finished run's model, or of a model in Hugging Face format.

    `pairs` override the run's configuration (a model alone starts from the defaults, so name
    `data.domain` and `data.path` for it). Raises `ConfigError` when `path` holds neither.
    """
    if path.name == "final" and (path.parent / "config.json").exists():
        path = path.parent  # the model of a run is evaluated as the run was trained
    run = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    if "config" in run and not (path / "final").is_dir():
        raise ConfigError(f"{path} has no final model yet; finish the run with --resume")
    if "config" not in run and "model_type" not in run:
        raise ConfigError(f"{path} is neither a run nor a model in Hugging Face format")
    config = override(from_dict(run.get("config", {})), pairs)
    weights = path / "final" if "config" in run else path
    if "config" not in run:
        config = _with_model(config, weights)
    torch.set_num_threads(config.threads)
    domain = load_domain(config)
    policy, tokenizer = Policy.load(_with_model(config, weights))
    renderer = Renderer(tokenizer, domain.tools, config.context, config.model.max_context)
    rollout = Rollout(domain, renderer, LocalSampler(policy), config, Unmetered())
    return evaluate(rollout, list(domain.eval_tasks)).record()


def _with_model(config: Config, weights: Path) -> Config:
    return replace(config, model=replace(config.model, path=str(weights)))


def _play(rollout: Rollout, roots: Sequence[Point], temperature: float) -> list[Trajectory]:
    """One episode from every root."""
    groups = rollout.fork(roots, 1, ("evaluation", temperature), temperature)
    return [group.siblings[0] for group in groups]
