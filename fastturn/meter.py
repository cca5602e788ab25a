"""Where the time went and what happened: exclusive spans, event counts, records and the bill.

    with meter.span("sibling_decode"): ...      one clock, a stack of names: spans never overlap
    meter.count("bad_json")                     events, until the next record takes them
    meter.record("stage", {...})                one line of records.jsonl, and the trackers
    meter.summary({...})                        summary.json: values, ledger, versions, commit

The ledger is exact by construction: a single monotonic clock is read at every push and pop, and the
nanoseconds since the previous reading go to the name on top of the stack ("other" when it is
empty). Wall-clock is defined as their sum, and so are device-seconds, idle included (`ledger.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastturn.energy import Energy
from fastturn.ledger import Held, Servers, curves, money
from fastturn.provenance import commit, versions
from fastturn.records import Lines, plain, write_json
from fastturn.timeline import Watcher
from fastturn.trackers import open_trackers

# Canonical span names; others are allowed and are reported under their own name.
SPANS: dict[str, str] = {
    "setup": "loading data, tokenizer, model and sampler",
    "warm_start": "supervised steps on demonstrations",
    "trunk_decode": "sampling the trunks, turn by turn",
    "prefill": "computing contexts before sampling",
    "sibling_decode": "sampling the siblings of a stage (or whole episodes)",
    "exchange": "handing rollouts to all ranks, waiting for the slowest of them",
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
NONFINITE = "nonfinite_values"  # the event that counts NaN and Inf written as null


class Meter:
    """Spans, counts and records of one run, in the folder `out` (made if missing).

    `trackers`: any of `TRACKERS`, for example "tensorboard" (event files in out/tensorboard).
    `watchers`: what sees every span (`timeline.open_watchers`).
    `devices`: how many train; those of servers are named by `serve`. `device_kind`: "cpu", "cuda",
    ... goes beside gpu_hours so that the unit is honest. `energy`: counts this rank's joules.
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
        watchers: Sequence[Watcher] = (),
        energy: Energy = Energy(note="not measured"),  # noqa: B008 - immutable
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        state = state or {}
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.device_kind = device_kind
        self._clock = clock
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._spans_ns: Counter[str] = Counter(state.get("spans_ns", {}))
        self._recorded_ns: Counter[str] = Counter(state.get("recorded_ns", {}))
        self._held = Held(devices, state.get("held", {}))
        self._energy, self._energy_before_j = energy, state.get("energy_j", 0.0)
        self._counts: Counter[str] = Counter(state.get("counts", {}))
        self._totals: Counter[str] = Counter(state.get("counts_total", {}))
        self._cpu_before_s: float = state.get("cpu_s", 0.0)
        self._cpu_recorded_s: float = state.get("cpu_recorded_s", 0.0)
        self._peak_rss_gib: float = state.get("peak_rss_gib", 0.0)
        self._run_id: str = state.get("run_id") or uuid.uuid4().hex[:8]
        self._records = Lines(self.out / "records.jsonl", state.get("records_bytes", 0))
        self._samples = Lines(self.out / "samples.jsonl", state.get("samples_bytes", 0))
        self._add_lost(self._records.dropped)
        self._watchers = watchers
        self._trackers = [*open_trackers(trackers, self.out, self._run_id), *watchers]
        self._cpu_start_s = _cpu_s()
        self._mark_ns = clock()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time inside goes to `name`, except what a nested span takes for itself."""
        assert threading.get_ident() == self._thread, "spans belong to the meter's own thread"
        return _Span(self, name)

    def enter(self, name: str) -> int:
        """A span begins; returns the clock."""
        self._tick()
        self._stack.append(name)
        for watcher in self._watchers:
            watcher.begin(name)
        return self._mark_ns

    def leave(self, start_ns: int) -> None:
        """The newest span, which began then, ends."""
        self._tick()
        name = self._stack.pop()
        for watcher in self._watchers:
            watcher.end(name, start_ns, self._mark_ns)

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """A span of another thread: watchers see it, the ledger does not."""
        with _aside(self._watchers, name):
            yield

    def count(self, name: str, n: int = 1) -> None:
        """`n` more events of this name; they are written by the next `record`."""
        self._counts[name] += n

    def serve(self, servers: Servers) -> None:
        """These sample for the run, on devices of their own."""
        self._held.serve(servers)

    def drain(self) -> dict[str, Any]:
        """The leader keeps its own; see `Follower.drain`."""
        return {}

    def absorb(self, news: Mapping[str, Any]) -> None:
        """Take in the events, CPU seconds, energy and peak memory of another rank."""
        self._counts.update(news.get("counts", {}))
        self._cpu_before_s += news.get("cpu_s", 0.0)
        self._energy_before_j += news.get("energy_j", 0.0)
        self._peak_rss_gib = max(self._peak_rss_gib, news.get("peak_rss_gib", 0.0))
        for watcher, seen in zip(self._watchers, news.get("watched", ()), strict=False):
            watcher.absorb(seen)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Appends {"kind", **values, "counts", "spans", "wall_s", "cpu_s", "device_seconds",
        "time"} as one line.

        counts, spans, wall_s and cpu_s are those since the previous record of any kind, so that
        they add up over the file; device_seconds is what the run has cost until now; `time` is the
        Unix time. `values["counts"]` is added to counts.
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
            "device_seconds": self._held.total_ns / 1e9,
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

        wall_s = sum of spans; device_seconds = sum over `pools` of devices held x wall-clock;
        gpu_hours = device_seconds / 3600 (hours of the device named by `device_kind`, which may be
        a CPU). `devices` are those of all pools now. `idle`: device-seconds by who waits for what.
        energy_kwh: of the trainer's GPUs, None when not measured (`energy_note` says why).
        """
        self._tick()
        pools = self._held.pools()
        energy_j = self._energy_total_j()
        return {
            "wall_s": self._spans_ns.total() / 1e9,
            "cpu_s": round(self._cpu_total_s(), 6),
            "device_seconds": self._held.total_ns / 1e9,
            "gpu_hours": self._held.total_ns / 1e9 / 3600,
            "devices": sum(pool["devices"] for pool in pools.values()),
            "device_kind": self.device_kind,
            "peak_rss_gib": round(max(self._peak_rss_gib, _peak_rss_gib()), 4),
            "spans": _seconds(self._spans_ns),
            "pools": pools,
            "idle": self._held.idle(),
            "energy_kwh": None if energy_j is None else energy_j / 3.6e6,
            "energy_note": self._energy.note,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON types); the files are on the disk up to the lengths in it.

        Call it outside records: events and spans that no record has taken yet are in it too.
        """
        self._tick()
        return {
            "spans_ns": dict(self._spans_ns),
            "recorded_ns": dict(self._recorded_ns),
            "held": self._held.state(),
            "energy_j": self._energy_total_j() or 0.0,
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
        ledger, money if `values` has a price, versions and commit. Trackers get the ledger."""
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
        summary |= money(summary)
        write_json(self.out / "summary.json", summary)
        for tracker in self._trackers:
            tracker.log(curves(summary) | {"time": round(time.time(), 3)})
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
        self._add(self._stack[-1] if self._stack else "other", now_ns - self._mark_ns)
        self._mark_ns = now_ns

    def _add(self, name: str, ns: int) -> None:
        self._spans_ns[name] += ns
        self._held.add(name, ns)

    def _energy_total_j(self) -> float | None:
        joules = self._energy.joules()
        return None if joules is None else self._energy_before_j + joules

    def _cpu_total_s(self) -> float:
        return self._cpu_before_s + _cpu_s() - self._cpu_start_s

    def _add_lost(self, dropped: bytes) -> None:
        for line in dropped.split(b"\n")[:-1]:
            record = json.loads(line)
            lost_ns = round(record["wall_s"] * 1e9)
            self._add("lost", lost_ns)
            self._recorded_ns["lost"] += lost_ns  # no record of this process shows it as its own
            self._cpu_before_s += record["cpu_s"]
            self._cpu_recorded_s += record["cpu_s"]


