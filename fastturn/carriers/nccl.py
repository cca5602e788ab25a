"""Weights by NCCL broadcast into vLLM's weight-transfer engine, on GPUs of their own.

    connect once:   /init_weight_transfer_engine on every server, beside the trainer's own joining
    every publish:  pause -> /start_weight_update -> /update_weights (blocks) beside the broadcast
                    -> /finish_weight_update -> version tag -> resume

The servers were started with `--weight-transfer-config '{"backend": "nccl"}'`. Tensors are gathered
and packed while those before are still on their way; nothing is written anywhere.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from fastturn.carriers.base import Faults, FullWeights, Weights, each, exchange, first_of
from fastturn.carriers.nccl_group import Group, NcclGroup, Ticket, Watch, open_store, wait_for
from fastturn.carriers.packing import Chunk, Meta, describe, in_order, meta_of, pack
from fastturn.sampler.server import EngineError, Server

PACKED_IN_INIT_SINCE = (0, 28)  # before, packing was agreed upon in every update
_BUFFERS = 2  # chunks on their way at a time

OpenGroup = Callable[[TCPStore, int, Watch], Group]


class NcclCarrier:
    """`address`: this machine, as the servers reach it; empty: the address that reaches them.
    `buffer_bytes`: least size of a packed broadcast; two are alive at a time on either side.
    `sender`: False on the trainer's other ranks, which take part in gathering only.

    Example: `NcclCarrier("10.0.0.4").send(FullWeights(policy.model), 3, servers)`.
    """

    name = "nccl"

    def __init__(
        self,
        address: str = "",
        buffer_bytes: int = 1 << 30,
        timeout_s: float = 600.0,
        sender: bool = True,
        open_group: OpenGroup = NcclGroup,
    ) -> None:
        self.address, self.buffer_bytes, self.timeout_s = address, buffer_bytes, timeout_s
        self.sender, self._open_group = sender, open_group
        self._group: Group | None = None
        self._urls: tuple[str, ...] = ()
        self._store: TCPStore | None = None

    def send(self, weights: Weights, version: int, servers: Sequence[Server]) -> None:
        if not self.sender:
            for _ in weights:  # every rank takes part in every gather
                pass
            return
        pairs, metas = _described(weights)
        urls = tuple(server.url for server in servers)
        if self._group is None or urls != self._urls:
            self.close()
            self._connect(servers)
            self._urls = urls
        try:
            exchange(
                servers, version, lambda paused: self._move(paused, pairs, metas), self.timeout_s
            )
        except EngineError:
            self.close()  # workers may be stuck in a broadcast: the next publish meets anew
            raise

    def close(self) -> None:
        """Leave the group, without the workers: a communicator that is destroyed waits for those on
        the same machine, which stay in it. What a broken one says to that is no news."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _packing(self) -> dict[str, Any]:
        size = {"packed_buffer_size_bytes": self.buffer_bytes, "packed_num_buffers": _BUFFERS}
        return {"packed": True, **size}

    def _connect(self, servers: Sequence[Server]) -> None:
        sizes = [server.world_size() for server in servers]
        world = 1 + sum(sizes)
        address = self.address or own_address(server.url for server in servers)
        listener = socket.create_server(("", 0))
        port = listener.getsockname()[1]

        def meet(server: Server) -> None:
            at = servers.index(server)
            info = {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + sum(sizes[:at]),
                "world_size": world,
            }
            if server.release >= PACKED_IN_INIT_SINCE:
                info |= self._packing()
            server.init_transfer(info, self.timeout_s)

        pool = ThreadPoolExecutor(max(1, len(servers)))
        meetings = [pool.submit(each, [server], meet) for server in servers]
        try:
            watch = _watcher(meetings, servers, "connect", self.timeout_s)
            store = open_store(address, listener, world, self.timeout_s, watch)
            self._group, self._store = self._open_group(store, world, watch), store
            for meeting in meetings:
                if meeting.result()[0] is not None:
                    raise first_of(meeting.result())
        except (RuntimeError, ValueError) as error:
            self.close()
            if isinstance(error, EngineError):
                raise
            message = f"{error}; nothing was published"
            raise EngineError(message, phase="connect", url=servers[0].url) from error
        finally:
            pool.shutdown(wait=False)  # a worker that waits for peers ends at its own deadline

    def _move(self, servers: Sequence[Server], pairs: Weights, metas: list[Meta]) -> Faults:
        faults = each(servers, Server.start_update)
        if any(faults):
            return [fault or _spoilt(s, faults) for s, fault in zip(servers, faults, strict=True)]

        def receive(server: Server) -> None:
            info = describe(metas)
            if server.release < PACKED_IN_INIT_SINCE:
                info |= self._packing()
            server.update_weights(info, self.timeout_s)

        pool = ThreadPoolExecutor(max(1, len(servers)))
        receipts = [pool.submit(each, [server], receive) for server in servers]
        assert self._group is not None
        try:
            watch = _watcher(receipts, servers, "broadcast", self.timeout_s)
            broadcast(self._group, pack(checked(pairs, metas), self.buffer_bytes), watch)
        except EngineError as error:
            return [_spoilt(server, [error]) for server in servers]
        finally:
            pool.shutdown(wait=False)
        faults = [receipt.result()[0] for receipt in receipts]
        whole = [s for s, fault in zip(servers, faults, strict=True) if fault is None]
        ends = iter(each(whole, lambda server: server.finish_update(self.timeout_s)))
        return [fault if fault is not None else next(ends) for fault in faults]


