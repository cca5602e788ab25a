"""Credit of whole trajectories: one advantage for all that was sampled in an episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastturn.config import Config
from fastturn.credit.base import Array, Credits, advantages_of, centred, returns_of, shares, whole
from fastturn.types import SiblingGroup


def grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Trajectory-level credit (GRPO, Shao et al. 2024, eq. 3): one advantage for all turns.

    Every sampled token of a trajectory weighs `1/groups * 1/G * 1/tokens of the trajectory`; the
    paper's division by the group's standard deviation is `loss.normalize_std`. With leaves of a
    tree as the group it is ARPO's soft advantage attribution (Dong et al. 2025): a token that
    several leaves share is scored once for each, so its advantages average.

    Example: returns (1, 0), 20 and 10 tokens in all: advantages (.5, -.5), weights (1/40, 1/20).
    """
    return [
        [
            whole(trajectory, advantage, share / trajectory.tokens_sampled, config)
            for trajectory, advantage in centred(group, config)
        ]
        for group, share in shares(groups)
    ]


def dapo(groups: Sequence[SiblingGroup], config: Config, *, overlong: float = 0.2) -> Credits:
    """Token-level normalisation with a soft punishment of length (DAPO, Yu et al. 2025, eq. 8).

    Every sampled token weighs one over the sampled tokens of all groups that taught something;
    groups of equal returns are left out of that sum and weigh nothing. Before centring, a
    return is lowered by how far its episode reaches into the last `overlong` share of
    `sampling.episode_tokens`: linearly to -1 (eq. 13).

    Example: episode_tokens = 100 and overlong = 0.2: 80 tokens cost 0, 90 cost 0.5, 100 cost 1.
    """
    most = config.sampling.episode_tokens
    soft = overlong * most
    live = [np.ptp(returns_of(group, config)) > 0 for group in groups]
    pairs = zip(live, groups, strict=True)
    total = sum(t.tokens_sampled for alive, group in pairs if alive for t in group.siblings)

    def punished(group: SiblingGroup) -> Array:
        over = np.array([t.tokens_sampled - most + soft for t in group.siblings], np.float64)
        return returns_of(group, config) - (np.clip(over / soft, 0, 1) if soft else over > 0)

    return [
        [
            whole(trajectory, advantage, alive / max(1, total), config)
            for trajectory, advantage in zip(
                group.siblings, advantages_of(punished(group), config), strict=True
            )
        ]
        for alive, group in zip(live, groups, strict=True)
    ]


def dr_grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """GRPO without its two biases (Dr. GRPO, Liu et al. 2025): no division by the
    standard deviation, and one constant in place of each trajectory's length.

    Every sampled token weighs `1/groups * 1/G * 1/sampling.episode_tokens`.

    Example: returns (1, 0) and episode_tokens = 100: advantages (.5, -.5), weights (1/200, 1/200).
    """
    return [
        [
            whole(trajectory, advantage, share / config.sampling.episode_tokens, config)
            for trajectory, advantage in centred(group, config)
        ]
        for group, share in shares(groups)
    ]


def rloo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """REINFORCE with a leave-one-out baseline (RLOO, Ahmadian et al. 2024).

    `A_i = R_i - mean_{j != i} R_j = G/(G-1) (R_i - mean_j R_j)`; the log-probability of the whole
    trajectory is reinforced, so every sampled token weighs `1/groups * 1/G`.

    Example: returns (1, 0): advantages (1, -1), weights (1/2, 1/2).
    """
    return [
        [
            whole(trajectory, advantage * size / max(1, size - 1), share, config)
            for trajectory, advantage in centred(group, config)
        ]
        for group, share in shares(groups)
        for size in [len(group.siblings)]
    ]


def tree_grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Leaves compared twice (Tree-GRPO, Ji et al. 2025): within their tree and among all
    trees of the task; the advantage is the sum of both. A group is a task with all its leaves, each
    trained from the root on; tokens weigh as in GRPO.

    Example: trees of leaves (1, 0) and (1, 1): within (.5, -.5), (0, 0), among (.25, -.75, .25,
    .25), together (.75, -1.25, .25, .25).
    """
    result: Credits = []
    for group, share in shares(groups):
        returns = returns_of(group, config)
        tree = np.array([t.tree for t in group.siblings])
        advantages = advantages_of(returns, config)
        for one in np.unique(tree):
            advantages[tree == one] += advantages_of(returns[tree == one], config)
        result.append(
            [
                whole(trajectory, advantage, share / trajectory.tokens_sampled, config)
                for trajectory, advantage in zip(group.siblings, advantages, strict=True)
            ]
        )
    return result
