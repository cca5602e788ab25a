"""The report is made from whatever a run left behind, is self-contained, and runs nothing."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fastturn import cli
from fastturn.charts import Axis, Line, line_chart
from fastturn.config import as_dict, override
from fastturn.excerpts import folded, marked, transcripts
from fastturn.meter import Meter
from fastturn.numerals import short
from fastturn.pathreport import path_notes
from fastturn.recipes import quickstart
from fastturn.report import evaluation_rows, page_content, write_report
from fastturn.runfiles import load

TURNS = 4


def learned(i: int, iterations: int) -> float:
    """Success of a made-up run after i of its iterations."""
    return 0.34 + 0.56 / (1 + math.exp(-8 * (i / iterations - 0.45)))


def stage(rng: random.Random, iteration: int, k: int, success: float) -> dict[str, Any]:
    groups = 32 - rng.randrange(3 * k + 1)
    silent = round(groups * min(0.97, 0.35 + 0.12 * k + 0.3 * success * rng.random()))
    flat = groups * 4 * (60 + 25 * k)
    return {
        "iteration": iteration,
        "stage": k,
        "step": iteration * TURNS + TURNS - k,
        "groups": groups,
        "groups_silent": silent,
        "zero_advantage_share": silent / groups,
        "siblings": groups * 4,
        "success": min(1.0, max(0.0, success + rng.gauss(0, 0.05))),
        "return_mean": success,
        "tokens_packed": round(flat * (0.5 - 0.06 * k)),
        "tokens_flat": flat,
        "actions": groups * 40,
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.4 + rng.random(),
        "ratio_geomean": 1 + rng.gauss(0, 2e-7),
        "abs_log_ratio_max": 10 ** rng.uniform(-6.5, -5.2),
        "kl_behavior": 10 ** rng.uniform(-5, -3.5),
        "kl_reference": 0.0,
        "clip_fraction": max(0.0, rng.gauss(0.002, 0.002)),
        "clip_fraction_first": 0.0,
        "entropy": 0.9 - 0.6 * success + 0.05 * k + rng.gauss(0, 0.01),
        "version": iteration * TURNS + TURNS - k,
        "skipped": 0,
        "counts": {"tool_call": groups * 7, "bad_json": rng.randrange(9), "answer": groups * 3},
    }


def sample(iteration: int, k: int, advantage: float, extra: str = "") -> dict[str, Any]:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*(7+3)"}}</tool_call>'
    system = 'Tools, one JSON schema a line:\n{"type": "function", "function": {"name": "calc"}}\n'
    return {
        "iteration": iteration,
        "task": f"calculator-{iteration * 37 % 900}",
        "stage": k,
        "turns": [
            {
                "context": f"<|im_start|>system\n{system}<|im_end|><|im_start|>user\n"
                f"(12*(7+3))-45{extra}<|im_end|><|im_start|>assistant\n",
                "action": f"<think>first the product</think>{call}<|im_end|>",
                "reward": 0.0,
                "advantage": advantage,
                "events": ["tool_call"],
            },
            {
                "context": "<|im_start|>tool\n120<|im_end|><|im_start|>assistant\n",
                "action": f"The answer is 75.{extra}<|im_end|>",
                "reward": 1.0 if advantage > 0 else 0.0,
                "advantage": None,
                "events": ["answer", extra] if extra else ["answer"],
            },
        ],
        "return": 1.0 if advantage > 0 else 0.0,
        "ending": "finished",
    }


def write_run(out: Path, iterations: int = 60, warm: int = 50, extra: str = "") -> None:
    """A whole made-up run in `out`, through the real meter."""
    rng = random.Random(0)
    now_ns = [0]
    meter = Meter(out, clock=lambda: now_ns[0])
    config = override(quickstart(), ["seed=3", "optim.lr=0.0003", f"iterations={iterations}"])
    settings = {"config": as_dict(config), "recipe": as_dict(quickstart())}
    (out / "config.json").write_text(json.dumps(settings))

    def spend(name: str, seconds: float) -> None:
        with meter.span(name):
            now_ns[0] += round(seconds * 1e9 * rng.uniform(0.7, 1.3))

    def evaluation(iteration: int, split: str) -> dict[str, Any]:
        success = learned(iteration, iterations)
        spend("evaluation", 0.8)
        record = {"iteration": iteration, "split": split, "success": success, "eval_tasks": 256}
        record |= {"greedy": min(1.0, success + 0.08), "tool_calls_mean": 1.9, "turns_mean": 2.9}
        record |= {"idle": 0.125}
        meter.record("eval", record)
        return record

    spend("setup", 2.5)
    for step in range(warm):
        spend("warm_start", 0.5)
        meter.record("warm", {"step": step * 10, "loss": 2.4 * math.exp(-step / 15) + 0.3})
    before = evaluation(0, "before")
    totals = {"rollouts": 0, "tokens_packed": 0, "tokens_flat": 0}
    for i in range(iterations):
        success, records = learned(i, iterations), []
        spend("trunk_decode", 0.25)
        for k in reversed(range(TURNS)):
            for name, seconds in (("prefill", 0.02), ("sibling_decode", 0.12), ("pack", 0.01)):
                spend(name, seconds)
            spend("environment", 0.015)
            spend("forward_backward", 0.11)
            spend("optimizer", 0.01)
            records.append(stage(rng, i, k, success))
            meter.record("stage", records[-1])
        spend("checkpoint", 0.005)
        now_ns[0] += 4_000_000
        rollouts = 32 + sum(r["siblings"] for r in records)
        cut = round(rollouts * 0.3 * (1 - success))
        sums = {n: sum(r[n] for r in records) for n in ("tokens_packed", "tokens_flat")}
        for name, n in {"rollouts": rollouts, **sums}.items():
            totals[name] += n
        iteration = {
            "iteration": i,
            "rollouts": rollouts,
            "rollouts_total": totals["rollouts"],
            "success": success + rng.gauss(0, 0.02),
            "trunk_success": success + rng.gauss(0, 0.06),
            "return_mean": success,
            "turns_mean": 2.2 + 0.6 * success,
            "action_tokens_mean": 31 + 6 * success,
            "zero_advantage_share": 0.4 + 0.4 * success,
            **sums,
            "endings": {"finished": rollouts - cut - 9, "truncated": cut, "turns": 9},
        }
        meter.record("iteration", iteration)
        for k in (0, 2):
            meter.sample(sample(i, k, 0.5, extra))
            meter.sample(sample(i, k, -0.5, extra))
        if (i + 1) % 20 == 0 and i + 1 < iterations:
            evaluation(i + 1, "during")
    after = evaluation(iterations, "after")
    meter.summary(
        {
            "recipe": "quickstart",
            "algorithm": "rtpo",
            "seed": 3,
            **{f"{key}_before": before[key] for key in ("success", "greedy")},
            **{f"{key}_after": after[key] for key in ("success", "greedy")},
            "eval_tasks": 256,
            "iterations": iterations,
            **totals,
            "zero_advantage_share": 0.61,
            "ratio_geomean": 1.0,
        }
    )
    meter.close()


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    write_run(out, iterations=12, warm=8)
    return write_report(out)


def test_whole_run_shows_every_section(whole: Path) -> None:
    page = Page(whole)
    headings = ("Learning curve", "Where the time went", "Stages", "Training signals")
    for heading in (*headings, "Events and endings", "Transcripts", "Configuration"):
        assert heading in page.text
    shown = ("35.5 % → 89.3 %", "43.5 % → 97.3 %", "61 %", "CPU device-hours", "1.000000")
    for text in (*shown, "bad_json", "truncated", "advantage +0.500", "advantage -0.500"):
        assert text in page.text
    assert page.text.count("doing nothing 12.5 %") == 2  # beside either success
    assert page.tags.count("details") == 5 + 1
    # Two learning curves (wide, narrow) and every chart but the KL to a reference that is not used.
    assert page.tags.count("svg") == 2 + 12
    assert "3 values differ" in page.text
    assert page.text.count("seed=3") == 1


@pytest.mark.parametrize(
    ("turns", "success", "told"),
    [(1.0, 0.0, True), (1.0, 0.8, False), (3.2, 0.0, False)],
)
def test_inaction_is_fewer_turns_without_more_success(
    tmp_path: Path, turns: float, success: float, told: bool
) -> None:
    first = {"whole_turns_mean": 4.0, "violation_free": 0.2, "success": 0.4}
    last = {"whole_turns_mean": turns, "violation_free": 1.0, "success": success}
    write_run(tmp_path, iterations=2)
    lines = [json.loads(x) for x in (tmp_path / "records.jsonl").read_text().splitlines()]
    for record in lines:
        if record["kind"] == "iteration":
            record |= last if record["iteration"] else first
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert any(note.startswith("Inaction") for note in path_notes(load(tmp_path))) is told


def test_path_rules_are_shown_where_some_were_met(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=20)
    write_report(tmp_path)
    assert "Path rules" not in Page(tmp_path / "report.html").text
    lines = [json.loads(x) for x in (tmp_path / "records.jsonl").read_text().splitlines()]
    for record in lines:
        if record["kind"] == "iteration":
            left = 1 - record["iteration"] / 20
            record |= {"hits": {"dials_at_night": left}, "violation_free": 1 - left}
            record |= {"whole_turns_mean": 1 + 3 * left, "success": 0.5 * left}
        if record["kind"] == "stage":
            record |= {"path_scale": 1.0 if record["iteration"] < 9 else 0.5, "var_path": 0.1}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    write_report(tmp_path)
    text = Page(tmp_path / "report.html").text
    for part in ("Path rules", "dials_at_night", "Violation-free episodes", "Inaction: turns"):
        assert part in text
    assert "began to fade in iteration 9" in text


def test_page_needs_no_network_and_holds_no_script(whole: Path) -> None:
    page = Page(whole)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "data", "poster", "ping")
        assert not name.startswith("on")
        if name in ("href", "xlink:href"):
            assert value and value.startswith("#")
    source = whole.read_text()
    assert "@import" not in source
    assert all(place.startswith("(#") for place in source.split("url")[1:] if place[0] == "(")
    assert whole.stat().st_size < 2_000_000


def test_long_run_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=250, warm=3, extra="wide text " * 1000)
    assert write_report(tmp_path).stat().st_size < 2_000_000


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</pre></details>{{ 7*7 }}"


def test_model_text_cannot_become_markup(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=3, warm=1, extra=HOSTILE)
    with (tmp_path / "samples.jsonl").open("a") as file:
        bad = sample(3, 0, 9.0, f"<tool_call>{HOSTILE}") | {"task": HOSTILE, "ending": HOSTILE}
        bad["turns"][0]["action"] = f"<tool_call>{HOSTILE}</tool_call><think>{HOSTILE}"
        file.write(json.dumps(bad) + "\n")
    meter = Meter(tmp_path / "hostile names")
    meter.count(HOSTILE, 3)
    meter.record("stage", stage(random.Random(0), 0, 0, 0.5))
    meter.record("iteration", {"iteration": 0, "rollouts": 4, "endings": {HOSTILE: 4}})
    meter.close()
    settings = {"config": {HOSTILE: HOSTILE, "a": 1}, "recipe": {HOSTILE: "x"}}
    (meter.out / "config.json").write_text(json.dumps(settings))
    for path in (write_report(tmp_path), write_report(meter.out)):
        page = Page(path)
        assert not {"script", "img"} & set(page.tags)
        assert HOSTILE in page.text
        assert page.tags.count("details") <= 6


def test_stopped_run_is_told_from_its_records(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=3, warm=1)
    (tmp_path / "summary.json").unlink()
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "stage", "iterat')
    page = Page(write_report(tmp_path))
    assert "The run has no summary" in page.text
    assert "3 whole iterations" in page.text
    run = load(tmp_path)
    spans = sum(sum(record["spans"].values()) for record in run.records)
    assert spans == pytest.approx(sum(record["wall_s"] for record in run.records), rel=1e-12)
    assert f"{spans:,.2f} s and wall-clock is {spans:,.2f} s" in page.text


@pytest.mark.parametrize("kept", ["nothing", "setup", "before", "one stage", "one iteration"])
def test_parts_may_be_missing(tmp_path: Path, kept: str) -> None:
    order = ["nothing", "setup", "before", "one stage", "one iteration"]
    meter = Meter(tmp_path)
    if order.index(kept) >= 1:
        with meter.span("setup"):
            meter.count("hub_retry")
    if order.index(kept) >= 2:
        meter.record("eval", {"iteration": 0, "split": "before", "success": 0.1, "greedy": None})
    if order.index(kept) >= 3:
        empty = {"ratio_geomean": None, "groups": 0, "loss": math.nan, "abs_log_ratio_max": None}
        meter.record("stage", stage(random.Random(1), 0, 2, 0.1) | empty)
        meter.record("stage", {"iteration": 0, "stage": 1})
    if order.index(kept) >= 4:
        meter.record("iteration", {"iteration": 0, "rollouts": 0, "endings": {}})
        meter.sample({"iteration": 0, "task": "t", "turns": []})
    meter.close()
    page = Page(write_report(tmp_path))
    assert tmp_path.name in page.text
    source = (tmp_path / "report.html").read_text()
    assert not re.search(r"[>\"\s](nan|inf|None)\b(?! or Inf)", source)
    notice = {"nothing": "has only begun", "setup": "has only begun"}.get(kept, "no summary")
    assert notice in page.text


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--out"):
        write_report(tmp_path / "missing")
    (tmp_path / "summary.json").write_text("{half")
    with pytest.raises(ValueError, match=r"summary\.json"):
        write_report(tmp_path)


def corrupted(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the value at the dotted path is another one."""
    changed = json.loads(json.dumps(document))
    place: Any = changed
    *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in names:
        place = place[name]
    place[last] = value
    return changed


