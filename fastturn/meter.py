"""Where the time went and what happened: exclusive spans, event counts, records and the bill.

    with meter.span("sibling_decode"): ...      one clock, a stack of names: spans never overlap
    meter.count("bad_json")                     events, until the next record takes them
    meter.record("stage", {...})                one line of records.jsonl, and the trackers
    meter.summary({...})                        summary.json: values, ledger, versions, commit

The ledger is exact by construction: a single monotonic clock is read at every push and pop, and the
nanoseconds since the previous reading go to the name on top of the stack ("other" when it is
empty). Wall-clock is defined as their sum, so spans x devices = device-seconds, idle included.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import resource
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastturn.config import ConfigError

# Canonical span names; others are allowed and are reported under their own name.
SPANS: dict[str, str] = {
    "setup": "loading data, tokenizer, model and sampler",
    "warm_start": "supervised steps on demonstrations",
    "trunk_decode": "sampling the trunks, turn by turn",
    "prefill": "computing contexts before sampling",
    "sibling_decode": "sampling the siblings of a stage (or the rollouts of GRPO)",
    "environment": "waiting for environments and tools",
    "publish": "handing new weights to the sampler, with the proof that they arrived",
    "score": "log-probabilities without gradient (reference or behaviour policy)",
    "forward_backward": "loss and gradients",
    "optimizer": "gradient norm and optimizer step",
    "pack": "credit and packing",
    "checkpoint": "saving",
    "evaluation": "held-out tasks",
    "report": "writing the report",
    "lost": "work of a killed process that was done again after the resume",
    "other": "everything outside a span",
}
TIMING_KEYS = frozenset({"spans", "wall_s", "cpu_s", "tokens_per_s", "time"})
TRACKERS = ("tensorboard", "wandb", "trackio", "none")
NONFINITE = "nonfinite_values"  # the event that counts NaN and Inf written as null
_PLACE_KEYS = frozenset({"time", "iteration", "stage", "step"})  # where a record lies: no curves
_PACKAGES = ("torch", "transformers", "numpy", "fastturn")


def untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` without its timings, at any depth: what two runs of one seed have in common.

    Example: `untimed({"loss": .5, "wall_s": 3.0})` gives `{"loss": .5}`.
    """
    return {
        key: untimed(value) if isinstance(value, Mapping) else value
        for key, value in record.items()
        if key not in TIMING_KEYS
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file; [] when it is missing. A half-written last line is left out.

    Raises `ValueError` naming file and line for anything else that is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is half a line
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}, line {number}: expected one JSON object a line, found {line[:60]!r}; "
                f"delete the line"
            )
        records.append(record)
    return records


