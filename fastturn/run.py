"""A run: everything that is open while it lasts, the cursor that says where it is, and its folder.

out/config.json     the configuration, as resolved and as the recipe had it
out/records.jsonl   one line a stage, iteration, evaluation     out/samples.jsonl  transcripts
out/checkpoints/    whole checkpoints                           out/final/         the model
out/summary.json    the result                                  out/report.html    to look at
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoTokenizer

from fastturn import checkpoint, lora, models
from fastturn.config import Config, ConfigError, as_dict, override
from fastturn.dist import World
from fastturn.energy import open_energy
from fastturn.engines import sampling_side
from fastturn.envs import load_domain
from fastturn.envs.base import Domain
from fastturn.episode import begin
from fastturn.learner import Learner
from fastturn.memory import require_memory
from fastturn.meter import Follower, Meter
from fastturn.optim import adamw_of, training_optimizer, warm_optimizer
from fastturn.policy import Policy, WithoutAdapter
from fastturn.preflight import preflight
from fastturn.progress import Progress
from fastturn.records import write_json
from fastturn.render import Renderer
from fastturn.sharding import Mirror, merged_state, on_host, shard
from fastturn.timeline import open_watchers
from fastturn.tokenizer import build_tokenizer, episode_texts
from fastturn.tree import Rollout
from fastturn.types import Trunk

# Keys that a resumed run may change: how long it runs and what it keeps, not what it is.
RESUMABLE = {
    *("iterations", "eval_every", "save.every", "save.keep", "trackers", "recipe"),
    *("rollout.urls", "rollout.carrier"),
    *("rollout.overlap", "rollout.concurrency", "rollout.deadline_s", "rollout.patience_s"),
    *("dist.shard_ranks", "dist.cpu_offload", "dist.split_head"),
}

TOKENIZER_EPISODES = 400  # demonstrations that a small model's tokenizer is made from


class RunError(RuntimeError):
    """A run that cannot start or go on; the message says why and what to do."""


@dataclass(slots=True)
class Cursor:
    """What comes next. `stage` counts the finished stages of the iteration in hand (its trunks are
    in the checkpoint when it is not 0). `before`, `after`: first and last evaluation, once known.
    `tally` sums over the iteration in hand, `totals` over the run. `streak`: iterations in a row
    whose successful episodes kept to the path rules as often as `anneal` asks."""

    phase: Literal["warm", "train", "done"] = "warm"
    warm_step: int = 0
    iteration: int = 0
    stage: int = 0
    version: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    streak: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` is its inverse."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cursor:
        counters = {name: Counter(values[name]) for name in ("tally", "totals")}
        return cls(**{**values, **counters})


@dataclass(slots=True)
class Run:
    """The open parts of a run. `trunks` are those of an iteration in hand; `published` is the
    version of the weights that the sampler has."""

    config: Config
    out: Path
    domain: Domain
    tokenizer: Any
    policy: Policy
    learner: Learner
    rollout: Rollout
    meter: Meter | Follower
    progress: Progress
    cursor: Cursor
    world: World
    mirror: Mirror
    trunks: list[Trunk] = field(default_factory=list)
    published: int = 0
    writing: checkpoint.Writing | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """One line of records.jsonl, with what happened on all ranks since the last one."""
        self.gather()
        self.meter.record(kind, values)

    def gather(self) -> None:
        """What happened on all ranks since the last time, into the leader's meter."""
        for news in self.world.all_gather_objects(self.meter.drain()):
            self.meter.absorb(news)

    def save(self) -> None:
        """Begin to write a checkpoint of this moment, when the last one is whole. A full disk is
        said and counted; the run goes on."""
        self.settle()
        cursor = self.cursor
        name = f"{cursor.iteration:06d}-{cursor.stage:02d}-{cursor.warm_step:06d}"
        with self.meter.span("checkpoint"), self._refusal_is_said():
            state = {
                "cursor": cursor.as_dict(),
                "config": as_dict(self.config),
                "meter": self.meter.state(),
            }
            self.writing = checkpoint.begin(
                *(self.out / "checkpoints" / name, self.policy.model),
                *(self.learner.optimizers, state),
                trunks=self.trunks,
                world=self.world,
            )

    def settle(self) -> None:
        """Wait until the checkpoint in hand, if any, is whole. All ranks together."""
        writing, self.writing = self.writing, None
        if writing is None:
            return
        root, keep = self.out / "checkpoints", self.config.save.keep
        with self.meter.span("checkpoint"), self._refusal_is_said():
            writing.finish()
            self.world.first(lambda: checkpoint.prune(root, keep))

    @contextmanager
    def _refusal_is_said(self) -> Iterator[None]:
        try:
            yield
        except checkpoint.CheckpointError as error:
            self.meter.count("checkpoint_failed")
            self.progress.warn(str(error))

    def save_final(self) -> None:
        """The model and tokenizer in Hugging Face format, whole or not at all."""

        with self.meter.span("checkpoint"):
            self._save_pretrained("final", with_tokenizer=True)

    def _save_pretrained(self, name: str, with_tokenizer: bool = False) -> Path:
        """The whole model in the folder `name` of the run, written by the leader."""
        model, leader = self.policy.model, self.world.leader
        state = merged_state(model, keep=leader)
        adapter = on_host(lora.adapter(model), keep=leader)

        def write(part: Path) -> None:
            model.save_pretrained(part, state_dict=state)
            if adapter:
                lora.write_adapter(model, adapter, part / "adapter")
            if with_tokenizer:
                self.tokenizer.save_pretrained(part)

        self.world.first(lambda: checkpoint.atomic_folder(self.out / name, write))
        return self.out / name

    def begin_training(self) -> None:
        """From here on steps are those of the training phase: fresh moments, and the policy of
        this moment as the frozen reference when there is a KL term."""
        config = self.config
        self.learner.optimizers = training_optimizer(
            self.policy.model, config.optim, adamw_of(config.model.dtype)
        )
        if config.loss.kl_coef > 0 and config.starts_as_reference:
            self.learner.reference = WithoutAdapter(self.policy)
        elif config.loss.kl_coef > 0:
            folder = self.out / "reference"
            if not self.world.first(folder.exists):
                self._save_pretrained("reference")
            reference: Any = models.reload(folder, config)
            frozen = Policy(reference.to(self.world.device), config.attention)
            frozen.requires_grad_(False)
            self.learner.reference = _sharded(frozen, config, self.world)


