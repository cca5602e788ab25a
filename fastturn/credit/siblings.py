"""Credit of siblings that were forked at one state: their first turn alone, for what follows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from fastturn.config import Config
from fastturn.credit.base import Credits, advantages_of, credit_of, returns_of, shares, tokens_of
from fastturn.types import SiblingGroup


def rtpo(
    groups: Sequence[SiblingGroup],
    config: Config,
    *,
    leave_one_out: int = 0,
    continuations: int = 0,
) -> Credits:
    """Turn-level credit of state-matched siblings (RTPO, algorithm 1 and eq. 6).

    `A_j = R_j - mean_j R_j`; every token of turn k weighs `1/groups * 1/siblings * 1/T_jk`; later
    turns of a sibling only supply its return and weigh nothing. Silent groups stay in `groups`.

    leave_one_out=1: the baseline is the mean of the others, `A_j = (G-1)/(G-2) (R_j - mean R)`. It
    does not depend on the sibling's own draw, so `E[A_j | S_k, u_j] = A(S_k, u_j)` exactly, where
    the mean of all gives `(G-2)/(G-1) A`.

    continuations=1: later turns are credited as well where several siblings took them in one state,
    which those are that did the same since the fork (the same action in the same state is answered
    the same; where an environment draws from `Action.seed`, their states differ by chance that no
    turn of theirs moves: the mean stays, the variance does not). Which of m siblings meet there is
    decided by their earlier turns alone, so given the meeting their turns are independent draws of
    one policy in one state: the advantage of each among the m, of the return from there on, has
    mean `(m-1)/m A` (A with leave_one_out), and states only weigh more the more siblings visit
    them. Turns met alone weigh nothing.

    Example, gamma = 1, one group, returns (1, 0), turns of 4 and 5 tokens: advantages (.5, -.5),
    weights (1/8, 1/10).
    """
    result: Credits = []
    for group, share in shares(groups):
        advantages = [np.zeros(len(t.turns) if continuations else 1) for t in group.siblings]
        weights = [np.zeros_like(advantage_U) for advantage_U in advantages]
        for turn, meeting in _meetings(group, bool(continuations)):
            returns = [group.siblings[j].discounted_return(config.gamma, turn) for j in meeting]
            centred = advantages_of(np.array(returns), config)
            if leave_one_out:
                centred = centred * len(meeting) / max(1, len(meeting) - 1)
            for j, advantage in zip(meeting, centred, strict=True):
                advantages[j][turn] = advantage
                weights[j][turn] = share / tokens_of(group.siblings[j], turn)
        members = zip(group.siblings, advantages, weights, strict=True)
        result.append([credit_of(t, advantage_U, w_U, config) for t, advantage_U, w_U in members])
    return result


def _meetings(group: SiblingGroup, continued: bool) -> Iterator[tuple[int, list[int]]]:
    """(turn, siblings that took it in one state): all of them at the fork; with `continued` also
    those, two or more, that have done the same since.

    Example: siblings that act (a, b), (a, c), (d, e): (0, [0, 1, 2]) and (1, [0, 1]).
    """
    yield 0, list(range(len(group.siblings)))
    met = [list(range(len(group.siblings)))] if continued else []
    turn = 0
    while met:
        alike: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        for place, siblings in enumerate(met):
            for j in siblings:
                turns = group.siblings[j].turns
                if turn + 1 < len(turns):
                    alike[place, turns[turn].completion.action_A.tobytes()].append(j)
        met, turn = [siblings for siblings in alike.values() if len(siblings) > 1], turn + 1
        yield from ((turn, siblings) for siblings in met)


def refuel(groups: Sequence[SiblingGroup], config: Config, *, eta: float = 1.0) -> Credits:
    """Regression of the relative future (REFUEL, Gao et al. 2024): at one state, the
    log-ratios of two turns should differ by `eta` times what their futures differ by.

    `((l_1 - l_2) / eta - (R_1 - R_2))^2`, averaged over the pairs of a group, is
    `2 / ((n-1) eta^2) * sum_j (l_j - mean l - eta (R_j - mean R))^2`; the last factor is the
    surrogate "regression", the others are the weight, spread over the tokens of turn k. A group of
    equal returns has no gradient where the policy has not moved; afterwards it pulls back, so with
    several steps a stage it is kept.

    Example: returns (1, 0), eta = 1, turns of 4 and 5 tokens: advantages (.5, -.5), weights
    (2/4, 2/5).
    """
    moved = config.loss.epochs * config.loss.minibatches > 1
    result: Credits = []
    for group in groups:
        advantages = advantages_of(returns_of(group, config), config)
        scale = 2 / (len(groups) * max(1, len(group.siblings) - 1) * eta**2)
        kept = moved or bool(np.any(advantages))
        result.append(
            [
                credit_of(
                    trajectory, [eta * advantage], scale / tokens_of(trajectory, 0), config, kept
                )
                for trajectory, advantage in zip(group.siblings, advantages, strict=True)
            ]
        )
    return result