@pytest.mark.parametrize(
    ("file", "path", "value", "message"),
    [
        ("summary.json", "spans.optimizer", "x", "summary.spans.optimizer: expected a number"),
        ("summary.json", "spans", [1], r"summary.spans: expected an object, got \[1\]"),
        ("summary.json", "pools", {"trainer": 3}, "summary.pools.trainer: expected an object"),
        ("summary.json", "pools", {}, "summary.pools.trainer: expected an object, got None"),
        ("summary.json", "device_seconds", "9", "summary.device_seconds: expected a number, got"),
        ("summary.json", "success_after", {}, "summary.success_after: expected a number, got {}"),
        ("summary.json", "levels", [{"success": 1}], r"levels\[0\].device_seconds: expected"),
        ("config.json", "config", 3, "config.config: expected an object, got 3"),
        ("config.json", "config", {"turns": ""}, "config.config.turns: expected a whole number"),
        ("records.jsonl", "counts", [2], "line 3: records.counts: expected an object"),
        ("records.jsonl", "iteration", "two", "line 3: records.iteration: expected a whole number"),
        ("samples.jsonl", "turns.0", 4, r"line 3: samples.turns\[0\]: expected an object, got 4"),
        ("samples.jsonl", "turns.0.action", 4, r"turns\[0\].action: expected a text, got 4"),
    ],
)
def test_what_no_run_writes_is_named(
    tmp_path: Path, file: str, path: str, value: Any, message: str, capsys: Any
) -> None:
    write_run(tmp_path, iterations=2, warm=1)
    (tmp_path / "config.json").write_text('{"config": {}, "recipe": {}}')
    lines = (tmp_path / file).read_text().splitlines()
    place = min(2, len(lines) - 1)
    whole = "".join(lines) if file.endswith("json") else lines[place]
    changed = json.dumps(corrupted(json.loads(whole), path, value))
    lines = [changed] if file.endswith("json") else [*lines[:place], changed, *lines[place + 1 :]]
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    assert cli.main(["report", str(tmp_path), "--slowest"]) == 2
    assert re.search(f"{file}.*{message}.*; delete the (file|line)", capsys.readouterr().err)


