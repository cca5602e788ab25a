"""The update of one group: packed (context read once) against one row for each sibling.

    .venv/bin/python scripts/bench steps --threads 1 --no-record

SmolLM2-135M's shape with random weights, float32, forward and backward. Both sides score the same
actions with the same loss kernel, so the ratio is what packing gives; the unpacked side runs the
unmodified model with torch's own attention. Losses and gradients must agree before timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastturn.kernels import turn_surrogate
from fastturn.pack import PackedBatch, pack
from fastturn.policy import Objective, Policy
from fastturn.types import Boundary, Completion, Credit, Ending, Stop, Trajectory, Turn

from .cases import StepCase
from .measure import Provider, check_equal, ratios, seconds, table
from .record import Measured, record, require_clean

TOLERANCE = 2e-3  # float32 through 30 layers, relative to the largest gradient


def smollm2_shape(layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's architecture with random weights, attention "sdpa"."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )


def group(case: StepCase) -> list[Credit]:
    """Siblings with random ids, distinct from the first token on, advantages of both signs."""
    rng = np.random.default_rng(0)
    context_T = rng.integers(0, 49152, case.context, dtype=np.int32)
    first_N = rng.permutation(49152)[: case.siblings].astype(np.int32)
    credits = []
    for number in range(case.siblings):
        action_A = rng.integers(0, 49152, case.tokens, dtype=np.int32)
        action_A[0] = first_N[number]
        done = Completion(
            action_A=action_A,
            logprob_A=np.full(case.tokens, -np.log(49152), np.float32),
            version=0,
            stop=Stop.STOP,
        )
        turn = Turn(Boundary(0, context_T), done)
        trajectory = Trajectory("task", 0, (turn,), Ending.FINISHED)
        advantage_U = np.array([number - (case.siblings - 1) / 2])
        weight_U = np.array([1 / (case.siblings * case.tokens)])
        credits.append(Credit(trajectory, advantage_U, weight_U))
    return credits


def step_providers(case: StepCase) -> dict[str, Provider]:
    """Loss and the gradients of the first and last matrices, packed and unpacked."""
    model = smollm2_shape(case.layers)
    policy = Policy(model)
    group_ = group(case)
    (batch,) = pack([group_], budget_T=1 << 20)
    parameters = list(model.parameters())
    watched = [parameters[0], parameters[-2]]

    def step(loss: Tensor) -> Sequence[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        return [loss.detach(), *(p.grad for p in watched if p.grad is not None)]

    def packed() -> Sequence[Tensor]:
        model.set_attn_implementation("fastturn")
        return step(policy(batch, Objective(on_policy=True)).loss)

    row_BT, flat = unpacked(group_)

    def rows() -> Sequence[Tensor]:
        model.set_attn_implementation("sdpa")
        hidden_BTD = model.base_model(input_ids=row_BT, use_cache=False).last_hidden_state
        source_BTD = hidden_BTD[:, case.context - 1 : -1]
        out = turn_surrogate(
            source_BTD.flatten(0, 1),
            model.get_output_embeddings().weight,
            flat.action_A,
            advantage_A=flat.advantage_A,
            weight_A=flat.weight_A,
            clip_low=0.2,
            clip_high=0.2,
        )
        return step(out.loss)

    return {"rows": rows, "packed": packed}


def unpacked(credits: Sequence[Credit]) -> tuple[Tensor, PackedBatch]:
    """Ids [B, T] of whole sequences, and the actions of all rows in row order."""
    batches = [pack([[credit]], budget_T=1 << 20)[0] for credit in credits]
    sequences = [
        np.concatenate([turn.boundary.context_T, turn.completion.action_A]).astype(np.int64)
        for credit in credits
        for turn in credit.trajectory.turns
    ]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(batch, name) for batch in batches])

    names = [name for name in PackedBatch.__slots__ if name != "tokens_flat"]
    flat = PackedBatch(**{name: joined(name) for name in names}, tokens_flat=0)
    return torch.from_numpy(np.stack(sequences)), flat


def measure(case: StepCase, repeats: int) -> Iterator[Measured]:
    run, config = step_providers(case), asdict(case)
    check_equal(run, "rows", TOLERANCE)
    times = seconds(run, repeats)
    for name, values in times.items():
        yield Measured(case.name, name, "time", "s", tuple(values), config)
    gain = ratios(times["rows"], times["packed"])
    yield Measured(case.name, "packed", "speed-up over rows", "1", gain, config)
    share = tuple(x / case.ideal for x in gain)
    yield Measured(case.name, "packed", "speed-up / ideal", "1", share, config)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench steps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=StepCase().layers)
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args(argv)
    if not args.no_record:
        require_clean()
    torch.set_num_threads(args.threads)
    measured: list[Measured] = []
    for one in measure(StepCase(layers=args.layers), args.repeats):
        measured.append(one)
        print(table([one]), flush=True)
    if not args.no_record:
        print(f"recorded in {record('steps', measured, 'cpu')}")
    return 0
