"""Time and peak memory of providers on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .record import Measured

Provider = Callable[[], Sequence[Tensor]]  # one repetition; returns what correctness compares


class WrongResult(RuntimeError):
    """A provider disagrees with the one it is compared to; wrong results have no speed."""


def check_equal(run: Mapping[str, Provider], truth: str, tolerance: float) -> None:
    """Every provider's tensors agree with those of `truth`: max difference / max magnitude."""
    want = [x.detach().clone() for x in run[truth]()]
    for name, provider in run.items():
        for place, (got, right) in enumerate(zip(provider(), want, strict=True)):
            error = float((got - right).abs().max() / right.abs().max().clamp(min=1e-30))
            if not error <= tolerance:
                raise WrongResult(
                    f"{name}: result {place} differs from {truth} by {error:.2g}, "
                    f"above {tolerance:.0e}"
                )


def seconds(
    run: Mapping[str, Provider],
    repeats: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time of each provider by a clock in seconds, alternating, after `warm` uncounted repetitions
    of each."""
    times: dict[str, list[float]] = {name: [] for name in run}
    for repeat in range(repeats + warm):
        for name, provider in run.items():
            _wait()
            start = clock()
            provider()
            _wait()
            if repeat >= warm:
                times[name].append(clock() - start)
    return times


def compared(
    case: str, times: Mapping[str, Sequence[float]], config: Mapping[str, Any]
) -> Iterator[Measured]:
    """The time of every provider, and that of "fastturn" over each other's within a round."""
    for name, values in times.items():
        yield Measured(case, name, "time", "s", tuple(values), config)
        if name != "fastturn":
            share = ratios(times["fastturn"], values)
            yield Measured(case, "fastturn", f"time / {name}", "1", share, config)


def peak_bytes(provider: Provider) -> int:
    """Most bytes of tensors alive at once during one repetition beyond those alive before."""
    provider()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = provider()
        del kept
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = provider()
        del kept
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    return peak


def ratios(of: Sequence[float], to: Sequence[float]) -> tuple[float, ...]:
    """Ratio within each round of alternation, so that slow drifts of the machine cancel."""
    return tuple(x / y for x, y in zip(of, to, strict=True))


def table(measured: Sequence[Measured]) -> str:
    """One line a metric: case, provider, metric, p50 [p20, p80] unit."""
    lines = [
        f"{m.case:34} {m.provider:14} {m.metric:27} {m.percentile(0.5):10.4g} "
        f"[{m.percentile(0.2):.4g}, {m.percentile(0.8):.4g}] {m.unit}"
        for m in measured
    ]
    return "\n".join(lines)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
