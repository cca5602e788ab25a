"""The patient of `fastturn doctor`: a run that is opened to be looked at, and how to measure it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fastturn.config import Config
from fastturn.envs.base import Action
from fastturn.episode import Episode, Point
from fastturn.findings import FAIL, PASS, Finding
from fastturn.pack import pack
from fastturn.pool import within
from fastturn.publish import TOLERANCE
from fastturn.run import Run
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.server import ServerInfo
from fastturn.types import Credit, SiblingGroup, Trajectory, Trunk

TASKS = 8  # tasks that rollouts start from


class Unavailable(Exception):
    """What a check needs is not there."""


@dataclass
class Patient:
    """What checks look at. `open` opens the run; `run` is there from the check "opening" on."""

    config: Config
    open: Callable[[], Run]
    servers: dict[str, ServerInfo] = field(default_factory=dict)
    run: Run | None = None
    version: int = 0

    @property
    def opened(self) -> Run:
        if self.run is None:
            raise Unavailable("the run could not be opened")
        return self.run

    @cached_property
    def trunks(self) -> list[Trunk]:
        """Episodes of a few tasks by the policy, with the state at every boundary."""
        run = self.opened
        self.publish()
        tasks = run.domain.train_tasks
        some = [tasks[i] for i in range(min(TASKS, len(tasks)))]
        return run.rollout.grow(run.rollout.roots(some), ("doctor", "trunk"))

    @cached_property
    def groups(self) -> list[SiblingGroup]:
        """Siblings at the first boundary of the same tasks, as many as the recipe's groups have."""
        points = [trunk.snapshots[0] for trunk in self.trunks]
        return self.opened.rollout.fork(points, self.config.group_size, ("doctor", "fork"))

    @cached_property
    def episodes(self) -> list[Trajectory]:
        found = [t for group in self.groups for t in group.siblings]
        if not found:
            raise Unavailable("no episode could be played")
        return found

    @property
    def untrained(self) -> bool:
        """Whether supervised steps come before anything is sampled for training."""
        return self.config.warm.steps > 0

    def publish(self) -> None:
        """Hand over the weights of this moment under a version of their own."""
        run = self.opened
        self.version += 1
        run.mirror.refresh(self.version)
        run.rollout.sampler.publish(self.version)


def dtype(patient: Patient) -> torch.dtype:
    """The coarsest format that numbers pass through."""
    names = [patient.config.model.compute_dtype, *(i.dtype for i in patient.servers.values())]
    dtypes = [getattr(torch, name) for name in names if name is not None]
    return max(dtypes, key=lambda dtype: TOLERANCE.get(dtype, 0.0))


Errors = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def errors(patient: Patient, groups: Sequence[SiblingGroup]) -> Errors:
    """Of every sampled token: |trainer's - sampler's log-probability|, and its place within its
    action, from 0 to 1."""
    run, config = patient.opened, patient.config
    credits = [
        [Credit(t, np.ones(len(t.turns)), np.ones(len(t.turns))) for t in group.siblings]
        for group in groups
    ]
    errors, places = [np.empty(0)], [np.empty(0)]
    for batch in pack(credits, config.pack_tokens, run.world.device):
        scored_A = run.policy.score(batch, config.sampling.temperature)
        errors.append((scored_A - batch.behavior_A).abs().double().cpu().numpy())
        turns: defaultdict[int, list[int]] = defaultdict(list)
        for index, turn in enumerate(batch.turn_A.tolist()):
            turns[turn].append(index)
        place_A = np.empty(len(scored_A))
        for indices in turns.values():
            place_A[indices] = np.arange(len(indices)) / len(indices)
        places.append(place_A)
    return np.concatenate(errors), np.concatenate(places)


def agreed(patient: Patient, found: Errors) -> Finding:
    error_A, place_A = found
    if not len(error_A):
        raise Unavailable("no token was sampled")
    first, last = (
        float(error_A[part].mean()) if part.any() else math.nan
        for part in (place_A < 0.25, place_A >= 0.75)
    )
    worst, mean, most = float(error_A.max()), float(error_A.mean()), TOLERANCE[dtype(patient)]
    measured = (
        f"off by {mean:.1e} in the mean, p99 {np.quantile(error_A, 0.99):.1e}, at most {worst:.1e} "
        f"nats over {len(error_A)} tokens (first quarter of an action {first:.1e}, last {last:.1e})"
    )
    if worst <= most and mean <= most / 10:
        return Finding(PASS, measured)
    return Finding(
        FAIL,
        measured,
        f"at most {most:g} and {most / 10:g} in the mean expected: the sampler has other weights, "
        f"another tokenizer, or another distribution (top-p, top-k, temperature, raw "
        f"log-probabilities); start servers with the command that `fastturn serve` prints",
    )


def some_groups(patient: Patient) -> list[SiblingGroup]:
    """New siblings by the weights that were published last."""
    points = [trunk.snapshots[0] for trunk in patient.trunks[:2]]
    return patient.opened.rollout.fork(points, 2, ("doctor", patient.version))


def uniform_error(patient: Patient) -> float:
    """How far sampled tokens are from log(1 / vocabulary)."""
    run = patient.opened
    context_T = patient.trunks[0].snapshots[0].conversation.context_T
    request = Request(context_T, 4, (1, 2))
    (found,) = run.rollout.sampler.sample([request], SamplingParams(1.0, ()))
    uniform = -math.log(run.policy.head().weight_VD.shape[0])
    return max(float(np.abs(done.logprob_A - uniform).max()) for done in found)


def _tensors(run: Run) -> list[torch.Tensor]:
    """What this process holds of every parameter, to be changed in place."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in run.policy.parameters()]


@contextmanager
def other_weights(patient: Patient, change: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """The policy with changed weights, published; afterwards its own ones, published as well."""
    run = patient.opened
    before = [tensor.cpu().clone() for tensor in _tensors(run)]
    try:
        for tensor in _tensors(run):
            change(tensor)
        patient.publish()
        yield
    finally:
        for tensor, own in zip(_tensors(run), before, strict=True):
            tensor.copy_(own)
        patient.publish()


def answer(run: Run, point: Point, action: Action) -> Any:
    """What the environment, restored, makes of an action."""
    episode = Episode.resume(run.domain, point, ())
    try:
        answer = within(run.config.data.env_timeout_s, partial(episode.act, action))
    except Exception as error:  # the answer of an environment that fails
        return error
    return answer.messages, answer.reward, answer.done, answer.events
