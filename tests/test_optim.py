"""Muon against torch's own, what orthogonal means, moments of 8 bits, schedules that go on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from fastturn import checkpoint
from fastturn.config import Config, ConfigError, Optim, override
from fastturn.dist import World, open_world
from fastturn.eight_bit import SIGNED
from fastturn.optim import (
    Muon,
    Optimizers,
    adamw_of,
    orthogonal,
    split_parameters,
    training_optimizer,
)
from fastturn.preflight import preflight
from fastturn.shape import read_shape
from fastturn.sharding import whole


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonal_keeps_directions_and_evens_lengths(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonal(matrix) @ right.T
    assert lengths.max() / lengths.min() > 1.5
    assert turned.diagonal().min() > 0.65 and turned.diagonal().max() < 1.25
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-9
    assert not orthogonal(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_muon_moves_as_the_one_of_torch(shape):
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    pairs = (
        (ours, Muon([ours], lr=0.02)),
        (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)),
    )
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in pairs:
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - 1).abs().max()
    # torch rounds to bfloat16 in between.
    assert moved > 0.02 and (ours - theirs).abs().max() < 0.02 * moved


@pytest.mark.parametrize("shape", [(3, 24, 8), (3, 8, 24)])
def test_every_expert_of_a_layer_moves_as_a_matrix_of_its_own(shape):
    torch.manual_seed(0)
    stacked = nn.Parameter(torch.randn(shape))
    alone = [nn.Parameter(matrix.clone()) for matrix in stacked.detach()]
    pairs = Muon([stacked], 0.02, 0.1), Muon(alone, 0.02, 0.1)
    for _ in range(3):
        stacked.grad = torch.randn(shape) * torch.tensor([1.0, 0.0, 1e-3]).view(-1, 1, 1)
        for matrix, gradient in zip(alone, stacked.grad, strict=True):
            matrix.grad = gradient.clone()
        for optimizer in pairs:
            optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([m.detach() for m in alone]))


def test_what_is_a_matrix_of_the_blocks():
    values = {
        **{"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model("qwen3_moe", **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices, rest = split_parameters(model)
    shape = read_shape(config.to_dict())
    assert sum(p.numel() for p in matrices) == shape.matrices
    assert sum(p.numel() for p in rest) == shape.parameters - shape.matrices
    # Embeddings and head, norms of layers and heads, the last norm.
    assert len(rest) == 2 + 2 * 4 + 1 and {m.ndim for m in matrices} == {2, 3}


def test_rates_go_on_where_they_were():
    def made():
        return training_optimizer(nn.Linear(4, 4), Optim(lr=1e-2, warmup_steps=8))

    walked, resumed = made(), made()
    for _ in range(5):
        walked.step()
    resumed.resume_at(walked.step_count)
    for _ in range(3):
        assert walked.lr == resumed.lr > 0
        rates = [[g["lr"] for g in o.members[0].param_groups] for o in (walked, resumed)]
        assert rates[0] == rates[1]
        walked.step()
        resumed.step()


def eight_bit_model(world: World) -> tuple[nn.Module, Optimizers]:
    """Split weights, as all of `model.dtype=mixed8` are, and three steps behind them."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    fully_shard(model, mesh=world.mesh)
    optimizers = training_optimizer(model, Optim(lr=1e-2, warmup_steps=4), adamw_of("mixed8"))
    train(model, optimizers)
    return model, optimizers


def train(model: nn.Module, optimizers: Optimizers) -> None:
    for seed in range(3):
        optimizers.zero_grad()
        given = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        (model(given) - given).square().mean().backward()
        optimizers.step()


def eight_bit(stance: str, folder: Path) -> None:
    """Moments are of 8 bits, steps are close to torch's, and a checkpoint goes on where it was."""
    with open_world("cpu", mesh=True) as world, torch.compiler.set_stance(stance):
        torch.manual_seed(0)
        model, optimizers = eight_bit_model(world)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        start = plain[0].weight.detach().clone()
        train(plain, training_optimizer(plain, Optim(lr=1e-2, warmup_steps=4)))
        moved = (plain[0].weight - start).abs().mean()
        off = (whole(model[0].weight) - plain[0].weight).abs().mean()
        assert 0 < off < 0.05 * moved
        state = optimizers.members[0].state[model[0].weight]
        assert {state[name].to_local().codes.dtype for name in SIGNED} == {torch.uint8}
        assert not hasattr(
            optimizers.members[0].state[model[0].bias]["exp_avg"].to_local(), "codes"
        )

        checkpoint.save(folder / "1", model, optimizers, {})
        other, others = eight_bit_model(world)
        checkpoint.load_weights(folder / "1", other, others)
        read = others.members[0].state[other[0].weight]
        for name in SIGNED:
            mine, its = (s[name].to_local() for s in (state, read))
            assert torch.equal(mine.codes, its.codes)
            torch.testing.assert_close(mine.dequantize(), its.dequantize(), rtol=1e-6, atol=0)
        assert others.lr == optimizers.lr > 0
        train(model, optimizers)
        train(other, others)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), whole(its), rtol=1e-4, atol=1e-6)


def test_moments_of_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the package torchao is not installed")
    eight_bit("force_eager", tmp_path)


@pytest.mark.slow
def test_moments_of_eight_bits_in_compiled_steps(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the package torchao is not installed")
    eight_bit("default", tmp_path)


def test_moments_of_eight_bits_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = override(Config(), ["model.dtype=mixed8", "trackers="])
    with pytest.raises(
        ConfigError, match=r'mixed8.*pip install "fastturn\[torchao\]".*dtype=mixed'
    ):
        preflight(config)