def plain(value: Any, where: str = "value") -> tuple[Any, int]:
    """`value` as JSON types, and how many NaN or Inf became None on the way.

    Arrays and tensors become (nested) lists or numbers; keys become strings.
    Example: `plain({"loss": nan, "n": np.int64(2)})` gives `({"loss": None, "n": 2}, 1)`.
    Raises `TypeError` naming the key for a value that JSON cannot hold.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if value is None or isinstance(value, bool | int | str):
        return value, 0
    if isinstance(value, os.PathLike):
        return os.fspath(value), 0
    if isinstance(value, Mapping):
        pairs = {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
        return {k: item for k, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, Sequence | set | frozenset):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return [item for item, _ in items], sum(n for _, n in items)
    raise TypeError(f"{where}: expected numbers, text, lists or mappings, got {type(value)}")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` under the final name only when it is whole and on the disk."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def versions() -> dict[str, str | None]:
    """Version of Python and of the packages that decide a run's numbers; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str:
    """Git commit of the source tree, "+dirty" when files differ from it.

    The installed version ("0.1.0") when the package does not run from a checkout, "unknown" when
    it is not installed either. Never raises.
    """
    root = Path(__file__).resolve().parent.parent
    try:
        # Not any repository that happens to lie above an environment folder: this tree's own.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root:
            head = _git(root, "rev-parse", "HEAD")
            return head + ("+dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        pass  # no git, no commit yet, or not a checkout
    return versions()["fastturn"] or "unknown"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def _cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _peak_rss_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class _Lines:
    """A jsonl file that only grows by whole lines; `length` is its size in bytes."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self.length = length
        self._file = path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if size < length:
            self._file.close()
            raise ValueError(
                f"{path} holds {size} bytes, the checkpoint was made when it held {length}; "
                f"restore the file, or start again in another folder"
            )
        with path.open("rb") as file:
            file.seek(length)
            self.dropped = file.read()
        self._file.truncate(length)

    def append(self, record: Mapping[str, Any]) -> None:
        """One line in one write. A failed write (disk full) leaves no half line, and raises."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        done = 0
        try:
            while done < len(line):
                done += self._file.write(line[done:])
        except BaseException:
            self._file.truncate(self.length)
            raise
        self.length += len(line)

    def sync(self) -> int:
        os.fsync(self._file.fileno())
        return self.length

    def close(self) -> None:
        self._file.close()


class Meter:
    """Spans, counts and records of one run, in the folder `out` (made if missing).

    `trackers`: any of "tensorboard" (event files in out/tensorboard), "wandb", "trackio", "none".
    `devices`: how many are held, so device-seconds = wall-clock x devices; `device_kind`: "cpu",
    "cuda", ... goes beside gpu_hours so that the unit is honest.
    `state`: from `state()`; totals continue and records.jsonl and samples.jsonl are cut to their
    length at that moment. What is cut was paid for: its time becomes the span "lost" (a lower
    bound: a killed process does not say how long it lived after its last record).
    None: the run begins, and both files with it.

    Spans belong to the thread that made the meter. Raises `ConfigError` for an unknown or missing
    tracker, `ValueError` when a file is shorter than `state` says.
    Example: a span of 3 s that holds one of 1 s adds 2 s to its own name.
    """

    def __init__(
        self,
        out: Path,
        trackers: Sequence[str] = (),
        devices: int = 1,
        state: Mapping[str, Any] | None = None,
        *,
        device_kind: str = "cpu",
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        state = state or {}
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.devices, self.device_kind = devices, device_kind
        self._clock = clock
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._spans_ns: Counter[str] = Counter(state.get("spans_ns", {}))
        self._recorded_ns: Counter[str] = Counter(state.get("recorded_ns", {}))
        self._counts: Counter[str] = Counter(state.get("counts", {}))
        self._totals: Counter[str] = Counter(state.get("counts_total", {}))
        self._cpu_before_s: float = state.get("cpu_s", 0.0)
        self._cpu_recorded_s: float = state.get("cpu_recorded_s", 0.0)
        self._peak_rss_gib: float = state.get("peak_rss_gib", 0.0)
        self._run_id: str = state.get("run_id") or uuid.uuid4().hex[:8]
        self._records = _Lines(self.out / "records.jsonl", state.get("records_bytes", 0))
        self._samples = _Lines(self.out / "samples.jsonl", state.get("samples_bytes", 0))
        self._add_lost(self._records.dropped)
        self._trackers = _open_trackers(trackers, self.out, self._run_id)
        self._cpu_start_s = _cpu_s()
        self._mark_ns = clock()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time inside goes to `name`, except what a nested span takes for itself."""
        assert threading.get_ident() == self._thread, "spans belong to the meter's own thread"
        self._tick()
        self._stack.append(name)
        try:
            yield
        finally:
            self._tick()
            self._stack.pop()

    def count(self, name: str, n: int = 1) -> None:
        """`n` more events of this name; they are written by the next `record`."""
        self._counts[name] += n

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Appends {"kind", **values, "counts", "spans", "wall_s", "cpu_s", "time"} as one line.

        counts, spans, wall_s and cpu_s are those since the previous record of any kind, so that
        they add up over the file; `time` is the Unix time. `values["counts"]` is added to counts.
        NaN and Inf become null and are counted as "nonfinite_values".
        """
        body, nonfinite = plain(dict(values), kind)
        counts = self._counts + Counter(body.pop("counts", {}))
        if nonfinite:
            counts[NONFINITE] += nonfinite
        self._tick()
        spans_ns = self._spans_ns - self._recorded_ns
        cpu_s = self._cpu_total_s()
        record = {
            "kind": kind,
            **body,
            "counts": dict(sorted(counts.items())),
            "spans": _seconds(spans_ns),
            "wall_s": spans_ns.total() / 1e9,
            "cpu_s": round(cpu_s - self._cpu_recorded_s, 6),
            "time": round(time.time(), 3),
        }
        self._records.append(record)
        self._counts.clear()
        self._totals.update(counts)
        self._recorded_ns = Counter(self._spans_ns)
        self._cpu_recorded_s = cpu_s
        for tracker in self._trackers:
            tracker.log(record)

    def sample(self, values: Mapping[str, Any]) -> None:
        """Appends one transcript to samples.jsonl."""
        self._samples.append(plain(dict(values), "sample")[0])

    def ledger(self) -> dict[str, Any]:
        """Totals since the run began, earlier processes of a resumed run included.

        wall_s = sum of spans; device_seconds = wall_s x devices; gpu_hours = device_seconds / 3600
        (hours of the device named by `device_kind`, which may be a CPU).
        """
        self._tick()
        wall_s = self._spans_ns.total() / 1e9
        return {
            "wall_s": wall_s,
            "cpu_s": round(self._cpu_total_s(), 6),
            "device_seconds": wall_s * self.devices,
            "gpu_hours": wall_s * self.devices / 3600,
            "devices": self.devices,
            "device_kind": self.device_kind,
            "peak_rss_gib": round(max(self._peak_rss_gib, _peak_rss_gib()), 4),
            "spans": _seconds(self._spans_ns),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON types); the files are on the disk up to the lengths in it.

        Call it outside records: events and spans that no record has taken yet are in it too.
        """
        self._tick()
        return {
            "spans_ns": dict(self._spans_ns),
            "recorded_ns": dict(self._recorded_ns),
            "counts": dict(self._counts),
            "counts_total": dict(self._totals),
            "cpu_s": self._cpu_total_s(),
            "cpu_recorded_s": self._cpu_recorded_s,
            "peak_rss_gib": max(self._peak_rss_gib, _peak_rss_gib()),
            "run_id": self._run_id,
            "records_bytes": self._records.sync(),
            "samples_bytes": self._samples.sync(),
        }

    def summary(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes summary.json (whole or not at all) and returns it: `values`, event totals,
        ledger, versions and commit."""
        body, nonfinite = plain(dict(values), "summary")
        counts = self._totals + self._counts
        if nonfinite:
            counts[NONFINITE] += nonfinite
        summary = {
            **body,
            "counts": dict(sorted(counts.items())),
            **self.ledger(),
            "versions": versions(),
            "commit": commit(),
        }
        write_json(self.out / "summary.json", summary)
        for tracker in self._trackers:
            tracker.flush()
        return summary

    def close(self) -> None:
        """Closes files and trackers; nothing can be recorded afterwards."""
        for tracker in self._trackers:
            tracker.close()
        self._records.close()
        self._samples.close()

    def _tick(self) -> None:
        now_ns = self._clock()
        self._spans_ns[self._stack[-1] if self._stack else "other"] += now_ns - self._mark_ns
        self._mark_ns = now_ns

    def _cpu_total_s(self) -> float:
        return self._cpu_before_s + _cpu_s() - self._cpu_start_s

    def _add_lost(self, dropped: bytes) -> None:
        for line in dropped.split(b"\n")[:-1]:
            record = json.loads(line)
            lost_ns = round(record["wall_s"] * 1e9)
            self._spans_ns["lost"] += lost_ns
            self._recorded_ns["lost"] += lost_ns  # no record of this process shows it as its own
            self._cpu_before_s += record["cpu_s"]
            self._cpu_recorded_s += record["cpu_s"]


def _seconds(spans_ns: Mapping[str, int]) -> dict[str, float]:
    """Seconds by name: canonical names in their order, then the others; empty ones left out."""
    order = {name: i for i, name in enumerate(SPANS)}
    names = sorted(spans_ns, key=lambda name: (order.get(name, len(order)), name))
    return {name: spans_ns[name] / 1e9 for name in names if spans_ns[name]}


class _Tracker(Protocol):
    def log(self, record: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def _open_trackers(names: Sequence[str], out: Path, run_id: str) -> list[_Tracker]:
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"trackers={name!r}: expected any of {', '.join(TRACKERS)}")
    opened: list[_Tracker] = []
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            opened.append(_TensorBoard(out))
        elif name != "none":
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
            for kind in ("warm", "stage", "iteration", "eval"):
                self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step")

    def log(self, record: Mapping[str, Any]) -> None:
        step = global_step(record, self._logged)
        self._run.log({**scalars(record), f"{record['kind']}/global_step": step})
        self._logged += 1

    def flush(self) -> None:
        """Both send in the background; there is nothing to force."""

    def close(self) -> None:
        self._run.finish()
