"""Peak memory of one update in a process of its own, as the operating system counts it.

What torch, its matrix libraries and Python take together: resident memory at its highest during one
repetition, beyond what was resident before it (model, inputs, loaded libraries). The C library is
told to give every freed tensor back at once, so that the peak is what is in use and not what past
sizes left behind: it repeats to a few hundred KiB. Linux with glibc only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import torch

from .cases import StepCase

WARM = {"context": 64, "siblings": 2, "tokens": 16}  # loads libraries, allocates nothing that lasts

MMAP_THRESHOLD = -3  # of mallopt: allocations from this size on are pages of their own


def peak_bytes(case: StepCase, layout: str, threads: int) -> int:
    """Bytes beyond those resident before; the gradients of all parameters are among them.

    `MemoryError` when the operating system ended the process.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(_measure, case, layout, threads).result()
        except BrokenProcessPool as error:
            raise MemoryError(
                f"{case.name} {layout}: the process was ended from outside, most likely for its "
                f"memory; expected it to fit, choose fewer siblings, tokens or layers"
            ) from error


def _measure(case: StepCase, layout: str, threads: int) -> int:
    from .layouts import Update

    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    torch.set_num_threads(threads)
    Update(replace(case, layers=1, **WARM)).providers()[layout]()
    provider = Update(case).providers()[layout]
    before = restart_peak()
    kept = provider()
    del kept
    return resident_peak() - before


def restart_peak() -> int:
    """Resident bytes now, from which the peak counts again."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def resident_peak() -> int:
    """Most resident bytes since `restart_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: expected a line {name}, got none; memory needs Linux")
