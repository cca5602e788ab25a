"""One rank of the two that `test_dist.py` starts: `ranks.py FOLDER`, with torchrun's variables set.

Everything that needs two processes runs here once; what it found goes to FOLDER/rank-N.pt, and the
tests look at that.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from test_overlap import OneByOne
from test_policy import OBJECTIVE, REFERENCE, V, Wide, tiny
from test_trainer import small

from fastturn import activations, checkpoint, engines, lora, models, trainer
from fastturn.config import Config, Optim, Sampling, Warm, override
from fastturn.dist import DistError, EveryRank, LeaderOnly, World, mesh_shape, open_world
from fastturn.learner import Learner
from fastturn.loss import Objective
from fastturn.optim import Muon, Optimizers, training_optimizer, warm_optimizer
from fastturn.pack import PackedBatch, pack
from fastturn.play import Unmetered
from fastturn.policy import Policy
from fastturn.recipes import quickstart
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.sharding import Mirror, merged_state, shard, whole, whole_state
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn

STEPS = 10
FAMILIES = ("qwen3", "llama", "qwen3+lora", "llama+lora")  # tied head, head of its own
SPLIT = (*FAMILIES, "phi-head-bias")
CUTS = ("3-7 in 1", "3-7 in 2", "3-7 in 4", "all-none in 1", "none-all in 2")
TRUNCATE = replace(OBJECTIVE, surrogate="truncate")
CONFIG = Config(sampling=Sampling(temperature=OBJECTIVE.temperature), pack_tokens=60)
OPTIMISERS: dict[str, Callable[[torch.nn.Module], Optimizers]] = {
    "adamw": lambda model: training_optimizer(model, Optim(lr=1e-3, warmup_steps=3)),
    "lora": lambda model: training_optimizer(model, Optim(lr=1e-3)),
    "muon": lambda model: warm_optimizer(model, Warm(steps=20, lr=1e-3, muon_lr=0.02)),
    "split": lambda model: training_optimizer(model, Optim(lr=1e-3, warmup_steps=3)),
}


def groups(count: int = 10) -> list[list[Credit]]:
    """Groups of three siblings of unequal lengths after contexts of unequal lengths."""
    rng = np.random.default_rng(5)
    made = []
    for group in range(count):
        boundary = Boundary(0, rng.integers(0, V, 3 + 2 * group).astype(np.int32))
        siblings = []
        for _ in range(3):
            action_A = rng.integers(0, V, rng.integers(1, 6)).astype(np.int32)
            logprob_A = rng.normal(-3.5, 0.3, len(action_A)).astype(np.float32)
            turn = Turn(boundary, Completion(action_A, logprob_A, 0, Stop.STOP))
            trajectory = Trajectory(f"t{group}", 0, (turn,), Ending.FINISHED)
            siblings.append(Credit(trajectory, rng.normal(size=1), rng.uniform(0.02, 0.1, 1)))
        made.append(siblings)
    return made


def empty() -> PackedBatch:
    (batch,) = pack(groups(1), 10_000)
    names = [f.name for f in fields(PackedBatch) if f.name not in ("tokens_flat", "plans")]
    return PackedBatch(**{name: getattr(batch, name)[:0] for name in names}, tokens_flat=0)


def cut(name: str, rank: int) -> list[PackedBatch]:
    """The micro-batches of one rank; equally many on both, empty ones where work is lacking."""
    shares, count = name.split(" in ")
    first = {"3-7": 3, "all-none": 10, "none-all": 0}[shares]
    own = groups()[:first] if rank == 0 else groups()[first:]
    parts = [own[i :: int(count)] for i in range(int(count))]
    return [pack(part, 10_000)[0] if part else empty() for part in parts]


def gradients(
    policy: Policy, batches: Sequence[PackedBatch], objective: Objective = OBJECTIVE
) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    for batch in batches:
        reference_A = torch.full_like(batch.behavior_A, REFERENCE)
        policy(batch, objective, reference_A).loss.backward()
    parameters = policy.model.named_parameters()
    return {n: whole(p.grad).clone() for n, p in parameters if p.requires_grad}


def adapted(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model whose adapters change its weights by about a fifth."""
    model = tiny(family, dtype)
    lora.adapt(model, models.blocks(model), override(Config(), ["model.lora_rank=4"]))
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model


