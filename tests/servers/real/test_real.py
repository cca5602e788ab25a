"""A real vLLM server on CPU: what it says of itself, exact publishes, and the failures that return
200. Log-probabilities of the server are compared with a plain forward of the trainer's model."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastturn.carriers import FileCarrier, FullWeights, PublishFailed
from fastturn.carriers.nccl_group import open_store, share_id
from fastturn.publish import PublishError, prove_canary

pytestmark = pytest.mark.vllm

MOST, MEAN = 1e-3, 1e-4  # nats, float32


def errors(live, salt=None) -> tuple[float, float]:
    expected, got = live.probe(salt)
    error = (expected - got).abs()
    return float(error.max()), float(error.mean())


def is_exact(live, salt=None) -> bool:
    most, mean = errors(live, salt)
    return most <= MOST and mean <= MEAN


@pytest.fixture
def carrier(tmp_path) -> FileCarrier:
    return FileCarrier(tmp_path)


@pytest.fixture
def settled(live, carrier):
    """A server that holds the trainer's weights, whatever the test before left there."""
    carrier.send(FullWeights(live.model), 0, [live.server])
    return live


def test_info(live):
    info = live.server.info()
    assert info.version == "0.32.0" and info.model == str(live.folder)
    assert info.max_model_len == 256 and info.dtype == "float32"
    assert info.logprobs_mode == "processed_logprobs" and info.prefix_caching is True
    assert info.generate_route and info.dev_mode and info.carriers == ("file",)
    assert live.server.release == (0, 32, 0) and live.server.world_size() == 1
    assert live.server.healthy()


def test_five_publishes_are_exact(live, carrier):
    """Without a cache key: pausing drops what was cached under the old weights."""
    assert is_exact(live)
    for version in range(1, 6):
        live.change()
        assert errors(live, f"before {version}")[0] > 0.1  # the server still has the old weights
        carrier.send(FullWeights(live.model), version, [live.server])
        assert is_exact(live)
        assert live.server.weight_version() == str(version)
        assert prove_canary(*live.probe(), torch.float32) <= MOST
    assert not list(Path(carrier.folder).iterdir())


def test_the_canary_catches_a_tied_head_that_was_left_stale(settled, carrier, tmp_path):
    """vLLM's own reload answers 200; with a tied head what it serves then is neither model."""
    live = settled
    live.change()
    live.model.save_pretrained(tmp_path / "new")
    live.server.pause()
    live.server.rpc("reload_weights", [None, str(tmp_path / "new")])
    live.server.resume()
    expected, got = live.probe()
    if live.tied:
        with pytest.raises(PublishError, match="a tied head that was not re-packed"):
            prove_canary(expected, got, torch.float32)
    else:
        assert prove_canary(expected, got, torch.float32) <= MOST
    carrier.send(FullWeights(live.model), 7, [live.server])
    assert is_exact(live)


def test_weights_of_another_model_are_refused_before_anything_changes(settled, carrier, tmp_path):
    live = settled
    right = {name: tensor.clone() for name, tensor in FullWeights(live.model)}
    norm = "model.norm.weight"
    wrong = {
        "norm.weight is missing": {name: t for name, t in right.items() if name != norm},
        "extra is not in the served checkpoint": right | {"extra": torch.zeros(2)},
        r"norm.weight has shape \[5\], expected \[\d+\]": right | {norm: torch.zeros(5)},
    }
    for says, tensors in wrong.items():
        noise = {name: tensor + 1 for name, tensor in tensors.items()}
        with pytest.raises(PublishFailed, match=f"{says}.*old weights") as caught:
            carrier.send(noise.items(), 9, [live.server])
        assert caught.value.unusable == ()
    cut = tmp_path / "cut.safetensors"
    save_file({name: tensor + 1 for name, tensor in right.items()}, cut)
    os.truncate(cut, cut.stat().st_size // 2)
    (answer,) = live.server.rpc("load_file", [str(cut)])
    assert answer["ok"] is False and answer["changed"] is False
    assert is_exact(live) and live.server.weight_version() == "0"


def test_a_prefix_cache_of_old_weights_is_stale(settled, tmp_path):
    """What pausing and cache keys are for: the same call without them serves old keys."""
    live = settled
    errors(live)  # the prompts are cached now
    live.change()
    file = tmp_path / "new.safetensors"
    save_file(dict(FullWeights(live.model)) | _tied_copy(live), file)
    (answer,) = live.server.rpc("load_file", [str(file)])
    assert answer["ok"] is True
    assert errors(live)[0] > 0.1  # the same key: old keys and values under new weights
    assert is_exact(live, salt="version 2")
    live.server.reset_prefix_cache()
    assert is_exact(live)


def _tied_copy(live) -> dict[str, torch.Tensor]:
    """Some trainers write the head of a tied model too; it must not matter."""
    return {"lm_head.weight": live.model.lm_head.weight.detach().clone()} if live.tied else {}


def test_cached_prefixes_are_counted(settled):
    live = settled
    live.probe("counted")
    before = live.server.metrics()
    live.probe("counted")
    after = live.server.metrics()
    asked = after["prefix_cache_queries"] - before["prefix_cache_queries"]
    assert asked == sum(map(len, live.prompts))
    # Whole blocks of 32 tokens; the last token is always computed.
    whole = sum((len(prompt) - 1) // 32 * 32 for prompt in live.prompts)
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == whole


def test_workers_of_the_transfer_group_read_the_id(in_engine):
    """The rendezvous against vLLM's own class: store, key and the pickle of an NCCL id."""
    listener = socket.create_server(("127.0.0.1", 0))
    code = (
        "import sys\n"
        "from vllm.distributed.utils import StatelessProcessGroup as G\n"
        "g = G.create('127.0.0.1', int(sys.argv[1]), rank=1, world_size=2)\n"
        "i = g.broadcast_obj(None, src=0)\n"
        "print(type(i).__name__, bytes(i.internal).hex())"
    )
    process = in_engine(code, str(listener.getsockname()[1]))
    until = time.monotonic() + 120

    def watch() -> None:
        assert process.poll() is None and time.monotonic() < until

    store = open_store("127.0.0.1", listener, 2, 120, watch)
    unique = os.urandom(128)
    share_id(store, unique)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["ncclUniqueId", unique.hex()], err
