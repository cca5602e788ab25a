"""The loop. Data goes one way:

    tasks ─ roots ─ grow ─> trunks ─ stages, k = K-1 … 0 ─┐    (`algorithms.py`: or the roots)
                                                          v
          publish ─> fork ─> SiblingGroups ─> credit ─> pack ─> PackedBatch ─> policy(batch)
             ^                                                                     │ loss
             └────────── version + 1 <── optimiser step <── gradients <────────────┘
                                                │
                          meter.record(stage), checkpoint(cursor)

A `Cursor` says what comes next; everything random is a pure function of the seed and the cursor, so
a run that was killed and resumed repeats the one that was not.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastturn import tree
from fastturn.algorithms import algorithm_of
from fastturn.channels import faded, held, variance
from fastturn.config import Config
from fastturn.demos import demonstrate
from fastturn.dist import World
from fastturn.envs.base import Task
from fastturn.episode import Point, stream_seed
from fastturn.evaluate import Evaluation, evaluate
from fastturn.learner import supervised
from fastturn.ledger import levels
from fastturn.loss import Objective
from fastturn.meter import Meter
from fastturn.play import Unmetered
from fastturn.progress import Progress
from fastturn.progress import Task as Bar
from fastturn.records import read_lines
from fastturn.report import write_report
from fastturn.run import Run, RunError, open_run
from fastturn.sampler.base import Streaming
from fastturn.sampler.server import EngineError
from fastturn.tally import book, iteration_record, result_rows, run_summary
from fastturn.transcripts import transcripts
from fastturn.tree import Gathered, Unfolding
from fastturn.types import Trajectory, Trunk

MOST_CUT = 0.3  # share of truncated episodes in the first iteration that earns a warning
__all__ = ["RunError", "train"]


def train(
    config: Config,
    recipe: Config,
    out: Path,
    resume: bool = False,
    world: World | None = None,
    *,
    price: float | None = None,
) -> dict[str, Any]:
    """Run `config` in the folder `out` and return its summary (also `out/summary.json`).

    `recipe` is the configuration before overrides (the report marks what differs). With `resume`
    the newest checkpoint of `out` continues; without it `out` must not hold a run. Raises
    `RunError`, `ConfigError` or `DomainError` with a remedy, and `KeyboardInterrupt` after Ctrl-C,
    when the step in hand is finished and saved. In a `world` of several processes all of them call
    it with the same arguments; only the leader writes to `out` (but for its shards) and prints.
    `price` of a device-hour: the summary tells money.
    """
    world = world or World.single(config.device)
    with (
        Path(os.devnull).open("w") as nowhere,
        Progress(stream=None if world.leader else nowhere) as progress,
        open_run(config, recipe, out, resume, progress, world=world) as run,
        saved_when_servers_fail(run),
    ):
        with interruptible(run):
            warm_start(run)
            evaluate_before(run)
            iterate(run)
        return finish(run, price)


def warm_start(run: Run) -> None:
    """Supervised steps on scripted demonstrations, packed and scored like everything else."""
    config, cursor = run.config, run.cursor
    if cursor.phase != "warm":
        return
    objective = Objective(temperature=1.0, on_policy=True)
    learner = replace(run.learner, clock=Unmetered())  # the warm start is one span
    with (
        run.meter.span("warm_start"),
        run.progress.task("warm start", config.warm.steps, cursor.warm_step) as bar,
    ):
        while cursor.warm_step < config.warm.steps:
            tasks = pick(run, cursor.warm_step, config.warm.batch, "warm")
            key = (config.seed, "warm", cursor.warm_step)
            own = run.rollout.peers.mine(tasks)
            shown = demonstrate(run.domain, run.rollout.renderer, own, config, key)
            shown = run.rollout.peers.join(shown)
            batches = learner.pack(supervised(shown))
            lr = run.learner.optimizers.lr
            step = learner.step(batches, objective, learner.optimizers)
            cursor.warm_step += 1
            nll = -step.mean("logprob")
            if cursor.warm_step % 10 == 0 or cursor.warm_step == config.warm.steps:
                count = {"demonstrations": cursor.warm_step * config.warm.batch}
                kept = {name: _share(shown, name) for name in ("violation_free", "clean_success")}
                run.record("warm", {"step": cursor.warm_step, "loss": nll, "lr": lr} | count | kept)
            bar.advance(1, loss=nll)
            stop_if_asked(run)
    cursor.phase, cursor.version = "train", cursor.version + 1
    run.begin_training()


def _share(episodes: Sequence[Trajectory], name: str) -> float:
    return sum(getattr(episode, name) for episode in episodes) / len(episodes)


def evaluate_before(run: Run) -> None:
    """Held-out success of the policy that training starts from; then the first checkpoint."""
    if run.cursor.before:
        return
    run.cursor.before = held_out(run, "before").record()
    run.save()


def held_out(run: Run, split: str) -> Evaluation:
    """Evaluate on the held-out tasks and record it."""
    tasks = list(run.domain.eval_tasks)
    publish(run)
    with (
        run.meter.span("evaluation"),
        run.progress.task(f"evaluation {split}", 2 * len(tasks)) as bar,
    ):
        result = evaluate(watched(run, bar), tasks)
    record = {"iteration": run.cursor.iteration, "split": split, **result.record()}
    run.record("eval", record)
    run.progress.say(
        f"held-out success {split}: sampled {result.success:.1%}, greedy {result.greedy:.1%} "
        f"({len(tasks)} tasks; doing nothing {result.idle:.1%})"
    )
    return result


def iterate(run: Run) -> None:
    """All iterations that are left, each with its evaluation and checkpoint when they are due."""
    config, cursor = run.config, run.cursor
    with run.progress.task(config.algorithm, config.iterations, cursor.iteration) as bar:
        while cursor.iteration < config.iterations:
            record = one_iteration(run)
            bar.advance(1, success=record["success"], zero_advantage=record["zero_advantage_share"])
            if config.eval_every and cursor.iteration % config.eval_every == 0:
                held_out(run, "during")
            if config.save.every and cursor.iteration % config.save.every == 0:
                run.save()
            stop_if_asked(run)


def one_iteration(run: Run) -> dict[str, Any]:
    """Grow (or take up) the trunks, train every stage in reverse, record the iteration."""
    cursor = run.cursor
    run.learner.path_scale = faded(cursor.streak)
    publish(run)
    stages = list(plan_stages(run))
    name = f"iteration {cursor.iteration + 1}"
    following = next_roots(run)
    shares = tree.divided(following, tree.room(stages[cursor.stage :]))
    grown: list[Trunk] = []  # those of the next iteration
    with run.progress.task(name, len(stages), cursor.stage) as bar:
        for (turn, points), share in zip(stages[cursor.stage :], shares, strict=True):
            bar.update(turn=turn)
            grown += one_stage(run, turn, points, share)
            cursor.stage += 1
            bar.advance(1)
            if cursor.stage < len(stages):
                stop_if_asked(run)
    record = iteration_record(cursor.iteration, cursor.tally, cursor.totals)
    run.record("iteration", record)
    kept = held(record["violation_free_success"], run.config.anneal)
    cursor.streak = cursor.streak + 1 if kept else 0
    warn_silence(run)
    if cursor.iteration == 0 and cursor.tally["episodes"]:
        warn_truncation(run, cursor.tally["ending_truncated"] / cursor.tally["episodes"])
    cursor.iteration, cursor.stage, cursor.tally, run.trunks = (
        cursor.iteration + 1,
        0,
        Counter(),
        grown,
    )
    return record


def plan_stages(run: Run) -> Iterator[tuple[int, list[Point]]]:
    """(turn, boundaries to fork at) in training order."""
    config, cursor = run.config, run.cursor
    algorithm = algorithm_of(config)
    tasks = pick(run, cursor.iteration, config.tasks * algorithm.candidates, "train")
    if algorithm.stages is None:
        return iter([(0, run.rollout.roots(tasks))])
    if cursor.stage == 0:
        roots = run.rollout.roots(tasks, config.trunks)
        run.trunks = [*run.trunks, *grow_missing(run, roots)]
        order = {(root.task.id, root.trunk): place for place, root in enumerate(roots)}
        run.trunks.sort(key=lambda trunk: order[of_root(trunk)])
        book(cursor.tally, [trunk.trajectory for trunk in run.trunks], "trunk_")
    return algorithm.stages(run.trunks, config, (config.seed, cursor.iteration))


def grow_missing(run: Run, roots: Sequence[Point]) -> list[Trunk]:
    """The trunks of this iteration that were not grown beside the last one."""
    there = set(map(of_root, run.trunks))
    missing = [root for root in roots if (root.task.id, root.trunk) not in there]
    if not missing:
        return []
    with run.progress.task("trunks", len(run.rollout.peers.mine(missing))) as bar:
        return watched(run, bar).grow(missing, ("trunk", run.cursor.iteration))


def of_root(trunk: Trunk) -> tuple[str, int]:
    """Which root it grew from: task and number."""
    root = trunk.snapshots[0]
    return root.task.id, root.trunk


def next_roots(run: Run) -> list[Point]:
    """The roots of the next iteration's trunks, when these are to be grown beside this one's
    stages. Trunks only say which states are visited, so an older policy may grow them."""
    config, following = run.config, run.cursor.iteration + 1
    if (
        algorithm_of(config).stages is None
        or not overlaps(run, "prefetch")
        or following >= config.iterations
    ):
        return []
    return run.rollout.roots(pick(run, following, config.tasks, "train"), config.trunks)


def overlaps(run: Run, what: str) -> bool:
    """Whether servers are to work on this while the trainer does something else."""
    return isinstance(run.rollout.sampler, Streaming) and what in run.config.rollout.overlap


def one_stage(
    run: Run, turn: int, points: Sequence[Point], ahead: Sequence[Point] = ()
) -> list[Trunk]:
    """Publish, fork, train, record; returns the trunks that were grown from the roots `ahead`."""
    config, cursor = run.config, run.cursor
    algorithm = algorithm_of(config)
    behind = cursor.version - run.published
    if cursor.stage and algorithm.due(behind, run.cursor.tally["kl_behavior"]):
        publish(run)
    n = config.group_size - algorithm.unsampled
    mine = run.rollout.peers.mine
    with run.progress.task(f"turn {turn + 1}", len(mine(points)) * n + len(mine(ahead))) as bar:
        rollout, key = watched(run, bar), ("fork", cursor.iteration, turn)
        if algorithm.separate:
            following = ("trunk", cursor.iteration + 1)
            sampling: Unfolding | Gathered = rollout.unfold(points, n, key, ahead, following)
        else:
            sampling = Gathered(algorithm.sample(rollout, points, n, key))
        at_once = algorithm.whole_stage or not overlaps(run, "stream")
        record, credits = run.learner.update(
            *(sampling.groups(at_once), len(points)),
            *(run.published, (cursor.iteration, turn)),
            moved=run.published != cursor.version,
        )
        grown = sampling.trunks()
    position = {"iteration": cursor.iteration, "stage": turn, "version": cursor.version}
    for name, seconds in sampling.saved_s.items():
        cursor.totals[f"saved_{name}_s"] += seconds  # type: ignore[assignment]
    cursor.version += bool(record["steps"])
    sampled = [[credit.trajectory for credit in group] for group in credits]
    book(cursor.tally, [trajectory for group in sampled for trajectory in group])
    for name in ("tokens_packed", "tokens_flat", "groups", "groups_silent", "steps"):
        cursor.tally[name] += record[name]
    cursor.tally["kl_behavior"] = record["kl_behavior"]
    scale = run.learner.path_scale
    channels = asdict(variance(sampled, config, scale)) | {"path_scale": scale}
    for name in ("log_ratio_sum", "actions_first"):
        cursor.totals[name] += record.pop(name)
    saved = {"overlap_saved_s": sampling.saved_s}
    run.record("stage", position | record | channels | saved)
    for sample in transcripts(credits, run.tokenizer, cursor.iteration, turn):
        run.meter.sample(sample)
    return grown


def watched(run: Run, bar: Bar) -> tree.Rollout:
    """The run's rollout, with finished episodes and tokens a second shown on `bar`."""
    tokens = 0

    def show(ended: int, sampled: int) -> None:
        nonlocal tokens
        tokens += sampled
        bar.advance(ended, tokens_per_s=tokens / max(bar.elapsed_s, 1e-3))

    return replace(run.rollout, on_turn=show)


