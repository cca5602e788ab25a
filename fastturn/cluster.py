"""A job for several machines as text: trainer and vLLM servers in one allocation.

    Cluster + recipe -> settings -> settings + node.sh          what every node runs
                                        |
                                        +-- sbatch script        Slurm: one `srun`, a task a node
                                        +-- task in YAML         SkyPilot: `run`, on every node

Both schedulers start one program a node, tell it its place and the addresses of all, and end the
other nodes when one fails. What a node does with that is the same and stands in `node.sh`: the
first nodes train (torchrun), the others serve (the command of `fastturn serve`).
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastturn.config import Config, ConfigError, override

NODE = Path(__file__).with_name("node.sh")
FIRST_PORT, MEET_PORT, LAST_PORT = 8000, 7999, 32767  # below what systems hand out by themselves
STOP_S = 600  # for the step in hand and its checkpoint when the time of a job is nearly over
MARGIN_S = 120  # from the last rank's end to that of the job
# Servers elsewhere cannot be reached by these.
ONE_MACHINE = {
    "file": "shared memory",
    "ipc": "the same GPU",
    "lora": "a folder of the trainer's machine",
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Whole nodes, `gpus` on each. A server takes `parallel` GPUs of one node.

    `ready_s`: how long trainers wait for servers. `partition`, `account`, `time`: of Slurm, empty
    for the site's own. `accelerator`, `volume`: of SkyPilot; the volume holds the run's folder.
    Example: `Cluster(trainers=4, servers=12)` has 32 GPUs that train and 96 servers.
    """

    trainers: int
    servers: int
    gpus: int = 8
    parallel: int = 1
    ready_s: int = 1800
    python: str = ""  # interpreter of the environment with vLLM, on the nodes
    partition: str = ""
    account: str = ""
    time: str = ""
    accelerator: str = "H100"
    volume: str = ""

    @property
    def nodes(self) -> int:
        return self.trainers + self.servers


def render(
    scheduler: str, cluster: Cluster, recipe: str, config: Config, pairs: Sequence[str], out: Path
) -> str:
    """The job of a recipe (a name, with its configuration and the `key=value` pairs that change it)
    for "slurm" or "sky". `out` is the run's folder, which all nodes see.

    Raises `ConfigError` for what no allocation could run.
    """
    settings = ("rollout.engine=vllm", "rollout.carrier=nccl", *pairs)
    _check(cluster, config, settings, out)
    return SCHEDULERS[scheduler](cluster, recipe, _settings(cluster, recipe, settings, out), out)


def _check(cluster: Cluster, config: Config, settings: Sequence[str], out: Path) -> None:
    for option, value in (
        ("--trainer-nodes", cluster.trainers),
        ("--server-nodes", cluster.servers),
        ("--gpus-per-node", cluster.gpus),
        ("--tensor-parallel", cluster.parallel),
        ("--ready", cluster.ready_s),
    ):
        if value < 1:
            raise ConfigError(f"{option} {value}: expected at least 1")
    if cluster.gpus % cluster.parallel:
        raise ConfigError(
            f"--tensor-parallel {cluster.parallel}: {cluster.gpus} GPUs of a node do not divide "
            f"into servers of {cluster.parallel}; choose a divisor of --gpus-per-node"
        )
    count = cluster.servers * cluster.gpus // cluster.parallel
    if FIRST_PORT + count - 1 > LAST_PORT:
        raise ConfigError(f"{count} servers: expected at most {LAST_PORT - FIRST_PORT + 1}")
    if not out.is_absolute():
        raise ConfigError(f"--out {out}: expected an absolute path that all nodes see")
    given = [pair for pair in settings if pair.startswith("rollout.urls=")]
    if given:
        raise ConfigError(f"{given[0]}: the job names its own servers; leave this out")
    if [pair for pair in settings if pair.startswith("rollout.engine=")][-1].endswith("=local"):
        raise ConfigError(
            f"rollout.engine=local: nothing would ask the {cluster.servers} server node(s); leave "
            f"it out, or train without servers (docs/processes.md)"
        )
    whole = override(config, [*settings, "rollout.urls=http://server"])
    carrier = whole.rollout.carrier
    if carrier in ONE_MACHINE:
        raise ConfigError(
            f"rollout.carrier={carrier}: it goes through {ONE_MACHINE[carrier]}, and the servers "
            f"are on other nodes; leave it out (nccl)"
        )
    ranks, group = cluster.trainers * cluster.gpus, whole.dist.shard_ranks
    if group and ranks % group:
        raise ConfigError(
            f"dist.shard_ranks={group}: {ranks} ranks ({cluster.trainers} x {cluster.gpus}) do not "
            f"divide into groups of {group}; choose a divisor"
        )


