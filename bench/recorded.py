"""Recorded rows, read back: only those of a commit in this history count."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from .record import RESULTS, ROOT, Row, git

KINDS = get_type_hints(Row)


class ForeignRow(ValueError):
    """A row that nothing in this repository can have made, or that is no row at all."""


def read(path: Path) -> list[Row]:
    """The rows of a results file, oldest first. `ForeignRow` names the line that is none."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(_row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ForeignRow(
                f"{path}, line {number}: expected a row of a benchmark ({error}); restore the file"
            ) from error
    return found


def _row(values: Mapping[str, Any]) -> Row:
    """`ValueError` for a value that is not of the kind that `Row` says, NaN included."""
    for name, kind in KINDS.items():
        value = values[name]
        fits = isinstance(value, str) if kind is str else _finite(value)
        if not fits:
            raise ValueError(f"{name} is {value!r}")
    return Row(**{name: values[name] for name in KINDS})


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def history(root: Path = ROOT) -> set[str]:
    """All commits that what is checked out was made from."""
    return set(git("rev-list", "HEAD", root=root).splitlines())


def require_history(rows: Iterable[Row], root: Path = ROOT) -> None:
    """`ForeignRow` when the commit of a row is not an ancestor of what is checked out."""
    known = history(root)
    for row in rows:
        if row.commit not in known:
            raise ForeignRow(
                f"{row.bench}: {row.case} of {row.provider} was recorded at commit "
                f"{row.commit[:12]}, which is not in this history; take the results file of this "
                f"branch, or record the row again"
            )


@dataclass(frozen=True)
class Results:
    """The newest row of everything that was recorded; `shown` are those that were asked for."""

    rows: dict[tuple[str, str, str], Row]
    shown: dict[tuple[str, str, str], Row]

    @classmethod
    def load(cls, folder: Path = RESULTS, skip: Sequence[str] = ("races",)) -> Results:
        rows = [
            row
            for path in sorted(folder.glob("*.jsonl"))
            if path.stem not in skip
            for row in read(path)
        ]
        return cls({(row.case, row.provider, row.metric): row for row in rows}, {})

    def row(self, case: str, provider: str, metric: str) -> Row:
        """`ForeignRow` when nothing is recorded of it."""
        key = (case, provider, metric)
        if key not in self.rows:
            raise ForeignRow(
                f"{case}, {provider}, {metric}: no such row in bench/results; record it with "
                f"fastturn bench"
            )
        self.shown[key] = self.rows[key]
        return self.rows[key]
