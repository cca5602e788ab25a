"""The commands that look: `fastturn eval | report | doctor | check-env | rules | probe | recipes`.

Each takes the parsed options and returns the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from fastturn.config import SMOLLM2, Config, ConfigError, override
from fastturn.recipes import recipe_of

FAILED = 1


def evaluate(options: argparse.Namespace) -> int:
    """Models tried and written down; what was finished is written even if the rest fails."""
    paths: list[Path] = [options.path, *options.beside]
    for path in paths:
        if str(path) != SMOLLM2 and not (path / "config.json").is_file():
            reason = "it holds no config.json" if path.is_dir() else "there is no such folder"
            raise ConfigError(
                f"eval {path}: expected the folder of a run or of a model in Hugging Face format, "
                f"or {SMOLLM2}, but {reason}; name one, for example runs/quickstart-rtpo-seed0"
            )
    from rich.console import Console
    from rich.table import Column, Table

    from fastturn.evalpages import rows, write
    from fastturn.evaluate import SETTINGS, Subject, examine
    from fastturn.progress import Progress

    for name in options.settings:
        if name not in SETTINGS:
            raise ConfigError(f"--settings {name}: expected some of {', '.join(SETTINGS)}")
    pairs = [*([f"data.domain={options.tasks}"] if options.tasks else []), *options.pairs]
    out = _results_folder(options.out or paths[0])
    found: list[Subject] = []
    written: list[Path] = []
    try:
        with Progress() as progress:
            for place, path in enumerate(paths):
                for subject in examine(path, pairs, options.settings, options.samples, progress):
                    found[place:] = [subject]
                    written = write(found, out)
    finally:
        for file in written:
            print(file)
    heads, measured = rows(found)
    table = Table("measure", *(Column(head, overflow="fold") for head in heads))
    for name, cells in measured:
        table.add_row(name, *cells)
    Console().print(table)
    return 0


def _results_folder(out: Path) -> Path:
    """The folder `out`, made before hours are spent on what goes into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: no folder can be made there ({error.strerror}); name another"
        ) from error
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out}: the folder may not be written; name another")
    return out


def report(options: argparse.Namespace) -> int:
    path = _folder_of_run("report", options.path)
    from fastturn.report import write_report

    if options.servers:
        from fastturn.timeline import align

        print(align(path, options.servers))
    print(write_report(path, options.price))
    if options.slowest or options.price is not None:
        from rich.console import Console

        from fastturn.bill import show_bill, show_slowest
        from fastturn.runfiles import load

        run, console = load(path), Console()
        if options.price is not None:
            show_bill(run, options.price, console)
        if options.slowest:
            show_slowest(run, console)
    return 0


def _folder_of_run(what: str, path: Path) -> Path:
    """`path`; `ConfigError` when no run has written records there."""
    if not (path / "records.jsonl").is_file():
        reason = "it holds no records.jsonl" if path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"{what} {path}: expected the folder of a run, but {reason}; "
            f"name one that fastturn train has written"
        )
    return path


def doctor(options: argparse.Namespace) -> int:
    config = override(recipe_of(options.recipe), options.pairs)
    from rich.console import Console

    from fastturn.doctor import examine
    from fastturn.findings import FAIL, show
    from fastturn.progress import Progress

    with Progress(quiet=options.json) as progress:
        lines = examine(config, progress)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        show("doctor", lines, Console())
    return FAILED if any(line.status == FAIL for line in lines) else 0


def check_env(options: argparse.Namespace) -> int:
    """The contract of an environment, tried on its tasks; status 1 when it is broken."""
    # Domains describe their tools to models that can read.
    described = [f"data.domain={options.domain}", f"model.path={SMOLLM2}"]
    config = override(Config(), [*described, *options.pairs])
    from rich.console import Console

    from fastturn.conformance import conform
    from fastturn.envs import load_domain
    from fastturn.findings import FAIL, show

    lines = conform(load_domain(config), config)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        show(f"check-env {options.domain}", lines, Console())
    return FAILED if any(line.status == FAIL for line in lines) else 0


