"""RTPO's options: each changes what is sampled or credited, and none the mean of the update."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, ConfigError, override
from fastturn.envs.base import Task
from fastturn.episode import Point
from fastturn.expand import every_boundary, inclusion
from fastturn.play import Unmetered
from fastturn.tree import Rollout, stages
from fastturn.types import SiblingGroup, Trunk

from .mdp import (
    Array,
    TurnMDP,
    action_of,
    credited,
    draws,
    episodes,
    mean_advantage,
    members,
    softmax,
    values,
)
from .test_advantage import problem
from .test_forks import TableDomain, TableRenderer, TableSampler, walk

EXACT = {"rtol": 0, "atol": 1e-12}


def rtpo(*options: str, group_size: int = 5, gamma: float = 1.0) -> Config:
    return Config(algorithm_options=options, group_size=group_size, gamma=gamma, turns=3, seed=11)


@pytest.mark.parametrize(("group_size", "turn"), [(3, 0), (4, 0), (3, 1), (5, 1)])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_leaving_one_out_leaves_no_factor(group_size, turn, gamma):
    """E[A_j | S_k, u_j] = A(S_k, u_j): the factor (G-1)/(G-2) undoes eq. 56's exactly."""
    mdp, policy_KSU = problem(group_size)
    q_KSU, v_KS = values(mdp, policy_KSU, gamma)
    config = rtpo("leave_one_out=1", group_size=group_size, gamma=gamma)
    for s in range(mdp.shape[1]):
        pool = episodes(mdp, policy_KSU, turn, s)
        got_U = mean_advantage(mdp, pool, members(config), turn, config)[s]
        np.testing.assert_allclose(got_U, q_KSU[turn, s] - v_KS[turn, s], **EXACT)


@pytest.mark.parametrize("left_out", [0, 1])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_continuations_are_credited_where_they_meet(left_out, gamma):
    """Enumerated: of m siblings that take turn h in one state, E[A | S_h, u] = (m-1)/m A(S_h, u)
    for every m, h, state and action, and A where one is left out; alone they are not credited."""
    mdp = walk()
    policy_KSU = softmax(np.random.default_rng(3).normal(size=mdp.shape))
    q_KSU, v_KS = values(mdp, policy_KSU, gamma)
    config = rtpo("continuations=1", f"leave_one_out={left_out}", gamma=gamma)
    sums: defaultdict[tuple[int, ...], Array] = defaultdict(lambda: np.zeros(2))
    for p, group in draws(episodes(mdp, policy_KSU, 0, 0), members(config)):
        met = Counter(histories(group))
        for credit in credited([group], config)[0]:
            for h, turn in enumerate(credit.trajectory.turns):
                m = met[history(credit.trajectory.turns[:h])]
                if m == 1:
                    assert credit.advantage_U[h] == credit.weight_U[h] == 0
                k, s = mdp.state_of(turn)
                sums[k, s, action_of(turn), m] += p * np.array([credit.advantage_U[h], 1.0])
    assert {h for h, *_ in sums} == {0, 1, 2} and {m for *_, m in sums} == {1, 2, 3, 4}
    for (k, s, u, m), (total, mass) in sums.items():
        factor = 1 if left_out and m > 1 else (m - 1) / m
        np.testing.assert_allclose(total / mass, factor * (q_KSU[k, s, u] - v_KS[k, s]), **EXACT)


def history(turns: Sequence) -> tuple[int, ...]:
    return tuple(action_of(turn) for turn in turns)


def histories(group: SiblingGroup) -> list[tuple[int, ...]]:
    return [history(t.turns[:h]) for t in group.siblings for h in range(len(t.turns))]


