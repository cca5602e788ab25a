"""The losses: what an action costs, given its log-ratio, its advantage and whose action it is.

    ρ_a = exp(logprob_a - behavior_a)      loss = Σ_a weight_a · (cost_a + kl_coef · k3_a)

    clip        -min(ρ A, clip(ρ) A)                     each token its own ratio (PPO, GRPO)
    sequence    -min(s A, clip(s) A)                     s: geometric mean of a trajectory (GSPO)
    truncate    -sg[clip(ρ)] · A · log ρ                 every token keeps a gradient (CISPO, TIS)
    mask        -ρ A where ρ is within bounds, else 0    tokens too far off policy leave (IcePop)
    regression  (l - mean l - A)²                        l: log-ratio of the trajectory (REFUEL)

with bounds 1 - clip_low and 1 + clip_high, sg[] without gradient, and the mean over the
trajectories of a group. "clip" is computed inside the fused head and never comes here; the others
need log-probabilities before any gradient, so they cost 8·R·D·V instead of 6. "sequence" and
"regression" compare all turns of a group, which must therefore lie in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastturn.config import COMPARING
from fastturn.kernels import SurrogateOutput, turn_reduce
from fastturn.kernels.turn_surrogate import Settings, Terms, statistics
from fastturn.pack import PackedBatch

CLAMP = 10.0  # largest log-ratio, as in the fused head
FUSED = "clip"


@dataclass(frozen=True, slots=True)
class Objective:
    """The numbers of the loss. `on_policy`: the ratio is 1 and behaviour log-probabilities are not
    read (one step on samples of the current weights); `surrogate`: a name of this file's head.

    Example: `Objective(temperature=0.9, clip_low=0.2, clip_high=0.2, kl_coef=0.02)`.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    on_policy: bool = False
    surrogate: str = FUSED

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.clip_low, 1 + self.clip_high

    @property
    def whole_groups(self) -> bool:
        """Whether the loss compares turns of a group with each other."""
        return self.surrogate in COMPARING


# log-ratio (with a graph), batch, bounds -> (cost, the ratio that the bounds are for), [A] each
Surrogate = Callable[[Tensor, PackedBatch, tuple[float, float]], tuple[Tensor, Tensor]]


def _sequence(
    log_ratio_A: Tensor, batch: PackedBatch, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """GSPO (Zheng et al. 2025, eq. 5 and 7), a trajectory being the sequence."""
    trajectory_A, size = _numbers(batch.trajectory_U[batch.turn_A])
    ratio_A = turn_reduce(log_ratio_A, trajectory_A, size, "geometric_mean")[trajectory_A]
    advantage_A = batch.advantage_A.to(ratio_A.dtype)
    cost_A = -torch.minimum(ratio_A * advantage_A, ratio_A.clamp(*bounds) * advantage_A)
    return cost_A, ratio_A


def _truncate(
    log_ratio_A: Tensor, batch: PackedBatch, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax 2025, eq. 4); with a lower bound of 0, truncated importance sampling."""
    ratio_A = log_ratio_A.detach().clamp(-CLAMP, CLAMP).exp()
    return -ratio_A.clamp(*bounds) * batch.advantage_A * log_ratio_A, ratio_A


def _mask(
    log_ratio_A: Tensor, batch: PackedBatch, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """IcePop (Ring team 2025): a token whose ratio leaves the bounds has no gradient."""
    ratio_A = log_ratio_A.clamp(-CLAMP, CLAMP).exp()
    inside_A = (ratio_A >= bounds[0]) & (ratio_A <= bounds[1])
    return torch.where(inside_A, -ratio_A * batch.advantage_A, 0), ratio_A


def _regression(
    log_ratio_A: Tensor, batch: PackedBatch, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """REFUEL (Gao et al. 2024): all pairs of a group at once (see `credit.refuel`)."""
    trajectory_A, size = _numbers(batch.trajectory_U[batch.turn_A])
    first_S = trajectory_A.new_zeros(size).index_copy_(
        0, trajectory_A, torch.arange(len(trajectory_A), device=trajectory_A.device)
    )
    group_S, groups = _numbers(batch.group_U[batch.turn_A[first_S]])
    log_ratio_S = turn_reduce(log_ratio_A, trajectory_A, size)
    mean_S = turn_reduce(log_ratio_S, group_S, groups, "mean")[group_S]
    cost_S = (log_ratio_S - mean_S - batch.advantage_A[first_S]).square()
    return cost_S[trajectory_A], log_ratio_A.exp()


SURROGATES: dict[str, Surrogate] = {
    "sequence": _sequence,
    "truncate": _truncate,
    "mask": _mask,
    "regression": _regression,
}


def surrogate_loss(
    logprob_A: Tensor,
    entropy_A: Tensor,
    batch: PackedBatch,
    objective: Objective,
    reference_A: Tensor | None = None,
) -> SurrogateOutput:
    """The loss of a packed batch from log-probabilities with a graph; sums and peaks as those of
    the fused head, the clipped ones counted by the ratio that the surrogate bounds.

    Example: one action of ratio 1.5, advantage 1, weight 1 and clip_high 0.2: "truncate" has the
    gradient -1.2 by its log-probability, "mask" 0, "clip" 0.
    """
    weight_A = batch.weight_A.to(logprob_A.dtype)
    log_ratio_A = logprob_A - batch.behavior_A
    cost_A, ratio_A = SURROGATES[objective.surrogate](log_ratio_A, batch, objective.bounds)
    if objective.kl_coef:
        assert reference_A is not None
        d_A = (reference_A - logprob_A).clamp(-CLAMP, CLAMP)
        cost_A = cost_A + objective.kl_coef * (torch.expm1(d_A) - d_A)
    logprob_A, entropy_A = logprob_A.detach(), entropy_A.detach()
    terms = Terms(
        batch.action_A,
        batch.source_A,
        batch.behavior_A,
        batch.advantage_A,
        batch.weight_A,
        reference_A,
    )
    settings = Settings(
        objective.clip_low, objective.clip_high, objective.temperature, objective.kl_coef, None
    )
    sums, peaks = statistics(terms, settings, logprob_A, entropy_A)
    low, high = objective.bounds
    ratio_A = ratio_A.detach()
    sums["clipped_low"] = ((ratio_A < low) & (batch.advantage_A < 0)).double().sum()
    sums["clipped_high"] = ((ratio_A > high) & (batch.advantage_A > 0)).double().sum()
    return SurrogateOutput((weight_A * cost_A).sum(), logprob_A, entropy_A, sums, peaks)


def _numbers(name_N: Tensor) -> tuple[Tensor, int]:
    """Names as numbers 0 .. n - 1, and n."""
    names, number_N = torch.unique(name_N, return_inverse=True)
    return number_N, len(names)
