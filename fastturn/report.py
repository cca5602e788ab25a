"""report.html: one file that shows what a run did, made from the files the run left behind.

Reads records.jsonl, samples.jsonl, summary.json and config.json; each may be missing (a run that
was stopped, or has only begun), then what it would have shown is left out and said. The page needs
no network and holds no script; everything that a model or an environment wrote is escaped.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fastturn.charts import Axis, Line, area_chart, color, line_chart
from fastturn.meter import NONFINITE, SPANS
from fastturn.progress import clock_text
from fastturn.records import read_lines

Record = dict[str, Any]
SAMPLES = 5
_MOST_CHARACTERS = 6000  # of one context or action
_ENDINGS = ("finished", "truncated", "turns", "context", "failed")
_ENDING_MEANING = {
    "finished": "the environment ended it",
    "truncated": "an action was cut by its token budget",
    "turns": "the turn limit was reached",
    "context": "the next context would not fit the model",
    "failed": "the environment raised or missed its deadline",
}


def write_report(out: Path) -> Path:
    """Writes `out`/report.html and returns its path.

    Raises `FileNotFoundError` when `out` is no folder and `ValueError`, naming the file, when one
    of its files cannot be read as JSON.
    """
    out = Path(out)
    if not out.is_dir():
        raise FileNotFoundError(f"{out}: expected the folder of a run (what --out named)")
    run = load(out)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(page_content(run))
    path = out / "report.html"
    part = out / "report.html.part"
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run left behind, parsed; missing files are empty."""

    name: str
    records: list[Record]
    samples: list[Record]
    summary: Record
    config: Record
    recipe: Record

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.get("kind") == kind]

    def evaluation(self, split: str) -> Record:
        """The last evaluation of this split, or {}."""
        found = [record for record in self.of("eval") if record.get("split") == split]
        return found[-1] if found else {}


def load(out: Path) -> RunFiles:
    """The files of the run in `out`."""
    settings = _read_json(out / "config.json")
    return RunFiles(
        name=out.resolve().name,
        records=read_lines(out / "records.jsonl"),
        samples=read_lines(out / "samples.jsonl"),
        summary=_read_json(out / "summary.json"),
        config=settings.get("config") or {},
        recipe=settings.get("recipe") or {},
    )


def _read_json(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object ({error}); delete the file") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}; delete it")
    return value


def page_content(run: RunFiles) -> dict[str, Any]:
    """Everything the template shows, ready to print."""
    times = [r["time"] for r in run.records if isinstance(r.get("time"), int | float)]
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[0])) if times else ""
    recipe = run.summary.get("recipe") or run.config.get("recipe")
    return {
        "name": run.name if recipe else "",
        "recipe": recipe or run.name,
        "algorithm": run.summary.get("algorithm") or run.config.get("algorithm") or "",
        "seed": run.summary.get("seed", run.config.get("seed", "")),
        "began": began,
        "notes": notes(run),
        "tiles": tiles(run),
        "curve": learning_curve(run),
        "evaluations": evaluation_rows(run),
        "ledger": ledger(run),
        "charts": [chart for chart in charts(run) if chart["svg"]],
        "stages": stage_rows(run),
        "events": event_rows(run),
        "endings": ending_rows(run),
        "transcripts": transcripts(run.samples),
        "configuration": configuration(run),
        "versions": run.summary.get("versions") or {},
        "commit": run.summary.get("commit", ""),
        "peak_rss_gib": run.summary.get("peak_rss_gib"),
    }


# --- numbers as text ------------------------------------------------------------------------------


