"""Several processes of one command on this machine, watched by torchrun's agent.

The agent gives every process its rank, meets them on a free port of this machine, passes Ctrl-C on
to all of them, and ends the others when one dies. Several machines: torchrun with scripts/train.py.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
GO_ON = (
    ". The last checkpoint is whole: the same command with --resume and the run's --out goes on "
    "from there"
)
# After Ctrl-C a step in hand may finish and be saved; after a death the others may only leave.
GRACE_S = 30


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run `fastturn ARGUMENTS` in `nproc` processes and return the exit status of the run.

    The first process that fails decides: its rank, host, cause and traceback (none for bad input)
    are printed, the others are ended (killed after `GRACE_S`), and its status (1 for a signal) is
    returned.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
    )
    # -P: a working directory that holds a folder `kernels` or `bench` must not be imported from.
    command = elastic_launch(config, sys.executable)
    try:
        command("-P", "-m", "fastturn.cli", *arguments)
    except SignalException as stop:
        print(f"interrupted: {stop.sigval.name} was passed on to all ranks", file=sys.stderr)
        return INTERRUPTED
    except ChildFailedError as error:
        return _explain(error)
    return 0


def _explain(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    cause: Any = failure.message
    trace = ""
    if isinstance(cause, dict):
        trace = cause.get("extraInfo", {}).get("py_callstack", "")
        cause = cause.get("message", "")
    ended = failure.signal_name() if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    began = failure.exitcode != BAD_INPUT
    if trace and began:
        print(trace.rstrip(), file=sys.stderr)
    print(
        f"error: rank {rank} of the run (process {failure.pid} on {socket.gethostname()}) failed "
        f"first with {ended}: {cause}; the other ranks were ended{GO_ON * began}",
        file=sys.stderr,
    )
    return failure.exitcode if failure.exitcode > 0 else FAILED
