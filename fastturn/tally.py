"""An iteration and a run summed up: for the records, and for the person who asked for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastturn.config import Config
from fastturn.types import Trajectory

if TYPE_CHECKING:
    from fastturn.run import Cursor


def book(tally: Counter[str], episodes: Sequence[Trajectory], prefix: str = "") -> None:
    """Add finished episodes to the iteration's sums; trunks have their own successes. What rules
    say is of whole episodes: those that begin at turn 0, trunks included."""
    for episode in episodes:
        tally["rollouts"] += 1
        tally[f"{prefix}episodes"] += 1
        tally[f"{prefix}success"] += episode.success
        tally[f"{prefix}return"] += episode.discounted_return()  # type: ignore[assignment]
        tally[f"{prefix}turns"] += len(episode.turns)
        tally[f"{prefix}action_tokens"] += episode.tokens_sampled
        tally[f"{prefix}ending_{episode.ending}"] += 1
        if episode.first_turn == 0:
            tally["whole"] += 1
            tally["violation_free"] += episode.violation_free
            tally["whole_success"] += episode.success
            tally["clean_success"] += episode.clean_success
            tally["whole_turns"] += len(episode.turns)
            tally.update(f"hit_{hit.rule}" for turn in episode.turns for hit in turn.path)


def iteration_record(iteration: int, tally: Counter[str], totals: Counter[str]) -> dict[str, Any]:
    """The record of an iteration; its sums are added to the run's `totals`."""
    totals.update({k: tally[k] for k in ("rollouts", "tokens_packed", "tokens_flat")})
    totals.update({k: tally[k] for k in ("groups", "groups_silent")})
    totals["successes"] += tally["success"] + tally["trunk_success"]
    totals["dead"] += not tally["steps"]

    def mean(name: str, over: str = "episodes") -> float:
        return tally[name] / tally[over] if tally[over] else 0.0

    hits = {k.removeprefix("hit_"): mean(k, "whole") for k in sorted(tally) if k[:4] == "hit_"}
    endings = {k.removeprefix("ending_"): n for k, n in tally.items() if k.startswith("ending_")}
    return {
        "iteration": iteration,
        "rollouts": tally["rollouts"],
        "rollouts_total": totals["rollouts"],
        "success": mean("success"),
        "trunk_success": mean("trunk_success", "trunk_episodes"),
        "return_mean": mean("return"),
        "turns_mean": mean("turns"),
        "action_tokens_mean": mean("action_tokens"),
        "zero_advantage_share": mean("groups_silent", "groups"),
        "dead": not tally["steps"],
        "violation_free": mean("violation_free", "whole"),
        "clean_success": mean("clean_success", "whole"),
        "violation_free_success": mean("clean_success", "whole_success"),
        "whole_turns_mean": mean("whole_turns", "whole"),
        "hits": hits,
        "tokens_packed": tally["tokens_packed"],
        "tokens_flat": tally["tokens_flat"],
        "endings": dict(sorted(endings.items())),
    }


def run_summary(config: Config, cursor: Cursor) -> dict[str, Any]:
    """What a finished run has come to; times and versions are the meter's."""
    totals, before, after = cursor.totals, cursor.before, cursor.after
    first = totals["actions_first"]
    return {
        "recipe": config.recipe,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "success_before": before["success"],
        "success_after": after["success"],
        "greedy_before": before["greedy"],
        "greedy_after": after["greedy"],
        "violation_free_before": before["violation_free"],
        "violation_free_after": after["violation_free"],
        "violation_free_greedy_after": after["violation_free_greedy"],
        "clean_success_before": before["clean_success"],
        "clean_success_after": after["clean_success"],
        "clean_success_greedy_after": after["clean_success_greedy"],
        "hits_before": before["hits"],
        "hits_after": after["hits"],
        "eval_tasks": after["eval_tasks"],
        "success_idle": after["idle"],
        "iterations": cursor.iteration,
        "rollouts": totals["rollouts"],
        "successes": totals["successes"],
        "tokens_packed": totals["tokens_packed"],
        "tokens_flat": totals["tokens_flat"],
        "zero_advantage_share": totals["groups_silent"] / max(1, totals["groups"]),
        "dead_share": totals["dead"] / max(1, cursor.iteration),
        "overlap_saved_s": {name: totals[f"saved_{name}_s"] for name in ("stream", "prefetch")},
        "ratio_geomean": math.exp(totals["log_ratio_sum"] / first) if first else None,
    }


def result_rows(summary: dict[str, Any], report: Path) -> list[tuple[str, str]]:
    """What a person wants to see at the end."""
    packed, flat = summary["tokens_packed"], summary["tokens_flat"]
    free = f"{summary['violation_free_before']:.1%} -> {summary['violation_free_after']:.1%}"
    clean = f"{summary['clean_success_before']:.1%} -> {summary['clean_success_after']:.1%}"
    ruled = summary["hits_before"] or summary["hits_after"]
    return [
        ("sampled success", f"{summary['success_before']:.1%} -> {summary['success_after']:.1%}"),
        ("greedy success", f"{summary['greedy_before']:.1%} -> {summary['greedy_after']:.1%}"),
        ("doing nothing", f"{summary['success_idle']:.1%}"),
        *([("violation-free", free), ("solved and violation-free", clean)] if ruled else []),
        ("rollouts", f"{summary['rollouts']:,}"),
        ("wall-clock / CPU", f"{summary['wall_s']:.0f} s / {summary['cpu_s']:.0f} s"),
        ("silent groups", f"{summary['zero_advantage_share']:.0%}"),
        ("tokens saved by sharing", f"{1 - packed / flat:.0%}" if flat else "-"),
        ("report", str(report)),
    ]
