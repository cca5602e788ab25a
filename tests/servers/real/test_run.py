"""Whole runs and the client through real servers: exact publishes, warm and stale caches, servers
that are killed in the middle of a stage."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # pytest's import mode leaves it out
from test_trainer import closure

from fastturn import cli, trainer
from fastturn.carriers import FileCarrier
from fastturn.carriers.files import write_tensors
from fastturn.config import override
from fastturn.envs import calculator
from fastturn.envs.tools import Grade
from fastturn.policy import Policy
from fastturn.publish import PublishError
from fastturn.recipes import quickstart
from fastturn.records import read_lines
from fastturn.sampler import vllm, wire
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.fleet import Fleet
from fastturn.sampler.members import Member
from fastturn.sampler.vllm import VllmSampler

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("live", ["tied"], indirect=True)]

RUN = [
    *("model.width=128", "rollout.engine=vllm", "warm.steps=20", "data.eval_tasks=8"),
    *("trackers=none", "rollout.deadline_s=120"),
]
PARAMS = SamplingParams(1.0, ())


def train(out: Path, urls: list[str], *pairs: str) -> int:
    """`fastturn train quickstart …` in this process; its exit status."""
    servers = f"rollout.urls={','.join(urls)}"
    return cli.main(["train", "quickstart", *RUN, servers, "--out", str(out), *pairs])


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that split groups although 20 warm steps teach no arithmetic: a hash of the answer,
    so that stages train and publish."""

    def grade(task: Any, text: str) -> Grade:
        return Grade(float(zlib.crc32(text.encode()) % 2), ("answer",))

    monkeypatch.setattr(calculator, "grade", grade)


def events(out: Path) -> Counter[str]:
    """Of all records, those of the rollout engine."""
    found: Counter[str] = Counter()
    for record in read_lines(out / "records.jsonl"):
        found.update({k: n for k, n in record["counts"].items() if k.startswith("engine_")})
    return found


def stages(out: Path) -> list[dict[str, Any]]:
    return [r for r in read_lines(out / "records.jsonl") if r["kind"] == "stage"]


def policy_of(live: Any) -> Policy:
    """The served model as the trainer loads it."""
    config = override(quickstart(), ["model.width=128"])
    loaded, _ = Policy.load(replace(config, model=replace(config.model, path=str(live.folder))))
    return loaded


def test_the_quickstart_trains_through_a_real_server(live, taught, tmp_path):
    out = tmp_path / "run"
    assert train(out, [live.server.url], "iterations=2", "tasks=4") == 0
    trained = [stage for stage in stages(out) if stage["steps"]]
    assert len(trained) >= 3 and sum(stage["actions"] for stage in trained) > 100
    assert max(stage["abs_log_ratio_max"] for stage in trained) <= 1e-3
    assert all(abs(stage["ratio_geomean"] - 1) <= 1e-4 for stage in trained)
    for record in read_lines(out / "records.jsonl"):
        assert all(math.isfinite(v) for v in record.values() if isinstance(v, float)), record
    summary = json.loads((out / "summary.json").read_text())
    assert summary["iterations"] == 2 and (out / "final" / "model.safetensors").exists()
    assert summary["devices"] == 2 and set(summary["pools"]) == {"trainer", "servers"}
    assert closure(out) == pytest.approx(1.0, rel=0.01)
    assert live.server.weight_version() == str(1 + len(trained))  # warm start, then every update
    assert not events(out)


@pytest.fixture
def sampler(live, tmp_path):
    made = VllmSampler([live.server.url], policy_of(live), FileCarrier(tmp_path), deadline_s=120)
    yield made
    made.close()


def contexts(count: int, length: int, vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return list(rng.integers(0, vocabulary, (count, length)).astype(np.int32))


def stage_hits(live: Any, sampler: VllmSampler, asked: list[np.ndarray]) -> float:
    """Share of the contexts' tokens that the server read from its cache, by its own counters."""
    before = live.server.metrics()
    sampler.sample([Request(context_T, 4, (0,)) for context_T in asked], PARAMS)
    after = live.server.metrics()
    hits, queries = (
        after[f"prefix_cache_{name}"] - before[f"prefix_cache_{name}"]
        for name in ("hits", "queries")
    )
    assert queries == sum(map(len, asked))
    return hits / queries


def test_the_stage_after_a_silent_one_reads_its_contexts_from_the_cache(live, sampler):
    sampler.publish(1)
    salt = sampler.salt
    later = contexts(24, 240, sampler._vocabulary)
    earlier = [context_T[: 196 + i] for i, context_T in enumerate(later)]  # as reverse turns go
    assert stage_hits(live, sampler, later) == 0
    sampler.publish(1)  # silent: nothing was trained
    assert sampler.salt == salt
    assert stage_hits(live, sampler, earlier) >= 0.9
    shift(sampler.policy)
    sampler.publish(2)
    assert sampler.salt != salt and stage_hits(live, sampler, earlier) == 0


class UnpausedCarrier(FileCarrier):
    """Moves weights and leaves the server's prefix cache as it was."""

    def send(self, weights, version, servers):
        path = self.folder / "weights.safetensors"
        write_tensors(weights, path)
        for server in servers:
            (answer,) = server.rpc("load_file", [str(path)])
            assert answer["ok"], answer
            server.set_weight_version(str(version))


@pytest.mark.parametrize("changed", [True, False])
def test_only_another_cache_key_keeps_old_prefixes_out(
    live, sampler, changed, tmp_path, monkeypatch
):
    sampler.publish(1)
    if not changed:
        monkeypatch.setattr(vllm, "_salt", lambda version: sampler.salt)
    asked = [Request(c, 8, (0, 1)) for c in contexts(4, 200, sampler._vocabulary)]
    sampler.sample(asked, PARAMS)
    sampler.carrier = UnpausedCarrier(tmp_path / "unpaused")
    shift(sampler.policy)
    if not changed:
        with pytest.raises(PublishError, match="stale prefix cache"):
            sampler.publish(2)
        return
    sampler.publish(2)
    for request, group in zip(asked, sampler.sample(asked, PARAMS), strict=True):
        for done in group:
            want_A = sampler._logprobs(request.context_T, done.action_A)
            np.testing.assert_allclose(done.logprob_A, want_A, atol=1e-3)


def shift(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))


