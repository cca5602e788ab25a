"""Cuts and ranks: no matter how the work is divided, it is the same work, and evenly so."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.cut import COST, Cost, Forest, Part, plan
from fastturn.pack import PackedBatch, pack
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn

# Lengths in tokens of SmolLM2's tokenizer at the quantiles QUANTILES, measured on the 7,473
# questions and answers of GSM8K's training set and on 300 tool dialogues of Glaive function calling
# (957 assistant turns, 211 tool answers).
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
LENGTHS = {
    "gsm8k question": (12, 37, 45, 56, 71, 90, 130, 223),
    "gsm8k answer": (30, 65, 84, 113, 153, 199, 292, 454),
    "tool dialogue action": (3, 17, 24, 42, 106, 240, 652, 5764),
    "tool dialogue observation": (6, 8, 11, 17, 42, 84, 125, 138),
}
# Contexts and turns as in RTPO's search runs (at most 8192 and 4096 tokens), with heavy tails.
LOGNORMAL = {"context": (7.6, 0.6, 8192), "turn": (5.3, 0.9, 4096)}


class Draw:
    """Random ids of recorded lengths."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def length(self, name: str) -> int:
        if name in LOGNORMAL:
            mean, sigma, most = LOGNORMAL[name]
            return int(np.clip(self.rng.lognormal(mean, sigma), 1, most))
        log = np.interp(self.rng.uniform(), QUANTILES, np.log(LENGTHS[name]))
        return max(1, round(float(np.exp(log))))

    def ids(self, length: int) -> np.ndarray:
        return self.rng.integers(0, 49152, length, dtype=np.int32)

    def done(self, name: str) -> Completion:
        action_A = self.ids(self.length(name))
        return Completion(action_A, np.full(len(action_A), -1, np.float32), 0, Stop.STOP)

    def credit(self, *turns: Turn, advantage: float = 1.0) -> Credit:
        path = Trajectory("task", 0, turns, Ending.FINISHED)
        weight_U = self.rng.uniform(0.1, 1.0, len(turns))
        return Credit(path, np.full(len(turns), advantage), weight_U)


def rtpo_groups(names: tuple[str, str], tasks: int, trunks: int, draw: Draw) -> list[list[Credit]]:
    """One turn a sibling; the groups of a task's trunks share its prompt, and all share a system
    prompt."""
    system_T, groups = draw.ids(100), []
    for _ in range(tasks):
        prompt_T = np.concatenate([system_T, draw.ids(draw.length(names[0]))])
        for _ in range(trunks):
            context_T = np.concatenate([prompt_T, draw.ids(draw.length(names[1]))])
            turns = [Turn(Boundary(0, context_T), draw.done(names[1])) for _ in range(8)]
            groups.append([draw.credit(turn) for turn in turns])
    return groups


def grpo_groups(tasks: int, draw: Draw) -> list[list[Credit]]:
    """Whole episodes of up to seven turns, eight a task; some tokens leave the history again."""
    groups = []
    for _ in range(tasks):
        prompt_T, group = draw.ids(100 + draw.length("gsm8k question")), []
        for _ in range(8):
            turns, running = [], 0
            for turn in range(int(draw.rng.integers(1, 8))):
                pushed = draw.ids(draw.length("tool dialogue observation")) if turn else prompt_T
                dropped = int(draw.rng.integers(0, 9)) * int(draw.rng.integers(0, 2))
                kept = max(0, running - dropped)
                turns.append(Turn(Boundary(kept, pushed), draw.done("tool dialogue action")))
                running = kept + len(pushed) + len(turns[-1].completion.action_A)
            group.append(draw.credit(*turns))
        groups.append(group)
    return groups


def cost(batch: PackedBatch, model: Cost = COST) -> float:
    """The cost model applied to the tensors of a micro-batch: position p sees p + 1 tokens."""
    pairs = int((batch.position_T + 1).sum())
    scored = len(batch.action_A)
    return model.token * batch.tokens_packed + model.pair * pairs + model.action * scored


def ranks_of(groups: list[list[Credit]], budget_T: int, ranks: int) -> list[list[PackedBatch]]:
    return [pack(groups, budget_T, rank=rank, ranks=ranks) for rank in range(ranks)]


