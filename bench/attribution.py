"""What each saving of RTPO is worth: the same iterations with one of them switched off.

    .venv/bin/python scripts/bench attribution --no-record

Every way starts from the same warm policy and plays the same number of iterations; none changes an
estimate. Seconds are CPU seconds of this process, sampler included; their parts are spans of the
meter, wall-clock. Overlap needs rollout servers and has a benchmark of its own (`overlap`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np

import fastturn.pack
from fastturn import trainer
from fastturn.credit import Credits
from fastturn.pack import PackedBatch
from fastturn.run import Run
from fastturn.sampler.local import LocalSampler
from fastturn.trie import Indices, trie
from fastturn.types import Credit, Ids

from .command import options, parser, report
from .quickstarts import Varied, opened, warm_weights
from .races import PARTS, SHOWN, TASKS, spans
from .record import Measured


class Unskipped(Varied):
    """Reads and scores silent groups as well; their advantages are zero all the same."""

    def pack(self, credits: Credits, whole_groups: bool = False) -> list[PackedBatch]:
        scored = [[_scored(credit) for credit in group] for group in credits]
        return super().pack(scored, whole_groups)


def _scored(credit: Credit) -> Credit:
    """A silent one with a weight on its first turn, where it still changes nothing."""
    if not credit.silent:
        return credit
    return replace(credit, weight_U=np.eye(1, len(credit.weight_U))[0])


def unshared(sequences: Iterable[Ids]) -> tuple[Ids, Indices, Indices, list[Indices]]:
    """As `trie`, each sequence on its own.

    Example: [1, 2] and [1, 3] pack into tokens 1, 2, 1, 3 with positions 0, 1, 0, 1.
    """
    parts = [trie([sequence_T]) for sequence_T in sequences]
    starts = np.cumsum([0, *(len(tokens_T) for tokens_T, *_ in parts)])[: len(parts)]
    placed = list(zip(parts, starts, strict=True))
    return (
        np.concatenate([tokens_T for tokens_T, *_ in parts]),
        np.concatenate([position_T for _, position_T, *_ in parts]),
        np.concatenate([end_T + start for (_, _, end_T, _), start in placed]),
        [index_T + start for (*_, (index_T,)), start in placed],
    )


@contextmanager
def everything(run: Run) -> Iterator[None]:
    """As training does it."""
    yield


@contextmanager
def no_skipping(run: Run) -> Iterator[None]:
    run.learner = Unskipped(run)
    yield


@contextmanager
def no_sharing(run: Run) -> Iterator[None]:
    with mock.patch.object(fastturn.pack, "trie", unshared):
        yield


@contextmanager
def no_cache(run: Run) -> Iterator[None]:
    """Keys and values are forgotten between the turns of an episode."""
    assert isinstance(run.rollout.sampler, LocalSampler)
    run.rollout.sampler.store_bytes = 0
    yield


WAYS: dict[str, Callable[..., object]] = {
    "everything": everything,
    "silent groups trained": no_skipping,
    "contexts not shared": no_sharing,
    "cache not re-used": no_cache,
}


def cost(way: str, task: str, seed: int, warm_steps: int, iterations: int) -> dict[str, float]:
    """Seconds a thousand rollouts, in all and by part."""
    pairs = (*TASKS[task], f"seed={seed}")
    with opened((*pairs, "warm.steps=0", "iterations=100000")) as run:
        run.policy.load_state_dict(warm_weights(warm_steps, pairs))
        trainer.warm_start(run)  # no steps, but from here on it trains
        before, start_s = spans(run), time.process_time()
        with WAYS[way](run):  # type: ignore[attr-defined]
            for _ in range(iterations):
                trainer.one_iteration(run)
        spent_s = time.process_time() - start_s
        used = spans(run)
        used.subtract(before)
        drawn = run.cursor.totals["rollouts"]
    parts = {name: sum(used[span] for span in of) / 1e9 for name, of in PARTS.items()}
    shares = {"all": spent_s, **parts}
    return {name: 1000 * seconds / drawn for name, seconds in shares.items()}


def measure(task: str, seeds: int, warm_steps: int, iterations: int) -> Iterator[Measured]:
    """Costs of every way, and what they are over those of "everything" within a seed."""
    config = {"warm_steps": warm_steps, "iterations": iterations}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(seeds):  # seeds outside: a slow spell of the machine hits all alike
        for way in WAYS:
            found[way].append(cost(way, task, seed, warm_steps, iterations))
    first = found["everything"]
    for way, costs in found.items():
        for part in first[0]:
            values = tuple(one[part] for one in costs)
            yield Measured(
                f"attribution/{task}", way, f"{part} / 1000 rollouts", "s", values, config
            )
        pairs = zip(costs, first, strict=True)
        ratios = tuple(a["all"] / b["all"] for a, b in pairs)
        yield Measured(f"attribution/{task}", way, "cost / everything", "1", ratios, config)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser("attribution", __doc__, repeats=1)
    found.add_argument("--task", choices=TASKS, action="append", help=f"default: {SHOWN}")
    found.add_argument("--seeds", type=int, default=3)
    found.add_argument("--warm-steps", type=int, default=300)
    found.add_argument("--iterations", type=int, default=4)
    args = options(found, argv)
    args.device = "cpu"
    asked = (args.seeds, args.warm_steps, args.iterations)
    tasks = args.task or SHOWN
    return report("attribution", (m for task in tasks for m in measure(task, *asked)), args)
