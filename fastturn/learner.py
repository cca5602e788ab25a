"""The update: groups -> credit -> packed micro-batches -> loss -> optimiser step.

One call of `Learner.update` is one stage: `epochs` passes over its groups in `minibatches` steps
each. Groups without a gradient cost nothing: they are never packed, and a mini-batch of only such
groups takes no optimiser step (neither momentum nor weight decay moves the weights). With a KL
term every group has a gradient and is trained. An algorithm of several passes (`passes.py`) takes a
step for each of them where others take one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fastturn.algorithms import algorithm_of
from fastturn.channels import credited, folded
from fastturn.checkpoint import atomic_folder
from fastturn.config import Config
from fastturn.credit import Array, Credits, zero_advantage
from fastturn.dist import World
from fastturn.loss import Objective
from fastturn.optim import Optimizers
from fastturn.pack import PackedBatch, pack
from fastturn.policy import Policy, WithoutAdapter
from fastturn.publish import prove_logprobs, prove_version
from fastturn.sharding import whole, whole_state
from fastturn.types import Credit, SiblingGroup, Trajectory

logger = logging.getLogger(__name__)
MOST_SKIPS = 3  # non-finite steps in a row that end the run


class DivergedError(RuntimeError):
    """Several optimiser steps in a row had a non-finite loss or gradient."""


class Clock(Protocol):
    def span(self, name: str) -> AbstractContextManager[Any]: ...


@dataclass(slots=True)
class Totals:
    """Sums over the micro-batches of some optimiser steps; the kernel's `sums` and `peaks`."""

    steps: int = 0
    skipped: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    tokens_packed: int = 0
    tokens_flat: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, batch: PackedBatch, output: Any) -> None:
        self.tokens_packed += batch.tokens_packed
        self.tokens_flat += batch.tokens_flat
        self.loss += float(output.loss.detach())
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in output.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, -math.inf), float(value))

    def over(self, world: World) -> Totals:
        """The totals of all ranks; the optimiser step has not been taken yet."""
        scalars = ("loss", "tokens_packed", "tokens_flat")
        mine = {name: float(getattr(self, name)) for name in scalars}
        total = world.sum(mine | {f"sums.{name}": value for name, value in self.sums.items()})
        return Totals(
            loss=total["loss"],
            tokens_packed=int(total["tokens_packed"]),
            tokens_flat=int(total["tokens_flat"]),
            sums={name: total[f"sums.{name}"] for name in self.sums},
            peaks=world.max(self.peaks),
        )

    def mean(self, name: str) -> float:
        """Mean of a summed quantity over the scored actions (0 when there are none)."""
        actions = self.sums.get("actions", 0.0)
        return self.sums[name] / actions if actions else 0.0


