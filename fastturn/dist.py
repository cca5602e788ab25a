"""The processes of a run: who they are, how they agree, how they end together.

    torchrun / fastturn train --nproc N          one process
              |                                        |
         open_world(device, shard_ranks)  ->  World(rank, size, device, mesh)

`World` holds every collective that the program calls itself; those of sharded weights are FSDP's
(`sharding.py`). One process is a world of size 1 whose collectives return what they were given, so
nothing else asks how many there are. All ranks call the same methods in the same order.

A rank that fails leaves with its error in the file that the launcher named for it; the launcher
(torchrun's agent) then ends the others of its machine, and the lifeline those of other machines.
Waiting is bounded: `START_S` for ranks to appear,
`COLLECTIVE_S` for the slowest rank in a collective (one may still be sampling).
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastturn.config import ConfigError
from fastturn.lifeline import Lifeline, follow_launcher

T = TypeVar("T")
START_S = 30.0
COLLECTIVE_S = 1800.0
START = "start with torchrun or `fastturn train RECIPE --nproc N`, which set all of them"
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class DistError(RuntimeError):
    """The processes of a run did not come together, do not agree, or lost each other."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the processes of the run.

    `mesh`: None for one process (unless asked for); else dimension "shard", after "replicate" when
    weights are sharded within groups of ranks only. `background`: a group of all ranks for
    collectives of a second thread, which must not come between those of the first. Collectives
    carry Python objects, so sums are added in rank order and are the same bits on every rank.
    Example: `World.single().sum({"loss": 2.0})` is `{"loss": 2.0}`.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    background: Any = None

    @classmethod
    def single(cls, device: str = "cpu") -> World:
        """One process on `device` ("auto": a GPU when there is one)."""
        return cls(0, 1, torch.device(_device_kind(device)))

    @property
    def device_gib(self) -> float:
        """Memory that is this rank's: all of its GPU, or its share of the machine's."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory / 2**30
        whole_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return whole_gib / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def leader(self) -> bool:
        """Rank 0: the one that writes files and talks to the user."""
        return self.rank == 0

    def all_gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: T) -> T:
        """The leader's value on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.leader else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums by name over all ranks; a name that a rank lacks counts 0 there."""
        return self._reduce(values, lambda a, b: a + b)

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima by name over all ranks; NaN when any is NaN."""
        return self._reduce(values, lambda a, b: b if b != b or b > a else a)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank."""
        return any(self.all_gather_objects(flag))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather_objects(None)

    def first(self, action: Callable[[], T]) -> T:
        """The leader acts; its result is returned, or its exception raised, on every rank."""
        if self.size == 1:
            return action()
        result: Any = None
        error: Exception | None = None
        if self.leader:
            try:
                result = action()
            except Exception as raised:  # raised below, here and on every other rank
                error = _portable(raised)
        result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return result

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """`DistError` on every rank when ranks were given different values.

        Example: `agree("configuration", {"seed": 0})` on one rank and `{"seed": 1}` on another
        raises "configuration: ranks differ in seed (0: 0, 1: 1) ...".
        """
        everyone = self.all_gather_objects((socket.gethostname(), dict(values)))
        differing = []
        for key in sorted({key for _, given in everyone for key in given}):
            found = [given.get(key) for _, given in everyone]
            if any(value != found[0] for value in found):
                shown = ", ".join(f"{rank}: {value!r}" for rank, value in enumerate(found))
                differing.append(f"{key} ({shown})")
        if differing:
            hosts = ", ".join(sorted({host for host, _ in everyone}))
            raise DistError(
                f"{what}: ranks differ in {'; '.join(differing)} (hosts {hosts}); start every rank "
                f"with the same command and the same installation"
            )

    def _reduce(
        self, values: Mapping[str, float], join: Callable[[float, float], float]
    ) -> dict[str, float]:
        total: dict[str, float] = {}
        for given in self.all_gather_objects(dict(values)):
            for name, value in given.items():
                total[name] = join(total[name], value) if name in total else value
        return total


