"""What may look at spans while they run: a timeline of every rank, NVTX ranges, torch's profiler.

    trackers=trace      out/trace.json, for ui.perfetto.dev or chrome://tracing
    trackers=nvtx       every span is a range in Nsight Systems and Nsight Compute
    trackers=profile    out/profile/rank-N.json: torch.profiler's trace of the second stage

They are asked for like trackers and, unlike them, run on every rank. What a rank has seen goes to
the leader with its event counts, so the timeline is one file that only the leader writes.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastturn.config import ConfigError

logger = logging.getLogger(__name__)
LOOP, ROLLOUTS = 0, 1  # lanes of a rank in the timeline
FOREIGN = 100_000  # processes of another trace are numbered from here on
_LANES = {LOOP: "training loop", ROLLOUTS: "rollouts beside it"}


class Watcher:
    """Sees spans, records and the news of other ranks; a kind does with them what it needs."""

    def begin(self, name: str) -> None:
        """A span has begun on the meter's thread."""

    def end(self, name: str, start_ns: int, end_ns: int) -> None:
        """The newest span has ended; times are of `time.perf_counter_ns`."""

    def aside(self, name: str, start_ns: int, end_ns: int) -> None:
        """A span of the rollouts' thread is over."""

    def log(self, record: Mapping[str, Any]) -> None:
        """A record was made."""

    def news(self) -> list[Any]:
        """What the leader should know, once."""
        return []

    def absorb(self, news: Sequence[Any]) -> None:
        """What another rank saw."""

    def flush(self) -> None:
        """Put everything on the disk."""

    def close(self) -> None:
        """The run is over."""


class Timeline(Watcher):
    """Spans and records in Chrome's trace format: a process for each rank, a lane for each thread.

    `path`: the file, in the leader; None elsewhere. A resumed run goes on in the same file, and a
    killed one leaves a file that viewers read (the format does not need its last bracket).
    Ranks are aligned by the wall clocks of their machines.
    """

    def __init__(self, rank: int, path: Path | None) -> None:
        self.rank = rank
        self._events: list[dict[str, Any]] = []
        self._named: set[tuple[int, int]] = set()
        self._unix_ns = time.time_ns() - time.perf_counter_ns()
        self._file = None
        if path is not None:
            before, end, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"},\n")
            self._file = path.open("wb", buffering=0)
            self._file.write(before + end or b"[\n")

    def end(self, name: str, start_ns: int, end_ns: int) -> None:
        self._add(name, LOOP, start_ns, end_ns)

    def aside(self, name: str, start_ns: int, end_ns: int) -> None:
        self._add(name, ROLLOUTS, start_ns, end_ns)

    def log(self, record: Mapping[str, Any]) -> None:
        place = {key: record[key] for key in ("iteration", "stage", "step") if key in record}
        mark = {"name": record["kind"], "ph": "i", "s": "p", "args": place}
        self._events.append(mark | self._place(LOOP, time.perf_counter_ns()))
        self.flush()

    def news(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def absorb(self, news: Sequence[dict[str, Any]]) -> None:
        self._events += news

    def flush(self) -> None:
        if self._file is None:
            return  # it travels to the leader
        for event in self.news():
            self._name(event["pid"], event["tid"])
            self._write(event)

    def close(self) -> None:
        if self._file is None:
            return
        self.flush()
        self._file.write(json.dumps(_process(self.rank)).encode() + b"\n]\n")
        self._file.close()

    def _add(self, name: str, lane: int, start_ns: int, end_ns: int) -> None:
        length = {"name": name, "ph": "X", "dur": (end_ns - start_ns) / 1000}
        self._events.append(length | self._place(lane, start_ns))

    def _place(self, lane: int, at_ns: int) -> dict[str, Any]:
        return {"ts": (at_ns + self._unix_ns) / 1000, "pid": self.rank, "tid": lane}

    def _name(self, rank: int, lane: int) -> None:
        if (rank, lane) not in self._named:
            self._named.add((rank, lane))
            self._write(_process(rank))
            named = {"name": "thread_name", "ph": "M", "args": {"name": _LANES[lane]}}
            self._write(named | {"pid": rank, "tid": lane})

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event).encode() + b",\n")


