"""What the credits are made of: shares of the loss, centred returns, one `Credit` a trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastturn.config import Config
from fastturn.types import Credit, SiblingGroup, Trajectory

Credits = list[list[Credit]]  # one list a group, one credit a trajectory
Array = NDArray[np.float64]


def zero_advantage(group: Sequence[Credit]) -> bool:
    """Whether all advantages of the group are zero (its returns are equal)."""
    return not any(credit.spans or np.any(credit.advantage_U) for credit in group)


def shares(groups: Sequence[SiblingGroup]) -> Iterator[tuple[SiblingGroup, float]]:
    """Every group, and the share of the loss that each of its trajectories has."""
    for group in groups:
        yield group, group.weight / (len(groups) * len(group.siblings))


def centred(group: SiblingGroup, config: Config) -> Iterator[tuple[Trajectory, float]]:
    """(trajectory, advantage) pairs: return minus the group's mean, over its std if asked for."""
    return zip(
        group.siblings, advantages_of(returns_of(group, config), config).tolist(), strict=True
    )


def returns_of(group: SiblingGroup, config: Config) -> Array:
    return np.array([t.discounted_return(config.gamma) for t in group.siblings], np.float64)


def advantages_of(returns: Array, config: Config) -> Array:
    """Returns less their mean, over their standard deviation if asked for."""
    # Equal returns are exactly zero advantage; their mean may differ from them in the last bit.
    advantages = np.zeros_like(returns) if np.ptp(returns) == 0 else returns - returns.mean()
    if config.loss.normalize_std and np.any(advantages):
        advantages = advantages / returns.std(ddof=1)
    return advantages


def tokens_of(trajectory: Trajectory, turn: int) -> int:
    return len(trajectory.turns[turn].completion.action_A)


def whole(trajectory: Trajectory, advantage: float, weight: float, config: Config) -> Credit:
    """The same credit for every token of a trajectory."""
    return credit_of(trajectory, [advantage] * len(trajectory.turns), weight, config)


def credit_of(
    trajectory: Trajectory,
    advantages: ArrayLike,
    weight: ArrayLike,
    config: Config,
    kept: ArrayLike = False,
) -> Credit:
    """Credit for the first turns, as many as there are advantages, with one weight or one each;
    without a KL term turns of zero advantage weigh zero, unless they are `kept`."""
    given_U = np.asarray(advantages, np.float64)
    weight_U, advantage_U = np.zeros((2, len(trajectory.turns)))
    advantage_U[: len(given_U)] = given_U
    scored = np.asarray(kept) | (config.loss.kl_coef > 0)
    weight_U[: len(given_U)] = np.where(scored | (given_U != 0), weight, 0.0)
    return Credit(trajectory, advantage_U, weight_U)
