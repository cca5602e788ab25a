"""The process behind `sandbox.Sandbox`: one program a line on stdin, one outcome a line on stdout.

    zygote: imports, wall, then  read a program -> fork -> read its output -> reap -> answer
    child:  limits, system call filter, then  the program's cells

Run as a script, `sandbox_worker.py '{"wall": ..., "readable": [...], "memory_gib": ...}'`; it
imports nothing of this package. A child is one process for good: the filter forbids it to make
others, so nothing can outlive it, and ends with it whatever it did.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import linecache
import os
import platform
import random
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

FINISHED, RAISED = 64, 65  # exit statuses of a child whose cells all ran
MOST_OUTPUT = 1 << 20  # bytes after which a program is stopped
HEAD, TAIL = 3000, 900  # characters that are kept of a longer output
PRELOADED = ("collections", "datetime", "decimal", "fractions", "itertools", "math", "statistics")
# Imported once, when a program first names them: a large interpreter takes longer to fork.
LARGE = {"numpy": "numpy.random", "sympy": "sympy", "reasoning_gym": "reasoning_gym"}
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)

# --- The system call filter ------------------------------------------------------------------

# name, number on x86-64, number on arm64 ("-": it has none). Everything else fails with EPERM:
# sockets, signals, other processes, changes of files, name spaces, limits, io_uring, keys, bpf.
ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, lseek 8 62, close 3 57
close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -
ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21
epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, stat 4 -, lstat 6 -, fstat 5 80
newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439
readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50
statfs 137 43, fstatfs 138 44, fadvise64 221 223, mmap 9 222, mprotect 10 226, munmap 11 215
mremap 25 216, madvise 28 233, brk 12 214, mincore 27 232, futex 202 98, set_robust_list 273 99
rseq 334 293, set_tid_address 218 96, sched_yield 24 124, sched_getaffinity 204 123
getcpu 309 168, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -
getitimer 36 102, setitimer 38 103, restart_syscall 219 128, clock_gettime 228 113
clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -
times 100 153, getrusage 98 165, sysinfo 99 179, uname 63 160, getrandom 318 278
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176
getegid 108 177, exit 60 93, exit_group 231 94
"""
EVERY_BIT = 0xFFFFFFFF
THREAD = 0x10000  # CLONE_THREAD
WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_TMPFILE", 0)
)
LD, AND, JEQ, RET = 0x20, 0x54, 0x15, 0x06  # classic BPF: load word, and, jump if equal, return
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000


class Rule(NamedTuple):
    """A call that is allowed when `argument & mask` is one of `values`, else fails with `error`."""

    numbers: tuple[int | None, int | None]
    argument: int
    mask: int
    values: tuple[int, ...]
    error: int


RULES = (
    Rule((2, None), 1, WRITING & ~os.O_DIRECTORY, (0,), errno.EROFS),  # open
    Rule((257, 56), 2, WRITING & ~os.O_DIRECTORY, (0,), errno.EROFS),  # openat
    Rule((56, 220), 0, THREAD, (THREAD,), errno.EPERM),  # clone: threads, no processes
    Rule((435, 435), 0, 0, (), errno.ENOSYS),  # clone3: its arguments cannot be read; use clone
    # fcntl: F_SETOWN and F_SETSIG would send signals to other processes
    Rule((72, 25), 1, EVERY_BIT, (0, 1, 2, 3, 1030), errno.EPERM),
)
# AUDIT_ARCH of the kernel's filters, and the column of numbers.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1), "arm64": (0xC00000B7, 1)}


