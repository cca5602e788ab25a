"""Weights by broadcast and by CUDA IPC, and servers that sleep beside the trainer."""

from __future__ import annotations

import base64
import ctypes
import pickle
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastturn.carriers import (
    Colocation,
    FullWeights,
    IpcCarrier,
    NcclCarrier,
    PublishFailed,
)
from fastturn.carriers.nccl import own_address
from fastturn.carriers.nccl_group import pickled_id
from fastturn.carriers.packing import Chunk, unpack
from fastturn.sampler.server import EngineError, Server

from .test_carriers import TAG, received_sizes, weights

# Broadcast ----------------------------------------------------------------------------------------


class GlooGroup:
    """Rank 0 of a gloo group that meets at the same store."""

    def __init__(self, store: Any, world: int, watch: Any) -> None:
        store.set("broadcast_from/0/0", pickled_id(bytes(range(128))))
        self.group = gloo(store, 0, world)

    def broadcast(self, bytes_N: torch.Tensor) -> Any:
        work = self.group.broadcast(bytes_N, 0)
        return type("Ticket", (), {"query": lambda self: work.is_completed()})()

    def abort(self) -> None:
        """The group ends with its last reference."""


def gloo(store: Any, rank: int, world: int) -> Any:
    ten = timedelta(seconds=10)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, ten)


class Workers:
    """The workers of one stand-in: they join, receive by the receiver's rule, keep what came."""

    def __init__(self) -> None:
        self.init: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.got: dict[str, torch.Tensor] = {}
        self.id = b""

    def answers(self) -> dict[str, Any]:
        return {"/init_weight_transfer_engine": self.join, "/update_weights": self.receive}

    def join(self, it: Any, body: dict[str, Any]) -> Any:
        self.init = info = body["init_info"]
        place = (info["master_address"], info["master_port"], info["world_size"])
        ten = timedelta(seconds=10)
        self.store = dist.TCPStore(*place, False, ten, use_libuv=False)
        self.id = self.store.get("broadcast_from/0/0")
        self.group = gloo(self.store, info["rank_offset"], info["world_size"])
        return 200, {"message": "Weight transfer initialized"}

    def receive(self, it: Any, body: dict[str, Any]) -> Any:
        assert it.paused
        info = body["update_info"]
        self.updates.append(info)
        limit = {**self.init, **info}["packed_buffer_size_bytes"]
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        metas = list(zip(info["names"], dtypes, map(tuple, info["shapes"]), strict=True))
        stream = torch.empty(0, dtype=torch.uint8)
        for size in received_sizes(metas, limit):
            part = torch.empty(size, dtype=torch.uint8)
            self.group.broadcast(part, 0).wait()
            stream = torch.cat([stream, part])
        self.got = dict(unpack(Chunk(tuple(metas), stream)))
        return 200, {"message": "Weights updated"}


def test_workers_are_told_an_address_that_they_can_reach(monkeypatch):
    class Probe(socket.socket):
        """A machine with a private network: nothing else is reached through it."""

        def connect(self, place):
            self.place = place[0]
            if self.place == "nowhere":
                raise OSError("no route")

        def getsockname(self):
            return ("127.0.0.1" if self.place == "127.0.0.1" else "10.0.0.4", 1)

    monkeypatch.setattr(socket, "socket", Probe)
    assert own_address(["http://127.0.0.1:8000"]) == "127.0.0.1"
    assert own_address(["http://127.0.0.1:8000", "http://10.0.0.9:8001"]) == "10.0.0.4"
    with pytest.raises(EngineError, match="no way to nowhere: no route; nothing was published"):
        own_address(["http://nowhere:8000"])


ROUND = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]


@pytest.mark.parametrize("release", ["0.22.0", "0.28.0", "0.32.0"])
def test_a_broadcast_reaches_all_servers(release, fake):
    workers = [Workers(), Workers()]
    its = [fake(release, answers=w.answers()) for w in workers]
    carrier = NcclCarrier(buffer_bytes=60, timeout_s=10, open_group=GlooGroup)
    for version in (1, 2):
        carrier.send(weights(version).items(), version, [Server(it.url) for it in its])
        for of in workers:
            sent = weights(version)
            assert of.got.keys() == sent.keys()
            assert all(torch.equal(of.got[name], sent[name]) for name in sent)
    assert [of.init["rank_offset"] for of in workers] == [1, 2]
    assert {of.init["world_size"] for of in workers} == {3}
    assert {of.init["master_address"] for of in workers} == {"127.0.0.1"}
    assert workers[0].id == pickled_id(bytes(range(128)))
    # Packing was agreed upon in every update once, and is at the beginning since 0.28.
    assert ("packed" in workers[0].init) == (release != "0.22.0")
    assert ("packed" in workers[0].updates[0]) == (release == "0.22.0")
    tag = [TAG] if release != "0.22.0" else []
    joined = "/init_weight_transfer_engine"
    assert its[0].paths == [joined, *[*ROUND, *tag, "/resume"] * 2]
    carrier.close()


