"""Theorem 3: continuing with the current policy is unbiased at weight one; re-using what an older
policy continued is biased, or unbiased at a variance that grows with every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastturn.config import Config
from fastturn.credit import zero_advantage
from fastturn.kernels import linear_logprob, turn_surrogate
from fastturn.types import Trajectory, Turn

from .mdp import (
    Array,
    Outcome,
    TurnMDP,
    Weighted,
    action_of,
    bernoulli,
    bigrams,
    credited,
    draws,
    episodes,
    head_of,
    mean_advantage,
    members,
    random_mdp,
    softmax,
    values,
)

CONFIG = Config(algorithm="rtpo", group_size=3)
EXACT = {"rtol": 0, "atol": 1e-12}


def logprobs(mdp: TurnMDP, logits_KSU: Array, turns: list[Turn]) -> torch.Tensor:
    """Log-probability of every sampled token under a table, through the kernel in float64."""
    pairs = [pair for turn in turns for pair in bigrams(turn)]
    source_A, action_A = torch.tensor(pairs).T
    hidden_AV = torch.nn.functional.one_hot(source_A, mdp.vocabulary).double()
    head_VV = torch.tensor(head_of(mdp, logits_KSU))
    return linear_logprob(hidden_AV, head_VV, action_A, impl="torch")[0]


def weights(mdp: TurnMDP, now_KSU: Array, old_KSU: Array, pool: list[Weighted]) -> Array:
    """ω of each episode: the product of token ratios over the turns after its first (eq. 81)."""
    after = [turn for _, episode in pool for turn in episode.turns[1:]]
    sizes = [
        sum(len(turn.completion.action_A) for turn in episode.turns[1:]) for _, episode in pool
    ]
    log_ratio_A = logprobs(mdp, now_KSU, after) - logprobs(mdp, old_KSU, after)
    return np.array([part.sum().exp() for part in log_ratio_A.split(sizes)])


def mean_given(pool: list[Weighted], value: Array, action: int) -> float:
    """E[value | first action] over a pool of episodes."""
    own = np.array([action_of(episode.turns[0]) == action for _, episode in pool])
    p = np.array([p for p, _ in pool]) * own
    return float(p @ value / p.sum())


def returns(pool: list[Weighted]) -> Array:
    return np.array([episode.discounted_return() for _, episode in pool])


def two_policies(seed: int, shape=(3, 2, 2)) -> tuple[TurnMDP, Array, Array]:
    """(problem, current logits, older logits); they differ after turn 0 only."""
    rng = np.random.default_rng(seed)
    mdp, now_KSU = random_mdp(rng, shape, terminal_only=True), rng.normal(size=shape)
    old_KSU = now_KSU + 0.7 * rng.normal(size=shape)
    old_KSU[0] = now_KSU[0]
    return mdp, now_KSU, old_KSU


@pytest.mark.parametrize("seed", [0, 1])
def test_current_continuations_are_unbiased_and_stale_ones_are_not(seed):
    """Theorem 3(a), eqs. 84 and 90: E[R_j | S_k, u] is the Q of the policy that continued. With the
    current one that is the target; with the older one it is not, and the sibling advantages inherit
    the difference."""
    mdp, now_KSU, old_KSU = two_policies(seed)
    truth, stale = (values(mdp, softmax(table)) for table in (now_KSU, old_KSU))
    for table, (q_KSU, v_KS) in ((now_KSU, truth), (old_KSU, stale)):
        pool = episodes(mdp, softmax(table), 0, 0)
        got_U = [mean_given(pool, returns(pool), u) for u in range(2)]
        np.testing.assert_allclose(got_U, q_KSU[0, 0], **EXACT)
        advantage_U = mean_advantage(mdp, pool, members(CONFIG), 0, CONFIG)[0]
        np.testing.assert_allclose(advantage_U, (q_KSU[0, 0] - v_KS[0, 0]) / 2, **EXACT)
    assert np.abs(truth[0][0, 0] - stale[0][0, 0]).max() > 0.02


def bold_or_safe() -> TurnMDP:
    """Turn 0: action 0 is safe (worth 0.6), action 1 bold (its worth is the skill of turn 1)."""
    first = [[(Outcome(1.0, 0.0, 0),), (Outcome(1.0, 0.0, 1),)]] * 2
    last = [[bernoulli(0.6), bernoulli(0.6)], [bernoulli(1.0), bernoulli(0.0)]]
    return TurnMDP(np.array([1.0, 0.0]), [first, last], np.ones((2, 2, 2), np.int64))


def test_stale_continuations_can_point_the_wrong_way():
    """Section 3.3: once turn 1 has learned (chance of the winning action from 1/2 to 9/10), bold is
    better than safe by 0.3; continuations of the policy before that still say worse by 0.1."""
    mdp = bold_or_safe()
    old_KSU = np.full((2, 2, 2), 0.5)
    now_KSU = old_KSU.copy()
    now_KSU[1] = [0.9, 0.1]
    for policy_KSU, gap in ((now_KSU, 0.3), (old_KSU, -0.1)):
        pool = episodes(mdp, policy_KSU, 0, 0)
        safe, bold = mean_advantage(mdp, pool, members(CONFIG), 0, CONFIG)[0]
        assert bold - safe == pytest.approx(gap / 2, abs=1e-12)


def test_the_weight_of_a_current_continuation_is_one():
    """Theorem 3(a), eqs. 85 and 91: scored by the policy that sampled them, all tokens after turn k
    have ratio one against their recorded log-probabilities (float32: 2^-24 relative), so ω_j = 1
    for every episode; in the loss every ratio is one and nothing is clipped."""
    mdp, now_KSU, _ = two_policies(2)
    pool = episodes(mdp, softmax(now_KSU), 0, 0)
    for _, episode in pool:
        behavior_A = np.concatenate([turn.completion.logprob_A for turn in episode.turns[1:]])
        logprob_A = logprobs(mdp, now_KSU, list(episode.turns[1:])).numpy()
        assert np.exp((logprob_A - behavior_A).sum()) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_array_equal(weights(mdp, now_KSU, now_KSU, pool), 1.0)
    output = score_first_turns(mdp, now_KSU, [episode for _, episode in pool])
    assert float(output.peaks["ratio"]) == pytest.approx(1.0, abs=1e-6)
    assert float(output.sums["clipped_low"]) == float(output.sums["clipped_high"]) == 0


def score_first_turns(mdp: TurnMDP, logits_KSU: Array, played: list[Trajectory]):
    """The surrogate of first turns against their recorded log-probabilities."""
    turns = [episode.turns[0] for episode in played]
    source_A, action_A = torch.tensor([pair for turn in turns for pair in bigrams(turn)]).T
    behavior_A = np.concatenate([turn.completion.logprob_A for turn in turns])
    return turn_surrogate(
        torch.nn.functional.one_hot(source_A, mdp.vocabulary).double(),
        torch.tensor(head_of(mdp, logits_KSU)),
        action_A,
        behavior_A=torch.tensor(behavior_A).double(),
        advantage_A=torch.ones(len(action_A), dtype=torch.float64),
        weight_A=torch.ones(len(action_A), dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.2,
        impl="torch",
    )


@pytest.mark.parametrize("seed", [3, 4])
def test_the_exact_weight_repairs_stale_returns_and_clipping_breaks_it(seed):
    """Section B.3 and eqs. 14 to 16, 81, 103: E[ω] = 1 and E[ω R | u] = Q of the current policy;
    with ω clamped, or with each token's ratio clipped, neither is."""
    mdp, now_KSU, old_KSU = two_policies(seed)
    q_KSU, _ = values(mdp, softmax(now_KSU))
    pool = episodes(mdp, softmax(old_KSU), 0, 0)
    exact = weights(mdp, now_KSU, old_KSU, pool)
    clamped = exact.clip(0.8, 1.2)
    tokenwise = []
    for _, episode in pool:
        after = list(episode.turns[1:])
        ratio_A = (logprobs(mdp, now_KSU, after) - logprobs(mdp, old_KSU, after)).exp()
        tokenwise.append(float(ratio_A.clamp(0.8, 1.2).prod()))
    for u in range(2):
        assert mean_given(pool, exact, u) == pytest.approx(1.0, abs=1e-12)
        repaired = mean_given(pool, exact * returns(pool), u)
        assert repaired == pytest.approx(q_KSU[0, 0, u], abs=1e-12)
    for broken in (clamped, np.array(tokenwise)):
        off_U = [mean_given(pool, broken * returns(pool), u) - q_KSU[0, 0, u] for u in range(2)]
        assert np.abs(off_U).max() > 0.01
        assert abs(mean_given(pool, broken, 0) - 1) > 0.002
    assert np.abs(clamped - tokenwise).max() > 0.05


