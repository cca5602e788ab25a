"""What a run says while it works: live bars on a terminal, sparse plain lines anywhere else.

    with Progress() as progress, progress.task("warm start", total=500) as task:
        task.advance(1, loss=0.53, success=0.4, tokens_per_s=1200)

Tasks nest (run, iteration, stage). On a terminal each of the first three levels keeps one row, so
short tasks that come and go do not make the screen jump; deeper ones are not shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

ROWS = 3  # live bars at most
LINE_EVERY_S = 2.0
_SHARES = ("success", "zero_advantage", "greedy", "clip_fraction", "compliance")
_UNITS = {"tokens_per_s": "tok/s", "rollouts_per_s": "rollouts/s", "steps_per_s": "steps/s"}


def clock_text(seconds: float) -> str:
    """Example: 75 gives "1:15", 3700 gives "1:01:40"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def field_text(name: str, value: Any) -> str:
    """One field behind the bar. Shares read as percent, rates with their unit.

    Example: ("success", .4) gives "success 40.0%", ("tokens_per_s", 1234.5) gives "1,234 tok/s",
    ("loss", .53126) gives "loss 0.531".
    """
    if name in _UNITS and isinstance(value, int | float):
        return f"{value:,.0f} {_UNITS[name]}"
    label = name.replace("_", " ")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{label} {value}"
    if name.startswith(_SHARES):
        return f"{label} {value:.1%}"
    return f"{label} {value:,}" if isinstance(value, int) else f"{label} {value:.3g}"


