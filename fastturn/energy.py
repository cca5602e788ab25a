"""Joules of a rank's GPU, counted by NVML where it is there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Energy:
    """`joules()` since it was opened, None when nothing counts them, and then `note` says why."""

    read_mj: Callable[[], int] | None = None
    start_mj: int = 0
    note: str = ""

    def joules(self) -> float | None:
        return None if self.read_mj is None else (self.read_mj() - self.start_mj) / 1000


def open_energy(device: str) -> Energy:
    """The counter of the current GPU of this process; `device` as in torch ("cuda", "cpu").

    Needs NVIDIA's Python binding of NVML (`pip install nvidia-ml-py`) and a GPU from Volta on.
    Example: `open_energy("cpu").note` is "not measured: NVML counts GPUs, and this is a cpu run".
    """
    if device != "cuda":
        return Energy(note=f"not measured: NVML counts GPUs, and this is a {device} run")
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Energy(note="not measured: pynvml is missing (pip install nvidia-ml-py)")
    import torch

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        start_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return Energy(note=f"not measured: NVML says {error}")
    return Energy(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle), start_mj)