WORK = {
    "gsm8k": lambda: rtpo_groups(("gsm8k question", "gsm8k answer"), 32, 2, Draw(1)),
    "search": lambda: rtpo_groups(("context", "turn"), 32, 2, Draw(2)),
    "tools": lambda: rtpo_groups(("gsm8k question", "tool dialogue action"), 32, 2, Draw(3)),
    "episodes": lambda: grpo_groups(64, Draw(4)),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("work", WORK)
def test_ranks_cost_within_five_percent_of_each_other(work: str, ranks: int) -> None:
    shares = ranks_of(WORK[work](), 16384, ranks)
    costs = np.array([sum(map(cost, batches)) for batches in shares])
    assert np.abs(costs / costs.mean() - 1).max() <= 0.05
    alone = sum(map(cost, pack(WORK[work](), 16384)))
    assert costs.sum() <= 1.1 * alone  # what is read again because it is shared across ranks


@pytest.mark.parametrize("work", ["gsm8k", "tools", "episodes"])
def test_ranks_that_wait_after_every_micro_batch_wait_little(work: str) -> None:
    costs = np.array([[cost(batch) for batch in mine] for mine in ranks_of(WORK[work](), 8192, 2)])
    assert (np.diff(costs, axis=1) <= 1e-6).all()  # the costliest first
    assert costs.shape[1] > 4 and costs.max(axis=0).sum() <= 1.1 * costs.sum() / 2


def groups_strategy() -> st.SearchStrategy[list[list[Credit]]]:
    """Small groups over a tiny alphabet: contexts of different groups coincide, nest and fork."""
    token = st.integers(0, 1)
    words = st.lists(token, min_size=1, max_size=4)

    @st.composite
    def draw_groups(draw: st.DrawFn) -> list[list[Credit]]:
        groups, number = [], 0
        for _ in range(draw(st.integers(0, 5))):
            context, group = draw(words), []
            for _ in range(draw(st.integers(1, 3))):
                turns, running = [], 0
                for turn in range(draw(st.integers(1, 3))):
                    kept = draw(st.integers(0, running)) if turn else 0
                    pushed = np.array(draw(words) if turn else context, np.int32)
                    action_A = np.array(draw(words), np.int32)
                    behavior_A = np.full(len(action_A), number, np.float32)
                    done = Completion(action_A, behavior_A, number, Stop.STOP)
                    turns.append(Turn(Boundary(kept, pushed), done))
                    running, number = kept + len(pushed) + len(action_A), number + 1
                weights = st.lists(
                    st.sampled_from([0.0, 0.5, 0.25]), min_size=len(turns), max_size=len(turns)
                )
                weight_U = np.array(draw(weights))
                path = Trajectory("task", 0, tuple(turns), Ending.FINISHED)
                group.append(Credit(path, np.full(len(turns), float(number)), weight_U))
            groups.append(group)
        return groups

    return draw_groups()


def turns_of(batch: PackedBatch) -> list[int]:
    """Numbers of the turns in a micro-batch: the strategy writes them as versions."""
    return batch.version_U.tolist()


def loss_rows(batches: list[PackedBatch]) -> Counter[tuple]:
    """Multiset of (history, action, advantage, weight) over all loss rows."""
    found: Counter[tuple] = Counter()
    for batch in batches:
        for row in range(len(batch.action_A)):
            source = int(batch.source_A[row])
            seen_T = batch.token_T[: source + 1][batch.end_T[: source + 1] > source]
            assert len(seen_T) == int(batch.position_T[source]) + 1
            values = (batch.action_A[row], batch.advantage_A[row], batch.weight_A[row])
            found[(tuple(seen_T.tolist()), *(float(value) for value in values))] += 1
    return found


def tree_size(sequences: list[tuple[int, ...]]) -> int:
    """Tokens of a tree by its definition: the distinct prefixes of its sequences."""
    return len({row[:stop] for row in sequences for stop in range(1, len(row) + 1)})


def rows_of_group(group: list[Credit]) -> list[tuple[int, ...]]:
    rows = []
    for credit in group:
        steps = zip(credit.trajectory.turns, credit.trajectory.contexts(), strict=True)
        for (turn, context_T), weight in zip(steps, credit.weight_U, strict=True):
            if weight:
                rows.append((*context_T.tolist(), *turn.completion.action_A[:-1].tolist()))
    return rows


@settings(max_examples=150, deadline=None)
@given(groups_strategy(), st.sampled_from([1, 5, 9, 14, 1000]), st.sampled_from([1, 2, 5]))
def test_any_cut_over_any_ranks_is_the_same_work(groups, budget_T, ranks) -> None:
    shares = ranks_of(groups, budget_T, ranks)
    assert len({len(batches) for batches in shares}) == 1
    batches = [batch for share in shares for batch in share]
    whole = pack(groups, 10_000)
    assert loss_rows(batches) == loss_rows(whole)
    weights = [sum(float(batch.weight_A.double().sum()) for batch in some)
               for some in (batches, whole)]  # fmt: skip
    assert weights[0] == pytest.approx(weights[1], rel=1e-12)
    assert sum(b.tokens_flat for b in batches) == sum(b.tokens_flat for b in whole)
    # Within the budget, unless a single sequence is longer.
    for batch in batches:
        depth_T = list(range(batch.tokens_packed))
        assert batch.tokens_packed <= budget_T or batch.position_T.tolist() == depth_T
    # Every turn is in one micro-batch, and a group that fits is in one as a whole.
    place = {turn: at for at, batch in enumerate(batches) for turn in turns_of(batch)}
    assert sum(len(turns_of(batch)) for batch in batches) == len(place)
    for group in groups:
        turns = [turn.completion.version
                 for credit in group
                 for turn, weight in zip(credit.trajectory.turns, credit.weight_U, strict=True)
                 if weight]  # fmt: skip
        if tree_size(rows_of_group(group)) <= budget_T:
            assert len({place[turn] for turn in turns}) <= 1


@settings(max_examples=100, deadline=None)
@given(groups_strategy())
def test_packed_without_a_budget_is_the_tree_of_all_rows(groups) -> None:
    rows = [row for group in groups for row in rows_of_group(group)]
    assert sum(batch.tokens_packed for batch in pack(groups, 10_000)) == tree_size(rows)


def test_groups_of_one_trunk_interleave_and_stay_whole() -> None:
    """Two groups on one context, one on a longer context: sorted, their siblings alternate."""
    draw = Draw()

    def siblings(context: list[int], firsts: tuple[int, ...]) -> list[Credit]:
        actions = [np.array([first, 9, 9], np.int32) for first in firsts]
        return [
            draw.credit(
                Turn(
                    Boundary(0, np.array(context, np.int32)),
                    Completion(action_A, np.zeros(3, np.float32), first, Stop.STOP),
                )
            )
            for action_A, first in zip(actions, firsts, strict=True)
        ]

    groups = [siblings([1] * 6, (10, 30)), siblings([1] * 6, (20, 40)), siblings([1] * 8, (50, 60))]
    batches = pack(groups, 15)  # a group is 6 + 2 + 2 or 8 + 2 + 2 tokens, two of them 14
    assert [sorted(turns_of(batch)) for batch in batches] == [[50, 60], [10, 20, 30, 40]]
    assert [batch.tokens_packed for batch in batches] == [12, 14]
    (whole,) = pack(groups, 100)
    assert whole.tokens_packed == 8 + 6 * 2


def test_groups_that_share_a_long_context_meet_on_one_rank() -> None:
    draw = Draw()
    groups = []
    for context_T in (draw.ids(500), draw.ids(500)):
        for _ in range(3):
            turns = [Turn(Boundary(0, context_T), draw.done("gsm8k answer")) for _ in range(2)]
            groups.append([draw.credit(turn) for turn in turns])
    packed = [batch.tokens_packed for (batch,) in ranks_of(groups, 100_000, 2)]
    assert sum(packed) == sum(batch.tokens_packed for batch in pack(groups, 100_000))


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    draw = Draw()
    group = [draw.credit(Turn(Boundary(0, draw.ids(20)), draw.done("gsm8k answer")))]
    shares = ranks_of([group], 1000, 3)
    assert [len(batches) for batches in shares] == [1, 1, 1]
    assert [batch.tokens_packed > 0 for (batch,) in shares] == [True, False, False]
    empty = shares[2][0]
    for field in fields(PackedBatch):
        value, full = getattr(empty, field.name), getattr(shares[0][0], field.name)
        if field.name == "tokens_flat":
            assert value == 0 < full
        elif field.name != "plans":
            assert value.shape == (0,) and value.dtype == full.dtype, field.name
    assert ranks_of([], 1000, 2) == [[], []]


def test_the_plan_is_the_same_whoever_makes_it() -> None:
    first, second = (ranks_of(WORK["gsm8k"](), 4096, 3) for _ in range(2))
    for some, others in zip(first, second, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.token_T.tolist() == other.token_T.tolist()
            assert one.action_A.tolist() == other.action_A.tolist()


def test_a_part_is_the_tree_of_its_sequences_in_any_order_of_joining() -> None:
    rows = sorted({tuple(row) for row in np.random.default_rng(0).integers(0, 2, (40, 6)).tolist()})
    lengths = [len(row) for row in rows]
    alike = [[a == b for a, b in zip(*two, strict=True)] for two in pairwise(rows)]
    shared = [0, *([*same, False].index(False) for same in alike)]
    forest = Forest(lengths, shared, [0] * len(rows), [2] * len(rows), Cost(1.0, 0.01, 0.5))
    order = np.random.default_rng(1).permutation(len(rows))[: len(rows) // 2].tolist()
    part = forest.join(Part(), order)
    prefixes = {rows[n][:stop] for n in order for stop in range(1, 7)}
    assert part.numbers == sorted(order) and part.tokens == len(prefixes)
    pairs = sum(map(len, prefixes))
    assert part.cost == pytest.approx(len(prefixes) + 0.01 * pairs + 0.5 * 2 * len(order))


def test_cost_example() -> None:
    assert COST.span(0, 1000) + COST.action * 100 == pytest.approx(1069.5, abs=0.1)


def test_an_empty_forest_has_no_parts() -> None:
    assert plan(Forest([], [], [], []), 10, 2) == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_T": 0}, "budget_T=0.*pack_tokens"),
        ({"budget_T": 8, "rank": 2, "ranks": 2}, "rank=2, ranks=2"),
        ({"budget_T": 8, "rank": -1}, "rank=-1"),
    ],
)
def test_impossible_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([], **options)
