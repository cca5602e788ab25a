"""A connection of every rank to rank 0 that breaks when a process or its machine does.

    rank k dies ── its connection ends ──> rank 0 ── "gone" ──> all other ranks
    rank 0 dies ── all connections end ──> all other ranks
    the launcher dies ── they have another parent ──> its ranks save and end as after Ctrl-C

A collective on GPUs does not notice that a peer is gone, and a launcher sees its own machine only.
The kernel closes the connections of a dead process at once; a machine that is off or cut off stops
answering the kernel's probes. Either way the ranks that are left end within a minute, each naming
the one that went first. A process that is busy or stopped still answers: nothing is taken for dead
because it is slow.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds without traffic before the first probe, between probes, and how many may be lost.
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
GRACE_S = 10.0  # for the launcher, or the error that the main thread meets, to end this process
LOOK_S = 1.0  # how often ranks see to it that their launcher is there
END, GONE = b"end\n", b"gone "


def follow_launcher() -> None:
    """From here on this process is interrupted when torchrun's agent, its parent, is gone: nobody
    would end the other ranks any more, or pass Ctrl-C on to this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_outlive, args=(os.getppid(),), daemon=True).start()


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGINT)


class Lifeline:
    """Open it on all ranks; `close` it on each when its work is done.

    `store`: torch's key-value store, for rank 0 to say where it listens. `lost` is called, in a
    thread, with the name of a rank that went without `close` ("rank 1 on host").
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        *,
        host: str = "127.0.0.1",
        start_s: float = 40.0,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self.lost = lost or end_process
        self._closed = False
        self._selector = selectors.DefaultSelector()
        if rank == 0:
            self._accept(size - 1, store, start_s)
        else:
            self._connect(rank, store, host, start_s)
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """From here on this rank may leave, and others may without its taking notice."""
        self._closed = True
        self._tell(END)

    def _accept(self, count: int, store: Any, start_s: float) -> None:
        with socket.create_server(("", 0), backlog=count) as server:
            server.settimeout(start_s)
            store.set("lifeline", str(server.getsockname()[1]))
            for _ in range(count):
                link, _ = server.accept()
                link.settimeout(start_s)
                self._add(link, link.makefile().readline().strip())

    def _connect(self, rank: int, store: Any, host: str, start_s: float) -> None:
        port = int(store.get("lifeline"))
        link = socket.create_connection((host, port), timeout=start_s)
        link.sendall(f"rank {rank} on {socket.gethostname()}\n".encode())
        self._add(link, f"rank 0 on {host}")

    def _add(self, link: socket.socket, name: str) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in PROBES.items():
            if hasattr(socket, option):  # not on every system
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._selector.register(link, selectors.EVENT_READ, name)

    def _watch(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                link: Any = key.fileobj
                said = self._read(link)
                if said and not said.startswith(GONE):
                    self._selector.unregister(link)  # it has closed its end in order
                    continue
                name = said.removeprefix(GONE).decode().strip() if said else key.data
                self._selector.unregister(link)
                if self._closed:
                    continue
                self._tell(GONE + name.encode() + b"\n")
                self.lost(name)
                return

    @staticmethod
    def _read(link: socket.socket) -> bytes:
        """What a peer said; nothing when its connection has ended or does not answer."""
        try:
            return link.recv(1024)
        except OSError:
            return b""

    def _tell(self, message: bytes) -> None:
        for key in list(self._selector.get_map().values()):
            link: Any = key.fileobj
            with contextlib.suppress(OSError):  # it is gone, too
                link.sendall(message)


def end_process(name: str) -> None:
    """Leave, with the reason, if nothing else ends this process first."""
    time.sleep(GRACE_S)
    place = f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"
    print(
        f"error: {place}: {name} is gone (killed, or its machine is off or cut off), so this rank "
        f"ends as well; the last checkpoint is whole, --resume goes on from there",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
