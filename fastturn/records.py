"""The files of a run: lines of JSON that survive a kill, and files written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMING_KEYS = frozenset(
    {"spans", "wall_s", "cpu_s", "tokens_per_s", "time"} | {"overlap_saved_s", "device_seconds"}
)


class DamagedFile(ValueError):
    """A file of a run that does not hold what the run wrote: names it, and the remedy."""


def untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` without its timings, at any depth: what two runs of one seed have in common.

    Example: `untimed({"loss": .5, "wall_s": 3.0})` gives `{"loss": .5}`.
    """
    return {
        key: untimed(value) if isinstance(value, Mapping) else value
        for key, value in record.items()
        if key not in TIMING_KEYS
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file; [] when it is missing. A half-written last line is left out.

    Raises `DamagedFile` naming file and line for anything else that is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is half a line
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DamagedFile(
                f"{path}, line {number}: expected one JSON object a line, found {line[:60]!r}; "
                f"delete the line"
            )
        records.append(record)
    return records


def plain(value: Any, where: str = "value") -> tuple[Any, int]:
    """`value` as JSON types, and how many NaN or Inf became None on the way.

    Arrays and tensors become (nested) lists or numbers; keys become strings.
    Example: `plain({"loss": nan, "n": np.int64(2)})` gives `({"loss": None, "n": 2}, 1)`.
    Raises `TypeError` naming the key for a value that JSON cannot hold.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if value is None or isinstance(value, bool | int | str):
        return value, 0
    if isinstance(value, os.PathLike):
        return os.fspath(value), 0
    if isinstance(value, Mapping):
        pairs = {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
        return {k: item for k, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, Sequence | set | frozenset):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return [item for item, _ in items], sum(n for _, n in items)
    raise TypeError(f"{where}: expected numbers, text, lists or mappings, got {type(value)}")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` under the final name only when it is whole and on the disk."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


class Lines:
    """A jsonl file that only grows by whole lines; `length` is its size in bytes."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self.length = length
        self._file = path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if size < length:
            self._file.close()
            raise DamagedFile(
                f"{path} holds {size} bytes, the checkpoint was made when it held {length}; "
                f"restore the file, or start again in another folder"
            )
        with path.open("rb") as file:
            file.seek(length)
            self.dropped = file.read()
        self._file.truncate(length)

    def append(self, record: Mapping[str, Any]) -> None:
        """One line in one write. A failed write (disk full) leaves no half line, and raises."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        done = 0
        try:
            while done < len(line):
                done += self._file.write(line[done:])
        except BaseException:
            self._file.truncate(self.length)
            raise
        self.length += len(line)

    def sync(self) -> int:
        os.fsync(self._file.fileno())
        return self.length

    def close(self) -> None:
        self._file.close()