def short(value: Any, digits: int = 3) -> str:
    """A number for people: 1234567 gives "1.23M", 0.00012 gives "0.00012", None gives "–"."""
    if value is None or isinstance(value, str | bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) and abs(value) < 10_000:
        return f"{value:,}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def percent(share: float | None, digits: int = 1) -> str:
    """Example: .8634 gives "86.3 %", None gives "–"."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def hours(value: float) -> str:
    """Example: .0312 gives "0.031", 21.48 gives "21.5", 0 gives "0"."""
    return f"{value:.3f}" if 0.001 <= value < 1 else f"{value:.3g}"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return math.fsum(known) / len(known) if known else None


def _sum(records: Sequence[Record], key: str) -> float:
    return float(sum(r[key] for r in records if isinstance(r.get(key), int | float)))


# --- head -----------------------------------------------------------------------------------------


def notes(run: RunFiles) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if not run.records:
        found.append("No record was written yet: the run has only begun.")
    elif not run.summary:
        found.append(
            "The run has no summary: it is running, or was stopped. The numbers below come from "
            f"its records so far ({_plural(len(run.of('iteration')), 'whole iteration')})."
        )
    counts = _total_counts(run.records)
    if counts[NONFINITE]:
        found.append(f"{counts[NONFINITE]} values were NaN or Inf; they are left out of the plots.")
    lost_s = _spans(run).get("lost", 0.0)
    if lost_s:
        found.append(f"{lost_s:.1f} s were done again after the run was killed (span “lost”).")
    return found


def tiles(run: RunFiles) -> list[dict[str, str]]:
    """The headline numbers."""
    summary, iterations = run.summary, run.of("iteration")
    before, after = run.evaluation("before"), run.evaluation("after")
    tasks = summary.get("eval_tasks") or after.get("eval_tasks") or before.get("eval_tasks")
    found = []
    for key, label in (("success", "sampled at T = 1"), ("greedy", "greedy")):
        first = summary.get(f"{key}_before", before.get(key))
        last = summary.get(f"{key}_after", after.get(key))
        note = label
        if tasks and last is not None:
            around = 1.96 * math.sqrt(last * (1 - last) / tasks)
            note += f" · {tasks} tasks · ±\u00a0{100 * around:.1f} points (95\u00a0%)"
        value = f"{percent(first)} → {percent(last)}"
        found.append({"label": "Held-out success", "value": value, "note": note})
    rollouts = summary.get("rollouts", int(_sum(iterations, "rollouts")))
    count = summary.get("iterations", len(iterations))
    found.append(
        {"label": "Rollouts", "value": short(rollouts), "note": f"in {_plural(count, 'iteration')}"}
    )
    found += _cost_tiles(run)
    packed = summary.get("tokens_packed", _sum(iterations, "tokens_packed"))
    flat = summary.get("tokens_flat", _sum(iterations, "tokens_flat"))
    saved = percent(1 - packed / flat, 0) if flat else "–"
    note = (
        f"{short(packed)} packed instead of {short(flat)} flat" if flat else "none was trained on"
    )
    found.append({"label": "Tokens saved by sharing", "value": saved, "note": note})
    return found


def _cost_tiles(run: RunFiles) -> list[dict[str, str]]:
    wall_s = run.summary.get("wall_s", _sum(run.records, "wall_s"))
    cpu_s = run.summary.get("cpu_s", _sum(run.records, "cpu_s"))
    devices = run.summary.get("devices", 1)
    kind = run.summary.get("device_kind", "cpu")
    cost = run.summary.get("gpu_hours", wall_s * devices / 3600)
    unit = "CPU device-hours" if kind == "cpu" else "GPU-hours"
    return [
        {"label": "Wall-clock", "value": clock_text(wall_s), "note": f"{cpu_s:,.0f} s of CPU time"},
        {
            "label": unit,
            "value": hours(cost),
            "note": f"{devices} × {kind}, held for the whole run, idle included",
        },
    ]


# --- learning -------------------------------------------------------------------------------------


def learning_curve(run: RunFiles) -> dict[str, Any]:
    """Training rollouts per iteration and held-out evaluations, wide and narrow."""
    iterations, evaluations = run.of("iteration"), run.of("eval")
    lines = [
        _line("training rollouts", iterations, "success", 0),
        _line("trunks", iterations, "trunk_success", 2),
        _line("held-out, sampled", evaluations, "success", 1, style="points"),
        _line("held-out, greedy", evaluations, "greedy", 3, style="points"),
    ]
    lines = [line for line in lines if any(y is not None for y in line.y)]
    axis = Axis("percent", least=(0.0, 1.0))
    return {
        "wide": Markup(line_chart(lines, axis, wide=True)),
        "narrow": Markup(line_chart(lines, axis)),
        "legend": _legend(lines),
    }


def evaluation_rows(run: RunFiles) -> list[list[str]]:
    """split, iteration, sampled, greedy, tool calls, turns; at most 12, first and last kept."""
    found = run.of("eval")
    if len(found) > 12:
        found = [found[round(i * (len(found) - 1) / 11)] for i in range(12)]
    return [
        [
            str(record.get("split", "")),
            short(record.get("iteration")),
            percent(record.get("success")),
            percent(record.get("greedy")),
            short(record.get("tool_calls_mean")),
            short(record.get("turns_mean")),
        ]
        for record in found
    ]


def _line(label: str, records: Sequence[Record], key: str, color_: int = 0, **options: Any) -> Line:
    x_key = "step" if records and records[0].get("kind") == "warm" else "iteration"
    known = [r for r in records if isinstance(r.get(x_key), int)]
    x = [r[x_key] for r in known]
    y = [r[key] if isinstance(r.get(key), int | float) else None for r in known]
    return Line(label, x, y, color_, **options)


def _legend(lines: Sequence[Line]) -> list[dict[str, str]]:
    drawn = [line for line in lines if line.label and any(y is not None for y in line.y)]
    return [
        {"label": line.label, "color": color(line.color), "style": line.style} for line in drawn
    ]


# --- ledger ---------------------------------------------------------------------------------------


def _spans(run: RunFiles) -> dict[str, float]:
    if run.summary.get("spans"):
        return dict(run.summary["spans"])
    total: dict[str, float] = defaultdict(float)
    for record in run.records:
        for name, seconds in (record.get("spans") or {}).items():
            total[name] += seconds
    return dict(total)


def ledger(run: RunFiles) -> dict[str, Any]:
    """Spans with share of wall-clock, largest first, and the sum check."""
    spans = _spans(run)
    total_s = math.fsum(spans.values())
    wall_s = run.summary.get("wall_s", _sum(run.records, "wall_s"))
    devices = run.summary.get("devices", 1)
    names = list(SPANS)
    rows = []
    for name, seconds in sorted(spans.items(), key=lambda item: -item[1]):
        share = seconds / total_s if total_s else 0.0
        place = names.index(name) if name in names else len(names)
        rows.append(
            {
                "name": name,
                "what": SPANS.get(name, ""),
                "seconds": f"{seconds:,.2f}",
                "share": percent(share),
                "width": f"{100 * share:.3f}",
                "color": "var(--c7)" if name == "other" else _span_color(place),
                "label": name.replace("_", " ") if share > 0.11 else "",
            }
        )
    held = _plural(devices, "device")
    check = (
        f"The spans sum to {total_s:,.2f} s and wall-clock is {wall_s:,.2f} s "
        f"(difference {abs(total_s - wall_s) / wall_s:.4%}). Times {held} that is "
        f"{wall_s * devices:,.2f} device-seconds: spans and “other” sum to wall-clock × devices."
        if wall_s
        else ""
    )
    return {"rows": rows, "check": check}


def _span_color(place: int) -> str:
    """Neighbours in the canonical list get hues far apart (the golden angle)."""
    return f"hsl({(place * 137 + 210) % 360} var(--sat) var(--lum))"


# --- charts ---------------------------------------------------------------------------------------


def charts(run: RunFiles) -> list[dict[str, Any]]:
    """The small charts; one without data has an empty `svg`."""
    iterations, stages = run.of("iteration"), _by_stage(run)
    return [
        _zero_advantage_chart(iterations, stages),
        _stage_chart(
            "Rollout–training log-probability ratio",
            "geometric mean of π(trainer) / π(sampler), first mini-batch of each stage; "
            "1 when both compute the same",
            stages,
            "ratio_geomean",
            Axis(least=(0.999, 1.001)),
        ),
        _stage_chart(
            "Largest |log ratio|",
            "of one token, first mini-batch of each stage; rounding of the number format",
            stages,
            "abs_log_ratio_max",
            Axis("log"),
            merge="max",
        ),
        _stage_chart(
            "KL to the sampling policy", "per token, all mini-batches", stages, "kl_behavior"
        ),
        _stage_chart(
            "KL to the reference", "per token, k3 estimate", stages, "kl_reference", nonzero=True
        ),
        _clip_chart(stages),
        _tokens_chart(iterations),
        _stage_chart("Entropy", "of the next-token distribution, nats", stages, "entropy"),
        _stage_chart("Gradient norm", "before clipping", stages, "grad_norm"),
        _lengths_chart(iterations),
        _endings_chart(iterations),
        _events_chart(run),
        _chart(
            "Warm start",
            "supervised loss per token, nats",
            [_line("loss", run.of("warm"), "loss", 0)],
            x_label="step",
        ),
    ]


def _chart(
    title: str,
    note: str,
    lines: Sequence[Line],
    axis: Axis | None = None,
    x_label: str = "iteration",
) -> dict[str, Any]:
    svg = line_chart(lines, axis, x_label=x_label)
    legend = _legend(lines) if len(lines) > 1 else []
    return {"title": title, "note": note, "svg": Markup(svg), "legend": legend}


def _by_stage(run: RunFiles) -> dict[int, list[Record]]:
    """Stage records by turn index."""
    found: dict[int, list[Record]] = defaultdict(list)
    for record in run.of("stage"):
        if isinstance(record.get("stage"), int):
            found[record["stage"]].append(record)
    return dict(sorted(found.items()))


def _stage_chart(
    title: str,
    note: str,
    stages: Mapping[int, Sequence[Record]],
    key: str,
    axis: Axis | None = None,
    *,
    merge: str = "mean",
    nonzero: bool = False,
) -> dict[str, Any]:
    """One line per turn index; nothing when `nonzero` and all values are 0 or unknown."""
    lines = [_line(f"turn {k}", records, key, k, merge=merge) for k, records in stages.items()]
    if nonzero and not any(y for line in lines for y in line.y):
        lines = []
    return _chart(title, note, lines, axis)


def _zero_advantage_chart(
    iterations: Sequence[Record], stages: Mapping[int, Sequence[Record]]
) -> dict[str, Any]:
    lines = [
        _line(f"turn {k}", records, "zero_advantage_share", k) for k, records in stages.items()
    ]
    if len(stages) > 1:
        lines.append(_line("all", iterations, "zero_advantage_share", 7, style="dashed"))
    note = "groups whose advantages are all zero: they cost no forward pass and carry no signal"
    return _chart("Zero-advantage share", note, lines, Axis("percent", least=(0.0, 1.0)))


def _clip_chart(stages: Mapping[int, Sequence[Record]]) -> dict[str, Any]:
    merged: dict[int, list[Record]] = defaultdict(list)
    for records in stages.values():
        for record in records:
            if isinstance(record.get("iteration"), int):
                merged[record["iteration"]].append(record)
    x = sorted(merged)
    lines = [
        Line(label, x, [_mean(r.get(key) for r in merged[i]) for i in x], place)
        for label, key, place in (
            ("all mini-batches", "clip_fraction", 0),
            ("first mini-batch", "clip_fraction_first", 1),
        )
    ]
    note = "tokens whose gradient the clip removed; 0 in a first mini-batch"
    return _chart("Clip fraction", note, lines, Axis("percent", least=(0.0, 0.01)))


def _tokens_chart(iterations: Sequence[Record]) -> dict[str, Any]:
    lines = [
        _line("flat: every sibling with its own context", iterations, "tokens_flat", 1),
        _line("packed: contexts computed once", iterations, "tokens_packed", 0),
    ]
    note = "tokens the trainer reads per iteration"
    return _chart("Tokens packed and flat", note, lines, Axis(least=(0.0, 0.0)))


def _lengths_chart(iterations: Sequence[Record]) -> dict[str, Any]:
    lines = [
        _line("turns", iterations, "turns_mean", 0),
        _line("sampled tokens ÷ 10", _tenth(iterations, "action_tokens_mean"), "y", 1),
    ]
    return _chart("Episode length", "mean per rollout", lines, Axis(least=(0.0, 0.0)))


def _tenth(records: Sequence[Record], key: str) -> list[Record]:
    known = [r for r in records if isinstance(r.get(key), int | float)]
    return [{"iteration": r.get("iteration"), "y": r[key] / 10} for r in known]


def _endings_chart(iterations: Sequence[Record]) -> dict[str, Any]:
    known = [r for r in iterations if r.get("endings") and isinstance(r.get("iteration"), int)]
    names = _ending_names(known)
    rows = []
    for name in names:
        rows.append([r["endings"].get(name, 0) / sum(r["endings"].values()) for r in known])
    svg = area_chart([r["iteration"] for r in known], rows)
    legend = [{"label": name, "color": color(i), "style": "area"} for i, name in enumerate(names)]
    note = "share of rollouts by how they ended"
    return {"title": "Episode endings", "note": note, "svg": Markup(svg), "legend": legend}


def _ending_names(records: Sequence[Record]) -> list[str]:
    seen = {name for r in records for name, n in (r.get("endings") or {}).items() if n}
    return [n for n in _ENDINGS if n in seen] + sorted(seen - set(_ENDINGS))


def _events_chart(run: RunFiles) -> dict[str, Any]:
    """The six most frequent events, per rollout."""
    rates = _event_rates(run)
    names = [name for name, _ in _events(run).most_common(6)]
    x = sorted(rates)
    lines = [
        Line(name, x, [rates[i].get(name, 0.0) for i in x], place)
        for place, name in enumerate(names)
    ]
    return _chart("Events", "mean per rollout", lines, Axis(least=(0.0, 0.0)))


# --- tables ---------------------------------------------------------------------------------------


def stage_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Means per turn index, in training order (last turn first)."""
    rows = []
    for k, records in sorted(_by_stage(run).items(), reverse=True):
        groups, silent = _sum(records, "groups"), _sum(records, "groups_silent")
        share = silent / groups if groups else _mean(r.get("zero_advantage_share") for r in records)
        peaks = [r["abs_log_ratio_max"] for r in records if r.get("abs_log_ratio_max") is not None]
        packed, flat = _sum(records, "tokens_packed"), _sum(records, "tokens_flat")
        ratio = _mean(r.get("ratio_geomean") for r in records)
        rows.append(
            {
                "turn": k,
                "color": color(k),
                "groups": short(int(groups)),
                "zero": percent(share, 0),
                "zero_width": f"{100 * (share or 0):.1f}",
                "success": percent(_mean(r.get("success") for r in records)),
                "ratio": "–" if ratio is None else f"{ratio:.6f}",
                "peak": f"{max(peaks):.1e}" if peaks else "–",
                "kl": short(_mean(r.get("kl_behavior") for r in records), 2),
                "clip": percent(_mean(r.get("clip_fraction") for r in records), 2),
                "saved": percent(1 - packed / flat, 0) if flat else "–",
                "skipped": short(int(_sum(records, "skipped"))),
            }
        )
    return rows


