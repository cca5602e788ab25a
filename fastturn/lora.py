"""LoRA: every linear layer of the blocks computes `W x + s B (A x)`; only A and B train.

peft puts the adapters into the model in place: classes, attributes and the names of everything that
is not adapted stay, so the model is used, split and saved like any other. Two names are peft's own:
`q_proj.base_layer.weight` is W, `q_proj.lora_A.default.weight` is A [r, in], likewise B [out, r].
Outside, the model is one of two things: whole weights W + s B A under the names that it had before
(`merged`), or the adapter alone in peft's format (`adapter`, `adapter_config`).

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fastturn.config import Config, ConfigError

NAME = "default"  # of the adapter, in peft


def adapt(model: nn.Module, units: list[nn.Module], config: Config) -> None:
    """Put adapters of rank `model.lora_rank` into the linear layers of `units` and freeze the rest.

    B begins at zero: the model computes what it did. A depends on `config.seed` only. Adapters of a
    bfloat16 model are float32, because small learning rates move bfloat16 weights not at all.
    Raises `ConfigError` when no unit has a linear layer.
    Example: rank 8 in a layer of 64 -> 192 is 8 · (64 + 192) = 2048 numbers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    found = {
        name.rpartition(".")[2]
        for unit in units
        for name, module in unit.named_modules()
        if type(module) is nn.Linear
    }
    if not found:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank}: the blocks of {type(model).__name__} have "
            f"no linear layers to adapt; set model.lora_rank=0"
        )
    settings = LoraConfig(
        r=config.model.lora_rank,
        lora_alpha=config.model.lora_alpha,
        target_modules=sorted(found),
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.path or None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        inject_adapter_in_model(settings, model, NAME)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight as it leaves the model: its own name, and the adapter that is added to it."""

    name: str
    held: torch.Tensor
    layer: Any = None  # peft's layer around it

    def whole(self) -> torch.Tensor:
        """All its elements, W + s B A; gathered (by all ranks together) when split."""
        weight_OI = _gathered(self.held)
        if self.layer is None:
            return weight_OI
        a_RI, b_OR = (_gathered(part[NAME].weight.detach()) for part in _factors(self.layer))
        return weight_OI + (self.layer.scaling[NAME] * (b_OR @ a_RI)).to(weight_OI.dtype)


def merged(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[Weight]:
    """`tensors` of a model, by the names that they have in it, as those of a model that never had
    an adapter. Without one they are what they were."""
    modules = dict(model.named_modules())
    weights = []
    for name, tensor in tensors.items():
        place, base, leaf = name.rpartition(".base_layer.")
        layer = modules[place] if base and leaf == "weight" else None
        if not _of_adapter(name):
            weights.append(Weight(f"{place}.{leaf}" if base else name, tensor, layer))
    return weights


def adapter(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(peft's name, whole tensor) of the adapter's weights. All ranks together.

    Example: "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight" [out, r].
    """
    for name, parameter in model.named_parameters():
        if _of_adapter(name):
            outside = name.replace(f".{NAME}.", ".")
            yield f"base_model.model.{outside}", _gathered(parameter.detach())


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """The adapter's configuration as peft writes it to adapter_config.json."""
    known: Any = model
    values = known.peft_config[NAME].to_dict()
    return {key: sorted(v) if isinstance(v, set) else v for key, v in values.items()}


def write_adapter(model: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """The adapter's `tensors` in the folder that `peft.PeftModel.from_pretrained` reads."""
    from safetensors.torch import save_file

    known: Any = model
    known.peft_config[NAME].save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what it did before it was adapted."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def _factors(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A, layer.lora_B


def _of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
