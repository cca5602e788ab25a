"""The whole configuration: frozen dataclasses, at most 68 keys, no other source of settings.

A recipe (`recipes.py`) is a function that returns a `Config`; `key=value` pairs on the command line
override single fields (`override`). Derived numbers are properties here, so that the dry run, the
trainer and the report all read the same ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SMOLLM2 = "smollm2-135m"  # model.path of the weights that come as a package


class ConfigError(ValueError):
    """A setting that cannot work: names the key, the value, what is expected and the remedy."""


@dataclass(frozen=True, slots=True)
class Data:
    """Where tasks come from. `path` is a jsonl file or a Hugging Face dataset id; domains that
    make their own tasks (calculator) leave it empty. Held-out tasks never meet training tasks."""

    domain: str = "calculator"
    path: str = ""
    eval_path: str = ""  # empty: held-out tasks are split off `path`
    eval_tasks: int = 256
    rules: str = ""  # a file of path rules, besides those of the domain
    tool_timeout_s: float = 5.0  # deadline of one tool call
    env_timeout_s: float = 60.0  # deadline of one whole environment step


@dataclass(frozen=True, slots=True)
class Model:
    """`path`: a folder or hub id in Hugging Face format, "smollm2-135m" for the packaged weights,
    or empty for a small Qwen3 of `layers` x `width` built in the run."""

    path: str = ""
    dtype: Literal["float32", "bfloat16", "mixed", "mixed8"] = "float32"
    layers: int = 2
    width: int = 64
    vocabulary: int = 334  # ids of the tokenizer built for it
    max_context: int = 512
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    kernels: Literal["plain", "liger", "compile"] = "plain"  # of the layers, but for attention
    lora_rank: int = 0  # 0: every weight trains; else only adapters of this rank in the blocks
    lora_alpha: int = 32  # what the adapter adds is scaled by lora_alpha / lora_rank

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """What is computed in; "mixed" keeps weights, gradients and moments in float32, "mixed8"
        moments in 8 bits."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def mixed(self) -> bool:
        """Whether weights are kept in another type than is computed in."""
        return self.dtype in ("mixed", "mixed8")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that is sampled is the distribution that is scored: temperature only."""

    temperature: float = 1.0
    turn_tokens: int = 32  # most tokens of one action
    episode_tokens: int = 256  # most sampled tokens of one episode


@dataclass(frozen=True, slots=True)
class Loss:
    """Clipped surrogate (paper eq. 6) with an optional KL to the frozen initial policy."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    normalize_std: bool = False  # divide group advantages by their standard deviation


@dataclass(frozen=True, slots=True)
class Optim:
    lr: float = 1e-6
    muon_lr: float = 0.0  # > 0: matrices by Muon at this rate, the rest by AdamW at `lr`
    beta2: float = 0.999
    weight_decay: float = 0.01
    warmup_steps: int = 0
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Warm:
    """Supervised warm start on scripted demonstrations; `steps = 0` switches it off."""

    steps: int = 0
    batch: int = 32  # demonstrations a step
    lr: float = 3e-3
    muon_lr: float = 0.0  # > 0: matrices by Muon at this rate, the rest by AdamW at `lr`
    compliant: float = 0.0  # share of demonstrations that keep to the domain's path rules


