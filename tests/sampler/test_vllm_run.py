"""A run whose rollouts come from servers: it trains on what they sampled and survives their end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest's import mode leaves it out
from test_trainer import closure

from fastturn import trainer
from fastturn.bench.fake_server import Fake
from fastturn.config import Config, ConfigError, override
from fastturn.doctor import examine
from fastturn.findings import Line
from fastturn.policy import Policy
from fastturn.progress import Progress
from fastturn.recipes import quickstart
from fastturn.records import read_lines
from fastturn.run import RunError
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.serve import served_model

PARITY = Path(__file__).parents[1] / "parity.py"
SMALL = [
    *(f"data.domain={PARITY}:Domain", "data.eval_tasks=6", "turns=3", "tasks=4", "iterations=2"),
    *("warm.steps=30", "warm.batch=8", "trackers=none", "save.every=0", "sampling.turn_tokens=8"),
    *("rollout.engine=vllm", "rollout.patience_s=0.4", "rollout.deadline_s=10"),
]


class Served:
    """The recipe's model behind a stand-in; `left` sampling requests until it is away."""

    def __init__(self, config: Config) -> None:
        model = replace(config.model, path=served_model(config), lora_rank=0)
        self.config = replace(config, model=model)
        self.policy, _ = Policy.load(self.config)
        self.lock, self.left = threading.Lock(), 10**9
        vocabulary = len(self.policy.head().weight_VD)
        self.fake = Fake(vocabulary=vocabulary, draw=self.draw, rpc=self.load)
        self.fake.start()

    def load(self, method: str, args: list[Any]) -> dict[str, Any]:
        self.policy.model.load_state_dict(load_file(args[0]), strict=False)
        return {"ok": True}

    def draw(
        self, prompt: list[int], sampling: dict[str, Any], salt: str
    ) -> list[tuple[list[int], list[float]]]:
        seeds = self.seeds(prompt, sampling["n"])
        asked = [Request(np.array(prompt, np.int32), sampling["max_tokens"], seeds)]
        params = SamplingParams(sampling["temperature"], tuple(sampling["stop_token_ids"]))
        with self.lock:
            (group,) = LocalSampler(self.policy, store_gib=0).sample(asked, params)
            self.left -= 1
            self.available(self.left > 0)
        return [(done.action_A.tolist(), done.logprob_A.tolist()) for done in group]

    def seeds(self, prompt: list[int], n: int) -> tuple[int, ...]:
        """New ones for every request."""
        return tuple(np.random.default_rng().integers(0, 2**62, n).tolist())

    def available(self, yes: bool) -> None:
        self.fake.healthy, self.fake.always = yes, "" if yes else "drop"


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(override(quickstart(), [*SMALL, "rollout.urls=http://127.0.0.1:1"]))
    yield made
    made.fake.stop()


def configured(served: Served, *pairs: str) -> Config:
    return override(quickstart(), [*SMALL, f"rollout.urls={served.fake.url}", *pairs])


def test_it_trains_on_what_the_servers_sampled(served: Served, tmp_path: Path) -> None:
    summary = trainer.train(configured(served), quickstart(), tmp_path / "run")
    assert summary["iterations"] == 2 and summary["rollouts"] > 2 * 4 * 5
    pools = summary["pools"]
    assert pools["servers"]["devices"] == 1 and pools["servers"]["busy"] > 0
    assert pools["servers"]["idle"]["warm_start"] == pytest.approx(summary["spans"]["warm_start"])
    assert closure(tmp_path / "run") == pytest.approx(1.0, rel=0.01)
    trained = [r for r in read_lines(tmp_path / "run" / "records.jsonl") if r.get("actions")]
    assert trained and all(r["abs_log_ratio_max"] <= 1e-4 for r in trained)
    salts = {body["cache_salt"] for body in served.fake.seen}
    versions = {salt.partition("-")[0] for salt in salts if not salt.startswith("-")}
    assert len(versions) >= 2 and len(salts) == len(versions) + 1  # and the one of construction


def test_servers_hold_the_merged_weights_of_an_adapted_run(served: Served, tmp_path: Path) -> None:
    """Stages would be refused if what was published were not what is trained."""
    config = configured(served, "model.lora_rank=4", "optim.lr=1e-2", "loss.kl_coef=0.01")
    trainer.train(config, quickstart(), tmp_path / "run")
    trained = [r for r in read_lines(tmp_path / "run" / "records.jsonl") if r.get("actions")]
    assert trained and all(r["abs_log_ratio_max"] <= 1e-4 for r in trained)