def _total_counts(records: Sequence[Record]) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get("counts") or {})
    return total


def _events(run: RunFiles) -> Counter[str]:
    """Totals of what happened in training rollouts."""
    total = _total_counts(run.of("stage") + run.of("iteration"))
    del total[NONFINITE]  # a note at the top tells of it
    return total


def _event_rates(run: RunFiles) -> dict[int, dict[str, float]]:
    """Events per rollout, by iteration."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for record in run.of("stage") + run.of("iteration"):
        if isinstance(record.get("iteration"), int):
            counts[record["iteration"]].update(record.get("counts") or {})
    return {
        r["iteration"]: {n: c / r["rollouts"] for n, c in counts[r["iteration"]].items()}
        for r in run.of("iteration")
        if r.get("rollouts") and isinstance(r.get("iteration"), int)
    }


def _ends(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The first and the last tenth, at least one each."""
    n = max(1, len(items) // 10)
    return items[:n], items[-n:]


def event_rows(run: RunFiles) -> list[list[str]]:
    """event, total, per rollout in the first and in the last tenth of the iterations."""
    rates = [rate for _, rate in sorted(_event_rates(run).items())]
    first, last = _ends(rates)
    return [
        [
            name,
            short(total),
            short(_mean(rate.get(name, 0.0) for rate in first), 2),
            short(_mean(rate.get(name, 0.0) for rate in last), 2),
        ]
        for name, total in _events(run).most_common(30)
    ]


def ending_rows(run: RunFiles) -> list[list[str]]:
    """ending, meaning, rollouts, share in the first and in the last tenth of the iterations."""
    records = [r for r in run.of("iteration") if r.get("endings")]
    first, last = _ends(records)

    def share(part: Sequence[Record], name: str) -> float | None:
        total = sum(sum(r["endings"].values()) for r in part)
        return sum(r["endings"].get(name, 0) for r in part) / total if total else None

    return [
        [
            name,
            _ENDING_MEANING.get(name, ""),
            short(sum(r["endings"].get(name, 0) for r in records)),
            percent(share(first, name)),
            percent(share(last, name)),
        ]
        for name in _ending_names(records)
    ]


def configuration(run: RunFiles) -> dict[str, Any]:
    """Every key with its value, and the recipe's value where it differs."""
    rows = []
    for key, value in run.config.items():
        differs = key in run.recipe and run.recipe[key] != value
        usual = _setting(run.recipe[key]) if differs else ""
        rows.append({"key": key, "value": _setting(value), "differs": differs, "recipe": usual})
    return {"rows": rows, "changed": [row for row in rows if row["differs"]]}


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return (
        "(empty)" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    )


# --- transcripts ----------------------------------------------------------------------------------


def transcripts(samples: Sequence[Record]) -> list[dict[str, Any]]:
    """Five episodes: the run in five parts, of each the one with the largest advantage, in every
    second part the one with the smallest."""
    parts = min(SAMPLES, len(samples))
    cuts = [round(i * len(samples) / parts) for i in range(parts + 1)] if parts else []
    chosen = []
    for place, (a, b) in enumerate(itertools.pairwise(cuts)):
        pick = max if place % 2 == 0 else min
        chosen.append(pick(samples[a:b], key=_advantage))
    return [_transcript(sample) for sample in chosen]


def _advantage(sample: Record) -> float:
    """The advantage of the first trained turn, 0 without one."""
    known = (turn.get("advantage") for turn in sample.get("turns") or [])
    return float(next((advantage for advantage in known if advantage), 0.0))


def _transcript(sample: Record) -> dict[str, Any]:
    total = sample.get("return")
    return {
        "task": str(sample.get("task", "")),
        "iteration": short(sample.get("iteration")),
        "stage": short(sample.get("stage")),
        "ending": str(sample.get("ending", "")),
        "total": short(total),
        "sign": _sign(total),
        "turns": [_turn(turn, sample, i) for i, turn in enumerate(sample.get("turns") or [])],
    }


def _turn(turn: Record, sample: Record, place: int) -> dict[str, Any]:
    advantage = turn.get("advantage")
    return {
        "number": (sample.get("stage") or 0) + place,
        "context": marked(str(turn.get("context", ""))),
        "action": marked(str(turn.get("action", ""))),
        "reward": short(turn.get("reward")),
        "reward_sign": _sign(turn.get("reward")),
        "advantage": "not trained" if advantage is None else f"{advantage:+.3f}",
        "sign": "none" if advantage is None else _sign(advantage),
        "events": [str(event) for event in turn.get("events") or []],
    }


def _sign(value: float | None) -> str:
    return "zero" if not value else "plus" if value > 0 else "minus"


_MARKS = re.compile(
    r"(?P<call><tool_call>.*?(?:</tool_call>|$))"
    r"|(?P<observation><tool_response>.*?(?:</tool_response>|$)|(?<=<\|im_start\|>tool\n)[^<]+)"
    r"|(?P<think><think>.*?(?:</think>|$))"
    r"|(?P<control><\|[^|<>\n]{1,40}\|>)",
    re.DOTALL,
)


def marked(text: str) -> Markup:
    """`text`, escaped, with tool calls, observations, thoughts and control tokens marked.

    The middle of a very long text is left out and the omission is said.
    """
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
    pieces, end = [], 0
    for match in _MARKS.finditer(text):
        pieces.append(escape(text[end : match.start()]))
        pieces.append(Markup('<span class="{}">{}</span>').format(match.lastgroup, match.group()))
        end = match.end()
    pieces.append(escape(text[end:]))
    return Markup("").join(pieces)
