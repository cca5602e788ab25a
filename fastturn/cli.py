"""The command line: `fastturn COMMAND`.

    train, serve, launch    here
    eval, report, doctor, check-env, rules, probe    in commands.py

torch and transformers are imported only by the commands that compute, so help, errors, recipes and
the dry run answer at once. Exit status: 0 done, 1 the run failed, 2 bad input, 130 stopped by
Ctrl-C (everything is saved, `--resume` continues).
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastturn import commands
from fastturn.config import Config, as_dict, override
from fastturn.folders import has_records, holds_run, run_folder
from fastturn.recipes import recipe_of

if TYPE_CHECKING:
    from fastturn.dist import World

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
NAME = "a name that `fastturn recipes` lists"
OPTIONS = ("--out", "--resume", "--nproc", "--dry-run", "--price", "--help")

# Errors with a message for the user: (module, class, exit status). Looked up among the modules that
# are loaded, because an error can only come from one that is.
KNOWN_ERRORS = (
    ("fastturn.config", "ConfigError", BAD_INPUT),
    ("fastturn.envs.base", "DomainError", BAD_INPUT),
    ("fastturn.render", "TemplateError", BAD_INPUT),
    ("fastturn.rules", "RuleError", BAD_INPUT),
    ("fastturn.run", "RunError", FAILED),
    ("fastturn.records", "DamagedFile", BAD_INPUT),
    ("fastturn.sampler.server", "EngineError", FAILED),
    ("fastturn.serve", "ServeError", FAILED),
    ("fastturn.publish", "PublishError", FAILED),
    ("fastturn.checkpoint", "CheckpointError", FAILED),
    ("fastturn.learner", "DivergedError", FAILED),
    ("fastturn.pack", "DividedGroupError", BAD_INPUT),
    ("fastturn.dist", "DistError", FAILED),
    ("fastturn.bench.suites", "BenchError", BAD_INPUT),
    ("fastturn.bench.record", "DirtyTree", BAD_INPUT),
    ("fastturn.bench.recorded", "ForeignRow", BAD_INPUT),
)


class _Parser(argparse.ArgumentParser):
    """Errors on one line, as the other errors of the program."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Example: `main(["train", "quickstart", "iterations=1", "--dry-run"])` returns 0.
    """
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}" if str(stop) else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        _leave_for_launcher(error)
        status = status_of(error)
        if status is None:
            raise
        note = "; what is on the disk is whole, --resume goes on"
        print(f"error: {_rank()}{error}{note * isinstance(error, OSError)}", file=sys.stderr)
        return status


def _rank() -> str:
    """Which of several processes speaks; nothing when there is one."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return ""
    return f"rank {os.environ.get('RANK', '?')} of {size} on {socket.gethostname()}: "


