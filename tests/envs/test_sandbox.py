"""The sandbox: hostile programs, what it keeps running, and how fast it is."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fastturn.config import ConfigError
from fastturn.envs import sandbox
from fastturn.envs.sandbox import WALLS, Outcome, Sandbox

from .hostile import GROUPS, PROGRAMS

TIMEOUT_S = 3.0  # some of them import for longer than a second on a busy machine


def opened(wall: str) -> Sandbox:
    try:
        return Sandbox(TIMEOUT_S, (wall,))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """With the wall that a run would have here."""
    try:
        made = Sandbox(TIMEOUT_S)
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()


class Host:
    """What hostile programs are after: a file, a port, a process, an environment."""

    def __init__(self, folder: Path) -> None:
        self.secret, self.fresh = folder / "secret.txt", folder / "fresh"
        self.secret.write_text("SECRET")
        self.secret.chmod(0o600)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def aim(self, text: str) -> str:
        port, victim = self.listener.getsockname()[1], self.victim.pid
        for name, value in (
            *(("'SECRET'", "'S' + 'ECRET'"), ("SECRET", self.secret), ("FRESH", self.fresh)),
            *(("PORT", port), ("VICTIM", victim), ("PARENT", os.getpid())),
        ):
            text = text.replace(name, str(value))
        return text

    def check(self) -> None:
        """Nothing has happened to it."""
        assert self.secret.read_text() == "SECRET" and self.secret.stat().st_mode & 0o777 == 0o600
        assert not self.fresh.exists() and not self.fresh.is_symlink()
        assert self.victim.poll() is None
        self.listener.settimeout(0.01)
        with pytest.raises(TimeoutError):
            self.listener.accept()

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.listener.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("HF_TOKEN", "SECRET")
    host = Host(tmp_path)
    yield host
    host.close()


def attack(box: Sandbox, host: Host, names: list[str]) -> list[str]:
    """What is wrong with the outcomes of the programs `names`, four of them at a time."""

    def run(name: str) -> tuple[str, Outcome, float]:
        start = time.monotonic()
        outcome = box.run([host.aim(PROGRAMS[name][0])])
        return name, outcome, time.monotonic() - start

    wrong = []
    with ThreadPoolExecutor(4) as pool:
        for name, outcome, seconds in pool.map(run, names):
            escaped = "ESCAPED" in outcome.output or "SECRET" in outcome.output
            late = seconds > TIMEOUT_S + sandbox._GRACE_S
            if escaped or late or not re.fullmatch(PROGRAMS[name][1], outcome.ending):
                wrong.append(f"{name}: {outcome} after {seconds:.1f} s")
    return wrong


def healthy(box: Sandbox) -> bool:
    """Eight programs at once are answered as if nothing had happened."""
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda n: box.run([f"print({n})"]), range(8)))
    return outcomes == [Outcome("finished", f"{n}\n") for n in range(8)]


def test_there_are_many_hostile_programs() -> None:
    assert len(PROGRAMS) == sum(len(group) for group in GROUPS) >= 80


def test_hostile_programs_are_answered_and_get_nothing(box: Sandbox, host: Host) -> None:
    assert not attack(box, host, list(PROGRAMS))
    host.check()
    assert healthy(box)


@pytest.mark.slow
@pytest.mark.parametrize("wall", WALLS)
def test_hostile_programs_behind_every_wall(wall: str, host: Host) -> None:
    box = opened(wall)
    assert not attack(box, host, list(PROGRAMS))
    host.check()
    assert healthy(box)
    box.close()


def test_no_process_is_left_behind(host: Host) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        box = Sandbox(TIMEOUT_S)
    except ConfigError as error:
        pytest.skip(str(error))
    assert not attack(box, host, ["orphan", "one fork", "fork bomb", "ignore signals"])
    running = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert running  # the warm interpreters
    box.close()
    assert not psutil.wait_procs(running, timeout=10)[1]


def test_a_caller_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The interpreter ends when its input does, its program with it or at its deadline."""
    code = (
        "import threading, time\n"
        "from fastturn.envs.sandbox import Sandbox\n"
        "box = Sandbox(2.0)\n"
        "threading.Thread(target=box.run, args=(['while True: pass'],)).start()\n"
        "time.sleep(0.5)\n"
        "print('running', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        if caller.stdout.readline() != b"running\n":
            pytest.skip("programs cannot be isolated here")
        left = psutil.Process(caller.pid).children(recursive=True)
        assert left
        caller.kill()
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert gone and not alive


def test_a_lost_interpreter_is_replaced(box: Sandbox) -> None:
    fresh = Sandbox(TIMEOUT_S, (box.wall,))
    worker = fresh._idle.queue[0]
    os.killpg(worker.pid, signal.SIGKILL)
    assert fresh.run(["print(1)"]).ending == "lost"
    assert fresh.run(["print(1)"]) == Outcome("finished", "1\n")
    fresh.close()


def test_nothing_runs_without_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ConfigError, match=r"none is run.*bwrap is not installed.*data\.domain=math"
    ):
        Sandbox(TIMEOUT_S, ("bubblewrap",))


