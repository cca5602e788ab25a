"""Layers computed with other kernels are the same layers; attention stays ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from fastturn import activations, body, lora, models
from fastturn.config import Config, ConfigError, override
from fastturn.dist import World, open_world
from fastturn.loss import Objective
from fastturn.policy import Policy
from fastturn.preflight import check_kernels
from fastturn.sharding import shard, whole

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves it out
from test_memory import groups
from test_policy import V, tiny

from fastturn.pack import PackedBatch, pack

WAYS = ("whole", "full", "selective", "adapters")
LENGTHS = (2, 5, 3, 9, 7, 11, 4, 6)  # groups of a batch
MOST_GRAPHS = 20  # a graph for every part and length would be 5 x 8 at least


def batch(count: int, device: str = "cpu") -> PackedBatch:
    return pack(groups(224 * count, V), 10_000, torch.device(device))[0]


def policy(family: str, kernels: str, way: str = "whole", world: World | None = None) -> Policy:
    model = tiny(family, torch.float32)
    if way == "adapters":
        lora.adapt(model, models.blocks(model), override(Config(), ["model.lora_rank=4"]))
    made = Policy(model).train()
    body.prepare(made.model, kernels)
    activations.keep(made.model, way if way in ("full", "selective") else "none")
    return shard(made, world or World.single())


def results(policy: Policy, batch: PackedBatch) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    loss = policy(batch, Objective()).loss
    loss.backward()
    parameters = policy.named_parameters()
    gradients = {n: whole(p.grad).clone() for n, p in parameters if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the largest number of the same tensor."""
    assert found.keys() == wanted.keys() and len(wanted) > 1
    return max(
        float((found[n] - it).abs().max() / it.abs().max().clamp(min=1e-12))
        for n, it in wanted.items()
    )


def compared(family: str, way: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = policy(family, "plain", way), policy(family, "compile", way)
    for count in LENGTHS:
        one = batch(count)
        assert furthest(results(compiled, one), results(plain, one)) < 1e-5
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS


@pytest.mark.parametrize(
    "way",
    [
        "full",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("whole", "selective", "adapters")),
    ],
)
def test_compiled_parts_compute_the_same_at_any_length(way: str, monkeypatch) -> None:
    """The graphs as torch traces and differentiates them, without the code that inductor makes."""
    monkeypatch.setitem(body.COMPILE, "backend", "aot_eager")
    compared("qwen3", way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_compiled_code_computes_the_same_at_any_length(family: str, way: str) -> None:
    compared(family, way)


RANK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_body
test_body.one_rank()
"""


def one_rank() -> None:
    """Half of the groups on each of two ranks, compiled, against all of them in one process."""
    body.COMPILE["backend"] = "aot_eager"
    credits = groups(224 * 4, V)
    with open_world("cpu") as world:
        for way in WAYS:
            split = policy("qwen3", "compile", way, world)
            found = results(split, pack(credits[world.rank :: 2], 10_000)[0])
            found["loss"] = torch.tensor(world.sum({"loss": float(found["loss"])})["loss"])
            wanted = results(policy("qwen3", "plain", way), pack(credits, 10_000)[0])
            assert furthest(found, wanted) < 1e-5, way


@pytest.mark.slow
def test_compiled_parts_of_split_weights() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(Path(__file__).parent)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=280)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)


def test_liger_needs_its_package_and_cuda(monkeypatch) -> None:
    config = override(Config(), ["model.kernels=liger", "device=cpu"])
    pytest.importorskip("liger_kernel")
    with pytest.raises(ConfigError, match=r"run on CUDA.*set model\.kernels=compile"):
        check_kernels(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install \"fastturn\[liger\]\""):
        check_kernels(config)
    check_kernels(override(Config(), ["model.kernels=compile"]))


LIGER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_body
test_body.as_liger(sys.argv[2])
"""


def as_liger(device: str) -> None:
    """In a process of its own, because Liger changes modules of transformers for good."""
    one = batch(2, device)
    for family in ("qwen3", "llama"):
        wanted = results(policy(family, "plain").to(device), one)
        made = policy(family, "liger").to(device)
        forwards = {
            type(module).__name__: module.forward.__qualname__
            for module in made.model.modules()
            if type(module).__name__.endswith(("RMSNorm", "MLP", "Attention"))
        }
        kind = family.capitalize()
        assert forwards == {
            f"{kind}RMSNorm": "LigerRMSNorm.forward",
            f"{kind}MLP": "LigerSwiGLUMLP.forward",
            f"{kind}Attention": f"{kind}Attention.forward",
        }
        rotary = sys.modules[type(made.model).__module__].apply_rotary_pos_emb
        assert rotary.__name__ == "liger_rotary_pos_emb"
        assert made.model.config._attn_implementation == models.ATTENTION
        if device == "cuda":
            assert furthest(results(made, one), wanted) < 1e-4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_liger_has_norms_rotary_embedding_and_mlp_and_nothing_else(device: str) -> None:
    """Which layers are Liger's; on a GPU also that they compute the same."""
    pytest.importorskip("liger_kernel")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("Liger's kernels need CUDA: what they compute is not compared here")
    done = subprocess.run(
        [sys.executable, "-c", LIGER, str(Path(__file__).parent), device],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_model_that_liger_does_not_know_is_named() -> None:
    pytest.importorskip("liger_kernel")
    model = tiny("cohere-scale", torch.float32)
    with pytest.raises(ConfigError, match=r"no kernels for 'cohere'.*qwen3"):
        body.prepare(model, "liger")
