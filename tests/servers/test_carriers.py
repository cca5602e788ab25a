"""Carriers against stand-ins: the order of calls, what each failure leaves behind, what travels."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fastturn.carriers import (
    CARRIERS,
    Colocation,
    FileCarrier,
    FullWeights,
    IpcCarrier,
    LoraCarrier,
    NcclCarrier,
    PublishFailed,
)
from fastturn.carriers.nccl import own_address
from fastturn.carriers.nccl_group import pickled_id
from fastturn.carriers.packing import Chunk, in_order, pack, pack_into, unpack
from fastturn.sampler.server import EngineError, Server

RPC, TAG = "/collective_rpc", "/update_weight_version"
PUBLISH = ["/pause", RPC, TAG, "/resume"]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found = {"a": draw(3, 5), "b": draw(7).bfloat16(), "c": draw(2, 2, 2), "d": draw(0, 4)}
    return found | {"e": draw(11).half(), "f": draw(1), "g": draw(64)}


def answering(**answer: Any) -> Any:
    return lambda fake, body: (200, {"results": [answer]})


def test_the_registry_makes_every_carrier():
    made = {name: make({"r": 8}) if name == "lora" else make() for name, make in CARRIERS.items()}
    assert {name: carrier.name for name, carrier in made.items()} == {n: n for n in CARRIERS}


# Files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.22.0", "0.28.0", "0.32.0"])
def test_a_file_is_published_between_pause_and_resume(release, fake, tmp_path):
    seen: dict[str, torch.Tensor] = {}

    def load(it: Any, body: dict[str, Any]) -> Any:
        assert it.paused
        seen.update(load_file(body["args"][0]))
        return 200, {"results": [{"ok": True, "tensors": 2}]}

    it = fake(release, answers={RPC: load})
    sent = weights()
    FileCarrier(tmp_path).send(sent.items(), 4, [Server(it.url)])
    assert it.paths == [path for path in PUBLISH if path in it.routes()]
    assert seen.keys() == sent.keys()
    assert all(torch.equal(seen[name], sent[name]) for name in sent)
    assert not list(tmp_path.iterdir()) and not it.paused
    assert it.version == ("default" if release == "0.22.0" else "4")


def test_tied_tensors_are_written_once_each(fake, tmp_path):
    it = fake("0.32.0")
    one = torch.ones(4)
    FileCarrier(tmp_path).send([("embed", one), ("head", one)], 1, [Server(it.url)])
    assert it.paths == PUBLISH


def test_a_refused_server_serves_on(fake, tmp_path):
    refusal = answering(ok=False, changed=False, error="ValueError: a has shape [1], expected [2]")
    it = fake("0.32.0", answers={RPC: refusal})
    with pytest.raises(PublishFailed, match=r"version 2 .*a has shape.*old weights") as caught:
        FileCarrier(tmp_path).send(weights().items(), 2, [Server(it.url)])
    assert it.paths == ["/pause", RPC, "/resume"] and caught.value.unusable == ()
    assert not list(tmp_path.iterdir()) and it.version == "default"


@pytest.mark.parametrize(
    "answer",
    [
        answering(ok=False, changed=True, error="RuntimeError: out of memory"),
        lambda fake, body: (500, {"detail": "EngineCore encountered an issue"}),
        lambda fake, body: (200, {"results": ["None"]}),
        lambda fake, body: (
            200,
            {"results": [{"ok": True}, {"ok": False, "changed": False, "error": "x"}]},
        ),
    ],
    ids=["half-way", "engine died", "no mapping", "one worker of two"],
)
def test_a_broken_server_stays_paused_and_is_named(answer, fake, tmp_path):
    it = fake("0.32.0", answers={RPC: answer})
    with pytest.raises(PublishFailed, match="unusable, left paused, restart") as caught:
        FileCarrier(tmp_path).send(weights().items(), 2, [Server(it.url)])
    assert it.paused and caught.value.unusable == (it.url,)


def test_a_server_without_the_extension_is_refused_by_name(fake, tmp_path):
    detail = "Worker failed with error ''CPUWorker' object has no attribute 'load_file''"
    it = fake("0.32.0", answers={RPC: lambda f, b: (500, {"detail": detail})})
    with pytest.raises(PublishFailed, match="without the worker extension"):
        FileCarrier(tmp_path).send(weights().items(), 2, [Server(it.url)])
    assert not it.paused


def test_of_two_servers_the_good_one_goes_on(fake, tmp_path):
    good, bad = fake("0.32.0"), fake("0.32.0", answers={RPC: lambda f, b: (500, {"detail": "x"})})
    with pytest.raises(PublishFailed) as caught:
        FileCarrier(tmp_path).send(weights().items(), 3, [Server(good.url), Server(bad.url)])
    assert not good.paused and good.version == "3"
    assert bad.paused and caught.value.unusable == (bad.url,)


def test_a_server_that_cannot_pause_changes_nothing_anywhere(fake, tmp_path):
    good, bad = fake("0.32.0"), fake("0.32.0", dev_mode=False)
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        FileCarrier(tmp_path).send(weights().items(), 3, [Server(good.url), Server(bad.url)])
    assert good.paths == ["/pause", "/resume"] and not good.paused and RPC not in bad.paths


def test_what_cannot_be_written_is_an_error_before_any_pause(fake, tmp_path):
    (tmp_path / "file").write_text("")
    it = fake("0.32.0")
    with pytest.raises(EngineError, match=r"write weights at .*nothing was published"):
        FileCarrier(tmp_path / "file" / "x").send(weights().items(), 1, [Server(it.url)])
    assert it.paths == []


def test_every_failure_of_the_move_is_a_named_error(failure, fake, tmp_path):
    behave, _, says = failure
    it = fake("0.32.0", answers={RPC: behave})
    with pytest.raises(PublishFailed, match=says) as caught:
        FileCarrier(tmp_path, timeout_s=0.4).send(weights().items(), 1, [Server(it.url)])
    assert caught.value.phase == "rpc load_file" and caught.value.url == it.url + RPC
    assert not list(tmp_path.iterdir())


# Adapters -----------------------------------------------------------------------------------------

LORA = "/v1/load_lora_adapter"


def test_adapters_are_loaded_in_place_and_only_the_newest_folder_stays(fake, tmp_path):
    loaded: list[Any] = []

    def load(it: Any, body: dict[str, Any]) -> Any:
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        loaded.append((body, config, load_file(folder / "adapter_model.safetensors")))
        return 200, "Success"

    it = fake("0.32.0", extra_routes=(LORA,), answers={LORA: load})
    carrier = LoraCarrier({"r": 8, "lora_alpha": 16}, folder=tmp_path)
    for version in (1, 2):
        carrier.send(weights(version).items(), version, [Server(it.url)])
    body, config, tensors = loaded[1]
    assert body["lora_name"] == "policy" and body["load_inplace"] is True
    assert config == {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16}
    assert torch.equal(tensors["a"], weights(2)["a"])
    assert [folder.name[-2:] for folder in tmp_path.iterdir()] == ["-2"]
    assert it.paths == ["/pause", LORA, TAG, "/resume"] * 2
    carrier.close()
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_is_turned_down_leaves_the_old_one(fake, tmp_path):
    answer = (400, {"error": {"message": "rank 128 is greater than max_lora_rank 64"}})
    it = fake("0.32.0", extra_routes=(LORA,), answers={LORA: lambda f, b: answer})
    with pytest.raises(PublishFailed, match=r"rank 128.*old weights"):
        LoraCarrier({"r": 128}, folder=tmp_path).send(weights().items(), 1, [Server(it.url)])
    assert not it.paused and not list(tmp_path.iterdir())


# Packing ------------------------------------------------------------------------------------------


def received_sizes(metas: list[tuple[str, torch.dtype, tuple[int, ...]]], limit: int) -> list[int]:
    """Bytes of each broadcast by the receiver's own rule: read tensor after tensor, and cut when
    more than `limit` bytes are wanted."""
    cut, wanted, opened = [], 0, False
    for _, dtype, shape in metas:
        wanted += torch.Size(shape).numel() * dtype.itemsize
        opened = True
        if wanted > limit:
            cut.append(wanted)
            wanted, opened = 0, False
    return [*cut, wanted] if opened else cut


@pytest.mark.parametrize("limit", [1, 4, 13, 60, 61, 100, 10**6])
def test_broadcasts_are_cut_where_the_receiver_cuts_them(limit):
    sent = dict(in_order(weights().items()))
    chunks = list(pack(sent.items(), limit))
    metas = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
    assert [len(chunk.bytes_N) for chunk in chunks] == received_sizes(metas, limit)
    back = dict(pair for chunk in chunks for pair in unpack(chunk))
    assert list(back) == list(sent)
    assert all(torch.equal(back[name], sent[name]) for name in sent)


def test_no_contiguous_copy_is_forgotten():
    turned = torch.arange(6.0).view(2, 3).T
    (chunk,) = pack([("w", turned)], 100)
    assert torch.equal(dict(unpack(chunk))["w"], turned)


def test_a_shared_buffer_never_overflows():
    buffer_N = torch.empty(130, dtype=torch.uint8)
    sent = {name: t for name, t in in_order(weights().items()) if name != "g"}
    seen = {}
    for chunk in pack_into(sent.items(), buffer_N):
        assert len(chunk.bytes_N) <= 130
        copy = Chunk(chunk.metas, chunk.bytes_N.clone())  # as the receiver does
        seen.update(unpack(copy))
    assert all(torch.equal(seen[name], sent[name]) for name in sent)
    with pytest.raises(ValueError, match=r"g has 256 bytes, more than the buffer's 130"):
        list(pack_into(weights().items(), buffer_N))


# Broadcast ----------------------------------------------------------------------------------------


class GlooGroup:
    """Rank 0 of a gloo group that meets at the same store."""

    def __init__(self, store: Any, world: int, watch: Any) -> None:
        store.set("broadcast_from/0/0", pickled_id(bytes(range(128))))
        self.group = gloo(store, 0, world)
        self.ended = ""

    def broadcast(self, bytes_N: torch.Tensor) -> Any:
        work = self.group.broadcast(bytes_N, 0)
        return type("Ticket", (), {"query": lambda self: work.is_completed()})()

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


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
