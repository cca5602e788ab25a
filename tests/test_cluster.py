"""Jobs for several machines: what is refused, what is printed, and what a printed job does when the
scheduler, torchrun and vLLM are stand-ins on loopback addresses, one for each node."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fastturn import cli
from fastturn.cluster import FIRST_PORT, Cluster, render
from fastturn.config import ConfigError, override
from fastturn.recipes import RECIPES

ROOT = Path(__file__).parents[1]
OUT = Path("/shared/run")
PYTHON = f"#!{sys.executable}\n"

SCONTROL = """#!/bin/sh
case "$1" in
  show) for node in $(seq "$SLURM_NNODES"); do echo "127.9.8.$node"; done ;;
  *) echo "$*" >>"$NOTES/scontrol" ;;
esac
"""
# A task a node; one that fails ends the others; signals are passed on.
SRUN = (
    PYTHON
    + """
import os, signal, subprocess, sys, time
start = next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("-"))
tasks = [
    subprocess.Popen(sys.argv[start:], env={**os.environ, "SLURM_NODEID": str(node)})
    for node in range(int(os.environ["SLURM_NNODES"]))
]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
while None in [task.poll() for task in tasks]:
    failed = [task.returncode for task in tasks if task.returncode]
    if failed:
        for task in tasks:
            task.terminate()
        for task in tasks:
            task.wait()
        sys.exit(failed[0])
    time.sleep(0.05)
sys.exit(max(task.returncode for task in tasks))
"""
)
# Each notes how it was started and then does what $TRAINER or $SERVER says.
NOTE = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
name = os.path.basename(sys.argv[0])
note = {"argv": sys.argv[1:], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "dev": os.environ.get("VLLM_SERVER_DEV_MODE")}
open(f"{os.environ['NOTES']}/{name}-{os.getpid()}", "w").write(json.dumps(note))
def value(option):
    return sys.argv[sys.argv.index(option) + 1]
"""
TORCHRUN = (
    PYTHON
    + NOTE
    + """
def stop(number, frame):
    open(os.environ["NOTES"] + "/saved", "a").write("saved\\n")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
behaviour = os.environ["TRAINER"]
if behaviour == "wait":
    time.sleep(60)
if behaviour == "die" and value("--local-addr").endswith(".2"):
    print("the reason of the trainer")
    sys.exit(7)
time.sleep(60 if behaviour == "die" else 0.5)
"""
)
VLLM = (
    PYTHON
    + NOTE
    + """
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
if os.environ["SERVER"] == "die" and value("--port").endswith("1"):
    print("the reason of the server")
    sys.exit(3)
if os.environ["SERVER"] == "deaf":
    time.sleep(60)
HTTPServer((value("--host"), int(value("--port"))), Health).serve_forever()
"""
)
# The real one reads as `fastturn serve`; the other saves its start.
FASTTURN = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m fastturn.cli "$@"\n'
QUICK = '#!/bin/sh\nshift 2\nwhile [ "$1" != --host ]; do shift; done\n'
QUICK += 'echo "VLLM_SERVER_DEV_MODE=1 vllm serve model --host $2 --port $4"\n'


def job(scheduler: str, cluster: Cluster, *pairs: str, out: Path = OUT) -> str:
    return render(scheduler, cluster, "quickstart", RECIPES["quickstart"](), pairs, out)


class Site:
    """A cluster of stand-ins: one loopback address a node, two server slots on each server node."""

    cluster = Cluster(trainers=2, servers=1, gpus=4, parallel=2, ready_s=60)

    def __init__(self, folder: Path, fastturn: str) -> None:
        self.folder, self.notes, self.out = folder, folder / "notes", folder / "a run"
        self.notes.mkdir()
        for name, text in (
            ("scontrol", SCONTROL),
            ("srun", SRUN),
            ("torchrun", TORCHRUN),
            ("vllm", VLLM),
            ("fastturn", fastturn),
        ):
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        self.port = free_pair()

    def start(self, cluster: Cluster, trainer: str, server: str) -> subprocess.Popen[str]:
        text = job("slurm", cluster, "model.path=a model", out=self.out)
        script = self.folder / "job.sbatch"
        script.write_text(text.replace(f"\nPORT={FIRST_PORT}\n", f"\nPORT={self.port}\n"))
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "NOTES": str(self.notes),
            "TRAINER": trainer,
            "SERVER": server,
            "SLURM_NNODES": str(cluster.nodes),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node[1-3]",
        }
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        place = {"cwd": self.folder, "env": environment, "start_new_session": True}
        return subprocess.Popen(["bash", script], **place, **streams)

    def run(self, trainer: str = "ok", server: str = "ok", ready_s: int = 60) -> tuple[int, str]:
        trainers, servers = self.cluster.trainers, self.cluster.servers
        cluster = Cluster(trainers, servers, self.cluster.gpus, self.cluster.parallel, ready_s)
        return self.ends(self.start(cluster, trainer, server))

    @staticmethod
    def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
        """(exit status, output) of a job that must end by itself."""
        try:
            text, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # nodes end what they started
            raise
        return process.returncode, text

    def noted(self, name: str) -> list[dict[str, object]]:
        return [json.loads(file.read_text()) for file in sorted(self.notes.glob(f"{name}-*"))]


