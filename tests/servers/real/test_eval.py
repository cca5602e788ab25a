"""`fastturn eval` through a real server says what it says in this process, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastturn.evaluate import Subject, examine
from fastturn.progress import Progress
from fastturn.types import Trajectory

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("live", ["tied"], indirect=True)]

TASKS = [
    *("data.domain=calculator", "data.eval_tasks=24", "turns=3", "model.max_context=256"),
    *("sampling.turn_tokens=24", "sampling.episode_tokens=48"),
]
TIE = 1e-4  # of two logits: what sums of 128 float32 terms in another order may change


def tried(folder: Path, *pairs: str) -> Subject:
    (subject,) = examine(folder, [*TASKS, *pairs], ["greedy"], 1, Progress(quiet=True))
    return subject


def first_difference(one: Trajectory, other: Trajectory) -> tuple[list[int], int, int] | None:
    """What both have read where they part, and the two ids that follow; None if they never do."""
    for turn, beside in zip(one.turns, other.turns, strict=False):
        context = turn.boundary.context_T.tolist()
        assert context == beside.boundary.context_T.tolist()
        said, heard = turn.completion.action_A.tolist(), beside.completion.action_A.tolist()
        for place, (a, b) in enumerate(zip(said, heard, strict=False)):
            if a != b:
                return context + said[:place], a, b
        assert len(said) == len(heard)
    assert len(one.turns) == len(other.turns) and one.ending == other.ending
    return None


def test_greedy_transcripts_are_those_of_this_process(live: Any) -> None:
    here = tried(live.folder)
    there = tried(live.folder, "rollout.engine=vllm", f"rollout.urls={live.server.url}")
    pairs = list(zip(here.tried[0].episodes, there.tried[0].episodes, strict=True))
    assert len(pairs) == 24 and all(len(a) == len(b) == 1 for a, b in pairs)  # none is lost
    model = type(live.model).from_pretrained(live.folder, dtype=torch.float32).eval()
    parted = 0
    for (one,), (other,) in pairs:
        if (found := first_difference(one, other)) is not None:
            read, a, b = found
            with torch.no_grad():
                logits_V = model(torch.tensor([read])).logits[0, -1]
            assert abs(logits_V[a] - logits_V[b]) < TIE, (logits_V[a].item(), logits_V[b].item())
            parted += 1
    assert parted <= 2  # ties are rare
    if not parted:
        assert here.tried[0].measures == there.tried[0].measures
