"""Outcome and path: two channels of credit, and the variance each of them brings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.algorithms import ALGORITHMS, algorithm_of
from fastturn.channels import credited, faded, folded, held, variance
from fastturn.config import Config
from fastturn.evaluate import evaluate
from fastturn.pack import pack
from fastturn.tally import book, iteration_record
from fastturn.types import (
    Boundary,
    Channel,
    Completion,
    Ending,
    Hit,
    SiblingGroup,
    Stop,
    Trajectory,
    Turn,
)

ruled = partial(Config, rewards=("outcome", "penalty", "fulfilment"))


def turn(reward: float, *values: float, tokens: int = 4) -> Turn:
    """A turn with one penalty or fulfilment for each of the values."""
    done = Completion(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), 0, Stop.STOP)
    hits = tuple(
        Hit("bad" if v < 0 else "good", Channel.PENALTY if v < 0 else Channel.FULFILMENT, v)
        for v in values
    )
    return Turn(Boundary(0, np.array([1], np.int32)), done, reward, path=hits)


def episode(*turns: Turn) -> Trajectory:
    return Trajectory("t", 0, turns, Ending.FINISHED)


def group(*siblings: Trajectory) -> SiblingGroup:
    return SiblingGroup("t", 0, 0, np.array([1], np.int32), siblings)


def advantages(
    config: Config, *groups: SiblingGroup, scale: float = 1.0
) -> list[list[list[float]]]:
    credits = credited(algorithm_of(config), groups, config, scale)
    return [[c.advantage_U.tolist() for c in g] for g in credits]


MIXED = group(episode(turn(0.0, -0.25), turn(1.0)), episode(turn(0.0), turn(0.0)))


def test_rtpo_centres_each_channel_of_turn_k():
    assert advantages(ruled(), MIXED) == [[[0.375, 0.0], [-0.375, 0.0]]]
    assert advantages(ruled(), MIXED, scale=0.5) == [[[0.4375, 0.0], [-0.4375, 0.0]]]


def test_rtpo_credits_a_turn_with_the_rules_met_later():
    late = group(episode(turn(0.0), turn(0.0, -0.25)), episode(turn(0.0), turn(0.0)))
    assert advantages(ruled(), late) == [[[-0.125, 0.0], [0.125, 0.0]]]


def test_grpo_leaves_a_penalty_with_its_turn():
    config = ruled(algorithm="grpo")
    assert advantages(config, MIXED) == [
        [[0.5 - 0.25 + 0.0625, 0.5 + 0.0625], [-0.5 + 0.0625, -0.5 + 0.0625]]
    ]


def test_each_channel_has_its_own_standard_deviation():
    config = ruled(algorithm="grpo", loss=replace(Config().loss, normalize_std=True))
    ((first, second),) = advantages(config, MIXED)
    outcome, path = 0.5**0.5, np.array([-0.1875, 0.0625, 0.0625, 0.0625])
    expected = np.array([outcome, outcome, -outcome, -outcome]) + path / path.std(ddof=1)
    assert np.allclose([*first, *second], expected, rtol=1e-12)


def test_a_group_of_equal_outcomes_still_teaches_the_path():
    failed = group(episode(turn(0.0, -0.25)), episode(turn(0.0, 0.25)))
    assert advantages(ruled(), failed) == [[[-0.25], [0.25]]]
    assert advantages(Config(rewards=("outcome",)), failed) == [[[0.0], [0.0]]]


def test_channels_that_are_left_out_say_nothing():
    both = group(episode(turn(1.0, -0.25, 0.125)), episode(turn(0.0)))

    def first(*rewards: str) -> float:
        return advantages(Config(rewards=rewards), both)[0][0][0]

    assert first("outcome") == 0.5
    assert first("penalty") == -0.125
    assert first("outcome", "penalty") == 0.375
    assert first("outcome", "penalty", "fulfilment") == 0.4375
    assert first("fulfilment") == 0.0625


def test_gated_fulfilments_count_in_successful_episodes_only():
    both = group(episode(turn(1.0, 0.25)), episode(turn(0.0, 0.25)))
    assert advantages(Config(rewards=("gated", "penalty")), both) == [[[0.125], [-0.125]]]


def test_a_path_that_never_met_a_rule_changes_no_bit():
    plain = group(episode(turn(1.0), turn(0.0)), episode(turn(0.0), turn(0.1)))
    for name in ALGORITHMS:
        config = ruled(algorithm=name)
        algorithm = algorithm_of(config)
        pairs = zip(
            credited(algorithm, [plain], config)[0],
            algorithm.credit([plain], config)[0],
            strict=True,
        )
        for two, one in pairs:
            assert two.advantage_U.tolist() == one.advantage_U.tolist(), name
            assert two.weight_U.tolist() == one.weight_U.tolist(), name


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_has_a_path_channel(name: str):
    config = ruled(algorithm=name)
    failed = group(episode(turn(0.0, -0.25)), episode(turn(0.0, 0.25)))
    ((bad, good),) = credited(algorithm_of(config), [failed], config)
    assert bad.advantage_U[0] < 0 < good.advantage_U[0]
    assert bad.weight_U[0] > 0 and bad.trajectory is failed.siblings[0]


def test_one_reward_is_the_sum_of_both_channels():
    one = folded(MIXED, ruled(), 0.5)
    assert [[t.reward for t in s.turns] for s in one.siblings] == [[-0.125, 1.0], [0.0, 0.0]]


rewards = st.lists(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(rewards, max_size=3), st.floats(0, 1))
def test_the_variance_of_the_return_is_the_sum_of_its_parts(drawn, scale: float):
    groups = [[episode(*(turn(o, p) for o, p in pairs)) for pairs in rows] for rows in drawn]
    got = variance(groups, ruled(gamma=0.9), scale)
    parts = got.var_outcome + scale**2 * got.var_path + 2 * scale * got.cov_outcome_path
    assert got.var_return == pytest.approx(parts, abs=1e-9)


def test_variance_of_a_group_by_hand():
    got = variance([[episode(turn(1.0, -0.25)), episode(turn(0.0))]], ruled())
    assert (got.var_outcome, got.var_path, got.cov_outcome_path) == (0.25, 0.015625, -0.0625)
    assert got.var_return == 0.140625 and (got.silent_outcome, got.silent_path) == (0, 0)
    assert variance([], ruled()).var_return == 0.0


def test_the_path_fades_when_compliance_holds_and_returns_when_it_does_not():
    assert [faded(streak) for streak in range(6)] == [1, 1, 1, 1, 0.5, 0.25]
    assert held(0.95, 0.95) and not held(0.94, 0.95) and not held(1.0, 0.0)


def test_violation_free_episodes_ended_and_broke_no_rule():
    good, bad = episode(turn(0.0, 0.25)), episode(turn(0.0, 0.25), turn(1.0, -0.25))
    assert good.violation_free and not bad.violation_free
    assert not replace(good, ending=Ending.TURNS).violation_free
    solved = episode(turn(1.0, 0.25))
    assert solved.clean_success and bad.success
    assert not (bad.clean_success or good.clean_success)


def test_compliance_of_training_is_told_of_all_and_of_the_successful_episodes():
    idle, bad, good = episode(turn(0.0)), episode(turn(1.0, -0.25)), episode(turn(1.0, 0.25))
    tally: Counter[str] = Counter()
    book(tally, [idle, idle, bad, good])
    record = iteration_record(0, tally, Counter())
    assert (record["violation_free"], record["clean_success"]) == (0.75, 0.25)
    assert record["violation_free_success"] == 0.5  # what annealing goes by


@dataclass(frozen=True)
class Stub:
    """A rollout of one root a task."""

    clock: object = None
    domain: object = None
    config: object = None

    def roots(self, tasks: list[str]) -> list[str]:
        return tasks


def test_an_evaluation_tells_sampled_episodes_from_greedy_ones(monkeypatch):
    bad, good = episode(turn(1.0, -0.25)), episode(turn(1.0, 0.25))
    played = {1.0: [bad, good], 0.0: [good, good]}
    monkeypatch.setattr("fastturn.evaluate._play", lambda rollout, roots, heat: played[heat])
    monkeypatch.setattr("fastturn.evaluate.idle", lambda *of: 0.0)
    found = evaluate(Stub(), ["a", "b"])  # type: ignore[arg-type]
    assert (found.violation_free, found.violation_free_greedy) == (0.5, 1.0)
    assert (found.clean_success, found.clean_success_greedy) == (0.5, 1.0)
    assert found.hits == {"bad": 0.5, "good": 0.5}


def test_a_rule_of_one_call_of_several_speaks_to_its_tokens_only():
    hit = Hit("bad", Channel.PENALTY, -0.25, call=1, span=(2, 4))
    two = episode(replace(turn(0.0), path=(hit,)), turn(0.0))
    config = ruled(algorithm="grpo")
    ((bad, good),) = credited(algorithm_of(config), [group(two, episode(turn(0.0)))], config)
    above = 0.25 / 3
    assert np.allclose(bad.advantage_A(0), [above, above, above - 0.25, above - 0.25])
    assert np.allclose(bad.advantage_A(1), above) and np.allclose(good.advantage_A(0), above)
    assert not bad.silent and bad.weight_U[0] == good.weight_U[0] / 2


def test_a_span_weighs_in_its_channel():
    hit = Hit("bad", Channel.PENALTY, -0.25, call=1, span=(2, 4))
    two = episode(replace(turn(1.0), path=(hit,)))
    config = ruled(algorithm="grpo")
    ((bad, _),) = credited(algorithm_of(config), [group(two, episode(turn(0.0)))], config, 0.5)
    outcome, path = 0.5, 0.125
    assert np.allclose(bad.advantage_A(0), outcome + 0.5 * (path - np.array([0, 0, 0.25, 0.25])))


def test_packed_rows_carry_the_advantage_of_their_token():
    hit = Hit("bad", Channel.PENALTY, -0.25, call=1, span=(1, 3))
    two = episode(replace(turn(0.0), path=(hit,)))
    config = ruled(algorithm="grpo")
    credits = credited(algorithm_of(config), [group(two, episode(turn(0.0, tokens=3)))], config)
    (batch,) = pack(credits, 100)
    found = {tuple(batch.advantage_A[batch.trajectory_U[batch.turn_A] == 0].tolist())}
    assert found == {(0.125, -0.125, -0.125, 0.125)}