def _settings(cluster: Cluster, recipe: str, settings: Sequence[str], out: Path) -> str:
    """What `node.sh` expects, as assignments of the shell."""
    python = ("--python", cluster.python) if cluster.python else ()
    numbers = {
        "TRAINERS": cluster.trainers,
        "SERVERS": cluster.servers,
        "GPUS": cluster.gpus,
        "PARALLEL": cluster.parallel,
        "PORT": FIRST_PORT,
        "MEET": MEET_PORT,
        "READY_S": cluster.ready_s,
        "STOP_S": STOP_S,
    }
    lines = [f"{name}={value}" for name, value in numbers.items()]
    lines += [f"RECIPE={shlex.quote(recipe)}", f"OUT={shlex.quote(str(out))}"]
    lines += [f"PAIRS=({shlex.join(settings)})", f"SERVE=({shlex.join(python)})"]
    return "\n".join(lines)


def _slurm(cluster: Cluster, recipe: str, settings: str, out: Path) -> str:
    options = {
        "job-name": f"fastturn-{recipe}",
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": cluster.gpus,
        "exclusive": None,
        "mem": 0,  # all of it
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time,
        "output": "fastturn-%j.log",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{STOP_S + MARGIN_S}",
    }
    header = [
        f"#SBATCH --{name}" + ("" if value is None else f"={value}")
        for name, value in options.items()
        if value != ""
    ]
    return SLURM.format(
        header="\n".join(header),
        settings=settings,
        node=NODE.read_text().rstrip(),
        nodes=cluster.nodes,
    )


SLURM = """\
#!/usr/bin/env bash
{header}
# Submit it in the checkout, in a folder that all nodes see. Nearly out of time, the job stops at a
# whole step, saves and queues again; then, or after the loss of a node, it goes on from its newest
# checkpoint.
set -u
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HOSTS
read -r -d '' node <<'END_OF_NODE'
NODE=$SLURM_NODEID
{settings}

{node}
END_OF_NODE

stopping=''
trap 'stopping=1; kill -USR1 "$step"' USR1
srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none bash -c "$node" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done
if [ -n "$stopping" ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def _sky(cluster: Cluster, recipe: str, settings: str, out: Path) -> str:
    run = "\n".join(
        (
            "NODE=$SKYPILOT_NODE_RANK",
            "HOSTS=$SKYPILOT_NODE_IPS",
            settings,
            "",
            NODE.read_text().rstrip(),
        )
    )
    volumes = f"volumes:\n  {json.dumps(str(out.parent))}: {json.dumps(cluster.volume)}\n"
    return SKY.format(
        name=json.dumps(f"fastturn-{recipe}"),
        nodes=cluster.nodes,
        accelerators=json.dumps(f"{cluster.accelerator}:{cluster.gpus}"),
        volumes=volumes if cluster.volume else "",
        run=textwrap.indent(run, "  "),
    )


SKY = """\
# sky jobs launch FILE, in the checkout. A job that is recovered goes on from its newest checkpoint.
name: {name}
workdir: .
num_nodes: {nodes}
resources:
  accelerators: {accelerators}
  network_tier: best
{volumes}setup: |
  bash scripts/setup
  [ -x .venv-vllm/bin/vllm ] || {{ python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm; }}
run: |
{run}
"""

SCHEDULERS: dict[str, Callable[[Cluster, str, str, Path], str]] = {"slurm": _slurm, "sky": _sky}
