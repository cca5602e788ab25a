"""Several steps on one stage's samples: what each pass trains, and how later turns reweigh it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, Sampling
from fastturn.learner import Learner
from fastturn.loss import Objective
from fastturn.pack import pack
from fastturn.play import Unmetered
from fastturn.policy import Policy
from fastturn.types import Boundary, SiblingGroup, Trajectory

from .formulas import (
    CLIP,
    PLAIN,
    STD,
    TEMPERATURE,
    Sibling,
    as_siblings,
    clipped,
    f32,
    groups,
    mean,
    standardised,
)
from .test_algorithm_gradients import gradients
from .test_policy import Wide, tiny

SAMPLING = Sampling(temperature=TEMPERATURE)
SEEUPO = Config(algorithm="seeupo", loss=STD, sampling=SAMPLING)
REUSED = Config(
    algorithm="rtpo_off_policy",
    loss=PLAIN,
    sampling=SAMPLING,
    algorithm_options=("least=0.9", "most=1.1"),
)


def learner(policy: Policy, config: Config) -> Learner:
    unused: Any = None
    return Learner(policy, unused, config, Unmetered(), Path())


def ratio(sibling: Sibling, turn: int) -> Tensor:
    """Length-normalised ratio of one turn."""
    return (sibling.new[turn] - sibling.old[turn]).mean().exp()


def seeupo(batch: Sequence[Sequence[Sibling]], turn: int, bound: float = 2.0) -> Tensor:
    """1/G sum_i min(s_k M, clip(s_k) M), M = A prod_{h > k} s_h (HAPPO's advantage with GSPO's
    ratios), the product at most `bound`."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for s, advantage in zip(group, standardised([s.ret for s in group]), strict=True):
            moved = min(bound, float(np.prod([ratio(s, h).item() for h in range(turn + 1, 2)])))
            total -= clipped(ratio(s, turn), f32(advantage * moved)) / len(group)
    return total / len(batch)


def passes(config: Config, made: list[SiblingGroup]) -> list[list[Tensor]]:
    """The gradient of every pass, at one and the same policy."""
    policy, algorithm = Policy(tiny("qwen3")), algorithm_of(config)
    objective = Objective(TEMPERATURE, **CLIP, surrogate=algorithm.surrogate)
    assert algorithm.passes is not None
    with Wide():
        own = learner(policy, config)
        packed = [pack(c, 10_000) for c in algorithm.passes(made, config, own.log_ratios)]
        return [
            gradients(policy, [policy(batch, objective).loss for batch in batches])
            for batches in packed
        ]


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    scale = max(float(grad.abs().max()) for grad in want)
    assert scale > 1e-3
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= 1e-9 * scale


@pytest.mark.parametrize("bound", [2.0, 0.9])
def test_seeupo_trains_turns_in_reverse_on_reweighed_advantages(bound: float) -> None:
    plain = tiny("qwen3")
    made = groups(plain)
    batch = as_siblings(plain, made)
    later = [ratio(s, 1).item() for group in batch for s in group]
    assert min(later) < 0.9 < max(later) < 2  # 0.9 binds and 2 does not
    last, first = passes(replace(SEEUPO, algorithm_options=(f"bound={bound}",)), made)
    equal(last, gradients(plain, [seeupo(batch, 1, bound)]))
    equal(first, gradients(plain, [seeupo(batch, 0, bound)]))


def test_where_nothing_has_moved_the_passes_are_the_credit() -> None:
    made, algorithm = groups(tiny("qwen3")), algorithm_of(SEEUPO)
    assert algorithm.passes is not None
    credits = algorithm.credit(made, SEEUPO)
    still = algorithm.passes(made, SEEUPO, lambda scored: np.zeros(sum(map(len, scored))))
    last, first = list(still)
    for group, at_last, at_first in zip(credits, last, first, strict=True):
        for one, late, early in zip(group, at_last, at_first, strict=True):
            np.testing.assert_array_equal(one.weight_U, late.weight_U + early.weight_U)
            np.testing.assert_array_equal(one.advantage_U, late.advantage_U + early.advantage_U)
            assert early.weight_U[1] == late.weight_U[0] == 0