def test_later_turns_weigh_as_the_first():
    """Every credited token of a turn weighs 1/siblings · 1/T, at the fork and after it."""
    mdp = walk()
    policy_KSU = softmax(np.zeros(mdp.shape))
    config = rtpo("continuations=1")
    scored = 0
    for _, group in draws(episodes(mdp, policy_KSU, 0, 0), members(config)):
        for credit in credited([group], config)[0]:
            for turn, weight in zip(credit.trajectory.turns, credit.weight_U, strict=True):
                if weight:
                    assert weight == pytest.approx(1 / 4 / len(turn.completion.action_A))
            scored += bool(credit.weight_U[1:].any())
    assert scored > 100


@dataclass
class Table:
    """A rollout of the table's process: trunks of version 0, siblings of version 1."""

    mdp: TurnMDP = field(default_factory=walk)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        policies = [softmax(0.5 * rng.normal(size=self.mdp.shape)) for _ in range(2)]
        self.policy_KSU = policies[1]
        self.sampler = TableSampler(self.mdp, policies)

    def trunks(self, n: int, each: int = 1) -> list[Trunk]:
        self.sampler.publish(0)
        tasks = [Task(f"t{i}", {"state": i % 2}) for i in range(n)]
        run = self.rollout(Config(turns=3))
        return run.grow(run.roots(tasks, each), ("trunk",))

    def rollout(self, config: Config) -> Rollout:
        return Rollout(
            TableDomain(self.mdp), TableRenderer(), self.sampler, config, Unmetered()
        )  # fmt: skip


def contributions(
    table: Table, config: Config, points: Sequence[Point], groups: Sequence[SiblingGroup]
) -> dict[tuple[int, int, int], Array]:
    """Of every (turn, state, action): what each point in that state adds to the stage's loss
    there, Σ weight · tokens · advantage, times the points of the stage: [points in that state]."""
    found: dict[tuple[str, int, int], Array] = {}
    for group, credits in zip(groups, credited(groups, config), strict=True):
        added_U = found.setdefault((group.task, group.trunk, group.turn), np.zeros(2))
        for credit in credits:
            turn = credit.trajectory.turns[0]
            share = credit.weight_U[0] * len(turn.completion.action_A)
            added_U[action_of(turn)] += share * credit.advantage_U[0] * len(points)
    by_state: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for point in points:
        added_U = found.get((point.task.id, point.trunk, point.turn), np.zeros(2))
        for u in (0, 1):
            by_state[(*point.env_state, u)].append(added_U[u])
    return {cell: np.array(values) for cell, values in by_state.items()}


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        (("agreed=0.3",), 2 / 4),
        (("agreed=0.3", "leave_one_out=1"), 1.0),
    ],
)
def test_pairs_decide_and_others_estimate(options, factor):
    """Every state's and action's part of the stage's update has the mean of plain siblings,
    π(u) A(s, u), times a factor that is the same everywhere: within 4.5 standard errors, each below
    a fifth of the largest part, in all twelve places."""
    table, config = Table(), rtpo(*options)
    q_KSU, v_KS = values(table.mdp, table.policy_KSU)
    want_KSU = factor * table.policy_KSU * (q_KSU - v_KS[..., None])
    trunks = table.trunks(400)
    table.sampler.publish(1)
    sample, n = algorithm_of(config).sample, members(config)
    forked = 0
    for k, points in stages(trunks):
        groups = sample(table.rollout(config), points, n, ("fork", k))
        forked += sum(len(group.siblings) for group in groups)
        for cell, got_N in contributions(table, config, points, groups).items():
            error = got_N.std() / np.sqrt(len(got_N))
            assert error < 0.2 * np.abs(want_KSU).max()
            assert abs(got_N.mean() - want_KSU[cell]) < 4.5 * error + 1e-12, cell
    everything = n * sum(len(trunk.snapshots) for trunk in trunks)
    assert 0.5 * everything < forked < 0.95 * everything