def free_pair() -> int:
    """A port that ends with 0 and is free, for two servers behind each other."""
    with socket.socket() as held:
        held.bind(("127.9.8.3", 0))
        return held.getsockname()[1] // 10 * 10


def value(note: dict[str, object], option: str) -> str:
    argv = note["argv"]
    assert isinstance(argv, list)
    return argv[argv.index(option) + 1]


@pytest.mark.slow
def test_every_role_starts_with_its_arguments_and_addresses(tmp_path):
    site = Site(tmp_path, FASTTURN)
    status, text = site.run()
    assert status == 0, text
    urls = ",".join(f"http://127.9.8.3:{site.port + n}" for n in (0, 1))
    trainers = site.noted("torchrun")
    assert {value(note, "--local-addr") for note in trainers} == {"127.9.8.1", "127.9.8.2"}
    for note in trainers:
        assert value(note, "--nnodes") == "2" and value(note, "--nproc-per-node") == "4"
        assert value(note, "--rdzv-endpoint") == "127.9.8.1:7999"
        assert note["argv"][-9:-7] == ["scripts/train.py", "quickstart"]
        pairs = ["rollout.engine=vllm", "rollout.carrier=nccl", "model.path=a model"]
        assert note["argv"][-7:-4] == pairs
        assert note["argv"][-4:] == [f"rollout.urls={urls}", "--out", str(site.out), "--resume"]
    servers = site.noted("vllm")
    assert {(value(n, "--port"), n["gpus"]) for n in servers} == {
        (str(site.port), "0,1"),
        (str(site.port + 1), "2,3"),
    }
    assert len({value(note, "--seed") for note in servers}) == 2
    for note in servers:
        assert note["argv"][:2] == ["serve", "a model"] and note["dev"] == "1"
        assert value(note, "--host") == "127.9.8.3"
        assert value(note, "--tensor-parallel-size") == "2"
        assert json.loads(value(note, "--weight-transfer-config")) == {"backend": "nccl"}
    logs = {file.name for file in (site.out / "logs").glob("*.log")}
    assert logs == {
        "trainer-0-127.9.8.1.log",
        "trainer-1-127.9.8.2.log",
        "server-0-127.9.8.3.log",
        "server-1-127.9.8.3.log",
    }


@pytest.mark.parametrize(
    ("ways", "named", "reason"),
    [
        (
            {"server": "die", "trainer": "wait"},
            r"error: server 1 on 127\.9\.8\.3 \(node 2\) ended with status 3",
            "the reason of the server",
        ),
        (
            {"trainer": "die"},
            r"error: trainer 1 on 127\.9\.8\.2 \(node 1\) ended with status 7",
            "the reason of the trainer",
        ),
        (
            {"server": "deaf", "ready_s": 1},
            r"error: trainer [01] on 127\.9\.8\.[12] \(node [01]\) gave up: server 0 at http://127\.9\.8\.3:"
            r"\d+ was not ready after 1 s",
            "curl",
        ),
    ],
)
def test_a_role_that_ends_early_ends_the_job_by_name(tmp_path, ways, named, reason):
    status, text = Site(tmp_path, QUICK).run(**ways)
    assert status == 1 and re.search(named, text) and reason in text, text


@pytest.mark.slow
def test_a_job_that_is_nearly_out_of_time_saves_and_queues_again(tmp_path):
    site = Site(tmp_path, QUICK)
    process = site.start(site.cluster, trainer="wait", server="ok")
    deadline_s = time.monotonic() + 60
    while len(site.noted("torchrun")) < 2:
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)  # until both have installed their handler
    process.send_signal(signal.SIGUSR1)
    status, text = site.ends(process)
    assert status == 0, text
    assert (site.notes / "saved").read_text().count("saved") == 2
    assert (site.notes / "scontrol").read_text() == "requeue 17\n"