@dataclass(frozen=True, slots=True)
class Save:
    every: int = 10  # iterations between checkpoints; one is always written at the end
    keep: int = 2  # newest checkpoints kept


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What samples: the policy in this process, or `vllm serve` processes at `urls`."""

    engine: Literal["local", "vllm"] = "local"
    urls: tuple[str, ...] = ()
    carrier: Literal["file", "nccl", "ipc", "lora"] = "file"  # how weights reach the servers
    concurrency: int = 256  # most completions in flight on one server
    deadline_s: float = 300.0  # of one request, its time in the server's queue included
    patience_s: float = 600.0  # how long to wait while no server answers
    overlap: tuple[str, ...] = ("stream", "prefetch")  # servers only; none: one after the other


@dataclass(frozen=True, slots=True)
class Dist:
    """How weights are split over the processes of a run (`--nproc`, torchrun)."""

    shard_ranks: int = 0  # ranks that share one copy of the weights; 0: all of them
    cpu_offload: bool = False  # shards, gradients and moments wait in host memory
    split_head: bool = False  # ranks keep their rows of the head; hidden states travel instead


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a run needs. See `docs/configuration.md` for every key with its meaning."""

    recipe: str = "custom"
    algorithm: str = "rtpo"
    algorithm_options: tuple[str, ...] = ()  # name=value, of this algorithm
    seed: int = 0
    iterations: int = 10
    tasks: int = 32  # tasks an iteration
    group_size: int = 5  # G: RTPO forks G-1 siblings at a boundary; GRPO samples G episodes
    trunks: int = 1  # M: trunks a task (RTPO)
    turns: int = 4  # K: most turns of an episode
    gamma: float = 1.0  # discount per sampled token
    rewards: tuple[str, ...] = ("outcome",)  # what trains, of `REWARDS`
    anneal: float = 0.0  # share without violations from which path rewards fade; 0: never
    context: str = "keep"  # what earlier turns look like: keep, strip_think, truncate:N, summarise
    pack_tokens: int = 4096  # token budget of one micro-batch
    attention: Literal["auto", "triton", "torch", "flex", "flash", "reference"] = "auto"
    threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_every: int = 0  # iterations between evaluations; 0: only before and after
    trackers: tuple[str, ...] = ("tensorboard",)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    sampling: Sampling = field(default_factory=Sampling)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    warm: Warm = field(default_factory=Warm)
    save: Save = field(default_factory=Save)
    rollout: Rollouts = field(default_factory=Rollouts)
    dist: Dist = field(default_factory=Dist)

    @property
    def starts_as_reference(self) -> bool:
        """Whether the policy that training starts from is the model without its adapter, so that no
        copy of it need be kept."""
        return self.model.lora_rank > 0 and self.warm.steps == 0

    @property
    def needs_mesh(self) -> bool:
        """Whether one process alone goes through FSDP, which computes in another type than it keeps
        and waits in host memory."""
        return self.model.mixed or self.dist.cpu_offload


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf as (dotted key, annotated type, value), in declaration order.

    Example: `("data.path", str, "")`.
    """
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", hints[item.name], value


def override(config: Config, pairs: Sequence[str]) -> Config:
    """`config` with `key=value` pairs applied, later ones winning, and checked as a whole.

    A pair that names an algorithm brings that algorithm's presets, which the other pairs override.

    Example: `override(quickstart(), ["optim.lr=3e-4", "iterations=1"])`.
    Raises `ConfigError` for a pair without "=", an unknown key (the nearest is named) or a value
    that is not of the key's type.
    """
    from fastturn.algorithms import presets

    known = {key: hint for key, hint, _ in fields(config)}
    chosen = [pair.removeprefix("algorithm=") for pair in pairs if pair.startswith("algorithm=")]
    for pair in [*(presets(chosen[-1]) if chosen else ()), *pairs]:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"override {pair!r}: expected key=value, for example iterations=1")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            leaf = [name for name in known if name.split(".")[-1] == key]
            hint = (leaf or near)[0]
            raise ConfigError(f"unknown key {key!r}; the nearest is {hint!r}")
        config = _replace(config, key.split("."), _parse(key, text, known[key]))
    return check(config)


def _replace(node: Any, path: list[str], value: Any) -> Any:
    if len(path) > 1:
        value = _replace(getattr(node, path[0]), path[1:], value)
    return dataclasses.replace(node, **{path[0]: value})


def _parse(key: str, text: str, hint: Any) -> Any:
    """`text` as the annotated type of `key`."""
    if typing.get_origin(hint) is Literal:
        if text in typing.get_args(hint):
            return text
        raise ConfigError(f"{key}={text!r}: expected one of {', '.join(typing.get_args(hint))}")
    if typing.get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    if hint is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        raise ConfigError(f"{key}={text!r}: expected true or false")
    try:
        return _whole(text) if hint is int else hint(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r}: expected a value of type {hint.__name__}") from None


def _whole(text: str) -> int:
    """An integer, which 1e4 is as well; raises `ValueError` for anything else."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


POSITIVE = (
    *("tasks", "trunks", "turns", "pack_tokens", "threads"),
    *("sampling.temperature", "sampling.turn_tokens", "sampling.episode_tokens"),
    *("loss.epochs", "loss.minibatches", "optim.lr", "warm.batch", "save.keep"),
    *("model.layers", "model.width", "model.vocabulary", "model.max_context", "model.lora_alpha"),
    *("data.tool_timeout_s", "data.env_timeout_s", "data.eval_tasks"),
    *("rollout.concurrency", "rollout.deadline_s"),
)
REWARDS = ("outcome", "penalty", "fulfilment", "progress", "gated")
OVERLAPS = ("stream", "prefetch", "none")
NON_NEGATIVE = (
    *("seed", "iterations", "eval_every", "save.every", "warm.steps", "warm.lr", "warm.muon_lr"),
    *("loss.clip_low", "loss.clip_high", "loss.kl_coef"),
    *("optim.weight_decay", "optim.warmup_steps", "optim.clip_norm", "rollout.patience_s"),
    *("dist.shard_ranks", "model.lora_rank", "optim.muon_lr"),
)
SHARES = ("anneal", "warm.compliant")
COMPARING = ("sequence", "regression")  # surrogates that read all turns of a group at once


