"""The trainer's end of vLLM's weight-transfer group: NCCL by ctypes, joined as its workers join.

    trainer, rank 0                         workers, ranks 1 ...
    TCPStore master, waits <----------- TCPStore clients
    set broadcast_from/0/0 = id ------> get, unpickle
    ncclCommInitRank <================> ncclCommInitRank
    all-reduce of one float <=========> all-reduce of one float
    ncclBroadcast of bytes ===========> ncclBroadcast

Written here because vLLM's own helper needs vLLM in the trainer's environment. CUDA builds of torch
bring the NCCL library.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch.distributed import TCPStore

ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
_ID_KEY = "broadcast_from/0/0"
_POLL_S = 0.002

T = TypeVar("T")
Watch = Callable[[], None]  # raises when there is no point in waiting on


class Ticket(Protocol):
    """A broadcast under way."""

    def query(self) -> bool:
        """Whether it is done."""
        ...


class Group(Protocol):
    """Rank 0 of a group. The tensor of a broadcast must not change until its ticket is done."""

    def broadcast(self, bytes_N: torch.Tensor) -> Ticket: ...

    def abort(self) -> None:
        """Leave without waiting for the peers."""
        ...


def wait_for(done: Callable[[], bool], watch: Watch) -> None:
    """Poll until `done`; `watch` raises at the deadline or when a peer has failed."""
    while not done():
        watch()
        time.sleep(_POLL_S)


def pickled_id(unique_id: bytes) -> bytes:
    """The pickle of vLLM's `ncclUniqueId`, a ctypes structure of a class that is not importable
    here: its constructor is named, not looked up."""
    if len(unique_id) != ID_BYTES:
        raise ValueError(f"an NCCL id has {ID_BYTES} bytes, got {len(unique_id)}")
    rebuild = b"c_ctypes\n_unpickle\n"
    kind = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    state = b"}" + b"B" + struct.pack("<I", ID_BYTES) + unique_id + b"\x86"  # ({}, bytes)
    return b"\x80\x03" + rebuild + kind + state + b"\x86R."


def beside(act: Callable[[], T], watch: Watch, release: Callable[[], None] | None = None) -> T:
    """The result of a call that may never return, made in a thread beside the watch.

    When the watch raises, `release` lets the call return: a thread that is still inside such a call
    when the interpreter ends can abort the process.
    """
    results: list[T] = []
    failures: list[RuntimeError] = []

    def attempt() -> None:
        try:
            results.append(act())
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    try:
        wait_for(lambda: not thread.is_alive(), watch)
    except BaseException:
        if release is not None:
            release()
            thread.join()
        raise
    if failures:
        raise failures[0]
    return results[0]


def open_store(
    address: str, listener: socket.socket, world: int, timeout_s: float, watch: Watch
) -> TCPStore:
    """The store where the group meets, once all `world - 1` workers have arrived at it.

    `listener`: a listening socket, whose port the workers were told; it is taken over.
    """
    port, patience = listener.getsockname()[1], timedelta(seconds=timeout_s)
    fd = listener.detach()

    def take_the_missing_places() -> None:
        for _ in range(world - 1):
            with contextlib.suppress(RuntimeError):  # the store is gone already
                TCPStore(address, port, world, False, timedelta(seconds=5), use_libuv=False)

    # Workers speak to the plain store, not to the libuv one.
    return beside(
        lambda: TCPStore(
            address, port, world, True, patience, master_listen_fd=fd, use_libuv=False
        ),
        watch,
        take_the_missing_places,
    )


def share_id(store: TCPStore, unique_id: bytes) -> None:
    """Hand the id to the workers."""
    store.set(_ID_KEY, pickled_id(unique_id))  # type: ignore[arg-type]  # bytes are taken too


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Library:
    """The few NCCL calls that are needed. `RuntimeError` when there is no library."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise RuntimeError(
                f"no NCCL library ({error}); the nccl carrier needs a CUDA build of torch"
            ) from error
        pointer, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        signatures = {
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRank": [ctypes.POINTER(pointer), number, _UniqueId, number],
            "ncclAllReduce": [pointer, pointer, count, number, number, pointer, pointer],
            "ncclBroadcast": [pointer, pointer, count, number, number, pointer, pointer],
            "ncclCommAbort": [pointer],
        }
        self._calls = {name: getattr(library, name) for name in signatures}
        for name, arguments in signatures.items():
            self._calls[name].argtypes, self._calls[name].restype = arguments, number
        self._describe = library.ncclGetErrorString
        self._describe.argtypes, self._describe.restype = [number], ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._describe(code).decode()}")


class NcclGroup:
    """Rank 0 on the current CUDA device. Broadcasts run on a stream of their own, so that the
    gather of the next tensors overlaps them."""

    def __init__(self, store: TCPStore, world: int, watch: Watch) -> None:
        self._nccl, self._comm = _Library(), ctypes.c_void_p()
        self._stream = torch.cuda.Stream()
        unique = _UniqueId()
        self._nccl.call("ncclGetUniqueId", ctypes.byref(unique))
        share_id(store, bytes(unique))
        self._join(unique, world, watch)
        warm_1 = torch.zeros(1, device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        stream = self._stream.cuda_stream
        place = warm_1.data_ptr()
        self._nccl.call("ncclAllReduce", place, place, 1, _FLOAT32, _SUM, self._comm, stream)
        wait_for(self._stream.query, watch)

    def _join(self, unique: _UniqueId, world: int, watch: Watch) -> None:
        """`ncclCommInitRank` returns when all have joined, perhaps never: it runs beside the
        watch."""
        device = torch.cuda.current_device()

        def join() -> None:
            torch.cuda.set_device(device)
            self._nccl.call("ncclCommInitRank", ctypes.byref(self._comm), world, unique, 0)

        beside(join, watch)

    def broadcast(self, bytes_N: torch.Tensor) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream())
        place, stream = bytes_N.data_ptr(), self._stream.cuda_stream
        self._nccl.call(
            "ncclBroadcast", place, place, bytes_N.numel(), _UINT8, 0, self._comm, stream
        )
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def abort(self) -> None:
        self._nccl.call("ncclCommAbort", self._comm)