def test_when_all_servers_end_it_saves_and_a_resumed_run_goes_on(
    served: Served, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    served.left = 60  # the evaluation before takes fewer, two iterations more
    with pytest.raises(RunError, match=rf"no rollout server came back.*--resume --out {out}$"):
        trainer.train(configured(served), quickstart(), out)
    assert list((out / "checkpoints").iterdir())
    assert not (out / "summary.json").exists()
    served.left = 10**9
    served.available(True)
    config = configured(served, "rollout.patience_s=5", "rollout.concurrency=7")
    summary = trainer.train(config, quickstart(), out, resume=True)
    assert summary["iterations"] == 2
    with pytest.raises(RunError, match=r"rollout\.engine: was 'vllm', is 'local'"):
        local = replace(config, rollout=replace(config.rollout, engine="local", urls=()))
        trainer.train(local, quickstart(), out, resume=True)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["rollout.engine=vllm"], r"rollout\.urls is empty.*fastturn serve"),
        (["rollout.urls=http://a:1"], r"rollout\.urls=http://a:1.*set rollout\.engine=vllm"),
        (["rollout.engine=vllm", "rollout.urls=a:1"], r"'a:1': expected addresses like http"),
        (["rollout.engine=vllm", "rollout.urls=http://"], "expected addresses like http"),
        (["rollout.engine=vllm", "rollout.urls=http://a:1,http://a:1/"], "named twice"),
        (["rollout.deadline_s=0"], r"rollout\.deadline_s=0\.0: expected a positive number"),
        (["rollout.engine=remote"], r"rollout\.engine='remote': expected one of local, vllm"),
    ],
)
def test_settings_that_cannot_work_are_named(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Config(), pairs)


def test_an_adapter_carrier_without_an_adapter_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.carrier=lora: this run trains whole weights"):
        trainer.train(configured(served, "rollout.carrier=lora"), quickstart(), tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer would be on a GPU")
@pytest.mark.parametrize("carrier", ["nccl", "ipc"])
def test_a_carrier_between_gpus_is_refused_on_a_cpu(
    served: Served, carrier: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"carrier={carrier}: weights go from GPU.*are on cpu"):
        config = configured(served, f"rollout.carrier={carrier}")
        trainer.train(config, quickstart(), tmp_path / "run")
    assert not served.fake.seen


def examined(served: Served, *pairs: str) -> dict[str, Line]:
    found = examine(configured(served, *pairs), Progress(quiet=True))
    return {line.check: line for line in found}


def test_the_doctor_finds_nothing_wrong_with_a_good_server(served: Served) -> None:
    lines = examined(served)
    assert not [line for line in lines.values() if line.status == "fail"]
    for check in ("servers answer", "server flags", "log-probabilities", "agreement"):
        assert lines[check].status == "pass", lines[check]
    assert (
        lines["publish round trip"].status == "pass"
        and "0.32.0" in lines["servers answer"].measured
    )
    assert len({body["cache_salt"] for body in served.fake.seen}) >= 5  # one a publish


@pytest.mark.parametrize(
    ("flaw", "check", "status", "measured"),
    [
        ({"version": "0.19.1"}, "servers answer", "warn", "0.19.1"),
        ({"max_model_len": 64}, "server flags", "fail", "reads 64 tokens"),
        ({"prefix_caching": False}, "server flags", "warn", "prefix cache off"),
        ({"logprobs_mode": "raw_logprobs"}, "log-probabilities", "warn", "raw_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "log-probabilities", "fail", "raw_logits"),
    ],
)
def test_the_doctor_names_a_server_started_with_other_flags(
    served: Served, flaw: dict[str, Any], check: str, status: str, measured: str
) -> None:
    for name, value in flaw.items():
        setattr(served.fake, name, value)
    line = examined(served)[check]
    assert line.status == status and measured in line.measured and line.remedy


def test_the_doctor_refuses_raw_log_probabilities_at_another_temperature(served: Served) -> None:
    served.fake.logprobs_mode = "raw_logprobs"
    lines = examined(served, "sampling.temperature=0.7")
    line = lines["log-probabilities"]
    assert line.status == "fail" and "--logprobs-mode processed_logprobs" in line.remedy
    failed = [name for name, line in lines.items() if line.status == "fail"]
    assert failed == ["log-probabilities", "opening"]  # all others cannot be looked at


def test_the_doctor_sees_weights_that_stay_behind(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.fake, "rpc", lambda method, args: {"ok": True})
    lines = examined(served)
    assert lines["publish round trip"].status == "fail"
    assert "canary" in lines["publish round trip"].measured


def test_the_doctor_looks_at_every_server(served: Served) -> None:
    lines = examined(served, f"rollout.urls=http://127.0.0.1:9,{served.fake.url}")
    gone = lines["servers answer"]
    assert gone.status == "fail" and served.fake.url in gone.measured and gone.remedy
    assert lines["log-probabilities"].status == "pass"


def test_the_doctor_sees_a_servers_own_top_p(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nucleus(prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        drawn = served.draw(prompt, sampling, salt)
        return [(ids, [value + 0.3 for value in logprobs]) for ids, logprobs in drawn]

    monkeypatch.setattr(served.fake, "draw", nucleus)
    line = examined(served)["agreement"]
    assert line.status == "fail" and "top-p" in line.measured and line.remedy
