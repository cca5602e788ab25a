"""Which charts a report shows: the learning curve, and a list of small ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from fastturn.charts import Axis, Line, line_chart
from fastturn.pathreport import has_rules, path_charts
from fastturn.runfiles import Record, RunFiles, mean, number

ENDINGS = {
    "finished": "the environment ended it",
    "truncated": "an action was cut by its token budget",
    "turns": "the turn limit was reached",
    "context": "the next context would not fit the model",
    "failed": "the environment raised or missed its deadline",
}
_SHARE = Axis("percent", least=(0.0, 1.0))
_FROM_ZERO = Axis(least=(0.0, 0.0))
_Chart = tuple[str, str, list[Line], Axis]  # title, note, lines, vertical axis


def learning_curve(run: RunFiles) -> dict[str, Any]:
    """Training rollouts per iteration and held-out evaluations, wide and narrow."""
    iterations, evaluations = run.of("iteration"), run.of("eval")
    lines = [
        _line("training rollouts", iterations, "success", 0),
        _line("trunks", iterations, "trunk_success", 2),
        _line("held-out, sampled", evaluations, "success", 1, style="points"),
        _line("held-out, greedy", evaluations, "greedy", 3, style="points"),
    ]
    return {
        "wide": Markup(line_chart(lines, _SHARE, wide=True)),
        "narrow": Markup(line_chart(lines, _SHARE)),
        "legend": _known(lines),
    }


def charts(run: RunFiles) -> list[dict[str, Any]]:
    """The small charts that have data: title, note, svg and, with several lines, a legend."""
    found = []
    of_path = path_charts(run) if has_rules(run) else []
    for title, note, lines, axis in [*of_path, *_of_stages(run), *_of_iterations(run)]:
        known = _known(lines)
        svg = line_chart(known, axis, x_label="step" if title == "Warm start" else "iteration")
        legend = known if len(known) > 1 else []
        found.append({"title": title, "note": note, "svg": Markup(svg), "legend": legend})
    return [chart for chart in found if chart["svg"]]


def _of_stages(run: RunFiles) -> list[_Chart]:
    """One line per turn index."""

    def turns(key: str, **options: Any) -> list[Line]:
        return [_line(f"turn {k}", rs, key, k, **options) for k, rs in run.stages.items()]

    all_turns = _line("all", run.of("iteration"), "zero_advantage_share", 7, style="dashed")
    reference = turns("kl_reference")
    return [
        (
            "Zero-advantage share",
            "groups whose advantages are all zero: they cost no forward pass and carry no signal",
            [*turns("zero_advantage_share"), *([all_turns] if len(run.stages) > 1 else [])],
            _SHARE,
        ),
        (
            "Rollout–training log-probability ratio",
            "geometric mean of π(trainer) / π(sampler), first mini-batch of each stage; "
            "1 when both compute the same",
            turns("ratio_geomean"),
            Axis(least=(0.999, 1.001)),
        ),
        (
            "Largest |log ratio|",
            "of one token, first mini-batch of each stage; rounding of the number format",
            turns("abs_log_ratio_max", merge="max"),
            Axis("log"),
        ),
        (
            "KL to the sampling policy",
            "per token, all mini-batches; less than 1e-9 is drawn as 1e-9",
            turns("kl_behavior"),
            Axis("log", least=(1e-9, 1e-3)),
        ),
        (
            "KL to the reference",
            "per token, k3 estimate",
            reference if any(any(line.y) for line in reference) else [],
            _FROM_ZERO,
        ),
        ("Entropy", "of the next-token distribution, nats", turns("entropy"), _FROM_ZERO),
        ("Gradient norm", "before clipping", turns("grad_norm"), _FROM_ZERO),
    ]


def _of_iterations(run: RunFiles) -> list[_Chart]:
    iterations = run.of("iteration")
    return [
        (
            "Clip fraction",
            "tokens whose gradient the clip removed; 0 in a first mini-batch",
            [
                _over_stages("all mini-batches", run, "clip_fraction", 0),
                _over_stages("first mini-batch", run, "clip_fraction_first", 1, style="dashed"),
            ],
            Axis("percent", least=(0.0, 0.01)),
        ),
        (
            "Tokens packed and flat",
            "tokens the trainer reads per iteration",
            [
                _line("flat: every sibling with its own context", iterations, "tokens_flat", 1),
                _line("packed: contexts computed once", iterations, "tokens_packed", 0),
            ],
            _FROM_ZERO,
        ),
        (
            "Episode length",
            "mean per rollout",
            [
                _line("turns", iterations, "turns_mean", 0),
                _line("sampled tokens ÷ 10", iterations, "action_tokens_mean", 1, scale=0.1),
            ],
            _FROM_ZERO,
        ),
        (
            "Unfinished episodes",
            "share of rollouts that the environment did not end, by what ended them",
            _unfinished(iterations),
            Axis("percent", least=(0.0, 0.05)),
        ),
        (
            "Events",
            "mean per rollout, the most frequent; less than 0.001 is drawn as 0.001",
            _events(run),
            Axis("log", floor=1e-3),
        ),
        (
            "Warm start",
            "supervised loss per token, nats",
            [_line("loss", run.of("warm"), "loss", x_key="step")],
            _FROM_ZERO,
        ),
    ]


def ending_names(records: Sequence[Record]) -> list[str]:
    """Endings that occurred: the known ones in their order, then the others."""
    seen = {name for r in records for name, n in (r.get("endings") or {}).items() if n}
    return [name for name in ENDINGS if name in seen] + sorted(seen - set(ENDINGS))


def _line(
    label: str,
    records: Sequence[Record],
    key: str,
    color: int = 0,
    *,
    x_key: str = "iteration",
    scale: float = 1.0,
    **options: Any,
) -> Line:
    known = [r for r in records if isinstance(r.get(x_key), int)]
    y = [None if (value := number(r.get(key))) is None else value * scale for r in known]
    return Line(label, [r[x_key] for r in known], y, color, **options)


def _known(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if any(y is not None for y in line.y)]


def _over_stages(label: str, run: RunFiles, key: str, color: int, **options: Any) -> Line:
    """Mean over the stages of each iteration."""
    values: dict[int, list[Any]] = defaultdict(list)
    for record in (record for records in run.stages.values() for record in records):
        if isinstance(record.get("iteration"), int):
            values[record["iteration"]].append(record.get(key))
    x = sorted(values)
    return Line(label, x, [mean(values[i]) for i in x], color, **options)


def _unfinished(iterations: Sequence[Record]) -> list[Line]:
    known = [r for r in iterations if r.get("endings") and isinstance(r.get("iteration"), int)]
    x = [r["iteration"] for r in known]
    return [
        Line(name, x, [r["endings"].get(name, 0) / sum(r["endings"].values()) for r in known], i)
        for i, name in enumerate(ending_names(known))
        if name != "finished"
    ]


def _events(run: RunFiles) -> list[Line]:
    x = sorted(run.event_rates)
    return [
        Line(name, x, [run.event_rates[i].get(name, 0.0) for i in x], color)
        for color, (name, _) in enumerate(run.events.most_common(6))
    ]