def chain(turns: int, seed: int, alike: bool) -> tuple[TurnMDP, Array, Array]:
    """A corridor: the action is the next state, one token a turn, for `turns` turns after turn 0.
    `alike`: both policies are the same in all states and turns (independent tokens)."""
    rng = np.random.default_rng(seed)
    shape = (turns + 1, 2, 2)
    step = [[(Outcome(1.0, 0.0, u),) for u in range(2)]] * 2
    last = [[bernoulli(0.5)] * 2] * 2
    mdp = TurnMDP(np.array([1.0, 0.0]), [step] * turns + [last], np.ones(shape, np.int64))
    now_SU, old_SU = rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    if alike:
        now_SU, old_SU = np.array([[0.5, 0.0]] * 2), np.array([[0.0, 0.0]] * 2)
    return mdp, np.broadcast_to(now_SU, shape).copy(), np.broadcast_to(old_SU, shape).copy()


def second_moment(turns: int, seed: int, alike: bool) -> tuple[float, float, float]:
    """(E[ω²] enumerated, in closed form, least E[ρ²] of a token) for so many stale tokens."""
    mdp, now_KSU, old_KSU = chain(turns, seed, alike)
    now_SU, old_SU = softmax(now_KSU[0]), softmax(old_KSU[0])
    pool = episodes(mdp, softmax(old_KSU), 0, 0)
    omega = weights(mdp, now_KSU, old_KSU, pool)
    p = np.array([p for p, _ in pool])
    assert p @ omega == pytest.approx(1.0, abs=1e-12)
    square_SS = now_SU**2 / old_SU  # row: state; column: action, which is the next state
    closed = old_SU[0] @ np.linalg.matrix_power(square_SS, turns) @ np.ones(2)
    return float(p @ omega**2), float(closed), float(square_SS.sum(-1).min())


