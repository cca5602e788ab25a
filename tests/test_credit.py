"""Credit: advantages centre within a group, weights hold the whole normalisation of the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastturn.algorithms import ALGORITHMS
from fastturn.config import Config, Loss
from fastturn.credit import grpo, rtpo, zero_advantage
from fastturn.types import Boundary, Completion, Ending, SiblingGroup, Stop, Trajectory, Turn

CONFIG = Config()


def episode(rewards, lengths, first_turn: int = 0) -> Trajectory:
    turns = []
    for k, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        action_A = np.arange(length, dtype=np.int32)
        done = Completion(action_A, np.zeros(length, np.float32), 1, Stop.STOP)
        kept = 0 if k == 0 else 3 + sum(lengths[:k])
        turns.append(Turn(Boundary(kept, np.arange(3, dtype=np.int32)), done, reward))
    return Trajectory("task", first_turn, tuple(turns), Ending.FINISHED)


def group(*siblings: Trajectory) -> SiblingGroup:
    return SiblingGroup("task", 0, 0, np.arange(3, dtype=np.int32), siblings)


def test_rtpo_weighs_only_the_stage_turn():
    one = group(episode([0, 1], [4, 9]), episode([0, 0], [5, 2]))
    ((first, second),) = rtpo([one], CONFIG)
    assert first.advantage_U.tolist() == [0.5, 0.0] and second.advantage_U.tolist() == [-0.5, 0.0]
    assert first.weight_U.tolist() == [1 / 8, 0.0] and second.weight_U.tolist() == [1 / 10, 0.0]


def test_grpo_weighs_every_token_of_a_trajectory_alike():
    one = group(episode([0, 1], [4, 6]), episode([0], [5]))
    ((first, second),) = grpo([one], CONFIG)
    assert first.weight_U.tolist() == [1 / 20, 1 / 20] and second.weight_U.tolist() == [1 / 10]
    assert first.advantage_U.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("algorithm", ["rtpo", "grpo", "dapo", "gigpo", "tree_grpo"])
def test_advantages_sum_to_zero_and_weights_to_one(algorithm):
    rng = np.random.default_rng(0)
    groups = [
        group(*(episode([rng.random()], [int(rng.integers(1, 9))]) for _ in range(5)))
        for _ in range(7)
    ]
    credits = ALGORITHMS[algorithm].credit(groups, CONFIG)
    for members in credits:
        assert abs(sum(c.advantage_U[0] for c in members)) < 1e-12
    tokens = sum(
        c.weight_U[0] * c.trajectory.tokens_sampled for members in credits for c in members
    )
    assert tokens == pytest.approx(1.0)


def test_silent_groups_weigh_nothing_and_stay_in_the_denominator():
    live, silent = group(episode([1], [2]), episode([0], [2])), group(*[episode([1], [2])] * 2)
    (a, b), (c, d) = rtpo([live, silent], CONFIG)
    assert a.weight_U[0] == 1 / (2 * 2 * 2)  # two groups, two siblings, two tokens
    assert c.silent and d.silent and not np.any(c.weight_U)
    assert zero_advantage([c, d]) and not zero_advantage([a, b])


def test_equal_returns_are_exactly_zero_whatever_their_mean_rounds_to():
    same = group(*[episode([0.1], [2]) for _ in range(3)])
    assert all(c.silent for c in rtpo([same], CONFIG)[0])


def test_with_a_kl_term_silent_groups_keep_their_weight():
    config = replace(CONFIG, loss=Loss(kl_coef=0.02))
    ((a, _),) = rtpo([group(episode([1], [2]), episode([1], [2]))], config)
    assert a.weight_U[0] == 1 / 4 and a.advantage_U[0] == 0


def test_std_normalisation_is_off_by_default_and_exact_when_on():
    one = group(episode([1], [1]), episode([0], [1]), episode([0], [1]))
    config = replace(CONFIG, loss=Loss(normalize_std=True))
    plain = [c.advantage_U[0] for c in rtpo([one], CONFIG)[0]]
    scaled = [c.advantage_U[0] for c in rtpo([one], config)[0]]
    assert plain == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert np.std(scaled, ddof=1) == pytest.approx(1.0)


def test_discount_counts_sampled_tokens():
    config = replace(CONFIG, gamma=0.9)
    late, none = episode([0, 1], [10, 3]), episode([0], [4])
    ((a, _),) = rtpo([group(late, none)], config)
    assert a.advantage_U[0] == pytest.approx(0.9**10 / 2)


def test_rewards_before_the_stage_do_not_count():
    """A sibling begins at its stage's turn, so its return holds only rewards from there on."""
    ((a, b),) = rtpo([group(episode([0, 1], [2, 2], 1), episode([0, 0], [2, 2], 1))], CONFIG)
    assert a.advantage_U[0] == 0.5 and b.advantage_U[0] == -0.5


def test_groups_of_one_task_stay_apart():
    """Two trunks or two copies of one prompt are two groups, never merged by their text."""
    twice = [group(episode([1], [1]), episode([0], [1])), group(*[episode([0], [1])] * 2)]
    first, second = rtpo(twice, CONFIG)
    assert [c.advantage_U[0] for c in first] == [0.5, -0.5]
    assert [c.advantage_U[0] for c in second] == [0.0, 0.0]


def test_why_a_group_of_one_sibling_is_refused():
    """E[advantage] = (n-1)/n of the true one for n siblings: nothing is left at n = 1."""
    ((only,),) = rtpo([group(episode([1], [1]))], CONFIG)
    assert only.silent and ALGORITHMS["rtpo"].least_group_size == 3


def test_continuations_meet_where_everything_since_the_fork_was_the_same():
    """On to the last turn: siblings that parted do not meet again, whatever they do later, and
    returns count from the turn at which they meet."""
    lengths = [  # the action of a turn is its length
        *((1, 2, 1, 1), (1, 2, 1, 4), (1, 2, 3, 1), (1, 3, 1, 1)),
        *((2, 2, 1, 1), (2, 2, 1, 1), (1, 2, 1, 1), (2, 2)),
    ]
    earned = [[2.0 ** -(j + u) for u in range(len(turns))] for j, turns in enumerate(lengths)]
    (credits,) = rtpo([group(*map(episode, earned, lengths))], CONFIG, continuations=1)
    met_last = 0
    for j, (turns, credit) in enumerate(zip(lengths, credits, strict=True)):
        for u, length in enumerate(turns):
            met = [i for i, other in enumerate(lengths) if other[:u] == turns[:u] and other[u:]]
            togo = {i: sum(earned[i][u:]) for i in met}
            advantage = togo[j] - sum(togo.values()) / len(met)
            assert credit.advantage_U[u] == pytest.approx(advantage, abs=1e-12)
            assert credit.weight_U[u] == (1 / 8 / length if len(met) > 1 else 0)
            met_last += u == 3 and len(met) > 1
    assert met_last == 5  # three and two of them
