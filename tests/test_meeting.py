"""How the ranks of a run find each other: who is there, who differs, who is missed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fastturn.dist import open_world
from fastturn.meeting import MOST_RANKS, DistError, agree

PLACE = "host:29500"


def meeting(*ranks: tuple[int, int, dict[str, Any]], start_s: float = 0.3) -> list[str]:
    """What ranks given as (rank, world size, terms) are told, each in a thread of its own."""
    store = dist.HashStore()

    def come(one: tuple[int, int, dict[str, Any]]) -> str:
        try:
            agree(store, PLACE, *one, start_s=start_s)
        except DistError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_ranks_with_the_same_terms_meet():
    assert meeting(*((rank, 3, {"seed": 0}) for rank in range(3)), start_s=30.0) == [""] * 3


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([(0, 2, {"seed": 0}), (1, 2, {"seed": 1})], "seed (0: 0, 1: 1)"),
        ([(0, 2, {"dist.shard_ranks": 0}), (1, 2, {})], "dist.shard_ranks (0: 0, 1: None)"),
        ([(0, 2, {"a": 1, "b": [1]}), (1, 2, {"a": 2, "b": [2]})], "a (0: 1, 1: 2); b (0: [1], 1"),
        ([(0, 2, {}), (1, 3, {})], "WORLD_SIZE (0: 2, 1: 3)"),
        ([(0, 3, {}), (1, 2, {})], "WORLD_SIZE (0: 3, 1: 2)"),
        ([(0, 3, {}), (1, 2, {}), (2, 3, {})], "WORLD_SIZE (0: 3, 1: 2, 2: 3)"),
        ([(0, 3, {"torch": "2"}), (1, 3, {"torch": "1"})], "torch (0: '2', 1: '1')"),
    ],
)
def test_every_rank_is_told_what_differs(ranks, told):
    answers = meeting(*ranks)
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"ranks differ in {told}") and "the same command" in answers[0]


def test_of_many_ranks_the_values_are_told_and_some_of_the_ranks():
    ranks = [(rank, 20, {"seed": int(rank == 17)}) for rank in range(20)]
    (told,) = set(meeting(*ranks, start_s=30.0))
    assert "seed (0, 1, 2, 3, 4, 5, 6, 7 and 11 more: 0, 17: 1)" in told


def test_missing_ranks_are_named_to_all_that_are_there():
    assert set(meeting((0, 3, {}), (2, 3, {}))) == {
        f"rank 1 did not come to {PLACE} within 0.3 s; start all 3 ranks, or a smaller WORLD_SIZE"
    }
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more did not" in meeting((0, 100, {}))[0]


def test_without_the_first_rank_the_others_do_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("fastturn.meeting.READ_S", 0.1)
    (told,) = set(meeting((1, 3, {}), (2, 3, {})))
    assert told.startswith(f"rank 0 did not say at {PLACE} that all ranks are there in 0.5 s")


def test_a_rank_that_comes_twice_is_told_so_and_the_run_goes_on():
    answers = meeting((0, 2, {}), (1, 2, {}), (1, 2, {}), start_s=30.0)
    assert sorted(map(bool, answers)) == [False, False, True] and answers[0] == ""
    assert f"rank 1 came to {PLACE} twice; start one process for each rank" in max(answers)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WORLD_SIZE", "two", f"1 to {MOST_RANKS}"),
        ("WORLD_SIZE", "-2", f"1 to {MOST_RANKS}"),
        ("RANK", "2", "0 to 1"),
        ("RANK", "", "0 to 1"),
        ("LOCAL_RANK", "0.5", "0 to 1"),
        ("MASTER_PORT", "70000", "0 to 65535"),
    ],
)
def test_a_variable_of_the_environment_that_cannot_be_is_named(monkeypatch, name, value, expected):
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for key, text in (given | {"MASTER_ADDR": "127.0.0.1", name: value}).items():
        monkeypatch.setenv(key, text)
    message = f"{name}='{value}': expected a whole number, {expected}; start with torchrun"
    with pytest.raises(DistError, match=message), open_world("cpu"):
        pass


def test_half_an_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    message = "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"
    with pytest.raises(DistError, match=message), open_world("cpu"):
        pass
