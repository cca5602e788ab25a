"""The sizes of a model that memory depends on, from its `config.json` or from the rule that builds
the small Qwen3. Nothing is loaded or downloaded, and torch is not imported."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastturn.config import Config, ConfigError

HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")  # model types that norm queries and keys
# What a config.json calls the experts of a layer, and the width of one of them.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a transformer (H, K, E, V as in `types.py`), with or without experts."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int  # of layers without experts
    vocabulary: int
    tied: bool
    positions: int | None = None  # most tokens that the model reads, where it states a limit
    head_norms: bool = False
    experts: int = 0  # of a layer that has them
    experts_used: int = 0  # by one token
    expert_mlp: int = 0
    shared_mlp: int = 0  # of the expert that every token uses, with a gate of its own
    dense_layers: int = 0  # layers without experts in a model that has some

    @property
    def queries(self) -> int:
        """Numbers in the queries of one token and layer."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Numbers in the keys of one token and layer, and in the values."""
        return self.kv_heads * self.head_width

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> int:
        """Weights that are stored; biases of linear layers are left out.

        Example: SmolLM2-135M gives 134 515 008, as counted by transformers.
        """
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token uses."""
        return self._parameters(self.experts_used)

    @property
    def block(self) -> float:
        """Weights of one layer, the mean of all."""
        return (self.parameters - self.embeddings - self.width) / self.layers

    @property
    def embeddings(self) -> int:
        """Weights of the embedding and the head, which may be one."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def norms(self) -> int:
        """Weights of all norms."""
        return self.layers * (2 * self.width + self.head_norms * 2 * self.head_width) + self.width

    @property
    def matrices(self) -> int:
        """Weights of the blocks that are matrices, experts among them."""
        return self.parameters - self.embeddings - self.norms

    @property
    def largest_matrix(self) -> tuple[int, int, int]:
        """(how many in one tensor, rows, columns) of the largest weight of the blocks: experts are
        stacked, each with gate and up as one."""
        dense = self.mlp * (self.layers > self.expert_layers)
        found = [(1, self.width, self.queries), (1, self.width, dense)]
        found.append((self.experts, 2 * self.expert_mlp, self.width))
        return max(found, key=math.prod)

    def adapters(self, rank: int) -> int:
        """Weights of adapters of this rank in every linear layer of the blocks, which experts are
        not.

        Example: rank 16 in SmolLM2-135M gives 4 884 480, as counted by peft.
        """
        attention = 2 * (self.width + self.queries) + 2 * (self.width + self.keys)
        mlp = 3 * (self.width + self.mlp) * (self.layers - self.expert_layers)
        return rank * (self.layers * attention + mlp)

    @property
    def cache_token(self) -> int:
        """Keys and values of one token. Example: 11 520 for SmolLM2-135M."""
        return 2 * self.layers * self.keys

    def _parameters(self, experts: int) -> int:
        attention = 2 * self.width * (self.queries + self.keys)
        gated = 3 * self.width  # weights of a gated MLP for each unit of its width
        shared = self.width * (3 * self.shared_mlp + 1) if self.shared_mlp else 0
        sparse = gated * experts * self.expert_mlp + self.experts * self.width + shared
        dense = gated * self.mlp * (self.layers - self.expert_layers)
        matrices = self.layers * attention + dense + self.expert_layers * sparse
        return self.embeddings + matrices + self.norms


SMOLLM2_135M = Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True, positions=8192)


def shape_of(config: Config) -> Shape | None:
    """The shape of `model.path`, or None for a hub id that is not on this machine yet.

    Raises `ConfigError` when the path is a folder without a readable `config.json`.
    """
    path = config.model.path
    if not path:
        width = config.model.width
        heads = (4, 2, width // 4, 3 * width)
        vocabulary = config.model.vocabulary
        return Shape(config.model.layers, width, *heads, vocabulary, tied=True, head_norms=True)
    if path == "smollm2-135m":
        return SMOLLM2_135M
    file = Path(path) / "config.json" if Path(path).is_dir() else _cached_config(path)
    if file is None:
        return None
    try:
        return read_shape(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={path!r}: expected a folder in Hugging Face format, but {file.name} "
            f"cannot be read ({error!r}); name a folder written by save_pretrained"
        ) from error


def read_shape(values: Mapping[str, Any]) -> Shape:
    """The shape that a `config.json` describes; `KeyError` for one that lacks a size."""
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
        head_norms=values.get("model_type") in HEAD_NORMS,
        **_experts(values),
    )


def _experts(values: Mapping[str, Any]) -> dict[str, int]:
    """The fields about experts; none for a dense model.

    A layer is dense when it is named (`mlp_only_layers`), among the first (`first_k_dense_replace`)
    or between two sparse ones (`decoder_sparse_step`).
    """
    experts = _first(values, EXPERTS)
    if not experts:
        return {}
    named = values.get("mlp_only_layers") or ()
    first, step = values.get("first_k_dense_replace") or 0, values.get("decoder_sparse_step") or 1
    dense = [
        layer
        for layer in range(values["num_hidden_layers"])
        if layer in named or layer < first or (layer + 1) % step
    ]
    return {
        "experts": experts,
        "experts_used": values["num_experts_per_tok"],
        "expert_mlp": _first(values, EXPERT_WIDTH),
        "shared_mlp": values.get("shared_expert_intermediate_size") or 0,
        "dense_layers": len(dense),
    }


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((int(values[name]) for name in names if values.get(name)), 0)


def _cached_config(hub_id: str) -> Path | None:
    """`config.json` of a hub id in the local cache of Hugging Face, newest snapshot first."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None
