"""Weights through files: a safetensors file for whole models, an adapter folder for LoRA.

The folder must be one that trainer and server both see; on one machine shared memory, which is
never written to a disk. Files appear under their name only when they are whole, and are removed
when the server has read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fastturn.carriers.base import Refused, Weights, exchange
from fastturn.carriers.base import each as at_each
from fastturn.sampler.server import EngineError, Server

SHARED_MEMORY = Path("/dev/shm")


def shared_folder() -> Path:
    """Shared memory where there is some, else the folder for temporary files."""
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if usable else Path(tempfile.gettempdir())


def write_tensors(weights: Weights, path: Path) -> None:
    """One safetensors file, whole under its name or absent. `EngineError` when it cannot be."""
    part = path.with_name(f".{path.name}.part")
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_unshared(tensors), part)
        part.rename(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        needed = sum(t.numel() * t.element_size() for t in tensors.values()) / 2**30
        raise EngineError(
            f"cannot write {needed:.3g} GiB ({error}); nothing was published; free some space or "
            f"give the carrier another folder",
            phase="write weights",
            url=str(path),
        ) from error


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share memory (a tied head) as copies, which is what the file format needs."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


class FileCarrier:
    """Whole models through a file, read by the worker extension of `fastturn serve`.

    Exact on CPU and GPU, tied heads included. `folder`: where trainer and servers both look.
    Example: `FileCarrier().send(model.named_parameters(), 3, [Server(url)])`.
    """

    name = "file"

    def __init__(self, folder: Path | None = None, timeout_s: float = 600.0) -> None:
        self.folder, self.timeout_s = folder or shared_folder(), timeout_s

    def send(self, weights: Weights, version: int, servers: Sequence[Server]) -> None:
        path = self.folder / f"fastturn-{os.getpid()}-{id(self):x}-{version}.safetensors"
        write_tensors(weights, path)  # before the pause: servers still sample meanwhile

        def load(server: Server) -> None:
            try:
                answers = server.rpc("load_file", [str(path)], self.timeout_s)
            except EngineError as error:
                if "attribute 'load_file'" in str(error):
                    raise Refused(
                        "the server runs without the worker extension; start it with the command "
                        "that fastturn serve prints",
                        phase="load weights",
                        url=server.url,
                        status=error.status,
                    ) from error
                raise
            _check_answers(server, answers)

        try:
            exchange(servers, version, lambda paused: at_each(paused, load), self.timeout_s)
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is kept."""


def _check_answers(server: Server, answers: Sequence[Any]) -> None:
    """Raise what the workers say: `Refused` when none of them changed anything, else
    `EngineError`."""
    failed = [a for a in answers if not (isinstance(a, Mapping) and a.get("ok") is True)]
    if not failed:
        return
    first = failed[0].get("error") if isinstance(failed[0], Mapping) else f"{failed[0]!r:.100}"
    untouched = [isinstance(a, Mapping) and a.get("changed") is False for a in failed]
    if len(failed) == len(answers) and all(untouched):
        raise Refused(
            f"{first}; publish the model that the server was started with, from a folder that it "
            f"can read",
            phase="load weights",
            url=server.url,
        )
    raise EngineError(
        f"{len(failed)} of {len(answers)} workers failed: {first}; restart the server",
        phase="load weights",
        url=server.url,
    )


class LoraCarrier:
    """LoRA adapters through a folder and /v1/load_lora_adapter, replacing the one before in place.

    `config`: the adapter's configuration as PEFT writes it (r, lora_alpha, target_modules, …).
    Weights have PEFT's names (`base_model.model.….lora_A.weight`). Completions must be asked for
    with `model=adapter`. The newest folder stays: a server may read it again.
    """

    name = "lora"

    def __init__(
        self,
        config: Mapping[str, Any],
        adapter: str = "policy",
        folder: Path | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **config}
        self.adapter, self.timeout_s = adapter, timeout_s
        self.folder = folder or shared_folder()
        self._last: Path | None = None

    def send(self, weights: Weights, version: int, servers: Sequence[Server]) -> None:
        path = self.folder / f"fastturn-lora-{os.getpid()}-{id(self):x}-{version}"
        write_tensors(weights, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(self.config))

        def load(server: Server) -> None:
            try:
                server.load_adapter(self.adapter, str(path))
            except EngineError as error:
                if error.status is None or error.status >= 500:
                    raise
                text = str(error).removeprefix(f"{error.phase} at {error.url}: ")
                raise Refused(
                    text, phase=error.phase, url=error.url, status=error.status
                ) from error  # fmt: skip

        try:
            exchange(servers, version, lambda paused: at_each(paused, load), self.timeout_s)
        except EngineError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        self.close()
        self._last = path

    def close(self) -> None:
        """Remove the adapter's folder."""
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
            self._last = None
