"""One GPU for trainer and server: weights by CUDA IPC, the server asleep while the trainer trains.

    awake --sleep--> asleep --wake weights--> weights --publish--> published
      ^                                          |                    |
      +---wake KV--- freed <---free caches-------+--------------------+

The order keeps the peak of memory down: the trainer's caches go before the server's key-value cache
comes. At level 2 the server's weights were dropped, so they must be published before it samples
again; at level 1 they come back from host memory. A step out of order is an `EngineError`.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from fastturn.carriers.base import Faults, Weights, each, exchange, first_of, moved, settle
from fastturn.carriers.nccl import PACKED_IN_INIT_SINCE
from fastturn.carriers.packing import describe, in_order, meta_of, pack_into, size_bytes
from fastturn.sampler.server import EngineError, Server

Phase = Literal["awake", "asleep", "weights", "published", "freed"]
Export = Callable[[torch.Tensor], tuple[str, tuple[Any, ...]]]


def cuda_export(buffer_N: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
    """(UUID of the GPU, what rebuilds the buffer in another process)."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer_N)
    return str(torch.cuda.get_device_properties(buffer_N.device).uuid), arguments


def cuda_free() -> None:
    """Give the trainer's cached blocks back, so that the server can have them."""
    torch.cuda.empty_cache()


class Colocation:
    """Where the servers on this GPU are between sampling and training; forbids steps out of order.

    `level`: 1 keeps the weights in host memory, 2 drops them.
    """

    phase: Phase

    def __init__(self, level: Literal[1, 2], free: Callable[[], None] = cuda_free) -> None:
        self.level, self.phase, self._free = level, "awake", free
        self._published = False

    def _require(self, servers: Sequence[Server], what: str, *phases: Phase) -> None:
        if self.phase not in phases:
            raise EngineError(
                f"the server is {self.phase!r}, expected {' or '.join(map(repr, phases))}; the "
                f"order is sleep, wake weights, publish, free caches, wake the KV cache",
                phase=what,
                url=servers[0].url,
            )

    def require_awake(self, servers: Sequence[Server]) -> None:
        """`EngineError` when sampling now would read weights or caches that are not there."""
        self._require(servers, "sample", "awake")

    def sleep(self, servers: Sequence[Server]) -> None:
        self._require(servers, "sleep", "awake")
        _all(servers, lambda server: server.sleep(self.level))
        self.phase, self._published = "asleep", False

    def wake_weights(self, servers: Sequence[Server]) -> None:
        self._require(servers, "wake weights", "asleep")
        _all(servers, lambda server: server.wake("weights"))
        self.phase = "weights"

    def published(self, servers: Sequence[Server]) -> None:
        """New weights are in place."""
        self._require(servers, "publish", "weights")
        self.phase, self._published = "published", True

    def free(self, servers: Sequence[Server]) -> None:
        self._require(servers, "free caches", "weights", "published")
        if self.level == 2 and not self._published:
            raise EngineError(
                "sleep level 2 dropped the weights and none were published since; publish first",
                phase="free caches",
                url=servers[0].url,
            )
        self._free()
        self.phase = "freed"

    def wake_kv(self, servers: Sequence[Server]) -> None:
        self._require(servers, "wake the KV cache", "freed")
        _all(servers, lambda server: server.wake("kv_cache"))
        self.phase = "awake"

    def wake(self, servers: Sequence[Server]) -> None:
        """Back to sampling with the old weights, after a stage that changed none (level 1)."""
        self.wake_weights(servers)
        self.free(servers)
        self.wake_kv(servers)


