"""The proof that published weights arrived at the sampler.

The in-process sampler reads the trainer's own tensors, so publishing is a new version and dropped
caches. The proof is the same for every carrier: at the first mini-batch after a publish nothing has
been trained yet, so every sampled token must have the log-probability that it was sampled with.
"""

from __future__ import annotations

import torch

from fastturn.pack import PackedBatch

# Largest |log ratio| of one token that arithmetic alone explains, by the model's dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 1.0, torch.float16: 0.2}


class PublishError(RuntimeError):
    """The sampler did not draw from the policy that is being trained."""


def prove_version(batch: PackedBatch, version: int) -> None:
    """Raise `PublishError` when a turn was sampled by another policy version than `version`."""
    strays = batch.version_U[batch.version_U != version]
    if len(strays):
        raise PublishError(
            f"{len(strays)} of {len(batch.version_U)} turns were sampled by policy version "
            f"{int(strays[0])}, expected {version}: the sampler missed a publish"
        )


def prove_logprobs(abs_log_ratio_max: float, dtype: torch.dtype) -> None:
    """Raise `PublishError` when untrained weights disagree with the sampler's log-probabilities.

    Example: 3e-6 passes in float32; 0.4 raises.
    """
    if not abs_log_ratio_max <= TOLERANCE[dtype]:
        raise PublishError(
            f"before any update of the stage, a sampled token's log-probability differs from the "
            f"trainer's by {abs_log_ratio_max:.3g} (at most {TOLERANCE[dtype]:g} expected in "
            f"{str(dtype).removeprefix('torch.')}): the sampler used other weights, another "
            f"context, or another distribution (temperature, top-p, a stale prefix cache)"
        )
