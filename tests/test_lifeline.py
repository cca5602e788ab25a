"""A rank that goes without a word is missed by the others, one that takes its leave is not."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from fastturn import lifeline
from fastturn.lifeline import Lifeline


class Store:
    """torch's store, as far as it is used: `get` waits for `set`."""

    def __init__(self) -> None:
        self.port: queue.Queue[str] = queue.Queue()

    def set(self, key: str, value: str) -> None:
        for _ in range(2):
            self.port.put(value)

    def get(self, key: str) -> bytes:
        return self.port.get(timeout=10).encode()


@pytest.fixture
def three() -> tuple[list[Lifeline], list[queue.Queue[str]]]:
    """The lifelines of three ranks, and what each has lost."""
    store, lost = Store(), [queue.Queue() for _ in range(3)]
    lines: list[Lifeline] = []
    first = threading.Thread(target=lambda: lines.append(Lifeline(0, 3, store, lost=lost[0].put)))
    first.start()
    others = [Lifeline(rank, 3, store, lost=lost[rank].put) for rank in (1, 2)]
    first.join(10)
    return [*lines, *others], lost


def cut(line: Lifeline) -> None:
    """What the kernel does with the connections of a dead process, which itself says nothing."""
    line._closed = True
    for key in list(line._selector.get_map().values()):
        key.fileobj.shutdown(socket.SHUT_RDWR)


def test_the_death_of_any_rank_is_known_to_all(three):
    lines, lost = three
    cut(lines[2])
    host = socket.gethostname()
    assert lost[0].get(timeout=10) == f"rank 2 on {host}"
    assert lost[1].get(timeout=10) == f"rank 2 on {host}"


def test_the_death_of_rank_0_is_known_to_all(three):
    lines, lost = three
    cut(lines[0])
    assert {lost[rank].get(timeout=10) for rank in (1, 2)} == {"rank 0 on 127.0.0.1"}


def test_ranks_that_take_their_leave_are_not_missed(three):
    lines, lost = three
    for line in reversed(lines):
        line.close()
    for line in lines:
        cut(line)
    for box in lost:
        with pytest.raises(queue.Empty):
            box.get(timeout=0.3)


def test_the_process_ends_with_the_name_of_the_lost_rank(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(lifeline, "GRACE_S", 0.0)
    monkeypatch.setattr("os._exit", codes.append)
    lifeline.end_process("rank 3 on there")
    assert codes == [1] and "rank 3 on there is gone" in capsys.readouterr().err
