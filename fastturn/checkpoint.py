"""Atomic checkpoints: a folder under its final name is always whole.

A checkpoint is written beside its place, flushed to disk and renamed. A failed write (disk full)
removes what it left and leaves the older checkpoints as they were. Training goes on meanwhile:

    main thread    begin: copy to host memory | next steps ...       | finish: wait, agree
    second thread                             | shards, flush, rename |

    checkpoints/000012-01-000600/   state.json, trunks.pkl (those of an iteration in hand),
                                    optimizer.json, shards of weights and moments (.distcp)
    final/                          the model and tokenizer in Hugging Face format

Shards carry names and global shapes, so a checkpoint loads on any number of ranks. Frozen weights
are not in it: they come from where the run took them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fastturn.dist import World
from fastturn.optim import Optimizers
from fastturn.sharding import trained
from fastturn.types import Trunk

# torch warns of one process whatever `no_dist` says, in a thread of its own when it writes.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the remedy."""


class Refusal(NamedTuple):
    """What is said when a disk does not give or take something, and the errors that mean it."""

    text: str
    errors: tuple[type[BaseException], ...]


WRITE = Refusal(
    "could not write {}; free some disk space or choose another --out. Older checkpoints are "
    "intact",
    (OSError, RuntimeError, SafetensorError, CheckpointException),  # torch: a full disk is any
)
READ = Refusal(
    "could not read {}; expected a whole checkpoint of this model, written by this version, on a "
    "file system that every rank sees. Remove that folder to resume from the one before it",
    (Exception, CheckpointException),  # damaged pickles raise anything
)


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that is being written beside what goes on."""

    folder: Path
    world: World
    done: Future[None]

    def wait(self) -> None:
        """Until this rank's part is over, well or not."""
        wait([self.done])

    def finish(self) -> None:
        """Wait, on every rank. Raises `CheckpointError` on all of them when the disk refused one;
        older checkpoints are untouched."""
        _on_all(self.world, self.done.result, WRITE, self.folder)


def save(folder: Path, *what: Any, **more: Any) -> None:
    """Write one checkpoint at `folder`, whole or not at all: `begin` and `finish`."""
    begin(folder, *what, **more).finish()


def begin(
    folder: Path,
    model: nn.Module,
    optimizers: Optimizers,
    state: dict[str, Any],
    trunks: Sequence[Trunk] = (),
    world: World | None = None,
) -> Writing:
    """Begin to write one checkpoint at `folder`: what it holds is as of now, whatever is trained
    before it is whole. Every rank its own shards. The one before must be finished.

    `state` is JSON (cursor, totals, meter); `trunks` are those of a half-finished iteration; both
    are the leader's. All ranks see the same folder. Raises `CheckpointError` on every rank when
    nothing can be written there.
    """
    world = world or World.single()
    part = folder.parent / f".part-{folder.name}"
    files = {
        "trunks.pkl": pickle.dumps(list(trunks)),
        "optimizer.json": json.dumps({"steps": optimizers.step_count}).encode(),
        "state.json": json.dumps(state).encode(),
    }

    def empty() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    def finish(shards: Future[Any]) -> None:
        try:
            shards.result()  # of all ranks
            if world.leader:
                for name, content in files.items():
                    (part / name).write_bytes(content)
                _flush_files(part)
                _swap(part, folder)
        finally:
            if world.leader:
                shutil.rmtree(part, ignore_errors=True)

    _on_all(world, empty if world.leader else _nothing, WRITE, folder)
    shards: Any = dcp.async_save(
        _tensors(model, optimizers),
        storage_writer=dcp.FileSystemWriter(part),
        process_group=world.background,
        no_dist=world.size == 1,
    )
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    done = pool.submit(finish, shards)
    pool.shutdown(wait=False)
    return Writing(folder, world, done)


def load_state(folder: Path) -> tuple[dict[str, Any], list[Trunk]]:
    """(state, trunks) as they were given to `save`. The pickle is the run's own: only resume from
    folders that you trust. Raises `CheckpointError` when the files are damaged or not there."""

    def read() -> tuple[dict[str, Any], list[Trunk]]:
        state = json.loads((folder / "state.json").read_text())
        return state, pickle.loads((folder / "trunks.pkl").read_bytes())

    return _on_all(World.single(), read, READ, folder)


def load_weights(
    folder: Path, model: nn.Module, optimizers: Optimizers, world: World | None = None
) -> None:
    """Restore model and optimiser in place, on however many ranks there are now.

    Raises `CheckpointError` on every rank for a checkpoint that one of them cannot read, that is
    damaged, or of another model.
    """
    world = world or World.single()
    reader = dcp.FileSystemReader(folder)

    def look() -> tuple[dict[str, torch.Tensor], int]:
        metadata = reader.read_metadata()
        _require_intact(folder, metadata, world)
        saved = metadata.state_dict_metadata
        moments = [key.removeprefix("optimizer.") for key in saved if key.startswith("optimizer.")]
        optimizers.make_room(model, moments)
        steps = json.loads((folder / "optimizer.json").read_text())["steps"]
        return _tensors(model, optimizers), steps

    tensors, steps = _on_all(world, look, READ, folder)

    def read() -> None:
        dcp.load(tensors, storage_reader=reader, no_dist=world.size == 1)
        optimizers.settle()

    _on_all(world, read, READ, folder)
    optimizers.resume_at(steps)


def _require_intact(folder: Path, metadata: Metadata, world: World) -> None:
    """`ValueError` when a shard is not what was written. Every rank looks at its share of them."""
    shards = sorted(metadata.storage_data.values(), key=lambda at: (at.relative_path, at.offset))
    for shard in shards[world.rank :: world.size]:
        with (folder / shard.relative_path).open("rb") as file:
            file.seek(shard.offset)
            content = file.read(shard.length)
        if not _is_intact(content):
            raise ValueError(f"{shard.relative_path} is damaged at or behind byte {shard.offset}")


def _is_intact(content: bytes) -> bool:
    """torch saves a tensor as a zip with a checksum, which it does not compare when it reads."""
    try:
        return zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    except zipfile.BadZipFile:
        return False


def _tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """What training changes, and moments, by name, split as they are."""
    tensors = {f"model.{name}": tensor for name, tensor in trained(model).items()}
    return tensors | {f"optimizer.{key}": t for key, t in optimizers.tensors(model).items()}


def _nothing() -> None:
    """What the other ranks do while the leader writes."""


def _on_all(world: World, action: Callable[[], T], refusal: Refusal, folder: Path) -> T:
    """Its result, on every rank; `CheckpointError` on all of them when it fails on one."""
    result: Any = None
    failure: BaseException | None = None
    cause: tuple[int, str] | None = None
    try:
        result = action()
    except refusal.errors as error:
        failure, cause = error, _cause(error, world.rank)
    for told in world.all_gather_objects(cause):
        if told is not None:
            by = f" (rank {told[0]})" if world.size > 1 else ""
            raise CheckpointError(refusal.text.format(f"{folder}{by}: {told[1]}")) from failure
    return result


def _cause(error: BaseException, rank: int) -> tuple[int, str]:
    """Which rank failed and why; torch raises what happened to one of them on all."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = next(iter(failures.items()))
    return rank, f"{type(error).__name__}: {error}"


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

    def swap() -> None:
        part.mkdir(parents=True)
        write(part)
        _flush_files(part)
        _swap(part, folder)

    try:
        _on_all(World.single(), swap, WRITE, folder)
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


def _flush_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
