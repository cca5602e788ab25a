"""Credit of single turns of an episode: what each earned, or its own share of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastturn.config import Config
from fastturn.credit.base import (
    Array,
    Credits,
    advantages_of,
    centred,
    credit_of,
    shares,
    tokens_of,
)
from fastturn.envs.base import events_by_call
from fastturn.types import Credit, SiblingGroup, Span, Trajectory


def attached(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Every reward stays with the turn that earned it: its advantage is the reward less the mean
    over all turns of the group, over their standard deviation if asked for. Tokens weigh as in
    GRPO. It is the path channel of algorithms that credit whole trajectories: spread over all
    tokens, a penalty would teach the turns that obeyed as well (RLVP, section 3).

    Of a turn with several calls, what a rule says of one call is left with its tokens.

    Example: turns with rewards (-.25, 0) and (0, 0): advantages (-.1875, .0625), (.0625, .0625).
    """
    result: Credits = []
    for group, share in shares(groups):
        earned = np.array([turn.reward for t in group.siblings for turn in t.turns], np.float64)
        ends = np.cumsum([len(t.turns) for t in group.siblings])[:-1]
        unit = earned.std(ddof=1) if config.loss.normalize_std and np.ptp(earned) else 1.0
        result.append(
            [
                _with_spans(trajectory, advantage_U, unit, share, config)
                for trajectory, advantage_U in zip(
                    group.siblings, np.split(advantages_of(earned, config), ends), strict=True
                )
            ]
        )
    return result


def _with_spans(
    trajectory: Trajectory, advantage_U: Array, unit: float, share: float, config: Config
) -> Credit:
    """Credit in which what was said of a single call has moved from its turn to its tokens."""
    spans = tuple(
        Span(u, *hit.span, hit.value / unit)
        for u, turn in enumerate(trajectory.turns)
        for hit in turn.path
        if hit.span is not None
    )
    moved_U = np.zeros(len(trajectory.turns))
    for span in spans:
        moved_U[span.turn] += span.advantage
    weight = share / trajectory.tokens_sampled
    given = credit_of(trajectory, advantage_U - moved_U, weight, config, kept=moved_U != 0)
    return replace(given, spans=spans)


def by_turn(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """GRPO's advantages with every turn normalised for itself: its tokens weigh `1/groups * 1/G *
    1/tokens of the turn`. Turns are then the agents of SeeUPO (Hu et al. 2026), one sequence each.

    Example: returns (1, 0), turns of 4 and 5 tokens, and of 2: advantages (.5, .5) and (-.5),
    weights (1/8, 1/10) and (1/4).
    """
    return [
        [
            credit_of(
                trajectory,
                [advantage] * len(trajectory.turns),
                [share / tokens_of(trajectory, u) for u in range(len(trajectory.turns))],
                config,
            )
            for trajectory, advantage in centred(group, config)
        ]
        for group, share in shares(groups)
    ]


def gigpo(
    groups: Sequence[SiblingGroup],
    config: Config,
    *,
    step_weight: float = 1.0,
    step_discount: float = 0.95,
) -> Credits:
    """Groups within the group (GiGPO, Feng et al. 2025, eq. 8): `A = A_episode + w A_step`.

    A_episode is GRPO's. A_step compares the turns of the group that were taken in the same state by
    their discounted rewards-to-go (`step_discount` a turn); a state met once gives 0. Two turns are
    in the same state when the policy read the same context ids. Tokens weigh as in GRPO.

    Example: two episodes with rewards (0, 1) and (0,) share turn 0 only; step_discount = 1 and
    step_weight = 1 give advantages (.5 + .5, .5) and (-.5 - .5).
    """
    return [
        [
            credit_of(
                trajectory,
                advantage + step_weight * step_U,
                share / trajectory.tokens_sampled,
                config,
            )
            for (trajectory, advantage), step_U in zip(
                centred(group, config), _within_states(group, config, step_discount), strict=True
            )
        ]
        for group, share in shares(groups)
    ]


def _within_states(group: SiblingGroup, config: Config, discount: float) -> list[Array]:
    """Of every trajectory: each turn's reward-to-go, centred among the turns of its state."""
    members: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(group.siblings):
        for u, context_T in enumerate(trajectory.contexts()):
            members[context_T.tobytes()].append((i, u))
    returns = [_togo([turn.reward for turn in t.turns], discount) for t in group.siblings]
    centred = [np.zeros_like(returns_U) for returns_U in returns]
    for places in members.values():
        found = advantages_of(np.array([returns[i][u] for i, u in places]), config)
        for (i, u), advantage in zip(places, found, strict=True):
            centred[i][u] = advantage
    return centred


def steptool(
    groups: Sequence[SiblingGroup],
    config: Config,
    *,
    call_reward: float = 0.1,
    step_discount: float = 0.99,
) -> Credits:
    """Rewards for every call, returned turn by turn (StepTool, Yu et al. 2024).

    A turn earns what the environment gave it plus `call_reward` times the share of its calls that
    raised no error event. The advantage of a turn is its discounted reward-to-go less the mean over
    all turns of the other trajectories: a baseline that its own action cannot move. Tokens weigh as
    in GRPO.

    Example, call_reward = .1, step_discount = 1: a good call then an answer worth 1, beside a bad
    call worth 0: rewards-to-go (1.1, 1) and (0,), advantages (1.1, 1) and (-1.05,).
    """
    result: Credits = []
    for group, share in shares(groups):
        earned = [_with_calls(t, call_reward) for t in group.siblings]
        togo = [_togo(rewards, step_discount) for rewards in earned]
        total, turns = sum(float(r.sum()) for r in togo), sum(map(len, togo))
        result.append(
            [
                credit_of(
                    trajectory,
                    returns_U - (total - returns_U.sum()) / max(1, turns - len(returns_U)),
                    share / trajectory.tokens_sampled,
                    config,
                )
                for trajectory, returns_U in zip(group.siblings, togo, strict=True)
            ]
        )
    return result


def _with_calls(trajectory: Trajectory, call_reward: float) -> list[float]:
    """The reward of every turn, that of its calls included."""
    calls_U = [events_by_call(turn.events) for turn in trajectory.turns]
    good_U = [sum(len(events) == 1 for events in calls) / max(1, len(calls)) for calls in calls_U]
    return [
        turn.reward + call_reward * good
        for turn, good in zip(trajectory.turns, good_U, strict=True)
    ]


def _togo(rewards: Sequence[float], discount: float) -> Array:
    """What was earned from every turn on, discounted by turns: R_u = r_u + discount R_{u+1}.

    Example: rewards (0, 1) and discount 0.9 give (0.9, 1).
    """
    togo = [0.0]
    for reward in reversed(rewards):
        togo.append(reward + discount * togo[-1])
    return np.array(togo[:0:-1], np.float64)
