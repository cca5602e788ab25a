"""What a report says of path rules: how often they were met, when they faded, what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastturn.charts import Axis, Line
from fastturn.runfiles import Record, RunFiles, mean, number

FEWER_ACTIONS = (
    0.7  # turns an episode, last tenth over first: below it, falling penalties are doubtful
)


def has_rules(run: RunFiles) -> bool:
    """Whether any rule was ever met."""
    return any(record.get("hits") for record in run.of("iteration") + run.of("eval"))


def rule_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Rules, hits per whole episode in the first and in the last tenth of the iterations, and in
    the last evaluation (sampled)."""
    first, last = ends(run.of("iteration"))
    names = sorted({name for r in run.of("iteration") + run.of("eval") for name in _hits(r)})
    final = _hits(run.evaluation("after"))

    def rate(part: Sequence[Record], name: str) -> float | None:
        return mean(_hits(record).get(name, 0.0) for record in part)

    return [
        {
            "name": name,
            "first": rate(first, name),
            "last": rate(last, name),
            "final": final.get(name, 0.0) if final else None,
        }
        for name in names
    ]


def path_notes(run: RunFiles) -> list[str]:
    """When path rewards began to fade; an alarm when they were earned by doing less."""
    found = []
    scales = [(r["iteration"], number(r.get("path_scale"))) for r in run.of("stage")]
    faded = [iteration for iteration, scale in scales if scale is not None and scale < 1]
    if faded:
        found.append(f"Path rewards began to fade in iteration {min(faded)} (anneal).")
    iterations = run.of("iteration")
    turns = _change(iterations, "whole_turns_mean")
    clean, success = _change(iterations, "violation_free"), _change(iterations, "success")
    if turns[1] < FEWER_ACTIONS * turns[0] and clean[1] > clean[0] and success[1] <= success[0]:
        found.append(
            f"Inaction: turns an episode fell from {turns[0]:.1f} to {turns[1]:.1f} while "
            f"violations fell and success did not rise. The policy may avoid penalties by doing "
            f"nothing: add fulfilments, warm.compliant, or smaller penalties (docs/rules.md)."
        )
    return found


def _change(records: Sequence[Record], key: str) -> tuple[float, float]:
    """The mean of the first and of the last tenth; 0 where it is unknown."""
    first, last = (mean(r.get(key) for r in part) for part in ends(records))
    return first or 0.0, last or 0.0


def path_charts(run: RunFiles) -> list[tuple[str, str, list[Line], Axis]]:
    """Title, note, lines and axis of each chart."""
    iterations, evaluations = run.of("iteration"), run.of("eval")
    share = Axis("percent", least=(0.0, 1.0))
    rules = [row["name"] for row in rule_rows(run)]
    return [
        (
            "Violation-free episodes",
            "no penalty was met and the episode came to its own end",
            [
                _line("training", iterations, lambda r: r.get("violation_free"), 0),
                _line("held-out, sampled", evaluations, lambda r: r.get("violation_free"), 1, True),
                _line(
                    *("held-out, greedy", evaluations, lambda r: r.get("violation_free_greedy")),
                    *(3, True),
                ),
            ],
            share,
        ),
        (
            "Solved and violation-free",
            "an episode that is given up at once breaks no rule, so this is what counts",
            [
                _line("training", iterations, lambda r: r.get("clean_success"), 0),
                _line("held-out, sampled", evaluations, lambda r: r.get("clean_success"), 1, True),
                _line(
                    *("held-out, greedy", evaluations, lambda r: r.get("clean_success_greedy")),
                    *(3, True),
                ),
            ],
            share,
        ),
        (
            "Path rules",
            "hits per whole episode",
            [
                _line(rule, iterations, lambda r, rule=rule: _hits(r).get(rule, 0.0), i)
                for i, rule in enumerate(rules)
            ],
            Axis(least=(0.0, 0.0)),
        ),
        (
            "Variance within groups",
            "of the return, by channel; what does not vary does not teach",
            [
                _line(label, *_stage_means(run, key), i)
                for i, (label, key) in enumerate(
                    (("outcome", "var_outcome"), ("path", "var_path"), ("return", "var_return"))
                )
            ],
            Axis(least=(0.0, 0.0)),
        ),
    ]


def ends(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The first and the last tenth, at least one each."""
    n = max(1, len(items) // 10)
    return items[:n], items[-n:]


def _hits(record: Record) -> dict[str, float]:
    hits: dict[str, float] = record.get("hits") or {}
    return hits


def _line(
    label: str, records: Sequence[Record], value: Any, color: int, points: bool = False
) -> Line:
    known = [r for r in records if isinstance(r.get("iteration"), int)]
    y = [number(value(r)) for r in known]
    return Line(label, [r["iteration"] for r in known], y, color, "points" if points else "line")


def _stage_means(run: RunFiles, key: str) -> tuple[list[Record], Any]:
    """One record an iteration: the mean over its stages."""
    values: dict[int, list[Any]] = {}
    for record in run.of("stage"):
        if isinstance(record.get("iteration"), int):
            values.setdefault(record["iteration"], []).append(record.get(key))
    return [{"iteration": i, key: mean(v)} for i, v in sorted(values.items())], lambda r: r[key]
