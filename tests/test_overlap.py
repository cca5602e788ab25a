"""Training while servers sample: the same gradient in any chunks, and the seconds that it saves."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastturn import engines, trainer, tree
from fastturn.bench import overlap
from fastturn.beside import Beside
from fastturn.config import ConfigError, override
from fastturn.learner import Part
from fastturn.policy import Policy
from fastturn.recipes import quickstart
from fastturn.records import read_lines, untimed
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.types import (
    Boundary,
    Completion,
    Credit,
    Ending,
    SiblingGroup,
    Stop,
    Trajectory,
    Turn,
)

PARITY = Path(__file__).with_name("parity.py")
SMALL = (
    *(f"data.domain={PARITY}:Domain", "data.eval_tasks=8", "turns=3", "tasks=4", "iterations=2"),
    *("warm.steps=40", "warm.batch=16", "trackers=none", "sampling.turn_tokens=4"),
    "loss.epochs=2",
)


class OneByOne(LocalSampler):
    """A sampler with weights of its own that answers each request alone, as servers do."""

    def __init__(self, source: Policy) -> None:
        self.source = source
        model = copy.deepcopy(source.model).requires_grad_(False)
        super().__init__(Policy(model, source.backend.attention))

    def publish(self, version: int) -> None:
        self.policy.load_state_dict(self.source.state_dict())
        super().publish(version)

    def stream(self, params: SamplingParams, answer: Callable[[Any, Any], None]) -> Stream:
        return Stream(self, params, answer)


@dataclass
class Stream:
    sampler: OneByOne
    params: SamplingParams
    answer: Callable[[Any, Any], None]

    def submit(self, key: Any, request: Request) -> None:
        (done,) = self.sampler.sample([request], self.params)
        self.answer(key, done)

    def settle(self) -> None:
        """Nothing waits for it."""

    def close(self) -> None:
        """Nothing is open."""


def group(index: int, siblings: int = 3) -> SiblingGroup:
    context_T = np.arange(3 + index, dtype=np.int32)
    done = Completion(np.array([1, 2], np.int32), np.full(2, -1, np.float32), 0, Stop.STOP)
    turns = [(Turn(Boundary(0, context_T), done, reward),) for reward in range(siblings)]
    trajectories = tuple(Trajectory(f"t{index}", 0, turn, Ending.FINISHED) for turn in turns)
    return SiblingGroup(f"t{index}", 0, 0, context_T, trajectories)


def shared(groups: list[SiblingGroup]) -> list[list[Credit]]:
    """Weights that share 1 among the groups."""
    return [
        [Credit(t, np.ones(1), np.full(1, 1 / len(groups))) for t in group.siblings]
        for group in groups
    ]


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("planned", [5, 8])
def test_weights_do_not_depend_on_chunks_or_on_groups_that_never_came(cuts, planned):
    groups, seen = [group(i) for i in range(5)], []
    ends = np.cumsum(cuts)
    chunks = [groups[end - size : end] for size, end in zip(cuts, ends, strict=True)]
    part = Part(chunks, planned, shared, lambda credits: seen.extend(credits) or [])
    assert list(part.batches()) == []
    weights = [float(c.weight_U[0]) * part.correction() for own in seen for c in own]
    assert weights == pytest.approx([1 / 5] * 15, rel=1e-12)
    assert part.groups == groups and len(part.credits) == 5


def test_a_generator_beside_its_consumer():
    release = threading.Event()

    def items() -> Iterator[int]:
        yield from (1, 2)
        release.wait(10)
        yield 3

    source = Beside(items())
    time.sleep(0.1)
    assert source.take() == [1, 2]
    release.set()
    assert source.take() == [3] and source.take() == [] and source.take() == []
    assert 0 <= source.waited_s <= source.made_s + 1


def test_an_error_beside_comes_after_what_was_made_before():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    source = Beside(items())
    time.sleep(0.1)
    assert source.take() == [1]
    with pytest.raises(ValueError, match="no more"):
        source.take()


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Records of one configuration with and without overlap."""
    before = engines.ENGINES["vllm"]
    engines.ENGINES["vllm"] = lambda config, policy, meter, progress: OneByOne(policy)
    found = {}
    for way in ("none", "stream", "stream,prefetch"):
        out: Path = tmp_path_factory.mktemp("overlap") / "run"
        served = ("rollout.engine=vllm", "rollout.urls=http://127.0.0.1:9")
        config = override(quickstart(), (*SMALL, *served, f"rollout.overlap={way}"))
        trainer.train(config, quickstart(), out)
        found[way] = [untimed(line) for line in read_lines(out / "records.jsonl")]
    engines.ENGINES["vllm"] = before
    return found


