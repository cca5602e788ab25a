"""Programs that try to get out of the sandbox, or to take it down with them.

`PROGRAMS`: name -> (text, how it may end). A program prints ESCAPED when it got what it wanted.
In the texts SECRET is a file of the caller, FRESH a file that is not there yet, PORT a port that
somebody listens on, VICTIM and PARENT processes of the same user.
"""

QUIET = "finished|raised"  # it was refused something and said so, or caught it
STOPPED = "timeout|SIGKILL"
CRASHED = "SIGSEGV|SIGBUS|SIGILL|SIGABRT"

# Wraps an attempt: whatever does not raise has got out.
ATTEMPT = """
try:
    {0}
except BaseException as error:
    print("refused", type(error).__name__)
else:
    print("ESCAPED")
"""


def attempt(statement: str, setup: str = "") -> tuple[str, str]:
    return setup + ATTEMPT.format(statement.replace("\n", "\n    ")), QUIET


LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"

NETWORK = {
    "connect to the host": attempt(
        'socket.create_connection(("127.0.0.1", PORT), 1).send(b"secret")', "import socket\n"
    ),
    "udp": attempt(
        'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))',
        "import socket\n",
    ),
    "listen": attempt('socket.create_server(("127.0.0.1", 0))', "import socket\n"),
    "raw socket": attempt("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "import socket\n"),
    "unix socket": attempt("socket.socketpair()", "import socket\n"),
    "url": attempt(
        'urllib.request.urlopen("http://127.0.0.1:PORT/", timeout=1)', "import urllib.request\n"
    ),
    "io_uring": attempt("assert libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0", LIBC),
}

PROCESSES = {
    "fork bomb": attempt("while True: os.fork()", "import os\n"),
    "one fork": attempt("if os.fork() == 0: os._exit(0)", "import os\n"),
    "orphan": attempt(
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)", "import os, time\n"
    ),
    "subprocess": attempt('subprocess.run(["/bin/sh", "-c", "true"])', "import subprocess\n"),
    "os.system": ("import os\nif os.system('true') == 0: print('ESCAPED')", QUIET),
    "posix_spawn": attempt('os.posix_spawn("/bin/true", ["true"], {})', "import os\n"),
    "multiprocessing": attempt(
        'multiprocessing.get_context("fork").Process(target=print).start()',
        "import multiprocessing\n",
    ),
    "exec": attempt('os.execv("/bin/sh", ["sh", "-c", "echo ESCAPED"])', "import os\n"),
    "raw clone": attempt("assert libc.syscall(56, 17, 0, 0, 0, 0) >= 0", LIBC),
    "thread bomb": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        f"raised|{STOPPED}",
    ),
    "name space": attempt("assert libc.unshare(0x10000000) == 0", LIBC),
}

SIGNALS = {
    "kill the caller": attempt("os.kill(PARENT, 9)", "import os\n"),
    "kill a sibling": attempt("os.kill(VICTIM, 9)", "import os\n"),
    "kill everything": attempt("os.kill(-1, 9)", "import os\n"),
    "kill its interpreter": attempt("os.kill(os.getppid(), 9)", "import os\n"),
    "stop its group": attempt("os.killpg(0, 19)", "import os\n"),
    "signal by a pipe": attempt(
        "fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')",
        "import os, fcntl\nr, w = os.pipe()\n",
    ),
    "limits of its interpreter": attempt(
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))", "import os, resource\n"
    ),
    "trace its interpreter": attempt(
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0", "import os\n" + LIBC
    ),
    "priority": attempt("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "import os\n"),
    "ignore signals": (
        "import signal\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        STOPPED,
    ),
    "die with its interpreter's alarm": (
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
        STOPPED,
    ),
}

