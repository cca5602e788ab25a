"""The proof that weights arrived: versions match, and untrained weights repeat the sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastturn.pack import pack
from fastturn.publish import PublishError, prove_logprobs, prove_version
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn


def test_a_stale_sample_is_refused():
    done = Completion(np.array([1], np.int32), np.zeros(1, np.float32), 3, Stop.STOP)
    path = Trajectory("t", 0, (Turn(Boundary(0, np.array([5], np.int32)), done),), Ending.FINISHED)
    (batch,) = pack([[Credit(path, np.ones(1), np.ones(1))]], 10)
    prove_version(batch, 3)
    with pytest.raises(PublishError, match="version 3, expected 4"):
        prove_version(batch, 4)


def test_other_log_probabilities_are_refused_and_nan_is_not_a_pass():
    prove_logprobs(2e-5, torch.float32)
    prove_logprobs(0.05, torch.bfloat16)
    with pytest.raises(PublishError, match=r"differs from the trainer's by 0\.4"):
        prove_logprobs(0.4, torch.float32)
    with pytest.raises(PublishError):
        prove_logprobs(float("nan"), torch.float32)