KEEP = ("none", "full", "selective")


def policy_of(
    family: str,
    world: World,
    keep: str = "none",
    split_head: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    name, plus, _ = family.partition("+")
    policy = Policy((adapted if plus else tiny)(name, dtype)).train()
    activations.keep(policy.model, keep)
    return shard(policy, world, split_head=split_head)


def learner_of(name: str, world: World, out: Path) -> Learner:
    family = "qwen3+lora" if name == "lora" else "qwen3"
    policy = policy_of(family, world, split_head=name == "split")
    optimizers = OPTIMISERS[name](policy.model)
    return Learner(policy, optimizers, CONFIG, Unmetered(), out, world=world)


def learn(learner: Learner, steps: int) -> list[float]:
    """Losses of steps on the same groups."""
    objective = replace(OBJECTIVE, kl_coef=0.0)
    batches = learner.pack(groups())
    return [
        learner.step(batches, objective, learner.optimizers).loss for _ in range(steps)
    ]  # fmt: skip


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in whole_state(learner.policy.model, keep=True).items()}


def agreement(world: World, found: dict[str, Any]) -> None:
    found["sum"] = world.sum({"a": 1.0 + world.rank, f"own{world.rank}": 5.0})
    found["max"] = world.max({"a": float(world.rank), "nan": math.nan if world.rank else 0.0})
    found["any"] = (world.any(world.rank == 1), world.any(False))
    for name, call in (
        ("first", lambda: world.first(lambda: 1 / 0)),
        ("mesh", lambda: mesh_shape(2, 3)),
    ):
        try:
            call()
        except (ZeroDivisionError, DistError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    items = list("abcde")
    for kind in (EveryRank, LeaderOnly):
        peers = kind(world, Unmetered())
        own = list(peers.mine(items))
        found[kind.__name__] = (own, peers.join([item.upper() for item in own]))
        found[f"{kind.__name__} relay"] = [*peers.relay([own[:1], own[1:]])]


def sharded(world: World, found: dict[str, Any]) -> None:
    """Gradients of every cut, and of replicas beside shards."""
    for family in FAMILIES:
        for keep in KEEP:
            policy = policy_of(family, world, keep)
            for name in CUTS:
                found[f"{family} {keep} {name}"] = gradients(policy, cut(name, world.rank))
    shape, names = mesh_shape(2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    replicas = replace(world, mesh=mesh)
    policy = policy_of("qwen3", replicas)
    found["replicas"] = gradients(policy, cut("3-7 in 2", world.rank))
    found["norm"] = float(
        whole(torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()]))
    )
    policy = Policy(tiny("qwen3", torch.float32)).train()
    mirror = Mirror(policy, world, mixed=True)
    shard(policy, world, mixed=True)
    found["mixed"] = gradients(policy, cut("3-7 in 2", world.rank))
    found["mixed dtypes"] = (
        {p.dtype for p in policy.parameters()},
        mirror.policy.head().weight_VD.dtype,
    )
    policy = shard(Policy(adapted("qwen3", torch.bfloat16)).train(), world)
    found["half"] = gradients(policy, cut("3-7 in 2", world.rank))
    policy = policy_of("qwen3+lora", world)
    found["merged"] = merged_state(policy.model, keep=True)
    batch = cut("3-7 in 1", world.rank)[0]
    for name, split_head in (("score", False), ("split score", True)):
        found[name] = policy_of("qwen3", world, split_head=split_head).score(batch, 0.7)
    split(world, found, replicas)


def split(world: World, found: dict[str, Any], replicas: World) -> None:
    """Heads that are split over ranks, in float64, where only what is wrong differs; then with the
    same rows on both ranks, and in mixed precision."""
    cuts = {name: cut(name, world.rank) for name in CUTS}
    for family in SPLIT:
        policy = policy_of(family, world, split_head=True, dtype=torch.float64)
        found[f"{family} split rows"] = policy.head().weight_VD.to_local().shape[0]
        with Wide():
            for name, batches in cuts.items():
                found[f"{family} split {name}"] = gradients(policy, batches)
            found[f"{family} split truncate"] = gradients(policy, cuts["3-7 in 2"], TRUNCATE)
        policy = policy_of(family, world, split_head=True)
        found[f"{family} split float32"] = gradients(policy, cuts["3-7 in 2"])
    policy = policy_of("qwen3", replicas, split_head=True, dtype=torch.float64)
    with Wide():
        found["split replicas"] = gradients(policy, cuts["3-7 in 2"])
    policy = Policy(tiny("qwen3", torch.float32)).train()
    shard(policy, world, mixed=True, split_head=True)
    found["split mixed"] = gradients(policy, cut("3-7 in 2", world.rank))