@dataclass(slots=True)
class Learner:
    """Policy, optimiser and the rule that joins them. `reference` (frozen) only with a KL term;
    `path_scale`: what the path channel counts beside the outcome."""

    policy: Policy
    optimizers: Optimizers
    config: Config
    clock: Clock
    out: Path
    reference: Policy | WithoutAdapter | None = None
    world: World = field(default_factory=World.single)
    skips_in_row: int = 0
    path_scale: float = 1.0

    def update(
        self,
        chunks: Iterable[Sequence[SiblingGroup]],
        planned: int,
        version: int,
        key: tuple[int, ...],
        moved: bool = False,
    ) -> tuple[dict[str, Any], Credits]:
        """Train on one stage's groups; returns its record and the credits of the first epoch.

        `chunks`: the groups, as they come; each chunk's gradient is computed when it is there, and
        the step is taken after the last one. (With several mini-batches all are awaited first.)
        `planned`: how many groups are expected; those that never come change nothing.
        `version` is the policy version that must have sampled them, `moved` says that the policy
        has been trained since; `key` seeds the order of mini-batches. Raises `PublishError` when
        the samples are not from this policy and `DivergedError` after `MOST_SKIPS` non-finite steps
        in a row.
        """
        loss = self.config.loss
        objective = Objective(
            temperature=self.config.sampling.temperature,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            kl_coef=loss.kl_coef,
            surrogate=algorithm_of(self.config).surrogate,
        )

        total, first = Totals(), None
        shown: Credits = []
        groups: list[SiblingGroup] = []
        for epoch in range(loss.epochs):
            coming = chunks if epoch == 0 else [groups]
            for dealt, count in self._deal(coming, planned, (*key, epoch)):
                for part in self._parts(dealt, count, objective.whole_groups):
                    batches, optimizers = part.batches(), self.optimizers
                    step = self.step(batches, objective, optimizers, version, part.correction)
                    if epoch == 0:
                        shown += part.credits
                        groups += part.groups
                    if not step.steps + step.skipped:
                        continue
                    if first is None:
                        first = step
                        dtype = getattr(torch, self.config.model.compute_dtype)
                        if not moved:
                            prove_logprobs(step.peaks["abs_log_ratio"], dtype)
                    _merge(total, step)
        return stage_record(shown, total, first), shown

    def log_ratios(self, credits: Credits) -> Array:
        """How far the policy has moved on every credited trajectory: the sum over its tokens of
        weight · log(policy now / policy that sampled), float64, in the order of the credits."""
        total = torch.zeros(sum(map(len, credits)), dtype=torch.float64)
        for batch in self.pack(credits):
            with self.clock.span("score"):
                logprob_A = self.policy.score(batch, self.config.sampling.temperature)
            moved_A = batch.weight_A * (logprob_A - batch.behavior_A)
            total.index_add_(0, batch.trajectory_U[batch.turn_A].cpu(), moved_A.double().cpu())
        summed = self.world.sum({str(i): value for i, value in enumerate(total.tolist())})
        return np.array(list(summed.values()))

    def pack(self, credits: Credits, whole_groups: bool = False) -> list[PackedBatch]:
        """This rank's micro-batches of the credits of all ranks, equally many on each."""
        world, budget_T = self.world, self.config.pack_tokens
        return pack(
            credits,
            budget_T,
            world.device,
            rank=world.rank,
            ranks=world.size,
            whole_groups=whole_groups,
        )

    def step(
        self,
        batches: Iterable[PackedBatch],
        objective: Objective,
        optimizers: Optimizers,
        version: int | None = None,
        correction: Callable[[], float] = lambda: 1.0,
    ) -> Totals:
        """One optimiser step over micro-batches, or none when there are none; skipped (and kept on
        disk) when not finite. `correction`: what the sum of their gradients is multiplied by, asked
        for when the last of them has come."""
        totals, seen = Totals(), []
        optimizers.zero_grad()
        for batch in batches:
            seen.append(batch)
            if version is not None:
                prove_version(batch, version)
            reference_A = None
            if self.reference is not None and objective.kl_coef > 0:
                with self.clock.span("score"):
                    reference_A = self.reference.score(batch, objective.temperature)
            with self.clock.span("forward_backward"):
                output = self.policy(batch, objective, reference_A)
                output.loss.backward()
                totals.add(batch, output)
        if not seen:
            return totals
        with self.clock.span("optimizer"):
            totals = totals.over(self.world)
            self._scale(totals, correction())
            totals.grad_norm = self._clip()
            if math.isfinite(totals.loss) and math.isfinite(totals.grad_norm):
                optimizers.step()
                totals.steps = 1
                self.skips_in_row = 0
            else:
                self._skip(seen, totals, "warm.lr" if objective.on_policy else "optim.lr")
        return totals

    def _scale(self, totals: Totals, factor: float) -> None:
        """Multiply the gradients and the loss."""
        if factor != 1.0:
            totals.loss *= factor
            for gradient in self._gradients():
                gradient.mul_(factor)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.policy.parameters() if p.grad is not None]

    def _clip(self) -> float:
        """Scale the gradients down to the largest norm allowed; returns the norm they had."""
        norm = whole(torch.nn.utils.get_total_norm(self._gradients()))
        most = self.config.optim.clip_norm or math.inf
        torch.nn.utils.clip_grads_with_norm_(self.policy.parameters(), most, norm)
        return float(norm)

    def _deal(
        self, chunks: Iterable[Sequence[SiblingGroup]], planned: int, key: tuple[int, ...]
    ) -> Iterator[tuple[Iterable[Sequence[SiblingGroup]], int]]:
        """(chunks, planned groups) of every mini-batch of an epoch: all groups as they come, or a
        seeded shuffle dealt out evenly when they are there; no empty ones."""
        if self.config.loss.minibatches == 1:
            yield chunks, planned
            return
        groups = [group for chunk in chunks for group in chunk]
        parts = min(self.config.loss.minibatches, len(groups))
        order = np.random.default_rng([self.config.seed, *key]).permutation(len(groups))
        for part in range(parts):
            dealt = [groups[i] for i in order[part::parts]]
            yield [dealt], len(dealt)

    def _parts(
        self, chunks: Iterable[Sequence[SiblingGroup]], planned: int, whole_groups: bool
    ) -> Iterator[Part | Pass]:
        """The steps on a mini-batch: one, or a pass for each credit that the algorithm makes of it,
        the next of them when the step of the last one has been taken."""
        config, algorithm = self.config, algorithm_of(self.config)

        def credit(chunk: Sequence[SiblingGroup]) -> Credits:
            return credited(algorithm, chunk, config, self.path_scale)

        def packed(credits: Credits) -> list[PackedBatch]:
            with self.clock.span("pack"):
                return self.pack(credits, whole_groups)

        if algorithm.passes is None:
            yield Part(chunks, planned, credit, packed)
            return
        groups = [group for chunk in chunks for group in chunk]
        new, shown = groups, credit(groups)
        one_channel = [folded(group, config, self.path_scale) for group in groups]
        for credits in algorithm.passes(one_channel, config, self.log_ratios):
            yield Pass(credits, packed, new, shown)
            new, shown = [], []

    def _skip(self, batches: Sequence[PackedBatch], totals: Totals, rate: str) -> None:
        """Book a non-finite step and keep its batch for replay; `rate` is the key to blame."""
        totals.skipped = 1
        self.skips_in_row += 1
        state = whole_state(self.policy, keep=self.world.leader)
        saved = [_on_host(batch) for batch in batches]
        everyone = [batch for part in self.world.all_gather_objects(saved) for batch in part]

        def write() -> Path:
            folder = self.out / "bad" / f"{len(list((self.out / 'bad').glob('[0-9]*'))):04d}"
            content = {"batches": everyone, "model": state}
            atomic_folder(folder, lambda part: torch.save(content, part / "step.pt"))
            return folder

        folder = self.world.first(write)
        logger.warning("a step was not finite and is skipped; its batch is in %s", folder)
        if self.skips_in_row >= MOST_SKIPS:
            raise DivergedError(
                f"{MOST_SKIPS} optimiser steps in a row were not finite (loss {totals.loss}, "
                f"gradient norm {totals.grad_norm}); the last batch and weights are in {folder}. "
                f"Lower {rate} (now {self.optimizers.lr:g}) or look at that batch"
            )


