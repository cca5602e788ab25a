"""Packing a million tokens on one core: time, and how even the parts of eight ranks are.

    .venv/bin/python scripts/bench pack --no-record

`rows` makes the same tensors without sharing, a row a turn; both must score the same actions at the
same depths before they are timed. Ids are random, lengths lognormal or fixed (`PackCase`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from fastturn.cut import COST
from fastturn.pack import PackedBatch, pack
from fastturn.types import Boundary, Completion, Credit, Ending, Ids, Stop, Trajectory, Turn

from .command import one_of, options, parser, report
from .measure import Provider, check_equal, ratios, seconds
from .record import Measured

RANKS = 8


@dataclass(frozen=True, slots=True)
class PackCase:
    """`groups` of `siblings` episodes of `turns` turns. The first context is uniform between the
    two numbers of `context`, actions are lognormal around `action` with the spread `sigma`, an
    observation has `observed` tokens, and every turn drops `dropped` tokens of its history."""

    name: str
    groups: int
    siblings: int
    turns: int
    context: tuple[int, int]
    action: int
    sigma: float = 0.4
    observed: int = 0
    dropped: int = 0
    budget: int = 65536


CASES = (
    PackCase("pack/siblings", 64, 8, 1, (2000, 8000), 1200),
    PackCase("pack/episodes", 16, 8, 32, (500, 500), 150, observed=85),
    PackCase("pack/stripped", 16, 8, 32, (500, 500), 150, observed=160, dropped=75),
)


def groups(case: PackCase) -> list[list[Credit]]:
    """Credits of a case; the same seed gives every provider the same numbers."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Ids:
        return rng.integers(0, 151936, count, dtype=np.int32)

    def episode(context_T: Ids) -> Credit:
        turns: list[Turn] = []
        running = 0
        for number in range(case.turns):
            kept = max(0, running - case.dropped) if number else 0
            pushed_T = ids(case.observed) if number else context_T
            action_A = ids(max(1, int(case.action * rng.lognormal(0, case.sigma))))
            done = Completion(action_A, np.full(len(action_A), -1, np.float32), 0, Stop.STOP)
            turns.append(Turn(Boundary(kept, pushed_T), done))
            running = kept + len(pushed_T) + len(action_A)
        path = Trajectory("task", 0, tuple(turns), Ending.FINISHED)
        weight_U = np.full(case.turns, 1 / path.tokens_sampled)
        return Credit(path, rng.normal(size=case.turns), weight_U)

    made = []
    for _ in range(case.groups):
        context_T = ids(int(rng.integers(case.context[0], case.context[1] + 1)))
        made.append([episode(context_T) for _ in range(case.siblings)])
    return made


def rows(credits: Sequence[Sequence[Credit]]) -> Iterator[PackedBatch]:
    """Tensors of every turn on its own, its whole context included."""
    for group in credits:
        for credit in group:
            pairs = zip(credit.trajectory.turns, credit.trajectory.contexts(), strict=True)
            for number, (turn, context_T) in enumerate(pairs):
                done = turn.completion
                token_T = torch.from_numpy(np.concatenate([context_T, done.action_A[:-1]])).long()
                size, actions = len(token_T), len(done.action_A)
                yield PackedBatch(
                    token_T=token_T,
                    position_T=torch.arange(size),
                    end_T=torch.full((size,), size),
                    source_A=torch.arange(size - actions, size),
                    action_A=torch.from_numpy(done.action_A).long(),
                    behavior_A=torch.from_numpy(done.logprob_A),
                    advantage_A=torch.full((actions,), credit.advantage_U[number]),
                    weight_A=torch.full((actions,), credit.weight_U[number]),
                    turn_A=torch.zeros(actions, dtype=torch.int64),
                    version_U=torch.tensor([done.version]),
                    trajectory_U=torch.zeros(1, dtype=torch.int64),
                    group_U=torch.zeros(1, dtype=torch.int64),
                    tokens_flat=size,
                )


def summary(batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """What both layouts must agree on: sums over actions of weight by depth, id and advantage."""
    totals = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        weight_A = batch.weight_A.double()
        depth_A = batch.position_T[batch.source_A]
        for place, value_A in enumerate((weight_A, depth_A, batch.action_A, batch.advantage_A)):
            totals[place] += (weight_A * value_A).sum() if place else len(weight_A)
    return list(totals)


def cost(batch: PackedBatch) -> float:
    """Of training on it, by the model that balances ranks."""
    pairs = float((batch.position_T + 1).sum())
    return COST.token * batch.tokens_packed + COST.pair * pairs + COST.action * len(batch.action_A)


def measure(case: PackCase, repeats: int) -> Iterator[Measured]:
    """Time beside `rows`, sizes, and the balance over ranks of one case."""
    credits, config = groups(case), asdict(case)
    checked: dict[str, Provider] = {
        "rows": lambda: summary(list(rows(credits))),
        "fastturn": lambda: summary(pack(credits, case.budget)),
    }
    check_equal(checked, "rows", 1e-5)
    run: dict[str, Provider] = {
        "rows": lambda: [batch.token_T for batch in rows(credits)],
        "fastturn": lambda: [batch.token_T for batch in pack(credits, case.budget)],
        "8 ranks": lambda: [b.token_T for b in pack(credits, case.budget, rank=0, ranks=RANKS)],
    }
    times = seconds(run, repeats)
    packed = sum(batch.tokens_packed for batch in pack(credits, case.budget))
    flat = sum(batch.tokens_packed for batch in rows(credits))
    for name, values in times.items():
        yield Measured(case.name, name, "time", "s", tuple(values), config)
    for name, tokens in (("rows", flat), ("fastturn", packed)):
        yield Measured(case.name, name, "tokens", "1e6", (tokens / 1e6,), config)
    million = tuple(1e6 * value / packed for value in times["fastturn"])
    yield Measured(case.name, "fastturn", "time / 1e6 packed", "s", million, config)
    share = ratios(times["fastturn"], times["rows"])
    yield Measured(case.name, "fastturn", "time / rows", "1", share, config)
    shares = [pack(credits, case.budget, rank=rank, ranks=RANKS) for rank in range(RANKS)]
    costs = np.array([[cost(batch) for batch in batches] for batches in shares])
    mean = costs.sum() / RANKS
    for metric, value in (
        ("dearest rank / mean", costs.sum(axis=1).max()),
        ("waiting included / mean", costs.max(axis=0).sum()),
    ):
        yield Measured(case.name, "8 ranks", metric, "1", (float(value / mean),), config)


def arguments() -> argparse.ArgumentParser:
    known = {case.name.removeprefix("pack/"): case for case in CASES}
    found = parser("pack", __doc__, repeats=5)
    found.add_argument(
        "cases", nargs="*", type=one_of("case", known), help=f"any of {', '.join(known)}"
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = options(arguments(), argv)
    args.device = "cpu"
    chosen = [c for c in CASES if not args.cases or c.name.removeprefix("pack/") in args.cases]
    return report("pack", (one for c in chosen for one in measure(c, args.repeats)), args)
