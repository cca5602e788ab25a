"""README and docs/benchmarks.md say what recorded rows say, and nothing in tables is typed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fastturn.bench import report
from fastturn.bench.record import RESULTS, ROOT
from fastturn.bench.recorded import ForeignRow, Results, history


def test_files_are_what_the_rows_of_this_history_say() -> None:
    files, results = report.written()
    assert set(files) == {ROOT / name for name in (*report.FILES, *report.PLOTS)}
    for path, text in files.items():
        assert path.read_text() == text, f"{path}: run scripts/bench report"
    assert len(results.shown) > 100


def test_every_line_of_every_results_file_is_of_a_commit_of_this_history() -> None:
    known, files = history(), sorted(RESULTS.glob("*.jsonl"))
    foreign = [
        f"{path.name}, line {number}: {commit}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (commit := json.loads(line)["commit"]) not in known
    ]
    assert len(files) >= 12 and not foreign


def test_every_number_of_the_readme_is_one_of_a_row() -> None:
    results = Results.load()
    shown = report.headline(results) + report.training(results)
    rows = results.shown.values()
    known = {report.number(x) for row in rows for x in (row.p50, row.p20, row.p80)}
    cells = [cell for line in shown.splitlines()[2:] for cell in line.split("|")[2:]]
    numbers = {n for cell in cells for n in re.findall(r"\d+(?:[.,]\d+)*", cell)}
    levels = set(report.SHOWN_LEVELS) | {"1000", "20", "80"}
    assert len(numbers) > 20 and numbers <= known | levels


def test_tables_of_the_readme_hold_no_number_that_is_typed() -> None:
    text = report.BLOCK.sub("", (ROOT / "README.md").read_text())
    assert not [x for x in text.splitlines() if x.startswith("|") and re.search(r"\s\d", x)]


def test_what_is_stale_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--check"]) == 0
    results = Results.load()
    key = (report.TRAIN, "grpo", "s / iteration")
    changed = dict(results.rows) | {key: replace(results.rows[key], p50=7.25)}
    monkeypatch.setattr(Results, "load", lambda: Results(changed, {}))
    assert report.main(["--check"]) == 1
    assert "README.md: not what the rows say" in capsys.readouterr().out
    foreign = dict(results.rows) | {key: replace(results.rows[key], commit="c" * 40)}
    monkeypatch.setattr(Results, "load", lambda: Results(foreign, {}))
    with pytest.raises(ForeignRow, match="recorded at commit cccccccccccc"):
        report.main(["--check"])


def test_above_a_table_stand_the_commands_that_make_it_and_no_table_is_without() -> None:
    assert report.commands("peers") == ["scripts/bench peers"]
    assert report.commands("gpu") == ["scripts/gpu_check"]
    assert "scripts/bench steps --clock 'cpu time'" in report.commands("steps")[1]
    key = (report.TRAIN, "grpo", "s / iteration")
    retired = {key: replace(Results.load().rows[key], bench="retired")}
    with pytest.raises(ForeignRow, match=r"retired\.jsonl: no benchmark of that name makes rows"):
        report.everything(Results(retired, {}))


def test_numbers_have_three_digits() -> None:
    assert [report.number(x) for x in (1234.5, 0.06789, 12.34)] == ["1,234", "0.0679", "12.3"]
