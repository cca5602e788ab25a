"""Two processes compute what one does: gradients, steps, checkpoints, whole runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastturn import checkpoint, trainer
from fastturn.config import ConfigError, override
from fastturn.dist import World, mesh_shape, open_world
from fastturn.pack import pack
from fastturn.policy import Policy
from fastturn.recipes import quickstart
from fastturn.records import read_lines, untimed
from fastturn.sharding import merged_state

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))  # pytest's import mode leaves it out
import ranks  # noqa: E402
from test_trainer import closure  # noqa: E402

ONE = World.single()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def started(rank: int, size: int, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    """One rank, as torchrun would start it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in place.items()}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def train_once(out: Path, resume: bool = False) -> None:
    trainer.train(ranks.settings(), quickstart(), out, resume)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves for two, and what two then found (see ranks.py)."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ranks.OPTIMISERS:
        learner = ranks.learner_of(name, ONE, folder)
        ranks.learn(learner, ranks.STEPS // 2)
        args = (learner.policy.model, learner.optimizers, {"n": 1})
        checkpoint.save(folder / f"{name}-of-1", *args)
    undo = ranks.stop_at(1, 1)
    with pytest.raises(KeyboardInterrupt):
        train_once(folder / "stopped-of-1")
    undo()
    port = free_port()
    both = [started(rank, 2, port, [str(TESTS / "ranks.py"), str(folder)]) for rank in (0, 1)]
    texts = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(texts)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest |got - want| of a tensor over its largest |want|."""
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def test_every_rank_knows_the_same(found):
    for rank, one in enumerate(found):
        assert one["sum"] == {"a": 3.0, "own0": 5.0, "own1": 5.0}
        assert one["max"]["a"] == 1.0 and one["max"]["nan"] != one["max"]["nan"]
        assert one["any"] == (True, False)
        assert one["first"].startswith("ZeroDivisionError")
        assert one["mesh"].startswith("ConfigError: dist.shard_ranks=3: 2 ranks do not divide")
        assert one["EveryRank"] == (list("abcde")[rank::2], list("ABCDE"))
        assert one["LeaderOnly"] == ([] if rank else list("abcde"), list("ABCDE"))
        assert one["EveryRank relay"] == [list("acebd")]
        assert one["LeaderOnly relay"] == [["a"], list("bcde")]


@pytest.mark.parametrize("keep", ranks.KEEP)
@pytest.mark.parametrize("family", ranks.FAMILIES)
def test_gradients_of_two_ranks_are_those_of_one_process(found, family, keep):
    """Three groups on one rank and seven on the other, in one, two and four micro-batches, and
    all of them on either rank."""
    policy = ranks.policy_of(family, ONE, keep)
    want = ranks.gradients(policy, pack(ranks.groups(), 10_000))
    for name in ranks.CUTS:
        for rank in (0, 1):
            assert error(found[rank][f"{family} {keep} {name}"], want) <= 1e-6, name


@pytest.mark.parametrize("family", ranks.SPLIT)
def test_gradients_of_a_split_head_are_those_of_one_process(found, family):
    """In float64, and in float32 as close to that as one process is."""
    batches = pack(ranks.groups(), 10_000)
    policy = ranks.policy_of(family, ONE, dtype=torch.float64)
    with ranks.Wide():
        want = ranks.gradients(policy, batches)
        other = ranks.gradients(policy, batches, ranks.TRUNCATE)
    rows = [one[f"{family} split rows"] for one in found]
    assert sum(rows) == ranks.V and min(rows) > 0
    for one in found:
        for name in ranks.CUTS:
            assert error(one[f"{family} split {name}"], want) <= 1e-12, name
        assert error(one[f"{family} split truncate"], other) <= 1e-12
    narrow = ranks.policy_of(family, ONE).to(torch.float64)
    with ranks.Wide():
        want = ranks.gradients(narrow, batches)
    alone = ranks.gradients(ranks.policy_of(family, ONE), batches)
    for one in found:
        assert error(one[f"{family} split float32"], want) <= 2 * error(alone, want)


def test_adapters_beside_weights_of_another_type_and_merged_weights(found):
    want = ranks.gradients(Policy(ranks.adapted("qwen3")), pack(ranks.groups(), 10_000))
    plain = ranks.gradients(
        Policy(ranks.adapted("qwen3", torch.bfloat16)), pack(ranks.groups(), 10_000)
    )
    merged = merged_state(ranks.adapted("qwen3"), keep=True)
    for one in found:
        assert all(gradient.dtype == torch.float32 for gradient in one["half"].values())
        assert 0 < error(one["half"], want) <= 2 * error(plain, want)
        assert error(one["merged"], merged) <= 1e-6


def test_replicas_beside_shards_and_scores(found):
    policy = ranks.policy_of("qwen3", ONE)
    want = ranks.gradients(policy, pack(ranks.groups(), 10_000))
    norm = float(torch.nn.utils.get_total_norm(want.values()))
    for rank in (0, 1):
        assert error(found[rank]["replicas"], want) <= 1e-6
        assert found[rank]["norm"] == pytest.approx(norm, rel=1e-6)
        score_A = policy.score(ranks.cut("3-7 in 1", rank)[0], 0.7)
        for name in ("score", "split score"):
            torch.testing.assert_close(found[rank][name], score_A, atol=1e-6, rtol=0)


def test_a_split_head_with_the_same_rows_on_both_ranks(found):
    policy = ranks.policy_of("qwen3", ONE, dtype=torch.float64)
    batches = pack(ranks.groups(), 10_000)
    with ranks.Wide():
        want = ranks.gradients(policy, batches)
    assert all(error(one["split replicas"], want) <= 1e-12 for one in found)


def test_a_head_that_is_tied_to_more_than_a_table_is_not_split():
    with open_world("cpu", mesh=True) as world:
        message = r"dist\.split_head=true: the head is tied to a Gemma2TextScaledWordEmbedding"
        with pytest.raises(ConfigError, match=message):
            ranks.policy_of("gemma-softcap", world, split_head=True)
    with pytest.raises(ConfigError, match=r"dist\.split_head=true with dist\.cpu_offload=true"):
        override(quickstart(), ["dist.split_head=true", "dist.cpu_offload=true"])


def test_mixed_precision_keeps_weights_and_gradients_in_float32(found):
    """Its gradients are as far from the truth as those of a model that is bfloat16 throughout."""
    want = ranks.gradients(ranks.policy_of("qwen3", ONE), pack(ranks.groups(), 10_000))
    half = Policy(ranks.tiny("qwen3", torch.bfloat16)).train()
    rounded = ranks.gradients(half, pack(ranks.groups(), 10_000))
    for one in found:
        assert one["mixed dtypes"] == ({torch.float32}, torch.bfloat16)
        assert all(gradient.dtype == torch.float32 for gradient in one["mixed"].values())
        for name in ("mixed", "split mixed"):
            assert 0 < error(one[name], want) <= 2 * error(rounded, want)


def test_mixed_precision_and_offload_run_as_one_process(tmp_path):
    pairs = ["model.dtype=mixed", "dist.cpu_offload=true", "iterations=1", "loss.kl_coef=0.01"]
    config = override(ranks.settings(), pairs)
    with pytest.raises(ConfigError, match=r"model\.dtype=mixed: expected a world with a mesh"):
        trainer.train(config, quickstart(), tmp_path / "refused")
    with open_world("cpu", mesh=True) as world:
        trainer.train(config, quickstart(), tmp_path / "run", world=world)
    stages = [record for record in records(tmp_path / "run") if record["kind"] == "stage"]
    assert any(record["steps"] for record in stages)


@pytest.mark.parametrize("name", ranks.OPTIMISERS)
def test_weights_agree_after_ten_steps_and_across_checkpoints(found, folder, name):
    learner = ranks.learner_of(name, ONE, folder)
    ranks.learn(learner, ranks.STEPS // 2)
    losses = ranks.learn(learner, ranks.STEPS // 2)
    want = ranks.state(learner)
    for rank in (0, 1):
        for way in (name, f"{name} of-1", f"{name} of-2"):
            assert error(found[rank][way], want) <= 1e-5, way
            assert found[rank][f"{way} losses"] == pytest.approx(losses, rel=1e-5, abs=1e-7)
    other = ranks.learner_of(name, ONE, folder)
    checkpoint.load_weights(folder / f"{name}-of-2", other.policy.model, other.optimizers)
    ranks.learn(other, ranks.STEPS // 2)
    assert error(ranks.state(other), want) <= 1e-5


def test_matrices_that_do_not_divide_move_as_in_one_process(found):
    first, second = (one["odd rows"] for one in found)
    assert first == [4, 4, 4, 1, 1, 8, 2, 1] and second == [3, 3, 3, 0, 0, 8, 1, 0]
    assert all(all(one["odd matrices"]) for one in found)


def test_a_damaged_checkpoint_is_named_on_both_ranks(found):
    assert found[0]["damaged"] == found[1]["damaged"]
    named = r"could not read \S+damaged \(rank [01]\): .*__1_0\.distcp is damaged.*Remove"
    assert re.match(named, found[0]["damaged"])


def test_a_disk_that_is_full_for_one_rank_refuses_the_checkpoint_of_both(found):
    for one in found:
        assert re.match(r"could not write .*\(rank 1\).*No space left.*intact", one["refused"])
        assert one["refused, on disk"] == []
        assert "taken" not in one and one["taken, on disk"] == ["1"]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_both(found, folder):
    for one in found:
        assert one["skip"] == (0, 1) and one["skip unchanged"]
    (kept,) = (folder / "skip" / "bad").glob("*/step.pt")
    saved = torch.load(kept, weights_only=True)
    actions = sum(len(credit.trajectory.turns[0].completion.action_A)
                  for group in ranks.groups() for credit in group)  # fmt: skip
    assert sum(len(batch["action_A"]) for batch in saved["batches"]) == actions


def test_the_sampler_reads_a_copy_that_is_brought_up_to_date(found):
    assert all(one["mirror"] and one["mirror moved"] for one in found)


def close(got: Any, want: Any) -> bool:
    """Equal, but for the rounding of sums that were added in another order."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[k], want[k]) for k in want)
    if isinstance(want, float):
        return got == pytest.approx(want, rel=1e-3, abs=1e-4)
    return got == want


def records(out: Path) -> list[dict[str, Any]]:
    return [untimed(line) for line in read_lines(out / "records.jsonl")]


def same_run(got: Path, want: Path) -> None:
    """Transcripts equal to the letter, records to rounding; cut otherwise, groups share less."""
    assert (got / "samples.jsonl").read_text() == (want / "samples.jsonl").read_text()
    assert len(records(got)) == len(records(want))
    for one, other in zip(records(got), records(want), strict=True):
        assert close({**one, "tokens_packed": 0}, {**other, "tokens_packed": 0}), (one, other)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    train_once(folder / "run-of-1")
    return folder / "run-of-1"


def test_two_ranks_sample_the_groups_of_one_process(folder, alone):
    same_run(folder / "run-of-2", alone)
    ledger = json.loads((folder / "run-of-2" / "summary.json").read_text())
    assert ledger["devices"] == 2
    assert closure(folder / "run-of-2") == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("way", ["served", "streamed"])
def test_what_the_leader_samples_is_what_both_train_on(folder, alone, way):
    same_run(folder / way, alone)


def test_every_rank_is_in_the_timeline_and_profiled(folder):
    events = json.loads((folder / "streamed" / "trace.json").read_text())
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert lanes == {(0, 0), (1, 0), (0, 1)}  # both loops, and the rollouts beside the leader's
    ends = {rank: [e["ts"] + e["dur"] for e in events if e.get("dur") and e["pid"] == rank]
            for rank in (0, 1)}  # fmt: skip
    assert max(ends[0]) - min(ends[0]) == pytest.approx(max(ends[1]) - min(ends[1]), rel=0.1)
    assert len(list((folder / "streamed" / "profile").glob("rank-*.json"))) == 2


@pytest.mark.parametrize("way", ["2-to-2", "1-to-2", "2-to-1"])
def test_stopped_within_an_iteration_and_resumed_on_as_many_ranks_as_there_are(folder, alone, way):
    out = folder / way
    if way == "2-to-1":
        shutil.copytree(folder / "stopped-of-2", out)
        train_once(out, resume=True)
    same_run(out, alone)
    if way == "2-to-2":
        assert records(out) == records(folder / "run-of-2")


def test_the_model_of_two_ranks_is_whole_and_in_one_piece(folder, alone):
    from transformers import AutoModelForCausalLM

    got, want = (
        AutoModelForCausalLM.from_pretrained(out / "final").state_dict()
        for out in (folder / "run-of-2", alone)
    )
    assert error(got, want) <= 1e-3


def test_one_process_is_a_world(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.mesh) == (0, 1, None) and world.leader
        assert world.first(lambda: 7) == 7 and world.sum({"a": 2.0}) == {"a": 2.0}


def test_meshes():
    assert mesh_shape(16, 8) == ((2, 8), ("replicate", "shard"))
    assert mesh_shape(4, 0) == mesh_shape(4, 4) == ((4,), ("shard",))
    with pytest.raises(ConfigError, match=r"dist\.shard_ranks=3: 4 ranks do not divide"):
        mesh_shape(4, 3)
