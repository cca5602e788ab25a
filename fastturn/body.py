"""What the layers of a model are computed with, `model.kernels`: transformers' own code, the same
compiled, or Liger's kernels. Attention and the head are not theirs: both stay fastturn's.

    plain     as transformers writes it
    compile   torch.compile of every part of every block: norms, MLP, attention's projections
    liger     Liger's RMSNorm, rotary embedding and SwiGLU, on CUDA
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastturn import models
from fastturn.config import ConfigError

COMPILE: dict[str, Any] = {"dynamic": True}  # one graph for all lengths
LIGER = {"rope": True, "rms_norm": True, "swiglu": True}
NOT_LIGER = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def prepare(model: Any, kernels: str) -> None:
    """Compute the layers of `model` with `kernels` from now on, in place. Before it is split.

    Raises `ConfigError` for a model that Liger has no kernels for.
    """
    PREPARE[kernels](model)


def _plain(model: Any) -> None:
    """It is what it is."""


def _compile(model: Any) -> None:
    """The parts and not the whole, because blocks checkpoint themselves inside `forward`, which is
    one graph or none, and FSDP's hooks are around them."""
    for block in models.blocks(model):
        for part in block.children():
            part.compile(**COMPILE)


def _liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"model.kernels=liger: Liger has no kernels for {kind!r}; set model.kernels=compile, "
            f"or choose one of {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    _apply_liger_kernel_to_instance(model, **LIGER, **NOT_LIGER)


PREPARE: dict[str, Callable[[Any], None]] = {
    "plain": _plain,
    "compile": _compile,
    "liger": _liger,
}
