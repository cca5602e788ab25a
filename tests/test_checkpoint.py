"""Checkpoints are whole or absent; a failed write leaves the older ones as they were."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fastturn import checkpoint
from fastturn.bench import quickstarts
from fastturn.config import Optim, Warm
from fastturn.optim import split_parameters, training_optimizer, warm_optimizer


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    model[3].weight = model[0].weight  # tied
    return model


def train(model, optimizers, steps: int) -> None:
    for step in range(steps):
        optimizers.zero_grad()
        torch.manual_seed(step)
        model(torch.randint(0, 10, (16,))).square().mean().backward()
        optimizers.step()


@pytest.mark.parametrize("phase", ["warm", "train"])
def test_a_restored_run_continues_as_if_never_stopped(tmp_path, phase):
    def fresh():
        model = small_model()
        if phase == "warm":
            return model, warm_optimizer(model, Warm(steps=20, lr=1e-2, muon_lr=0.02))
        return model, training_optimizer(model, Optim(lr=1e-2, warmup_steps=5))

    model, optimizers = fresh()
    train(model, optimizers, 6)
    checkpoint.save(tmp_path / "000001", model, optimizers, {"cursor": 6})
    train(model, optimizers, 4)

    other, others = fresh()
    checkpoint.load_weights(tmp_path / "000001", other, others)
    assert checkpoint.load_state(tmp_path / "000001") == ({"cursor": 6}, [])
    train(other, others, 4)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizers.lr == others.lr


def test_half_written_checkpoints_are_not_seen(tmp_path):
    model, optimizers = small_model(), training_optimizer(small_model(), Optim())
    checkpoint.save(tmp_path / "000001", model, optimizers, {})
    (tmp_path / ".part-000002-77").mkdir()
    (tmp_path / "000003").mkdir()  # a folder of that name without a state
    assert checkpoint.latest(tmp_path) == tmp_path / "000001"
    checkpoint.prune(tmp_path, keep=2)
    assert not (tmp_path / ".part-000002-77").exists()


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(bytes(byte ^ 0x55 for byte in content))


@pytest.mark.parametrize("how", ["missing", "cut", "other"])
@pytest.mark.parametrize("name", ["state.json", "trunks.pkl", "optimizer.json", ".metadata"])
def test_a_damaged_file_is_named(tmp_path, name, how):
    model, optimizers = small_model(), training_optimizer(small_model(), Optim())
    folder = tmp_path / "000001"
    checkpoint.save(folder, model, optimizers, {"n": 1}, ["trunk"])
    damage(folder / name, how)
    with pytest.raises(checkpoint.CheckpointError, match=rf"could not read {folder}: .*Remove"):
        checkpoint.load_state(folder)
        checkpoint.load_weights(folder, model, optimizers)


def test_one_wrong_byte_of_a_weight_or_a_moment_is_noticed(tmp_path):
    """torch's own reader compares no checksums."""
    model = small_model()
    optimizers = training_optimizer(model, Optim(lr=1e-2))
    train(model, optimizers, 1)
    folder = tmp_path / "000001"
    checkpoint.save(folder, model, optimizers, {})
    (shards,) = folder.glob("*.distcp")
    content = bytearray(shards.read_bytes())
    for tensor in (model[1].weight, *optimizers.members[0].state[model[1].weight].values()):
        bytes_N = tensor.detach().numpy().tobytes()
        if len(bytes_N) < 64:  # a count of steps is found anywhere
            continue
        place = content.index(bytes_N)
        content[place + 7] ^= 1
        shards.write_bytes(content)
        with pytest.raises(checkpoint.CheckpointError, match=f"{shards.name} is damaged"):
            checkpoint.load_weights(folder, small_model(), training_optimizer(model, Optim()))
        content[place + 7] ^= 1
    shards.write_bytes(content)
    checkpoint.load_weights(folder, model, optimizers)


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    model = small_model()
    with pytest.raises(checkpoint.CheckpointError, match=r"could not write .*checkpoints/000001"):
        folder = tmp_path / "checkpoints" / "000001"
        checkpoint.save(folder, model, training_optimizer(model, Optim()), {})


def test_weights_of_another_model_are_refused(tmp_path):
    model = nn.Linear(4, 4)
    checkpoint.save(tmp_path / "000001", model, training_optimizer(model, Optim()), {})
    for other, cause in ((nn.Linear(4, 5), "Size mismatch"), (nn.Sequential(model), "0.bias")):
        with pytest.raises(checkpoint.CheckpointError, match=rf"could not read .*{cause}"):
            checkpoint.load_weights(tmp_path / "000001", other, training_optimizer(other, Optim()))


def test_prune_keeps_the_newest(tmp_path):
    model, optimizers = small_model(), training_optimizer(small_model(), Optim())
    for i in (1, 2, 10):
        checkpoint.save(tmp_path / f"{i:06d}", model, optimizers, {"i": i})
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000002", "000010"]


