"""From credit to gradient: the expected update of the surrogate against dJ/dlogits, enumerated.

The policy is the bigram table of `mdp.py`: one-hot hidden states read one column of the output
layer each, so the gradient of the output layer is the gradient of the tabular logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from fastturn.config import Config
from fastturn.credit import Credits, zero_advantage
from fastturn.kernels import turn_surrogate
from fastturn.pack import pack
from fastturn.types import Credit, SiblingGroup

from .mdp import (
    Array,
    Outcome,
    TurnMDP,
    bernoulli,
    bigrams,
    credited,
    draws,
    episodes,
    head_of,
    members,
    objective,
    policy_gradient,
    random_mdp,
    softmax,
    values,
    visits,
    whole_episodes,
)

RTPO = Config(algorithm="rtpo", group_size=3)
GRPO = Config(algorithm="grpo", group_size=3)
FACTOR = {"rtpo": 1 / 2, "grpo": 2 / 3}  # (G-2)/(G-1) and (G-1)/G at G = 3
EXACT = {"rtol": 0, "atol": 1e-12}


def ascent(
    mdp: TurnMDP, logits_KSU: Array, terms: Iterable[tuple[float, Credit]], behave: bool = True
) -> Array:
    """-dloss/dlogits_KSU of Σ probability · surrogate over credited episodes, in one call."""
    source, action, advantage, weight = [], [], [], []
    for p, credit in terms:
        for turn, a, w in zip(
            credit.trajectory.turns, credit.advantage_U, credit.weight_U, strict=True
        ):
            if w == 0:
                continue
            for before, after in bigrams(turn):
                source.append(before)
                action.append(after)
                advantage.append(float(a))
                weight.append(p * float(w))
    floats = torch.tensor([advantage, weight], dtype=torch.float64)
    return surrogate(mdp, logits_KSU, source, action, floats, behave)


def surrogate(
    mdp: TurnMDP,
    logits_KSU: Array,
    source: Sequence[int],
    action: Sequence[int],
    floats: torch.Tensor,
    behave: bool,
) -> Array:
    """-dloss/dlogits_KSU of scored bigrams through the kernel."""
    K, S, U = mdp.shape
    if not len(source):
        return np.zeros(mdp.shape)
    head_VV = torch.tensor(head_of(mdp, logits_KSU), requires_grad=True)
    hidden_AV = torch.nn.functional.one_hot(torch.tensor(source), mdp.vocabulary).double()
    action_A = torch.tensor(action)
    logprob_A = (hidden_AV @ head_VV.detach().T).log_softmax(-1)
    output = turn_surrogate(
        hidden_AV,
        head_VV,
        action_A,
        behavior_A=logprob_A[torch.arange(len(action)), action_A] if behave else None,
        advantage_A=floats[0],
        weight_A=floats[1],
        clip_low=0.2,
        clip_high=0.2,
        impl="torch",
    )
    output.loss.backward()
    assert head_VV.grad is not None
    return -head_VV.grad[:U, U + 1 :].T.reshape(K, S, U).numpy()


Stage = list[tuple[float, SiblingGroup]]


def stage(mdp: TurnMDP, policy_KSU: Array, turn: int, n: int) -> Stage:
    """Every group of n siblings that a trunk of the policy can lead to at a boundary; the
    probabilities add up to that of reaching it."""
    visit_S = visits(mdp, policy_KSU)[turn]
    return [
        (visit_S[s] * p, group)
        for s in np.flatnonzero(visit_S).tolist()
        for p, group in draws(episodes(mdp, policy_KSU, turn, s), n)
    ]


def expected_ascent(
    mdp: TurnMDP,
    logits_KSU: Array,
    batches: Iterable[tuple[float, list[SiblingGroup]]],
    config: Config,
    keep: Callable[[Credits], bool] = lambda credits: True,
    behave: bool = True,
) -> Array:
    """E[update] over batches of groups. `keep` filters groups before credit: a broken estimator."""
    terms = []
    for p, groups in batches:
        chosen = [group for group in groups if keep(credited([group], config))]
        credits = credited(chosen, config)
        terms += [(p, credit) for group in credits for credit in group]
    return ascent(mdp, logits_KSU, terms, behave)


def singles(groups: Stage) -> list[tuple[float, list[SiblingGroup]]]:
    return [(p, [group]) for p, group in groups]


def pairs(left: Stage, right: Stage) -> list[tuple[float, list[SiblingGroup]]]:
    return [(p * q, [a, b]) for (p, a), (q, b) in product(left, right)]


def one_token(mdp: TurnMDP) -> TurnMDP:
    return replace(mdp, length_KSU=np.ones_like(mdp.length_KSU))


def problem(seed: int, shape=(2, 2, 2), terminal_only: bool = True) -> tuple[TurnMDP, Array]:
    rng = np.random.default_rng(seed)
    return one_token(random_mdp(rng, shape, terminal_only)), rng.normal(size=shape)


def test_the_exact_gradient_is_the_slope_of_the_objective():
    """The yardstick: visit · π · A is dJ/dlogits, by central differences."""
    mdp, logits_KSU = problem(0, (3, 2, 2))
    want_KSU, step = np.zeros(mdp.shape), 1e-5
    for cell in np.ndindex(mdp.shape):
        up, down = logits_KSU.copy(), logits_KSU.copy()
        up[cell], down[cell] = up[cell] + step, down[cell] - step
        rise = objective(mdp, softmax(up)) - objective(mdp, softmax(down))
        want_KSU[cell] = rise / (2 * step)
    got_KSU = policy_gradient(mdp, softmax(logits_KSU))
    np.testing.assert_allclose(got_KSU, want_KSU, rtol=0, atol=1e-9)


@pytest.mark.parametrize("behave", [True, False])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_stage_climbs_the_gradient_of_its_turn_alone(turn, behave):
    """Eqs. 6 and 56, theorem 2(c), eq. 80: for one-token turns the expected update of stage k is
    (G-2)/(G-1) · dJ/dlogits_k, and nothing at all for the other turns, whose tokens the siblings
    sampled as well. With recorded behaviour and without (ratio one either way)."""
    mdp, logits_KSU = problem(1, terminal_only=False)
    policy_KSU = softmax(logits_KSU)
    groups = stage(mdp, policy_KSU, turn, members(RTPO))
    got_KSU = expected_ascent(mdp, logits_KSU, singles(groups), RTPO, behave=behave)
    want_KSU = np.zeros(mdp.shape)
    want_KSU[turn] = FACTOR["rtpo"] * policy_gradient(mdp, policy_KSU)[turn]
    assert np.abs(want_KSU).max() > 0.01
    np.testing.assert_allclose(got_KSU, want_KSU, **EXACT)


def test_trajectories_of_equal_length_climb_the_same_gradient():
    """A bound on what eq. 57 can do: V(S_k) - μ does not depend on the action, so with one weight
    for all tokens it has no part in the mean update (score functions have mean zero). Trajectory
    credit then points along dJ/dlogits at every turn, (G-1)/G · 1/K of it; it is the credit of
    single samples that is wrong, and their noise that is larger."""
    mdp, logits_KSU = problem(2)
    policy_KSU = softmax(logits_KSU)
    groups = list(draws(whole_episodes(mdp, policy_KSU), members(GRPO)))
    got_KSU = expected_ascent(mdp, logits_KSU, singles(groups), GRPO)
    want_KSU = FACTOR["grpo"] / 2 * policy_gradient(mdp, policy_KSU)
    np.testing.assert_allclose(got_KSU, want_KSU, **EXACT)


def test_lengths_are_divided_out_of_each_macro_action():
    """Eq. 6 with turns of several tokens: a token weighs 1/T, so the expected update is
    (G-2)/(G-1) · Σ visit · π · (A/T - mean of A/T), a policy gradient for A(u)/T(u). It is dJ only
    where all responses of a state are equally long; longer ones are held back."""
    rng = np.random.default_rng(3)
    mdp, logits_KSU = random_mdp(rng, (2, 2, 2)), rng.normal(size=(2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    q_KSU, v_KS = values(mdp, policy_KSU)
    assert np.ptp(mdp.length_KSU[0], axis=-1).max() > 0
    got_KSU = expected_ascent(
        mdp, logits_KSU, singles(stage(mdp, policy_KSU, 0, members(RTPO))), RTPO
    )
    score_SU = (q_KSU[0] - v_KS[0][:, None]) / mdp.length_KSU[0]
    centre_S = (policy_KSU[0] * score_SU).sum(-1, keepdims=True)
    want_SU = FACTOR["rtpo"] * mdp.start_S[:, None] * policy_KSU[0] * (score_SU - centre_S)
    np.testing.assert_allclose(got_KSU[0], want_SU, **EXACT)
    true_SU = FACTOR["rtpo"] * policy_gradient(mdp, policy_KSU)[0]
    assert np.abs(got_KSU[0] - true_SU).max() > 0.01


def split(length_good: int, length_bad: int) -> TurnMDP:
    """Turn 0 leads to hard (0) or easy (1) by chance; at turn 1 action 0 is better by 0.2."""
    to_either = (Outcome(0.5, 0.0, 0), Outcome(0.5, 0.0, 1))
    last = [[bernoulli(0.3), bernoulli(0.1)], [bernoulli(0.9), bernoulli(0.7)]]
    length_KSU = np.ones((2, 2, 2), np.int64)
    length_KSU[1] = [length_good, length_bad]
    return TurnMDP(np.array([1.0, 0.0]), [[[to_either] * 2] * 2, last], length_KSU)


@pytest.mark.parametrize(("lengths", "reversed_state"), [((1, 9), 0), ((9, 1), 1)])
def test_the_wrong_sign_reaches_the_gradient_when_lengths_differ(lengths, reversed_state):
    """The reversal of section B.2 (eq. 11) in the update itself: with 1/tokens weights the upstream
    term no longer cancels, and the mean update of trajectory credit pushes the better action of one
    state down. The mean update of the siblings pushes it up in both."""
    mdp, logits_KSU = split(*lengths), np.zeros((2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    assert (policy_gradient(mdp, policy_KSU)[1, :, 0] > 0).all()
    whole = list(draws(whole_episodes(mdp, policy_KSU), members(GRPO)))
    flat_KSU = expected_ascent(mdp, logits_KSU, singles(whole), GRPO)
    assert flat_KSU[1, reversed_state, 0] < -1e-3
    assert flat_KSU[1, 1 - reversed_state, 0] > 1e-3
    groups = stage(mdp, policy_KSU, 1, members(RTPO))
    matched_KSU = expected_ascent(mdp, logits_KSU, singles(groups), RTPO)
    assert (matched_KSU[1, :, 0] > 1e-3).all()


def loud(credits: Credits) -> bool:
    """Whether a group has any signal."""
    return not zero_advantage(credits[0])


def silence(groups: Stage) -> float:
    """Probability that a group of these has no signal, given that there is one."""
    quiet = sum(p for p, group in groups if not loud(credited([group], RTPO)))
    return quiet / sum(p for p, _ in groups)


def test_silent_groups_belong_to_the_denominator():
    """Eq. 6 averaged over a batch: the mean over two groups, silent ones included, has the same
    expectation as one group. Dropping silent groups first multiplies it by 1 + P(silent): the step
    grows by itself as the policy gets surer."""
    mdp, logits_KSU = split(1, 1), np.zeros((2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    groups = stage(mdp, policy_KSU, 1, members(RTPO))
    want_KSU = np.zeros(mdp.shape)
    want_KSU[1] = FACTOR["rtpo"] * policy_gradient(mdp, policy_KSU)[1]
    two = pairs(groups, groups)
    np.testing.assert_allclose(expected_ascent(mdp, logits_KSU, two, RTPO), want_KSU, **EXACT)
    dropped_KSU = expected_ascent(mdp, logits_KSU, two, RTPO, keep=loud)
    quiet = silence(groups)
    assert quiet > 0.5
    np.testing.assert_allclose(dropped_KSU, (1 + quiet) * want_KSU, **EXACT)


def test_dropping_silent_groups_turns_the_gradient():
    """Eq. 6 with one group of each of two tasks: dropping silent groups weighs a task by how silent
    the other one is, so the direction changes and not only the length."""
    to_own = [[(Outcome(1.0, 0.0, s),)] * 2 for s in range(2)]
    last = [[bernoulli(0.05), bernoulli(0.0)], [bernoulli(0.7), bernoulli(0.3)]]
    mdp = TurnMDP(np.array([0.5, 0.5]), [to_own, last], np.ones((2, 2, 2), np.int64))
    logits_KSU = np.zeros((2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    tasks = [list(draws(episodes(mdp, policy_KSU, 1, s), members(RTPO))) for s in range(2)]
    quiet_S = np.array([silence(groups) for groups in tasks])
    want_KSU = np.zeros(mdp.shape)
    want_KSU[1] = FACTOR["rtpo"] * policy_gradient(mdp, policy_KSU)[1]
    two = pairs(*tasks)
    np.testing.assert_allclose(expected_ascent(mdp, logits_KSU, two, RTPO), want_KSU, **EXACT)
    dropped_KSU = expected_ascent(mdp, logits_KSU, two, RTPO, keep=loud)
    stretch_SU = (1 + quiet_S[::-1])[:, None]
    np.testing.assert_allclose(dropped_KSU[1], stretch_SU * want_KSU[1], **EXACT)
    cosine = (dropped_KSU * want_KSU).sum()
    cosine /= np.linalg.norm(dropped_KSU) * np.linalg.norm(want_KSU)
    assert quiet_S[0] - quiet_S[1] > 0.4 and cosine < 1 - 1e-4


def test_stages_that_not_every_trunk_reaches():
    """Reverse stages with a policy that stops (algorithm 1): stage k averages over the trunks that
    got there, so its expected update is dJ/dlogits_k times (G-2)/(G-1) · P(any of M gets there) /
    P(one gets there). The direction is right; rare stages take larger steps."""
    rng = np.random.default_rng(5)
    ends = (Outcome(1.0, 0.3, None),)
    on = tuple(Outcome(p, 0.0, s) for s, p in enumerate((0.3, 0.7)))
    last = [[bernoulli(rng.random()) for _ in range(2)] for _ in range(2)]
    mdp = TurnMDP(np.array([1.0, 0.0]), [[[ends, on]] * 2, last], np.ones((2, 2, 2), np.int64))
    logits_KSU = rng.normal(size=(2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    groups = stage(mdp, policy_KSU, 1, members(RTPO))
    reach = float(visits(mdp, policy_KSU)[1].sum())
    assert 0.2 < reach < 0.8
    batches = pairs(groups, groups) + [(2 * (1 - reach) * p, [group]) for p, group in groups]
    got_KSU = expected_ascent(mdp, logits_KSU, batches, RTPO)
    any_of_two = 1 - (1 - reach) ** 2
    want_SU = FACTOR["rtpo"] * any_of_two / reach * policy_gradient(mdp, policy_KSU)[1]
    np.testing.assert_allclose(got_KSU[1], want_SU, **EXACT)
    np.testing.assert_allclose(got_KSU[0], 0.0, **EXACT)


@pytest.mark.parametrize("config", [RTPO, GRPO], ids=lambda c: c.algorithm)
def test_packing_keeps_the_update(config):
    """Eqs. 1 and 6 through the packer: shared contexts and shared first tokens change where numbers
    lie and not their sum (float32 weights, hence 1e-6)."""
    rng = np.random.default_rng(4)
    mdp, logits_KSU = random_mdp(rng, (2, 2, 2)), rng.normal(size=(2, 2, 2))
    policy_KSU = softmax(logits_KSU)
    pool = episodes(mdp, policy_KSU, 0, 0)
    groups = [group for _, group in list(draws(pool, 3))[::7]]
    credits = credited(groups, config)
    want_KSU = ascent(mdp, logits_KSU, [(1.0, c) for group in credits for c in group])
    got_KSU = np.zeros(mdp.shape)
    batches = pack(credits, budget_T=6)
    assert len(batches) > 1
    for batch in batches:
        source_A = batch.token_T[batch.source_A].tolist()
        floats = torch.stack([batch.advantage_A, batch.weight_A]).double()
        got_KSU += surrogate(mdp, logits_KSU, source_A, batch.action_A.tolist(), floats, True)
    assert np.abs(want_KSU).max() > 1e-2
    np.testing.assert_allclose(got_KSU, want_KSU, rtol=0, atol=1e-6)
