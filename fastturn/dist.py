"""The processes of a run: who they are, how they agree, how they end together.

    torchrun / fastturn train --nproc N          one process
              |                                        |
         open_world(device, shard_ranks)  ->  World(rank, size, device, mesh)

`World` holds every collective that the program calls itself; those of sharded weights are FSDP's
(`sharding.py`). One process is a world of size 1 whose collectives return what they were given, so
nothing else asks how many there are. All ranks call the same methods in the same order.

A rank that fails leaves with its error in the file that the launcher named for it; the launcher
(torchrun's agent) then ends the others of its machine, and the lifeline those of other machines.
Waiting is bounded: at the start by `meeting.py`, then by `COLLECTIVE_S` for the slowest rank in a
collective (one may still be sampling).
"""

from __future__ import annotations

import os
import pickle
import socket
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
from fastturn.meeting import START_S, DistError, first_line, meet, seat

T = TypeVar("T")
COLLECTIVE_S = 1800.0


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
        return self.host_gib

    @property
    def host_gib(self) -> float:
        """This rank's share of its machine's memory."""
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
    device: str = "auto",
    shard_ranks: int = 0,
    *,
    mesh: bool = False,
    terms: Mapping[str, Any] | None = None,
) -> Iterator[World]:
    """The world that the environment describes: torchrun's variables, or none for one process.

    `shard_ranks`: ranks that share one copy of the weights (0: all of them). `mesh`: make one even
    for one process, for what FSDP does besides splitting (mixed precision, offload). `terms`: what
    else must be the same on all ranks, names to JSON values.
    Raises `DistError` or `ConfigError` on every rank, within a minute, when ranks are missing or
    were started differently, the port is taken, there are fewer devices than ranks, or the mesh
    does not fit.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        with _mesh_of_one(device) if mesh else nullcontext(World.single(device)) as world:
            yield world
        return
    follow_launcher()
    rank, size = seat()
    kind = _own_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo"
    place = {"device type": kind.type, "dist.shard_ranks": shard_ranks}
    store = meet(rank, size, {**place, **(terms or {})})
    shape, names = mesh_shape(size, shard_ranks)
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
            f"{COLLECTIVE_S:g} s ({first_line(error)}); the error of that rank says why"
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