def rules(options: argparse.Namespace) -> int:
    """The path rules of a recipe, tried on its scripts; status 1 when one fails a check."""
    config = override(recipe_of(options.recipe), options.pairs)
    from rich.console import Console

    from fastturn.envs import load_domain
    from fastturn.findings import FAIL, show
    from fastturn.rulebook import (
        Tried,
        as_rows,
        references,
        review,
        scripted,
        show_rules,
        trained_on,
    )
    from fastturn.rules import Ruled

    domain = load_domain(config)
    if not isinstance(domain, Ruled) or not domain.rules:
        raise ConfigError(
            f"data.domain={config.data.domain!r} has no path rules; declare some (docs/rules.md) "
            f"in a file and name it by data.rules"
        )
    shown = references(domain, config)
    played = scripted(domain, config, config.warm.compliant)
    tried, lines = review(domain.rules, played, shown, deadline_s=config.data.env_timeout_s)
    lines.append(trained_on(config.rewards))
    if options.json:
        print(json.dumps({"rules": as_rows(tried), "checks": [asdict(x) for x in lines]}, indent=2))
    else:
        guided = hasattr(domain.domain, "compliant_demonstrator") and tried.episodes
        show_rules(tried, Tried(tried.rules, shown) if guided else None, Console())
        show("design rules", lines, Console())
    return FAILED if any(line.status == FAIL for line in lines) else 0


def probe(options: argparse.Namespace) -> int:
    """What varies within groups of the base policy: a table, JSON, and a plot if asked for."""
    config = override(recipe_of(options.recipe), options.pairs)
    from rich.console import Console

    from fastturn.probe import check_plot, probe, show, write_plot
    from fastturn.progress import Progress

    if options.plot:
        check_plot(options.plot)
    with Progress(quiet=options.json) as progress:
        found = probe(config, progress)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found, Console())
    if options.plot:
        write_plot(found, options.plot)
    return 0


def plan(options: argparse.Namespace) -> int:
    """What a recipe would take on GPUs, simulated."""
    config = override(recipe_of(options.recipe), options.pairs)
    from rich.console import Console

    from fastturn.calibrate import fitted, lengths_for, observed, show_fit, show_prediction
    from fastturn.devices import device_called
    from fastturn.forecast import Case, as_dict, best, show, work_of
    from fastturn.lengths import counter, lengths_of, run_lengths
    from fastturn.runfiles import load

    device = device_called(options.device)
    runs, predicted = (
        [observed(load(_folder_of_run(what, path)), counter(path)) for path in folders]
        for what, folders in (("--calibrate", options.calibrate), ("--predict", options.predict))
    )
    if predicted and not runs:
        raise ConfigError("--predict: nothing to predict from; name other runs by --calibrate")
    factors = fitted(runs, device) if runs else None
    known = lengths_for(config, runs) if runs else None
    if options.run is not None:
        known = run_lengths(load(_folder_of_run("--run", options.run)), counter(options.run))
    lengths = lengths_of(options.lengths, known)
    config = replace(config, device=device.kind)
    case = Case(config, device, options.gpus, lengths, config.seed, factors)
    if options.json:
        print(json.dumps(as_dict(best(case, work_of(config))), indent=2))
        return 0
    if factors:
        show_fit(runs, device, factors, Console())
        for run in predicted:
            show_prediction(run, runs, device, factors, Console())
    show(case, Console())
    return 0


def bench(options: argparse.Namespace) -> int:
    """A suite of benchmarks, which are no part of the trainer: nothing else imports them."""
    from fastturn.bench.suites import run

    return run(options)


def recipes(options: argparse.Namespace) -> int:
    from fastturn.recipes import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        summary = (recipe.__doc__ or "").strip().split("\n")[0]
        print(f"{name:<{width}}  {summary}")
    return 0
