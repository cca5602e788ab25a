"""Records as curves elsewhere: TensorBoard, W&B, Trackio; each is imported when it is asked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastturn.config import ConfigError
from fastturn.records import read_lines
from fastturn.timeline import WATCHERS

TRACKERS = ("tensorboard", "wandb", "trackio", *WATCHERS, "none")
_PLACE_KEYS = frozenset({"time", "iteration", "stage", "step"})  # where a record lies: no curves


class Tracker(Protocol):
    def log(self, record: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """`ConfigError` for a name that is none of `TRACKERS`."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"trackers={name!r}: expected any of {', '.join(TRACKERS)}")


def open_trackers(names: Sequence[str], out: Path, run_id: str) -> list[Tracker]:
    check_trackers(names)
    opened: list[Tracker] = []
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            opened.append(_TensorBoard(out))
        elif name not in (*WATCHERS, "none"):  # watchers are opened on every rank
            opened.append(_Hosted(name, out, run_id))
    return opened


def _import(module: str, tracker: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trackers={tracker!r}: the package {tracker} is missing or broken ({error}); "
            f"run `pip install {tracker}`, or set trackers=none"
        ) from error


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under "kind/name" and "kind/name/inner name".

    A stage's turn index and an evaluation's split are part of the name, because their records
    share a step: "stage/turn 2/loss", "eval/during/success".
    Example: `{"kind": "iteration", "success": .5, "endings": {"turns": 2}}` gives
    `{"iteration/success": .5, "iteration/endings/turns": 2.0}`.
    """
    prefix = str(record["kind"])
    if isinstance(record.get("split"), str):
        prefix += f"/{record['split']}"
    if isinstance(record.get("stage"), int):
        prefix += f"/turn {record['stage']}"
    found: dict[str, float] = {}
    for key, value in record.items():
        inner = value if isinstance(value, Mapping) else {None: value}
        for name, number in inner.items():
            if isinstance(number, int | float) and key not in _PLACE_KEYS:
                tag = f"{prefix}/{key}" if name is None else f"{prefix}/{key}/{name}"
                found[tag] = float(number)
    return found


def global_step(record: Mapping[str, Any], fallback: int = 0) -> int:
    """Where a record lies on the horizontal axis: its `step`, else its `iteration`."""
    for key in ("step", "iteration"):
        if isinstance(record.get(key), int):
            return int(record[key])
    return fallback


class _TensorBoard:
    """Event files in out/tensorboard, written without torch or TensorFlow.

    They are made again from records.jsonl when a run resumes, so that they never show steps
    which were cut off.
    """

    def __init__(self, out: Path) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _import("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _import("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        folder = out / "tensorboard"
        for stale in folder.glob("events.out.tfevents.*"):
            stale.unlink()
        self._writer = writer.EventFileWriter(str(folder), max_queue_size=1000, flush_secs=2)
        self._logged = 0
        for record in read_lines(out / "records.jsonl"):
            self.log(record)

    def log(self, record: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=number)
            for tag, number in scalars(record).items()
        ]
        event = self._event(
            wall_time=record["time"],
            step=global_step(record, self._logged),
            summary=self._summary(value=values),
        )
        self._writer.add_event(event)
        self._logged += 1

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """W&B or Trackio, which share their calls. One run per folder; a resume continues it."""

    def __init__(self, name: str, out: Path, run_id: str) -> None:
        module = _import(name, name)
        config = out / "config.json"
        settings = json.loads(config.read_text())["config"] if config.exists() else {}
        title = f"{out.resolve().name}-{run_id}"
        options: dict[str, Any] = {"project": "fastturn", "config": settings, "resume": "allow"}
        if name == "wandb":
            options |= {"name": title, "id": run_id, "dir": str(out)}
        else:
            options |= {"name": title}
        self._run = module.init(**options)
        self._logged = 0
        if name == "wandb":  # each kind of record has its own horizontal axis
            for kind in ("warm", "stage", "iteration", "eval", "ledger"):
                self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step")

    def log(self, record: Mapping[str, Any]) -> None:
        step = global_step(record, self._logged)
        self._run.log({**scalars(record), f"{record['kind']}/global_step": step})
        self._logged += 1

    def flush(self) -> None:
        """Both send in the background; there is nothing to force."""

    def close(self) -> None:
        self._run.finish()