@dataclass(slots=True)
class Part:
    """The groups of one optimiser step, credited and packed as they come.

    A credit's weights share 1 among the groups of its chunk. Here a chunk gets its share of the
    `planned` groups, and what is left when fewer have come is the `correction` of the gradient:
    together these are the weights of all groups that came, wherever chunks begin and end.
    Example: 4 planned, chunks of 2 and 1: both weigh 1/4 a group, and the correction is 4/3.
    """

    chunks: Iterable[Sequence[SiblingGroup]]
    planned: int
    credit: Callable[[Sequence[SiblingGroup]], Credits]
    pack: Callable[[Credits], list[PackedBatch]]
    groups: list[SiblingGroup] = field(default_factory=list)
    credits: Credits = field(default_factory=list)

    def batches(self) -> Iterator[PackedBatch]:
        for chunk in self.chunks:
            credits = self.credit(chunk)
            self.groups += chunk
            self.credits += credits
            yield from self.pack(_weighed(credits, len(chunk) / self.planned))

    def correction(self) -> float:
        return self.planned / len(self.groups)


@dataclass(frozen=True, slots=True)
class Pass:
    """One of several steps on the same groups: what it trains on, and what it adds to the record,
    which is the groups and their credit at the first pass and nothing later."""

    given: Credits
    pack: Callable[[Credits], list[PackedBatch]]
    groups: list[SiblingGroup]
    credits: Credits

    def batches(self) -> Iterator[PackedBatch]:
        yield from self.pack(self.given)

    def correction(self) -> float:
        return 1.0