@contextmanager
def open_run(
    config: Config,
    recipe: Config,
    out: Path,
    resume: bool,
    progress: Progress,
    *,
    world: World,
) -> Iterator[Run]:
    """Open everything that a run needs, restored from its newest checkpoint when `resume`.

    Raises `RunError` when `out` already holds a run (without `resume`), holds none (with it), or
    holds one of another configuration (the differing keys are named).
    """
    preflight(config)
    placed = override(config, [f"device={world.device.type}"])
    require_memory(placed, world.size, world.device_gib, world.host_gib)
    world.first(lambda: check_folder(out, config, resume))
    with ExitStack() as stack:
        world.first(lambda: stack.enter_context(alone(out)))
        yield from _opened(config, recipe, out, resume, progress, world=world)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """`RunError` when another process is running in `out`. The lock ends with its process."""
    with (out / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"another process is running in {out}; wait for it or choose another --out"
            ) from error
        yield


def _opened(
    config: Config,
    recipe: Config,
    out: Path,
    resume: bool,
    progress: Progress,
    *,
    world: World,
) -> Iterator[Run]:
    torch.set_num_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # the run has its own
    newest = world.first(lambda: checkpoint.latest(out / "checkpoints")) if resume else None
    state: dict[str, Any] = {}
    trunks: list[Trunk] = []
    if newest is not None:
        state, trunks = world.first(lambda: checkpoint.load_state(newest))
        progress.say(f"resuming from {newest}")
    with _meter(config, out, state, world) as meter, ExitStack() as opened:
        with meter.span("setup"):
            run = _build(config, out, world, meter, progress)
            opened.callback(run.rollout.sampler.close)
            run.trunks = trunks
            if newest is not None:
                _restore(run, state, newest)
            require_room(run)
            # Last, so that a folder holds a run only if its data and model could be opened.
            settings = {"config": as_dict(config), "recipe": as_dict(recipe)}
            world.first(lambda: write_json(out / "config.json", settings))
        try:
            yield run
        finally:
            if run.writing:
                run.writing.wait()


def _meter(config: Config, out: Path, state: dict[str, Any], world: World) -> Meter | Follower:
    watchers = open_watchers(config.trackers, out, world.rank)
    energy = open_energy(world.device.type)
    if not world.leader:
        return Follower(watchers, energy)
    place = out, config.trackers, world.size, state.get("meter")
    return Meter(*place, device_kind=world.device.type, watchers=watchers, energy=energy)


def check_folder(out: Path, config: Config, resume: bool) -> None:
    """`RunError` when `out` cannot be this run's folder."""
    path = out / "config.json"
    if resume:
        differing = changed_keys(path, config)
        if differing:
            raise RunError(
                f"{out} was started with another configuration: {'; '.join(differing)}. Resume "
                f"with the same keys, or start a new run with another --out"
            )
    elif path.exists():
        raise RunError(
            f"{out} already holds a run; continue it with --resume or choose another --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error}; choose another --out") from error


