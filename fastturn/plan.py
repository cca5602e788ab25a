"""What a run would do and need, worked out from the configuration alone: `--dry-run`.

Nothing is started, loaded or downloaded, and torch is not imported: counts follow from the
configuration, memory from the model's sizes (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, as_dict
from fastturn.memory import (
    HOST,
    KEPT_CACHE,
    PROCESS_GIB,
    device_kind,
    device_sum,
    held_gib,
    sampling_gib,
    saving_gib,
    step_gib,
)
from fastturn.shape import Shape, shape_of


def derive(config: Config) -> dict[str, int]:
    """Counts that follow from the configuration; rollouts are upper bounds, because an episode
    that ends early has fewer boundaries to fork.

    Example, RTPO with 32 tasks, 1 trunk, 4 turns, G = 5: 32 · (1 + 4 · 4) = 544 rollouts and 4
    stages an iteration; GRPO with G = 16: 512 rollouts and 1 stage. DAPO counts all its candidates.
    """
    algorithm = algorithm_of(config)
    forks = config.group_size - algorithm.unsampled
    grown = algorithm.stages is not None
    roots = config.tasks * algorithm.candidates * (config.trunks if grown else 1)
    turns = config.turns if algorithm.reverse else 1
    stages = turns if algorithm.passes is None else 1
    steps = config.turns if algorithm.passes else 1
    rollouts = roots * (grown + turns * forks)
    between = (config.iterations - 1) // config.eval_every if config.eval_every else 0
    evaluations = 2 + max(0, between)
    return {
        "rollouts_iteration": rollouts,
        "rollouts": rollouts * config.iterations,
        "stages_iteration": stages,
        "groups_stage": roots * turns // stages,
        "rollouts_stage": roots * turns // stages * forks,
        "steps_stage": config.loss.epochs * config.loss.minibatches * steps,
        "tokens_microbatch": max(config.pack_tokens, config.model.max_context),
        "evaluations": evaluations,
        "rollouts_evaluation": 2 * config.data.eval_tasks,
        "demonstrations": config.warm.steps * config.warm.batch,
    }


def memory_gib(config: Config, ranks: int = 1) -> list[dict[str, float]]:
    """GiB by use of one of `ranks` processes: what is held as long as the run lasts, what the peak
    of a step of full micro-batches adds to it, what sampling adds at most; empty when the shape is
    unknown. A step and sampling are never in hand at the same time."""
    shape = shape_of(config)
    if shape is None:
        return []
    derived = derive(config)
    rows = -(-max(derived["rollouts_stage"], config.data.eval_tasks) // ranks)
    return [
        held_gib(config, shape, ranks),
        step_gib(config, shape, ranks, derived["tokens_microbatch"]),
        sampling_gib(config, shape, rows),
    ]


LABELS = {
    "rollouts_iteration": "rollouts an iteration (at most)",
    "rollouts": "rollouts of the run (at most)",
    "stages_iteration": "stages an iteration (at most)",
    "groups_stage": "groups a stage (at most)",
    "rollouts_stage": "rollouts a stage (at most)",
    "steps_stage": "optimiser steps a stage",
    "tokens_microbatch": "tokens of a micro-batch (at most)",
    "evaluations": "evaluations",
    "rollouts_evaluation": "rollouts an evaluation",
    "demonstrations": "demonstrations of the warm start",
}


CAPTIONS = {
    "cpu": "peaks are of torch's allocator; on a CPU the C library keeps up to .4 of them on top,\n"
    "unless MALLOC_MMAP_THRESHOLD_=262144 is set",
    "cuda": "peaks are of torch's allocator; what CUDA itself takes of a GPU comes on top",
}


def print_plan(
    config: Config, recipe: Config, console: Console | None = None, *, ranks: int = 1
) -> None:
    """Print the resolved configuration (what differs from `recipe` is marked with both values),
    the derived numbers and the memory estimate of one of `ranks` processes."""
    console = console or Console()
    console.print(_settings(config, recipe))
    console.print(_numbers(derive(config)))
    shape = shape_of(config)
    if shape:
        console.print(_memory(config, shape, ranks))
        console.print(f"{shape.parameters / 1e6:.2f} million parameters in {config.model.dtype}")
    else:
        console.print(f"memory: unknown until {config.model.path} has been downloaded")
    console.print("dry run: nothing was started")


def _settings(config: Config, recipe: Config) -> Table:
    table = _table(f"configuration ({config.recipe})", ("key", "value", "in the recipe"))
    before = as_dict(recipe)
    for key, value in as_dict(config).items():
        if value == before[key]:
            table.add_row(key, _text(value), "")
        else:
            table.add_row(f"* {key}", _text(value), _text(before[key]), style="bold yellow")
    return table


def _numbers(derived: Mapping[str, int]) -> Table:
    table = _table("derived numbers", ("what", "count"))
    table.columns[1].justify = "right"
    for key, value in derived.items():
        table.add_row(LABELS[key], f"{value:,}")
    return table


def _memory(config: Config, shape: Shape, ranks: int) -> Table:
    """What is held, a step and sampling, each with its sum on the device; the process at its
    largest, where the device is the host."""
    held, step, sampling = memory_gib(config, ranks)
    kind = device_kind(config.device)
    of = "" if ranks == 1 else f" of one of {ranks} ranks"
    table = _table(f"memory{of}, device {kind}", ("use", "size"))
    table.columns[1].justify = "right"
    tokens = derive(config)["tokens_microbatch"]
    always, peaks = device_sum(held), []
    for uses, total in (
        (held, "held all the time"),
        (step, f"peak of a step of micro-batches of {tokens:,} tokens, predicted"),
        (sampling, "peak of sampling, at most"),
    ):
        for name, gib in uses.items():
            table.add_row(name, _size(gib))
        peaks.append(device_sum(uses) + (always if uses is not held else 0.0))
        table.add_row(total, _size(peaks[-1]), style="bold")
    saving = saving_gib(config, shape, ranks)
    table.add_row(f"copy that a checkpoint is written from{HOST}", _size(saving))
    if kind == "cpu":
        most = max(peaks[1] + sampling.get(KEPT_CACHE, 0.0), peaks[2]) + saving + PROCESS_GIB
        name = f"process, at most: the larger peak, what is kept, {_size(PROCESS_GIB)} of libraries"
        table.add_row(name, _size(most), style="bold")
    else:
        host = sum(gib for part in (held, step) for gib in part.values()) - device_sum(held, step)
        name = f"host, at most: what is there, {_size(PROCESS_GIB)} of libraries"
        table.add_row(name, _size(host + saving + PROCESS_GIB), style="bold")
    table.caption = CAPTIONS[kind]
    return table


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "(none)"
    return str(value) if value != "" else "(empty)"
