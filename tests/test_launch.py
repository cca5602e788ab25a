"""Several processes from one command: what starts them, what ends them, who is told why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fastturn import cli, launch
from fastturn.dist import DistError
from fastturn.records import read_lines

TESTS = Path(__file__).parent
SMALL = [
    *("train", "quickstart", f"data.domain={TESTS / 'parity.py'}:Domain", "data.eval_tasks=8"),
    *("turns=3", "tasks=4", "iterations=200", "warm.steps=5", "trackers=none", "save.every=1"),
]
FASTTURN = [sys.executable, "-P", "-m", "fastturn.cli"]
MINUTE_S = 60.0
STAMP = {"timestamp": "1796283564"}


def command(*arguments: str, **place: object) -> subprocess.Popen[str]:
    """`fastturn ARGUMENTS`, with torchrun's variables when a place is given."""
    environment = os.environ | {name: str(value) for name, value in place.items()}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*FASTTURN, *arguments], env=environment, text=True, **streams)


def rank(number: int, size: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size}
    return command(*SMALL, *arguments, **place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def ends(process: subprocess.Popen[str], within_s: float = MINUTE_S) -> tuple[int, str, float]:
    """(exit status, output, seconds) of a process that must end by itself."""
    start_s = time.monotonic()
    try:
        text, _ = process.communicate(timeout=within_s)
    finally:
        process.kill()  # its ranks follow it
    return process.returncode, text, time.monotonic() - start_s


def under_way(out: Path, process: subprocess.Popen[str]) -> None:
    """Wait until some stages are trained and a checkpoint is written."""
    deadline_s = time.monotonic() + 120
    while len(read_lines(out / "records.jsonl")) < 6 or not list(out.glob("checkpoints/0*")):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.1)


def children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True)
    return [int(pid) for pid in listed.stdout.split()]


def test_nproc_starts_the_same_command_without_it(monkeypatch, tmp_path):
    calls: list[tuple[list[str], int]] = []

    def launch(arguments: list[str], nproc: int) -> int:
        calls.append((arguments, nproc))
        return 3

    monkeypatch.setattr("fastturn.launch.launch", launch)
    out = str(tmp_path / "run")
    asked = ["--resume", "--out", out, "--price", "2"]
    assert cli.main(["train", "quickstart", "seed=1", "--nproc", "4", *asked]) == 3
    kept = ["--out", out, "--resume", "--price", "2.0"]
    assert calls == [(["train", "quickstart", "seed=1", *kept], 4)]


@pytest.mark.parametrize("nproc", ["0", "-2"])
def test_a_number_of_processes_that_makes_no_sense_is_refused(nproc, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "quickstart", "--nproc", nproc])
    assert stopped.value.code == 2 and "--nproc" in capsys.readouterr().err


def test_recipe_folder_and_packages_must_be_the_same_on_all_ranks(monkeypatch):
    given: dict[str, object] = {}

    def open_world(*place: object, mesh: bool, terms: dict[str, object]) -> None:
        given.update(terms)
        raise DistError("enough")

    monkeypatch.setattr("fastturn.dist.open_world", open_world)
    assert cli.main(["train", "quickstart", "seed=3", "--out", "here", "--resume"]) == 1
    assert given.items() >= {"seed": 3, "--out": "here", "--resume": True}.items()
    assert given.items() >= {"torch": torch.__version__, "dist.shard_ranks": 0}.items()
    json.dumps(given)


