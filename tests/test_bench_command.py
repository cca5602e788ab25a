"""`fastturn bench`: what runs, what is refused by name, and which changes are more than noise."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastturn import cli
from fastturn.bench import compare, record, recorded, suites
from fastturn.bench import path as paths
from fastturn.bench.compare import Change, of_files, of_rounds
from fastturn.bench.record import ROOT, DirtyTree, Measured, Row
from fastturn.bench.recorded import ForeignRow, Results, read, require_history

HEAD = record.git("rev-parse", "HEAD")


def row(p50: float, *, case: str = "pack/x", commit: str = HEAD, **other: Any) -> Row:
    machine = {"device": "cpu", "driver": "", "torch": "2", "triton": "3", "config_hash": "c"}
    spread = {"p50": p50, "p20": 0.95 * p50, "p80": 1.05 * p50, "n": 5}
    named = {"bench": "pack", "case": case, "provider": "fastturn", "metric": "time", "unit": "s"}
    return Row(**{**machine, **spread, **named, "commit": commit, "date": "2026", **other})


def write(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    return path


def script() -> Any:
    """scripts/bench as a module."""
    module = ModuleType("scripts_bench")
    SourceFileLoader("scripts_bench", str(ROOT / "scripts" / "bench")).exec_module(module)
    return module


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Suites that note what they were told."""
    calls: list[tuple[str, list[str]]] = []

    def load(name: str) -> Any:
        def main(argv: list[str]) -> int:
            calls.append((name.rpartition(".")[2], argv))
            return 0

        return SimpleNamespace(main=main)

    stand_in = SimpleNamespace(import_module=load, util=importlib.util)
    monkeypatch.setattr(suites, "importlib", stand_in)
    monkeypatch.setattr(suites, "require_clean", lambda: None)
    return calls


def test_a_suite_runs_its_benchmarks_and_all_runs_every_one(ran: list[Any]) -> None:
    assert cli.main(["bench", "step", "--no-record", "--device", "cpu"]) == 0
    assert ran == [("steps", ["--no-record"])]
    ran.clear()
    assert cli.main(["bench", "all", "--against", "hf,trl"]) == 0
    assert [(name, *argv) for name, argv in ran] == [*suites.every_benchmark("cpu"), ("report",)]
    assert {words for every in suites.SUITES.values() for words in every} <= {
        (name, *argv) for name, argv in ran
    }
    ran.clear()
    assert cli.main(["bench", "all", "--no-record", "--data", "here"]) == 0
    assert ran[0] == ("lengths", ["--data", "here", "--no-record"])


def test_one_that_fails_is_named_and_the_others_of_all_run(ran, monkeypatch, capsys) -> None:
    def load(name: str) -> SimpleNamespace:
        def main(argv: list[str]) -> int:
            ran.append((name, argv))
            if name.endswith("overlap"):
                raise RuntimeError("this one broke")
            return 0

        return SimpleNamespace(main=main)

    monkeypatch.setattr(suites.importlib, "import_module", load)
    assert cli.main(["bench", "all"]) == 1
    assert len(ran) == len(suites.every_benchmark("cpu")) + 1
    assert "error: bench overlap: this one broke; the others go on" in capsys.readouterr().err
    monkeypatch.setattr(suites, "SUITES", {"pack": (("overlap",),)})
    with pytest.raises(RuntimeError, match="this one broke"):
        cli.main(["bench", "pack"])


