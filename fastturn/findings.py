"""What a check found, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red", SKIP: "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw. `measured`: values with units; `remedy`: what to do, empty on a pass."""

    status: str
    measured: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A finding under the name of its check."""

    check: str
    status: str
    measured: str
    remedy: str


def show(title: str, lines: Sequence[Line], console: Console) -> None:
    """A row a check, its remedy below what was measured; then how many of each status."""
    table = Table("check", "", "measured", title=title, title_justify="left")
    for line in lines:
        told = Text(line.measured)
        if line.remedy:
            told.append(f"\n-> {line.remedy}", style="italic")
        table.add_row(line.check, Text(line.status, style=STYLES[line.status]), told)
    console.print(table)
    count = {status: sum(line.status == status for line in lines) for status in STYLES}
    console.print(", ".join(f"{n} {status}" for status, n in count.items() if n))
