"""Ways for weights to reach running servers; one interface, chosen by name.

file   a safetensors file in shared memory, read by our worker extension      one machine
nccl   packed broadcast into vLLM's weight-transfer engine                    GPUs of their own
ipc    CUDA IPC into the same engine, with sleeping                           one GPU for both
lora   an adapter folder                                                      LoRA training

None of them proves anything: `publish.prove_canary` does, the same way for all.
"""

from __future__ import annotations

from collections.abc import Callable

from fastturn.carriers.base import Carrier, FullWeights, PublishFailed, Refused, Weights
from fastturn.carriers.files import FileCarrier, LoraCarrier
from fastturn.carriers.ipc import Colocation, IpcCarrier
from fastturn.carriers.nccl import NcclCarrier

CARRIERS: dict[str, Callable[..., Carrier]] = {
    "file": FileCarrier,
    "nccl": NcclCarrier,
    "ipc": IpcCarrier,
    "lora": LoraCarrier,
}

__all__ = [
    "CARRIERS",
    "Carrier",
    "Colocation",
    "FileCarrier",
    "FullWeights",
    "IpcCarrier",
    "LoraCarrier",
    "NcclCarrier",
    "PublishFailed",
    "Refused",
    "Weights",
]
