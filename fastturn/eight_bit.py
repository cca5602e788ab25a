"""AdamW with moments of 8 bits (Dettmers et al., 2022), torchao's, for `model.dtype=mixed8`.

torchao keeps a code for every number and a scale for every 256; tensors with fewer than 4096
numbers on a rank, or no whole number of blocks there, stay float32. Blocks end where a rank's shard
does, so checkpoints hold moments in float32 and load on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def adamw(
    groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """The optimiser; `preflight` has seen that torchao is installed."""
    from torchao.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas)
    return found


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torchao")


def wide(moment: torch.Tensor) -> torch.Tensor:
    """A moment of 8 bits as float32 in host memory, where there is room for all of them; any other
    tensor as it is. Split as it was."""
    local = _local(moment)
    if not hasattr(local, "codes"):
        return moment
    values: torch.Tensor = local.dequantize()
    if isinstance(moment, DTensor):
        return DTensor.from_local(
            values,
            moment.device_mesh,
            moment.placements,
            run_check=False,
            shape=moment.shape,
            stride=moment.stride(),
        ).cpu()
    return values.cpu()


@torch.no_grad()
def narrow(optimizer: Any, parameter: torch.Tensor, field: str, moment: torch.Tensor) -> Any:
    """A moment as the optimiser keeps it for `parameter`; what `wide` has made is what it was."""
    kept = optimizer._new_buffer(parameter.detach(), SIGNED[field])
    local, values = _local(kept), _local(moment)
    local.copy_(values.to(local.device))
    if hasattr(local, "codes"):
        # The largest number of a block need not have the code of 1: there is none of -1.
        block_NB = values.to(local.device).reshape(-1, local.block_size)
        top_N1 = block_NB.abs().argmax(1, keepdim=True)
        code_N1 = local.codes.view(-1, local.block_size).gather(1, top_N1)
        share_N = local.qmap[code_N1.int()].squeeze(1)
        exact_N = block_NB.gather(1, top_N1).squeeze(1) / share_N
        local.scale.copy_(torch.where(share_N == 0, local.scale, exact_N))
    return kept


def _local(tensor: torch.Tensor) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