@pytest.mark.parametrize(("status", "returned"), [(1, 1), (2, 2), (-9, 1)])
def test_the_first_failure_is_told_with_what_to_do(status, returned, tmp_path, capsys):
    """A traceback and `--resume` are for runs that had begun."""
    told = {"message": "WhyError: because", "extraInfo": {"py_callstack": "Traceback", **STAMP}}
    file = tmp_path / "error.json"
    if status > 0:
        file.write_text(json.dumps({"message": told}))
    failure = ProcessFailure(1, 77, status, str(file))
    assert launch._explain(ChildFailedError("run", {1: failure})) == returned
    text = capsys.readouterr().err
    why = "SIGKILL: Signal 9" if status < 0 else f"exit status {status}: WhyError: because"
    named = rf"error: rank 1 of the run \(process 77 on {socket.gethostname()}\) failed first with "
    assert re.search(named + why, text)
    assert ("--resume" in text) == (status != 2) and ("Traceback" in text) == (status == 1)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_last_checkpoint_is_whole(tmp_path):
    out = tmp_path / "run"
    launcher = command(*SMALL, "--nproc", "2", "--out", str(out))
    under_way(out, launcher)
    victim = max(children(launcher.pid))
    os.kill(victim, signal.SIGKILL)
    status, text, seconds = ends(launcher)
    assert status == 1 and seconds < MINUTE_S
    named = rf"rank [01] of the run \(process {victim} on {socket.gethostname()}\) failed first"
    assert re.search(named + " with SIGKILL", text), text
    assert children(launcher.pid) == []
    done = len([r for r in read_lines(out / "records.jsonl") if r["kind"] == "iteration"])
    resumed = command(*SMALL, f"iterations={done + 1}", "--resume", "--out", str(out))
    status, text, _ = ends(resumed, 120)
    assert status == 0 and "resuming from" in text, text


@pytest.mark.slow
def test_an_error_in_one_rank_is_shown_with_its_traceback(tmp_path):
    domain = tmp_path / "broken.py"
    domain.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import parity\n"
        "class Domain(parity.Domain):\n"
        "    def env(self):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ZeroDivisionError('the environment of this rank')\n"
        "        return super().env()\n"
    )
    pair = f"data.domain={domain}:Domain"
    status, text, _ = ends(command(*SMALL, pair, "--nproc", "2", "--out", str(tmp_path / "run")))
    assert status == 1 and "Traceback" in text and "in env" in text
    assert re.search(r"error: rank 1 of the run .*the environment of this rank", text), text


@pytest.mark.slow
def test_ctrl_c_is_passed_on_saved_and_resumed(tmp_path):
    out = tmp_path / "run"
    launcher = command(*SMALL, "--nproc", "2", "--out", str(out))
    under_way(out, launcher)
    launcher.send_signal(signal.SIGINT)
    status, text, _ = ends(launcher)
    assert status == cli.INTERRUPTED and "stopped and saved" in text, text
    done = len([r for r in read_lines(out / "records.jsonl") if r["kind"] == "iteration"])
    pairs = [*SMALL, f"iterations={done + 1}", "--resume", "--out", str(out)]
    status, text, _ = ends(command(*pairs, "--nproc", "2"), 120)
    assert status == 0 and "resuming from" in text, text


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_save_and_end(tmp_path):
    out = tmp_path / "run"
    launcher = command(*SMALL, "--nproc", "2", "--out", str(out))
    under_way(out, launcher)
    launcher.kill()
    status, text, seconds = ends(launcher)  # its output ends when the ranks have closed it
    assert status == -signal.SIGKILL and seconds < MINUTE_S
    assert "stopped and saved" in text, text
    done = len([r for r in read_lines(out / "records.jsonl") if r["kind"] == "iteration"])
    resumed = command(*SMALL, f"iterations={done + 1}", "--resume", "--out", str(out))
    status, text, _ = ends(resumed, 120)
    assert status == 0 and "resuming from" in text, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "pairs", "told"),
    [
        ((2, 2), ("seed=0", "seed=1"), "seed (0: 0, 1: 1)"),
        ((2, 2), ("dist.shard_ranks=0", "dist.shard_ranks=1"), "dist.shard_ranks (0: 0, 1: 1)"),
        ((2, 3), ("seed=0", "seed=0"), "WORLD_SIZE (0: 2, 1: 3)"),
        ((3, 2), ("seed=0", "seed=0"), "WORLD_SIZE (0: 3, 1: 2)"),
    ],
)
def test_ranks_started_differently_are_told_so(tmp_path, sizes, pairs, told):
    port, out = free_port(), str(tmp_path / "run")
    both = [rank(n, sizes[n], port, pairs[n], "--out", out) for n in (0, 1)]
    for number, process in enumerate(both):
        status, text, seconds = ends(process, 90)
        assert status == 1 and f"rank {number} of {sizes[number]}" in text
        assert f"ranks differ in {told}" in text and seconds < MINUTE_S, text
    assert not Path(out).exists()


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_bad_input_on_every_rank(tmp_path):
    port, out = free_port(), str(tmp_path / "run")
    for process in [rank(n, 2, port, "dist.shard_ranks=3", "--out", out) for n in (0, 1)]:
        status, text, _ = ends(process)
        assert status == 2 and "2 ranks do not divide into groups of 3" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 2])