def test_streaming_trains_on_the_same_groups_with_the_same_result(ways):
    kinds = [[line["kind"] for line in lines] for lines in ways.values()]
    assert kinds[0] == kinds[1] == kinds[2]
    for serial, streamed in zip(ways["none"], ways["stream"], strict=True):
        assert serial.keys() == streamed.keys()
        for name in ("groups", "groups_silent", "success", "steps", "actions", "tokens_flat"):
            assert serial.get(name) == streamed.get(name), (serial["kind"], name)
        for name in ("loss", "grad_norm", "entropy"):
            assert serial.get(name, 0) == pytest.approx(streamed.get(name, 0), rel=1e-3, abs=1e-6)


def test_prefetched_trunks_change_the_states_of_later_iterations_only(ways):
    serial, ahead = (
        [line for line in ways[way] if line["kind"] == "iteration"]
        for way in ("none", "stream,prefetch")
    )
    for name in ("rollouts", "success", "trunk_success", "turns_mean", "zero_advantage_share"):
        assert serial[0][name] == ahead[0][name]
    assert len(ahead) == len(serial) == 2 and ahead[1]["rollouts"] > 8
    stages = [line for line in ways["stream,prefetch"] if line["kind"] == "stage"]
    ratios = [line["ratio_geomean"] for line in stages if line["steps"]]
    assert len(ratios) >= 3 and ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)


def test_trunks_grow_beside_stages_that_outlast_them():
    def stages(*sizes: int) -> list[tuple[int, list[Any]]]:
        return [(len(sizes) - 1 - i, [None] * size) for i, size in enumerate(sizes)]

    assert tree.room(stages(6, 28, 32, 32)) == [0, 84, 64, 0]
    assert tree.room(stages(5)) == [5] and tree.room(stages(8, 4)) == [16, 0]
    parts = tree.divided(list(range(32)), tree.room(stages(6, 28, 32, 32)))
    assert [len(part) for part in parts] == [0, 18, 14, 0]


def test_unknown_overlaps_are_named():
    with pytest.raises(ConfigError, match=r"rollout.overlap='streams': expected any of stream"):
        override(quickstart(), ["rollout.overlap=streams"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "most"),
    [
        *((case, 1.15) for case in ("decode-bound", "train-bound", "slow tools")),
        *(("balanced", 1.28), ("a slot for each", 1.34)),
    ],
)
def test_an_iteration_lasts_little_more_than_the_longer_of_decode_and_train(case, most):
    """Or than the least that any on-policy schedule takes (docs/processes.md), where that is more
    than 1.15 of it."""
    ways = (overlap.WAYS[way] for way in ("serial", "stream+prefetch"))
    serial, both = (overlap.outcome(overlap.CASES[case], way) for way in ways)
    longer_s = max(serial.waited_s, serial.train_s)
    assert serial.wall_s == pytest.approx(serial.waited_s + serial.train_s)
    assert both.wall_s <= most * longer_s < serial.wall_s
    assert both.least_s <= both.wall_s <= 1.2 * both.least_s
    assert most == 1.15 or both.least_s > 1.15 * longer_s
    assert both.waited_s / both.wall_s < serial.waited_s / serial.wall_s


def test_the_least_that_a_stage_takes():
    """Two groups in two slots: decoding takes (3 + 5) / 2, the longest episode 5 with its tool, the
    quickest group 3; updates of 1 fit behind either, of 4 do not."""
    stage = overlap.Stage(first_s=3, longest_s=5, slot_s=8, ahead_s=6, packed_s=1, fixed_s=0.5)
    assert stage.least_s(2) == 5.5
    assert replace(stage, packed_s=4).least_s(2) == 7.5
    assert overlap.least_s([stage, stage], 2) == 14  # (8 + 6) / 2 of each, more than 2 x 5.5
    assert overlap.least_s([stage, stage], 4) == 11
