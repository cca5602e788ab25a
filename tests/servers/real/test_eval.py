"""`fastturn eval` through a real server says what it says in this process, id by id."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastturn import cli
from fastturn.evaluate import Subject, examine
from fastturn.progress import Progress
from fastturn.types import Trajectory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("live", ["tied"], indirect=True),
]

TASKS = 24
WARM = ["warm.steps=120", "warm.batch=16", "iterations=0", f"data.eval_tasks={TASKS}"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the served shape that only imitated demonstrations: its model calls the tool."""
    out = tmp_path_factory.mktemp("taught") / "run"
    asked = ["train", "quickstart", "model.width=128", "trackers=none", "--out", str(out)]
    assert cli.main([*asked, *WARM]) == 0
    return out


def tried(run: Path, *pairs: str) -> Subject:
    (subject,) = examine(run, pairs, ["greedy"], 1, Progress(quiet=True))
    return subject


def transcript(episode: Trajectory) -> list[Any]:
    """Of every turn what was read, what was said and what happened; then how it ended."""
    turns = [
        (turn.boundary.context_T.tolist(), turn.completion.action_A.tolist(), turn.events)
        for turn in episode.turns
    ]
    return [*turns, episode.ending, episode.discounted_return()]


def test_greedy_transcripts_are_those_of_this_process(live: Any, taught: Path) -> None:
    here = tried(taught)
    there = tried(taught, "rollout.engine=vllm", f"rollout.urls={live.server.url}")
    episodes = [[episode for (episode,) in of.tried[0].episodes] for of in (here, there)]
    assert [len(of) for of in episodes] == [TASKS, TASKS]  # none is lost
    for one, other in zip(*episodes, strict=True):
        assert transcript(one) == transcript(other), one.task
    assert here.tried[0].measures == there.tried[0].measures
    turns = [turn for episode in episodes[0] for turn in episode.turns]
    events = Counter(event for turn in turns for event in turn.events)
    assert events["tool_call"] >= TASKS and len(turns) >= 2 * TASKS
