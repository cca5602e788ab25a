"""What a run left in its folder, parsed, and the sums and means that its report is made of.

Every file may be missing and every value unknown (a run that was stopped, or has only begun).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastturn.forms import CONFIG, RECORD, SAMPLE, SUMMARY, misfit
from fastturn.meter import NONFINITE
from fastturn.records import DamagedFile, read_lines

Record = dict[str, Any]
# What the learner measures: unknown, not 0, in a stage whose groups were all silent.
_OF_STEPS = (
    *("loss", "grad_norm", "clip_fraction", "clip_fraction_first", "entropy"),
    *("kl_behavior", "kl_reference"),
)


@dataclass(frozen=True)
class RunFiles:
    """Records, transcripts, summary and configuration of one run; what is missing is empty."""

    name: str
    records: list[Record]
    samples: list[Record]
    summary: Record
    config: Record
    recipe: Record

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.get("kind") == kind]

    def evaluation(self, split: str) -> Record:
        """The last evaluation of this split, or {}."""
        found = [record for record in self.of("eval") if record.get("split") == split]
        return found[-1] if found else {}

    def of_run(self, key: str) -> float:
        """A total: the summary's, or the sum over all records so far."""
        return float(self.summary.get(key, total(self.records, key)))

    @cached_property
    def stages(self) -> dict[int, list[Record]]:
        """Stage records by turn index; what no optimizer step measured is None."""
        found: dict[int, list[Record]] = defaultdict(list)
        for record in self.of("stage"):
            if isinstance(record.get("stage"), int):
                blank = dict.fromkeys(_OF_STEPS) if record.get("steps") == 0 else {}
                found[record["stage"]].append(record | blank)
        return dict(sorted(found.items()))

    @cached_property
    def spans(self) -> dict[str, float]:
        """Seconds by span over the run."""
        if self.summary.get("spans"):
            return dict(self.summary["spans"])
        found: dict[str, float] = defaultdict(float)
        for record in self.records:
            for name, seconds in (record.get("spans") or {}).items():
                found[name] += seconds
        return dict(found)

    @cached_property
    def nonfinite(self) -> int:
        """How many values were NaN or Inf."""
        return _counts(self.records)[NONFINITE]

    @cached_property
    def events(self) -> Counter[str]:
        """What happened in training rollouts. How they ended is told apart from it."""
        counted = _counts(self.of("stage") + self.of("iteration"))
        return Counter({name: n for name, n in counted.items() if _is_event(name)})

    @cached_property
    def event_rates(self) -> dict[int, dict[str, float]]:
        """Events per rollout, by iteration."""
        counted: dict[int, Counter[str]] = defaultdict(Counter)
        for record in self.of("stage") + self.of("iteration"):
            if isinstance(record.get("iteration"), int):
                counted[record["iteration"]].update(record.get("counts") or {})
        return {
            r["iteration"]: {n: c / r["rollouts"] for n, c in counted[r["iteration"]].items()}
            for r in self.of("iteration")
            if r.get("rollouts") and isinstance(r.get("iteration"), int)
        }


def load(out: Path) -> RunFiles:
    """The files of the run in `out`. Raises `DamagedFile` for what no run writes."""
    settings = _read_json(out / "config.json", CONFIG)
    return RunFiles(
        name=out.resolve().name,
        records=_read_lines(out / "records.jsonl", RECORD),
        samples=_read_lines(out / "samples.jsonl", SAMPLE),
        summary=_read_json(out / "summary.json", SUMMARY),
        config=settings.get("config") or {},
        recipe=settings.get("recipe") or {},
    )


def number(value: Any) -> float | None:
    """The value when it is a number."""
    return value if isinstance(value, int | float) else None


def mean(values: Iterable[Any]) -> float | None:
    """Of those that are numbers; None without any."""
    known = [value for value in values if isinstance(value, int | float)]
    return math.fsum(known) / len(known) if known else None


def total(records: Sequence[Record], key: str) -> float:
    """Sum over the records that know this number."""
    return float(sum(number(record.get(key)) or 0 for record in records))


def _counts(records: Sequence[Record]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for record in records:
        counted.update(record.get("counts") or {})
    return counted


def _is_event(name: str) -> bool:
    return name != NONFINITE and not name.startswith("ending_")


def _read_json(path: Path, form: Any) -> Record:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"{path}: expected a JSON object ({error}); delete the file") from error
    if wrong := misfit(value, form, path.stem):
        raise DamagedFile(f"{path}: {wrong}; delete the file")
    return dict(value)


def _read_lines(path: Path, form: Any) -> list[Record]:
    found = read_lines(path)
    for number, record in enumerate(found, start=1):
        if wrong := misfit(record, form, path.stem):
            raise DamagedFile(f"{path}, line {number}: {wrong}; delete the line")
    return found