def test_a_worker_that_fails_ends_the_broadcast_within_the_deadline(fake):
    of = Workers()
    refuse = {"/update_weights": lambda f, b: (500, {"detail": "shape mismatch"})}
    it = fake("0.32.0", answers=of.answers() | refuse)
    carrier = NcclCarrier(buffer_bytes=60, timeout_s=5, open_group=GlooGroup)
    with pytest.raises(PublishFailed, match="shape mismatch") as caught:
        carrier.send(weights().items(), 1, [Server(it.url)])
    assert it.paused and caught.value.unusable == (it.url,) and "/resume" not in it.paths
    assert carrier._group is None  # the next publish meets anew


def test_a_server_that_does_not_join_is_an_error_before_any_pause(fake):
    broken = {"/init_weight_transfer_engine": lambda f, b: (500, {"detail": "not configured"})}
    it = fake("0.32.0", answers=broken)
    with pytest.raises(EngineError, match=r"init transfer at .*not configured"):
        NcclCarrier(timeout_s=5, open_group=GlooGroup).send(weights().items(), 1, [Server(it.url)])
    assert "/pause" not in it.paths


def test_workers_that_never_come_end_at_the_deadline(fake):
    def stall(it: Any, body: Any) -> Any:
        time.sleep(1)
        return 200, {}

    it = fake("0.32.0", answers={"/init_weight_transfer_engine": stall})
    with pytest.raises(EngineError, match=r"did not take part within|no whole answer within"):
        NcclCarrier(timeout_s=0.5, open_group=GlooGroup).send(
            weights().items(), 1, [Server(it.url)]
        )


def test_tensors_other_than_announced_stop_the_broadcast(fake):
    class Lying(FullWeights):
        def meta(self) -> Any:
            return [(name, dtype, shape[::-1]) for name, dtype, shape in super().meta()]

    of = Workers()
    it = fake("0.32.0", answers=of.answers())
    with pytest.raises(PublishFailed, match=r"was announced.*unusable"):
        NcclCarrier(timeout_s=5, open_group=GlooGroup).send(
            Lying(nn.Linear(2, 3)), 1, [Server(it.url)]
        )
    assert it.paused


