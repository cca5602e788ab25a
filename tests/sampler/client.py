"""A tiny policy, stand-in servers and a client that tests of the vLLM sampler share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastturn.bench.fake_server import Fake
from fastturn.policy import Policy
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.sampler.vllm import VllmSampler
from fastturn.types import Ids, Stop

V = 61
STOPS = (3, 4)
PARAMS = SamplingParams(1.0, STOPS)


def policy(seed: int | None = None) -> Policy:
    """A tiny Qwen3; without a seed all weights are zero, so that every id is equally likely."""
    torch.manual_seed(seed or 0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    made = Policy(AutoModelForCausalLM.from_config(config))
    if seed is None:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
    return made


ZERO = policy()


class Client:
    """A sampler with what it counted and said."""

    def __init__(
        self,
        fakes: Sequence[Fake | str],
        policy: Policy = ZERO,
        carrier: Any = None,
        **settings: Any,
    ) -> None:
        self.events: Counter[str] = Counter()
        self.said: list[str] = []
        urls = [fake if isinstance(fake, str) else fake.url for fake in fakes]
        known = {"deadline_s": 5.0, "patience_s": 5.0, "max_context": 200} | settings
        self.sampler = VllmSampler(
            urls, policy, carrier, on_event=self.count, say=self.said.append, **known
        )

    def count(self, name: str, n: int = 1) -> None:
        self.events[name] += n

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.sampler.close()


def context(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(5, V, length).astype(np.int32)


def requests(count: int, n: int = 2, budget: int = 12) -> list[Request]:
    return [Request(context(10 + i, i), budget, tuple(range(n))) for i in range(count)]


def complete(asked: Sequence[Request], answers: Sequence[Sequence[Any]], version: int) -> None:
    """Every completion is there once, whole, of this version."""
    assert [len(group) for group in answers] == [len(request.seeds) for request in asked]
    for request, group in zip(asked, answers, strict=True):
        for done in group:
            assert done.version == version
            assert len(done.action_A) == len(done.logprob_A) >= 1
            stopped = done.action_A[-1] in STOPS
            assert done.stop is (Stop.STOP if stopped else Stop.LENGTH)
            assert stopped or len(done.action_A) == request.max_tokens
            assert not np.isin(done.action_A[:-1], STOPS).any()


class Served:
    """A served copy of a policy that loads files, and keeps what it computed under a cache key as
    long as the key lives: new weights, old key, old answers."""

    def __init__(self, own: Policy) -> None:
        self.model = policy(1)
        self.model.load_state_dict(own.state_dict())
        self.cached: dict[str, dict[str, torch.Tensor]] = {}
        self.lock = threading.Lock()
        self.left_out: tuple[str, ...] = ()

    def rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        assert method == "load_file"
        new = load_file(args[0])
        kept = {k: v for k, v in new.items() if not k.endswith(self.left_out or ("-",))}
        self.model.model.load_state_dict(kept, strict=False)
        return {"ok": True}

    def draw(
        self, prompt: list[int], sampling: dict[str, Any], salt: str
    ) -> list[tuple[list[int], list[float]]]:
        with self.lock:
            now = {k: v.clone() for k, v in self.model.state_dict().items()}
            used = self.cached.setdefault(salt, now)
            self.model.load_state_dict(used)
            try:
                seeds = tuple(np.random.default_rng().integers(0, 2**62, sampling["n"]).tolist())
                asked = [Request(np.array(prompt, np.int32), sampling["max_tokens"], seeds)]
                params = SamplingParams(sampling["temperature"], tuple(sampling["stop_token_ids"]))
                (group,) = LocalSampler(self.model, store_gib=0).sample(asked, params)
            finally:
                self.model.load_state_dict(now)
        return [(done.action_A.tolist(), done.logprob_A.tolist()) for done in group]


def shift(model: Policy) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def published(serve, own: Policy, **settings: Any) -> tuple[Served, Fake]:
    served = Served(own)
    fake = serve(draw=served.draw, rpc=served.rpc, clear=served.cached.clear, **settings)
    return served, fake