def stepped(world: World, found: dict[str, Any], folder: Path) -> None:
    """Ten steps of each optimiser, a checkpoint in their middle, and those of one process."""
    for name in OPTIMISERS:
        learner = learner_of(name, world, folder)
        learn(learner, STEPS // 2)
        args = (learner.policy.model, learner.optimizers, {"n": 1})
        checkpoint.save(folder / f"{name}-of-2", *args, world=world)
        found[f"{name} losses"] = learn(learner, STEPS // 2)
        found[name] = state(learner)
        for saved in ("of-1", "of-2"):
            other = learner_of(name, world, folder)
            path = folder / f"{name}-{saved}"
            checkpoint.load_weights(path, other.policy.model, other.optimizers, world)
            found[f"{name} {saved} losses"] = learn(other, STEPS // 2)
            found[f"{name} {saved}"] = state(other)


def odd_matrices(world: World, found: dict[str, Any]) -> None:
    """Muon where rows or experts do not divide, where a rank has none, and for more matrices than
    ranks."""
    shapes = [*[(7, 5)] * 3, *[(1, 6)] * 2, (16, 8), (3, 8, 4), (1, 4, 6)]

    def made() -> tuple[list[torch.nn.Parameter], Muon]:
        torch.manual_seed(1)
        matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        return matrices, Muon(matrices, 0.02, 0.1)

    whole_ones, alone = made()
    split_ones, together = made()
    for i, matrix in enumerate(split_ones):
        split_ones[i] = torch.nn.Parameter(distribute_tensor(matrix.data, world.mesh, [Shard(0)]))
    together.param_groups[0]["params"] = split_ones
    for _ in range(3):
        for one, other in zip(whole_ones, split_ones, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = distribute_tensor(one.grad, world.mesh, [Shard(0)])
        alone.step()
        together.step()
    pairs = zip(whole_ones, split_ones, strict=True)
    found["odd matrices"] = [torch.equal(one, whole(other)) for one, other in pairs]
    found["odd rows"] = [matrix.to_local().shape[0] for matrix in split_ones]


def damaged(world: World, found: dict[str, Any], folder: Path) -> None:
    """A checkpoint with one wrong byte, at which only one of the ranks looks."""
    path = folder / "damaged"
    if world.leader:
        shutil.copytree(folder / "adamw-of-2", path)
        shards = path / "__1_0.distcp"
        content = bytearray(shards.read_bytes())
        content[len(content) // 2] ^= 1
        shards.write_bytes(content)
    world.barrier()
    learner = learner_of("adamw", world, folder)
    try:
        checkpoint.load_weights(path, learner.policy.model, learner.optimizers, world)
    except checkpoint.CheckpointError as error:
        found["damaged"] = str(error)


def refused(world: World, found: dict[str, Any], folder: Path) -> None:
    """The disk of one rank takes nothing, then something again."""

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    learner = learner_of("adamw", world, folder)
    place = folder / "refused" / "1"
    write = checkpoint.dcp.FileSystemWriter.write_data
    for tried in ("refused", "taken"):
        checkpoint.dcp.FileSystemWriter.write_data = (
            full if tried == "refused" and world.rank == 1 else write
        )
        try:
            args = (learner.policy.model, learner.optimizers, {"n": 1})
            checkpoint.save(place, *args, world=world)
        except checkpoint.CheckpointError as error:
            found[tried] = str(error)
        world.barrier()
        found[f"{tried}, on disk"] = sorted(path.name for path in place.parent.glob("*"))
        world.barrier()


def skipped(world: World, found: dict[str, Any], folder: Path) -> None:
    """A loss that is not finite on one rank only."""
    learner = learner_of("adamw", world, folder / "skip")
    before = state(learner)
    forward = Policy.forward

    def poisoned(self: Policy, *args: Any) -> Any:
        output = forward(self, *args)
        return replace(output, loss=output.loss * math.nan) if world.rank == 1 else output

    Policy.forward = poisoned
    objective = replace(OBJECTIVE, kl_coef=0.0)
    step = learner.step(learner.pack(groups()), objective, learner.optimizers)
    Policy.forward = forward
    found["skip"] = (step.steps, step.skipped)
    found["skip unchanged"] = all(torch.equal(before[n], t) for n, t in state(learner).items())


def mirrored(world: World, found: dict[str, Any], folder: Path) -> None:
    """What is sampled from a refreshed copy is what the split weights score."""
    policy = Policy(tiny("qwen3", torch.float32))
    mirror = Mirror(policy, world)
    shard(policy, world)
    optimizers = OPTIMISERS["adamw"](policy.model)
    learner = Learner(policy, optimizers, CONFIG, Unmetered(), folder, world=world)
    sampler = LocalSampler(mirror.policy)
    request = [Request(np.arange(5, dtype=np.int32), 6, (1, 2))]
    before = sampler.sample(request, SamplingParams(1.0, (2,)))
    learn(learner, 2)
    mirror.refresh(1)
    sampler.publish(1)
    after = sampler.sample(request, SamplingParams(1.0, (2,)))
    own = dict(mirror.policy.model.named_parameters())
    found["mirror"] = all(torch.equal(own[n], t) for n, t in state(learner).items())
    found["mirror moved"] = not np.array_equal(before[0][0].logprob_A, after[0][0].logprob_A)


def stop_at(iteration: int, stage: int, rank: int | None = None) -> Callable[[], None]:
    """Ask for a stop there, on one rank only if given; returns what undoes it."""
    original = trainer.stop_if_asked

    def ask(run: Any) -> None:
        here = (run.cursor.iteration, run.cursor.stage) == (iteration, stage)
        if here and rank in (None, run.world.rank):
            run.stop.set()
        original(run)

    trainer.stop_if_asked = ask
    return lambda: setattr(trainer, "stop_if_asked", original)


def runs(world: World, folder: Path) -> None:
    """A whole run; one stopped in the middle of an iteration by rank 1, and resumed; one that was
    stopped as one process, resumed on two."""
    config = settings()
    train = lambda out, resume: trainer.train(config, quickstart(), out, resume, world)  # noqa: E731
    train(folder / "run-of-2", False)
    undo = stop_at(1, 1, rank=1)
    try:
        train(folder / "stopped-of-2", False)
    except KeyboardInterrupt:
        undo()
    if world.leader:
        shutil.copytree(folder / "stopped-of-2", folder / "2-to-2")
        shutil.copytree(folder / "stopped-of-1", folder / "1-to-2")
    world.barrier()
    train(folder / "2-to-2", True)
    # Servers are the leader's; a sampler in its process stands for them.
    engines.ENGINES["vllm"] = engines.ENGINES["local"]
    served = override(config, ["rollout.engine=vllm", "rollout.urls=http://127.0.0.1:9"])
    apart = override(served, ["dist.split_head=true"])
    trainer.train(apart, quickstart(), folder / "served", False, world)
    engines.ENGINES["vllm"] = lambda config, policy, meter, progress: OneByOne(policy)
    streamed = override(served, ["rollout.overlap=stream", "trackers=trace,profile"])
    trainer.train(streamed, quickstart(), folder / "streamed", False, world)
    train(folder / "1-to-2", True)


def settings() -> Config:
    pairs = ["warm.steps=6", "iterations=2", "tasks=5", "data.eval_tasks=5", "optim.lr=1e-3"]
    return override(small(*pairs, "loss.kl_coef=0.01"), [])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with open_world("cpu") as world:
        agreement(world, found)
        sharded(world, found)
        stepped(world, found, folder)
        odd_matrices(world, found)
        damaged(world, found, folder)
        refused(world, found, folder)
        skipped(world, found, folder)
        mirrored(world, found, folder)
        torch.save(found, folder / f"rank-{world.rank}.pt")
        runs(world, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