def test_more_siblings_count_one_over_their_probability():
    """Given the pairs: all that disagree are sampled further and count once, the others with
    probability .3 and count 1/.3 times; together what each of n counts is (n - 2)/n."""
    table, config = Table(), rtpo("agreed=0.3")
    points = [point for trunk in table.trunks(800) for point in trunk.snapshots[:1]]
    groups = algorithm_of(config).sample(table.rollout(config), points, 4, ("fork", 0))
    pairs, more = groups[: len(points)], {group.task: group for group in groups[len(points) :]}
    scale = len(groups) / len(points)
    drawn = []
    for pair in pairs:
        assert pair.weight == pytest.approx(scale * 2 / 4)
        agree = len({t.discounted_return() for t in pair.siblings}) == 1
        if not agree:
            assert more[pair.task].weight == pytest.approx(scale * 2 / 4)
        else:
            drawn.append(pair.task in more)
        if agree and pair.task in more:
            assert more[pair.task].weight == pytest.approx(scale * 2 / 4 / 0.3)
    assert len(drawn) > 100
    assert abs(np.mean(drawn) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(drawn))


def test_chosen_boundaries_count_one_over_their_probability():
    """Over many draws, what a boundary counts in the mean of its stage averages to what it counts
    without the choice, for every boundary, within 5 standard errors; and the choice has effect."""
    trunks = Table().trunks(6, each=2)
    whole = dict(every_boundary(trunks, rtpo(), ()))
    counts: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    sizes = []
    for draw in range(1500):
        thinned = dict(every_boundary(trunks, rtpo(), (draw,), boundaries=0.4))
        assert list(thinned) == [turn for turn in whole if turn in thinned]
        sizes.append(sum(map(len, thinned.values())))
        for turn, points in whole.items():
            kept = {(p.task.id, p.trunk): p.weight for p in thinned.get(turn, ())}
            for p in points:
                share = kept.get((p.task.id, p.trunk), 0.0) / max(1, len(kept)) * len(points)
                counts[p.task.id, p.trunk, turn].append(share)
    total = sum(map(len, whole.values()))
    assert len(counts) == total
    assert abs(np.mean(sizes) - 0.4 * total) < 0.02 * total
    for place, share_N in counts.items():
        error = np.std(share_N) / np.sqrt(len(share_N))
        assert abs(np.mean(share_N) - 1) < 5 * error, place
    chosen = [np.count_nonzero(share_N) / len(share_N) for share_N in counts.values()]
    assert max(chosen) > 1.3 * min(chosen)


def test_weights_reach_groups_and_their_credit():
    table, config = Table(), rtpo()
    (point, *_) = table.trunks(1)[0].snapshots
    run = table.rollout(config)
    plain, heavy = (
        run.fork([replace(point, weight=weight)], 4, ("fork",)) for weight in (1.0, 2.5)
    )
    assert heavy[0].weight == 2.5
    for one, other in zip(*(credited(groups, config)[0] for groups in (plain, heavy)), strict=True):
        assert other.weight_U.tolist() == (2.5 * one.weight_U).tolist()


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.floats(0.05, 0.95),
)
@settings(max_examples=100, deadline=None)
def test_inclusion_keeps_its_bounds(scores, share):
    """Probabilities follow the scores, stay in [share/4, 1] and add up to the share."""
    score_N = np.array(scores)
    probability_N = inclusion(score_N, share)
    assert probability_N.min() >= share / 4 and probability_N.max() <= 1
    order = np.argsort(score_N, kind="stable")
    assert (np.diff(probability_N[order]) >= -1e-9).all()
    if score_N.min() > 1e-3:
        assert probability_N.sum() == pytest.approx(share * len(scores), rel=1e-6)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["algorithm_options=agreed=0"], "agreed=0.0: expected a share above 0 and at most 1"),
        (["algorithm_options=boundaries=2"], "boundaries=2.0: expected a share"),
        (["algorithm_options=agreed=0.5", "group_size=4"], "rtpo needs at least 5"),
    ],
)
def test_impossible_options_are_refused(pairs, message):
    with pytest.raises(ConfigError, match=message):
        override(Config(), pairs)
