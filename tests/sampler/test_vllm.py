"""The client of vLLM servers, against a stand-in for one: what it asks, keeps, proves, refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastturn.carriers import FileCarrier
from fastturn.publish import PublishError
from fastturn.sampler import vllm
from fastturn.sampler.base import Request, SamplingParams
from fastturn.types import Stop

from .client import (
    PARAMS,
    STOPS,
    Client,
    Served,
    complete,
    context,
    policy,
    published,
    requests,
    shift,
)

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
                # Both sides round at the size of their logits; stale weights are off by 0.1.
                np.testing.assert_allclose(done.logprob_A, want_A, rtol=1e-5, atol=1e-5)
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