def test_missing_ranks_are_missed_within_a_minute(tmp_path, absent):
    port = free_port()
    there = [n for n in range(3) if n != absent]
    for process in [rank(n, 3, port, "--out", str(tmp_path / "run")) for n in there]:
        status, text, seconds = ends(process, 90)
        assert status == 1 and seconds < MINUTE_S
        named = f"rank 0 did not come within|rank {absent} did not come to"
        assert re.search(named, text) and f"127.0.0.1:{port}" in text, text


@pytest.mark.slow
def test_a_killed_rank_is_missed_without_launcher_or_collective():
    """The survivor waits for nothing and computes nothing; no launcher watches either of them."""
    port = free_port()
    code = "import time; from fastturn.dist import open_world\n"
    code += "with open_world('cpu'): print('here', flush=True); time.sleep(300)"
    ranks = []
    for number in (0, 1):
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1"}
        environment |= {name: str(value) for name, value in place.items()}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen([sys.executable, "-c", code], env=environment, **streams))
    assert all("here" in process.stdout.readline() for process in ranks)
    ranks[1].kill()
    status, text, seconds = ends(ranks[0])
    ranks[1].communicate()
    assert status == 1 and seconds < MINUTE_S
    assert f"rank 1 on {socket.gethostname()} is gone" in text


@pytest.mark.slow
def test_a_port_in_use_is_named_on_every_rank(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        both = [rank(n, 2, port, "--out", str(tmp_path / "run")) for n in (0, 1)]
        (first, said, _), (second, told, _) = (ends(process, 90) for process in both)
    assert first == second == 1
    assert "the port is in use by another program; choose another --master-port" in said, said
    assert "another program answers there" in told and f":{port}" in told, told


@pytest.mark.slow
def test_four_ranks_in_two_shard_groups_are_one_process(tmp_path):
    texts = []
    for pairs in (["--nproc", "1"], ["--nproc", "4", "dist.shard_ranks=2"]):
        out = tmp_path / pairs[1]
        training = ["iterations=2", "optim.lr=1e-3", "loss.kl_coef=0.01", "--out", str(out)]
        status, text, _ = ends(command(*SMALL, *training, *pairs), 240)
        assert status == 0, text
        texts.append((out / "samples.jsonl").read_text())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_torchrun_runs_the_script(tmp_path):
    script = TESTS.parent / "scripts" / "train.py"
    out = str(tmp_path / "run")
    pairs = [*SMALL[1:], "iterations=1", "--out", out]
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script), *pairs],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_torchrun_starts_a_run_again_where_it_was(tmp_path):
    """The agent's store outlives the ranks: the second attempt meets apart from the first."""
    script, out = TESTS.parent / "scripts" / "train.py", tmp_path / "run"
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    words = ["--max-restarts", "1", "--nproc-per-node", "2", str(script), *SMALL[1:]]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agent = subprocess.Popen([*torchrun, *words, "--resume", "--out", str(out)], **streams)
    under_way(out, agent)
    os.kill(max(children(agent.pid)), signal.SIGKILL)
    killed_s, done = time.monotonic(), len(read_lines(out / "records.jsonl"))
    while len(read_lines(out / "records.jsonl")) < done + 6:
        assert time.monotonic() < killed_s + 120 and agent.poll() is None
        time.sleep(0.1)
    agent.send_signal(signal.SIGINT)
    _, text, _ = ends(agent)
    assert "holds no run yet" in text and "resuming from" in text, text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_on_two_ranks_is_as_good_as_on_one(tmp_path):
    shares = []
    for nproc in ("1", "2"):
        out = tmp_path / nproc
        run = command("train", "quickstart", "trackers=none", "--nproc", nproc, "--out", str(out))
        status, text, _ = ends(run, 440)
        assert status == 0, text
        (after,) = [r for r in read_lines(out / "records.jsonl") if r.get("split") == "after"]
        shares.append(after["success"])
    assert abs(shares[0] - shares[1]) <= 0.05, shares