def test_an_error_while_writing_keeps_the_old_folder(tmp_path):
    target = tmp_path / "final"
    checkpoint.atomic_folder(target, lambda part: (part / "a").write_text("old") and None)

    def full(part) -> None:
        (part / "a").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(checkpoint.CheckpointError, match=r"No space left.*intact"):
        checkpoint.atomic_folder(target, full)
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.fixture
def held_back(monkeypatch) -> threading.Event:
    """Second threads wait for it when all shards are on the disk, before a folder gets its name."""
    free, flush = threading.Event(), checkpoint._flush_files

    def wait(folder) -> None:
        assert threading.current_thread() is threading.main_thread() or free.wait(60)
        flush(folder)

    monkeypatch.setattr(checkpoint, "_flush_files", wait)
    return free


def test_what_is_written_is_as_of_the_beginning(tmp_path, held_back):
    """Weights, moments, trunks and state change before it is whole."""
    model = small_model()
    optimizers = training_optimizer(model, Optim(lr=1e-2, warmup_steps=5))
    train(model, optimizers, 2)
    before = [parameter.clone() for parameter in model.parameters()]
    state, trunks = {"n": 1}, []
    writing = checkpoint.begin(tmp_path / "000001", model, optimizers, state, trunks)
    train(model, optimizers, 3)
    state["n"] = 2
    trunks.append("later")
    assert checkpoint.latest(tmp_path) is None and not writing.done.done()
    held_back.set()
    writing.finish()
    assert checkpoint.load_state(tmp_path / "000001") == ({"n": 1}, [])
    other = small_model(1)
    others = training_optimizer(other, Optim(lr=1e-2, warmup_steps=5))
    checkpoint.load_weights(tmp_path / "000001", other, others)
    for now, then in zip(other.parameters(), before, strict=True):
        assert torch.equal(now, then)
    train(other, others, 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_goes_on_while_it_is_saved_and_the_next_save_waits(held_back):
    with quickstarts.opened(["warm.steps=0", "save.keep=1"]) as run:
        run.save()
        first = run.writing
        assert first is not None and checkpoint.latest(run.out / "checkpoints") is None
        run.cursor.iteration = 7
        threading.Timer(0.3, held_back.set).start()
        run.save()
        assert first.done.done() and checkpoint.latest(run.out / "checkpoints") == first.folder
        run.settle()
        kept = [path.name for path in (run.out / "checkpoints").iterdir()]
        assert kept == ["000007-00-000000"]


def test_frozen_weights_are_in_no_checkpoint(tmp_path):
    model = small_model()
    model[1].requires_grad_(False)
    checkpoint.save(tmp_path / "000001", model, training_optimizer(model, Optim()), {})
    saved = dcp.FileSystemReader(tmp_path / "000001").read_metadata().state_dict_metadata
    assert {"model.0.weight", "model.2.weight"} < set(saved)
    assert not [name for name in saved if name.startswith("model.1.")]


KILLED = """
import os, signal, sys, time, torch
from pathlib import Path
from fastturn import checkpoint
from fastturn.config import Optim
from fastturn.dist import open_world
from fastturn.optim import training_optimizer
root = Path(sys.argv[1])
with open_world("cpu") as world:
    model = torch.nn.Linear(40, 40)
    optimizers = training_optimizer(model, Optim())
    checkpoint.save(root / "000001", model, optimizers, {"n": 1}, world=world)
    write = checkpoint.dcp.FileSystemWriter.write_data
    def die(self, *given):
        write(self, *given).wait()
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *given)
    checkpoint.dcp.FileSystemWriter.write_data = die
    writing = checkpoint.begin(root / "000002", model, optimizers, {"n": 2}, world=world)
    writing.finish()
"""


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_it_writes_leaves_the_last_whole_one(tmp_path, size):
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=90)[0] for process in ranks]
    assert ranks[-1].returncode == -signal.SIGKILL, said
    assert all(process.returncode for process in ranks), said
    assert checkpoint.latest(tmp_path) == tmp_path / "000001"
    model = nn.Linear(40, 40)
    optimizers = training_optimizer(model, Optim())
    checkpoint.load_weights(tmp_path / "000001", model, optimizers)
    assert checkpoint.load_state(tmp_path / "000001")[0] == {"n": 1}
    checkpoint.save(tmp_path / "000002", model, optimizers, {"n": 2})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001", "000002"]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from fastturn import checkpoint
from fastturn.config import Optim
from fastturn.optim import training_optimizer
root = Path(sys.argv[1])
model = torch.nn.Linear(400, 400)
optimizers = training_optimizer(model, Optim())
checkpoint.save(root / "000001", model, optimizers, {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(root / "000002", model, optimizers, {"n": 2})
except checkpoint.CheckpointError as error:
    print("refused:", error)
"""


def test_a_write_that_the_system_refuses_is_named_and_harmless(tmp_path):
    """A file-size limit stops safetensors and torch.save in the middle, as a full disk would."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("refused: could not write"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
    assert json.loads((tmp_path / "000001" / "state.json").read_text()) == {"n": 1}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_matrices_of_blocks_only():
    matrices, rest = split_parameters(small_model())
    assert [tuple(p.shape) for p in matrices] == [(8, 8)]
    assert len(rest) == len(list(small_model().parameters())) - 1
