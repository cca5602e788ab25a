"""What a run would do and need, worked out from the configuration alone: `--dry-run`.

Nothing is started, loaded or downloaded, and torch is not imported: counts follow from the
configuration, memory from the model's `config.json` (or from the rule that builds the small Qwen3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, ConfigError, as_dict

GIB = 2**30
# Limits of parts that this file cannot import without torch; a test compares them with the parts.
HEAD_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # logits that the fused head holds at a time
RESIDENT_TOKENS = 65536  # most tokens that the sampler decodes at once
STORE_GIB = 0.5  # keys and values that it keeps for the next call


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense transformer that memory depends on (H, K, E, V as in `types.py`)."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    vocabulary: int
    tied: bool
    positions: int | None = None  # most tokens that the model reads, where it states a limit

    @property
    def parameters(self) -> int:
        """Weights of embeddings, attention, gated MLP and norms; biases are left out.

        Example: SmolLM2-135M gives 134 515 008, as counted by transformers.
        """
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        block = attention + 3 * self.width * self.mlp + 2 * self.width
        return self.embeddings + self.layers * block + self.width

    def adapters(self, rank: int) -> int:
        """Weights of adapters of this rank in every linear layer of the blocks.

        Example: rank 16 in SmolLM2-135M gives 4 884 480, as counted by peft.
        """
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * (self.width + queries) + 2 * (self.width + keys)
        return self.layers * rank * (attention + 3 * (self.width + self.mlp))

    @property
    def embeddings(self) -> int:
        """Weights of the embedding and the head, which may be one."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def activations_token(self) -> int:
        """Numbers that one layer keeps for the backward pass of one token.

        Fitted to what autograd saves in Qwen3 and Llama at several widths; within 25 % of both.
        """
        attention = 4 * (self.heads + self.kv_heads) * self.head_width
        return 5 * self.width + attention + 4 * self.mlp

    def kept_token(self, checkpointing: bool) -> int:
        """Numbers that all layers keep for one token: those of every layer, or every layer's input
        and those of the one that is computed again."""
        if checkpointing:
            return self.activations_token + self.layers * self.width
        return self.layers * self.activations_token

    @property
    def cache_token(self) -> int:
        """Keys and values of one token. Example: 11 520 for SmolLM2-135M."""
        return 2 * self.layers * self.kv_heads * self.head_width


SMOLLM2_135M = Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True, positions=8192)


