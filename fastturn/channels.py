"""Two channels of reward: the outcome, and the path (rules.py), each credited for itself.

    groups ── outcome ───────> algorithm.credit ── A, w ─┐
       └───── path rewards ──> algorithm.path ──── A, w ─┴─> Σ_c scale_c · w_c · A_c

A credit is a function of groups, whatever their rewards mean; the path's is computed on groups
whose rewards are what the rules said. So each channel has its own mean and its own standard
deviation, and where every outcome of a group is the same, the path alone still teaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastturn.config import Config
from fastturn.types import Credit, Hit, SiblingGroup, Trajectory

if TYPE_CHECKING:
    from fastturn.algorithms import Algorithm

PATIENCE = 3  # iterations in a row at `anneal` or above before the path channel begins to fade


def credited(
    algorithm: Algorithm, groups: Sequence[SiblingGroup], config: Config, scale: float = 1.0
) -> list[list[Credit]]:
    """The algorithm's credit of the channels in `config.rewards`, `scale` times that of the path.

    Example: outcomes (1, 0) and one penalty of .25 in the first sibling: RTPO's advantages are
    (.5, -.5) + scale * (-.125, .125).
    """
    channels = []
    if "outcome" in config.rewards:
        channels.append((1.0, algorithm.credit(groups, config)))
    walked = [
        replace(group, siblings=tuple(on_path(t, config) for t in group.siblings))
        for group in groups
    ]
    if not channels or any(turn.reward for g in walked for t in g.siblings for turn in t.turns):
        channels.append((scale, algorithm.path(walked, config)))
    if len(channels) == 1 and "outcome" in config.rewards:
        return channels[0][1]
    return [
        [
            _sum(trajectory, [(factor, credits[g][i]) for factor, credits in channels])
            for i, trajectory in enumerate(group.siblings)
        ]
        for g, group in enumerate(groups)
    ]


def _sum(trajectory: Trajectory, parts: Sequence[tuple[float, Credit]]) -> Credit:
    """One weight and one advantage a turn, with the product that the channels add up to."""
    weight_U = np.max([credit.weight_U for _, credit in parts], axis=0)
    product_U = np.sum([f * credit.weight_U * credit.advantage_U for f, credit in parts], axis=0)
    advantage_U = np.divide(product_U, weight_U, out=np.zeros_like(weight_U), where=weight_U > 0)
    spans = tuple(
        replace(span, advantage=span.advantage * factor * credit.weight_U[span.turn] / whole)
        for factor, credit in parts
        for span in credit.spans
        if (whole := weight_U[span.turn])
    )
    return Credit(trajectory, advantage_U, weight_U, spans)


def on_path(trajectory: Trajectory, config: Config) -> Trajectory:
    """The trajectory with what the trained rules say, and its sum as the reward of each turn."""
    return _rewarded(trajectory, path_hits(trajectory, config), outcome=0.0, scale=1.0)


def folded(group: SiblingGroup, config: Config, scale: float = 1.0) -> SiblingGroup:
    """The group with both channels added up to one reward, for credits that know only one."""
    outcome = float("outcome" in config.rewards)

    siblings = (_rewarded(t, path_hits(t, config), outcome, scale) for t in group.siblings)
    return replace(group, siblings=tuple(siblings))


def path_hits(trajectory: Trajectory, config: Config) -> list[tuple[Hit, ...]]:
    """What the trained rules said of every turn; fulfilments of a failed episode say nothing when
    they are "gated"."""
    counted = set(config.rewards)
    if "gated" in counted and trajectory.success:
        counted.add("fulfilment")
    return [tuple(hit for hit in turn.path if hit.channel in counted) for turn in trajectory.turns]


def _rewarded(
    trajectory: Trajectory, path: Sequence[tuple[Hit, ...]], outcome: float, scale: float
) -> Trajectory:
    """Rewards that are `outcome` times the environment's and `scale` times those of the path."""
    turns = tuple(
        replace(
            turn, reward=outcome * turn.reward + scale * sum(hit.value for hit in hits), path=hits
        )
        for turn, hits in zip(trajectory.turns, path, strict=True)
    )
    return replace(trajectory, turns=turns)


@dataclass(frozen=True, slots=True)
class Variance:
    """Variance within groups of the return R = O + s P, the mean over groups, and its parts:
    Var R = Var O + s^2 Var P + 2 s Cov(O, P) (RLVP, eq. 1). `silent_*`: the share of groups in
    which the channel's returns are all equal, so that it teaches nothing; `silent`: in which both
    are."""

    var_return: float
    var_outcome: float
    var_path: float
    cov_outcome_path: float
    silent_outcome: float
    silent_path: float
    silent: float


def variance(
    groups: Sequence[Sequence[Trajectory]], config: Config, scale: float = 1.0
) -> Variance:
    """The decomposition over the groups of a stage; zeros when there are none.

    Example: one group, outcomes (1, 0), path returns (-.25, 0), scale 1: Var O = .25, Var P =
    .015625, Cov = -.0625, Var R = .140625.
    """
    rows = [
        _decomposed(
            [t.discounted_return(config.gamma) for t in group],
            [on_path(t, config).discounted_return(config.gamma) for t in group],
            scale,
        )
        for group in groups
    ]
    return Variance(*np.mean(rows, axis=0).tolist()) if rows else Variance(*[0.0] * 7)


def _decomposed(outcome: list[float], path: list[float], scale: float) -> tuple[float, ...]:
    o, p = np.array(outcome), np.array(path)
    cov = float(np.mean((o - o.mean()) * (p - p.mean())))
    total = float(np.var(o + scale * p))
    silent = np.ptp(o) == 0, np.ptp(p) == 0
    return total, float(np.var(o)), float(np.var(p)), cov, *silent, all(silent)


def held(violation_free: float, anneal: float) -> bool:
    """Whether episodes kept to the rules as often as `anneal` asks; 0 asks for nothing. Of
    successful ones: a policy that does nothing breaks no rule and has learnt none."""
    return 0 < anneal <= violation_free


def faded(streak: int) -> float:
    """The path channel's scale when compliance has held for `streak` iterations: whole for the
    first `PATIENCE`, then half of what it was in each. It is whole again when compliance drops.

    Example: streaks 0 to 5 give 1, 1, 1, 1, 0.5, 0.25.
    """
    return 0.5 ** max(0, streak - PATIENCE)
