"""What can be known to be wrong before anything is computed, downloaded or written.

The dry run and the run itself ask the same questions here, so what the one accepts the other does
not refuse. torch is imported only to look for a device that was asked for by name.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from fastturn.config import Config, ConfigError
from fastturn.envs import load_domain
from fastturn.render import check_context
from fastturn.shape import shape_of
from fastturn.trackers import check_trackers

NAME = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(rf"{NAME}(/{NAME})?(?<!\.json)(?<!\.jsonl)")


def preflight(config: Config) -> None:
    """Raise `ConfigError` for settings that no run could begin with. A model that is not on this
    machine yet is left to its loading."""
    check_trackers(config.trackers)
    check_context(config.context, config.model.max_context)
    check_device(config)
    check_kernels(config)
    check_model(config)
    if config.model.dtype == "mixed8" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "model.dtype=mixed8: moments of 8 bits need the package torchao, which is not "
            'installed; run: pip install "fastturn[torchao]", or set model.dtype=mixed'
        )
    if config.model.lora_rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank}: adapters need the package peft, which is "
            f'not installed; run: pip install "fastturn[lora]", or set model.lora_rank=0'
        )


def check_data(config: Config) -> None:
    """Raise `ConfigError` or `DomainError` for tasks that cannot be used, as loading them does;
    data on the hub is left to the run."""
    if not _on_hub(config.data.path):
        load_domain(config)


def check_device(config: Config) -> None:
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device='cuda': torch finds no CUDA device here; set device=auto")


def check_kernels(config: Config) -> None:
    """The package and the device of Liger's kernels are here."""
    if config.model.kernels != "liger":
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "model.kernels=liger: the package liger-kernel is not installed; run: "
            'pip install "fastturn[liger]", or set model.kernels=compile or plain'
        )
    import torch

    if config.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(
            "model.kernels=liger: its kernels run on CUDA and the device of this run is a CPU; "
            "set model.kernels=compile or plain"
        )


def check_model(config: Config) -> None:
    """The path exists, unless it may be a hub id, and the model reads `model.max_context`."""
    path = config.model.path
    if path and not Path(path).exists() and not _on_hub(path) and path != "smollm2-135m":
        raise ConfigError(
            f"model.path={path!r}: there is no such folder; name a folder in Hugging Face format, "
            f"a hub id (owner/name) or smollm2-135m"
        )
    shape = shape_of(config)
    limit = shape.positions if shape else None
    if limit is not None and config.model.max_context > limit:
        raise ConfigError(
            f"model.max_context={config.model.max_context}: {path} reads at most {limit} tokens; "
            f"set model.max_context={limit} or less"
        )


def _on_hub(path: str) -> bool:
    """Whether `path` can only be a dataset or model of the hub."""
    return bool(path) and not Path(path).exists() and bool(HUB_ID.fullmatch(path))