def _weighed(credits: Credits, share: float) -> Credits:
    """Credits with their weights multiplied."""
    if share == 1.0:
        return credits
    return [[replace(c, weight_U=c.weight_U * share) for c in group] for group in credits]


def _on_host(batch: PackedBatch) -> dict[str, Any]:
    """A micro-batch as names and values that can be sent and saved."""
    values = {name: getattr(batch, name) for name in PackedBatch.__slots__ if name != "plans"}
    return {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def supervised(trajectories: Sequence[Trajectory]) -> Credits:
    """Credit that turns the surrogate into the mean negative log-likelihood's gradient: advantage
    1 and equal weight for every action token (with `Objective(on_policy=True)`)."""
    share = 1 / sum(trajectory.tokens_sampled for trajectory in trajectories)
    return [[Credit(t, np.ones(len(t.turns)), np.full(len(t.turns), share))] for t in trajectories]


def stage_record(credits: Credits, total: Totals, first: Totals | None) -> dict[str, Any]:
    """What is logged of one stage: all mini-batches, and the first one where nothing has moved."""
    silent = sum(zero_advantage(group) for group in credits)
    trajectories = [credit.trajectory for group in credits for credit in group]
    clipped = total.sums.get("clipped_low", 0.0) + total.sums.get("clipped_high", 0.0)
    return {
        "groups": len(credits),
        "groups_silent": silent,
        "zero_advantage_share": silent / len(credits) if credits else 0.0,
        "siblings": len(trajectories),
        "success": _mean([t.success for t in trajectories]),
        "return_mean": _mean([t.discounted_return() for t in trajectories]),
        "tokens_packed": total.tokens_packed,
        "tokens_flat": total.tokens_flat,
        "actions": int(total.sums.get("actions", 0)),
        "steps": total.steps,
        "skipped": total.skipped,
        "loss": total.loss / max(1, total.steps + total.skipped),
        "grad_norm": total.grad_norm,
        "clip_fraction": clipped / total.sums["actions"] if total.sums.get("actions") else 0.0,
        "kl_behavior": total.mean("kl_behavior"),
        "kl_reference": total.mean("kl_reference"),
        "entropy": total.mean("entropy"),
        **_first_record(first),
    }


def _first_record(first: Totals | None) -> dict[str, Any]:
    if first is None or not first.sums.get("actions"):
        return {
            "ratio_geomean": None,
            "abs_log_ratio_max": None,
            "clip_fraction_first": None,
            "log_ratio_sum": 0.0,
            "actions_first": 0,
        }
    clipped = first.sums["clipped_low"] + first.sums["clipped_high"]
    return {
        "ratio_geomean": math.exp(first.mean("log_ratio")),
        "abs_log_ratio_max": first.peaks["abs_log_ratio"],
        "clip_fraction_first": clipped / first.sums["actions"],
        "log_ratio_sum": first.sums["log_ratio"],
        "actions_first": int(first.sums["actions"]),
    }


def _merge(total: Totals, step: Totals) -> None:
    total.steps += step.steps
    total.skipped += step.skipped
    total.loss += step.loss
    total.grad_norm = max(total.grad_norm, step.grad_norm)
    total.tokens_packed += step.tokens_packed
    total.tokens_flat += step.tokens_flat
    for name, value in step.sums.items():
        total.sums[name] = total.sums.get(name, 0.0) + value
    for name, value in step.peaks.items():
        total.peaks[name] = max(total.peaks.get(name, -math.inf), value)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