def test_the_variance_of_a_stale_weight_grows_geometrically():
    """Eqs. 100 to 102 with independent tokens: Var ω = (1+δ)^N - 1 exactly, 1 + δ = Σ p²/q; for the
    mild change here (even odds to 62 : 38) 1 + δ is 1.06, and 7 tokens make 1.5 of it."""
    grown = [second_moment(turns, 0, alike=True) for turns in range(1, 8)]
    base = grown[0][2]
    assert base == pytest.approx(1.0600, abs=1e-4)
    for n, (enumerated, closed, _) in enumerate(grown, 1):
        assert enumerated == pytest.approx(base**n, rel=1e-12)
        assert closed == pytest.approx(base**n, rel=1e-12)
    assert grown[-1][0] > 1.5


@pytest.mark.parametrize("seed", [1, 2])
def test_the_variance_grows_geometrically_with_states_too(seed):
    """Eqs. 100 to 102 where the ratio depends on the state: E[ω²] is a product of matrices, at
    least (1+δ)^N with δ of the mildest state, and settles on a fixed factor a token (over 1.1)."""
    grown = [second_moment(turns, seed, alike=False) for turns in range(1, 8)]
    for n, (enumerated, closed, least) in enumerate(grown, 1):
        assert enumerated == pytest.approx(closed, rel=1e-12)
        assert least > 1 and enumerated >= least**n * (1 - 1e-12)
    moments = np.array([enumerated for enumerated, _, _ in grown])
    factors = moments[1:] / moments[:-1]
    assert factors[-1] > 1.1 and abs(factors[-1] / factors[-2] - 1) < 0.03


def with_skill(p: float, q: float) -> TurnMDP:
    """One turn, two actions that succeed with p and q: what a downstream policy makes of them."""
    last = [[bernoulli(p), bernoulli(q)]]
    return TurnMDP(np.array([1.0]), [last], np.ones((1, 1, 2), np.int64))


def noise(p: float, q: float) -> tuple[float, float, float, float]:
    """Of action 0 in a uniform group of two siblings: (Var R, mean A, standard deviation of A) and
    the chance that a group is silent."""
    pool = episodes(with_skill(p, q), np.full((1, 1, 2), 0.5), 0, 0)
    variance = mean_given(pool, (returns(pool) - p) ** 2, 0)
    first = second = mass = silent = 0.0
    for chance, group in draws(pool, members(CONFIG)):
        credits = credited([group], CONFIG)[0]
        silent += chance * zero_advantage(credits)
        for credit in credits:
            if action_of(credit.trajectory.turns[0]) == 0:
                mass += chance
                first += chance * credit.advantage_U[0]
                second += chance * credit.advantage_U[0] ** 2
    mean = first / mass
    return variance, mean, float(np.sqrt(second / mass - mean**2)), silent


def test_binary_returns_are_least_noisy_when_success_is_sure():
    """Theorem 3(b), eqs. 87, 93 and 95: Var(R | S, u) = p(1-p), smaller the further p is from 1/2,
    and the noise of the sibling advantage falls with it."""
    spread = []
    for p in (0.5, 0.6, 0.8, 0.95):
        variance, mean, deviation, _ = noise(p, p - 0.1)
        assert variance == pytest.approx(p * (1 - p), abs=1e-12)
        assert mean == pytest.approx(0.5 * 0.05, abs=1e-12)
        spread.append((variance, deviation))
    assert spread == sorted(spread, reverse=True)


def test_less_noise_is_not_more_signal():
    """A limit of theorem 3(b): signal to noise improves only if the actions stay as far apart. A
    downstream policy that succeeds whatever turn k did (0.6 and 0.4 become 0.99 and 0.98) cuts the
    variance 24-fold and the signal to noise 4-fold, and 97 of 100 groups fall silent."""
    before, after = noise(0.6, 0.4), noise(0.99, 0.98)
    assert after[0] < before[0] / 20
    assert after[1] / after[2] < before[1] / before[2] / 3
    assert before[3] == pytest.approx(0.5, abs=1e-12) and after[3] > 0.95
