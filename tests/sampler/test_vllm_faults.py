"""Answers that fail, that cannot be used and that never come: counted, asked again, or named."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.server import EngineError

from .client import (
    PARAMS,
    STOPS,
    Client,
    V,
    complete,
    context,
    requests,
)

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
    with pytest.raises(EngineError, match=r"by 'nccl' \(it offers: file, lora\)"):
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