class Clock(Protocol):
    def span(self, name: str) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class EveryRank:
    """Every rank samples its own share of a rollout: item i is rank `i % size`'s (`tree.Peers`)."""

    world: World
    clock: Clock

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.world.rank :: self.world.size]

    def join(self, results: Sequence[T]) -> list[T]:
        with self.clock.span("exchange"):
            parts = self.world.all_gather_objects(list(results))
        size = self.world.size
        return [parts[i % size][i // size] for i in range(sum(map(len, parts)))]

    def relay(self, chunks: Iterable[list[T]]) -> Iterator[list[T]]:
        """All chunks as one, when every rank has made its own; in the order of ranks."""
        own = [item for chunk in chunks for item in chunk]
        with self.clock.span("exchange"):
            parts = self.world.all_gather_objects(own)
        yield [item for part in parts for item in part]


@dataclass(frozen=True, slots=True)
class LeaderOnly:
    """The leader samples everything, from a sampler outside these processes (`tree.Peers`)."""

    world: World
    clock: Clock

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        return items if self.world.leader else []

    def join(self, results: Sequence[T]) -> list[T]:
        with self.clock.span("exchange"):
            return self.world.broadcast_object(list(results))

    def relay(self, chunks: Iterable[list[T]]) -> Iterator[list[T]]:
        """The leader's chunks, as they come."""
        own = iter(chunks)
        while True:
            chunk = next(own, None) if self.world.leader else None
            with self.clock.span("exchange"):
                chunk = self.world.broadcast_object(chunk)
            if chunk is None:
                return
            yield chunk


@contextmanager
def open_world(
    device: str = "auto", shard_ranks: int = 0, *, mesh: bool = False
) -> Iterator[World]:
    """The world that the environment describes: torchrun's variables, or none for one process.

    `shard_ranks`: ranks that share one copy of the weights (0: all of them). `mesh`: make one even
    for one process, for what FSDP does besides splitting (mixed precision, offload).
    Raises `DistError` or `ConfigError` on every rank, within about `START_S`, when ranks are
    missing, the port is taken, there are fewer devices than ranks, or the mesh does not fit.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        with _mesh_of_one(device) if mesh else nullcontext(World.single(device)) as world:
            yield world
        return
    follow_launcher()
    rank, size = _place()
    shape, names = mesh_shape(size, shard_ranks)
    kind = _own_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo"
    store = _meet(rank, size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=kind if kind.type == "cuda" else None,
    )
    line = Lifeline(rank, size, store, host=os.environ["MASTER_ADDR"], start_s=START_S)
    try:
        split = init_device_mesh(kind.type, shape, mesh_dim_names=names)
        yield World(rank, size, kind, split, dist.new_group(backend="gloo"))
    except KeyboardInterrupt:
        line.close()  # all ranks stop together
        raise
    except RuntimeError as error:
        if not _of_transport(error):
            raise
        raise DistError(
            f"a collective failed, because another rank has ended or was silent for "
            f"{COLLECTIVE_S:g} s ({_line(error)}); the error of that rank says why"
        ) from error
    line.close()
    # Only after success: with a dead peer it may wait, and the process is about to end anyway.
    dist.destroy_process_group()


@contextmanager
def _mesh_of_one(device: str) -> Iterator[World]:
    alone = World.single(device)
    backend = "cpu:gloo,cuda:nccl" if alone.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield replace(alone, mesh=init_device_mesh(alone.device.type, (1,)))
    finally:
        dist.destroy_process_group()


def mesh_shape(size: int, shard_ranks: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and dimension names of the mesh.

    Example: 16 ranks with `shard_ranks = 8` give ((2, 8), ("replicate", "shard")).
    """
    if shard_ranks in (0, size):
        return (size,), ("shard",)
    if size % shard_ranks:
        raise ConfigError(
            f"dist.shard_ranks={shard_ranks}: {size} ranks do not divide into groups of "
            f"{shard_ranks}; set a divisor of {size}, or 0 to shard over all of them"
        )
    return (size // shard_ranks, shard_ranks), ("replicate", "shard")


def _place() -> tuple[int, int]:
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise DistError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; {START}"
        )
    size = _whole("WORLD_SIZE", 1)
    for name, most in (("LOCAL_RANK", size - 1), ("MASTER_PORT", 65535)):
        _whole(name, 0, most)
    return _whole("RANK", 0, size - 1), size


def _whole(name: str, least: int, most: int | None = None) -> int:
    """A variable of torchrun that is a number between two others, or `DistError`."""
    text = os.environ[name]
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    raise DistError(f"{name}={text!r}: expected a whole number, {limits}; {START}")


def _device_kind(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _own_device(device: str) -> torch.device:
    if _device_kind(device) != "cuda":
        return torch.device(_device_kind(device))
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise DistError(
            f"process {local} of {socket.gethostname()} has no device: there are {count} "
            f"CUDA devices; start at most {count} processes here, or set device=cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _meet(rank: int, size: int) -> Any:
    """The store that all ranks have reached, or `DistError` naming those that have not."""
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
        raise DistError(f"no meeting at {place}: {cause}. ({_line(error)})") from error
    keys = [f"present/{other}" for other in range(size)]
    store.set(keys[rank], socket.gethostname())
    deadline_s = time.monotonic() + START_S
    missing = list(range(size))
    while missing:
        late = time.monotonic() > deadline_s
        try:
            missing = [other for other in missing if not store.check([keys[other]])]
        except RuntimeError:  # rank 0, which keeps the store, has given up
            late = True
        if missing and late:
            raise DistError(
                f"{'ranks' if len(missing) > 1 else 'rank'} "
                f"{', '.join(map(str, missing))} did not come to {place} within {START_S:g} s; "
                f"start all {size} ranks, or a smaller WORLD_SIZE"
            )
        time.sleep(0.05)
    return store


def _store(rank: int, size: int) -> Any:
    """torch's key-value store of the run, kept by rank 0 or by torchrun's agent. In a thread of its
    own, because torch waits several times as long as it is told for an address that takes
    connections and never answers."""
    result: list[Any] = []
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeper = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def open_store() -> None:
        # Nobody is waited for here: `_meet` knows the missing by name.
        patience = timedelta(seconds=START_S)
        place = (address, port, size, keeper, patience)
        try:
            result.append(dist.TCPStore(*place, wait_for_workers=False, multi_tenant=True))
        except (RuntimeError, OSError, ValueError) as error:
            result.append(error)

    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(START_S + 2)
    if not result:
        raise TimeoutError("connected, but nothing answered")
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _portable(error: Exception) -> Exception:
    """The error itself if it survives being sent to another process, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any class may forbid either half in its own way
        return DistError(f"rank 0: {type(error).__name__}: {error}")
    return error


def _of_transport(error: RuntimeError) -> bool:
    """Whether torch could not reach another rank; gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _line(error: BaseException) -> str:
    """The first line of an error of torch, which adds its C++ stack to them."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". This is typically")[0][:300]
