"""The ledger of whole runs of the quickstart closes, as `test_trainer.closure` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves it out
from test_trainer import closure

SHORT = ("iterations=3", "warm.steps=100", "data.eval_tasks=64", "trackers=none")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_device_seconds_of_the_quickstart_are_wall_clock_times_devices(
    ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["train", "quickstart", *SHORT, "--nproc", str(ranks), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "fastturn.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    assert closure(out) == pytest.approx(1.0, rel=0.01)