def filter_program() -> bytes:
    """The filter as classic BPF (seccomp(2)). Raises `OSError` on another kind of machine."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise OSError(f"no system call filter for {sys.platform} on {machine}")
    audit, column = MACHINES[machine]
    code = [(LD, 0, 0, 4), (JEQ, 1, 0, audit), (RET, 0, 0, KILL), (LD, 0, 0, 0)]
    for entry in ALLOWED.replace("\n", ",").split(","):
        if entry.strip() and entry.split()[1 + column] != "-":
            code += [(JEQ, 0, 1, int(entry.split()[1 + column])), (RET, 0, 0, ALLOW)]
    for rule in RULES:
        number = rule.numbers[column]
        if number is not None:
            low_word = 16 + 8 * rule.argument  # of struct seccomp_data, little-endian
            body = [(LD, 0, 0, low_word), (AND, 0, 0, rule.mask)]
            for value in rule.values:
                body += [(JEQ, 0, 1, value), (RET, 0, 0, ALLOW)]
            body.append((RET, 0, 0, ERRNO | rule.error))
            code += [(JEQ, 0, len(body), number), *body]
    code.append((RET, 0, 0, ERRNO | errno.EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in code)


def prctl(option: int, *values: Any) -> None:
    if LIBC.prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def apply_filter(program: bytes) -> None:
    """From here on this process makes only the calls that `program` allows."""
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    lines = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of lines, and their address.
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0)  # PR_SET_SECCOMP, filter


# --- Walls: what hides files -------------------------------------------------------------------


def landlock(readable: Sequence[str]) -> None:
    """Contents of files and folders beneath `readable` can be read; of all others, nothing."""
    access, read = (1 << 13) - 1, 1 << 2 | 1 << 3  # all of the first ABI; READ_FILE, READ_DIR
    attributes = ctypes.create_string_buffer(struct.pack("Q", access), 8)
    rules = _landlock_call(444, attributes, ctypes.c_size_t(8), 0)
    for path in readable:
        if not os.path.exists(path):
            continue
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = read if os.path.isdir(path) else 1 << 2
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, beneath), 12)
        _landlock_call(445, rules, 1, rule, 0)
        os.close(beneath)
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _landlock_call(446, rules, 0)
    os.close(rules)


def _landlock_call(number: int, *values: Any) -> int:
    result: int = LIBC.syscall(number, *values)
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"the kernel offers no Landlock ({reason})")
    return result


def other_user(readable: Sequence[str]) -> None:
    """Go on as nobody, who can read what everybody can."""
    if os.geteuid() != 0:
        raise OSError("only root can become another user")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    hidden = [p for p in readable if os.path.exists(p) and not os.access(p, os.R_OK)]
    if not os.access(os.__file__, os.R_OK):
        raise OSError(f"the user {NOBODY} cannot read the interpreter's files ({os.__file__})")
    if hidden:
        raise OSError(f"the user {NOBODY} cannot read {', '.join(hidden)}")


def hidden_already(readable: Sequence[str]) -> None:
    """Started inside a mount name space that holds only `readable`."""


WALLS = {"bubblewrap": hidden_already, "landlock": landlock, "uid": other_user}


# --- The child ---------------------------------------------------------------------------------


def limit(memory: int, cpu_s: int) -> None:
    """Nothing may be written, and memory and time end; hard limits, so for good."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def run_cells(cells: Sequence[str], output: int) -> int:
    """Run `cells` in one fresh module; only the last one's output counts. The exit status."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    # Line by line, so that a program that is stopped has said what it had to say; errors in order.
    sys.stdout = sys.stderr = os.fdopen(1, "w", 1, "utf-8", "backslashreplace", closefd=False)
    for number, cell in enumerate(cells, 1):
        if number == len(cells):
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
        raised = run_cell(cell, f"<cell {number}>", main.__dict__)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    return RAISED if raised else FINISHED


def run_cell(cell: str, name: str, names: dict[str, Any]) -> bool:
    """Run one cell, its last expression printed as at a prompt. Whether it raised."""
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    try:
        tree = ast.parse(cell, name)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, name, "exec"), names)
        exec(compile(ast.Interactive(last), name, "single"), names)
    except SystemExit:
        return False
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(Exception):  # the program may have closed its output
            traceback.print_exception(type(error), error, own, file=sys.stdout)
        return True
    return False


def child(cells: Sequence[str], output: int, nothing: int, program: bytes) -> None:
    """What the forked process does; it never returns."""
    status = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        for number in range(3):
            os.dup2(nothing, number)
        os.dup2(output, 3)
        os.closerange(4, 1 << 12)
        apply_filter(program)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        status = run_cells(cells, 3)
    finally:
        os._exit(status)


# --- The zygote --------------------------------------------------------------------------------


class Zygote:
    """Forks a child a request, stops it when its time or its output is used up, and reaps it."""

    def __init__(self, memory_gib: float) -> None:
        self._program = filter_program()
        self._memory = int(memory_gib * (1 << 30))  # of a program, beyond what is there already
        self._pages = os.open("/proc/self/statm", os.O_RDONLY)  # walls hide it
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._child = 0
        self._late = False
        signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, *_: object) -> None:
        self._late = True
        os.kill(self._child, signal.SIGKILL)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        self._prepare(request["cells"])
        reading, writing = os.pipe()
        self._late = False
        self._child = os.fork()
        if self._child == 0:
            own = int(os.pread(self._pages, 64, 0).split()[0]) * resource.getpagesize()
            limit(own + self._memory, int(request["timeout_s"]) + 1)
            child(request["cells"], writing, self._nothing, self._program)
        os.close(writing)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        received, size, chunk = [], 0, b"-"
        while chunk and size <= MOST_OUTPUT:
            chunk = os.read(reading, 1 << 16)
            received.append(chunk)
            size += len(chunk)
        os.close(reading)
        if size > MOST_OUTPUT:
            os.kill(self._child, signal.SIGKILL)
        # Its number stays its own until the alarm is off. Who closed the output may run on.
        os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _, status = os.waitpid(self._child, 0)
        ending = "output" if size > MOST_OUTPUT else self._ending(os.waitstatus_to_exitcode(status))
        return {"ending": ending, "output": clip(b"".join(received).decode("utf-8", "replace"))}

    def _prepare(self, cells: Sequence[str]) -> None:
        """Import the large modules that `cells` name, once."""
        for name, module in LARGE.items():
            if module not in sys.modules and any(name in cell for cell in cells):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
                gc.collect()
                gc.freeze()

    def _ending(self, code: int) -> str:
        if self._late:
            return "timeout"
        if code in (FINISHED, RAISED):
            return "finished" if code == FINISHED else "raised"
        return f"status {code}" if code >= 0 else signal.Signals(-code).name


def clip(text: str) -> str:
    """Beginning and end of a long text, with a note of what is left out between them."""
    if len(text) <= HEAD + TAIL:
        return text
    left_out = len(text) - HEAD - TAIL
    return f"{text[:HEAD]}\n... ({left_out} characters left out) ...\n{text[-TAIL:]}"


def main() -> None:
    """Answer programs until stdin ends."""
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints while modules are imported
    try:
        os.chdir("/")
        for name in PRELOADED:
            importlib.import_module(name)
        zygote = Zygote(options["memory_gib"])
        WALLS[options["wall"]](options["readable"])
        gc.collect()
        gc.freeze()
    except OSError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(zygote.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