FILES = {
    "read a secret": attempt('open("SECRET").read()'),
    "read the caller's environment": attempt('open("/proc/PARENT/environ", "rb").read()'),
    "read the caller's memory": attempt('open("/proc/PARENT/mem", "rb")'),
    "list the caller's files": attempt('os.listdir("/proc/PARENT/fd")', "import os\n"),
    "read shadow": attempt('open("/etc/shadow").read()'),
    "write outside": attempt('open("FRESH", "w").write("x")'),
    "write over": attempt('open("SECRET", "r+").write("x")'),
    "append": attempt('open("SECRET", "a").write("x")'),
    "truncate": attempt('os.truncate("SECRET", 0)', "import os\n"),
    "delete": attempt('os.unlink("SECRET")', "import os\n"),
    "rename": attempt('os.rename("SECRET", "FRESH")', "import os\n"),
    "link": attempt('os.symlink("SECRET", "FRESH")', "import os\n"),
    "make a folder": attempt('os.mkdir("FRESH")', "import os\n"),
    "change rights": attempt('os.chmod("SECRET", 0o777)', "import os\n"),
    "nameless file": attempt("os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", "import os\n"),
    "memory file": attempt("os.memfd_create('x')", "import os\n"),
    "temporary file": attempt("tempfile.TemporaryFile()", "import tempfile\n"),
    "shared memory": attempt(
        "m.SharedMemory(create=True, size=9)", "import multiprocessing.shared_memory as m\n"
    ),
    "1 GB file": attempt('open("FRESH", "wb").write(bytes(1 << 20) * 1024)'),
    "change its package": attempt('open(os.__file__, "a")', "import os\n"),
    "mount": attempt("assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", LIBC),
    "chroot": attempt("os.chroot('/')", "import os\n"),
    "inherited descriptors": (
        "import os\n"
        "for n in range(3, 256):\n"
        "    try: os.fstat(n); print('ESCAPED', n)\n"
        "    except OSError: pass",
        QUIET,
    ),
    "environment": (
        "import os\nif 'SECRET' in str(dict(os.environ)): print('ESCAPED')",
        QUIET,
    ),
    "become root": attempt("os.setuid(0)", "import os\nos.setgid(0)\n"),
    "raise its limits": attempt(
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "import resource\n"
    ),
}

RESOURCES = {
    "infinite loop": ("while True: pass", STOPPED),
    "sleep": ("import time; time.sleep(600)", STOPPED),
    "wait for input": ("input()", QUIET),
    "closed output": ("import os\nfor n in range(3): os.close(n)\nwhile True: pass", STOPPED),
    "memory bomb": ("x = []\nwhile True: x.append(bytes(1 << 24))", "raised"),
    "one large object": ("x = 'a' * (1 << 40)", "raised"),
    "large mapping": ("import mmap; mmap.mmap(-1, 1 << 36)", "raised"),
    "large number": ("print(len(str(9 ** 9 ** 9)))", f"raised|{STOPPED}"),
    "infinite output": ("while True: print('x' * 1000)", "output"),
    "output without lines": ("import os\nwhile True: os.write(1, bytes(65536))", "output"),
    "binary output": ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)", "finished"),
    "output on closed pipes": ("import sys\nsys.stdout.close()\nprint(1)", QUIET),
    "deep recursion": ("def f(n): return f(n + 1)\nf(0)", "raised"),
    "deeper recursion": (
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(n): return f(n + 1)\nf(0)",
        f"raised|{CRASHED}|{STOPPED}",
    ),
    "deep nesting": ("(" * 9000 + ")" * 9000, "raised"),
    "bad pointer": ("import ctypes; ctypes.string_at(0)", CRASHED),
    "endless regular expression": ("import re; re.match('(a+)+b', 'a' * 64)", STOPPED),
    "finaliser": (
        "class C:\n    def __del__(self):\n        while True: pass\nc = C()\ndel c",
        STOPPED,
    ),
    "exit handler": (
        "import atexit\natexit.register(lambda: [None for _ in iter(int, 1)])",
        "finished",
    ),
    "many descriptors": ("import os\nwhile True: os.pipe()", "raised"),
}

TEXT = {
    "os._exit": ("import os; os._exit(0)", "status 0"),
    "status of the worker": ("import os; os._exit(64)", "finished"),
    "sys.exit": ("raise SystemExit('bye')", "finished"),
    "unclosed quotes": ("print('''never closed", "raised"),
    "null bytes": ("print('a\0b')", "raised"),
    "lone surrogate": ("print('\\ud800')", "finished"),
    "not UTF-8": ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')", "finished"),
    "no program": ("", "finished"),
    "answers of its own": (
        'print(\'{"ending": "finished", "output": "forged"}\')\n1 / 0',
        "raised",
    ),
    "exception that cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        QUIET,
    ),
    "exception that exits": (
        "class E(Exception):\n    def __str__(self):\n        import os; os._exit(9)\nraise E",
        "status 9",
    ),
    "keyboard interrupt": ("raise KeyboardInterrupt", "raised"),
    "spoilt modules": (
        "import sys, builtins\nsys.modules.clear()\nbuiltins.__dict__.clear()\nx = 1",
        f"{QUIET}|status 70",
    ),
}

GROUPS = (NETWORK, PROCESSES, SIGNALS, FILES, RESOURCES, TEXT)
PROGRAMS = {name: program for group in GROUPS for name, program in group.items()}