def own_address(urls: Iterable[str]) -> str:
    """The address that this machine reaches the servers from; of several that of another machine.

    Example: `own_address(["http://127.0.0.1:8000"])` is "127.0.0.1". Nothing is sent.
    """
    found = []
    for url in urls:
        place = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((place.hostname, place.port or 80))
            except OSError as error:
                message = f"no way to {place.hostname}: {error}; nothing was published"
                raise EngineError(message, phase="connect", url=url) from error
            found.append(str(probe.getsockname()[0]))
    return next((a for a in found if not a.startswith("127.")), found[0])


def broadcast(group: Group, chunks: Any, watch: Watch) -> None:
    """Send chunks in order, at most two on their way; returns when all have left."""
    flying: deque[tuple[Ticket, Chunk]] = deque()
    for chunk in chunks:
        flying.append((group.broadcast(chunk.bytes_N), chunk))
        if len(flying) >= _BUFFERS:
            wait_for(flying.popleft()[0].query, watch)
    while flying:
        wait_for(flying.popleft()[0].query, watch)


def _described(weights: Weights) -> tuple[Weights, list[Meta]]:
    """The weights and what the receivers must know before the first byte. Only `FullWeights` knows
    it without having the tensors; of anything else the tensors are kept."""
    if isinstance(weights, FullWeights):
        return weights, weights.meta()
    pairs = in_order(weights)
    return pairs, [meta_of(name, tensor) for name, tensor in pairs]


def checked(weights: Weights, metas: Sequence[Meta]) -> Any:
    """`weights`, compared with what was announced: a difference would shift every later tensor."""
    announced = iter(metas)
    for name, tensor in weights:
        found = meta_of(name, tensor)
        wanted = next(announced, None)
        if found != wanted:
            raise ValueError(f"tensor {found} came where {wanted} was announced")
        yield name, tensor
    left = next(announced, None)
    if left is not None:
        raise ValueError(f"{left[0]} was announced and did not come")


def _watcher(
    calls: Sequence[Future[Faults]], servers: Sequence[Server], phase: str, timeout_s: float
) -> Watch:
    """Raises when a server's call has failed or the deadline is over."""
    until = time.monotonic() + timeout_s

    def watch() -> None:
        for call in calls:
            if call.done() and any(call.result()):
                raise first_of(call.result())
        if time.monotonic() > until:
            raise EngineError(
                f"the workers did not take part within {timeout_s:g} s; check that they reach the "
                f"trainer's address and that no firewall closes its ports",
                phase=phase,
                url=servers[0].url,
            )

    return watch


def _spoilt(server: Server, faults: Faults) -> EngineError:
    first = first_of(faults)
    return EngineError(str(first), phase="broadcast", url=server.url, status=first.status)
