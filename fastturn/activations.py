"""What the blocks of a model keep for the backward pass, `model.gradient_checkpointing`.

    none        all that autograd saves
    full        the input of every block; the rest is computed again, block by block
    selective   that and the results of matrix products and of attention, whose repetition is what
                "full" costs; norms, rotary embeddings and activation functions are computed again

The second product of an adapter sums over a few numbers only and is as wide as the layer: it is
computed again too (`WIDEST`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from fastturn.kernels.kept import OPERATOR
from fastturn.memory import WIDEST

aten = torch.ops.aten
# Products by rows, with the place of the second factor [..., inner, columns] in their arguments.
PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2, aten._grouped_mm.default: 1}


def keep(model: Any, what: str) -> None:
    """From now on the blocks of `model`, when it trains, keep `what`: none, full or selective.

    Example: `keep(policy.model, "full")`.
    """
    if what == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    # transformers renamed the switch in 5.2x; the old name warns where the new one exists.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options)


def _policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator is OPERATOR or (operator in PRODUCTS and _worth_keeping(args[PRODUCTS[operator]])):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _worth_keeping(factor_IO: torch.Tensor) -> bool:
    inner, columns = factor_IO.shape[-2:]
    return columns <= WIDEST * inner
