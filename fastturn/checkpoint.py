"""Atomic checkpoints: a folder under its final name is always whole.

A checkpoint is written beside its place, flushed to disk and renamed. A failed write (disk full)
removes what it left and leaves the older checkpoints as they were.

    checkpoints/000012-s1/   model.safetensors, optimizer.pt, state.json, trunks.pkl (mid-iteration)
    final/                   the model and tokenizer in Hugging Face format
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from fastturn.optim import Optimizers
from fastturn.types import Trunk


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the remedy."""


def save(
    folder: Path,
    model: nn.Module,
    optimizers: Optimizers,
    state: dict[str, Any],
    trunks: Sequence[Trunk] = (),
) -> None:
    """Write one checkpoint at `folder`, whole or not at all.

    `state` is JSON (cursor, totals, meter); `trunks` are those of a half-finished iteration.
    Raises `CheckpointError` when the disk refuses; older checkpoints are untouched.
    """

    def write(part: Path) -> None:
        save_model(model, str(part / "model.safetensors"))
        torch.save(optimizers.state_dict(), part / "optimizer.pt")
        (part / "trunks.pkl").write_bytes(pickle.dumps(list(trunks)))
        (part / "state.json").write_text(json.dumps(state))

    atomic_folder(folder, write)


def load_state(folder: Path) -> tuple[dict[str, Any], list[Trunk]]:
    """(state, trunks) as they were given to `save`. The pickle is the run's own: only resume from
    folders that you trust."""
    state = json.loads((folder / "state.json").read_text())
    return state, pickle.loads((folder / "trunks.pkl").read_bytes())


def load_weights(folder: Path, model: nn.Module, optimizers: Optimizers) -> None:
    """Restore model and optimiser in place."""
    load_model(model, str(folder / "model.safetensors"))
    optimizers.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None."""
    whole = [path for path in sorted(root.glob("[0-9]*")) if (path / "state.json").exists()]
    return whole[-1] if whole else None


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and leavings of interrupted writes."""
    for path in sorted(root.glob("[0-9]*"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".part-*"):
        shutil.rmtree(path, ignore_errors=True)


def atomic_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create or replace `folder` with what `write` puts into an empty folder, atomically."""
    part = folder.parent / f".part-{folder.name}-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        write(part)
        for path in part.rglob("*"):
            if path.is_file():
                _flush(path)
        _swap(part, folder)
    except (
        OSError,
        SafetensorError,
        RuntimeError,
    ) as error:  # torch reports a full disk as the last
        raise CheckpointError(
            f"could not write {folder}: {error}; free some disk space or choose another --out. "
            f"Older checkpoints are intact"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _swap(part: Path, folder: Path) -> None:
    """Rename `part` to `folder`; an older folder of that name is moved aside first."""
    old = folder.parent / f".part-old-{folder.name}"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