class IpcCarrier:
    """Weights through one CUDA buffer that the server maps. One trainer process, its GPU the
    server's.

    The servers were started with `--weight-transfer-config '{"backend": "ipc"}'` and
    VLLM_ALLOW_INSECURE_SERIALIZATION=1, because the handle travels as a pickle. `sleep_level` 0
    never sleeps; else call `rest` before training, and `send` wakes the servers in order.
    """

    name = "ipc"

    def __init__(
        self,
        sleep_level: Literal[0, 1, 2] = 0,
        buffer_bytes: int = 256 << 20,
        timeout_s: float = 600.0,
        export: Export = cuda_export,
        free: Callable[[], None] = cuda_free,
    ) -> None:
        self.colocation = Colocation(sleep_level, free) if sleep_level else None
        self.buffer_bytes, self.timeout_s = buffer_bytes, timeout_s
        self._export = export
        self._initialised: tuple[str, ...] = ()

    def rest(self, servers: Sequence[Server]) -> None:
        """Put the servers to sleep before a training step."""
        if self.colocation is not None:
            self.colocation.sleep(servers)

    def send(self, weights: Weights, version: int, servers: Sequence[Server]) -> None:
        pairs = in_order(weights)
        asleep = self.colocation is not None and self.colocation.phase != "awake"
        if asleep:
            self._send_asleep(pairs, version, servers)
        else:
            self._initialise(servers)
            exchange(servers, version, lambda paused: self._move(paused, pairs), self.timeout_s)

    def close(self) -> None:
        """Nothing is kept: the buffer lives as long as a publish."""

    def _send_asleep(
        self, pairs: list[tuple[str, torch.Tensor]], version: int, servers: Sequence[Server]
    ) -> None:
        colocation = self.colocation
        assert colocation is not None
        colocation.wake_weights(servers)
        self._initialise(servers)
        faults = moved(servers, version, lambda awake: self._move(awake, pairs))
        settle(servers, version, faults, lambda server: None)
        colocation.published(servers)
        pairs.clear()  # whole copies of sharded weights, if they were
        colocation.free(servers)
        colocation.wake_kv(servers)

    def _initialise(self, servers: Sequence[Server]) -> None:
        urls = tuple(server.url for server in servers)
        if urls != self._initialised:
            _all(servers, self._open)
            self._initialised = urls

    def _open(self, server: Server) -> None:
        packed = server.release >= PACKED_IN_INIT_SINCE
        server.init_transfer({"packed": True} if packed else {}, self.timeout_s)

    def _move(self, servers: Sequence[Server], pairs: Sequence[tuple[str, torch.Tensor]]) -> Faults:
        faults = each(servers, Server.start_update)
        if not any(faults):
            faults = self._move_chunks(servers, pairs)
        if not any(faults):
            faults = each(servers, lambda server: server.finish_update(self.timeout_s))
        if any(faults):  # one buffer for all: what one did not read, none has whole
            self._initialised = ()
            first = first_of(faults)
            return [
                fault or EngineError(str(first), phase=first.phase, url=server.url)
                for server, fault in zip(servers, faults, strict=True)
            ]
        return faults

    def _move_chunks(
        self, servers: Sequence[Server], pairs: Sequence[tuple[str, torch.Tensor]]
    ) -> Faults:
        sizes = [size_bytes(meta_of(name, tensor)) for name, tensor in pairs]
        device = pairs[0][1].device
        room = max(max(sizes), min(self.buffer_bytes, sum(sizes)))
        buffer_N = torch.empty(room, dtype=torch.uint8, device=device)
        uuid, arguments = self._export(buffer_N)
        handle = base64.b64encode(pickle.dumps({uuid: arguments})).decode()
        for chunk in pack_into(pairs, buffer_N):
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the reader is another process
            info = {**describe(chunk.metas), "tensor_sizes": chunk.sizes}
            info["ipc_handles_pickled"] = handle

            def read(server: Server, info: dict[str, Any] = info) -> None:
                older = server.release < PACKED_IN_INIT_SINCE
                server.update_weights({**info, "packed": True} if older else info, self.timeout_s)

            faults = each(servers, read)
            if any(faults):
                return faults
        return [None] * len(servers)


def _all(servers: Sequence[Server], act: Callable[[Server], object]) -> None:
    """Do the same everywhere; the first `EngineError` when any server fails."""
    faults = each(servers, act)
    if any(faults):
        raise first_of(faults)
