"""Every algorithm's credit: groups of trajectories -> one advantage and one weight for each turn.

A new algorithm is one function here and one line in `ALGORITHMS`. Weights are final: they hold the
paper's whole normalisation (groups, siblings, tokens), from the data and never from how the data is
cut into micro-batches. Turns that cannot move the policy get weight 0 and are never read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastturn.config import Config
from fastturn.types import Credit, SiblingGroup, Trajectory

Credits = list[list[Credit]]  # one list a group, one credit a trajectory


def rtpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Turn-level credit of state-matched siblings (RTPO, algorithm 1 and eq. 6).

    `A_j = R_j - mean_j R_j`; every token of turn k weighs `1/groups * 1/siblings * 1/T_jk`; later
    turns of a sibling only supply its return and weigh nothing. Silent groups stay in `groups`.

    Example, gamma = 1, one group, returns (1, 0), turns of 4 and 5 tokens: advantages (.5, -.5),
    weights (1/8, 1/10).
    """
    return [
        [
            _credit(trajectory, advantage, [share / _tokens(trajectory, 0)], config)
            for trajectory, advantage in _centred(group, config)
        ]
        for group in groups
        for share in [1 / (len(groups) * len(group.siblings))]
    ]


def grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Trajectory-level credit (GRPO; the paper's eq. 1): one advantage for all turns.

    Every sampled token of a trajectory weighs `1/groups * 1/G * 1/tokens of the trajectory`.

    Example: returns (1, 0), 20 and 10 tokens in all: advantages (.5, -.5), weights (1/40, 1/20).
    """
    return [
        [
            _credit(
                trajectory,
                advantage,
                [share / trajectory.tokens_sampled] * len(trajectory.turns),
                config,
            )
            for trajectory, advantage in _centred(group, config)
        ]
        for group in groups
        for share in [1 / (len(groups) * len(group.siblings))]
    ]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How an algorithm rolls out and what it credits.

    `reverse`: stages at every boundary of grown trunks, last turn first; otherwise one stage of
    whole episodes from the start. `unsampled`: members of G that are not sampled at a fork (RTPO
    counts the trunk). `least_group_size`: smaller groups carry no signal.
    """

    credit: Callable[[Sequence[SiblingGroup], Config], Credits]
    reverse: bool
    unsampled: int
    least_group_size: int


ALGORITHMS: dict[str, Algorithm] = {
    "rtpo": Algorithm(rtpo, reverse=True, unsampled=1, least_group_size=3),
    "grpo": Algorithm(grpo, reverse=False, unsampled=0, least_group_size=2),
}


def zero_advantage(group: Sequence[Credit]) -> bool:
    """Whether all advantages of the group are zero (its returns are equal)."""
    return not any(np.any(credit.advantage_U) for credit in group)


def _centred(group: SiblingGroup, config: Config) -> Iterator[tuple[Trajectory, float]]:
    """(trajectory, advantage) pairs: return minus the group's mean, over its std if asked for."""
    returns = np.array([t.discounted_return(config.gamma) for t in group.siblings], np.float64)
    # Equal returns are exactly zero advantage; their mean may differ from them in the last bit.
    advantages = np.zeros_like(returns) if np.ptp(returns) == 0 else returns - returns.mean()
    if config.loss.normalize_std and np.any(advantages):
        advantages = advantages / returns.std(ddof=1)
    return zip(group.siblings, advantages.tolist(), strict=True)


def _tokens(trajectory: Trajectory, turn: int) -> int:
    return len(trajectory.turns[turn].completion.action_A)


def _credit(
    trajectory: Trajectory, advantage: float, weights: list[float], config: Config
) -> Credit:
    """Credit for the first `len(weights)` turns; without a KL term a zero advantage weighs zero."""
    turns = len(trajectory.turns)
    scored = len(weights) if advantage != 0 or config.loss.kl_coef > 0 else 0
    weight_U = np.zeros(turns)
    weight_U[:scored] = weights[:scored]
    advantage_U = np.zeros(turns)
    advantage_U[: len(weights)] = advantage
    return Credit(trajectory, advantage_U, weight_U)
