"""Bodies and answers of several releases, the routing of contexts, and the connection itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from fastturn.sampler import wire
from fastturn.sampler.base import SamplingParams
from fastturn.sampler.line import CutShort, Line
from fastturn.sampler.routing import BLOCK, MOST_KEYS, Router
from fastturn.sampler.server import EngineError
from fastturn.types import Ids, Stop

V = 50
ASK = wire.Ask(np.array([7, 8, 9], np.int32), 2, 3, SamplingParams(0.7, (2,)), "3-abc")


def read(*entries: dict[str, Any], usage: Any = None) -> wire.Reply:
    answer = {"choices": list(entries), "usage": usage}
    return wire.read(json.dumps(answer).encode(), ASK, V, "http://a/v1")


def generated(ids: list[int], finish: str = "length", **more: Any) -> dict[str, Any]:
    content = [{"token_id": i, "logprob": -0.5} for i in ids]
    return {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish, **more}


# The wire


def test_the_body_leaves_nothing_to_the_servers_defaults() -> None:
    plain = json.loads(wire.body(ASK, "m", generate=False))
    inner = json.loads(wire.body(ASK, "m", generate=True))
    assert plain["prompt"] == inner["token_ids"] == [7, 8, 9]
    assert plain["cache_salt"] == inner["cache_salt"] == "3-abc"
    assert plain["model"] == inner["model"] == "m"
    for sampling in (plain, inner["sampling_params"]):
        assert (sampling["temperature"], sampling["n"], sampling["max_tokens"]) == (0.7, 2, 3)
        assert (sampling["top_p"], sampling["top_k"], sampling["repetition_penalty"]) == (1, 0, 1)
        assert "seed" not in sampling


@pytest.mark.parametrize(
    "entry",
    [
        # 0.32: /inference/v1/generate
        generated([4, 2], "stop"),
        # 0.22: the same route with the logprobs of chat completions
        generated([4, 2], "stop")
        | {"logprobs": {"content": [{"token": f"token_id:{i}", "logprob": -0.5} for i in (4, 2)]}},
        # /v1/completions with return_token_ids
        {
            "token_ids": [4, 2],
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5]},
            "finish_reason": "stop",
        },
        # /v1/completions of a release without it
        {
            "logprobs": {"tokens": ["token_id:4", "token_id:2"], "token_logprobs": [-0.5, -0.5]},
            "finish_reason": "stop",
        },
    ],
)
def test_answers_of_every_release_read_the_same(entry: dict[str, Any]) -> None:
    (choice,) = read(entry).choices
    assert choice.action_A.tolist() == [4, 2] and choice.logprob_A.tolist() == [-0.5, -0.5]
    assert choice.stop is Stop.STOP and choice.tag is None


def test_a_stop_id_at_the_end_of_the_budget_is_a_stop() -> None:
    (choice,) = read(generated([4, 5, 2])).choices
    assert choice.stop is Stop.STOP


def test_usage_and_weight_versions() -> None:
    spans = [{"version": "5", "start": 0, "end": 3}]
    details = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    reply = read(generated([4, 5, 6], weight_versions=spans), usage=details)
    assert (reply.prompt_tokens, reply.cached_tokens) == (3, 2) and reply.choices[0].tag == "5"
    both = [*spans, {"version": "6", "start": 1, "end": 3}]
    assert read(generated([4, 5, 6], weight_versions=both)).choices[0].tag == "mixed"
    assert read(generated([4, 5, 6])).cached_tokens is None


def test_a_completion_given_up_is_a_beginning() -> None:
    (choice,) = read(generated([4], "abort")).choices
    assert choice.stop is None and choice.action_A.tolist() == [4]
    assert len(read(generated([], "abort")).choices[0].action_A) == 0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (generated([4, 5], "stop"), r"ends elsewhere.*stop ids \[2\].*--generation-config vllm"),
        (generated([2, 5, 6]), "goes on after stop id 2"),
        (generated([4, 5]), "cut after 2 of 3 tokens.*--max-model-len"),
        (generated([4, 5, V]), rf"token id {V} lies outside.*vocabulary of {V}"),
        (generated([4, 5, 6], "repetition"), "finish_reason 'repetition'"),
        (generated([4, 5, 6]) | {"logprobs": None}, "3 tokens came with 0 log-probabilities"),
        (
            generated([4, 5, 6])
            | {"logprobs": {"token_logprobs": [-1.0, None, -1.0], "tokens": []}},
            "3 tokens came with 2 log-probabilities",
        ),
        (
            generated([4, 5, 6]) | {"logprobs": {"token_logprobs": [-1.0, wire.NO_LOGPROB, -1.0]}},
            "needs one for each",
        ),
    ],
)
def test_an_answer_that_the_trainer_cannot_use_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        read(entry)
    assert (caught.value.phase, caught.value.url) == ("sample", "http://a/v1")


@pytest.mark.parametrize("data", [b"", b'{"choices": [{"tok', b"[]", b"{}", b"\xff"])
def test_a_body_that_is_not_whole_may_come_again(data: bytes) -> None:
    with pytest.raises(wire.BrokenAnswer):
        wire.read(data, ASK, V, "http://a")


def test_more_than_asked_for_is_refused_and_fewer_are_kept() -> None:
    with pytest.raises(EngineError, match="3 choices, expected at most 2"):
        read(*[generated([4, 5, 6])] * 3)
    assert len(read(generated([4, 5, 6])).choices) == 1


@pytest.mark.parametrize("data", [b'{"error": {"message": "why"}}', b'{"detail": "why"}', b"why"])
def test_a_refusal_says_what_the_server_said(data: bytes) -> None:
    error = wire.refused(404, data, "http://a/x")
    assert "HTTP 404, expected 200: why; the server serves another model" in str(error)
    assert (error.status, error.url) == (404, "http://a/x")


# Routing


def context(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_the_longest_known_beginning_decides() -> None:
    router, whole = Router(), context(10 * BLOCK)
    keys = router.keys(whole)
    assert len(keys) == 10 and router.keys(whole[: 4 * BLOCK + 5]) == keys[:4]
    router.learn(keys[:6], 0)
    router.learn(keys, 1)
    assert router.choose(keys, 100, {0: 0.0, 1: 0.0}) == 1
    assert router.choose(keys, 100, {0: 0.0}) == 0  # six tenths are warm enough
    router.forget(1)
    assert router.choose(keys, 100, {0: 5.0, 1: 5.0}) == 0
    router.forget()
    assert router.warm(keys, 100, {0: 0.0, 1: 0.0}) is None


def test_a_common_start_alone_is_not_warm() -> None:
    """A system prompt that all contexts share must not send all of them to one server."""
    router, shared = Router(), context(2 * BLOCK)
    first, second = (np.concatenate([shared, context(8 * BLOCK, s)]) for s in (1, 2))
    router.learn(router.keys(first), 0)
    assert router.warm(router.keys(second), 100, {0: 0.0, 1: 0.0}) is None


@pytest.mark.parametrize(("load", "chosen"), [(0, 1), (100, 1), (300, 1), (301, 0), (9999, 0)])
def test_a_busy_warm_server_is_passed_over(load: float, chosen: int) -> None:
    router = Router()
    keys = router.keys(context(64))
    router.learn(keys, 1)
    assert router.choose(keys, 100, {0: 100.0, 1: load}) == chosen


def test_short_contexts_have_a_key_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    short = router.keys(context(5))
    assert len(short) == 1 and short != router.keys(context(5, 1))
    router.learn(short, 0)
    assert router.choose(short, 1, {0: 0.0, 1: 0.0}) == 0
    monkeypatch.setattr("fastturn.sampler.routing.MOST_KEYS", 8)
    assert MOST_KEYS > 8
    router.learn(router.keys(context(20 * BLOCK)), 0)
    assert len(router._servers_of) == 8


# The connection


def talk(answers: list[bytes], posts: int) -> tuple[list[Any], int]:
    """What `posts` requests on one line give, and how many connections the server saw."""
    opened = 0

    async def run() -> list[Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal opened
            opened += 1
            while answers:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    break
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await reader.readexactly(length)
                answer = answers.pop(0)
                writer.write(answer.removesuffix(b"CLOSE"))
                if answer.endswith(b"CLOSE"):
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        line = Line(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")
        found: list[Any] = []
        for _ in range(posts):
            try:
                found.append(await line.post("/x", b"{}"))
            except (CutShort, OSError) as error:
                found.append(type(error))
            await asyncio.sleep(0.01)
        line.close()
        server.close()
        return found

    return asyncio.run(run()), opened


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_is_kept_after_a_whole_answer() -> None:
    assert talk([OK, OK, OK], 3) == ([(200, b"{}")] * 3, 1)


def test_a_connection_is_not_kept_after_a_server_error_or_when_told() -> None:
    failed = OK.replace(b"200 OK", b"500 no")
    told = OK.replace(b"Content-Length", b"Connection: close\r\nContent-Length")
    found, opened = talk([failed, told, OK], 3)
    assert [status for status, _ in found] == [500, 200, 200] and opened == 3


def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew() -> None:
    assert talk([OK + b"CLOSE", OK], 2) == ([(200, b"{}")] * 2, 2)


def test_chunked_bodies_are_put_together() -> None:
    chunks = b"3;name=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert talk([head + chunks, OK], 2) == ([(200, b"abcde"), (200, b"{}")], 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OK[:-1] + b"CLOSE", CutShort),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabCLOSE", CutShort),
        (b"HTTP/1.1 200 OK\r\nContCLOSE", ConnectionError),
        (b"CLOSE", ConnectionError),
        (b"no HTTP at all\r\n\r\n", ConnectionError),
    ],
)
def test_what_is_no_whole_answer_is_an_error_and_the_next_one_is_fine(
    answer: bytes, error: type[Exception]
) -> None:
    found, _ = talk([answer, OK], 2)
    assert found == [error, (200, b"{}")]