class Library:
    """An NCCL library whose calls answer with a status, 0 but for `failing`."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            return b"unhandled system error" if "Error" in name else int(name == self.failing)

        setattr(self, name, call)
        return call


@pytest.fixture
def without_gpu(monkeypatch):
    for name in ("Stream", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: 0)


@pytest.mark.parametrize(
    ("library", "cause"),
    [
        (OSError("libnccl.so.2: no such file"), r"no NCCL library \(libnccl.*CUDA build of torch"),
        (Library("ncclGetUniqueId"), "ncclGetUniqueId: unhandled system error"),
        (Library("ncclCommInitRank"), "ncclCommInitRank: unhandled system error"),
    ],
)
def test_nccl_that_does_not_start_is_named_before_any_pause(
    library, cause, fake, monkeypatch, without_gpu
):
    def opened(name: str) -> Any:
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", opened)
    it = fake("0.32.0", answers=Workers().answers())
    with pytest.raises(EngineError, match=rf"connect at .*{cause}; nothing was published"):
        NcclCarrier(timeout_s=5).send(weights().items(), 1, [Server(it.url)])
    assert "/pause" not in it.paths


def test_a_broadcast_that_breaks_leaves_no_server_usable_and_meets_anew(fake):
    class Breaks(GlooGroup):
        def broadcast(self, bytes_N: torch.Tensor) -> Any:
            raise RuntimeError("ncclBroadcast: unhandled cuda error")

        def abort(self) -> None:
            raise RuntimeError("ncclCommAbort: unhandled cuda error")

    it = fake("0.32.0", answers=Workers().answers())
    carrier = NcclCarrier(timeout_s=5, open_group=Breaks)
    message = r"trainer failed while it was sending \(RuntimeError: ncclBroadcast.*unusable"
    with pytest.raises(PublishFailed, match=message) as caught:
        carrier.send(weights().items(), 1, [Server(it.url)])
    assert it.paused and caught.value.unusable == (it.url,) and carrier._group is None


def test_other_ranks_gather_and_send_nothing():
    model = nn.Linear(2, 3)
    NcclCarrier(sender=False).send(FullWeights(model), 1, [Server("http://127.0.0.1:9")])
    assert FullWeights(model).meta() == [
        ("weight", torch.float32, (3, 2)),
        ("bias", torch.float32, (3,)),
    ]


def test_an_id_of_another_length_is_refused():
    with pytest.raises(ValueError, match="128 bytes, got 3"):
        pickled_id(b"abc")


# CUDA IPC and sleeping ----------------------------------------------------------------------------


class Mapped:
    """A worker that maps the trainer's buffer: here simply the same tensor."""

    def __init__(self) -> None:
        self.buffer_N = torch.empty(0)
        self.got: dict[str, torch.Tensor] = {}
        self.infos: list[dict[str, Any]] = []

    def export(self, buffer_N: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
        self.buffer_N = buffer_N
        return "GPU-1", ("handle", 1)

    def read(self, it: Any, body: dict[str, Any]) -> Any:
        info = body["update_info"]
        self.infos.append(info)
        assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == {
            "GPU-1": ("handle", 1)
        }
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        metas = tuple(zip(info["names"], dtypes, map(tuple, info["shapes"]), strict=True))
        content = self.buffer_N[: sum(info["tensor_sizes"])].clone()
        self.got.update(unpack(Chunk(metas, content)))
        return 200, {}


@pytest.mark.parametrize("release", ["0.22.0", "0.32.0"])
def test_ipc_sends_whole_chunks_of_one_buffer(release, fake):
    of = Mapped()
    it = fake(release, answers={"/update_weights": of.read})
    IpcCarrier(buffer_bytes=100, export=of.export).send(weights().items(), 1, [Server(it.url)])
    sent = weights()
    assert of.got.keys() == sent.keys() and len(of.infos) > 1
    assert all(torch.equal(of.got[name], sent[name]) for name in sent)
    assert ("packed" in of.infos[0]) == (release == "0.22.0")
    start = it.calls[0][2]["init_info"]
    assert start == ({} if release == "0.22.0" else {"packed": True})
    assert not it.paused


def test_a_sleeping_server_wakes_in_order(fake):
    of, freed = Mapped(), []
    it = fake("0.32.0", answers={"/update_weights": of.read})
    servers = [Server(it.url)]
    carrier = IpcCarrier(2, export=of.export, free=lambda: freed.append(list(it.paths)))
    carrier.rest(servers)
    carrier.send(weights().items(), 3, servers)
    woken = [query["tags"] for path, query, _ in it.calls if path == "/wake_up"]
    assert woken == ["weights", "kv_cache"] and it.calls[0][1] == {"level": "2", "mode": "wait"}
    order = [path for path in it.paths if path != "/init_weight_transfer_engine"]
    assert order == ["/sleep", "/wake_up", *ROUND[1:], TAG, "/wake_up"]
    assert freed[0][-1] == TAG  # after the publish, before the KV cache
    assert carrier.colocation is not None and carrier.colocation.phase == "awake"


def test_steps_out_of_order_are_refused(fake):
    servers = [Server(fake("0.32.0").url)]
    place = Colocation(2, free=lambda: None)
    for step in (place.wake_weights, place.published, place.free, place.wake_kv):
        with pytest.raises(EngineError, match="'awake', expected"):
            step(servers)
    place.sleep(servers)
    for step in (place.require_awake, place.sleep, place.wake_kv, place.free):
        with pytest.raises(EngineError, match="'asleep', expected"):
            step(servers)
    place.wake_weights(servers)
    with pytest.raises(EngineError, match="level 2 dropped the weights"):
        place.free(servers)
    place.published(servers)
    with pytest.raises(EngineError, match="'published', expected 'freed'"):
        place.wake_kv(servers)
    place.free(servers)
    place.wake_kv(servers)
    place.require_awake(servers)


@pytest.mark.parametrize("level", [0, 2])
def test_a_buffer_that_cannot_be_shared_is_named(level, fake):
    def export(buffer_N: torch.Tensor) -> Any:
        raise RuntimeError("CUDA error: invalid device context")

    it = fake("0.32.0")
    carrier, servers = IpcCarrier(level, export=export, free=lambda: None), [Server(it.url)]
    carrier.rest(servers)
    message = r"trainer failed while it was sending \(RuntimeError: CUDA error.*unusable"
    with pytest.raises(PublishFailed, match=message) as caught:
        carrier.send(weights().items(), 1, servers)
    assert caught.value.unusable == (it.url,) and "/resume" not in it.paths
    woken = [query["tags"] for path, query, _ in it.calls if path == "/wake_up"]
    assert woken == ["weights"] * (level == 2)


def test_level_1_wakes_without_a_publish(fake):
    it = fake("0.32.0")
    place = Colocation(1, free=lambda: None)
    place.sleep([Server(it.url)])
    place.wake([Server(it.url)])
    assert place.phase == "awake" and it.paths == ["/sleep", "/wake_up", "/wake_up"]


def test_a_failed_publish_does_not_wake_the_server(fake):
    it = fake("0.32.0", answers={"/update_weights": lambda f, b: (500, {"detail": "no UUID"})})
    carrier = IpcCarrier(2, export=lambda b: ("GPU-1", ()), free=lambda: None)
    servers = [Server(it.url)]
    carrier.rest(servers)
    with pytest.raises(PublishFailed, match=r"no UUID.*unusable"):
        carrier.send(weights().items(), 1, servers)
    assert carrier.colocation is not None and carrier.colocation.phase == "weights"
    with pytest.raises(EngineError, match="'weights', expected 'awake'"):
        carrier.colocation.require_awake(servers)
