"""Records reach TensorBoard and hosted trackers as curves; a missing tracker is named."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fastturn import provenance, trackers
from fastturn.config import ConfigError
from fastturn.meter import Meter
from fastturn.trackers import scalars


def read_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    tensors = tags["tensors"] + tags["scalars"]
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
        if tag in tags["scalars"]
        else [(e.step, float(e.tensor_proto.float_val[0])) for e in accumulator.Tensors(tag)]
        for tag in tensors
    }


def test_tensorboard_files_read_back_and_follow_a_resume(tmp_path: Path) -> None:
    first = Meter(tmp_path, ("tensorboard",))
    first.record("stage", {"iteration": 0, "step": 7, "loss": 0.5, "counts": {"cut": 2}})
    state = first.state()
    first.record("stage", {"iteration": 0, "step": 8, "loss": 99.0})
    first.summary({})
    second = Meter(tmp_path, ("tensorboard",), state=state)
    second.record("stage", {"iteration": 0, "step": 8, "loss": 0.25})
    second.record("eval", {"iteration": 3, "split": "during", "success": 0.75})
    second.summary({"levels": [{"success": 0.7, "gpu_hours": 0.5}]})  # flushes
    found = read_tensorboard(tmp_path)
    assert found["stage/loss"] == [(7, 0.5), (8, 0.25)]
    assert found["stage/counts/cut"] == [(7, 2.0)]
    assert found["eval/during/success"] == [(3, 0.75)]
    ((_, hours),) = found["ledger/device_hours to success/0.7"]
    ((_, held_h),) = found["ledger/device_hours"]
    spans = [curve[0][1] for tag, curve in found.items() if tag.startswith("ledger/trainer/")]
    assert hours == 0.5 and 3600 * held_h == pytest.approx(sum(spans), rel=1e-5)
    assert not any("split" in tag or tag.endswith("/time") for tag in found)
    second.close()
    first.close()


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fastturn.meter import Meter\n"
        "meter = Meter(Path(sys.argv[1]), ('tensorboard',)); meter.record('warm', {'step': 1})\n"
        "meter.summary({}); meter.close(); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(provenance.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_tracker_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = trackers.importlib.import_module

    def absent(asked: str) -> Any:
        if asked.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(asked)

    monkeypatch.setattr(trackers.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=f"trackers='{name}'.*pip install {name}"):
        Meter(tmp_path, (name,))


def test_an_unknown_tracker_is_refused_and_none_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers='wanbd'.*trackio, trace, nvtx, profile, none"):
        Meter(tmp_path, ("wanbd",))
    Meter(tmp_path, ("none",)).record("stage", {"step": 1})
    assert not (tmp_path / "tensorboard").exists()


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.metrics: list[str] = []
        self.finished = False

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append(name)

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_scalars_and_one_run_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened: list[dict[str, Any]] = []
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        opened.append(options)
        runs.append(FakeRun())
        return runs[-1]

    fake = types.ModuleType(name)
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, fake)
    (tmp_path / "config.json").write_text('{"config": {"seed": 3}, "recipe": {}}')
    first = Meter(tmp_path, (name,))
    state = first.state()
    first.close()
    second = Meter(tmp_path, (name,), state=state)
    second.record("iteration", {"iteration": 4, "success": 0.5, "endings": {"turns": 2}})
    assert runs[1].logged[0]["iteration/success"] == 0.5
    assert runs[1].logged[0]["iteration/endings/turns"] == 2.0
    assert runs[1].logged[0]["iteration/global_step"] == 4
    assert opened[0] == opened[1]
    assert opened[0]["config"] == {"seed": 3} and opened[0]["resume"] == "allow"
    second.close()
    assert runs[1].finished


def test_scalars_leave_out_text_and_null() -> None:
    record = {"kind": "warm", "loss": None, "note": "x", "skipped": True, "n": [1], "time": 5.0}
    assert scalars(record) == {"warm/skipped": 1.0}


def test_stages_of_one_iteration_are_curves_of_their_own() -> None:
    stages = [{"kind": "stage", "iteration": 4, "stage": k, "loss": 0.5 + k} for k in (1, 0)]
    assert [scalars(record) for record in stages] == [
        {"stage/turn 1/loss": 1.5},
        {"stage/turn 0/loss": 0.5},
    ]