def test_every_benchmark_that_fills_a_table_is_one_of_the_script() -> None:
    names = {name for name, *_ in suites.every_benchmark("cpu")}
    assert names <= set(script().SUITES)
    for words in suites.FURTHER:
        if words[0] == "path":
            assert paths.arguments().parse_args(words[1:]).case in paths.CASES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--against", "legr"], "--against 'legr': expected any of liger"),
        (["step", "--against", ""], "--against '': expected any of liger"),
        (["ops", "--against", "vllm"], "--against vllm: it is compared in rollout only"),
        (["pack", "--against", "trl"], "--against trl: it is compared in ops, train only"),
        (["ops", "--against", "cce"], "--against cce: it runs on GPUs only"),
        (["ops", "--device", "cuda"], "--device cuda: torch sees no CUDA device"),
        (["--compare", "nowhere", "HEAD"], "--compare nowhere: neither a file nor a revision"),
        (["pack", "--data", "here"], "--data here: only all reads it"),
        (["pack", "--compare", "HEAD", "nowhere"], "--compare nowhere: neither a file nor"),
        (["--compare", "pyproject.toml", "HEAD"], "expected a file beside the other one"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    words: list[str], message: str, ran: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err and not ran


def test_a_missing_peer_is_named(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = replace(suites.PEERS["liger"], is_there=suites._package("liger_kernel_that_is_away"))
    monkeypatch.setitem(suites.PEERS, "liger", away)
    assert cli.main(["bench", "ops", "--against", "liger"]) == 2
    assert "liger: not installed; install fastturn[bench]" in capsys.readouterr().err
    monkeypatch.setattr("fastturn.bench.served.engine", lambda: None)
    assert cli.main(["bench", "rollout", "--against", "vllm"]) == 2
    assert "vllm: not installed; install fastturn[rollout], and vLLM" in capsys.readouterr().err
    assert not ran


def test_a_dirty_tree_is_named(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dirty() -> None:
        raise DirtyTree("uncommitted changes in a.py")

    monkeypatch.setattr(suites, "require_clean", dirty)
    assert cli.main(["bench", "pack"]) == 2
    assert "uncommitted changes in a.py" in capsys.readouterr().err and not ran


def test_a_change_must_leave_the_noise() -> None:
    key, steady = ("c", "p", "time"), ("c", "p", "memory")
    a = [{key: 1.0, steady: 1.0} for _ in range(5)]
    b = [{key: 1.2 + 0.01 * n, steady: 1.0 + 0.05 * (-1) ** n} for n in range(5)]
    found = of_rounds(a, b)
    assert found[key].beyond_noise and found[key].ratio == pytest.approx(1.22, rel=1e-3)
    assert not found[steady].beyond_noise
    assert not Change(1.01, 1.005, 1.015).beyond_noise  # small, however sure
    assert Change(0.5, 0.4, 0.6).beyond_noise


def test_noise_alone_is_seldom_marked() -> None:
    """Tables of sixteen metrics whose medians differ by a tenth from round to round."""
    rng = np.random.default_rng(0)

    def noise() -> dict[compare.Key, float]:
        return {("c", "p", str(n)): x for n, x in enumerate(rng.lognormal(0.0, 0.07, 16))}

    marked = 0
    for _ in range(100):
        a, b = ([noise() for _ in range(5)] for _ in range(2))
        marked += any(change.beyond_noise for change in of_rounds(a, b).values())
    assert marked <= 10
    known = {(0.95, 1): 12.706, (0.95, 4): 2.776, (0.99, 9): 3.250}
    for place, value in known.items():
        assert compare.student(*place) == pytest.approx(value, rel=1e-3)


def test_rows_of_files_are_compared_and_foreign_ones_refused(tmp_path: Path) -> None:
    old, new = write(tmp_path / "a", row(1.0)), write(tmp_path / "b", row(9.0), row(1.5))
    (change,) = of_files(old, new).values()
    assert change.ratio == 1.5 and change.beyond_noise
    assert not next(iter(of_files(old, write(new, row(1.02))).values())).beyond_noise
    with pytest.raises(ForeignRow, match="commit aaaaaaaaaaaa, which is not in this history"):
        of_files(old, write(new, row(1.0, commit="a" * 40)))
    with pytest.raises(ForeignRow, match=r"recorded on cpu \(c\) and on gpu"):
        of_files(old, write(new, row(1.0, device="gpu")))
    with pytest.raises(ForeignRow, match="no case in common"):
        of_files(old, write(new, row(1.0, case="other")))


def test_recorded_rows_are_read_back_and_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "pack.jsonl", row(1.0), row(2.0))
    assert [r.p50 for r in read(path)] == [1.0, 2.0]
    results = Results.load(tmp_path)
    assert results.row("pack/x", "fastturn", "time").p50 == 2.0 and len(results.shown) == 1
    with pytest.raises(ForeignRow, match="no such row in bench/results"):
        results.row("pack/x", "liger", "time")


DAMAGE = {
    "cut": b'{"bench": "pack", "ca',
    "a list": b"[1, 2]",
    "no text": b"\xff\xfe\x00",
    "a field less": b'{"bench": "pack"}',
    **{
        f"{name}={value}": json.dumps(asdict(row(1.0)) | {name: value}).encode()
        for name, value in {"p50": "fast", "p20": None, "p80": math.nan, "commit": 5}.items()
    },
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_a_line_that_is_no_row_is_named(line: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "pack.jsonl", row(1.0))
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ForeignRow, match=r"pack\.jsonl, line 2: expected a row"):
        read(path)


def test_a_row_belongs_to_this_history() -> None:
    require_history([row(1.0)])
    with pytest.raises(ForeignRow, match="pack/x of fastturn was recorded at commit bbbbbbbbbbbb"):
        require_history([row(1.0), row(1.0, commit="b" * 40)])


def test_two_revisions_are_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same revision twice, with a stand-in that takes as long as its place in the order."""
    seen: list[str] = []

    def fake(path: Path, words: suites.Words) -> dict[compare.Key, float]:
        seen.append(path.parent.name)
        assert (path / "fastturn" / "bench" / "pack.py").exists()
        return {("c", "p", "time"): 1.0 if path.parent.name == "0" else 2.0}

    monkeypatch.setattr(compare, "measured", fake)
    assert compare.main(["--rounds", "4", "HEAD", "HEAD", "pack", "siblings"]) == 1
    assert seen == ["0", "1", "1", "0", "0", "1", "1", "0"]
    assert "2.000 [2.000, 2.000] CHANGED" in capsys.readouterr().out
    with pytest.raises(suites.BenchError, match="--rounds 1: one round does not show noise"):
        compare.main(["--rounds", "1", "HEAD", "HEAD", "pack"])


def test_the_medians_of_a_revision_are_what_its_suite_found(tmp_path: Path) -> None:
    path = compare.package("HEAD", tmp_path)
    found = compare.measured(path, ("pack", "siblings", "--repeats", "1"))
    assert found["pack/siblings", "fastturn", "tokens"] > 0
    assert all(isinstance(value, float) for value in found.values())


def test_measured_values_survive_the_way_into_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(record, "require_clean", lambda root=None: None)
    one = Measured("case", "fastturn", "time", "s", (1.0, 2.0, 4.0), {})
    (kept,) = recorded.read(record.record("pack", [one], "cpu", tmp_path))
    assert (kept.p50, kept.n, kept.commit) == (2.0, 3, HEAD)


def test_scripts_bench_names_bad_input_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["nothing"], "expected one of ops"),
        (["lengths", "--run", str(tmp_path)], "expected a run with a tokenizer in it"),
    ):
        monkeypatch.setattr("sys.argv", ["bench", *words])
        assert script().main() == 2
        assert message in capsys.readouterr().err
