"""What samples, by name: `rollout.engine` -> a sampler for a policy, and which ranks use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, ConfigError
from fastturn.dist import EveryRank, LeaderOnly, World
from fastturn.meter import Follower, Meter
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.sampler.base import (
    Batches,
    Request,
    Sampler,
    SamplerStats,
    SamplingParams,
    Stream,
    Streaming,
)
from fastturn.sampler.local import LocalSampler
from fastturn.sampler.server import EngineError
from fastturn.sharding import Mirror
from fastturn.tree import Alone, Peers
from fastturn.types import Completion

ON_GPUS = ("nccl", "ipc")  # carriers that read the weights where a GPU has them

Build = Callable[[Config, Policy, "Meter | Follower", Progress], Sampler]


def _local(config: Config, policy: Policy, meter: Meter | Follower, progress: Progress) -> Sampler:
    return LocalSampler(policy)


def _vllm(config: Config, policy: Policy, meter: Meter | Follower, progress: Progress) -> Sampler:
    # Here, because carriers and the HTTP client cost time that local runs need not spend.
    from fastturn.carriers import CARRIERS
    from fastturn.lora import adapter_config
    from fastturn.sampler.members import Devices
    from fastturn.sampler.vllm import VllmSampler

    rollout = config.rollout
    if rollout.carrier in ON_GPUS and policy.device.type != "cuda":
        raise ConfigError(
            f"rollout.carrier={rollout.carrier}: weights go from GPU to GPU and this trainer's are "
            f"on {policy.device.type}; set rollout.carrier=file, with the servers on this machine"
        )
    make = CARRIERS[rollout.carrier]
    sampler = VllmSampler(
        rollout.urls,
        policy,
        make(adapter_config(policy.model)) if rollout.carrier == "lora" else make(),
        max_context=config.model.max_context,
        concurrency=rollout.concurrency,
        deadline_s=rollout.deadline_s,
        patience_s=rollout.patience_s,
        on_event=meter.count,
        say=progress.warn,
    )
    try:
        sampler.require_scores_at(config.sampling.temperature)
    except EngineError:
        sampler.close()
        raise
    if rollout.carrier != "ipc":  # these share the trainer's GPUs, which are held once
        meter.serve(Devices(sampler.fleet.members))
    return sampler


ENGINES: dict[str, Build] = {"local": _local, "vllm": _vllm}


class Absent:
    """The sampler of a rank that is handed what another rank samples."""

    version = 0
    stats = SamplerStats()

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        assert not requests, "this rank has no share of the rollouts"
        return []

    def publish(self, version: int) -> None:
        """The weights are published by the rank that samples."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""


class AbsentStream(Absent):
    """The same, where that rank's sampler is a `Streaming` one: all ranks must go the same way."""

    def stream(self, params: SamplingParams, answer: Callable[[Any, Any], None]) -> Stream:
        """Nothing is submitted here."""
        return Batches(self, params, answer)


def sampling_side(
    config: Config, policy: Policy, world: World, meter: Meter | Follower, progress: Progress
) -> tuple[Mirror, Sampler, Peers]:
    """The copy of the weights to sample from, the sampler, and how ranks share a rollout. Before
    `shard`.

    In this process every rank samples its own share from a copy of its own; servers are the
    leader's to talk to, and the others get what it sampled.
    """
    inside = config.rollout.engine == "local"
    mixed = config.model.mixed
    apart = inside and algorithm_of(config).lags
    mirror = Mirror(policy, world, keep=inside or world.leader, mixed=mixed, apart=apart)
    made: list[Sampler] = []

    def build() -> bool:
        assert mirror.policy is not None
        made.append(ENGINES[config.rollout.engine](config, mirror.policy, meter, progress))
        return isinstance(made[0], Streaming)

    streaming = build() if inside else world.first(build)
    absent = AbsentStream() if streaming else Absent()
    sampler = made[0] if made else absent
    if world.size == 1:
        return mirror, sampler, Alone()
    return mirror, sampler, EveryRank(world, meter) if inside else LeaderOnly(world, meter)