@pytest.mark.parametrize("sizes", [(1, 1), (4, 12)])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_renders(recipe, sizes):
    cluster = Cluster(*sizes, partition="gpu", time="24:00:00", volume="runs")
    config = RECIPES[recipe]()
    batch = render("slurm", cluster, recipe, config, ["seed=3"], OUT)
    checked = subprocess.run(["bash", "-n"], input=batch, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", batch, re.M))
    assert options["nodes"] == str(sum(sizes)) and options["gpus-per-node"] == "8"
    assert options["partition"] == "gpu" and options["time"] == "24:00:00"
    assert "account" not in options and options["requeue"] == ""
    task = yaml.safe_load(render("sky", cluster, recipe, config, ["seed=3"], OUT))
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "volumes", "setup", "run"}
    assert task["num_nodes"] == sum(sizes) and task["volumes"] == {"/shared": "runs"}
    assert task["resources"] == {"accelerators": "H100:8", "network_tier": "best"}
    assert task["run"].startswith("NODE=$SKYPILOT_NODE_RANK\nHOSTS=$SKYPILOT_NODE_IPS\n")
    for text in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_both_schedulers_run_the_same_node():
    cluster = Cluster(1, 1)
    task = yaml.safe_load(job("sky", cluster))
    node = task["run"].split("\n", 2)[2].strip()
    assert node in job("slurm", cluster)


def test_values_reach_the_shell_as_they_are():
    text = job("slurm", Cluster(1, 1), "data.path=it's $HOME `here`.jsonl", out=Path("/a b/$c"))
    found = "\n".join(re.findall(r"^(?:PAIRS|OUT)=.*$", text, re.M))
    shown = subprocess.run(
        ["bash", "-c", found + '\nprintf "%s\\n" "$OUT" "${PAIRS[@]}"'],
        capture_output=True,
        text=True,
    )
    last = shown.stdout.splitlines()
    assert last[0] == "/a b/$c" and last[-1] == "data.path=it's $HOME `here`.jsonl"


@pytest.mark.parametrize(
    ("cluster", "pairs", "message"),
    [
        (Cluster(0, 1), (), "--trainer-nodes 0: expected at least 1"),
        (Cluster(1, 0), (), "--server-nodes 0: expected at least 1"),
        (Cluster(1, 1, gpus=0), (), "--gpus-per-node 0"),
        (Cluster(1, 1, ready_s=0), (), "--ready 0"),
        (Cluster(1, 1, parallel=3), (), "--tensor-parallel 3: 8 GPUs of a node do not divide"),
        (Cluster(1, 1, parallel=16), (), "--tensor-parallel 16"),
        (Cluster(1, 4000), (), "32000 servers: expected at most"),
        (Cluster(1, 1), ("rollout.engine=local",), "rollout.engine=local: nothing would ask"),
        (Cluster(1, 1), ("rollout.urls=http://a:1",), "the job names its own servers"),
        (Cluster(1, 1), ("rollout.carrier=file",), "it goes through shared memory"),
        (Cluster(1, 1), ("dist.shard_ranks=3",), "8 ranks (1 x 8) do not divide into groups of 3"),
        (Cluster(1, 1), ("optim.lrr=1",), "unknown key 'optim.lrr'; the nearest is 'optim.lr'"),
    ],
)
def test_what_no_allocation_could_run_is_refused(cluster, pairs, message):
    for scheduler in ("slurm", "sky"):
        with pytest.raises(ConfigError) as raised:
            job(scheduler, cluster, *pairs)
        assert message in str(raised.value)


def test_a_folder_that_depends_on_where_one_is_is_refused():
    with pytest.raises(ConfigError, match="expected an absolute path that all nodes see"):
        job("slurm", Cluster(1, 1), out=Path("runs/a"))


def test_the_settings_of_a_job_are_those_of_a_run_with_servers():
    pairs = ["rollout.engine=vllm", "rollout.carrier=nccl", "rollout.urls=http://a:1,http://b:2"]
    assert override(RECIPES["quickstart"](), pairs).rollout.urls == ("http://a:1", "http://b:2")


def test_the_command_line_prints_the_job(capsys):
    words = "launch slurm quickstart seed=2 --trainer-nodes 1 --server-nodes 2 --gpus-per-node 4"
    options = ["--tensor-parallel", "2", "--partition", "gpu", "--out", str(OUT)]
    assert cli.main([*words.split(), *options]) == 0
    cluster = Cluster(1, 2, gpus=4, parallel=2, partition="gpu")
    assert capsys.readouterr().out == job("slurm", cluster, "seed=2")


def test_an_unknown_option_or_a_missing_one_is_bad_input(capsys):
    for words in ("launch slurm quickstart --trainer-nodes 1", "launch pbs quickstart"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words.split())
        assert stopped.value.code == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert "--server-nodes" in said and "'pbs'" in said


@pytest.mark.parametrize(("file", "scheduler"), [("train.sbatch", "slurm"), ("train.yaml", "sky")])
def test_the_examples_are_what_the_document_says_prints_them(file, scheduler, capsys):
    document = (ROOT / "docs" / "scale.md").read_text().replace("\\\n", " ")
    command = re.search(rf"^ *fastturn (launch {scheduler} .*) > scripts/.*$", document, re.M)
    assert command
    assert cli.main(command[1].split()) == 0
    assert capsys.readouterr().out == (ROOT / "scripts" / scheduler / file).read_text()