def shape_of(config: Config) -> Shape | None:
    """The shape of `model.path`, or None for a hub id that is not on this machine yet.

    Raises `ConfigError` when the path is a folder without a readable `config.json`.
    """
    path = config.model.path
    if not path:
        width = config.model.width
        heads = (4, 2, width // 4, 3 * width)
        return Shape(config.model.layers, width, *heads, config.model.vocabulary, tied=True)
    if path == "smollm2-135m":
        return SMOLLM2_135M
    file = Path(path) / "config.json" if Path(path).is_dir() else _cached_config(path)
    if file is None:
        return None
    try:
        return _read_shape(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={path!r}: expected a folder in Hugging Face format, but {file.name} "
            f"cannot be read ({error!r}); name a folder written by save_pretrained"
        ) from error


def _read_shape(values: Mapping[str, Any]) -> Shape:
    values = values.get("text_config") or values
    heads = values["num_attention_heads"]
    return Shape(
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_width=values.get("head_dim") or values["hidden_size"] // heads,
        mlp=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings", False)),
        positions=values.get("max_position_embeddings"),
    )


def _cached_config(hub_id: str) -> Path | None:
    """`config.json` of a hub id in the local cache of Hugging Face, newest snapshot first."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None


def derive(config: Config) -> dict[str, int]:
    """Counts that follow from the configuration; rollouts are upper bounds, because an episode
    that ends early has fewer boundaries to fork.

    Example, RTPO with 32 tasks, 1 trunk, 4 turns, G = 5: 32 · (1 + 4 · 4) = 544 rollouts and 4
    stages an iteration; GRPO with G = 16: 512 rollouts and 1 stage. DAPO counts all its candidates.
    """
    algorithm = algorithm_of(config)
    forks = config.group_size - algorithm.unsampled
    grown = algorithm.stages is not None
    roots = config.tasks * algorithm.candidates * (config.trunks if grown else 1)
    turns = config.turns if algorithm.reverse else 1
    stages = turns if algorithm.passes is None else 1
    steps = config.turns if algorithm.passes else 1
    rollouts = roots * (grown + turns * forks)
    between = (config.iterations - 1) // config.eval_every if config.eval_every else 0
    evaluations = 2 + max(0, between)
    return {
        "rollouts_iteration": rollouts,
        "rollouts": rollouts * config.iterations,
        "stages_iteration": stages,
        "groups_stage": roots * turns // stages,
        "rollouts_stage": roots * turns // stages * forks,
        "steps_stage": config.loss.epochs * config.loss.minibatches * steps,
        "tokens_microbatch": max(config.pack_tokens, config.model.max_context),
        "evaluations": evaluations,
        "rollouts_evaluation": 2 * config.data.eval_tasks,
        "demonstrations": config.warm.steps * config.warm.batch,
    }


def memory_gib(config: Config, ranks: int = 1) -> dict[str, float]:
    """Upper estimates in GiB by use, for one of `ranks` processes, with their sum under "total";
    empty when the shape is unknown.

    Keys and values of the sampler are counted at full context for every sibling of a stage, up to
    its own limits; shared contexts make them smaller.
    """
    shape = shape_of(config)
    if shape is None:
        return {}
    size = _compute_bytes(config)
    derived = derive(config)
    tokens = derived["tokens_microbatch"]
    activations = tokens * shape.kept_token(config.model.gradient_checkpointing)
    rows = -(-max(derived["rollouts_stage"], config.data.eval_tasks) // ranks)
    resident = min(rows * config.model.max_context, RESIDENT_TOKENS)
    decode = resident * shape.cache_token * size
    logits = tokens * shape.vocabulary * 4
    uses = {
        "activations of a micro-batch": activations * size,
        "logits of a head chunk": min(logits, HEAD_BYTES.get(config.device, HEAD_BYTES["cpu"])),
        "keys and values in decoding": decode,
        "keys and values kept": min(decode, STORE_GIB * GIB),
    }
    gib = {name: value / GIB for name, value in uses.items() if value}
    gib = held_gib(config, shape, ranks) | gib
    return gib | {"total": sum(gib.values())}


def held_gib(config: Config, shape: Shape, ranks: int = 1) -> dict[str, float]:
    """What one of `ranks` processes holds of the model as long as the run lasts, in GiB by use.

    Example: 1.7 billion parameters in float32 on 8 ranks: weights .79, gradients .79, moments 1.58,
    and 6.33 for the whole copy that each samples from.
    """
    width = 2 if config.model.dtype == "bfloat16" else 4
    share = config.dist.shard_ranks or ranks
    weights, trained = shape.parameters * width / share, shape.parameters * width / share
    if config.model.lora_rank:
        trained = shape.adapters(config.model.lora_rank) * 4 / share
        weights += trained
    referred = config.loss.kl_coef > 0 and not config.starts_as_reference
    fsdp = ranks > 1 or config.model.dtype == "mixed" or config.dist.cpu_offload
    copied = fsdp or (config.rollout.engine == "local" and algorithm_of(config).lags)
    block = (shape.parameters - shape.embeddings) / shape.layers
    uses = {
        "weights": weights,
        "gradients": trained,
        "AdamW moments": 2 * trained,
        "reference weights": shape.parameters * width / share if referred else 0,
        "weights to sample from": copied * shape.parameters * _compute_bytes(config),
        "gathered weights and gradients": fsdp * 2 * width * (shape.embeddings + 2 * block),
    }
    return {name: value / GIB for name, value in uses.items() if value}


def require_memory(config: Config, ranks: int, device_gib: float) -> None:
    """`ConfigError`, with the arithmetic, when what a rank must hold exceeds its device."""
    shape = shape_of(config)
    if shape is None or config.dist.cpu_offload:
        return
    held = held_gib(config, shape, ranks)
    if sum(held.values()) > device_gib:
        terms = " + ".join(f"{name} {gib:.2f}" for name, gib in held.items())
        raise ConfigError(
            f"{shape.parameters / 1e9:.2f} billion parameters in {config.model.dtype} on {ranks} "
            f"rank{'s' * (ranks > 1)}: {terms} = {sum(held.values()):.2f} GiB on each, which has "
            f"{device_gib:.2f} GiB; use more ranks, model.dtype=bfloat16, dist.cpu_offload=true, "
            f"or a smaller model"
        )


def _compute_bytes(config: Config) -> int:
    return {"float32": 4, "bfloat16": 2}[config.model.compute_dtype]


LABELS = {
    "rollouts_iteration": "rollouts an iteration (at most)",
    "rollouts": "rollouts of the run (at most)",
    "stages_iteration": "stages an iteration (at most)",
    "groups_stage": "groups a stage (at most)",
    "rollouts_stage": "rollouts a stage (at most)",
    "steps_stage": "optimiser steps a stage",
    "tokens_microbatch": "tokens of a micro-batch (at most)",
    "evaluations": "evaluations",
    "rollouts_evaluation": "rollouts an evaluation",
    "demonstrations": "demonstrations of the warm start",
}


def print_plan(
    config: Config, recipe: Config, console: Console | None = None, *, ranks: int = 1
) -> None:
    """Print the resolved configuration (what differs from `recipe` is marked with both values),
    the derived numbers and the memory estimate of one of `ranks` processes."""
    console = console or Console()
    console.print(_settings(config, recipe))
    console.print(_numbers(derive(config)))
    shape = shape_of(config)
    if shape:
        console.print(_memory(memory_gib(config, ranks), ranks))
        console.print(f"{shape.parameters / 1e6:.2f} million parameters in {config.model.dtype}")
    else:
        console.print(f"memory: unknown until {config.model.path} has been downloaded")
    console.print("dry run: nothing was started")


def _settings(config: Config, recipe: Config) -> Table:
    table = _table(f"configuration ({config.recipe})", ("key", "value", "in the recipe"))
    before = as_dict(recipe)
    for key, value in as_dict(config).items():
        if value == before[key]:
            table.add_row(key, _text(value), "")
        else:
            table.add_row(f"* {key}", _text(value), _text(before[key]), style="bold yellow")
    return table


def _numbers(derived: Mapping[str, int]) -> Table:
    table = _table("derived numbers", ("what", "count"))
    table.columns[1].justify = "right"
    for key, value in derived.items():
        table.add_row(LABELS[key], f"{value:,}")
    return table


def _memory(memory: Mapping[str, float], ranks: int) -> Table:
    title = "memory estimate" if ranks == 1 else f"memory estimate of one of {ranks} ranks"
    table = _table(title, ("use", "size"))
    table.columns[1].justify = "right"
    for name, gib in memory.items():
        size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
        table.add_row(name, size, style="bold" if name == "total" else "")
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "(none)"
    return str(value) if value != "" else "(empty)"