def boundaries(made: Sequence[SiblingGroup]) -> list[SiblingGroup]:
    """The groups as siblings of turn 0, and their second turns as siblings of turn 1."""
    late = []
    for group in made:
        siblings = []
        for t in group.siblings:
            context_T = list(t.contexts())[1]
            turn = replace(t.turns[1], boundary=Boundary(0, context_T))
            siblings.append(Trajectory(t.task, 1, (turn,), t.ending))
        late.append(replace(group, turn=1, siblings=tuple(siblings)))
    return [*made, *late]


def test_off_policy_rtpo_reweighs_what_followed_the_turn() -> None:
    """A = R - mean R with R = r_k + clamp(prod of the later tokens' ratios, 0.9, 1.1) (R - r_k)
    (paper, eq. 105), on the tokens of turn k, weight 1/T; last turn first."""
    plain = tiny("qwen3")
    made = groups(plain)
    last, first = passes(REUSED, boundaries(made))
    batch = as_siblings(plain, made)

    def rtpo(turn: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for group in batch:
            returns = []
            for s in group:
                later = float((s.new[1] - s.old[1]).detach().sum().exp())
                omega = min(1.1, max(0.9, later))
                returns.append(s.rewards[1] if turn else s.rewards[0] + omega * s.rewards[1])
            for s, r in zip(group, returns, strict=True):
                advantage = f32(r - mean(returns)) if len(set(returns)) > 1 else 0.0
                ratio_A = (s.new[turn] - s.old[turn]).exp()
                total -= clipped(ratio_A, advantage).mean() / len(group)
        return total / len(batch)

    equal(last, gradients(plain, [rtpo(1)]))
    equal(first, gradients(plain, [rtpo(0)]))


def test_off_policy_rtpo_can_leave_one_out() -> None:
    """Four siblings: A (G-1)/(G-2) = 4/3 A in every pass, as in the credit that is shown."""
    made = boundaries(groups(tiny("qwen3")))
    options = (*REUSED.algorithm_options, "leave_one_out=1")

    def advantages(config: Config) -> list[np.ndarray]:
        algorithm = algorithm_of(config)
        assert algorithm.passes is not None
        still = algorithm.passes(made, config, lambda scored: np.zeros(sum(map(len, scored))))
        shown = algorithm.credit(made, config)
        return [c.advantage_U for credits in (*still, shown) for group in credits for c in group]

    plain, left_out = advantages(REUSED), advantages(replace(REUSED, algorithm_options=options))
    assert any(np.any(one) for one in plain)
    for one, other in zip(plain, left_out, strict=True):
        np.testing.assert_allclose(other, one * 4 / 3, rtol=1e-12)


def test_log_ratios_are_weighed_sums_in_the_order_of_the_credits() -> None:
    plain = tiny("qwen3")
    made = groups(plain)
    credits = algorithm_of(SEEUPO).credit(made, SEEUPO)
    with Wide():
        got = learner(Policy(tiny("qwen3")), SEEUPO).log_ratios(credits)
    siblings = [s for group in as_siblings(plain, made) for s in group]
    flat = [c for group in credits for c in group]
    want = [
        sum(
            w * float((new - old).sum().detach())
            for w, new, old in zip(c.weight_U, s.new, s.old, strict=True)
        )
        for c, s in zip(flat, siblings, strict=True)
    ]
    assert got.shape == (16,) and np.any(got)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [SEEUPO, REUSED])
def test_nothing_to_learn_is_no_pass_with_a_weight(config: Config) -> None:
    made = boundaries(groups(tiny("qwen3"))[2:])  # silent groups
    algorithm = algorithm_of(config)
    assert algorithm.passes is not None
    own = learner(Policy(tiny("qwen3", torch.float32)), config)
    for credits in algorithm.passes(made, config, own.log_ratios):
        assert not pack(credits, 1000)
