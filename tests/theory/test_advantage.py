"""Theorem 2: what sibling groups estimate, and what whole trajectories estimate, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from fastturn.config import Config

from .mdp import (
    Array,
    Outcome,
    TurnMDP,
    Weighted,
    action_of,
    bernoulli,
    credited,
    draws,
    episodes,
    mean_advantage,
    members,
    random_mdp,
    softmax,
    values,
    visits,
    whole_episodes,
)

GRPO = Config(algorithm="grpo", group_size=3)
EXACT = {"rtol": 0, "atol": 1e-12}


def rtpo(group_size: int, gamma: float = 1.0) -> Config:
    return Config(algorithm="rtpo", group_size=group_size, gamma=gamma)


def problem(seed: int, shape=(2, 2, 2), terminal_only: bool = False) -> tuple[TurnMDP, Array]:
    rng = np.random.default_rng(seed)
    return random_mdp(rng, shape, terminal_only), softmax(rng.normal(size=shape))


@pytest.mark.parametrize(("group_size", "turn"), [(3, 0), (4, 0), (3, 1), (4, 1), (5, 1), (6, 1)])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_siblings_estimate_the_advantage_times_a_known_factor(group_size, turn, gamma):
    """Theorem 2(a), eq. 56: E[A_j | S_k, u_j] = (G-2)/(G-1) · A(S_k, u_j), in every state, for
    every action, with and without a discount per token, with rewards at every turn."""
    mdp, policy_KSU = problem(group_size)
    q_KSU, v_KS = values(mdp, policy_KSU, gamma)
    config = rtpo(group_size, gamma)
    for s in range(mdp.shape[1]):
        pool = episodes(mdp, policy_KSU, turn, s)
        got_U = mean_advantage(mdp, pool, members(config), turn, config)[s]
        true_U = q_KSU[turn, s] - v_KS[turn, s]
        assert np.abs(true_U).max() > 0.05
        factor = (group_size - 2) / (group_size - 1)
        np.testing.assert_allclose(got_U, factor * true_U, **EXACT)


def test_a_group_of_two_carries_no_signal():
    """Theorem 2(a) at G = 2 (appendix G.2): one sibling is its own baseline, so the advantage is
    exactly zero in every draw, not only on average."""
    mdp, policy_KSU = problem(0)
    config = rtpo(2)
    for s in range(mdp.shape[1]):
        for _, group in draws(episodes(mdp, policy_KSU, 0, s), members(config)):
            assert all(not c.advantage_U.any() for c in credited([group], config)[0])


@pytest.mark.parametrize("turn", [0, 1])
def test_trajectories_add_the_value_of_where_they_happen_to_be(turn):
    """Theorem 2(a), eqs. 13 and 57: E[A_i | S_k, u] = (G-1)/G · (A + V(S_k) - μ), in every state
    and for every action, the upstream term (V - μ) included to the last digit."""
    mdp, policy_KSU = problem(11, terminal_only=True)
    q_KSU, v_KS = values(mdp, policy_KSU)
    mean = float(mdp.start_S @ v_KS[0])
    got_SU = mean_advantage(mdp, whole_episodes(mdp, policy_KSU), members(GRPO), turn, GRPO)
    shift_S = v_KS[turn] - mean
    want_SU = 2 / 3 * (q_KSU[turn] - v_KS[turn][:, None] + shift_S[:, None])
    np.testing.assert_allclose(got_SU, want_SU, **EXACT)
    assert np.abs(shift_S).max() > 0.05


def test_trajectories_of_one_start_are_clean_at_turn_0():
    """Eq. 12: where all of a group share S_k the contamination vanishes and the factor is
    (G-1)/G; the estimators differ by their baselines, not by their algebra."""
    mdp, policy_KSU = problem(8, terminal_only=True)
    q_KSU, v_KS = values(mdp, policy_KSU)
    for s in range(2):
        pool = episodes(mdp, policy_KSU, 0, s)
        got_U = mean_advantage(mdp, pool, members(GRPO), 0, GRPO)[s]
        np.testing.assert_allclose(got_U, 2 / 3 * (q_KSU[0, s] - v_KS[0, s]), **EXACT)


def squared_error(
    mdp: TurnMDP, policy_KSU: Array, pools: list[Weighted], n: int, turn: int, config: Config
) -> float:
    """E[(A_j - A(S_k, u_j))²] over all groups of n from one pool."""
    q_KSU, v_KS = values(mdp, policy_KSU)
    error = 0.0
    for p, group in draws(pools, n):
        for credit in credited([group], config)[0]:
            at = turn - credit.trajectory.first_turn
            step = credit.trajectory.turns[at]
            s, u = mdp.state_of(step)[1], action_of(step)
            true = q_KSU[turn, s, u] - v_KS[turn, s]
            error += p / n * (credit.advantage_U[at] - true) ** 2
    return error


def variances(mdp: TurnMDP, policy_KSU: Array, turn: int) -> tuple[float, float, float]:
    """(σ_V², σ_A², σ_down²) at a boundary: of values over states, of advantages within states, of
    returns given state and action."""
    q_KSU, v_KS = values(mdp, policy_KSU)
    visit_S = visits(mdp, policy_KSU)[turn]
    mean = float(visit_S @ v_KS[turn])
    over_actions_S = (policy_KSU[turn] * (q_KSU[turn] - v_KS[turn][:, None]) ** 2).sum(-1)
    second_S = np.array(
        [
            sum(p * e.discounted_return() ** 2 for p, e in episodes(mdp, policy_KSU, turn, s))
            for s in range(mdp.shape[1])
        ]
    )
    within_S = second_S - v_KS[turn] ** 2 - over_actions_S
    return (
        float(visit_S @ (v_KS[turn] - mean) ** 2),
        float(visit_S @ over_actions_S),
        float(visit_S @ within_S),
    )


def errors(mdp: TurnMDP, policy_KSU: Array, group_size: int, siblings: int) -> tuple[float, float]:
    """Mean squared errors at turn 1: (of G whole trajectories, of `siblings` siblings)."""
    visit_S = visits(mdp, policy_KSU)[1]
    whole = whole_episodes(mdp, policy_KSU)
    flat = squared_error(mdp, policy_KSU, whole, group_size, 1, GRPO)
    matched = sum(
        visit_S[s]
        * squared_error(mdp, policy_KSU, episodes(mdp, policy_KSU, 1, s), siblings, 1, rtpo(3))
        for s in np.flatnonzero(visit_S).tolist()
    )
    return flat, float(matched)


@pytest.mark.parametrize("seed", [1, 2])
def test_error_gap_at_equal_group_size(seed):
    """Theorem 2(b), eqs. 75 and 76 with equal baselines: the gap is exactly (G-1)/G · σ_V²."""
    mdp, policy_KSU = problem(seed, terminal_only=True)
    flat, matched = errors(mdp, policy_KSU, 3, 3)
    spread, _, _ = variances(mdp, policy_KSU, 1)
    assert spread > 1e-3
    assert flat - matched == pytest.approx(2 / 3 * spread, abs=1e-12)


@pytest.mark.parametrize("seed", [1, 2])
def test_error_gap_with_the_trunk_uncounted(seed):
    """Theorem 2(b), eq. 76 as sampled (G trajectories against G-1 siblings). The terms that the
    paper leaves as Δ_down - O(1/G²) are exactly (σ_down² - σ_A²) / (G(G-1))."""
    mdp, policy_KSU = problem(seed, terminal_only=True)
    flat, matched = errors(mdp, policy_KSU, 3, 2)
    spread, own, down = variances(mdp, policy_KSU, 1)
    assert flat - matched == pytest.approx(2 / 3 * spread + (down - own) / 6, abs=1e-12)


def split(hard: tuple[float, float], easy: tuple[float, float], lengths=(1, 1)) -> TurnMDP:
    """Turn 0 leads to a hard (0) or an easy (1) state by chance; at turn 1 action 0 is the good
    one, action 1 the bad one, each with its chance of success in that state."""
    to_either = (Outcome(0.5, 0.0, 0), Outcome(0.5, 0.0, 1))
    last = [[bernoulli(p) for p in hard], [bernoulli(p) for p in easy]]
    length_KSU = np.ones((2, 2, 2), np.int64)
    length_KSU[1] = lengths
    return TurnMDP(np.array([1.0, 0.0]), [[[to_either] * 2] * 2, last], length_KSU)


UNIFORM_KSU = np.full((2, 2, 2), 0.5)


def test_state_matching_can_lose_at_a_small_group_size():
    """A limit of theorem 2(b): σ_V² > 0 alone does not make the siblings' error the smaller one.
    When actions differ more than states do (σ_A² > σ_down² + (G-1)² σ_V²), one member less in the
    baseline costs more than the match gains."""
    mdp = split(hard=(1.0, 0.0), easy=(1.0, 0.1))
    flat, matched = errors(mdp, UNIFORM_KSU, 3, 2)
    spread, own, down = variances(mdp, UNIFORM_KSU, 1)
    assert 0 < 4 * spread + down < own
    assert flat < matched
    assert errors(mdp, UNIFORM_KSU, 3, 3)[1] < flat


def test_the_sign_of_a_good_turn_in_a_bad_place():
    """The reversal of sections 2.2 and B.2 (eqs. 3 and 11): the good action in the hard state has
    advantage +0.1 and the bad one in the easy state -0.1; trajectory credit says -2/15 and +2/15,
    sibling credit +1/20 and -1/20."""
    mdp = split(hard=(0.3, 0.1), easy=(0.9, 0.7))
    q_KSU, v_KS = values(mdp, UNIFORM_KSU)
    true_SU = q_KSU[1] - v_KS[1][:, None]
    np.testing.assert_allclose(true_SU, [[0.1, -0.1], [0.1, -0.1]], **EXACT)
    flat_SU = mean_advantage(mdp, whole_episodes(mdp, UNIFORM_KSU), 3, 1, GRPO)
    np.testing.assert_allclose(flat_SU, 2 / 3 * np.array([[-0.2, -0.4], [0.4, 0.2]]), **EXACT)
    config = rtpo(3)
    for s in range(2):
        pool = episodes(mdp, UNIFORM_KSU, 1, s)
        matched_U = mean_advantage(mdp, pool, members(config), 1, config)[s]
        np.testing.assert_allclose(matched_U, [0.05, -0.05], **EXACT)


def stopping(stop_easy: float, stop_hard: float) -> tuple[TurnMDP, Array]:
    """A policy that decides when to stop. Turn 0 leads to hard (0) or easy (1); at turn 1 action 0
    answers at once and action 1 goes on in the same state; at turn 2 action 0 is the good one."""
    to_either = (Outcome(0.5, 0.0, 0), Outcome(0.5, 0.0, 1))
    middle = [[bernoulli(p), (Outcome(1.0, 0.0, s),)] for s, p in enumerate((0.2, 0.9))]
    last = [[bernoulli(0.3), bernoulli(0.1)], [bernoulli(0.9), bernoulli(0.7)]]
    outcomes = [[[to_either] * 2] * 2, middle, last]
    policy_KSU = np.full((3, 2, 2), 0.5)
    policy_KSU[1] = [[stop_hard, 1 - stop_hard], [stop_easy, 1 - stop_easy]]
    return TurnMDP(np.array([1.0, 0.0]), outcomes, np.ones((3, 2, 2), np.int64)), policy_KSU


def same_turn(mdp: TurnMDP, policy_KSU: Array) -> list[Weighted]:
    """The rests of all episodes that reach turn 2, whatever state they are in there."""
    visit_S = visits(mdp, policy_KSU)[2]
    return [
        (visit_S[s] / visit_S.sum() * p, episode)
        for s in range(2)
        for p, episode in episodes(mdp, policy_KSU, 2, s)
    ]


@pytest.mark.parametrize(
    ("stop_easy", "stop_hard", "wrong"), [(0.9, 0.1, "easy"), (0.1, 0.9, "hard")]
)
def test_groups_matched_by_turn_index_depend_on_who_stopped(stop_easy, stop_hard, wrong):
    """Eq. 12 with a policy that stops: those still there at turn 2 are no fair sample of states.

    Matched by turn index the estimate is (n-1)/n · (A + V(s) - V of the survivors): the credit of
    turn 2 flips its sign with the stopping rule of turn 1, which turn 2 has no part in. Matched by
    state it is (n-1)/n · A for every rule.
    """
    mdp, policy_KSU = stopping(stop_easy, stop_hard)
    q_KSU, v_KS = values(mdp, policy_KSU)
    visit_S = visits(mdp, policy_KSU)[2]
    survivors = float(visit_S @ v_KS[2] / visit_S.sum())
    config = rtpo(4)
    n = members(config)
    by_turn_SU = mean_advantage(mdp, same_turn(mdp, policy_KSU), n, 2, config)
    np.testing.assert_allclose(by_turn_SU, 2 / 3 * (q_KSU[2] - survivors), **EXACT)
    if wrong == "easy":
        assert by_turn_SU[1, 1] > 0.2  # the bad action of the easy state is praised
    else:
        assert by_turn_SU[0, 0] < -0.2  # the good action of the hard state is blamed
    for s in range(2):
        by_state_U = mean_advantage(mdp, episodes(mdp, policy_KSU, 2, s), n, 2, config)[s]
        np.testing.assert_allclose(by_state_U, 2 / 3 * np.array([0.1, -0.1]), **EXACT)


def test_enumerated_episodes_are_all_of_them():
    """The instrument itself (eqs. 19 and 20): probabilities add up to 1, and the mean of recorded
    returns given state and action is the Q of dynamic programming."""
    mdp, policy_KSU = problem(3, (3, 2, 2))
    q_KSU, _ = values(mdp, policy_KSU, 0.9)
    for k in range(3):
        for s in range(2):
            pool = episodes(mdp, policy_KSU, k, s)
            assert sum(p for p, _ in pool) == pytest.approx(1.0, abs=1e-12)
            for u in range(2):
                own = [(p, e) for p, e in pool if action_of(e.turns[0]) == u]
                mean = sum(p * e.discounted_return(0.9) for p, e in own) / policy_KSU[k, s, u]
                assert mean == pytest.approx(q_KSU[k, s, u], abs=1e-12)
