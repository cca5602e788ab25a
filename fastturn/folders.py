"""Which folder a run is in: the one asked for, a new one, or the newest to resume."""

from __future__ import annotations

import re
from pathlib import Path

from fastturn.config import Config, ConfigError

# What a run leaves in its folder from its first seconds on.
RUN_FILES = ("config.json", "records.jsonl", "summary.json")


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def has_records(folder: Path) -> bool:
    file = folder / "records.jsonl"
    return file.exists() and file.stat().st_size > 0


def run_folder(out: Path | None, resume: bool, config: Config) -> Path:
    """The folder to train in: the one asked for, the newest of this name to resume, or a new one.

    Raises `ConfigError` when it is a file, cannot be made, or holds a run that is not resumed.
    """
    if out is None:
        stem = f"{config.recipe}-{config.algorithm}-seed{config.seed}"
        return _newest_folder(Path("runs"), stem) if resume else _new_folder(Path("runs"), stem)
    if not resume and holds_run(out):
        raise ConfigError(
            f"--out {out}: the folder already holds a run; continue it with --resume, or choose "
            f"another --out"
        )
    _make_folder(out)
    return out


def _make_folder(folder: Path, exist_ok: bool = True) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        reason = "it is a file" if folder.is_file() else error.strerror
        raise ConfigError(
            f"--out {folder}: expected a folder that can be written, but {reason}; "
            f"choose another --out"
        ) from error


def _new_folder(parent: Path, stem: str) -> Path:
    """`stem`, or `stem-2`, `stem-3`, … when that exists; two runs never take the same one."""
    folder, number = parent / stem, 1
    while True:
        try:
            _make_folder(folder, exist_ok=False)
        except FileExistsError:
            number += 1
            folder = parent / f"{stem}-{number}"
        else:
            return folder


def _newest_folder(parent: Path, stem: str) -> Path:
    """The highest-numbered run of this name."""
    pattern = re.compile(re.escape(stem) + r"(?:-(\d+))?")
    numbered = [
        (int(match[1] or 1), folder)
        for folder in (parent.iterdir() if parent.is_dir() else ())
        if (match := pattern.fullmatch(folder.name)) and holds_run(folder)
    ]
    if not numbered:
        raise ConfigError(
            f"--resume: no run named {stem} in {parent}/; give the run's own recipe, algorithm and "
            f"seed, or its folder with --out"
        )
    return max(numbered)[1]
