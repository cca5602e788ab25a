"""Several servers: who gets what, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastturn.bench import fake_server
from fastturn.carriers import FileCarrier
from fastturn.sampler import members
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.server import EngineError

from .client import (
    PARAMS,
    Client,
    V,
    complete,
    context,
    policy,
    published,
    requests,
    shift,
)


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
