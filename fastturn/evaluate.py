"""Success on held-out tasks: sampled at temperature 1 and greedy, with tool statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastturn.envs.base import Task
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

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def evaluate(rollout: Rollout, tasks: Sequence[Task]) -> Evaluation:
    """One sampled and one greedy episode a task; the draws are the same at every evaluation.

    Counts of events in the meter are those of training: evaluation leaves them alone.
    """
    roots = rollout.roots(tasks)
    sampled = play(rollout, roots, 1.0)
    greedy = play(rollout, roots, 0.0)
    calls = [sum("tool_call" in turn.events for turn in t.turns) for t in sampled]
    return Evaluation(
        success=sum(t.success for t in sampled) / len(tasks),
        greedy=sum(t.success for t in greedy) / len(tasks),
        eval_tasks=len(tasks),
        tool_calls_mean=sum(calls) / max(1, len(calls)),
        turns_mean=sum(len(t.turns) for t in sampled) / max(1, len(sampled)),
    )


def play(rollout: Rollout, roots: Sequence[Any], temperature: float) -> list[Trajectory]:
    """One episode from every root."""
    key = ("evaluation", temperature)
    groups = rollout.fork(roots, 1, key, temperature, span="evaluation")
    return [group.siblings[0] for group in groups]