class Task:
    """One thing in progress; made by `Progress.task`, used as a context manager."""

    def __init__(
        self, owner: Progress, name: str, total: int | None, completed: int, depth: int
    ) -> None:
        self.name, self.total, self.completed, self.depth = name, total, completed, depth
        self.fields: dict[str, Any] = {}
        self._owner = owner
        self._began_at = completed
        self.began_s = owner.clock()
        self.said_s = float("-inf")  # when its last plain line was printed

    def __enter__(self) -> Task:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._owner.end(self, stopped=kind is not None)

    def advance(self, n: int = 1, **fields: Any) -> None:
        """`n` more units are done; `fields` are shown behind the bar until they change."""
        self.completed += n
        self.fields |= fields
        self._owner.show(self)

    def update(self, *, total: int | None = None, **fields: Any) -> None:
        """Shows new fields, or a total that became known, without progress."""
        self.total = self.total if total is None else total
        self.fields |= fields
        self._owner.show(self)

    @property
    def elapsed_s(self) -> float:
        return self._owner.clock() - self.began_s

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the mean rate so far; None while it is unknown."""
        done = self.completed - self._began_at
        if self.total is None or done <= 0:
            return None
        return max(0.0, self.elapsed_s / done * (self.total - self.completed))

    def time_text(self) -> str:
        eta_s = self.eta_s
        left = "" if eta_s is None or eta_s == 0 else f" eta {clock_text(eta_s)}"
        return clock_text(self.elapsed_s) + left

    def fields_texts(self) -> list[str]:
        return [field_text(name, value) for name, value in self.fields.items()]


class Progress:
    """Bars, lines and tables on one stream.

    `stream`: where to write (default: standard output); bars appear when it is a terminal.
    `quiet`: nothing but warnings. `clock`: seconds, for tests.
    Plain lines: a top-level task prints one at its start and one at its end; in between, and for
    nested tasks, at most one every 2 s per task. A nested task's start is printed only when
    nothing else was for 2 s, its end only if it also took that long.
    """

    def __init__(
        self,
        quiet: bool = False,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._quiet = quiet
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self._live = self._stream.isatty() and not self._console.is_dumb_terminal
        self._separator = " · " if _can_write("·", self._stream) else " - "
        self._tasks: list[Task] = []
        self._said_s = float("-inf")  # when any plain line was printed
        self._rows: list[TaskID] = []
        self._bars = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", table_column=Column(no_wrap=True), markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[time]}", style="cyan", markup=False),
            TextColumn(
                "{task.fields[shown]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            refresh_per_second=5,
            transient=True,
            disable=quiet or not self._live,
            expand=True,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def task(self, name: str, total: int | None = None, completed: int = 0) -> Task:
        """A task inside the ones that are open. `total=None`: length unknown. `completed`: what a
        resumed task had done before (it does not count for the ETA)."""
        task = Task(self, name, total, completed, depth=len(self._tasks))
        self._tasks.append(task)
        if self._live:
            self._new_row(task)
        elif self._due(task.depth):
            done = f"{completed:,}"
            self._say_task(task, done if total is None else f"{done}/{total:,}")
        return task

    def show(self, task: Task) -> None:
        """Called by a task that changed."""
        if self._live:
            self._show_row(task)
        elif task.depth == 0 and task.completed == task.total:
            return  # the line at its end says it
        elif self.clock() - max(task.said_s, task.began_s) >= LINE_EVERY_S:
            self._say_task(task, self._state_text(task))

    def end(self, task: Task, *, stopped: bool) -> None:
        """Called by a task that ended; tasks left open inside it end with it."""
        if task not in self._tasks:
            return
        del self._tasks[self._tasks.index(task) :]
        word = "stopped at" if stopped else "done"
        if self._live:
            # A nested task keeps its row until the next one takes it; what was below it goes.
            for row in self._rows[task.depth + (task.depth > 0) :]:
                self._bars.update(row, visible=False)
            if task.depth == 0:
                self._bars.refresh()
                self._say_task(task, f"{word} {self._state_text(task)}")
        elif task.depth == 0 or (self._due(task.depth) and task.elapsed_s >= LINE_EVERY_S):
            self._say_task(task, f"{word} {self._state_text(task)}")

    def say(self, text: str) -> None:
        """One line; live bars stay below it."""
        if not self._quiet:
            self._print(Text(_one_line(text)))

    def warn(self, text: str) -> None:
        """One line that `quiet` does not silence."""
        self._print(Text.assemble(("warning: ", "bold yellow"), _one_line(text)))

    def table(self, title: str, rows: Sequence[Sequence[Any]], head: Sequence[str] = ()) -> None:
        """A table: first column to the left, the others to the right.

        Example: `table("success", [("before", "0.31"), ("after", "0.86")])`.
        """
        if self._quiet or not rows:
            return
        cells = [[_one_line(str(cell)) for cell in row] for row in rows]
        if not self._live:
            self._plain_table(title, [list(head), *cells] if head else cells)
            return
        table = Table(
            title=Text(title), box=SIMPLE_HEAD, show_header=bool(head), title_justify="left"
        )
        for i in range(max(map(len, cells))):
            name = head[i] if i < len(head) else ""
            table.add_column(Text(name), justify="right" if i else "left")
        for row in cells:
            table.add_row(*map(Text, row))
        self._bars.console.print(table)

    def _plain_table(self, title: str, cells: list[list[str]]) -> None:
        columns = max(map(len, cells))
        widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(columns)]
        self._print(Text(_one_line(title)))
        for row in cells:
            line = [c.rjust(widths[i]) if i else c.ljust(widths[i]) for i, c in enumerate(row)]
            self._print(Text("  " + "  ".join(line).rstrip()))

    def _due(self, depth: int) -> bool:
        """A line about this depth may be printed now."""
        return depth == 0 or (depth < ROWS and self.clock() - self._said_s >= LINE_EVERY_S)

    def _state_text(self, task: Task) -> str:
        if task.total is None:
            done = f"{task.completed:,}"
        else:
            share = task.completed / task.total if task.total else 1.0
            done = f"{task.completed:,}/{task.total:,} {share:.0%}"
        return self._separator.join([done, task.time_text(), *task.fields_texts()])

    def _say_task(self, task: Task, text: str) -> None:
        if self._quiet:
            return
        self._print(Text("  " * task.depth + f"{_one_line(task.name)}: {text}"))
        task.said_s = self._said_s = self.clock()

    def _new_row(self, task: Task) -> None:
        """Gives the row of this depth to `task`."""
        if self._quiet or task.depth >= ROWS:
            return
        if task.depth == len(self._rows):
            self._rows.append(self._bars.add_task("", time="", shown=""))
        self._bars.reset(self._rows[task.depth], total=task.total, completed=task.completed)
        self._show_row(task)

    def _show_row(self, task: Task) -> None:
        if self._quiet or task.depth >= ROWS:
            return
        self._bars.update(
            self._rows[task.depth],
            description="  " * task.depth + _one_line(task.name),
            total=task.total,
            completed=task.completed,
            time=task.time_text(),
            shown=self._separator.join(task.fields_texts()),
            visible=True,
        )

    def _print(self, line: Text) -> None:
        if self._live:
            self._bars.console.print(line, soft_wrap=True)
            return
        encoding = self._stream.encoding or "utf-8"
        text = line.plain.encode(encoding, "replace").decode(encoding)
        print(text, file=self._stream, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
