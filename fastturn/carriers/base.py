"""What every carrier promises, and the sequence that all of them share.

    pause ---> move ---> version tag ---> resume
      |          |
      |          +-- refused: the server keeps its old weights and is resumed
      |          +-- broken: it holds no whole model; it stays paused and is named as unusable
      +-- not reached: nothing was changed; servers that did pause are resumed

Pausing lets requests finish and drops the prefix cache, so no token is sampled from half a model
and no key or value of the old weights is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import nn

from fastturn.carriers.packing import Meta, aligned
from fastturn.lora import Weight, merged
from fastturn.sampler.server import EngineError, Server

Weights = Iterable[tuple[str, torch.Tensor]]
Faults = list[EngineError | None]  # one a server, None where all went well


class Carrier(Protocol):
    """Moves weights from the trainer into running servers.

    `send(weights, version, servers)`: `weights` are (name, tensor) pairs in checkpoint format, all
    parameters of the model; afterwards every server holds them, stamped `str(version)`, and takes
    requests. On failure `EngineError`; the message says what state each server is in.
    `close()`: let go of what was kept for the next publish; servers keep the weights they have.
    """

    name: str

    def send(self, weights: Weights, version: int, servers: Sequence[Server]) -> None: ...

    def close(self) -> None: ...


class Refused(EngineError):
    """A server turned the weights down before it changed anything: it still holds the old ones."""


class PublishFailed(EngineError):
    """Not every server holds the new weights. `unusable`: URLs of servers that hold no whole model
    and stay paused; the others take requests."""

    def __init__(self, message: str, first: EngineError, unusable: Sequence[str] = ()) -> None:
        super().__init__(message, phase=first.phase, url=first.url, status=first.status)
        self.unusable = tuple(unusable)


def each(servers: Sequence[Server], act: Callable[[Server], object]) -> Faults:
    """Do the same with every server at once; the `EngineError` of each, or None."""

    def attempt(server: Server) -> EngineError | None:
        try:
            act(server)
        except EngineError as error:
            return error
        return None

    if len(servers) == 1:
        return [attempt(servers[0])]
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        return list(pool.map(attempt, servers))


def exchange(
    servers: Sequence[Server],
    version: int,
    move: Callable[[Sequence[Server]], Faults],
    timeout_s: float | None = None,
) -> None:
    """Pause all, `move`, stamp, resume. `move` gives one fault a server: `Refused` says that the
    old weights are whole, any other that they are not.

    Raises `EngineError` before anything moved when a server cannot be paused, else `PublishFailed`.
    """
    faults = each(servers, lambda server: server.pause(timeout_s))
    if any(faults):
        # A pause whose answer was lost may have happened: all are resumed.
        each(servers, Server.resume)
        raise first_of(faults)
    settle(servers, version, moved(servers, version, move), Server.resume)


def moved(
    servers: Sequence[Server], version: int, move: Callable[[Sequence[Server]], Faults]
) -> Faults:
    """What `move` gives; `PublishFailed` that leaves no server usable when it raises, because then
    the trainer's side has failed in the middle."""
    try:
        return move(servers)
    except Exception as error:
        fault = EngineError(str(error), phase="send weights", url=servers[0].url)
        urls = [server.url for server in servers]
        raise PublishFailed(
            f"version {version} was not published: the trainer failed while it was sending "
            f"({type(error).__name__}: {error}) [unusable, left paused, restart: "
            f"{', '.join(urls)}]",
            fault,
            urls,
        ) from error


def settle(
    servers: Sequence[Server],
    version: int,
    faults: Faults,
    resume: Callable[[Server], None],
) -> None:
    """Stamp the servers that hold the new weights, resume all that hold whole ones, and raise
    `PublishFailed` when any server is left out."""

    def finish(server: Server) -> None:
        fault = faults[servers.index(server)]
        if fault is None:
            server.set_weight_version(str(version))
        if fault is None or isinstance(fault, Refused):
            resume(server)

    late = each(servers, finish)
    combined = [early or after for early, after in zip(faults, late, strict=True)]
    if not any(combined):
        return
    first = first_of(combined)
    unusable = [s.url for s, f in zip(servers, faults, strict=True) if f and not _is_whole(f)]
    old = [s.url for s, f in zip(servers, faults, strict=True) if isinstance(f, Refused)]
    states = [f"old weights, taking requests: {', '.join(old)}"] if old else []
    if unusable:
        states.append(f"unusable, left paused, restart: {', '.join(unusable)}")
    states += [f"not resumed: {s.url} ({e})" for s, e in zip(servers, late, strict=True) if e]
    raise PublishFailed(
        f"version {version} was not published: {_text(first)} [{'; '.join(states)}]",
        first,
        unusable,
    ) from first


def first_of(faults: Faults) -> EngineError:
    return next(fault for fault in faults if fault)


def _is_whole(fault: EngineError) -> bool:
    return isinstance(fault, Refused)


def _text(fault: EngineError) -> str:
    """The message without the phase and the address, which `PublishFailed` says again."""
    return str(fault).removeprefix(f"{fault.phase} at {fault.url}: ")


class FullWeights:
    """The parameters of a model in checkpoint format, each whole, gathered one by one when sharded.

    Iterating is a collective when parameters are sharded (FSDP2): every rank iterates, and the
    gather of one tensor overlaps the sending of those before it. `meta` gathers nothing. Tensors
    that are tied appear once; those of wide types come first (`packing.aligned`). Adapters are
    added to the weights that they adapt, under the names of a model without them.
    Example: `NcclCarrier().send(FullWeights(policy.model), 3, servers)`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in self._weights():
            yield weight.name, weight.whole()

    def meta(self) -> list[Meta]:
        """(name, dtype, whole shape) in the order of iteration."""
        return [(w.name, w.held.dtype, tuple(w.held.shape)) for w in self._weights()]

    def _weights(self) -> list[Weight]:
        held = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        weights = merged(self.model, held)
        return sorted(weights, key=lambda w: aligned((w.name, w.held.dtype, ())))
