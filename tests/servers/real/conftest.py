"""Real vLLM servers on CPU, in the environment that scripts/setup_vllm_cpu makes."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fastturn import serve
from fastturn.config import override
from fastturn.recipes import quickstart
from fastturn.sampler.server import Server
from fastturn.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[3]
VENV = ROOT / serve.OWN_ENVIRONMENT


def tiny_model(tied: bool) -> tuple[Qwen3ForCausalLM, Any]:
    """A Qwen3 of 2 layers x 64 with heads that vLLM's CPU kernels know, and a tokenizer."""
    tokenizer = build_tokenizer(["What is 37*12? 444"] * 8, 300)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Qwen3ForCausalLM(shape).float().eval(), tokenizer


@dataclass
class Running:
    """A real server's process, which tests may kill and start again on the same port."""

    command: serve.ServeCommand
    log: Path
    process: serve.ServerProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = serve.ServerProcess(self.command, self.log)

    @property
    def url(self) -> str:
        return self.command.url

    def kill(self) -> None:
        """SIGKILL to the whole process group, in the middle of whatever it does."""
        os.killpg(self.process.process.pid, signal.SIGKILL)

    def ready(self) -> None:
        """Started again when it has ended; returns when it answers."""
        if self.process.process.poll() is not None:
            self.process.kill()
            self.process = serve.ServerProcess(self.command, self.log)
        self.process.wait_ready(READY_S)


@dataclass
class Live:
    """A real server and the trainer's copy of its model."""

    server: Server
    model: Qwen3ForCausalLM
    folder: Path
    tied: bool
    running: Running
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        size = self.model.config.vocab_size
        self.prompts = [
            torch.randint(0, size, (n,), generator=self.generator).tolist() for n in (20, 48, 130)
        ]

    def change(self, scale: float = 0.05) -> None:
        """What a training step does, and more."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=self.generator)
                parameter.add_(scale * noise)

    def probe(self, salt: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the trainer's, the server's) log-probabilities of tokens that the server samples now."""
        expected, got = [], []
        for prompt in self.prompts:
            body = {
                "model": str(self.folder),
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 1.0,
                "logprobs": 0,
                "return_token_ids": True,
                "ignore_eos": True,
                **({"cache_salt": salt} if salt else {}),
            }
            answer = httpx.post(
                self.server.url + "/v1/completions", json=body, timeout=60, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            ids = choice["token_ids"]
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            scores = torch.log_softmax(logits, -1)
            expected.append(scores.gather(1, torch.tensor(ids)[:, None])[:, 0])
            got.append(torch.tensor(choice["logprobs"]["token_logprobs"]))
        return torch.cat(expected), torch.cat(got)


def _require_engine() -> None:
    """Waits for a setup that is under way, as scripts/test starts it beside the other tests."""
    lock = VENV / ".lock"
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    if not (VENV / ".installed").exists():
        pytest.skip("no vLLM here; bash scripts/setup_vllm_cpu makes an environment (x86-64 Linux)")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment that has vLLM."""
    _require_engine()
    return VENV / "bin" / "python"


SMALL = ["model.width=128"]  # the quickstart with heads that vLLM's CPU kernels know
READY_S = 240.0


@pytest.fixture(scope="session", params=["untied", "tied"])
def live(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    vllm_python: Path,
) -> Iterator[Live]:
    """A real server, one at a time: for a tiny untied model, then for the quickstart's tied one."""
    root = tmp_path_factory.mktemp("vllm")
    tied = request.param == "tied"
    if tied:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(root))
            folder = Path(serve.served_model(override(quickstart(), SMALL)))
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        folder = root / "model"
        model, tokenizer = tiny_model(False)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    running = _start(vllm_python, folder, root / "server.log")
    try:
        if tied and any("spare" in item.fixturenames for item in request.session.items):
            request.getfixturevalue("_spares").append(
                _start(vllm_python, folder, root / "spare.log")
            )  # fmt: skip
        running.ready()
        with Server(running.url) as server:
            yield Live(server, model, folder, tied, running)
    finally:
        running.process.stop()


@pytest.fixture(scope="session")
def _spares() -> Iterator[list[Running]]:
    started: list[Running] = []
    yield started
    for running in started:
        running.process.stop()


@pytest.fixture
def spare(live: Live, _spares: list[Running]) -> Running:
    """A second server of the tied `live`; it starts beside that one, which saves half of the wait,
    and it is started again when the test before has killed it."""
    (running,) = _spares
    running.ready()
    return running


def _start(python: Path, folder: Path, log: Path) -> Running:
    with pytest.MonkeyPatch.context() as patch:
        # What vLLM finds out about model classes is kept beside it: half of the time to start.
        patch.setenv("XDG_CACHE_HOME", str(VENV / "cache"))
        engine = serve.find_engine(str(python))
        command = serve.serve_command(
            quickstart(), str(folder), port=_free_port(), engine=engine
        )  # fmt: skip
    ours = {
        "XDG_CACHE_HOME": str(VENV / "cache"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Running(replace(command, env={**command.env, **ours}), log)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_in_engine(python: Path, code: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def in_engine(vllm_python: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run Python code in the environment that has vLLM; what still runs is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *words: str) -> subprocess.Popen[str]:
        started.append(run_in_engine(vllm_python, code, *words))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
