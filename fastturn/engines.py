"""What samples, by name: `rollout.engine` -> a sampler for a policy."""

from __future__ import annotations

from collections.abc import Callable

from fastturn.config import Config, ConfigError
from fastturn.meter import Meter
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.sampler.base import Sampler
from fastturn.sampler.local import LocalSampler

Build = Callable[[Config, Policy, Meter, Progress], Sampler]


def _local(config: Config, policy: Policy, meter: Meter, progress: Progress) -> Sampler:
    return LocalSampler(policy)


def _vllm(config: Config, policy: Policy, meter: Meter, progress: Progress) -> Sampler:
    # Here, because carriers and the HTTP client cost time that local runs need not spend.
    from fastturn.carriers import CARRIERS
    from fastturn.sampler.vllm import VllmSampler

    rollout = config.rollout
    if rollout.carrier == "lora":
        raise ConfigError(
            "rollout.carrier=lora: this run trains whole weights and has no adapter to send; set "
            "rollout.carrier=file (one machine) or nccl"
        )
    return VllmSampler(
        rollout.urls,
        policy,
        CARRIERS[rollout.carrier](),
        max_context=config.model.max_context,
        concurrency=rollout.concurrency,
        deadline_s=rollout.deadline_s,
        patience_s=rollout.patience_s,
        on_event=meter.count,
        say=progress.warn,
    )


ENGINES: dict[str, Build] = {"local": _local, "vllm": _vllm}
