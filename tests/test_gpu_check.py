"""The GPU check in its dry form: every case at toy size, from a checkout that is not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from fastturn.bench import gpu, gpu_laws, gpu_ops, gpu_sections, record
from fastturn.bench.gpu_sections import SECTIONS, Check

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Dry:
    status: int
    text: str
    errors: str
    rows: list[dict]
    root: Path

    def metrics(self, case: str, provider: str) -> set[str]:
        return {
            row["metric"]
            for row in self.rows
            if row["case"].startswith(case) and row["provider"] == provider
        }


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    """A copy of the checkout without git, run by a Python in which the package is not installed:
    without `site` no .pth file is read, so only the script's own arrangement can find it."""
    root = tmp_path_factory.mktemp("a checkout")
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in ("fastturn", "kernels", "bench", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    packages = sysconfig.get_paths()["purelib"]
    words = ["--dry", "--out", str(root / "out"), "--commit", "f" * 40]
    done = subprocess.run(
        [sys.executable, "-S", str(root / "scripts" / "gpu_check"), *words],
        env={**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        cwd=root,
    )
    text = (root / "out" / "gpu.jsonl").read_text() if (root / "out").exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return Dry(done.returncode, done.stdout, done.stderr, rows, root)


@pytest.mark.slow
def test_everything_is_right_and_every_section_runs(dry: Dry) -> None:
    assert dry.status == 0, dry.text + dry.errors
    assert dry.text.rstrip().endswith("all correct")
    assert [line.split()[1] for line in dry.text.splitlines() if line.startswith("== ")] == list(
        SECTIONS
    )
    assert " right, worst " in dry.text and "out of time" not in dry.text


@pytest.mark.slow
def test_nothing_is_left_in_the_checkout(dry: Dry) -> None:
    assert sorted(path.name for path in dry.root.iterdir()) == [
        "bench", "fastturn", "kernels", "out", "scripts",
    ]  # fmt: skip
    assert not list(dry.root.glob("**/__pycache__"))


@pytest.mark.slow
def test_rows_have_the_schema_of_all_results(dry: Dry) -> None:
    names = [field.name for field in fields(record.Row)]
    assert all(list(row) == names for row in dry.rows)
    assert {row["bench"] for row in dry.rows} == {"gpu"}
    assert {row["commit"] for row in dry.rows} == {"f" * 40}
    assert all(row["p20"] <= row["p50"] <= row["p80"] for row in dry.rows)


@pytest.mark.parametrize(
    ("case", "module"), [("surrogate/", "turn_surrogate"), ("logprob/", "linear_logprob")]
)
@pytest.mark.slow
def test_every_implementation_of_every_op_is_measured(case: str, module: str, dry: Dry) -> None:
    """Time, share of the measured ceiling and peak memory of each, beside plain torch."""
    want = {"time", "fraction of ceiling", "peak extra memory"}
    for impl in gpu_ops.implementations(module):
        assert want <= dry.metrics(case, f"fastturn {impl}"), impl
    assert want <= dry.metrics(case, "plain torch")


@pytest.mark.parametrize(
    "provider",
    ["fastturn triton", "fastturn torch", "sdpa, replicated rows", "sdpa, dense mask"],
)
@pytest.mark.slow
def test_attention_is_measured_beside_its_peers(provider: str, dry: Dry) -> None:
    want = {"time", "fraction of ceiling", "peak extra memory"}
    assert want <= dry.metrics("attention/", provider)


@pytest.mark.slow
def test_the_packed_update_is_measured_beside_its_peers(dry: Dry) -> None:
    for provider in ("rows", "padded", "fastturn packed"):
        assert {"time", "fraction of ceiling"} <= dry.metrics("update/", provider)
    assert {"speed-up over rows", "speed-up / ideal"} <= dry.metrics("update/", "fastturn packed")


@pytest.mark.slow
def test_idle_rows_are_measured_against_live_ones(dry: Dry) -> None:
    for half in ("zero", "clipped"):
        (shape,) = {f"surrogate/{case.shape}, half {half}" for case in gpu_ops.TOY_HEADS}
        for impl in gpu_ops.implementations("turn_surrogate"):
            assert "time / live" in dry.metrics(shape, f"fastturn {impl}")


@pytest.mark.slow
def test_each_peer_is_measured_or_named_with_the_reason(dry: Dry) -> None:
    for peer in gpu_ops.PEERS:
        named = any(
            line.startswith("left out: ") and peer in line for line in dry.text.splitlines()
        )
        assert named or "time" in dry.metrics("surrogate/", peer), peer


def test_the_shapes_of_a_real_run() -> None:
    shapes = {(case.actions, case.width, case.vocab) for case in gpu_ops.HEADS}
    assert shapes == {
        (8192, 2048, 151936),
        (16384, 2048, 151936),
        (8192, 4096, 151936),
        (4096, 576, 49152),
    }
    assert all(case.actions % case.tokens == 0 for case in gpu_ops.HEADS)
    assert sum(share for share, _ in SECTIONS.values()) == pytest.approx(1)
    assert gpu.arguments([]).minutes * 60 + 20 < 8 * 60


def make_check() -> Check:
    check = Check("cpu", True)
    check.ends = float("inf")
    return check


def test_a_wrong_result_of_ours_fails_the_check_by_name() -> None:
    check = make_check()
    wrong = gpu_laws.Check("surrogate dhead", 0.5, 0.1)
    check.judge("head", lambda: [wrong, gpu_laws.Check("loss", 0.0, 0.1)])
    assert check.failures == ["surrogate dhead: error 0.5, allowed 0.1"]
    assert not gpu_laws.Check("dhead", float("nan"), 1.0).right


def failing(error: type[BaseException]) -> Callable[[], None]:
    def run() -> None:
        raise error("no")

    return run


def test_a_peer_that_fails_is_left_out_and_ours_is_a_failure() -> None:
    check = make_check()
    check.attempt("peer", failing(RuntimeError), ours=False)
    check.attempt("absent", failing(gpu_ops.Absent), ours=True)
    assert len(check.left_out) == 2 and not check.failures
    check.attempt("ours", failing(torch.OutOfMemoryError), ours=True)
    assert check.failures == ["ours: more memory than the device has"]


def test_a_provider_with_other_results_is_not_timed() -> None:
    check = make_check()
    right, wrong = torch.ones(3), torch.tensor([1.0, 1.0, 1.1])
    made = {
        "plain torch": lambda: lambda: [right],
        "fastturn torch": lambda: lambda: [wrong],
        "peer": lambda: lambda: [right],
    }
    run = gpu_sections.usable(check, "case", made, "float32")
    assert list(run) == ["plain torch", "peer"]
    (failure,) = check.failures
    assert "fastturn torch: result 0 differs from plain by 0.1" in failure


def test_time_that_is_over_ends_a_section_and_not_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_time(_: Check) -> None:
        raise gpu.OutOfTime

    seen: list[str] = []
    monkeypatch.setitem(SECTIONS, "heads", (1.0, out_of_time))
    monkeypatch.setitem(SECTIONS, "attention", (1.0, lambda check: seen.append("attention")))
    check = make_check()
    assert list(gpu.run_sections(check, ["heads", "attention"], 60)) == ["heads", "attention"]
    assert check.left_out == ["the rest of heads: out of time"] and seen == ["attention"]


def test_without_a_gpu_the_remedy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert gpu.arguments(["--dry"]).no_record
        return
    assert gpu.main([]) == 2
    assert "--dry" in capsys.readouterr().out
