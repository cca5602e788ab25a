"""Rollout plans: leaves are whole episodes in exact contexts, budgets are kept, choices repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from fastturn.expand import (
    branched,
    every_boundary,
    every_boundary_at_once,
    forest,
    one_boundary,
    refilled,
)
from fastturn.tree import Rollout
from fastturn.types import Completion, Ending, SiblingGroup, Trajectory

from .test_tree import CONFIG, TEXTS, Script, content, grown, parts, rollout  # noqa: F401

CALL, ANSWER = TEXTS[0], TEXTS[-1]


@dataclass
class Unsure(Script):
    """The longer the context, the less sure."""

    def _draw(self, request, seed):
        done = super()._draw(request, seed)
        surprisal = len(request.context_T) / 1000
        return replace(done, logprob_A=np.full_like(done.logprob_A, -surprisal))


def unsure(parts, **changes) -> Rollout:  # noqa: F811
    run = rollout(parts, config=replace(CONFIG, **changes))
    return replace(run, sampler=Unsure(TEXTS, run.renderer))


def roots(run: Rollout, n: int = 3):
    return run.roots([run.domain.train_tasks[i] for i in range(n)])


def replayed(run: Rollout, group: SiblingGroup, leaf: Trajectory) -> None:
    """The leaf's contexts, rewards and events are those of its actions, played from the start."""
    (task,) = [t for t in run.domain.train_tasks[:3] if t.id == group.task]
    env = run.domain.env()
    conversation = run.renderer.start(env.start(task))
    for turn, context_T in zip(leaf.turns, leaf.contexts(), strict=True):
        assert np.array_equal(conversation.context_T, context_T)
        answer = env.step(run.renderer.parse(turn.completion.action_A))
        assert (answer.reward, answer.events) == (turn.reward, turn.events)
        conversation = run.renderer.advance(conversation, turn.completion.action_A, answer.messages)
    assert answer.done or len(leaf.turns) == run.config.turns


@pytest.mark.parametrize("context", ["keep", "truncate:60"])
@pytest.mark.parametrize("plan", [forest, partial(forest, rounds=3), branched])
def test_leaves_are_whole_episodes_in_exact_contexts(parts, plan, context):  # noqa: F811
    run = unsure(parts, context=context, trunks=2)
    points = roots(run)
    groups = plan(run, points, 8, ("fork", 0, 0))
    assert [group.task for group in groups] == [point.task.id for point in points]
    for group, point in zip(groups, points, strict=True):
        assert np.array_equal(group.context_T, point.conversation.context_T)
        assert len(group.siblings) == 8 and group.turn == 0
        for leaf in group.siblings:
            assert leaf.first_turn == 0
            replayed(run, group, leaf)
    assert content(groups) == content(plan(run, points, 8, ("fork", 0, 0)))
    assert content(groups) != content(plan(run, points, 8, ("fork", 1, 0)))


def shared(group: SiblingGroup) -> dict[int, list[int]]:
    """Of every turn object of the group that several leaves hold: which ones."""
    holders: dict[int, list[int]] = {}
    for number, leaf in enumerate(group.siblings):
        for turn in leaf.turns:
            holders.setdefault(id(turn), []).append(number)
    return {turn: leaves for turn, leaves in holders.items() if len(leaves) > 1}


@pytest.mark.parametrize(("n", "trunks", "rounds"), [(8, 2, 1), (8, 2, 3), (7, 3, 2), (4, 4, 1)])
def test_expansions_are_dealt_evenly_to_the_trees(parts, n, trunks, rounds):  # noqa: F811
    run = unsure(parts, trunks=trunks)
    for group in forest(run, roots(run), n, ("fork", 0, 0), rounds=rounds):
        sizes = Counter(leaf.tree for leaf in group.siblings)
        assert sum(sizes.values()) == n and set(sizes) == set(range(trunks))
        assert max(sizes.values()) - min(sizes.values()) <= 1
        for leaves in shared(group).values():
            assert len({group.siblings[leaf].tree for leaf in leaves}) == 1


def test_every_state_of_a_tree_can_be_expanded(parts):  # noqa: F811
    """Over many trees with a chain of four turns, expansions begin at each of its boundaries."""
    run = rollout(parts, texts=(CALL,), config=replace(CONFIG, trunks=1))
    points, begun = roots(run, 1), Counter()
    for key in range(60):
        (group,) = forest(run, points, 2, ("fork", key))
        first, second = group.siblings
        begun[sum(a is b for a, b in zip(first.turns, second.turns, strict=False))] += 1
    assert set(begun) == {0, 1, 2, 3} and min(begun.values()) >= 5


def test_branches_begin_where_uncertainty_rose_and_stay_in_the_budget(parts):  # noqa: F811
    run = unsure(parts)
    (group,) = branched(run, roots(run, 1), 8, ("fork", 0, 0))
    assert len(group.siblings) == 8
    branches = 0
    for number, leaf in enumerate(group.siblings[4:], 4):
        kin = [
            sum(a is b for a, b in zip(leaf.turns, other.turns, strict=False))
            for other in group.siblings[:number]
        ]
        if max(kin):
            branches += 1
            assert leaf.tree == group.siblings[kin.index(max(kin))].tree
            assert "tool_call" in leaf.turns[max(kin) - 1].events
    assert branches
    (chains,) = branched(run, roots(run, 1), 8, ("fork", 0, 0), initial=1)
    assert not shared(chains) and [leaf.tree for leaf in chains.siblings] == list(range(8))


