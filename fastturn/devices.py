"""What GPUs can do at most, from the vendor's data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fastturn.config import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """`named` matches what the driver calls it; flops_s of bfloat16 and float16, dense; `kind` as
    in `Config.device`."""

    name: str
    named: str
    flops_s: float
    bytes_s: float
    memory_gib: float
    kind: Literal["cpu", "cuda"] = "cuda"

    @property
    def balance(self) -> float:
        """FLOPs per byte above which matrix work is the limit. Example: 153 on A100 80GB."""
        return self.flops_s / self.bytes_s


DEVICES = (
    Device("A100 80GB", r"A100.*80GB", 312e12, 2.039e12, 79.0),
    Device("H100", r"H100 80GB HBM3|H100 SXM", 989.4e12, 3.35e12, 79.0),
    Device("H200", r"H200(?! NVL)", 989.4e12, 4.8e12, 139.0),
    Device("B200", r"\bB200", 2250e12, 7.7e12, 179.0),
    # One core of a CPU: the order of magnitude, which runs correct (`calibrate.py`).
    Device("core", r"(?!)", 50e9, 10e9, 16.0, "cpu"),
)


def device_of(name: str) -> Device | None:
    """The device that the driver calls `name`; None for one without an entry.

    Example: `device_of("NVIDIA H200").name` is "H200"; "NVIDIA H100 PCIe" has no entry.
    """
    return next((one for one in DEVICES if re.search(one.named, name)), None)


def device_called(text: str) -> Device:
    """The one device whose name begins so, upper or lower case; `ConfigError` names those there
    are.

    Example: `device_called("a100").name` is "A100 80GB"; "H" could be H100 or H200.
    """
    found = [device for device in DEVICES if text and device.name.lower().startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(device.name for device in found or DEVICES)
    problem = "is more than one device" if found else "is not in the table of devices"
    raise ConfigError(f"--device {text!r} {problem}; expected one of {known}")