def changed_keys(path: Path, config: Config) -> list[str]:
    """`key: was x, is y` for every key that must not change between start and resume."""
    try:
        was = json.loads(path.read_text())["config"]
    except FileNotFoundError:
        raise RunError(f"{path.parent} holds no run to resume; leave out --resume") from None
    except (ValueError, KeyError) as error:
        raise RunError(f"{path} is not readable ({error}); choose another --out") from error
    return [
        f"{key}: was {was.get(key)!r}, is {value!r}"
        for key, value in as_dict(config).items()
        if key not in RESUMABLE and was.get(key, value) != value
    ]


def require_room(run: Run) -> None:
    """`ConfigError` before anything is computed when no task of a sample leaves room to answer."""
    tasks = [task for of in (run.domain.train_tasks, run.domain.eval_tasks) for task in of[:16]]
    renderer = run.rollout.renderer
    starts = [begin(run.domain, task, run.config)[1] for task in tasks]
    lengths = [len(renderer.start(messages).context_T) for messages in starts]
    if min(lengths) + 1 > run.config.model.max_context:
        shortest = tasks[lengths.index(min(lengths))]
        raise ConfigError(
            f"model.max_context={run.config.model.max_context}: the shortest of {len(tasks)} "
            f"tasks ({shortest.id}) begins with {min(lengths)} tokens; set model.max_context to "
            f"more than that, or shorten the tasks"
        )


def _require_tasks(domain: Domain, config: Config) -> None:
    """`ConfigError` when there is nothing to train on, or nothing to be tried on."""
    trained, held_out = len(domain.train_tasks), len(domain.eval_tasks)
    if not trained or not held_out:
        raise ConfigError(
            f"data.domain={config.data.domain!r}: it has {trained} training and {held_out} "
            f"held-out tasks; a run needs some of both"
        )


def _build(
    config: Config, out: Path, world: World, meter: Meter | Follower, progress: Progress
) -> Run:
    """A fresh run: data first (its errors are the cheapest), then tokenizer, model, sampler."""
    torch.manual_seed(config.seed)
    domain = load_domain(config)
    _require_tasks(domain, config)
    if config.model.path:
        policy, tokenizer = Policy.load(config)
    else:
        folder = out / "tokenizer"
        world.first(lambda: _make_tokenizer(config, domain, folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        policy = Policy.build(config, tokenizer)
    if world.mesh is None:  # else blocks move as they are split, so a whole model need not fit
        policy.to(world.device)
    choice = policy.backend.choice(world.device)
    progress.say(f"attention: {choice.impl} ({choice.why})")
    renderer = Renderer(tokenizer, domain.tools, config.context, config.model.max_context)
    mirror, sampler, peers = sampling_side(config, policy, world, meter, progress)
    _sharded(policy, config, world)
    rollout = Rollout(
        *(domain, renderer, sampler, config, meter), peers=peers
    )  # fmt: skip
    optimizers = warm_optimizer(policy.model, config.warm, adamw_of(config.model.dtype))
    learner = Learner(policy, optimizers, config, meter, out, world=world)
    return Run(
        *(config, out, domain, tokenizer, policy, learner, rollout, meter, progress),
        cursor=Cursor(),
        world=world,
        mirror=mirror,
    )


def _sharded(policy: Policy, config: Config, world: World) -> Policy:
    return shard(
        policy,
        world,
        mixed=config.model.mixed,
        cpu_offload=config.dist.cpu_offload,
        split_head=config.dist.split_head,
    )


def _make_tokenizer(config: Config, domain: Domain, folder: Path) -> None:
    """The tokenizer of a model built in the run; kept in the run's folder, because ids must mean
    the same after a resume whatever has happened to the code that made it."""
    if not folder.exists():
        texts = episode_texts(domain, TOKENIZER_EPISODES, config)
        tokenizer = build_tokenizer(texts, config.model.vocabulary)

        def write(part: Path) -> None:
            tokenizer.save_pretrained(part)

        checkpoint.atomic_folder(folder, write)


def _restore(run: Run, state: dict[str, Any], folder: Path) -> None:
    run.cursor = Cursor.from_dict(state["cursor"])
    if run.cursor.phase == "done" and run.cursor.iteration < run.config.iterations:
        run.cursor.phase, run.cursor.after = "train", {}  # a finished run that is to go on
    if run.cursor.phase != "warm":
        config = run.config
        copied = config.loss.kl_coef > 0 and not config.starts_as_reference
        if copied and not (run.out / "reference").exists():
            raise RunError(
                f"{run.out / 'reference'} is missing, the policy that the KL term refers to; "
                f"restore the folder or start a new run"
            )
        run.begin_training()
    checkpoint.load_weights(folder, run.policy.model, run.learner.optimizers, run.world)
    run.mirror.refresh()
    run.rollout.sampler.publish(run.cursor.version)
