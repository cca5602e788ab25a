"""Two iterations of RTPO on tasks that others wrote, each by its recipe: finite, complete, told.

The models are small ones built in the run; the recipes themselves take SmolLM2-135M. GSM8K and
HotpotQA are read from the folder FASTTURN_DATA (shared/data beside the repository, unless it is
set); where there is none, a few tasks of the same form take their place.
"""

from __future__ import annotations

import json
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves it out
from test_trainer import closure

from fastturn import cli
from fastturn.records import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = Path(os.environ.get("FASTTURN_DATA") or Path(__file__).parents[2] / "shared" / "data")
SMALL = ("model.path=", "model.layers=1", "model.width=64", "model.vocabulary=600", "threads=1")
SHORT = ("iterations=2", "tasks=2", "group_size=3", "data.eval_tasks=2", "warm.steps=60")
RATES = ("warm.batch=8", "warm.lr=3e-3", "warm.muon_lr=0.02", "optim.lr=1e-4", "trackers=none")


def words(rows: list[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(folder: Path) -> list[str]:
    train, held_out = (DATA / "math" / f"gsm8k_{part}.jsonl" for part in ("train", "test"))
    if train.exists():
        return [f"data.path={train}", f"data.eval_path={held_out}"]
    rows = [
        {
            "question": f"Ann has {n} figs and buys {n + 3} more. How many has she?",
            "answer": f"She has {n} + {n + 3} = <<{n}+{n + 3}={2 * n + 3}>>{2 * n + 3}.\n"
            f"#### {2 * n + 3}",
        }
        for n in range(10, 40)
    ]
    return [f"data.path={words(rows, folder / 'sums.jsonl')}"]


def questions(folder: Path) -> list[str]:
    corpus, asked = (DATA / "qa" / f"hotpotqa100_{part}.jsonl" for part in ("corpus", "clean"))
    if corpus.exists():
        return [f"data.domain=search:corpus={corpus}", f"data.path={asked}"]
    towns = [("Alu", "Beta"), ("Chess", "Delta"), ("Fig", "Gamma"), ("Ivy", "Kappa")]
    texts = [{"title": name, "text": f"{name} lies on the river {on}."} for name, on in towns]
    rows = [
        {"question": f"On which river lies {name}? ({n})"}
        | {"answer": on, "supporting_titles": [name]}
        for n in range(5)
        for name, on in towns
    ]
    found = words(texts, folder / "corpus.jsonl")
    asks = words(rows, folder / "questions.jsonl")
    return [f"data.domain=search:corpus={found}", f"data.path={asks}"]


TASKS = {
    "gsm8k-python-smollm2": (sums, "math_verify", ["sampling.turn_tokens=64"]),
    "hotpotqa-smollm2": (questions, "bm25s", ["sampling.turn_tokens=64", "warm.steps=12"]),
    "airline-smollm2": (lambda folder: [], "tau2", ["turns=3", "model.max_context=2048"]),
    "gym-smollm2": (lambda folder: [], "reasoning_gym", ["sampling.turn_tokens=24"]),
}


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("recipe", TASKS)
def test_two_iterations(recipe: str, tmp_path: Path) -> None:
    data, package, own = TASKS[recipe]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    out = tmp_path / "run"
    pairs = [*SMALL, *SHORT, *RATES, *data(tmp_path), *own]
    assert cli.main(["train", recipe, "--out", str(out), *pairs]) == 0
    records = list(read_lines(out / "records.jsonl"))
    assert all(map(finite, records))
    rounds = [record for record in records if record["kind"] == "iteration"]
    assert [record["iteration"] for record in rounds] == [0, 1]
    # Two trunks an iteration, and two siblings of each beside it at every boundary.
    assert all(record["rollouts"] >= 2 + 4 for record in rounds)
    stages = [record for record in records if record["kind"] == "stage"]
    assert {record["iteration"] for record in stages} == {0, 1}
    assert all(abs(s["ratio_geomean"] - 1) < 1e-4 for s in stages if s["steps"])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["iterations"] == 2 and finite(summary)
    assert closure(out) == pytest.approx(1.0, rel=0.01)
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "final" / "model.safetensors").exists()
