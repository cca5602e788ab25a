"""The client of vLLM servers, against a stand-in for one: what it asks, keeps, proves, refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastturn.bench import fake_server
from fastturn.bench.fake_server import Fake
from fastturn.carriers import FileCarrier
from fastturn.policy import Policy
from fastturn.publish import PublishError
from fastturn.sampler import members, vllm
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.sampler.server import EngineError
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


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    """Starts stand-ins that are stopped after the test."""
    started: list[Fake] = []

    def start(**settings: Any) -> Fake:
        port = settings.pop("port", 0)
        started.append(Fake(vocabulary=V, **settings).start(port))
        return started[-1]

    yield start
    for fake in started:
        fake.stop()


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


# What is asked and kept


@pytest.mark.parametrize("generate", [True, False])
def test_completions_by_either_route(serve, generate):
    fake = serve(generate_route=generate)
    with Client([fake]) as client:
        client.sampler.publish(3)
        fake.seen.clear()
        asked = requests(7, n=3)
        complete(asked, client.sampler.sample(asked, PARAMS), version=3)
        stats = client.sampler.stats
    assert len(fake.seen) == 7
    assert {b["cache_salt"] for b in fake.seen} == {client.sampler.salt}
    for body in fake.seen:
        sampling = body["sampling_params"] if generate else body
        assert sampling["n"] == 3 and sampling["temperature"] == 1.0
        assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, 0, 0.0)
        assert sampling["repetition_penalty"] == 1.0 and sampling["ignore_eos"] is True
        assert "seed" not in sampling and sampling["stop_token_ids"] == list(STOPS)
    assert stats.context_tokens_flat == 3 * stats.prefill_tokens
    assert stats.prefill_tokens == sum(len(r.context_T) for r in asked)
    assert not client.events


def test_a_budget_is_cut_to_what_fits_and_a_longer_context_is_refused(serve):
    with Client([serve()], max_context=20) as client:
        client.sampler.publish(0)
        ((done,),) = client.sampler.sample([Request(context(15), 50, (1,))], SamplingParams(1, ()))
        assert len(done.action_A) == 5 and done.stop is Stop.LENGTH
        with pytest.raises(ValueError, match=r"request 0: a context of 20 tokens.*at most 20"):
            client.sampler.sample([Request(context(20), 1, (1,))], PARAMS)


def test_greedy_siblings_are_one_completion(serve):
    fake = serve()
    with Client([fake]) as client:
        client.sampler.publish(0)
        (group,) = client.sampler.sample([Request(context(9), 5, (1, 2, 3))], SamplingParams(0, ()))
    assert len(group) == 3 and all(g is group[0] for g in group)
    assert fake.seen[-1]["sampling_params"]["n"] == 1


def test_many_siblings_are_split_and_nothing_asked_is_nothing_done(serve):
    fake = serve()
    with Client([fake]) as client:
        client.sampler.publish(0)
        assert client.sampler.sample([], PARAMS) == []
        assert client.sampler.sample([Request(context(9), 5, ())], PARAMS) == [[]]
        fake.seen.clear()
        asked = [Request(context(9), 2, tuple(range(150)))]
        complete(asked, client.sampler.sample(asked, PARAMS), 0)
    assert sorted(b["sampling_params"]["n"] for b in fake.seen) == [22, 64, 64]


def test_sampling_needs_a_publish_of_these_weights(serve):
    own = policy(1)
    with Client([serve(draw=Served(own).draw)], own) as client:
        with pytest.raises(RuntimeError, match=r"call publish\(version\)"):
            client.sampler.sample(requests(1), PARAMS)
        client.sampler.publish(1)
        client.sampler.sample(requests(1), PARAMS)
        shift(own)
        with pytest.raises(RuntimeError, match="version 1"):
            client.sampler.sample(requests(1), PARAMS)


# Publishing


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


def test_every_publish_arrives_and_is_proved(serve, tmp_path):
    own = policy(1)
    _, fake = published(serve, own)
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        salts = set()
        for version in range(1, 4):
            shift(own)
            client.sampler.publish(version)
            salts.add(client.sampler.salt)
            assert fake.weight_version == str(version) and not fake.paused
            ((one, two),) = client.sampler.sample([Request(context(20), 6, (1, 2))], PARAMS)
            for done in (one, two):
                want_A = client.sampler._logprobs(context(20), done.action_A)
                np.testing.assert_allclose(done.logprob_A, want_A, atol=1e-5)
    assert len(salts) == 3 and not list(tmp_path.iterdir())


def test_a_silent_stage_sends_nothing_and_keeps_its_cache_key(serve, tmp_path):
    own = policy(1)
    _, fake = published(serve, own)
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        client.sampler.publish(1)
        salt, calls, seen = client.sampler.salt, list(fake.calls), len(fake.seen)
        client.sampler.publish(1)
        assert client.sampler.salt == salt and fake.calls == calls and len(fake.seen) == seen
        shift(own)
        client.sampler.publish(1)  # another state of the weights under the same number
        assert client.sampler.salt != salt


def test_a_cache_key_that_outlives_a_publish_is_caught(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "_salt", lambda version: "same")
    own = policy(1)
    served = Served(own)
    fake = serve(draw=served.draw, rpc=served.rpc)  # a pause that does not clear
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        client.sampler.publish(0)
        shift(own)
        with pytest.raises(PublishError, match=r"version 1 at http.*stale prefix cache"):
            client.sampler.publish(1)
        with pytest.raises(RuntimeError, match="last proved publish"):
            client.sampler.sample(requests(1), PARAMS)


def test_a_tensor_that_stays_behind_is_caught(serve, tmp_path):
    own = policy(1)
    served, fake = published(serve, own)
    served.left_out = ("embed_tokens.weight",)  # as a tied head that is not packed again
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        client.sampler.publish(0)
        shift(own)
        with pytest.raises(PublishError, match="canary tokens differ"):
            client.sampler.publish(1)


def test_top_p_of_the_server_is_caught(serve):
    own = policy(1)
    served = Served(own)

    def nucleus(prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        drawn = served.draw(prompt, sampling, salt)
        return [(ids, [x - np.log(0.95) for x in logprobs]) for ids, logprobs in drawn]

    with Client([serve(draw=nucleus)], own) as client, pytest.raises(PublishError, match="top-p"):
        client.sampler.publish(0)


def test_weights_of_another_version_are_not_used(serve, tmp_path):
    own = policy(1)
    served, fake = published(serve, own)
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        client.sampler.publish(4)
        served.model.load_state_dict(policy(9).state_dict())
        served.cached.clear()  # nothing is read from the cache of the weights before
        fake.weight_version = "5"  # another program published
        asked = requests(3)
        complete(asked, client.sampler.sample(asked, PARAMS), version=4)
    assert client.events["engine_version"] and client.events["engine_republished"] == 1
    assert fake.weight_version == "4"


# Faults that pass


@pytest.mark.parametrize(
    ("fault", "event"),
    [
        ("http_500", "engine_http_500"),
        ("http_503", "engine_http_503"),
        ("http_429", "engine_http_429"),
        ("truncate", "engine_truncated"),
        ("drop", "engine_connection"),
        ("abort", "engine_abort"),
        ("missing", "engine_missing"),
    ],
)
@pytest.mark.parametrize("generate", [True, False])
def test_one_fault_is_counted_and_asked_again(serve, fault, event, generate):
    fake = serve(generate_route=generate)
    with Client([fake]) as client:
        client.sampler.publish(2)
        fake.faults.append(fault)
        asked = requests(5, n=3)
        start = time.monotonic()
        complete(asked, client.sampler.sample(asked, PARAMS), version=2)
    assert client.events[event] >= 1 and time.monotonic() - start < 4


def test_finished_siblings_are_kept_and_only_the_missing_one_is_drawn_anew(serve):
    drawn: list[int] = []

    def numbered(prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        first = sum(drawn)
        drawn.append(sampling["n"])
        ids = [[(first + i) % 50 + 5] * sampling["max_tokens"] for i in range(sampling["n"])]
        return [(one, [-np.log(V)] * len(one)) for one in ids]

    fake = serve(draw=numbered)
    with Client([fake]) as client:
        client.sampler.publish(0)
        drawn.clear()
        fake.faults.append("missing")
        (group,) = client.sampler.sample([Request(context(9), 3, (1, 2, 3, 4))], PARAMS)
    assert drawn == [4, 1]
    assert [int(done.action_A[0]) - 5 for done in group] == [1, 2, 3, 4]
    assert client.events["engine_resampled"] == 1


def test_an_aborted_completion_goes_on_from_where_it_was(serve):
    fake = serve()
    with Client([fake]) as client:
        client.sampler.publish(0)
        fake.seen.clear()
        fake.faults.append("abort")
        asked = Request(context(9), 8, (1,))
        ((done,),) = client.sampler.sample([asked], SamplingParams(1.0, ()))
    first, second = fake.seen
    begun = second["token_ids"][9:]
    assert second["token_ids"][:9] == first["token_ids"] and len(begun) == 4
    assert second["sampling_params"]["max_tokens"] == 4
    assert done.action_A[:4].tolist() == begun and len(done.action_A) == 8
    np.testing.assert_allclose(done.logprob_A, -np.log(V), rtol=1e-6)
    assert client.events == {"engine_abort": 1}


def test_a_new_connection_after_an_internal_error(serve):
    fake = serve()
    with Client([fake]) as client:
        client.sampler.publish(0)
        (member,) = client.sampler.fleet.members
        (line,) = member._lines
        kept = line._streams
        client.sampler.sample(requests(1), PARAMS)
        assert line._streams is kept
        fake.faults.append("http_500")
        client.sampler.sample(requests(1), PARAMS)
        assert line._streams not in (None, kept) and member._lines == [line]


# Faults that do not


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no_logprobs", "0 log-probabilities"),
        ("stray_id", f"token id {V} lies outside the trainer's vocabulary of {V}"),
        ("short", "cut after 4 of 8 tokens"),
        ("http_400", "HTTP 400, expected 200: a fault of kind 400"),
        ("http_404", "serves another model"),
    ],
)
@pytest.mark.parametrize("generate", [True, False])
def test_an_answer_that_cannot_be_used_names_phase_and_address(serve, fault, message, generate):
    fake = serve(generate_route=generate)
    path = "/inference/v1/generate" if generate else "/v1/completions"
    with Client([fake]) as client:
        client.sampler.publish(0)
        fake.always = fault
        with pytest.raises(EngineError, match=message) as caught:
            client.sampler.sample([Request(context(9), 8, (1, 2))], SamplingParams(1.0, ()))
    assert caught.value.phase == "sample" and caught.value.url == fake.url + path


def test_an_end_of_the_servers_own_is_refused(serve):
    def own_end(prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        return [([7, 8], [-np.log(V)] * 2)] * sampling["n"]

    fake = serve()
    with Client([fake]) as client:
        client.sampler.publish(0)
        fake.draw = own_end
        with pytest.raises(EngineError, match=r"cut after 2 of 12|--generation-config vllm"):
            client.sampler.sample(requests(1), PARAMS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 100}, "reads at most 100 tokens, model.max_context is 200"),
        ({"logprobs_mode": "raw_logits"}, "which are no log-probabilities"),
        ({"always": "no_logprobs"}, "0 log-probabilities"),
        ({"always": "http_500"}, "a fault of kind 500"),
        ({"always": "hang"}, "no whole answer within 0.5 s"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_at_construction(serve, settings, message):
    fake = serve(**settings)
    with pytest.raises(EngineError, match=message) as caught:
        Client([fake], deadline_s=0.5)
    assert caught.value.url.startswith(fake.url) and caught.value.phase in ("probe", "sample")


def test_another_model_or_vocabulary_or_carrier_is_refused(serve):
    fake = serve()
    with pytest.raises(EngineError, match=r"serves 'fake', expected 'mine'"):
        Client([fake], model="mine")
    fake.vocabulary = V - 1
    with pytest.raises(EngineError, match=rf"Token id {V - 1} is out of vocabulary"):
        Client([fake])
    with pytest.raises(EngineError, match=r"by 'nccl' \(it offers: file\)"):
        Client([fake], carrier=type("Nccl", (), {"name": "nccl"})())


def test_an_address_where_nobody_listens_is_named():
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/"):
        Client(["http://127.0.0.1:9"])


def test_raw_log_probabilities_serve_temperature_one_only(serve):
    fake = serve(logprobs_mode="raw_logprobs")
    with Client([fake]) as client:
        client.sampler.publish(0)
        client.sampler.sample(requests(1), PARAMS)
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            client.sampler.sample(requests(1), SamplingParams(0.6, STOPS))


@pytest.mark.parametrize(("fault", "event"), [("hang", "deadline"), ("http_503", "http_503")])
def test_a_server_that_never_answers_ends_in_an_error(serve, fault, event):
    fake = serve()
    with Client([fake], deadline_s=0.2, patience_s=0.5) as client:
        client.sampler.publish(0)
        fake.always = fault
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"came back within 0\.5 s.*restart") as caught:
            client.sampler.sample(requests(3), PARAMS)
    assert time.monotonic() - start < 4 and caught.value.url == fake.url
    assert client.events[f"engine_{event}"] >= 3 and client.events["engine_benched"] == 1
    assert any("waiting" in text for text in client.said)


# Several servers


def test_siblings_and_later_contexts_go_where_the_prefix_is_warm(serve):
    fakes = [serve(), serve()]
    with Client(fakes) as client:
        client.sampler.publish(0)
        long = [context(150, seed) for seed in range(8)]
        client.sampler.sample([Request(c, 2, (1,)) for c in long], PARAMS)
        home = [{tuple(body["token_ids"]) for body in fake.seen} for fake in fakes]
        assert min(len(seen) for seen in home) >= 3  # cold ones are spread
        for fake in fakes:
            fake.seen.clear()
        shorter = [c[:-20] for c in reversed(long)]  # what an earlier stage forks from
        client.sampler.sample([Request(c, 2, (1, 2)) for c in shorter], PARAMS)
        kept = sum(
            any(tuple(body["token_ids"]) == old[:130] for old in home[i] if len(old) == 150)
            for i, fake in enumerate(fakes)
            for body in fake.seen
        )
        assert kept >= 6


def test_no_server_gets_more_than_its_share_at_once(serve):
    lock, now, most = threading.Lock(), 0, 0

    def slow(prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        nonlocal now, most
        with lock:
            now += sampling["n"]
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= sampling["n"]
        return [([7] * sampling["max_tokens"], [-np.log(V)] * sampling["max_tokens"])] * sampling[
            "n"
        ]

    with Client([serve(draw=slow)], concurrency=6) as client:
        client.sampler.publish(0)
        asked = requests(20, n=2)
        complete(asked, client.sampler.sample(asked, PARAMS), 0)
    assert 4 <= most <= 6


def process(*options: str) -> tuple[subprocess.Popen[str], str]:
    """A stand-in in a process of its own, and its address."""
    command = [sys.executable, str(Path(fake_server.__file__)), "--vocabulary", str(V), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_a_server_killed_in_the_middle_of_a_stage_loses_nothing():
    children = [process("--token-s", "0.02"), process("--token-s", "0.02")]
    try:
        with Client([url for _, url in children], concurrency=16) as client:
            client.sampler.publish(5)
            asked = [Request(context(20 + i, i), 10, (1, 2)) for i in range(48)]
            victim = children[0][0]
            killer = threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL))
            killer.start()
            answers = client.sampler.sample(asked, SamplingParams(1.0, ()))
            killer.join()
            traffic = client.sampler.fleet.traffic
        assert [len(group) for group in answers] == [2] * 48
        assert all(len(done.action_A) == 10 for group in answers for done in group)
        assert len({id(done) for group in answers for done in group}) == 96
        assert client.events["engine_connection"] >= 1 and client.events["engine_benched"] == 1
        assert 1 <= client.events["engine_resampled"] == traffic.resampled <= 16
        assert traffic.completions == 96
    finally:
        for child, _ in children:
            child.kill()
            child.communicate()


def test_all_servers_dead_is_waited_for_out_loud(serve, monkeypatch):
    monkeypatch.setattr(members, "SAY_EVERY_S", 0.2)
    fakes = [serve(), serve()]
    with Client(fakes, patience_s=0.8) as client:
        client.sampler.publish(0)
        for fake in fakes:
            fake.stop()
        with pytest.raises(EngineError, match=r"no rollout server came back.*rollout\.urls"):
            client.sampler.sample(requests(4), PARAMS)
        counted = [text for text in client.said if "waiting" in text]
        assert len(counted) >= 3
        with pytest.raises(EngineError, match="publish at"):
            client.sampler.publish(1)


def test_a_restarted_server_gets_the_weights_before_it_is_used(serve, tmp_path):
    own = policy(1)
    _, fake = published(serve, own)
    with Client([fake], own, FileCarrier(tmp_path)) as client:
        shift(own)
        client.sampler.publish(7)
        fake.stop()
        port = int(fake.url.rsplit(":", 1)[1])
        _, again = published(serve, policy(1), port=port)  # what it was started with
        asked = requests(3)
        complete(asked, client.sampler.sample(asked, PARAMS), version=7)
        for request, group in zip(asked, client.sampler.sample(asked, PARAMS), strict=True):
            for done in group:
                want_A = client.sampler._logprobs(request.context_T, done.action_A)
                np.testing.assert_allclose(done.logprob_A, want_A, atol=1e-5)
    assert again.weight_version == "7"
    assert client.events["engine_republished"] == client.events["engine_back"] == 1


def test_a_publish_leaves_out_a_dead_server_and_goes_on(serve, tmp_path):
    own = policy(1)
    (_, one), (_, two) = published(serve, own), published(serve, own)
    with Client([one, two], own, FileCarrier(tmp_path)) as client:
        client.sampler.publish(0)
        one.stop()
        shift(own)
        client.sampler.publish(1)
        asked = requests(4)
        complete(asked, client.sampler.sample(asked, PARAMS), version=1)
    assert two.weight_version == "1" and client.events["engine_benched"] == 1