def test_marked_keeps_text_and_marks_its_parts() -> None:
    text = (
        "<|im_start|>tool\n42<|im_end|><think>a<b</think>"
        '<tool_call>{"x": "<"}</tool_call><tool_call>cut'
    )
    reader = HTMLParser()
    found: list[str] = []
    reader.handle_data = found.append  # type: ignore[method-assign]
    html = str(marked(text))
    reader.feed(html)
    reader.close()
    assert "".join(found) == text
    for kind in ("role", "observation", "think", "call", "control"):
        assert f'<span class="{kind}">' in html
    assert html.count('class="call"') == 2
    assert "characters left out" in marked("x" * 10_000)
    assert len(marked("x" * 100_000)) < 7_000


def test_long_contexts_are_folded_at_a_message() -> None:
    system = "<|im_start|>system\n" + "schema " * 300 + "<|im_end|>\n"
    question = "<|im_start|>user\n" + "why " * 90 + "<|im_end|>\n<|im_start|>assistant\n"
    assert folded(question) == ("", question)
    assert folded(system + question) == (system, question)
    for text in ("a line\n" * 300, "x" * 3000, question * 20):  # no message, no line, many turns
        earlier, shown = folded(text)
        assert earlier + shown == text and earlier
        assert 300 <= len(shown) <= 1200


