"""Carriers against stand-ins: the order of calls, what each failure leaves behind, what travels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastturn.carriers import (
    CARRIERS,
    FileCarrier,
    LoraCarrier,
    PublishFailed,
)
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
