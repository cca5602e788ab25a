"""`fastturn probe`: whether there is a signal to train on, measured before any training.

    recipe -> run in a folder that is thrown away -> warm start -> groups of whole episodes -> Probe

A group-relative update moves nothing but what varies within its group (RLVP, eq. 1), so the
variance of each reward within groups of the base policy says which of them can teach at all. That a
reward varies is necessary for it to help, not sufficient.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastturn import trainer
from fastturn.channels import variance
from fastturn.config import Config, ConfigError
from fastturn.dist import open_world
from fastturn.progress import Progress
from fastturn.run import Run, open_run
from fastturn.types import SiblingGroup, Trajectory

GROUPS = 64  # tasks that are tried
REACHED = 0.05  # share of groups that must vary in a reward for it to be called reachable
REWARDS = {
    "outcome": ("outcome",),
    "path": ("penalty", "fulfilment"),
    "penalty": ("penalty",),
    "fulfilment": ("fulfilment",),
    "progress": ("progress",),
}


@dataclass(frozen=True, slots=True)
class Channel:
    """One reward on its own: its variance within groups (mean over groups), its covariance with
    the outcome, and the share of groups that it differs in. `dead_updates`: the share of iterations
    expected to hold no such group at all, if groups were drawn anew."""

    variance: float
    cov_outcome: float
    live_groups: float
    dead_updates: float

    @property
    def reachable(self) -> bool:
        return self.live_groups >= REACHED


@dataclass(frozen=True, slots=True)
class Probe:
    """What the base policy does. `trained`: the rewards that this recipe trains on, together."""

    episodes: int
    group_size: int
    success: float
    violation_free: float
    clean_success: float  # solved, and no rule broken
    turns_mean: float
    hits: dict[str, float]  # path rules met, per episode
    channels: dict[str, Channel]
    trained: Channel

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def probe(config: Config, progress: Progress) -> Probe:
    """Warm start, then `GROUPS` groups of whole episodes; nothing is trained and nothing is left
    behind. Raises what opening a run raises."""
    config = replace(config, trackers=("none",))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastturn-")))
        world = stack.enter_context(open_world(config.device, mesh=config.needs_mesh))
        run = stack.enter_context(
            open_run(config, config, folder / "run", False, progress, world=world)
        )
        trainer.warm_start(run)
        trainer.publish(run)
        return measured(_groups(run), config)


def _groups(run: Run) -> list[SiblingGroup]:
    """Whole episodes of the policy, `group_size` of each task."""
    tasks = run.domain.train_tasks
    roots = run.rollout.roots([tasks[i] for i in range(min(GROUPS, len(tasks)))])
    n = run.config.group_size
    with run.progress.task("probe", len(roots) * n) as bar:
        return trainer.watched(run, bar).fork(roots, n, ("probe",))


def measured(groups: Sequence[SiblingGroup], config: Config) -> Probe:
    """The probe of some groups of whole episodes."""
    episodes: list[Trajectory] = [t for group in groups for t in group.siblings]
    n = max(1, len(episodes))
    hits = Counter(hit.rule for t in episodes for turn in t.turns for hit in turn.path)
    return Probe(
        episodes=len(episodes),
        group_size=config.group_size,
        success=sum(t.success for t in episodes) / n,
        violation_free=sum(t.violation_free for t in episodes) / n,
        clean_success=sum(t.clean_success for t in episodes) / n,
        turns_mean=sum(len(t.turns) for t in episodes) / n,
        hits={rule: count / n for rule, count in sorted(hits.items())},
        channels={name: _channel(groups, config, kinds) for name, kinds in REWARDS.items()},
        trained=_channel(groups, config, config.rewards),
    )


def _channel(groups: Sequence[SiblingGroup], config: Config, rewards: tuple[str, ...]) -> Channel:
    siblings = [group.siblings for group in groups]
    v = variance(siblings, replace(config, rewards=rewards))
    if "outcome" in rewards:
        alone, silent, cov = v.var_return, v.silent, v.var_outcome + v.cov_outcome_path
    else:
        alone, silent, cov = v.var_path, v.silent_path, v.cov_outcome_path
    return Channel(alone, cov, 1 - silent, silent**config.tasks)


def show(found: Probe, console: Console) -> None:
    """What a person reads: the policy, then each reward with its verdict."""
    console.print(
        f"base policy, {found.episodes} episodes in groups of {found.group_size}: success "
        f"{found.success:.1%}, violation-free {found.violation_free:.1%}, both "
        f"{found.clean_success:.1%}, {found.turns_mean:.1f} turns"
    )
    for rule, rate in found.hits.items():
        console.print(f"  {rule}: {rate:.2f} an episode")
    heads = ("reward", "Var_G", "Cov_G with outcome", "live groups", "dead updates", "reachable")
    table = Table(*heads, title="what varies within groups", title_justify="left")
    for name, channel in [*found.channels.items(), ("as trained", found.trained)]:
        table.add_row(
            name,
            f"{channel.variance:.4g}",
            f"{channel.cov_outcome:+.4g}",
            f"{channel.live_groups:.0%}",
            f"{channel.dead_updates:.1%}",
            "yes" if channel.reachable else "no",
        )
    console.print(table)
    console.print(
        "A reward that varies within groups can teach; whether it teaches what you want is another "
        "question (necessary, not sufficient)."
    )


PLOTS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """`ConfigError` for a file that `write_plot` cannot write, before anything is measured."""
    if path.suffix not in PLOTS:
        raise ConfigError(f"--plot {path}: expected a name that ends in one of {', '.join(PLOTS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first")


def write_plot(found: Probe, path: Path) -> None:
    """Live groups of every reward as bars (SVG, PNG or PDF, by the name's ending)."""
    from matplotlib.figure import Figure

    names = [*found.channels, "as trained"]
    shares = [c.live_groups for c in [*found.channels.values(), found.trained]]
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names[::-1], shares[::-1], color="#4878a8")
    axes.bar_label(bars, labels=[f"{share:.0%}" for share in shares[::-1]], padding=3)
    axes.axvline(REACHED, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("share of groups in which the reward differs (dashed: reachable)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