def test_a_stage_without_a_step_measured_nothing(tmp_path: Path) -> None:
    meter = Meter(tmp_path)
    silent = {"steps": 0, "entropy": 0.0, "grad_norm": 0.0, "zero_advantage_share": 1.0}
    for iteration, change in enumerate(({"entropy": 0.5, "steps": 1}, silent)):
        meter.record("stage", stage(random.Random(0), iteration, 0, 0.5) | change)
    meter.close()
    first, second = load(tmp_path).stages[0]
    assert first["entropy"] == 0.5
    assert second["entropy"] is second["grad_norm"] is None
    assert second["zero_advantage_share"] == 1.0


def test_an_evaluation_at_the_end_is_shown_once(tmp_path: Path) -> None:
    meter = Meter(tmp_path)
    for iteration, split in ((0, "before"), (10, "during"), (20, "during"), (20, "after")):
        meter.record("eval", {"iteration": iteration, "split": split, "success": 0.5})
    meter.close()
    shown = [row["split"] for row in evaluation_rows(load(tmp_path))]
    assert shown == ["before", "during", "after"]


def test_five_transcripts_from_the_whole_run_with_both_signs() -> None:
    samples = [sample(i, 0, sign * 0.5) for i in range(50) for sign in (1, -1)]
    chosen = transcripts(samples)
    assert [episode["iteration"] for episode in chosen] == [0, 10, 20, 30, 40]
    advantages = [episode["turns"][0]["advantage"] for episode in chosen]
    assert advantages == [0.5, -0.5, 0.5, -0.5, 0.5]
    assert [turn["advantage"] for turn in chosen[0]["turns"]] == [0.5, None]
    assert len(transcripts(samples[:2])) == 2
    assert transcripts([]) == []


