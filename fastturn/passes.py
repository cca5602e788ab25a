"""Credits in several passes: one stage's samples, a step for every turn, last turn first.

After a pass the policy is no longer the one that sampled, so an earlier turn's advantage speaks of
continuations that the policy would not draw as often any more. Both algorithms here reweigh them by
how likely the current policy makes the turns that followed; `rtpo` needs none of it, because it
samples every stage anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fastturn import credit
from fastturn.config import Config
from fastturn.credit import Array, Credits
from fastturn.types import Credit, SiblingGroup, Trajectory

# Of every credited trajectory, in order: Σ over its tokens of weight · log(policy now / sampler).
LogRatios = Callable[[Credits], Array]


def seeupo(
    groups: Sequence[SiblingGroup], config: Config, log_ratios: LogRatios, *, bound: float = 2.0
) -> Iterator[Credits]:
    """Sequential updates of turns as agents (SeeUPO, Hu et al. 2026; HAPPO, Kuba et al.
    2022): turn k is trained on `A · prod_{h > k} s_h`, where s_h is the ratio of the later turn h,
    which earlier passes have moved, at most `bound` altogether. Ratios are length-normalised, as in
    the loss: s_h is the geometric mean over the tokens of the turn.

    Example: A = 0.5 and a last turn that its own pass made 1.2 times as likely: 0.6 at the turn
    before it.
    """
    whole = credit.by_turn(groups, config)
    for turn in reversed(range(_deepest(groups))):
        later = [
            [_scored(c, turn + 1, [1 / len(t.completion.action_A) for t in c.trajectory.turns])]
            for group in whole
            for c in group
        ]
        ratio = iter(np.minimum(np.exp(log_ratios(later)), bound).tolist())
        yield [[_only(c, turn, next(ratio)) for c in group] for group in whole]


def forked_turns(
    groups: Sequence[SiblingGroup], config: Config, *, leave_one_out: int = 0
) -> Credits:
    """RTPO's credit of the turns that were forked, without that of continuations: the passes of
    earlier turns would train those again."""
    return credit.rtpo(groups, config, leave_one_out=leave_one_out)


def rtpo_off_policy(
    groups: Sequence[SiblingGroup],
    config: Config,
    log_ratios: LogRatios,
    *,
    least: float = 0.5,
    most: float = 2.0,
    leave_one_out: int = 0,
) -> Iterator[Credits]:
    """RTPO on continuations of the policy that began the iteration (paper, eq. 105): all siblings
    are drawn at once, and what followed turn k counts `clamp(prod of the later tokens' ratios,
    least, most)` times: `R = r_k + omega (R_sampled - r_k)`.

    Example: r_k = 0, a later reward of 1 and later turns 1.5 times as likely by now: R = 1.5.
    """
    for turn in sorted({group.turn for group in groups}, reverse=True):
        stage = [group for group in groups if group.turn == turn]
        later = [
            [_scored(_blank(t), 1, [1.0] * len(t.turns))] for group in stage for t in group.siblings
        ]
        weight = iter(np.clip(np.exp(log_ratios(later)), least, most).tolist())
        reweighed = [
            replace(group, siblings=tuple(_reweighed(t, next(weight)) for t in group.siblings))
            for group in stage
        ]
        yield forked_turns(reweighed, config, leave_one_out=leave_one_out)


def _deepest(groups: Sequence[SiblingGroup]) -> int:
    return max((len(t.turns) for group in groups for t in group.siblings), default=0)


def _blank(trajectory: Trajectory) -> Credit:
    return Credit(trajectory, *np.ones((2, len(trajectory.turns))))


def _scored(given: Credit, first: int, weights: Sequence[float]) -> Credit:
    """Only to be scored: turns from `first` on, each of its tokens with its turn's weight; none
    where the trajectory has nothing to teach."""
    weight_U = np.array(weights) * bool(np.any(given.advantage_U))
    weight_U[:first] = 0
    return Credit(given.trajectory, given.advantage_U, weight_U)


def _only(given: Credit, turn: int, factor: float) -> Credit:
    """The credit of one turn, its advantage times `factor`; without it, nothing."""
    at_U = np.arange(len(given.weight_U)) == turn
    return Credit(given.trajectory, given.advantage_U * factor * at_U, given.weight_U * at_U)


def _reweighed(trajectory: Trajectory, weight: float) -> Trajectory:
    """The trajectory with the rewards of all turns but the first times `weight`."""
    first, *later = trajectory.turns
    return replace(
        trajectory, turns=(first, *(replace(t, reward=weight * t.reward) for t in later))
    )
