"""The proof that weights arrived: versions match, and untrained weights repeat the sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastturn.pack import pack
from fastturn.publish import PublishError, prove_canary, prove_logprobs, prove_version
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


def test_a_canary_within_arithmetic_passes():
    assert prove_canary([-1.5, -2.0], [-1.500004, -2.0], torch.float32) == pytest.approx(4e-6)
    expected_A = np.array([-1.0, -2.0], np.float32)
    assert prove_canary(expected_A, torch.tensor([-1.0, -2.0]), torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("expected", "got", "dtype", "says"),
    [
        ([-1.0, -2.0], [-1.0, -3.2], torch.float32, "by up to 1.2 and by 0.6 in the mean"),
        ([-1.0] * 4, [-1.3] * 4, torch.bfloat16, "by 0.3 in the mean .at most 1 and 0.1"),
        ([-1.0, -2.0], [-1.0, float("nan")], torch.float32, "by up to nan"),
        ([-1.0, -2.0], [-1.0], torch.float32, "has 2 tokens and the server scored 1"),
        ([], [], torch.float32, "has 0 tokens"),
    ],
)
def test_a_canary_that_differs_names_the_likely_causes(expected, got, dtype, says):
    with pytest.raises(PublishError, match=says):
        prove_canary(expected, got, dtype)
