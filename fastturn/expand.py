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

from fastturn.episode import Point, stream_seed
from fastturn.tree import Rollout, stages
from fastturn.types import Ending, SiblingGroup, Trajectory, Trunk

Key = tuple[object, ...]


def every_boundary(
    trunks: Sequence[Trunk], key: Key, *, best: int = 0
) -> Iterator[tuple[int, list[Point]]]:
    """RTPO's stages: all boundaries of the trunks, last turn first. With `best` above 0, of that
    many trunks of every task only, those of the highest return (the paper's retroactive choice):
    they decide which states are visited, so the choice biases no advantage.

    Example: best = 1 and two trunks of returns 0 and 1: stages fork at the second one alone.
    """
    return stages(_best(trunks, best) if best else trunks)


def every_boundary_at_once(trunks: Sequence[Trunk], key: Key) -> Iterator[tuple[int, list[Point]]]:
    """One stage of all boundaries: what follows a turn is drawn before any turn is trained."""
    yield 0, [point for trunk in trunks for point in trunk.snapshots]


def _best(trunks: Sequence[Trunk], most: int) -> list[Trunk]:
    """The trunks of the highest return of every task, `most` each, in their order."""
    ranked = sorted(trunks, key=lambda trunk: -trunk.trajectory.discounted_return())
    taken: Counter[str] = Counter()
    kept = set()
    for trunk in ranked:
        taken[trunk.trajectory.task] += 1
        if taken[trunk.trajectory.task] <= most:
            kept.add(id(trunk))
    return [trunk for trunk in trunks if id(trunk) in kept]


def one_boundary(trunks: Sequence[Trunk], key: Key) -> Iterator[tuple[int, list[Point]]]:
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
    trees = min(rollout.config.trunks, n)
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
