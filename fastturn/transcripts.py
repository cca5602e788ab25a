"""Episodes as text, for the report: what the model saw and did, what each turn was credited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastturn.credit import Credits
from fastturn.types import Credit

A_STAGE = 2  # transcripts kept of one stage


def transcripts(
    credits: Credits, tokenizer: Any, iteration: int, stage: int
) -> Iterator[dict[str, Any]]:
    """The best and the worst credited trajectory of the first group that has a signal."""
    for group in credits:
        live = [credit for credit in group if not credit.silent]
        if live:
            ranked = sorted(live, key=lambda credit: float(credit.advantage_U.sum()))
            for credit in (ranked[0], ranked[-1])[:A_STAGE]:
                yield _transcript(credit, tokenizer, iteration, stage)
            return


def _transcript(credit: Credit, tokenizer: Any, iteration: int, stage: int) -> dict[str, Any]:
    trajectory = credit.trajectory
    turns = []
    for turn, advantage, weight in zip(
        trajectory.turns, credit.advantage_U.tolist(), credit.weight_U.tolist(), strict=True
    ):
        turns.append(
            {
                "context": tokenizer.decode(turn.boundary.context_T),
                "action": tokenizer.decode(turn.completion.action_A),
                "reward": turn.reward,
                "advantage": advantage if weight else None,
                "events": [*turn.events, *(f"{hit.rule} {hit.value:+g}" for hit in turn.path)],
            }
        )
    return {
        "iteration": iteration,
        "task": trajectory.task,
        "stage": stage,
        "turns": turns,
        "return": trajectory.discounted_return(),
        "ending": str(trajectory.ending),
    }
