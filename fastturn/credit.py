"""Every algorithm's credit: groups of trajectories -> one advantage and one weight for each turn.

A credit is a function of groups, the configuration and its own options (keyword arguments). Weights
are final: they hold the paper's whole normalisation (groups, siblings, tokens), from the data and
never from how the data is cut into micro-batches. Turns that cannot move the policy get weight 0
and are never read again.

All but `dapo` are separable: what a group gets depends on the group and on how many there are, so
`credit([group])` with its weights divided by the number of groups is the credit within a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastturn.config import Config
from fastturn.envs.base import events_by_call
from fastturn.types import Credit, SiblingGroup, Span, Trajectory

Credits = list[list[Credit]]  # one list a group, one credit a trajectory
Array = NDArray[np.float64]


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
    the same). Which of m siblings meet there is decided by their earlier turns alone, so given the
    meeting their turns are independent draws of one policy in one state: the advantage of each
    among the m, of the return from there on, has mean `(m-1)/m A` (A with leave_one_out), and
    states only weigh more the more siblings visit them. Turns met alone weigh nothing.

    Example, gamma = 1, one group, returns (1, 0), turns of 4 and 5 tokens: advantages (.5, -.5),
    weights (1/8, 1/10).
    """
    result: Credits = []
    for group, share in _shares(groups):
        advantages = [np.zeros(len(t.turns) if continuations else 1) for t in group.siblings]
        weights = [np.zeros_like(advantage_U) for advantage_U in advantages]
        for turn, meeting in _meetings(group, bool(continuations)):
            returns = [group.siblings[j].discounted_return(config.gamma, turn) for j in meeting]
            centred = _advantages(np.array(returns), config)
            if leave_one_out:
                centred = centred * len(meeting) / max(1, len(meeting) - 1)
            for j, advantage in zip(meeting, centred, strict=True):
                advantages[j][turn] = advantage
                weights[j][turn] = share / _tokens(group.siblings[j], turn)
        members = zip(group.siblings, advantages, weights, strict=True)
        result.append([_credit(t, advantage_U, w_U, config) for t, advantage_U, w_U in members])
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


def grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Trajectory-level credit (GRPO, Shao et al. 2024): one advantage for all turns.

    Every sampled token of a trajectory weighs `1/groups * 1/G * 1/tokens of the trajectory`; the
    paper's division by the group's standard deviation is `loss.normalize_std`. With leaves of a
    tree as the group it is ARPO's soft advantage attribution (Dong et al. 2025): a
    token that several leaves share is scored once for each, so its advantages average.

    Example: returns (1, 0), 20 and 10 tokens in all: advantages (.5, -.5), weights (1/40, 1/20).
    """
    return [
        [
            _whole(trajectory, advantage, share / trajectory.tokens_sampled, config)
            for trajectory, advantage in _centred(group, config)
        ]
        for group, share in _shares(groups)
    ]


def attached(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Every reward stays with the turn that earned it: its advantage is the reward less the mean
    over all turns of the group, over their standard deviation if asked for. Tokens weigh as in
    GRPO. It is the path channel of algorithms that credit whole trajectories: spread over all
    tokens, a penalty would teach the turns that obeyed as well (RLVP, section 3).

    Of a turn with several calls, what a rule says of one call is left with its tokens.

    Example: turns with rewards (-.25, 0) and (0, 0): advantages (-.1875, .0625), (.0625, .0625).
    """
    result: Credits = []
    for group, share in _shares(groups):
        earned = np.array([turn.reward for t in group.siblings for turn in t.turns], np.float64)
        ends = np.cumsum([len(t.turns) for t in group.siblings])[:-1]
        unit = earned.std(ddof=1) if config.loss.normalize_std and np.ptp(earned) else 1.0
        result.append(
            [
                _with_spans(trajectory, advantage_U, unit, share, config)
                for trajectory, advantage_U in zip(
                    group.siblings, np.split(_advantages(earned, config), ends), strict=True
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
    given = _credit(trajectory, advantage_U - moved_U, weight, config, kept=moved_U != 0)
    return replace(given, spans=spans)


def by_turn(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """GRPO's advantages with every turn normalised for itself: its tokens weigh `1/groups * 1/G *
    1/tokens of the turn`. Turns are then the agents of SeeUPO (Hu et al. 2026), one sequence each.

    Example: returns (1, 0), turns of 4 and 5 tokens, and of 2: advantages (.5, .5) and (-.5),
    weights (1/8, 1/10) and (1/4).
    """
    return [
        [
            _credit(
                trajectory,
                [advantage] * len(trajectory.turns),
                [share / _tokens(trajectory, u) for u in range(len(trajectory.turns))],
                config,
            )
            for trajectory, advantage in _centred(group, config)
        ]
        for group, share in _shares(groups)
    ]


def dapo(groups: Sequence[SiblingGroup], config: Config, *, overlong: float = 0.2) -> Credits:
    """Token-level normalisation with a soft punishment of length (DAPO, Yu et al. 2025).

    Every sampled token weighs one over the sampled tokens of all groups that taught something;
    groups of equal returns are left out of that sum and weigh nothing. Before centring, a
    return is lowered by how far its episode reaches into the last `overlong` share of
    `sampling.episode_tokens`: linearly to -1.

    Example: episode_tokens = 100 and overlong = 0.2: 80 tokens cost 0, 90 cost 0.5, 100 cost 1.
    """
    most = config.sampling.episode_tokens
    soft = overlong * most
    live = [np.ptp(_returns(group, config)) > 0 for group in groups]
    pairs = zip(live, groups, strict=True)
    total = sum(t.tokens_sampled for alive, group in pairs if alive for t in group.siblings)

    def punished(group: SiblingGroup) -> Array:
        over = np.array([t.tokens_sampled - most + soft for t in group.siblings], np.float64)
        return _returns(group, config) - (np.clip(over / soft, 0, 1) if soft else over > 0)

    return [
        [
            _whole(trajectory, advantage, alive / max(1, total), config)
            for trajectory, advantage in zip(
                group.siblings, _advantages(punished(group), config), strict=True
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
            _whole(trajectory, advantage, share / config.sampling.episode_tokens, config)
            for trajectory, advantage in _centred(group, config)
        ]
        for group, share in _shares(groups)
    ]


def rloo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """REINFORCE with a leave-one-out baseline (RLOO, Ahmadian et al. 2024).

    `A_i = R_i - mean_{j != i} R_j = G/(G-1) (R_i - mean_j R_j)`; the log-probability of the whole
    trajectory is reinforced, so every sampled token weighs `1/groups * 1/G`.

    Example: returns (1, 0): advantages (1, -1), weights (1/2, 1/2).
    """
    return [
        [
            _whole(trajectory, advantage * size / max(1, size - 1), share, config)
            for trajectory, advantage in _centred(group, config)
        ]
        for group, share in _shares(groups)
        for size in [len(group.siblings)]
    ]


def gigpo(
    groups: Sequence[SiblingGroup],
    config: Config,
    *,
    step_weight: float = 1.0,
    step_discount: float = 0.95,
) -> Credits:
    """Groups within the group (GiGPO, Feng et al. 2025): `A = A_episode + w A_step`.

    A_episode is GRPO's. A_step compares the turns of the group that were taken in the same state by
    their discounted rewards-to-go (`step_discount` a turn); a state met once gives 0. Two turns are
    in the same state when the policy read the same context ids. Tokens weigh as in GRPO.

    Example: two episodes with rewards (0, 1) and (0,) share turn 0 only; step_discount = 1 and
    step_weight = 1 give advantages (.5 + .5, .5) and (-.5 - .5).
    """
    return [
        [
            _credit(
                trajectory,
                advantage + step_weight * step_U,
                share / trajectory.tokens_sampled,
                config,
            )
            for (trajectory, advantage), step_U in zip(
                _centred(group, config), _within_states(group, config, step_discount), strict=True
            )
        ]
        for group, share in _shares(groups)
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
        found = _advantages(np.array([returns[i][u] for i, u in places]), config)
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
    for group, share in _shares(groups):
        earned = [_with_calls(t, call_reward) for t in group.siblings]
        togo = [_togo(rewards, step_discount) for rewards in earned]
        total, turns = sum(float(r.sum()) for r in togo), sum(map(len, togo))
        result.append(
            [
                _credit(
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


def tree_grpo(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """Leaves compared twice (Tree-GRPO, Ji et al. 2025): within their tree and among all
    trees of the task; the advantage is the sum of both. A group is a task with all its leaves, each
    trained from the root on; tokens weigh as in GRPO.

    Example: trees of leaves (1, 0) and (1, 1): within (.5, -.5), (0, 0), among (.25, -.75, .25,
    .25), together (.75, -1.25, .25, .25).
    """
    result: Credits = []
    for group, share in _shares(groups):
        returns = _returns(group, config)
        tree = np.array([t.tree for t in group.siblings])
        advantages = _advantages(returns, config)
        for one in np.unique(tree):
            advantages[tree == one] += _advantages(returns[tree == one], config)
        result.append(
            [
                _whole(trajectory, advantage, share / trajectory.tokens_sampled, config)
                for trajectory, advantage in zip(group.siblings, advantages, strict=True)
            ]
        )
    return result


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
        advantages = _advantages(_returns(group, config), config)
        scale = 2 / (len(groups) * max(1, len(group.siblings) - 1) * eta**2)
        kept = moved or bool(np.any(advantages))
        result.append(
            [
                _credit(trajectory, [eta * advantage], scale / _tokens(trajectory, 0), config, kept)
                for trajectory, advantage in zip(group.siblings, advantages, strict=True)
            ]
        )
    return result


def zero_advantage(group: Sequence[Credit]) -> bool:
    """Whether all advantages of the group are zero (its returns are equal)."""
    return not any(credit.spans or np.any(credit.advantage_U) for credit in group)


def _shares(groups: Sequence[SiblingGroup]) -> Iterator[tuple[SiblingGroup, float]]:
    """Every group, and the share of the loss that each of its trajectories has."""
    for group in groups:
        yield group, group.weight / (len(groups) * len(group.siblings))


def _centred(group: SiblingGroup, config: Config) -> Iterator[tuple[Trajectory, float]]:
    """(trajectory, advantage) pairs: return minus the group's mean, over its std if asked for."""
    return zip(group.siblings, _advantages(_returns(group, config), config).tolist(), strict=True)


def _returns(group: SiblingGroup, config: Config) -> Array:
    return np.array([t.discounted_return(config.gamma) for t in group.siblings], np.float64)


def _advantages(returns: Array, config: Config) -> Array:
    """Returns less their mean, over their standard deviation if asked for."""
    # Equal returns are exactly zero advantage; their mean may differ from them in the last bit.
    advantages = np.zeros_like(returns) if np.ptp(returns) == 0 else returns - returns.mean()
    if config.loss.normalize_std and np.any(advantages):
        advantages = advantages / returns.std(ddof=1)
    return advantages


def _tokens(trajectory: Trajectory, turn: int) -> int:
    return len(trajectory.turns[turn].completion.action_A)


def _whole(trajectory: Trajectory, advantage: float, weight: float, config: Config) -> Credit:
    """The same credit for every token of a trajectory."""
    return _credit(trajectory, [advantage] * len(trajectory.turns), weight, config)


def _credit(
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
