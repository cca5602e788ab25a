"""Rows of results: what was measured, where, and at which commit.

A row is one metric of one provider on one case. `record` appends rows to `results/<bench>.jsonl`
and refuses a tree with uncommitted changes, because their commit would not be what ran.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


class DirtyTree(RuntimeError):
    """Results cannot be tied to a commit: names the changed files and the remedy."""


@dataclass(frozen=True, slots=True)
class Row:
    """`p50`, `p20`, `p80` are percentiles of `n` repetitions in `unit`.

    Example: bench "ops", case "surrogate/full threads=1", provider "fastturn", metric "time",
    unit "s", p50 3.8, p20 3.7, p80 3.9, n 5.
    """

    bench: str
    case: str
    provider: str
    metric: str
    unit: str
    p50: float
    p20: float
    p80: float
    n: int
    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    config_hash: str
    date: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Repetitions of one metric, before they become a row. Example: ("plain", "time", "s", ...)."""

    case: str
    provider: str
    metric: str
    unit: str
    values: tuple[float, ...]
    config: Mapping[str, Any]

    def percentile(self, share: float) -> float:
        """Linear between order statistics. Example: the .5 percentile of (1, 2, 4) is 2."""
        return float(torch.tensor(self.values, dtype=torch.float64).quantile(share))


def rows(bench: str, measured: Sequence[Measured], device: str) -> list[Row]:
    """Rows of this machine and commit."""
    common = {
        "device": device_name(device),
        "driver": driver(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": git("rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return [
        Row(
            bench=bench,
            case=m.case,
            provider=m.provider,
            metric=m.metric,
            unit=m.unit,
            p50=m.percentile(0.5),
            p20=m.percentile(0.2),
            p80=m.percentile(0.8),
            n=len(m.values),
            config_hash=config_hash(m.config),
            **common,
        )
        for m in measured
    ]


def record(bench: str, measured: Sequence[Measured], device: str, folder: Path = RESULTS) -> Path:
    """Append rows to `folder/<bench>.jsonl` and return that path; `DirtyTree` before writing."""
    require_clean()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}.jsonl"
    lines = [json.dumps(asdict(row)) + "\n" for row in rows(bench, measured, device)]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))  # all or none
    return path


def require_clean(root: Path = ROOT) -> None:
    """`DirtyTree` when anything but recorded results differs from the commit."""
    status = git("status", "--porcelain", "--", ".", ":!bench/results", root=root)
    if status:
        names = ", ".join(line[3:] for line in status.splitlines()[:5])
        raise DirtyTree(
            f"uncommitted changes in {names}: expected a clean tree, so that the commit in a row "
            f"is what ran; commit them, or measure with --no-record"
        )


def git(*words: str, root: Path = ROOT) -> str:
    """Standard output of a git command in the checkout, without the final newline."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DirtyTree(
            f"git {' '.join(words)} failed in {root}: recording needs a git checkout; "
            f"measure with --no-record"
        ) from error
    return done.stdout.rstrip("\n")


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hex digits that change when any parameter of a case does."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def device_name(device: str) -> str:
    """The GPU, or the processor with the threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return f"{model}, {torch.get_num_threads()} threads"


def driver(device: str) -> str:
    """Version of the NVIDIA driver; empty without one."""
    program = shutil.which("nvidia-smi")
    if device != "cuda" or program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