def test_numbers_read_well() -> None:
    assert [short(v) for v in (None, 0, 9999, 12345, 1.5e6, 0.00012, 640.2, "x")] == [
        *("–", "0", "9,999", "12.3k", "1.5M", "0.00012", "640", "x")
    ]


def test_ledger_of_the_page_sums_to_all_of_the_time(whole: Path) -> None:
    content = page_content(load(whole.parent))
    assert sum(row["share"] for row in content["ledger"]["rows"]) == pytest.approx(1)
    assert content["ledger"]["sum_s"] == pytest.approx(content["ledger"]["wall_s"], rel=1e-9)
    assert "difference 0.0000 %" in whole.read_text()


def test_chart_without_points_is_no_chart() -> None:
    assert line_chart([Line("a", [0, 1], [None, None])]) == ""
    assert line_chart([]) == ""


AXES = [Axis(), Axis("percent"), Axis("log"), Axis(least=(0.0, 1.0)), Axis(least=(0.0, 0.0))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("y", [[0.0], [1e-30, 5.0], [-2.0, -2.0, None, 7.0]])
def test_chart_follows_the_theme_and_holds_its_points(axis: Axis, y: list[float | None]) -> None:
    svg = line_chart([Line("a", list(range(len(y))), y, color=1)], axis)
    assert "var(--c1)" in svg and "var(--ink)" in svg
    assert "#f00d" not in svg and "font-family" not in svg and "nan" not in svg


def test_axes_show_no_more_than_their_range() -> None:
    """Nothing below 0 for what is never negative; no decade too many on a log axis."""

    def labels(y: list[float | None], axis: Axis) -> list[str]:
        svg = line_chart([Line("", [0, 1], y)], axis)
        return re.findall(r"<text[^>]*text-anchor: end[^>]*>([^<]+)<", svg)[1:]

    assert labels([0.01, 1.0], Axis())[0] == "0"
    assert labels([1e-12, 1e-11], Axis("log", least=(1e-9, 1e-3))) == [
        *("1e-9", "1e-7", "1e-5", "0.001")
    ]


def test_equal_data_give_equal_bytes() -> None:
    lines = [Line("a", [0, 1], [0.5, 0.25])]
    assert line_chart(lines) == line_chart(lines)


def test_long_lines_are_averaged_and_peaks_kept() -> None:
    y: list[float | None] = [0.0] * 10_000
    y[5_000] = 1.0
    mean_N = Line("a", range(10_000), y).points()[1]
    peak_N = Line("a", range(10_000), y, merge="max").points()[1]
    assert len(mean_N) == len(peak_N) == 240
    assert peak_N.max() == 1.0 and 0 < mean_N.max() < 0.05
