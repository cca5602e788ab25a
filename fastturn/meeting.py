"""How the processes of a run find each other and agree, before any collective.

    torchrun's variables -> seat() -> meet(rank, size, terms)
         every rank: its host and terms -> store -> rank 0: one verdict -> store -> every rank

A collective between ranks that were started differently hangs (another world size, other groups of
ranks) or mixes two runs (another recipe); so whatever has to be the same is compared in torch's
key-value store first. Rank 0 alone reads what all have put there: every rank leaves with the same
words, and the store carries one answer per rank instead of a question from each to each.
Waiting is bounded: `START_S` for ranks to appear, a little more for the verdict.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

START_S = 30.0
READ_S = 5.0  # how long rank 0, which may hold the store and end next, waits for its readers
POLL_S = 0.05
MOST_RANKS = 2**17
START = "start with torchrun or `fastturn train RECIPE --nproc N`, which set all of them"
SAME = "start every rank with the same command and the same installation"
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class DistError(RuntimeError):
    """The processes of a run did not come together, do not agree, or lost each other."""


def seat() -> tuple[int, int]:
    """(rank, world size) by torchrun's variables, all of which are checked; or `DistError`."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise DistError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; {START}"
        )
    size = _whole("WORLD_SIZE", 1, MOST_RANKS)
    for name, most in (("LOCAL_RANK", size - 1), ("MASTER_PORT", 65535)):
        _whole(name, 0, most)
    return _whole("RANK", 0, size - 1), size


def _whole(name: str, least: int, most: int) -> int:
    """A variable of torchrun that is a number between two others, or `DistError`."""
    text = os.environ[name]
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise DistError(f"{name}={text!r}: expected a whole number, {least} to {most}; {START}")


def meet(rank: int, size: int, terms: Mapping[str, Any]) -> Any:
    """The store that all ranks have reached with the same `terms` (names to JSON values).

    Raises `DistError` on every rank that is there, within a minute, when ranks are
    missing or were started with different terms, or when the address is another program's.
    """
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _store(rank, size)
    except (RuntimeError, OSError, ValueError) as error:
        cause = (
            "the port is in use by another program; choose another --master-port"
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
            else f"rank 0 did not come within {START_S:g} s, or another program answers there; "
            f"start all ranks with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        )
        raise DistError(f"no meeting at {place}: {cause}. ({first_line(error)})") from error
    agree(store, place, rank, size, terms)
    return store


def agree(
    store: Any,
    place: str,
    rank: int,
    size: int,
    terms: Mapping[str, Any],
    start_s: float = START_S,
) -> None:
    """Returns when all `size` ranks are at `store` with the same terms, else raises `DistError`.

    Example: ranks started with `{"seed": 0}` and `{"seed": 1}` both raise "ranks differ in seed
    (0: 0, 1: 1) ...".
    """
    if store.add(f"seats/{rank}", 1) > 1:
        raise DistError(
            f"rank {rank} came to {place} twice; start one process for each rank, and another "
            f"MASTER_PORT for another run"
        )
    mine = {"host": socket.gethostname(), "terms": {"WORLD_SIZE": size, **terms}}
    store.set(f"present/{rank}", json.dumps(mine))
    if rank == 0:
        come = _arrivals(store, size, start_s)
        problem = _difference(come) or _absence(come, size, place, start_s)
        store.set("verdict", json.dumps(problem))
        others = len(come) - 1
        _wait(lambda: store.add("read", 0) >= others, READ_S)
    else:
        problem = _verdict(store, place, start_s + 2 * READ_S)
    if problem:
        raise DistError(problem)


def _arrivals(store: Any, size: int, start_s: float) -> dict[int, dict[str, Any]]:
    """What ranks have put at `store`, until all have that any of them knows of."""
    come: dict[int, dict[str, Any]] = {}

    def complete() -> bool:
        known = max([size, *(one["terms"]["WORLD_SIZE"] for one in come.values())])
        for other in range(known):
            if other not in come and store.check([f"present/{other}"]):
                come[other] = json.loads(store.get(f"present/{other}"))
        return len(come) >= known

    _wait(complete, start_s)
    return dict(sorted(come.items()))


def _verdict(store: Any, place: str, patience_s: float) -> str:
    """What rank 0 has found; nothing if all is well."""
    try:
        if _wait(lambda: store.check(["verdict"]), patience_s):
            problem = json.loads(store.get("verdict"))
            store.add("read", 1)
            return str(problem)
        why = f"in {patience_s:g} s"
    except RuntimeError as error:  # it kept the store, and is gone
        why = f"before it left ({first_line(error)})"
    return (
        f"rank 0 did not say at {place} that all ranks are there {why}; its own error says why, "
        f"or it was never started: start all ranks"
    )


def _difference(come: Mapping[int, Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for one in come.values() for name in one["terms"])
    differing = []
    for name in names:
        found = {rank: one["terms"].get(name) for rank, one in come.items()}
        first = next(iter(found.values()))
        if any(value != first for value in found.values()):
            differing.append(f"{name} ({_some(found)})")
    if not differing:
        return ""
    hosts = ", ".join(sorted({one["host"] for one in come.values()}))
    return f"ranks differ in {'; '.join(differing)} (hosts {hosts}); {SAME}"


def _some(values: Mapping[int, Any], most: int = 8) -> str:
    """`rank: value` of as many ranks as one can read, of every value at least one."""
    kinds: dict[str, list[int]] = {}
    for rank, value in values.items():
        kinds.setdefault(repr(value), []).append(rank)
    if len(values) <= most:
        return ", ".join(f"{rank}: {value!r}" for rank, value in values.items())
    return ", ".join(f"{_ranks(ranks)}: {value}" for value, ranks in kinds.items())


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


def _absence(come: Mapping[int, Any], size: int, place: str, start_s: float) -> str:
    missing = [rank for rank in range(size) if rank not in come]
    if not missing:
        return ""
    return (
        f"{'ranks' if len(missing) > 1 else 'rank'} {_ranks(missing)} did not come to {place} "
        f"within {start_s:g} s; start all {size} ranks, or a smaller WORLD_SIZE"
    )


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    """Whether it was done in time."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _store(rank: int, size: int) -> Any:
    """torch's key-value store of the run, kept by rank 0 or by torchrun's agent. In a thread of its
    own, because torch waits several times as long as it is told for an address that takes
    connections and never answers."""
    result: list[Any] = []
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeper = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def open_store() -> None:
        # Nobody is waited for here: `agree` knows the missing by name.
        patience = timedelta(seconds=START_S)
        at = (address, port, size, keeper, patience)
        try:
            result.append(dist.TCPStore(*at, wait_for_workers=False, multi_tenant=True))
        except (RuntimeError, OSError, ValueError) as error:
            result.append(error)

    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(START_S + 2)
    if not result:
        raise TimeoutError("connected, but nothing answered")
    if isinstance(result[0], Exception):
        raise result[0]
    # The agent's store outlives an attempt of its ranks; what the last one said is not ours.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt/{attempt}", result[0])


def first_line(error: BaseException) -> str:
    """The first line of an error of torch, which adds its C++ stack to them."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". This is typically")[0][:300]