class _Span:
    """A class, because thousands of spans are entered an iteration and a generator costs more."""

    __slots__ = ("_meter", "_name", "_start_ns")

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter, self._name = meter, name

    def __enter__(self) -> None:
        self._start_ns = self._meter.enter(self._name)

    def __exit__(self, *exception: object) -> None:
        self._meter.leave(self._start_ns)


class Follower:
    """The meter of a rank that writes nothing: counts, CPU seconds, energy and what its `watchers`
    saw wait here until the leader takes them (`drain`, `Meter.absorb`)."""

    def __init__(
        self,
        watchers: Sequence[Watcher] = (),
        energy: Energy = Energy(note="not measured"),  # noqa: B008 - immutable
    ) -> None:
        self._watchers, self._energy = watchers, energy
        self._energy_drained_j = 0.0
        self._counts: Counter[str] = Counter()
        self._cpu_drained_s = 0.0

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exception: object) -> None:
        for watcher in self._watchers:
            watcher.close()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Seen by watchers. The ledger's time is the leader's to tell: all ranks are held as long
        as it runs."""
        start_ns = time.perf_counter_ns()
        for watcher in self._watchers:
            watcher.begin(name)
        try:
            yield
        finally:
            for watcher in self._watchers:
                watcher.end(name, start_ns, time.perf_counter_ns())

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """A span of another thread, for watchers."""
        with _aside(self._watchers, name):
            yield

    def count(self, name: str, n: int = 1) -> None:
        """`n` more events of this name, for the leader."""
        self._counts[name] += n

    def drain(self) -> dict[str, Any]:
        """What happened since the last call, for `Meter.absorb`."""
        cpu_s, energy_j = _cpu_s(), self._energy.joules() or 0.0
        news = {
            "counts": dict(self._counts),
            "cpu_s": cpu_s - self._cpu_drained_s,
            "energy_j": energy_j - self._energy_drained_j,
            "peak_rss_gib": _peak_rss_gib(),
            "watched": [watcher.news() for watcher in self._watchers],
        }
        self._counts.clear()
        self._cpu_drained_s, self._energy_drained_j = cpu_s, energy_j
        return news

    def serve(self, servers: Servers) -> None:
        """Booked by the leader, who asks the servers."""

    def absorb(self, news: Mapping[str, Any]) -> None:
        """Done by the leader."""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Written by the leader; watchers see it."""
        for watcher in self._watchers:
            watcher.log({"kind": kind, **values})

    def sample(self, values: Mapping[str, Any]) -> None:
        """Written by the leader."""

    def state(self) -> dict[str, Any]:
        """Kept by the leader."""
        return {}


@contextlib.contextmanager
def _aside(watchers: Sequence[Watcher], name: str) -> Iterator[None]:
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.aside(name, start_ns, time.perf_counter_ns())


def _cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _peak_rss_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _seconds(spans_ns: Mapping[str, int]) -> dict[str, float]:
    """Seconds by name: canonical names in their order, then the others; empty ones left out."""
    order = {name: i for i, name in enumerate(SPANS)}
    names = sorted(spans_ns, key=lambda name: (order.get(name, len(order)), name))
    return {name: spans_ns[name] / 1e9 for name in names if spans_ns[name]}
