"""Progress on a pipe is sparse plain lines, on a terminal it is bars, and quiet means warnings."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastturn.progress import LINE_EVERY_S, Progress, Task, clock_text, field_text


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_plain_lines_come_at_most_every_two_seconds(clock: Clock) -> None:
    out = io.StringIO()
    times: list[float] = []
    with Progress(stream=out, clock=clock) as progress, progress.task("warm start", 500) as task:
        for step in range(500):
            before = out.tell()
            clock.now_s += 0.05
            task.advance(1, loss=1.0 / (step + 1), success=0.4, tokens_per_s=1234.5)
            if out.tell() > before:
                times.append(clock.now_s)
    lines = out.getvalue().splitlines()
    assert len(times) == len(lines) - 2 == 12  # 25 s, without the lines at start and end
    assert all(b - a >= LINE_EVERY_S - 1e-9 for a, b in itertools.pairwise(times))
    assert lines[0] == "warm start: 0/500"
    assert lines[6].startswith("warm start: 24")
    assert "eta 0:1" in lines[6] and "success 40.0%" in lines[6] and "1,234 tok/s" in lines[6]
    assert lines[-1].startswith("warm start: done 500/500 100% · 0:25 · loss 0.002")
    assert "\x1b" not in out.getvalue()


def test_short_nested_tasks_stay_silent_on_a_pipe(clock: Clock) -> None:
    out = io.StringIO()
    with Progress(stream=out, clock=clock) as progress, progress.task("rtpo", 100) as run:
        for _ in range(100):
            with progress.task("iteration", 4) as iteration:
                for _ in range(4):
                    with progress.task("stage", 2) as stage:
                        clock.now_s += 0.05
                        stage.advance(2)
                    iteration.advance()
            run.advance(success=0.5)
    lines = out.getvalue().splitlines()
    assert 10 <= len(lines) <= 2 + 2 * 20 / LINE_EVERY_S
    assert sum(line.startswith("rtpo") for line in lines) >= 10


def test_a_slow_nested_task_is_told(clock: Clock) -> None:
    out = io.StringIO()
    with Progress(stream=out, clock=clock) as progress, progress.task("rtpo", 1):
        clock.now_s += 3
        with progress.task("evaluation", 8) as task:
            for _ in range(8):
                clock.now_s += 3
                task.advance()
            clock.now_s += 3
    lines = out.getvalue().splitlines()
    assert lines[1] == "  evaluation: 0/8"
    assert len(lines) == 1 + 1 + 8 + 1 + 1
    assert lines[-2].startswith("  evaluation: done 8/8")


def test_a_task_that_breaks_says_where(clock: Clock) -> None:
    out = io.StringIO()
    progress = Progress(stream=out, clock=clock)
    with pytest.raises(KeyboardInterrupt), progress, progress.task("rtpo", 10) as task:
        task.advance(3)
        raise KeyboardInterrupt
    assert out.getvalue().splitlines()[-1].startswith("rtpo: stopped at 3/10 30%")
    with progress.task("next", 1):
        pass  # its line is not indented: the broken task is closed
    assert out.getvalue().splitlines()[-1].startswith("next: done")


def test_eta_counts_only_this_process(clock: Clock) -> None:
    progress = Progress(stream=io.StringIO(), clock=clock)
    task = progress.task("resumed", total=100, completed=80)
    assert task.eta_s is None
    clock.now_s = 5.0
    task.advance(5)
    assert task.eta_s == pytest.approx(15.0)
    task.update(total=90, loss=1.0)
    assert task.eta_s == pytest.approx(5.0)
    assert progress.task("unknown").eta_s is None


def test_quiet_leaves_only_warnings() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(quiet=True, stream=stream) as progress, progress.task("a", 2) as task:
            task.advance(2)
            progress.say("hello")
            progress.table("result", [("a", 1)])
            progress.warn("31 % were\ncut [bold]")
        assert stream.getvalue().count("\n") == 1
        assert "31 % were cut [bold]" in stream.getvalue()


def test_table_on_a_pipe_is_aligned() -> None:
    out = io.StringIO()
    progress = Progress(stream=out)
    rows = [("success", "0.31", "0.86"), ("greedy", 0.4)]
    progress.table("result", rows, head=("", "before", "after"))
    assert out.getvalue().splitlines() == [
        "result",
        "           before  after",
        "  success    0.31   0.86",
        "  greedy      0.4",
    ]
    progress.table("empty", [])
    assert out.getvalue().count("\n") == 4


def test_terminal_keeps_three_rows_and_prints_above_them() -> None:
    out = Terminal()
    with Progress(stream=out) as progress, progress.task("run", 2) as run:
        for i in range(2):
            with progress.task(f"iteration {i}", 2) as iteration:
                for k in range(2):
                    with progress.task(f"stage {k}", 1) as stage, progress.task("deeper", 1) as low:
                        low.advance()
                        stage.advance(zero_advantage=0.5)
                        progress.say("a [red]line[/red]")
                    iteration.advance()
            run.advance()
        assert len(progress._bars.tasks) == 3
        assert [bar.visible for bar in progress._bars.tasks] == [True, True, False]
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert text.count("a [red]line[/red]") == 4
    assert "deeper" not in text
    assert "run: done 2/2" in text
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # cursor is back


def test_a_row_taken_over_by_an_equally_long_task_is_not_finished() -> None:
    with Progress(stream=Terminal()) as progress, progress.task("run", 9):
        with progress.task("stage 3", 5) as stage:
            stage.advance(5)
        assert progress._bars.tasks[1].finished
        progress.task("stage 2", 5)
        assert not progress._bars.tasks[1].finished


def test_stream_that_cannot_write_every_character() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    with Progress(stream=stream) as progress, progress.task("ψ", 1) as task:
        task.advance(loss=0.5, note="é")
    assert raw.getvalue().splitlines()[-1] == b"?: done 1/1 100% - 0:00 - loss 0.5 - note ?"


def test_text_of_times_and_fields() -> None:
    assert [clock_text(s) for s in (0, 59.4, 75, 3700)] == ["0:00", "0:59", "1:15", "1:01:40"]
    assert field_text("zero_advantage_share", 0.52) == "zero advantage share 52.0%"
    assert field_text("success", 1) == "success 100.0%"
    assert field_text("turn", 3) == "turn 3"
    assert field_text("lr", 3e-4) == "lr 0.0003"
    assert field_text("split", "after") == "split after"
    assert field_text("done", True) == "done True"


SCRIPT = """
import os, signal, time
from fastturn.progress import Progress
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored
with Progress() as progress, progress.task("run", 100) as task:
    for i in range(100):
        task.advance()
        if i == 50:
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_in_a_process(terminal: bool) -> None:
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT]
    if terminal:
        leader, follower = pty.openpty()
        done = subprocess.run(command, stdout=follower, stderr=subprocess.PIPE, env=environment)
        os.close(follower)
        text = os.read(leader, 100_000).decode()
        os.close(leader)
        assert text.count("\x1b[?25h") == 1 and text.rstrip().endswith("\x1b[?25h")
    else:
        done = subprocess.run(command, capture_output=True, env=environment)
        text = done.stdout.decode()
        assert "\x1b" not in text
    assert b"KeyboardInterrupt" in done.stderr
    assert "run: stopped at 51/100" in text


def test_task_is_closed_with_the_ones_left_open_inside_it() -> None:
    progress = Progress(stream=io.StringIO())
    outer: Task = progress.task("outer", 1)
    progress.task("inner", 1)
    with outer:
        pass
    assert progress.task("next").depth == 0