def _process(rank: int) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}


class Nvtx(Watcher):
    """Every span as an NVTX range of its thread. `ConfigError` without a CUDA build of torch."""

    def __init__(self) -> None:
        import torch

        self._nvtx: Any = torch.cuda.nvtx
        try:
            self._nvtx.mark("fastturn")
        except RuntimeError as error:
            raise ConfigError(
                f"trackers=nvtx: this torch ({torch.__version__}) has no NVTX, expected a CUDA "
                f"build; install one, or use trackers=trace, which needs none"
            ) from error

    def begin(self, name: str) -> None:
        self._nvtx.range_push(name)

    def end(self, name: str, start_ns: int, end_ns: int) -> None:
        self._nvtx.range_pop()


class Profile(Watcher):
    """torch.profiler from the first stage record of this process to the second one, spans as ranges
    in it. The first stage, with its compilations and first allocations, is not in it."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._stages = 0
        self._profiler: Any = None
        self._ranges: list[Any] = []

    def begin(self, name: str) -> None:
        if self._profiler is not None:
            from torch.profiler import record_function

            self._ranges.append(record_function(name).__enter__())

    def end(self, name: str, start_ns: int, end_ns: int) -> None:
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "stage":
            return
        from torch.profiler import profile

        self._stages += 1
        if self._stages == 1:
            self._profiler = profile()
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.stop()
            self._path.parent.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        if self._stages < 2:
            logger.warning(
                "trackers=profile: the second stage is profiled, and this process ended after %d; "
                "no profile was written",
                self._stages,
            )


def align(out: Path, traces: Sequence[Path]) -> Path:
    """Writes out/trace-aligned.json, a run's timeline with torch.profiler's traces of servers in
    it, and returns its path. Each of `traces` (.json or .json.gz, as vLLM writes them) says at what
    Unix time its own clock began, so their events move there. `ConfigError` names what is missing.

    Example: an event 5 ms behind a trace's beginning at Unix time 100 s lies at 100.005 s.
    """
    own = out / "trace.json"
    if not own.exists():
        raise ConfigError(f"{own}: no timeline to align with; train with trackers=trace")
    text = own.read_text().rstrip().removesuffix("]").rstrip().removesuffix(",")
    events = json.loads(f"{text}]")
    for number, path in enumerate(traces, 1):
        events += _shifted(path, FOREIGN * number)
    aligned = out / "trace-aligned.json"
    aligned.write_text(json.dumps(events))
    return aligned


def _shifted(path: Path, first: int) -> Iterator[dict[str, Any]]:
    """The events of another program's trace in Unix time, its processes numbered from `first`."""
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        began_us, events = trace["baseTimeNanoseconds"] / 1000, trace["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected a trace of torch.profiler that says when it began "
            f"({type(error).__name__}: {error}); name one that vLLM wrote"
        ) from error
    number: dict[Any, int] = {}
    for event in events:
        process = number.setdefault(event.get("pid"), first + len(number))
        if event.get("name") == "process_name":
            event["args"] = {"name": f"{path.name}: {event['args'].get('name', '')}"}
        moved = {"ts": event["ts"] + began_us} if "ts" in event else {}
        yield event | moved | {"pid": process}


WATCHERS = ("trace", "nvtx", "profile")


def open_watchers(names: Sequence[str], out: Path, rank: int) -> list[Watcher]:
    """Those that are among `names`, on rank `rank` of a run in the folder `out`.

    Example: `open_watchers(("tensorboard", "trace"), out, 0)` is one `Timeline`.
    """
    made: list[Watcher] = []
    for name in dict.fromkeys(names):
        if name == "trace":
            made.append(Timeline(rank, None if rank else out / "trace.json"))
        elif name == "nvtx":
            made.append(Nvtx())
        elif name == "profile":
            made.append(Profile(rank, out / "profile"))
    return made