def test_without_a_rise_all_episodes_are_independent(parts):  # noqa: F811
    run = rollout(parts)  # every token of every turn is equally likely
    (group,) = branched(run, roots(run, 1), 8, ("fork", 0, 0))
    assert len(group.siblings) == 8 and not shared(group)
    assert len({content(leaf.turns[0].completion) for leaf in group.siblings}) > 1
    (group,) = branched(run, roots(run, 1), 8, ("fork", 0, 0), alpha=0.6)
    assert len(group.siblings) == 8 and shared(group)


def test_silent_groups_are_replaced_until_enough_teach(parts):  # noqa: F811
    domain, _ = parts
    answers = [f"\\boxed{{{domain.train_tasks[i].data['answer']}}}" for i in range(12)]
    run = rollout(parts, (*answers, "\\boxed{-1}"), replace(CONFIG, tasks=4))
    points = roots(run, 12)
    groups = refilled(run, points, 4, ("fork", 0, 0))
    live = [len({t.success for t in group.siblings}) == 2 for group in groups]
    assert len(groups) > 4 and sum(live) <= 4
    assert sum(live) == 4 or len(groups) == 12
    assert sum(live[:-1]) != 4, "nothing is sampled once there are enough"
    assert run.clock["group_replaced"] == len(groups) - 4
    asked = [request.context_T.tobytes() for call in run.sampler.calls for request in call]
    assert len(set(asked)) == len(groups)


def test_when_all_teach_nothing_is_replaced(parts):  # noqa: F811
    run = rollout(parts, config=replace(CONFIG, tasks=2))
    groups = [run.fork([point], 1, ("x",))[0] for point in roots(run, 2)]
    unlike = [
        replace(group, siblings=(leaf, replace(leaf, turns=(replace(leaf.turns[0], reward=9.0),))))
        for group in groups
        for leaf in group.siblings
    ]

    class Played(Rollout):
        def fork(self, points, n, key, temperature=None):
            return unlike[: len(points)]

    fields = {name: getattr(run, name) for name in Rollout.__slots__}
    assert refilled(Played(**fields), roots(run, 3), 2, ()) == unlike
    assert not run.clock["group_replaced"]


def test_one_boundary_of_every_trunk_is_drawn_evenly(parts):  # noqa: F811
    run = rollout(parts, texts=(CALL,))
    trunks = grown(run, 4)
    chosen: Counter[int] = Counter()
    for iteration in range(50):
        ((label, points),) = one_boundary(trunks, CONFIG, (0, iteration))
        assert label == 0 and len(points) == 4
        assert all(p is t.snapshots[p.turn] for p, t in zip(points, trunks, strict=True))
        chosen.update(point.turn for point in points)
    assert set(chosen) == {0, 1, 2, 3} and min(chosen.values()) > 30  # of 200, 50 expected


def test_retroactive_choice_keeps_the_best_trunks_of_every_task(parts):  # noqa: F811
    run = rollout(parts)
    trunks = [t for _ in range(3) for t in grown(run, 2)]
    returns = [0.0, 0.0, 1.0, 0.0, 0.5, 2.0]  # of tasks 0, 1, 0, 1, 0, 1
    trunks = [
        replace(t, trajectory=replace(t.trajectory, turns=(*rest, replace(last, reward=r))))
        for t, r in zip(trunks, returns, strict=True)
        for *rest, last in [[replace(turn, reward=0.0) for turn in t.trajectory.turns]]
    ]

    def places(gamma: float = 1.0, **options) -> set[int]:
        staged = every_boundary(trunks, replace(CONFIG, gamma=gamma), (), **options)
        points = {id(p) for _, points in staged for p in points}
        return {i for i, t in enumerate(trunks) if any(id(p) in points for p in t.snapshots)}

    assert places() == set(range(6))
    assert places(best=1) == {2, 5} and places(best=2) == {2, 4, 5, 1}
    (last,) = trunks[2].trajectory.turns
    turns = (replace(last, reward=0.0), replace(last, reward=1.0))
    later = replace(trunks[2].trajectory, turns=turns)
    trunks[2] = replace(trunks[2], trajectory=later, snapshots=trunks[2].snapshots * 2)
    (sooner,) = trunks[0].trajectory.turns
    sooner = replace(trunks[0].trajectory, turns=(replace(sooner, reward=0.9),))
    trunks[0] = replace(trunks[0], trajectory=sooner)
    assert places(best=1) == {2, 5} and places(gamma=0.9, best=1) == {0, 5}


def test_all_boundaries_at_once_are_those_of_the_stages(parts):  # noqa: F811
    trunks = grown(rollout(parts), 6)
    ((label, points),) = every_boundary_at_once(trunks, CONFIG, ())
    staged = [point for _, stage in every_boundary(trunks, CONFIG, ()) for point in stage]
    assert label == 0 and {id(p) for p in points} == {id(p) for p in staged}
    assert len(points) == len(staged)


def test_episodes_whose_environment_failed_are_left_out(parts):  # noqa: F811
    run = unsure(parts)

    class Broken(Rollout):
        def grow(self, points, key):
            trunks = super().grow(points, key)
            return [
                replace(t, trajectory=replace(t.trajectory, ending=Ending.FAILED)) if i else t
                for i, t in enumerate(trunks)
            ]

    broken = Broken(**{name: getattr(run, name) for name in Rollout.__slots__})
    points = roots(run, 2)
    groups = forest(broken, points, 4, ("fork", 0))
    assert [len(group.siblings) for group in groups] == [2]  # one of each call is left
    assert run.clock["group_lost"] == 1


def test_completions_are_those_of_the_sampler(parts):  # noqa: F811
    """Branching copies turns, it never writes to them."""
    run = unsure(parts)
    for group in forest(run, roots(run), 6, ("fork", 0, 0)):
        for leaf in group.siblings:
            for turn in leaf.turns:
                assert isinstance(turn.completion, Completion) and turn.completion.version == 7
