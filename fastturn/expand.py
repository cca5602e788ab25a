"""Rollout plans beyond one fork a point: refilled batches, trees, branches, chosen boundaries.

A plan is `Rollout.grow` and `Rollout.fork` on points, and choices that are pure functions of the
seed, the key and the episodes so far: every process makes the same ones. Where episodes branch off
each other the group holds complete trajectories from the root, one for each leaf; leaves share the
turns before their branch, and packing reads those once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastturn.config import Config
from fastturn.episode import Point, stream_seed
from fastturn.tree import Rollout, stages
from fastturn.types import Ending, SiblingGroup, Trajectory, Trunk

Key = tuple[object, ...]


def every_boundary(
    trunks: Sequence[Trunk], config: Config, key: Key, *, best: int = 0, boundaries: float = 1.0
) -> Iterator[tuple[int, list[Point]]]:
    """RTPO's stages: all boundaries of the trunks, last turn first. With `best` above 0, of that
    many trunks of every task only, those of the highest return (the paper's retroactive choice):
    they decide which states are visited, so the choice biases no advantage.

    With `boundaries` below 1 about that share of them is sampled at, those first where outcomes
    are predicted to vary (`_variance`). The prediction reads trunks, which are in no estimate, and
    a boundary that is sampled at with probability p counts 1/p times: every stage's update has the
    mean that it has without the choice.

    Example: best = 1 and two trunks of returns 0 and 1: stages fork at the second one alone.
    """
    chosen = _best(trunks, best, config.gamma) if best else list(trunks)
    return stages(chosen) if boundaries >= 1 else _thinned(chosen, key, boundaries)


def _thinned(trunks: Sequence[Trunk], key: Key, share: float) -> Iterator[tuple[int, list[Point]]]:
    """The stages with about `share` of their boundaries, weighted; stages left empty are none."""
    variance = dict(zip(map(_place, _points(trunks)), _variance(trunks), strict=True))
    probability = dict(
        zip(variance, inclusion(np.array(list(variance.values())), share).tolist(), strict=True)
    )
    for turn, points in stages(trunks):
        drawn = [
            p for p in points if _chance(*key, "boundary", *_place(p)) < probability[_place(p)]
        ]
        if drawn:
            scale = len(drawn) / len(points)  # their mean stands for the mean over all
            yield turn, [replace(p, weight=scale / probability[_place(p)]) for p in drawn]


def inclusion(score_N: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Probabilities in proportion to the scores, none below a quarter of `share` nor above 1, that
    add up to `share` of their number (or as near as these bounds allow).

    Example: scores (1, 1, 2) and share 0.5 give (0.375, 0.375, 0.75).
    """
    least, total = share / 4, share * len(score_N)
    low, high = 0.0, len(score_N) / max(float(score_N.min(initial=1.0)), 1e-9)
    for _ in range(60):  # the sum grows with the factor
        factor = (low + high) / 2
        probability_N = np.clip(factor * score_N, least, 1.0)
        low, high = (factor, high) if probability_N.sum() < total else (low, factor)
    return probability_N


def _variance(trunks: Sequence[Trunk]) -> list[float]:
    """Of every boundary, how much the outcomes of its siblings are predicted to vary: p (1 - p), p
    the success of the task's trunks (with one success and one failure more, as nothing is certain),
    times the chance that a sibling does not repeat what the trunk did there."""
    solved: Counter[str] = Counter()
    grown: Counter[str] = Counter()
    for trunk in trunks:
        grown[trunk.trajectory.task] += 1
        solved[trunk.trajectory.task] += trunk.trajectory.success
    found = []
    for trunk in trunks:
        task = trunk.trajectory.task
        p = (solved[task] + 1) / (grown[task] + 2)
        for turn in trunk.trajectory.turns:
            found.append(p * (1 - p) * -float(np.expm1(turn.completion.logprob_A.sum())))
    return found


def _points(trunks: Sequence[Trunk]) -> list[Point]:
    return [point for trunk in trunks for point in trunk.snapshots]


def _place(point: Point) -> tuple[str, int, int]:
    """What tells boundaries of an iteration apart."""
    return point.task.id, point.trunk, point.turn


def _chance(*key: object) -> float:
    """A number in [0, 1) that the key decides."""
    return stream_seed(*key) / 2**63


def forked(
    rollout: Rollout, points: Sequence[Point], n: int, key: Key, *, agreed: float = 1.0
) -> list[SiblingGroup]:
    """Siblings at every point. With `agreed` below 1, a pair everywhere, and the other `n - 2` only
    where the pair's returns differ, and with probability `agreed` where they do not.

    Whether there are more is decided by the pair, and what they say is estimated from them alone,
    as a group of their own that counts one over its probability: given the pair, its mean is what
    it would be without the choice. The pair is a group as well, which nothing selects. They count
    2/n and (n - 2)/n of a point, so the mean over points is that of `Rollout.fork`, but for the
    factor of finite groups, which is the same in every state ((1/2) 2/n + (n-3)/(n-2) (n-2)/n =
    (n-2)/n instead of (n-1)/n; with leave_one_out it is 1).

    Example: n = 4, agreed = 0.25: two siblings at every point, two more where their returns differ
    and at every fourth of the others, which then count four times.
    """
    if agreed >= 1:
        return rollout.fork(points, n, key)
    pairs = rollout.fork(points, 2, key)
    at = {_place(point): point for point in points}
    more, weights = [], []
    for pair in pairs:
        place = pair.task, pair.trunk, pair.turn
        probability = agreed if _silent(pair, rollout.config.gamma) else 1.0
        if _chance(rollout.config.seed, *key, "agreed", *place) < probability:
            more.append(at[place])
            weights.append((n - 2) / n / probability)
    fresh = rollout.fork(
        [replace(p, weight=p.weight * w) for p, w in zip(more, weights, strict=True)],
        n - 2,
        (*key, "more"),
    )
    pairs = [replace(pair, weight=pair.weight * 2 / n) for pair in pairs]
    # The loss is a mean over groups; this one is over points.
    scale = (len(pairs) + len(fresh)) / max(1, len(pairs))
    return [replace(group, weight=group.weight * scale) for group in pairs + fresh]


def every_boundary_at_once(
    trunks: Sequence[Trunk], config: Config, key: Key
) -> Iterator[tuple[int, list[Point]]]:
    """One stage of all boundaries: what follows a turn is drawn before any turn is trained."""
    yield 0, _points(trunks)


def _best(trunks: Sequence[Trunk], most: int, gamma: float) -> list[Trunk]:
    """The trunks of the highest return of every task, `most` each, in their order."""
    ranked = sorted(trunks, key=lambda trunk: -trunk.trajectory.discounted_return(gamma))
    taken: Counter[str] = Counter()
    kept = set()
    for trunk in ranked:
        taken[trunk.trajectory.task] += 1
        if taken[trunk.trajectory.task] <= most:
            kept.add(id(trunk))
    return [trunk for trunk in trunks if id(trunk) in kept]


def one_boundary(
    trunks: Sequence[Trunk], config: Config, key: Key
) -> Iterator[tuple[int, list[Point]]]:
    """REFUEL's one stage: a boundary of every trunk, each as likely as the others.

    Example: a trunk of 3 turns is forked at its turn 0, 1 or 2.
    """
    points = []
    for trunk in trunks:
        first = trunk.snapshots[0]
        draw = stream_seed(*key, "boundary", first.task.id, first.trunk)
        points.append(trunk.snapshots[draw % len(trunk.snapshots)])
    yield 0, points


def refilled(rollout: Rollout, points: Sequence[Point], n: int, key: Key) -> list[SiblingGroup]:
    """Dynamic sampling (DAPO, Yu et al. 2025, eq. 11): as many points as tasks are wanted,
    then as many more as groups came out silent, until enough are not or the points are used up.

    All groups are returned, the silent ones too, because all of them were paid for; the credit
    leaves those out. Counts `group_replaced`.

    Example: tasks = 8 and 24 points: 8 are forked; 3 are silent, so 3 more are, and so on.
    """
    groups: list[SiblingGroup] = []
    waiting = list(points)
    wanted = missing = rollout.config.tasks
    while missing > 0 and waiting:
        batch, waiting = waiting[:missing], waiting[missing:]
        if groups:
            rollout.clock.count("group_replaced", len(rollout.peers.mine(batch)))
        groups += rollout.fork(batch, n, key)
        missing = wanted - sum(not _silent(group, rollout.config.gamma) for group in groups)
    return groups


def _silent(group: SiblingGroup, gamma: float) -> bool:
    return len({t.discounted_return(gamma) for t in group.siblings}) == 1


@dataclass(frozen=True, slots=True)
class Start:
    """Where an episode is to begin: at a state of tree `tree` of point `root` (an index), which
    `before` visited on its way (None: at the root itself)."""

    root: int
    tree: int
    point: Point
    before: Trajectory | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A complete episode, and the states that it was the first of its tree to visit."""

    root: int
    trajectory: Trajectory
    points: tuple[Point, ...]


def forest(
    rollout: Rollout, points: Sequence[Point], n: int, key: Key, *, rounds: int = 1
) -> list[SiblingGroup]:
    """Trees by random expansion (Tree-GRPO, Ji et al. 2025).

    `trunks` chains begin the trees of a point; the other episodes of its `n` are dealt to the trees
    in `rounds`, each continuing from a random state of its tree to the end. States are turn
    boundaries, the root included, of what the tree holds when the round begins. With M trees, N
    expansions of each in each of L rounds, n = M (L N + 1).

    Example: n = 8, trunks = 2, rounds = 1: two chains, and three more leaves on each.
    """
    trees = rollout.config.trunks
    leaves = _grown(rollout, _chains(points, range(trees)), (*key, "chain"))
    dealt = np.array_split(np.arange(n - trees), max(1, rounds))
    for number, turns in enumerate(dealt):
        starts = []
        for root in range(len(points)):
            for turn in turns.tolist():
                tree = turn % trees
                states = _states(leaves, root, tree)
                seed = (rollout.config.seed, *key, "state", points[root].task.id, turn)
                point, before = states[stream_seed(*seed) % len(states)]
                starts.append(Start(root, tree, point, before))
        leaves += _grown(rollout, starts, (*key, "round", number))
    return _groups(rollout, points, leaves)


def branched(
    rollout: Rollout,
    points: Sequence[Point],
    n: int,
    key: Key,
    *,
    initial: float = 0.5,
    alpha: float = 0.5,
    beta: float = 0.2,
    threshold: float = 0.5,
    tokens: int = 20,
) -> list[SiblingGroup]:
    """Branches where a tool's answer left the policy unsure (ARPO, Dong et al. 2025).

    The `initial` share of a point's `n` episodes are chains. At each of their boundaries after a
    tool call, the rise of the entropy of the next `tokens` tokens over that of the episode's first
    ones gives `alpha + beta * rise`; above `threshold` one more episode continues from there, the
    largest rises first, and branches may branch again. Chains fill what is left of `n`. The entropy
    is estimated by the mean surprisal of the sampled tokens, in nats, which it is the mean of.

    Example: n = 8: four chains; two boundaries rise, so two branches, then two more chains.
    """
    first = min(n, max(1, round(initial * n)))
    leaves = fresh = _grown(rollout, _chains(points, range(first)), (*key, "chain"))
    number = 0
    while fresh:
        number += 1
        starts = []
        for root in range(len(points)):
            rising = [
                (alpha + beta * rise, Start(root, leaf.trajectory.tree, point, leaf.trajectory))
                for leaf in fresh
                if leaf.root == root
                for point, rise in _rises(leaf, tokens)
            ]
            rising = sorted((r for r in rising if r[0] > threshold), key=lambda r: -r[0])
            room = n - sum(leaf.root == root for leaf in leaves)
            starts += [start for _, start in rising[:room]]
        fresh = _grown(rollout, starts, (*key, "branch", number))
        leaves = leaves + fresh
    missing = [
        Start(root, first + extra, point)
        for root, point in enumerate(points)
        for extra in range(n - sum(leaf.root == root for leaf in leaves))
    ]
    return _groups(rollout, points, leaves + _grown(rollout, missing, (*key, "filled")))


def _rises(leaf: Leaf, tokens: int) -> list[tuple[Point, float]]:
    """States of the leaf after a tool call, with how much the entropy there exceeds the first."""
    turns = leaf.trajectory.turns

    def entropy(turn: int) -> float:
        return -float(turns[turn].completion.logprob_A[:tokens].mean())

    return [
        (point, entropy(point.turn) - entropy(0))
        for point in leaf.points
        if point.turn and "tool_call" in turns[point.turn - 1].events
    ]


def _chains(points: Sequence[Point], trees: Sequence[int]) -> list[Start]:
    return [Start(root, tree, point) for root, point in enumerate(points) for tree in trees]


def _states(leaves: Sequence[Leaf], root: int, tree: int) -> list[tuple[Point, Trajectory]]:
    """Every state of a tree once, with an episode that visited it."""
    return [
        (point, leaf.trajectory)
        for leaf in leaves
        if leaf.root == root and leaf.trajectory.tree == tree
        for point in leaf.points
    ]


def _grown(rollout: Rollout, starts: Sequence[Start], key: Key) -> list[Leaf]:
    """Episodes from all starts to the end, each with the turns that led to its start."""
    if not starts:
        return []
    # Streams of random numbers are named by task and trunk, so starts of one task differ in trunk.
    points = [replace(start.point, trunk=number) for number, start in enumerate(starts)]
    leaves = []
    for start, trunk in zip(starts, rollout.grow(points, key), strict=True):
        turns, states, before = trunk.trajectory.turns, trunk.snapshots, start.before
        if before is not None:
            at = start.point.turn
            turns = (
                *before.turns[:at],
                replace(turns[0], boundary=before.turns[at].boundary),
                *turns[1:],
            )
            states = states[1:]
        whole = Trajectory(trunk.trajectory.task, 0, turns, trunk.trajectory.ending, start.tree)
        leaves.append(Leaf(start.root, whole, states))
    return leaves


def _groups(
    rollout: Rollout, points: Sequence[Point], leaves: Sequence[Leaf]
) -> list[SiblingGroup]:
    """The leaves of every point, but for those whose environment failed; as in `fork`, fewer than
    two have nothing to compare."""
    groups = [
        SiblingGroup(
            point.task.id,
            point.trunk,
            point.turn,
            point.conversation.context_T,
            tuple(
                leaf.trajectory
                for leaf in leaves
                if leaf.root == root and leaf.trajectory.ending is not Ending.FAILED
            ),
        )
        for root, point in enumerate(points)
    ]
    lost = [group for group in groups if len(group.siblings) < 2]
    # All processes know all leaves; an event is counted by one of them.
    rollout.clock.count("group_lost", len(rollout.peers.mine(lost)))
    return [group for group in groups if len(group.siblings) >= 2]
