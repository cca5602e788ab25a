"""Rows of a jsonl file or a Hugging Face dataset, and which of them are held out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastturn.config import ConfigError, Data
from fastturn.envs.base import DomainError

_SPLIT_SEED = "held-out"  # the same held-out tasks for every run, whatever its seed


class Asked(Protocol):
    """Something that was read: where from (for messages), and what makes two of them the same."""

    @property
    def origin(self) -> str: ...

    @property
    def content(self) -> str: ...


Item = TypeVar("Item", bound=Asked)


def read_rows(path: str, key: str) -> list[tuple[str, Any]]:
    """(origin, row) of a jsonl file or a dataset id (`id`, `id:config` or `id:config:split`).

    `key` is the setting named in errors. Raises `ConfigError` when it is empty, `DomainError` for
    what cannot be read, and when there are no rows. Example: ("a.jsonl:1", {"question": "..."}).
    """
    if not path:
        raise ConfigError(
            f"{key} is empty; set it to a jsonl file, for example {key}=gsm8k_train.jsonl, or to a "
            f"dataset id, for example {key}=openai/gsm8k:main"
        )
    local = Path(path).exists() or path.endswith((".jsonl", ".json")) or path[0] in "/.~"
    rows = list(_file_rows(path, key) if local else _hub_rows(path, key))
    if not rows:
        raise DomainError(f"{key}={path!r}: nothing in it; expected one JSON object a line")
    return rows


def _file_rows(path: str, key: str) -> Iterator[tuple[str, Any]]:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _loads(line, f"{path}:{number}")
    except OSError as error:
        raise DomainError(
            f"{key}={path!r}: {error.strerror or error}; give a jsonl file that can be read from "
            f"{Path.cwd()}"
        ) from error
    except UnicodeDecodeError as error:
        raise DomainError(f"{path}: not UTF-8 ({error}); convert the file to UTF-8") from error


def _loads(line: str, origin: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DomainError(
            f"{origin}: not valid JSON ({error}); expected one JSON object a line, repair or "
            "remove the line"
        ) from error
    if not isinstance(row, dict):
        raise DomainError(f"{origin}: expected a JSON object, found {type(row).__name__}")
    return row


def _hub_rows(path: str, key: str) -> Iterable[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DomainError(
            f"{key}={path!r}: there is no such file, and reading it as a dataset id needs the "
            "package datasets: pip install datasets"
        ) from error
    name, config, split = [*path.split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise DomainError(
            f"{key}={path!r}: the dataset cannot be loaded ({error}); check the id and the "
            "network, or download it and give the path of a jsonl file"
        ) from error
    return ((f"{path}:{number}", dict(row)) for number, row in enumerate(rows, 1))


def split(data: Data, read: Callable[[str, str], Sequence[Item]]) -> tuple[list[Item], list[Item]]:
    """(training, held-out) items without common content: those of `data.path`, and at most
    `data.eval_tasks` of `data.eval_path`, or split off `data.path`.

    Raises `DomainError` when nothing would be left to train on.
    """
    items = read(data.path, "data.path")
    if not data.eval_path:
        return split_off(items, data.eval_tasks)
    held_out = read(data.eval_path, "data.eval_path")[: data.eval_tasks]
    contents = {item.content for item in held_out}
    training = [item for item in items if item.content not in contents]
    if not training:
        raise DomainError(
            f"data.path={data.path!r}: every problem is held out in {data.eval_path!r}; use "
            "different files"
        )
    return training, list(held_out)


def split_off(items: Sequence[Item], held_out: int) -> tuple[list[Item], list[Item]]:
    """(training, held-out) items. The held-out part holds `held_out` different contents and does
    not depend on the run's seed.

    Raises `DomainError` when nothing would be left to train on.
    """
    contents = sorted({item.content for item in items})
    if len(contents) <= held_out:
        raise DomainError(
            f"{items[0].origin.rpartition(':')[0]} has {len(contents)} different problems and "
            f"data.eval_tasks={held_out} leaves none for training; lower data.eval_tasks, or set "
            "data.eval_path to a file of held-out problems"
        )
    chosen = set(random.Random(_SPLIT_SEED).sample(contents, held_out))
    training = [item for item in items if item.content not in chosen]
    first = {item.content: item for item in reversed(items) if item.content in chosen}
    return training, list(first.values())