class Ledger:
    """What arrived, what was used, and a server's end: `kill()` is called at the first answer in a
    stage that `url` gives while it has others in flight."""

    def __init__(self, patch: pytest.MonkeyPatch, url: str, kill: Callable[[], None]) -> None:
        self.ids: list[str] = []
        self.received, self.used = 0, 0
        self.armed, self.killed, self.flying = False, False, 0
        self.url, self.kill = url, kill
        attempt, run, read, stage = Member.attempt, Fleet.run, wire.read, trainer.one_stage

        async def attempting(member, ask, *rest):
            ours = member.url == self.url
            self.flying += ours
            try:
                outcome = await attempt(member, ask, *rest)
            finally:
                self.flying -= ours
            if ours and self.armed and not self.killed and self.flying:
                self.killed = True
                self.kill()
            return outcome

        def reading(data, ask, *rest):
            reply = read(data, ask, *rest)
            self.ids.append(json.loads(data).get("request_id") or json.loads(data)["id"])
            self.received += len(reply.choices)
            return reply

        def running(fleet, jobs, *rest):
            found = run(fleet, jobs, *rest)
            assert len(found) == sum(len(job.places) for job in jobs)
            assert len({id(choice) for choice, _ in found}) == len(found)
            self.used += len(found)
            return found

        def staging(*args):
            self.armed = True
            stage(*args)

        patch.setattr(Member, "attempt", attempting)
        patch.setattr(Fleet, "run", running)
        patch.setattr(wire, "read", reading)
        patch.setattr(trainer, "one_stage", staging)


@pytest.mark.slow
def test_a_server_killed_in_mid_stage_costs_no_sample(live, spare, taught, tmp_path, monkeypatch):
    out = tmp_path / "run"
    ledger = Ledger(monkeypatch, spare.url, spare.kill)
    urls = [live.server.url, spare.url]
    assert train(out, urls, "iterations=1", "tasks=16") == 0
    assert ledger.killed and not spare.process.is_ready()
    counted = events(out)
    assert counted["engine_benched"] == 1 and counted["engine_connection"] >= 1
    assert counted["engine_resampled"] >= 1
    # Every request that was answered has an id of its own, and every completion that arrived was
    # used once; the canaries are the only ones that no stage asked for.
    assert len(set(ledger.ids)) == len(ledger.ids)
    assert 0 <= ledger.received - ledger.used <= 3 + 2 * len(stages(out))
    assert all(stage["siblings"] == 4 * stage["groups"] for stage in stages(out))
    trained = [stage for stage in stages(out) if stage["steps"]]
    assert trained and max(stage["abs_log_ratio_max"] for stage in trained) <= 1e-3


@pytest.mark.slow
def test_when_both_are_dead_it_waits_saves_and_goes_on_after_a_restart(
    live, spare, taught, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "run"

    def kill() -> None:
        live.running.kill()
        spare.kill()

    with pytest.MonkeyPatch.context() as patch:
        ledger = Ledger(patch, spare.url, kill)
        urls = [live.server.url, spare.url]
        pairs = ("iterations=2", "tasks=16", "rollout.patience_s=12")
        assert train(out, urls, *pairs) == 1
    assert ledger.killed
    printed = "".join(" ".join(capfd.readouterr()).split())
    for text in ("no rollout server can be used", "s more, then the run saves and stops"):
        assert printed.count(text.replace(" ", "")) >= 2
    assert "norolloutservercamebackwithin12s" in printed
    assert f"--resume--out{out}" in printed
    assert not (out / "summary.json").exists() and list((out / "checkpoints").iterdir())
    live.running.ready()
    again = ("iterations=2", "tasks=16", "rollout.patience_s=60", "--resume")
    assert train(out, [live.server.url], *again) == 0
    assert json.loads((out / "summary.json").read_text())["iterations"] == 2
    places = [(stage["iteration"], stage["stage"]) for stage in stages(out)]
    assert len(set(places)) == len(places) and {i for i, _ in places} == {0, 1}
    assert all(stage["siblings"] == 4 * stage["groups"] for stage in stages(out))


def test_the_doctor_of_a_real_server(live, taught, capsys):
    servers = f"rollout.urls={live.server.url}"
    assert cli.main(["doctor", "quickstart", *RUN, servers, "--json"]) == 0
    lines = {line["check"]: line for line in json.loads(capsys.readouterr().out)}
    for check in ("servers answer", "server flags", "log-probabilities", "opening", "agreement"):
        assert lines[check]["status"] == "pass", lines[check]
    for check in ("publish round trip", "snapshots", "demonstrations"):
        assert lines[check]["status"] == "pass", lines[check]