def publish(run: Run) -> None:
    """Hand the weights to the sampler. Also when they are the same as before: a resumed run begins
    with an empty prefix store, so an unbroken one has to, for both to compute the same bits."""
    with run.meter.span("publish"):
        run.mirror.refresh(run.cursor.version)
        run.rollout.sampler.publish(run.cursor.version)
    run.published = run.cursor.version


def finish(run: Run, price: float | None = None) -> dict[str, Any]:
    """Last evaluation, final model, summary and report; repeated harmlessly on a finished run."""
    cursor = run.cursor
    if cursor.phase != "done":
        after = held_out(run, "after")
        cursor.after, cursor.phase = after.record(), "done"
        run.save_final()
        run.save()
        run.settle()
    run.gather()
    return run.world.first(lambda: conclude(run, price))


def conclude(run: Run, price: float | None) -> dict[str, Any]:
    """Summary and report of a finished run: the leader's work."""
    assert isinstance(run.meter, Meter)
    reached = levels(read_lines(run.out / "records.jsonl"))
    values = run_summary(run.config, run.cursor) | {"levels": reached, "price_per_gpu_hour": price}
    summary = run.meter.summary(values)
    path = write_report(run.out)
    run.progress.table("run", result_rows(summary, path))
    return summary


def pick(run: Run, index: int, n: int, stream: str) -> list[Task]:
    """`n` training tasks of step `index`: a seeded shuffle an epoch, walked through in order."""
    tasks = run.domain.train_tasks
    chosen = []
    for place in range(index * n, (index + 1) * n):
        epoch, offset = divmod(place, len(tasks))
        key = stream_seed(run.config.seed, stream, epoch)
        chosen.append(tasks[shuffled(len(tasks), key, offset)])
    return chosen


