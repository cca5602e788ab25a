"""The laws of packing: whatever the tree looks like, a loss row sees exactly its own history."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn.pack import PackedBatch, pack, paths, shared_prefix
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn


def ids(values) -> np.ndarray:
    return np.array(list(values), np.int32)


def turn(kept: int, context, action, version: int = 1) -> Turn:
    logprob_A = -np.arange(1, len(action) + 1, dtype=np.float32) / 8
    return Turn(
        Boundary(kept, ids(context)), Completion(ids(action), logprob_A, version, Stop.STOP)
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory("task", 0, turns, Ending.FINISHED)


def credit(path: Trajectory, advantage: float = 1.0, weights=None) -> Credit:
    n = len(path.turns)
    return Credit(path, np.full(n, advantage), np.array(weights or [0.5] * n, np.float64))


def history(batch: PackedBatch, row: int) -> list[int]:
    """The tokens that the source of a loss row can see, in packed order."""
    source = int(batch.source_A[row])
    k_T = torch.arange(source + 1)
    seen_T = k_T[batch.end_T[: source + 1] > source]
    assert batch.position_T[seen_T].tolist() == list(range(len(seen_T)))
    return batch.token_T[seen_T].tolist()


def rows(batches: list[PackedBatch]) -> list[tuple]:
    """Every loss row with its history, as data that can be compared."""
    return sorted(
        (history(b, i), int(b.action_A[i]), float(b.behavior_A[i]), float(b.advantage_A[i]),
         float(b.weight_A[i]), int(b.version_U[b.turn_A[i]]))
        for b in batches for i in range(len(b.action_A))
    )  # fmt: skip


def expected(groups: list[list[Credit]]) -> list[tuple]:
    """The same from the definition: one plain row a token."""
    out = []
    for group in groups:
        for item in group:
            paths = zip(item.trajectory.turns, item.trajectory.contexts(), strict=True)
            for u, (step, context_T) in enumerate(paths):
                done = step.completion
                for t, action in enumerate(done.action_A.tolist()):
                    if item.weight_U[u]:
                        seen = [*context_T.tolist(), *done.action_A[:t].tolist()]
                        out.append(
                            (seen, action, float(done.logprob_A[t]),
                             float(np.float32(item.advantage_U[u])),
                             float(np.float32(item.weight_U[u])), done.version)
                        )  # fmt: skip
    return sorted(out)


@st.composite
def credits(draw):
    """Groups of siblings over a small alphabet, so that prefixes coincide often; later turns pop
    into the action and the shared context."""
    token = st.integers(0, 2)
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        context = draw(st.lists(token, min_size=1, max_size=5))
        group = []
        for _ in range(draw(st.integers(1, 3))):
            turns, running = [], 0
            for k in range(draw(st.integers(1, 3))):
                action = draw(st.lists(token, min_size=1, max_size=4))
                kept = draw(st.integers(0, running)) if k else 0
                delta = draw(st.lists(token, min_size=1, max_size=3)) if k else context
                turns.append(turn(kept, delta, action, version=draw(st.integers(0, 2))))
                running = kept + len(delta) + len(action)
            weights = draw(
                st.lists(st.sampled_from([0.0, 0.25]), min_size=len(turns), max_size=len(turns))
            )
            group.append(credit(trajectory(*turns), draw(st.sampled_from([-1.0, 0.5])), weights))
        groups.append(group)
    return groups


@settings(max_examples=200, deadline=None)
@given(credits(), st.sampled_from([1, 8, 20, 10_000]))
def test_every_row_sees_exactly_its_history(groups, budget_T):
    assert rows(pack(groups, budget_T)) == expected(groups)


@settings(max_examples=100, deadline=None)
@given(credits(), st.randoms())
def test_sibling_order_and_cuts_change_nothing(groups, random):
    shuffled = [list(group) for group in groups]
    for group in shuffled:
        random.shuffle(group)
    random.shuffle(shuffled)
    assert rows(pack(shuffled, 7)) == rows(pack(groups, 10_000))


@settings(max_examples=100, deadline=None)
@given(credits(), st.sampled_from([6, 12, 30]))
def test_budget_holds_unless_one_sequence_exceeds_it(groups, budget_T):
    for batch in pack(groups, budget_T):
        one_sequence = batch.position_T.tolist() == list(range(batch.tokens_packed))
        assert batch.tokens_packed <= budget_T or one_sequence
        assert bool((batch.source_A[1:] >= batch.source_A[:-1]).all())


def test_a_context_is_stored_once_for_all_its_siblings():
    context = range(10, 20)
    group = [
        credit(trajectory(turn(0, context, [1, 2, 3, 4]))),
        credit(trajectory(turn(0, context, [5, 6, 7, 8, 9]))),
    ]
    (batch,) = pack([group], 100)
    assert (batch.tokens_packed, batch.tokens_flat, len(batch.action_A)) == (17, 29, 9)


def test_boundary_token_is_one_row_with_a_label_for_each_sibling():
    group = [credit(trajectory(turn(0, [7, 8], [label, 0]))) for label in (1, 2, 3)]
    (batch,) = pack([group], 100)
    on_boundary = batch.source_A == 1
    assert sorted(batch.action_A[on_boundary].tolist()) == [1, 2, 3]


def test_equal_sampled_tokens_are_read_once():
    group = [credit(trajectory(turn(0, [7], [1, 2, 3, last]))) for last in (4, 5)]
    (batch,) = pack([group], 100)
    assert batch.token_T.tolist() == [7, 1, 2, 3]
    assert batch.source_A.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_contexts_equal_as_text_but_not_as_ids_share_only_their_common_prefix():
    groups = [
        [credit(trajectory(turn(0, [1, 2, 3, 9], [5])))],
        [credit(trajectory(turn(0, [1, 4, 9], [5])))],
    ]
    (batch,) = pack(groups, 100)
    assert batch.tokens_packed == 4 + 2


def test_one_token_action_has_exactly_one_row():
    (batch,) = pack([[credit(trajectory(turn(0, [3, 4], [5])))]], 100)
    assert batch.source_A.tolist() == [1] and batch.action_A.tolist() == [5]


def test_pad_like_ids_are_ordinary_tokens():
    (batch,) = pack([[credit(trajectory(turn(0, [0, 2, 0, 2], [2, 0, 2])))]], 100)
    assert batch.token_T.tolist() == [0, 2, 0, 2, 2, 0] and batch.action_A.tolist() == [2, 0, 2]


def test_a_group_over_the_budget_is_split_by_siblings_and_read_again():
    group = [credit(trajectory(turn(0, range(10), [20 + j] * 5))) for j in range(4)]
    batches = pack([group], 20)
    assert [batch.tokens_packed for batch in batches] == [18, 18]
    assert rows(batches) == expected([group])


def test_groups_are_not_cut_from_their_context():
    groups = [
        [credit(trajectory(turn(0, [g] * 6, [50 + j] * 3))) for j in range(2)] for g in (1, 2, 3)
    ]
    batches = pack(groups, 22)  # a group is 6 + 2 + 2 = 10 tokens
    assert [batch.tokens_packed for batch in batches] == [20, 10]


def test_nothing_to_score_gives_no_batch():
    silent = credit(trajectory(turn(0, [1], [2])), 0.0, [0.0])
    assert pack([], 10) == [] and pack([[silent]], 10) == []


def test_shared_prefix_of_empty_and_nested():
    assert shared_prefix(ids([]), ids([1])) == 0
    assert shared_prefix(ids([1, 2]), ids([1, 2, 3])) == 2
    assert shared_prefix(ids([1, 2, 3]), ids([1, 9, 3])) == 1


def test_history_that_is_only_appended_to_is_one_path():
    turns = [turn(0, [1, 2], [3, 4]), turn(4, [5], [6, 7]), turn(6, [8], [9])]
    (path,) = paths([[credit(trajectory(*turns))]])
    assert path.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert [len(scored.tokens_T) for scored in path.turns] == [3, 6, 7] and path.actions == 5


def test_popping_what_was_scored_begins_another_path():
    first, second = paths(
        [[credit(trajectory(turn(0, [1, 2], [3, 4, 5]), turn(3, [6], [7])))]],
    )
    assert first.tokens_T.tolist() == [1, 2, 3, 4] and second.tokens_T.tolist() == [1, 2, 3, 6]


def test_turns_without_a_weight_are_read_only_as_context():
    turns = [turn(0, [1], [2]), turn(2, [3], [4]), turn(4, [5], [6])]
    (path,) = paths([[credit(trajectory(*turns), weights=[0.0, 0.5, 0.0])]])
    assert path.tokens_T.tolist() == [1, 2, 3] and path.turns[0].tokens_flat == 4


def test_any_integer_ids_and_strides_are_packed():
    wide = turn(0, [1, 2, 3], [4])
    odd = Boundary(0, np.arange(6, dtype=np.int64)[1::2])
    batches = [pack([[credit(trajectory(step))]], 9) for step in (wide, Turn(odd, wide.completion))]
    assert [batch.token_T.tolist() for (batch,) in batches] == [[1, 2, 3], [1, 3, 5]]


def test_a_hundred_thousand_tokens():
    rng = np.random.default_rng(0)
    groups = []
    for g in range(50):
        context = [g, *rng.integers(0, 50_000, 1199)]
        actions = [[j, *rng.integers(0, 50_000, 99)] for j in range(8)]
        groups.append([credit(trajectory(turn(0, context, action))) for action in actions])
    batches = pack(groups, 8192)
    assert sum(batch.tokens_packed for batch in batches) == 50 * (1200 + 8 * 99)
    assert sum(len(batch.action_A) for batch in batches) == 50 * 8 * 100
