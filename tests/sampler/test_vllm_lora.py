"""Adapters published alone, to a stand-in that reads their folder with peft: what it then samples
has the log-probabilities of merged weights, and a run trains as one that publishes those."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves it out
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_dist import same_run
from test_vllm_run import PARITY, SMALL, Served

from fastturn import trainer
from fastturn.carriers import FileCarrier, LoraCarrier
from fastturn.carriers.files import shared_folder
from fastturn.config import Config, override
from fastturn.doctor import examine
from fastturn.lora import adapter_config
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.recipes import quickstart
from fastturn.records import read_lines
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.vllm import VllmSampler
from fastturn.types import Completion

peft = pytest.importorskip("peft")
TAUGHT = [*SMALL, f"data.domain={PARITY}:Graded", "rollout.overlap=none"]
ADAPTED = [*TAUGHT, "warm.steps=0", "model.lora_rank=4", "optim.lr=1e-2", "loss.kl_coef=0.01"]


class Repeating(Served):
    """A prompt gets the same answers for as long as the weights are of the same version."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fake.adapt = self.adapt

    def seeds(self, prompt: list[int], n: int) -> tuple[int, ...]:
        first = zlib.crc32(repr((prompt, self.fake.weight_version)).encode())
        return tuple(range(first, first + n))

    def adapt(self, folder: str) -> None:
        """peft's model of the weights that the server began with and the adapter of a folder."""
        plain, _ = Policy.load(self.config)
        adapted = peft.PeftModel.from_pretrained(plain.model, folder)
        self.policy = Policy(adapted.base_model.model)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The key of a model that has seen demonstrations."""
    out = tmp_path_factory.mktemp("base") / "run"
    alone = ("rollout.engine=local", "iterations=0", "data.eval_tasks=1")
    trainer.train(override(quickstart(), [*TAUGHT, *alone]), quickstart(), out)
    return f"model.path={out / 'final'}"


@pytest.fixture
def pair(base: str) -> Iterator[dict[str, Repeating]]:
    """A server for each way to publish."""
    config = override(quickstart(), [*ADAPTED, base, "rollout.urls=http://127.0.0.1:1"])
    made = {way: Repeating(config) for way in ("lora", "file")}
    yield made
    for served in made.values():
        served.fake.stop()


def settings(served: Served, base: str, carrier: str) -> Config:
    where = (f"rollout.urls={served.fake.url}", f"rollout.carrier={carrier}", "iterations=1")
    return override(quickstart(), [*ADAPTED, base, *where])


def test_adapters_and_merged_weights_give_the_same_log_probabilities(pair, base, tmp_path) -> None:
    """Three stages: every adapter is moved, published both ways, and sampled from."""
    policy, _ = Policy.load(settings(pair["lora"], base, "lora"))
    carriers = (
        LoraCarrier(adapter_config(policy.model), folder=tmp_path),
        FileCarrier(tmp_path),
    )
    samplers = [
        VllmSampler([served.fake.url], policy, carrier)
        for served, carrier in zip(pair.values(), carriers, strict=True)
    ]
    asked = [Request(np.arange(i, i + 9, dtype=np.int32), 6, (0, 1)) for i in range(4)]
    seen = []
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * parameter.requires_grad * torch.randn_like(parameter))
        one, other = (published(sampler, version, asked) for sampler in samplers)
        for request, apart, merged in zip(asked, one, other, strict=True):
            for a, b in zip(apart, merged, strict=True):
                assert a.action_A.tolist() == b.action_A.tolist()
                own_A = samplers[0]._logprobs(request.context_T, a.action_A)
                np.testing.assert_allclose(a.logprob_A, own_A, atol=1e-5)
                np.testing.assert_allclose(a.logprob_A, b.logprob_A, atol=1e-5)
        seen.append(float(samplers[0]._logprobs(asked[0].context_T, np.array([3, 4], np.int32))[0]))
    assert min(np.abs(np.diff(seen))) > 1e-3  # the stages differ
    for sampler in samplers:
        sampler.close()


def published(sampler: VllmSampler, version: int, asked: list[Request]) -> list[list[Completion]]:
    sampler.publish(version)
    return sampler.sample(asked, SamplingParams(1.0, (2,)))


def test_a_run_that_publishes_adapters_is_the_one_that_publishes_merged_weights(
    pair, base, tmp_path
) -> None:
    for way, served in pair.items():
        trainer.train(settings(served, base, way), quickstart(), tmp_path / way)
    trained = [r for r in read_lines(tmp_path / "lora" / "records.jsonl") if r.get("actions")]
    assert len(trained) == 3 and all(r["abs_log_ratio_max"] <= 1e-4 for r in trained)
    assert {served.fake.weight_version for served in pair.values()} == {"4"}  # the first, and three
    same_run(tmp_path / "lora", tmp_path / "file")
    assert not list(shared_folder().glob(f"fastturn-lora-{os.getpid()}-*"))


def test_the_doctor_of_a_server_with_adapters(pair, base) -> None:
    found = examine(settings(pair["lora"], base, "lora"), Progress(quiet=True))
    assert not [line for line in found if line.status == "fail"], found