@pytest.mark.parametrize(
    ("cells", "outcome"),
    [
        (["print(1)"], Outcome("finished", "1\n")),
        (["1 + 1"], Outcome("finished", "2\n")),
        (["x = 3", "y = 4", "x * y"], Outcome("finished", "12\n")),
        (["print('earlier')", "print('later')"], Outcome("finished", "later\n")),
        (["x = 1\n1 / 0\n", "x"], Outcome("finished", "1\n")),
        (["import sys; print('a'); print('b', file=sys.stderr)"], Outcome("finished", "a\nb\n")),
        (["print('é', end='')"], Outcome("finished", "é")),
        (["__name__"], Outcome("finished", "'__main__'\n")),
    ],
)
def test_cells(box: Sandbox, cells: list[str], outcome: Outcome) -> None:
    assert box.run(cells) == outcome


def test_a_traceback_shows_the_program_alone(box: Sandbox) -> None:
    outcome = box.run(["def f():\n    return 1 / 0\n\nf()"])
    assert outcome.ending == "raised"
    assert outcome.output.splitlines()[1] == '  File "<cell 1>", line 4, in <module>'
    assert "    return 1 / 0" in outcome.output and "sandbox_worker" not in outcome.output


def test_long_output_keeps_its_ends(box: Sandbox) -> None:
    output = box.run(["print('b' + 'x' * 10000 + 'e')"]).output
    assert output.startswith("bxx") and output.endswith("xxe\n") and len(output) < 4000
    assert "\n... (6103 characters left out) ...\n" in output


def test_programs_are_repeatable(box: Sandbox) -> None:
    """Siblings of a group differ by what the policy did, whichever interpreter answers them."""
    code = "import random; print(random.random(), set('abc'), hash('x'))"
    numeric = "import numpy; print(numpy.random.rand(2))"
    for text in (code, numeric):
        barrier = threading.Barrier(3)

        def run(_: int, text: str = text, barrier: threading.Barrier = barrier) -> str:
            barrier.wait()
            return box.run([text]).output

        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(run, range(3)))) == 1


def test_libraries_threads_and_large_numbers_work(box: Sandbox) -> None:
    slow_import = Sandbox(20.0, (box.wall,))
    outcome = slow_import.run(
        ["import sympy as s; x = s.Symbol('x'); print(s.integrate(x * s.exp(x), x))"]
    )
    assert outcome == Outcome("finished", "(x - 1)*exp(x)\n")
    threads = "import concurrent.futures as f; print(*f.ThreadPoolExecutor(4).map(abs, [-1, 2]))"
    assert slow_import.run([threads]).output == "1 2\n"
    assert slow_import.run(["print(2 ** 1000 % 97)"]).output == f"{2**1000 % 97}\n"
    slow_import.close()
