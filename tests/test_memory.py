"""What is predicted of memory, against real steps and against transformers' own counts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from fastturn import activations, cli, lora, memory, models, plan
from fastturn.config import Config, ConfigError, Model, override
from fastturn.dist import open_world
from fastturn.kernels import rows
from fastturn.learner import Learner
from fastturn.loss import Objective
from fastturn.optim import adamw_of, training_optimizer
from fastturn.pack import PackedBatch, pack
from fastturn.play import Unmetered
from fastturn.policy import Policy
from fastturn.recipes import quickstart
from fastturn.sampler.local import LocalSampler
from fastturn.shape import SMOLLM2_135M, Shape, read_shape, shape_of
from fastturn.sharding import Mirror, shard
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn

MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model_type": "qwen3",
        **{"vocab_size": 334, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        **{"vocab_size": 4000, "hidden_size": 192, "intermediate_size": 576, "head_dim": 64},
        **{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        **{"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 640},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        "tie_word_embeddings": False,
    },
    "experts": {
        "model_type": "qwen3_moe",
        **{"vocab_size": 2000, "hidden_size": 128, "moe_intermediate_size": 96, "head_dim": 32},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    },
    "qwen3, 37 million": {
        "model_type": "qwen3",
        **{"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64},
        **{"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 4},
        "tie_word_embeddings": True,
    },
    "llama, 35 million": {
        "model_type": "llama",
        **{"vocab_size": 16000, "hidden_size": 448, "intermediate_size": 1216},
        **{"num_hidden_layers": 10, "num_attention_heads": 7, "num_key_value_heads": 7},
        "tie_word_embeddings": False,
    },
}
EIGHT_BIT = "mixed, moments of 8 bits"
WAYS = {
    "float32": (),
    "checkpointing": ("model.gradient_checkpointing=full",),
    "selective": ("model.gradient_checkpointing=selective",),
    "adapters": ("model.lora_rank=8",),
    "adapters, checkpointing": ("model.lora_rank=8", "model.gradient_checkpointing=full"),
    "adapters, selective": ("model.lora_rank=8", "model.gradient_checkpointing=selective"),
    "mixed": ("model.dtype=mixed",),
    "mixed, checkpointing": ("model.dtype=mixed", "model.gradient_checkpointing=full"),
    "mixed, selective": ("model.dtype=mixed", "model.gradient_checkpointing=selective"),
    "mixed, adapters": ("model.dtype=mixed", "model.lora_rank=8"),
    "Muon": ("optim.muon_lr=0.02",),
    "mixed, Muon": ("model.dtype=mixed", "optim.muon_lr=0.02"),
    "adapters, Muon": ("model.lora_rank=8", "optim.muon_lr=0.02"),
    EIGHT_BIT: ("model.dtype=mixed8",),
    "mixed, split head": ("model.dtype=mixed", "dist.split_head=true"),
}
FAST = [
    *(("quickstart", way) for way in ("float32", "checkpointing", "selective")),
    *(("qwen3", way) for way in WAYS if way != EIGHT_BIT),  # torchao compiles its steps
    *(("llama", way) for way in ("float32", "mixed, selective", "mixed, split head")),
    *(("experts", way) for way in ("float32", "selective", "Muon")),
]
SLOW = [(name, way) for name in ("qwen3, 37 million", "llama, 35 million") for way in WAYS]
SLOW.append(("qwen3", EIGHT_BIT))


def built(values: dict[str, Any]) -> Any:
    given = dict(values)
    return AutoConfig.for_model(given.pop("model_type"), **given)


def groups(tokens: int, vocabulary: int) -> list[list[Credit]]:
    """Contexts of 96 tokens with four siblings of 32, as many as fit."""
    rng = np.random.default_rng(0)

    def sibling(boundary: Boundary) -> Credit:
        action_A = rng.integers(0, vocabulary, 32).astype(np.int32)
        logprob_A = rng.normal(-6, 0.3, 32).astype(np.float32)
        turn = Turn(boundary, Completion(action_A, logprob_A, 0, Stop.STOP))
        trajectory = Trajectory("t", 0, (turn,), Ending.FINISHED)
        return Credit(trajectory, rng.normal(size=1), np.full(1, 0.01))

    contexts = rng.integers(0, vocabulary, (tokens // 224, 96)).astype(np.int32)
    return [[sibling(Boundary(0, context_T)) for _ in range(4)] for context_T in contexts]


def micro_batches(name: str, device: torch.device) -> list[PackedBatch]:
    """Two of the same."""
    count = 4200 if name == "quickstart" else 1200
    return [pack(groups(count, MODELS[name]["vocab_size"]), 10_000, device)[0]] * 2


def sizes(batch: PackedBatch) -> tuple[int, int]:
    """(tokens, rows with an action behind them)."""
    return len(batch.token_T), len(batch.source_A.unique())


@contextmanager
def learner(config: Config, values: dict[str, Any], out: Path) -> Any:
    """As a run makes it, with the model of `values`."""
    mixed = config.model.mixed
    with open_world(mesh=mixed) as world:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(built(values))
        if config.model.lora_rank:
            lora.adapt(model, models.blocks(model), config)
        policy = Policy(model).train()
        activations.keep(policy.model, config.model.gradient_checkpointing)
        policy.to(world.device)
        mirror = Mirror(policy, world, mixed=mixed)
        shard(policy, world, mixed=mixed, split_head=config.dist.split_head)
        optimizers = training_optimizer(policy.model, config.optim, adamw_of(config.model.dtype))
        yield Learner(policy, optimizers, config, Unmetered(), out, world=world), mirror


def parts(moment: torch.Tensor) -> list[torch.Tensor]:
    """What a moment is made of: codes and scales, or itself."""
    local = moment.to_local() if isinstance(moment, DTensor) else moment
    return [local.codes, local.scale] if hasattr(local, "codes") else [moment]


def held_bytes(learner: Learner, mirror: Mirror) -> int:
    """Weights, moments and the copy to sample from, as they are."""
    tensors = [*learner.policy.parameters()]
    for member in learner.optimizers.members:
        tensors += [
            part for state in member.state.values() for x in state.values() for part in parts(x)
        ]
    if mirror.policy is not learner.policy:
        assert mirror.policy is not None
        tensors += mirror.policy.parameters()
    return sum(t.nbytes for t in tensors)


def added_bytes(device: torch.device, action: Callable[[], Any]) -> int:
    """The most that torch's allocator hands out beyond what it had handed out before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize(
    ("name", "way"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_peak_of_a_step_is_the_predicted_one(name: str, way: str, tmp_path: Path) -> None:
    """Two micro-batches; the step is not the first, so moments are there."""
    if way == EIGHT_BIT:
        pytest.importorskip("torchao", reason="the package torchao is not installed")
    values = MODELS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = override(Config(), [f"device={device}", *WAYS[way]])
    with learner(config, values, tmp_path) as (it, mirror):
        batches = micro_batches(name, it.world.device)
        step = lambda: it.step(batches, Objective(), it.optimizers)  # noqa: E731
        step()
        it.optimizers.zero_grad()
        held = held_bytes(it, mirror)
        measured = held + added_bytes(it.world.device, step)
    shape = read_shape(built(values).to_dict())
    predicted = memory.held_gib(config, shape)
    assert sum(predicted.values()) * memory.GIB == pytest.approx(held, rel=0.001)
    added = memory.step_gib(config, shape, 1, *sizes(batches[0]))
    total = (sum(predicted.values()) + sum(added.values())) * memory.GIB
    print(f"{name}, {way}: {total / 2**20:.1f} of {measured / 2**20:.1f} MiB")
    assert total == pytest.approx(measured, rel=0.15)
    assert sum(added.values()) * memory.GIB == pytest.approx(measured - held, rel=0.15)


RESIDENT = """
import resource, sys
from pathlib import Path
from test_memory import MODELS, WAYS, Config, learner, micro_batches, override, Objective
name, way, folder = sys.argv[1:]
config = override(Config(), ["device=cpu", *WAYS[way]])
with learner(config, MODELS[name], Path(folder)) as (it, _):
    for _ in range(2):
        it.step(micro_batches(name, it.world.device), Objective(), it.optimizers)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are not the host")
@pytest.mark.parametrize("way", ["float32", "checkpointing", "Muon", "mixed", "adapters"])
@pytest.mark.parametrize("name", ["qwen3, 37 million", "llama, 35 million"])
def test_a_process_takes_the_peak_and_its_libraries(name: str, way: str, tmp_path: Path) -> None:
    """Resident at most, where the C library gives back what is freed."""
    config = override(Config(), ["device=cpu", *WAYS[way]])
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, name, way, str(tmp_path)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    measured_gib = int(done.stdout.split()[-1]) / 2**20
    shape = read_shape(built(MODELS[name]).to_dict())
    batch = micro_batches(name, torch.device("cpu"))[0]
    uses = [memory.held_gib(config, shape), memory.step_gib(config, shape, 1, *sizes(batch))]
    predicted_gib = sum(map(memory.device_sum, uses)) + memory.PROCESS_GIB
    print(f"{name}, {way}: {predicted_gib:.3f} of {measured_gib:.3f} GiB")
    assert predicted_gib == pytest.approx(measured_gib, rel=0.15)


FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "some layers of qwen3_moe": {
        "model_type": "qwen3_moe",
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"mlp_only_layers": [0], "decoder_sparse_step": 1, "head_dim": 8},
    },
    "every other layer of qwen2_moe": {
        "model_type": "qwen2_moe",
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False},
    },
}
SIZES = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_models_with_experts_are_those_of_transformers(family: str) -> None:
    config = built(SIZES | FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(config.to_dict())
    assert shape.parameters == model.num_parameters()
    unused = shape.expert_layers * 2 * 3 * 32 * shape.expert_mlp
    assert shape.active_parameters == shape.parameters - unused


def test_parameters_of_the_small_model_and_of_smollm2() -> None:
    shape = shape_of(Config(model=Model(layers=3, width=64, vocabulary=334)))
    values = MODELS["quickstart"] | {"num_hidden_layers": 3}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built(values))
    assert shape is not None and model.num_parameters() == shape.parameters
    assert SMOLLM2_135M.parameters == 134_515_008


def total(config: Config, ranks: int = 1) -> dict[str, float]:
    held, step, _ = plan.memory_gib(config, ranks)
    return held | step


def test_memory_of_a_model_folder(tmp_path: Path) -> None:
    built(SIZES | {"model_type": "llama", "max_position_embeddings": 2048}).save_pretrained(
        tmp_path
    )
    config = Config(model=Model(path=str(tmp_path)))
    shape = Shape(4, 32, 4, 2, 8, 48, 100, tied=False, positions=2048)
    assert shape_of(config) == shape
    whole = total(config)
    assert whole["weights"] == shape.parameters * 4 / 2**30
    half = total(override(config, ["model.dtype=bfloat16", "loss.kl_coef=0.1"]))
    assert half["weights"] == half["reference weights"] == whole["weights"] / 2
    saving = total(override(config, ["model.gradient_checkpointing=full"]))
    assert saving["activations"] < whole["activations"]


def test_memory_of_one_of_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    alone, one = total(config), total(config, 8)
    for name in ("weights", "gradients", "AdamW moments"):
        assert one[name] == alone[name] / 8
    assert one["weights to sample from"] == alone["weights"]
    assert "weights to sample from" not in alone
    served = override(config, ["rollout.engine=vllm", "rollout.urls=http://a:1"])
    assert total(served, 8)["weights to publish from (rank 0 only)"] == alone["weights"]
    groups = total(override(config, ["dist.shard_ranks=2"]), 8)
    assert groups["weights"] == alone["weights"] / 2
    mixed = total(override(config, ["model.dtype=mixed"]))
    assert mixed["weights"] == 2 * mixed["weights to sample from"] == alone["weights"]
    assert cli.main(["train", "quickstart", "--dry-run", "--nproc", "4"]) == 0
    assert "memory of one of 4 ranks" in capsys.readouterr().out


def test_a_model_that_is_too_large_is_refused_with_the_arithmetic() -> None:
    memory.require_memory(Config(), 1, 1.0, 1.0)
    large = override(Config(), ["model.width=512", "device=cpu"])
    told = r"weights .* = 0\.\d+ GiB on each, which has 0\.00 GiB; .*dist.cpu_offload=true"
    with pytest.raises(ConfigError, match=told):
        memory.require_memory(large, 1, 0.001, 1.0)


def test_what_is_offloaded_is_the_hosts_where_devices_are_gpus(capsys) -> None:
    pairs = ["model.width=512", "model.dtype=mixed", "device=cuda"]
    here, there = (override(Config(), [*pairs, f"dist.cpu_offload={x}"]) for x in (False, True))
    uses, moved = total(here, 2), total(there, 2)
    hosts = {"weights", "AdamW moments", "gradients"}
    assert moved == {name + memory.HOST * (name in hosts): gib for name, gib in uses.items()}
    device_gib = memory.device_sum(moved)
    host_gib = sum(moved.values()) - device_gib
    assert device_gib < memory.device_sum(uses) == sum(uses.values())
    memory.require_memory(there, 2, device_gib, host_gib)
    with pytest.raises(ConfigError, match=r"weights to sample from .* a smaller model") as told:
        memory.require_memory(there, 2, 0.01, host_gib)
    assert "host" not in str(told.value) and "offload" not in str(told.value)
    with pytest.raises(ConfigError, match=r"weights \(host\) .* \+ gradients \(host\) "):
        memory.require_memory(there, 2, device_gib, 0.01)
    plan.print_plan(there, Config(), ranks=2)
    assert "memory of one of 2 ranks, device cuda" in capsys.readouterr().out
    beside = override(Config(), ["device=cpu", "model.dtype=mixed", "dist.cpu_offload=true"])
    assert memory.device_sum(total(beside)) == sum(total(beside).values())  # it is the host


def test_muon_keeps_one_momentum_of_a_matrix() -> None:
    plain, muon = (override(Config(), [f"optim.muon_lr={rate}"]) for rate in (0.0, 0.02))
    shape = shape_of(muon)
    assert shape is not None
    matrices, rest = (n * 4 / 2**30 for n in (shape.matrices, shape.parameters - shape.matrices))
    assert total(plain)["AdamW moments"] == pytest.approx(2 * (matrices + rest))
    assert total(muon)["momenta of Muon"] == pytest.approx(matrices)
    assert total(muon)["AdamW moments"] == pytest.approx(2 * rest)
    saved = [memory.saving_gib(config, shape) for config in (plain, muon)]
    assert saved == pytest.approx([3 * (matrices + rest), 2 * matrices + 3 * rest])


def test_the_dry_run_says_what_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    held, step, sampling = plan.memory_gib(quickstart())
    assert cli.main(["train", "quickstart", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    peak = f"{sum((held | step).values()) * 1024:.1f} MiB"
    assert f"peak of a step of micro-batches of 4,096 tokens, predicted {peak}" in " ".join(
        said.replace("│", " ").split()
    )
    most = max(sum(step.values()), sampling["keys and values in decoding"])
    process = sum(held.values()) + most + sampling["keys and values kept"] + memory.PROCESS_GIB
    process += held["weights"] + held["AdamW moments"]  # what a checkpoint is written from
    assert f"{process * 1024:.1f} MiB" in said
    assert "torch's allocator" in said


def test_memory_of_models_that_cannot_be_read(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    absent = Config(model=Model(path="someone/some-model"))
    assert plan.memory_gib(absent) == []
    plan.print_plan(absent, Config())
    assert "unknown until someone/some-model has been downloaded" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"expected a folder in Hugging Face format"):
        plan.memory_gib(Config(model=Model(path=str(tmp_path))))


def test_the_plan_knows_the_limits_of_the_parts() -> None:
    """It states them again, because importing the parts would load torch."""
    assert memory.HEAD_BYTES == rows.CHUNK_BYTES
    assert memory.HEAD_ROWS == rows.CHUNK_ROWS
    assert memory.HEAD_GRANULE == rows.GRANULE
    defaults = inspect.signature(LocalSampler).parameters
    assert defaults["resident_tokens"].default == memory.RESIDENT_TOKENS
    assert defaults["store_gib"].default == memory.STORE_GIB
