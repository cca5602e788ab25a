"""The vLLM server that benchmarks start holds the weights of the policy, and proves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fastturn.bench.cases import ModelShape
from fastturn.bench.layouts import random_model
from fastturn.bench.rollouts import check, providers, rates
from fastturn.bench.served import served
from fastturn.policy import Policy
from fastturn.publish import PublishError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SHAPE = ModelShape(vocab=300, width=64, inner=96, heads=2, keys=1)


def test_it_samples_from_the_weights_it_was_given_and_from_no_others(
    vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(vllm_python.parents[2])
    with torch.random.fork_rng():
        policy = Policy(random_model(SHAPE, 2).eval())
    context_T = np.arange(40, dtype=np.int32)
    with served(policy, 200, 1) as samplers:
        assert list(samplers) == ["vllm"]
        check(policy, "vllm", samplers["vllm"], context_T)
        run = providers(policy, 3, samplers)
        assert run["vllm"].sample([(context_T, 5), (context_T[:7], 9)]) == 3 * 14
        found = rates(run, [(context_T, 5)], 2)
        assert all(rate > 0 for values in found.values() for rate in values)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.5)
        with pytest.raises(PublishError, match="canary"):
            check(policy, "vllm", samplers["vllm"], context_T)
