"""report.html: one file that shows what a run did, made from the files the run left behind.

    runfiles    reads them; sums and means          figures     which charts
    excerpts    which transcripts, marked           charts      lines as SVG
    numerals    numbers as text, the filters of     report.html.j2, the page

What a missing file would have shown is left out, and that is said. The page needs no network and
holds no script; everything that a model or an environment wrote is escaped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from fastturn import numerals
from fastturn.bill import bill, device_seconds, shares, waiting
from fastturn.charts import color
from fastturn.excerpts import transcripts
from fastturn.figures import ENDINGS, charts, ending_names, learning_curve
from fastturn.meter import SPANS
from fastturn.numerals import hours, percent, plural, short
from fastturn.pathreport import ends, path_notes, rule_rows
from fastturn.progress import clock_text
from fastturn.runfiles import Record, RunFiles, load, mean, total

_EVALUATIONS, _EVENTS = 12, 30  # rows shown at most


def write_report(out: Path, price: float | None = None) -> Path:
    """Writes `out`/report.html and returns its path. `price` of a device-hour, for the bill.

    Raises `FileNotFoundError` when `out` is no folder and `ValueError`, naming the file, when one
    of its files cannot be read as JSON.
    """
    out = Path(out)
    if not out.is_dir():
        raise FileNotFoundError(f"{out}: expected the folder of a run (what --out named)")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    for name in ("short", "percent", "fixed", "plural", "sign"):
        environment.filters[name] = getattr(numerals, name)
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(page_content(load(out), price))
    path = out / "report.html"
    part = out / "report.html.part"
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    return path


def page_content(run: RunFiles, price: float | None = None) -> dict[str, Any]:
    """Everything the template shows."""
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
        "waiting": shares(waiting(run), device_seconds(run)),
        "bill": bill(run, price),
        "charts": charts(run),
        "stages": stage_rows(run),
        "events": event_rows(run),
        "endings": ending_rows(run),
        "rules": rule_rows(run),
        "transcripts": transcripts(run.samples),
        "configuration": configuration(run),
        "versions": run.summary.get("versions") or {},
        "commit": run.summary.get("commit", ""),
        "peak_rss_gib": run.summary.get("peak_rss_gib"),
    }


# --- head -----------------------------------------------------------------------------------------


def notes(run: RunFiles) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if not run.records:
        found.append("No record was written yet: the run has only begun.")
    elif not run.summary:
        found.append(
            "The run has no summary: it is running, or was stopped. The numbers below come from "
            f"its records so far ({plural(len(run.of('iteration')), 'whole iteration')})."
        )
    if run.nonfinite:
        found.append(f"{run.nonfinite} values were NaN or Inf; they are left out of the plots.")
    if run.spans.get("lost"):
        lost_s = f"{run.spans['lost']:.1f} s"
        found.append(f"{lost_s} were done again after the run was killed (span “lost”).")
    return found + path_notes(run)


def tiles(run: RunFiles) -> list[dict[str, str]]:
    """The headline numbers: label, value, note."""
    summary = run.summary
    count = summary.get("iterations", len(run.of("iteration")))
    rollouts = short(int(summary.get("rollouts", total(run.of("iteration"), "rollouts"))))
    wall_s, devices = run.of_run("wall_s"), summary.get("devices", 1)
    kind = summary.get("device_kind", "cpu")
    cost = hours(device_seconds(run) / 3600)
    return [
        _success_tile(run, "success", "sampled at T = 1"),
        _success_tile(run, "greedy", "greedy"),
        _tile("Rollouts", rollouts, f"in {plural(count, 'iteration')}"),
        _tile(
            "Wall-clock",
            f"{wall_s:.1f} s" if wall_s < 100 else clock_text(wall_s),
            f"{run.of_run('cpu_s'):,.0f} s of CPU time",
        ),
        _tile(
            "CPU device-hours" if kind == "cpu" else "GPU-hours",
            cost,
            f"{devices} × {kind}, held for the whole run, idle included",
        ),
        _sharing_tile(run),
    ]


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _success_tile(run: RunFiles, key: str, label: str) -> dict[str, str]:
    before, after = run.evaluation("before"), run.evaluation("after")
    first = run.summary.get(f"{key}_before", before.get(key))
    last = run.summary.get(f"{key}_after", after.get(key))
    tasks = run.summary.get("eval_tasks") or (after or before).get("eval_tasks")
    note = label
    if tasks and last is not None:
        around = 1.96 * math.sqrt(max(0.0, last * (1 - last)) / tasks)
        note += f" · {tasks} tasks · ±\u00a0{100 * around:.1f} points (95\u00a0%)"
    idle = run.summary.get("success_idle", after.get("idle"))
    if idle is not None:
        note += f" · doing nothing {percent(idle)}"
    return _tile("Held-out success", f"{percent(first)} → {percent(last)}", note)


def _sharing_tile(run: RunFiles) -> dict[str, str]:
    iterations = run.of("iteration")
    packed, flat = (
        run.summary.get(key, total(iterations, key)) for key in ("tokens_packed", "tokens_flat")
    )
    if not flat:
        return _tile("Tokens saved by sharing", "–", "none was trained on")
    note = f"{short(packed)} packed instead of {short(flat)} flat"
    return _tile("Tokens saved by sharing", percent(1 - packed / flat, 0), note)


# --- tables ---------------------------------------------------------------------------------------


def ledger(run: RunFiles) -> dict[str, Any]:
    """Spans with their share of wall-clock, largest first, and what they must sum to."""
    total_s = math.fsum(run.spans.values())
    names = list(SPANS)
    rows = []
    for name, seconds in sorted(run.spans.items(), key=lambda item: -item[1]):
        place = names.index(name) if name in names else len(names)
        rows.append(
            {
                "name": name,
                "what": SPANS.get(name, ""),
                "seconds": seconds,
                "share": seconds / total_s if total_s else 0.0,
                # Neighbours in the canonical list get hues far apart (the golden angle).
                "hue": None if name == "other" else (place * 137 + 210) % 360,
            }
        )
    devices = run.summary.get("devices", 1)
    sums = {"sum_s": total_s, "wall_s": run.of_run("wall_s"), "device_s": device_seconds(run)}
    return {"rows": rows, "devices": devices, **sums}


def evaluation_rows(run: RunFiles) -> list[Record]:
    """Evaluation records, at most 12, first and last kept; one of two at the end is enough."""
    last = run.evaluation("after").get("iteration")
    found = [r for r in run.of("eval") if r.get("split") != "during" or r.get("iteration") != last]
    if len(found) > _EVALUATIONS:
        step = (len(found) - 1) / (_EVALUATIONS - 1)
        found = [found[round(i * step)] for i in range(_EVALUATIONS)]
    return found


def stage_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Means per turn index, in training order (last turn first)."""
    rows = []
    for k, records in reversed(run.stages.items()):
        groups, silent = total(records, "groups"), total(records, "groups_silent")
        packed, flat = total(records, "tokens_packed"), total(records, "tokens_flat")
        zero = silent / groups if groups else _mean_of(records, "zero_advantage_share")
        peaks = [r["abs_log_ratio_max"] for r in records if r.get("abs_log_ratio_max") is not None]
        rows.append(
            {
                "turn": k,
                "color": color(k),
                "groups": int(groups),
                "zero": zero,
                "success": _mean_of(records, "success"),
                "ratio": _mean_of(records, "ratio_geomean"),
                "peak": max(peaks, default=None),
                "kl": _mean_of(records, "kl_behavior"),
                "clip": _mean_of(records, "clip_fraction"),
                "saved": 1 - packed / flat if flat else None,
                "skipped": int(total(records, "skipped")),
            }
        )
    return rows