def _leave_for_launcher(error: Exception) -> None:
    """Write the error with its traceback where torchrun looks for it, when torchrun started us."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def status_of(error: Exception) -> int | None:
    """The exit status of an error meant for the user, None for a defect of the program."""
    if isinstance(error, OSError):  # a full disk, a folder that may not be written
        return FAILED
    for module, name, status in KNOWN_ERRORS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return status
    return None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Options and key=value pairs may be mixed in any order."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-") or not hasattr(options, "pairs"):
            near = difflib.get_close_matches(word, OPTIONS, n=1)
            hint = f" (the nearest is {near[0]})" if near else ""
            parser.error(f"unknown argument {word!r}{hint}")
        options.pairs.append(word)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastturn",
        description="Train multi-turn, tool-using language-model agents.",
        epilog="Example: fastturn train quickstart --out runs/first seed=1 iterations=20",
    )
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = _command(subcommands, "train", _train, "train a recipe")
    train.add_argument("recipe", metavar="RECIPE", help=NAME)
    _add_pairs(train)
    train.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the run (default: a new one in runs/)"
    )
    train.add_argument("--resume", action="store_true", help="continue the run in the folder")
    train.add_argument(
        "--nproc", type=_count, default=1, metavar="N", help="processes on this machine, one a GPU"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print the plan of the run and start nothing"
    )
    evaluation = _command(
        subcommands, "eval", commands.evaluate, "measure a run or a model on held-out tasks"
    )
    _add_eval(evaluation)
    report = _command(subcommands, "report", commands.report, "write report.html of a run again")
    report.add_argument("path", type=Path, metavar="DIR", help="the folder of a run")
    report.add_argument(
        "--slowest", action="store_true", help="the largest share of time, and what reduces it"
    )
    report.add_argument(
        "--servers",
        type=Path,
        nargs="+",
        default=[],
        metavar="TRACE",
        help="torch.profiler traces of vLLM servers, to put beside the run's trace.json",
    )
    for priced in (train, report):
        priced.add_argument(
            "--price", type=_price, metavar="P", help="of a device-hour: what a run costs in money"
        )
    serve = _command(subcommands, "serve", _serve, "print or run the rollout server of a recipe")
    serve.add_argument("recipe", metavar="RECIPE", help=NAME)
    _add_pairs(serve)
    serve.add_argument("--run", action="store_true", help="start the server and keep it up")
    serve.add_argument("--port", type=int, default=8000, metavar="P")
    serve.add_argument("--host", default="127.0.0.1", help="dev routes are open to who reaches it")
    serve.add_argument("--python", metavar="BIN", help="interpreter of the environment with vLLM")
    serve.add_argument(
        "--tensor-parallel", type=_count, default=1, metavar="T", help="GPUs of the server"
    )
    launch = _command(subcommands, "launch", _launch, "print a job for several machines")
    launch.add_argument("scheduler", choices=("slurm", "sky"), metavar="slurm|sky")
    launch.add_argument("recipe", metavar="RECIPE", help=NAME)
    _add_pairs(launch)
    _add_cluster(launch)
    _add_looking(subcommands)
    _add_measuring(subcommands)
    _command(subcommands, "recipes", commands.recipes, "list the recipes")
    return parser


def _add_looking(subcommands: Any) -> None:
    """Commands that look and change nothing."""
    doctor = _command(
        subcommands, "doctor", commands.doctor, "check a recipe, its tasks and its servers"
    )
    environment = _command(
        subcommands, "check-env", commands.check_env, "check an environment against its contract"
    )
    environment.add_argument(
        "domain", metavar="DOMAIN", help="file.py:function, or a name with its options"
    )
    rules = _command(subcommands, "rules", commands.rules, "list and check path rules")
    probe = _command(subcommands, "probe", commands.probe, "measure what varies before training")
    probe.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (.svg, .png, .pdf)")
    for looking in (doctor, rules, probe):
        looking.add_argument("recipe", metavar="RECIPE", help=NAME)
    for looking in (doctor, environment, rules, probe):
        _add_pairs(looking)
        looking.add_argument("--json", action="store_true", help="print what was found as JSON")


def _command(
    subcommands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(command=run)
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the price of a device-hour, like 1.9")
    return price


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pairs",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that replace the recipe's (docs/configuration.md lists the keys)",
    )


def _add_measuring(subcommands: Any) -> None:
    """What a run would cost, and what this machine makes of it."""
    plan = _command(subcommands, "plan", commands.plan, "simulate what a recipe takes on GPUs")
    plan.add_argument("recipe", metavar="RECIPE", help=NAME)
    _add_pairs(plan)
    _add_plan(plan)
    bench = _command(
        subcommands, "bench", commands.bench, "run benchmarks and record what they say"
    )
    _add_bench(bench)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--device", default="A100", help="A100 (default), H100, H200, B200, or core, of a CPU"
    )
    plan.add_argument("--gpus", type=_count, default=8, metavar="N", help="of all, 8 unless given")
    plan.add_argument(
        "--run", type=Path, metavar="DIR", help="a run that tells how long episodes are"
    )
    plan.add_argument(
        "--lengths",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME[=VALUE],...",
        help="of episodes: tool-dialogues, gsm8k or hotpotqa; prompt=..., think=..., action=..., "
        "answer=... with their spreads, played, tool_s, silent, silent_whole (docs/planning.md)",
    )
    for option, text in (
        ("--calibrate", "runs on that device, whose times replace its data sheet"),
        ("--predict", "runs of which to show what --calibrate predicts beside what they took"),
    ):
        plan.add_argument(option, type=Path, nargs="+", default=[], metavar="DIR", help=text)
    plan.add_argument("--json", action="store_true", help="print the fastest layout as JSON")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    suites = ("ops", "pack", "rollout", "step", "train", "all")
    bench.add_argument("suite", nargs="?", choices=suites, default="ops", metavar="|".join(suites))
    bench.add_argument(
        "--against",
        type=lambda text: text.split(","),
        default=[],
        metavar="PEER,...",
        help="what must be there to compare with: liger, cce, trl, prefix-grouper, hf, vllm",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help="the GPU if there is one")
    bench.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="two revisions, measured in turn, or two files of rows: what changed beyond noise",
    )
    bench.add_argument(
        "--data", type=Path, metavar="DIR", help="public data, of which all measures the lengths"
    )
    bench.add_argument("--no-record", action="store_true", help="print only")


def _add_eval(evaluation: argparse.ArgumentParser) -> None:
    evaluation.add_argument(
        "path", type=Path, metavar="RUN_OR_MODEL", help="a run, or a model in Hugging Face format"
    )
    _add_pairs(evaluation)
    evaluation.add_argument(
        "--tasks", metavar="DOMAIN", help="what data.domain=DOMAIN says: the tasks"
    )
    evaluation.add_argument(
        "--beside",
        type=lambda text: [Path(text)],
        default=[],
        metavar="RUN_OR_MODEL",
        help="another one, shown side by side",
    )
    evaluation.add_argument(
        "--settings",
        type=lambda text: list(dict.fromkeys(text.split(","))),
        default=["greedy", "paper"],
        metavar="NAME,...",
        help="greedy, paper (T 0.6, top-p 0.95), train (T 1); greedy,paper unless given",
    )
    evaluation.add_argument(
        "--samples", type=_count, default=1, metavar="K", help="tries a task where drawn: Pass@K"
    )
    evaluation.add_argument(
        "--out", type=Path, metavar="DIR", help="for eval.json, eval.md, eval.html (the model's)"
    )


def _add_cluster(launch: argparse.ArgumentParser) -> None:
    """Options whose names are fields of `cluster.Cluster`, whose defaults are theirs."""
    for option, name, kind, text in (
        ("--trainer-nodes", "trainers", int, "nodes that train"),
        ("--server-nodes", "servers", int, "nodes with vLLM servers"),
        ("--gpus-per-node", "gpus", int, "GPUs of a node (8)"),
        ("--tensor-parallel", "parallel", int, "GPUs of a server (1)"),
        ("--ready", "ready_s", int, "seconds that servers may take to start (1800)"),
        ("--python", "python", str, "interpreter of the environment with vLLM"),
        ("--partition", "partition", str, "of Slurm"),
        ("--account", "account", str, "of Slurm"),
        ("--time", "time", str, "of Slurm, for example 24:00:00"),
        ("--accelerator", "accelerator", str, "of SkyPilot (H100)"),
        ("--volume", "volume", str, "of SkyPilot: mounted at the folder above --out"),
    ):
        needed = name in ("trainers", "servers")
        given: dict[str, Any] = {"dest": name, "type": kind, "required": needed, "help": text}
        launch.add_argument(option, default=argparse.SUPPRESS, metavar=name[0].upper(), **given)
    launch.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the run's folder; all nodes see it"
    )


def _launch(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from fastturn.cluster import Cluster, render

    recipe = recipe_of(options.recipe)
    given = vars(options)
    cluster = Cluster(**{f.name: given[f.name] for f in fields(Cluster) if f.name in given})
    text = render(options.scheduler, cluster, options.recipe, recipe, options.pairs, options.out)
    print(text, end="")
    return 0


def _train(options: argparse.Namespace) -> int:
    recipe = recipe_of(options.recipe)
    config = override(recipe, options.pairs)
    if options.dry_run:
        from fastturn.plan import print_plan
        from fastturn.preflight import check_data, preflight

        preflight(config)
        check_data(config)
        print_plan(config, recipe, ranks=options.nproc)
        return 0
    if options.nproc > 1:
        from fastturn.launch import launch

        return launch(_without_nproc(options), options.nproc)
    from fastturn.dist import open_world
    from fastturn.provenance import versions

    place = config.device, config.dist.shard_ranks
    asked = {"--out": str(options.out), "--resume": options.resume}
    terms = as_dict(config) | asked | versions()
    with open_world(*place, mesh=config.needs_mesh, terms=terms) as world:
        _train_here(options, config, recipe, world)
    return 0


def _train_here(options: argparse.Namespace, config: Config, recipe: Config, world: World) -> None:
    """Train as one rank of `world`; the leader chooses the folder."""
    from fastturn.trainer import train

    was_there = options.out is not None and options.out.exists()
    out = world.first(lambda: run_folder(options.out, options.resume, config))
    # A run may be killed before its first file is written; resuming it starts it.
    resume = world.first(lambda: options.resume and holds_run(out))
    if resume != options.resume and world.leader:
        print(f"{out} holds no run yet; starting from the beginning", file=sys.stderr)
    try:
        train(config, recipe, out, resume, world, price=options.price)
    except ValueError as error:
        # Bad input that only the run could find: the corrected command may use the same folder.
        known = status_of(error) == BAD_INPUT and world.leader
        if known and not was_there and not has_records(out):
            shutil.rmtree(out, ignore_errors=True)
        raise


def _without_nproc(options: argparse.Namespace) -> list[str]:
    """The command of one process of several."""
    out = ["--out", str(options.out)] if options.out is not None else []
    resume = ["--resume"] if options.resume else []
    price = ["--price", str(options.price)] if options.price is not None else []
    return ["train", options.recipe, *options.pairs, *out, *resume, *price]


def _serve(options: argparse.Namespace) -> int:
    from fastturn.serve import serve

    config = override(recipe_of(options.recipe), options.pairs)
    place = {"port": options.port, "host": options.host, "python": options.python}
    place["parallel"] = options.tensor_parallel
    serve(config, run=options.run, carrier=config.rollout.carrier, **place)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
