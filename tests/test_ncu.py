"""Nsight Compute's raw page becomes a table that says what limits each kernel."""

from pathlib import Path

import pytest

from fastturn.bench import ncu

UNITS = ("", "nsecond", "%", "%", "%", "register/thread")


def write(path: Path, *launches: tuple[object, ...]) -> Path:
    rows = [(ncu.NAME, *ncu.METRICS), UNITS, *launches]
    text = "==PROF== Connected\n" + "\n".join(",".join(f'"{x}"' for x in row) for row in rows)
    path.write_text(text)
    return path


def test_launches_of_a_kernel_are_one_line_with_its_limit(tmp_path: Path) -> None:
    path = write(
        tmp_path / "k.csv",
        ("rows", "1,000", 20, 82, 70, 64),
        ("rows", "3,000", 20, 84, 70, 64),
        ("tiles", 16000, 75, 40, 40, 200),
        ("small", 500, 3, 4, 12, 40),
        ("wide", 400, 3, 4, 12, 255),
    )
    lines = ncu.table(ncu.read(path)).splitlines()[2:]
    assert lines == [
        "| tiles | 1 | 16.0 | 77% | 75 % | 40 % | 40 % | 200 | compute |",
        "| rows | 2 | 2.0 | 19% | 20 % | 83 % | 70 % | 64 | memory |",
        "| small | 1 | 0.5 | 2% | 3 % | 4 % | 12 % | 40 | "
        "latency: few warps, a small launch or shared memory |",
        "| wide | 1 | 0.4 | 2% | 3 % | 4 % | 12 % | 255 | "
        "latency: few warps, for their registers |",
    ]


def test_a_page_without_the_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    path.write_text('"Kernel Name","gpu__time_duration.sum"\n"","nsecond"\n')
    with pytest.raises(SystemExit, match=r"with sm__throughput.*profile with --metrics gpu__time"):
        ncu.read(path)