def _mean_of(records: Sequence[Record], key: str) -> float | None:
    return mean(record.get(key) for record in records)


def event_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Events: total, and per rollout in the first and in the last tenth of the iterations."""
    first, last = ends([rate for _, rate in sorted(run.event_rates.items())])
    return [
        {
            "name": name,
            "total": count,
            "first": mean(rate.get(name, 0.0) for rate in first),
            "last": mean(rate.get(name, 0.0) for rate in last),
        }
        for name, count in run.events.most_common(_EVENTS)
    ]


def ending_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Endings: rollouts, and their share in the first and in the last tenth of the iterations."""
    records = [r for r in run.of("iteration") if r.get("endings")]
    first, last = ends(records)

    def count(part: Sequence[Record], name: str) -> int:
        return sum(r["endings"].get(name, 0) for r in part)

    def share(part: Sequence[Record], name: str) -> float | None:
        rollouts = sum(sum(r["endings"].values()) for r in part)
        return count(part, name) / rollouts if rollouts else None

    return [
        {
            "name": name,
            "what": ENDINGS.get(name, ""),
            "total": count(records, name),
            "first": share(first, name),
            "last": share(last, name),
        }
        for name in ending_names(records)
    ]


def configuration(run: RunFiles) -> list[dict[str, Any]]:
    """Every key with its value, and the recipe's value where it differs."""
    rows = []
    for key, value in run.config.items():
        differs = key in run.recipe and run.recipe[key] != value
        usual = _setting(run.recipe[key]) if differs else ""
        rows.append({"key": key, "value": _setting(value), "differs": differs, "recipe": usual})
    return rows


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)