def check(config: Config) -> Config:
    """`config` itself when it can work, else `ConfigError`."""
    from fastturn.algorithms import algorithm_of  # it reads configurations itself

    least = algorithm_of(config).least_group_size
    if config.group_size < least:
        raise ConfigError(
            f"group_size={config.group_size}: {config.algorithm} needs at least {least} with its "
            f"options, because the mean of a group of one sibling is the sibling itself and its "
            f"advantage is always 0; set group_size={least} or more"
        )
    _check_ranges(config)
    _check_rewards(config.rewards)
    _check_rollout(config.rollout)
    if config.rollout.carrier == "lora" and not config.model.lora_rank:
        raise ConfigError(
            "rollout.carrier=lora: this run trains whole weights and has no adapter to send; set "
            "model.lora_rank=16 (or another rank), or rollout.carrier=file (one machine) or nccl"
        )
    if config.dist.split_head and config.dist.cpu_offload:
        raise ConfigError(
            "dist.split_head=true with dist.cpu_offload=true: a split head stays on its devices; "
            "set one of them to false"
        )
    if config.loss.minibatches > config.tasks:
        raise ConfigError(
            f"loss.minibatches={config.loss.minibatches}: at most one a task "
            f"(tasks={config.tasks}); lower it or raise tasks"
        )
    compares = algorithm_of(config).surrogate in COMPARING
    if compares and config.pack_tokens < config.model.max_context:
        raise ConfigError(
            f"pack_tokens={config.pack_tokens}: the loss of {config.algorithm} compares all turns "
            f"of a group, which must lie in one micro-batch, and a single sequence may have "
            f"model.max_context={config.model.max_context} tokens; set pack_tokens="
            f"{config.group_size * config.model.max_context}, which every group fits"
        )
    return config


def _check_ranges(config: Config) -> None:
    values = {key: value for key, _, value in fields(config)}
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: expected a finite number")
    for key in POSITIVE:
        if not values[key] > 0:
            raise ConfigError(f"{key}={values[key]}: expected a positive number")
    for key in NON_NEGATIVE:
        if not values[key] >= 0:
            raise ConfigError(f"{key}={values[key]}: expected zero or more")
    for key in SHARES:
        if not 0 <= values[key] <= 1:
            raise ConfigError(f"{key}={values[key]}: expected a share between 0 and 1")
    if not 0 < config.gamma <= 1:
        raise ConfigError(f"gamma={config.gamma}: expected a discount in (0, 1]")
    if not 0 <= config.optim.beta2 < 1:
        raise ConfigError(f"optim.beta2={config.optim.beta2}: expected a decay rate in [0, 1)")
    if not config.loss.clip_low <= 1:
        raise ConfigError(f"loss.clip_low={config.loss.clip_low}: expected at most 1")


def _check_rewards(rewards: tuple[str, ...]) -> None:
    for name in rewards:
        if name not in REWARDS:
            raise ConfigError(f"rewards={name!r}: expected any of {', '.join(REWARDS)}")
    if not rewards or rewards == ("gated",):
        raise ConfigError(f"rewards is empty: expected one or more of {', '.join(REWARDS[:-1])}")
    if {"gated", "fulfilment"} <= set(rewards):
        raise ConfigError(
            f"rewards={','.join(rewards)}: gated counts fulfilments in successful episodes "
            f"only, fulfilment in all; leave one of them out"
        )


def _check_rollout(rollout: Rollouts) -> None:
    urls = rollout.urls
    for name in rollout.overlap:
        if name not in OVERLAPS:
            raise ConfigError(f"rollout.overlap={name!r}: expected any of {', '.join(OVERLAPS)}")
    if rollout.engine == "local":
        if urls:
            raise ConfigError(
                f"rollout.urls={','.join(urls)}: nothing asks these servers while "
                f"rollout.engine=local; set rollout.engine=vllm, or leave out the addresses"
            )
        return
    if not urls:
        raise ConfigError(
            "rollout.urls is empty: rollout.engine=vllm needs the address of at least one server, "
            "for example rollout.urls=http://127.0.0.1:8000 (fastturn serve starts one)"
        )
    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.split("//", 1)[1].strip("/"):
            raise ConfigError(
                f"rollout.urls={url!r}: expected addresses like http://127.0.0.1:8000"
            )
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError(
            f"rollout.urls={','.join(urls)}: a server is named twice; name each of them once"
        )


def as_dict(config: Config) -> dict[str, Any]:
    """Dotted key -> value, the form that is printed, saved and compared."""
    return {key: list(v) if isinstance(v, tuple) else v for key, _, v in fields(config)}


def from_dict(values: dict[str, Any]) -> Config:
    """Inverse of `as_dict`; unknown keys raise `ConfigError`, missing ones take defaults."""
    lists = {k: ",".join(map(str, v)) for k, v in values.items() if isinstance(v, list)}
    return override(Config(), [f"{k}={v}" for k, v in (values | lists).items()])
