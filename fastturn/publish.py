"""The proof that published weights arrived at the sampler.

The in-process sampler reads the trainer's own tensors, so publishing is a new version and dropped
caches; to a server the weights travel by a carrier (`carriers/`). The proof is the same for all.
Right after a publish a canary, fixed tokens that the server scores, must have the trainer's
log-probabilities; and at the first mini-batch nothing has been trained yet, so every sampled token
must have the log-probability that it was sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fastturn.pack import PackedBatch

# Largest |log ratio| of one token that arithmetic alone explains, by the model's dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 1.0, torch.float16: 0.2}

Values = Sequence[float] | NDArray[np.floating] | torch.Tensor


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


def prove_canary(
    expected_A: Values,
    got_A: Values,
    dtype: torch.dtype,
) -> float:
    """The largest difference between the trainer's log-probabilities of fixed tokens (`expected_A`)
    and those that a server reports for them after a publish (`got_A`), both [A] in nats.

    `dtype`: the coarser of the trainer's and the server's. Raises `PublishError` when one token
    differs by more than `TOLERANCE[dtype]`, all of them by more than a tenth of it in the mean (one
    token alone may be off by much in half precision), a value is missing or NaN, or there is none.
    Example: `prove_canary([-1.5], [-1.500004], torch.float32)` is 4e-6.
    """
    expected = torch.as_tensor(expected_A, dtype=torch.float64)
    got = torch.as_tensor(got_A, dtype=torch.float64)
    if expected.shape != got.shape or not len(expected):
        raise PublishError(
            f"the canary has {len(expected)} tokens and the server scored {len(got)} of them: it "
            f"cut the prompt or the answer short; raise its --max-model-len"
        )
    error_A = (expected - got).abs()
    worst, mean = float(error_A.max()), float(error_A.mean())  # NaN when any is
    most, most_mean = TOLERANCE[dtype], TOLERANCE[dtype] / 10
    if not (worst <= most and mean <= most_mean):
        raise PublishError(
            f"after the publish {len(expected)} canary tokens differ from the trainer's "
            f"log-probabilities by up to {worst:.3g} and by {mean:.3g} in the mean (at most "
            f"{most:g} and {most_mean:g} expected in {str(dtype).removeprefix('torch.')}). Likely "
            f"causes: a tied head that was not re-packed (vLLM's reload_weights; use the file "
            f"carrier), tensors that were left out, a stale prefix cache (pause with clearing, or "
            f"a new cache_salt), raw log-probabilities at a temperature other than 1 "
            f"(--logprobs-mode processed_logprobs), top-p or top-k from the model's own file "
            f"(--generation-config vllm), or another model or tokenizer"
        )
    return worst


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