def shuffled(length: int, key: int, offset: int) -> int:
    """Element `offset` of a seeded permutation of range(length), without making the permutation.

    An affine walk `a * offset + b mod length` with `a` coprime to `length` visits all elements.
    """
    rng = np.random.default_rng(key)
    b = int(rng.integers(length))
    a = int(rng.integers(1, length + 1))
    while math.gcd(a, length) != 1:
        a = a % length + 1
    return (a * offset + b) % length


def warn_silence(run: Run) -> None:
    """Say it, once, when an iteration had nothing to learn from."""
    tally, totals = run.cursor.tally, run.cursor.totals
    if tally["groups_silent"] < tally["groups"] or totals["silent_iterations"]:
        return
    totals["silent_iterations"] += 1
    if tally["groups"]:
        run.progress.warn(
            f"iteration {run.cursor.iteration + 1}: all {tally['groups']} groups are silent (equal "
            f"returns within each), rewards teach nothing; if it stays so, the tasks are too hard "
            f"or too easy for this policy: change them, raise group_size, or warm it up longer"
        )
    else:
        run.progress.warn(
            f"iteration {run.cursor.iteration + 1}: no group was left to train on; the warnings "
            f"above name the tasks or environments that failed"
        )


def warn_truncation(run: Run, share: float) -> None:
    if share > MOST_CUT:
        run.progress.warn(
            f"{share:.0%} of the first iteration's episodes were cut by their token budget and "
            f"earn nothing; raise sampling.turn_tokens (now {run.config.sampling.turn_tokens}) or "
            f"sampling.episode_tokens (now {run.config.sampling.episode_tokens})"
        )


def stop_if_asked(run: Run) -> None:
    """After Ctrl-C on any rank, which lets the step in hand finish: save, say how to go on, and
    leave."""
    if not run.world.any(run.stop.is_set()):
        return
    run.save()
    run.settle()
    run.progress.say(f"stopped and saved; go on with the same command and --resume --out {run.out}")
    raise KeyboardInterrupt


@contextmanager
def saved_when_servers_fail(run: Run) -> Iterator[None]:
    """Rollout servers fail between whole steps: weights and cursor are those of a checkpoint."""
    try:
        yield
    except EngineError as error:
        saved = run.world.size == 1  # shards need all ranks, and the others are not here
        if saved:
            run.save()
            run.settle()
        state = "The run is saved" if saved else "The last checkpoint is whole"
        raise RunError(
            f"{error}. {state}; go on with the same command and --resume --out {run.out}"
        ) from error


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """The first Ctrl-C asks for a stop at the next whole step, the second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, frame: object) -> None:
        if run.stop.is_set():
            raise KeyboardInterrupt
        run.stop.set()  # nothing is printed here: the signal may have come in the middle of a print

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
