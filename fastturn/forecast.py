"""`fastturn plan`: what a recipe would take on GPUs, by simulation (`simulate.py`).

Everything follows from the recipe, the model's shape, a data sheet and lengths of episodes, which
are assumed or taken from a run. Nothing is started, and the numbers are only as good as these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, ConfigError
from fastturn.devices import Device
from fastturn.memory import device_sum
from fastturn.plan import memory_gib
from fastturn.shape import Shape, shape_of
from fastturn.simulate import (
    SAVINGS,
    Iteration,
    Layout,
    Lengths,
    Speed,
    Work,
    iteration,
)

PARTS = 8  # splits of the GPUs that are tried
GROUPS = range(3, 10)  # group sizes that are compared
MOST_PACKED = 2**20
USABLE = 0.9  # of a GPU's memory
SERVING_GIB = 2.0  # of a server, beside weights, keys and values


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe on `gpus` of a device. `factors` of its data sheet: what runs measured."""

    config: Config
    device: Device
    gpus: int
    lengths: Lengths
    seed: int = 0
    factors: Speed | None = None

    @property
    def speed(self) -> Speed:
        sheet = Speed.of(self.device, shape_known(self.config))
        return sheet.times(self.factors) if self.factors else sheet


def shape_known(config: Config) -> Shape:
    """The sizes of the recipe's model; `ConfigError` for one that is not here."""
    shape = shape_of(config)
    if shape is None:
        raise ConfigError(
            f"model.path={config.model.path!r}: its shape is unknown until it has been downloaded; "
            f"download the model, or name a folder"
        )
    return shape


def work_of(config: Config) -> Work:
    """The iteration of a recipe. `ConfigError` for algorithms that sample in other ways."""
    algorithm = algorithm_of(config)
    reverse = algorithm.reverse and algorithm.stages is not None
    grown = algorithm.stages is not None
    if algorithm.passes or algorithm.candidates != 1 or grown != reverse or not algorithm.separate:
        raise ConfigError(
            f"algorithm={config.algorithm}: only algorithms that sample like rtpo or grpo are "
            f"simulated; choose one of these"
        )
    siblings = config.group_size - algorithm.unsampled
    trunks = config.trunks if reverse else 1
    most = config.sampling.turn_tokens
    return Work(config.tasks, config.turns, siblings, trunks, reverse, most)


def placed(case: Case, layout: Layout) -> tuple[Layout, str]:
    """The layout with as many sequences in flight on a server as its memory has room for, and why
    it does not fit the device, empty when it does.

    A GPU that does both in turn holds what the trainer holds beside the server's weights and its
    keys and values; the server sleeps while the trainer trains (`rollout.carrier=ipc`).
    """
    weights = 2 * shape_known(case.config).parameters / 2**30
    most = USABLE * case.device.memory_gib
    held, step, sampling = map(device_sum, memory_gib(case.config, layout.trainers))
    needed = held + (max(step, sampling) if layout.together else step)
    if needed > most:
        return layout, f"a trainer's rank takes {needed:.0f} GiB of {most:.0f}"
    if layout.together:
        return layout, ""
    beside = 0.0 if layout.apart else held
    slots = math.floor((most - SERVING_GIB - weights - beside) / sequence_gib(case))
    if slots < 1:
        others = f" beside {beside:.0f} of the trainer" if beside else ""
        return layout, (
            f"a server's weights take {weights:.2g} GiB{others} and one sequence "
            f"{sequence_gib(case):.2g}, of {most:.0f}"
        )
    return replace(layout, slots=min(layout.slots, slots)), ""


def sequence_gib(case: Case) -> float:
    """Keys and values of a mean episode at its end, in bfloat16. What siblings share is counted for
    each of them."""
    lengths, config = case.lengths, case.config
    turn = min(lengths.turn_mean, config.sampling.turn_tokens) + lengths.answer_mean
    tokens = min(config.model.max_context, lengths.prompt_mean + config.turns * turn)
    return 2 * tokens * shape_known(config).cache_token / 2**30


def layouts(gpus: int, together: bool = False) -> Iterator[Layout]:
    """Both on all GPUs in turn, and up to `PARTS` - 1 ways of dividing them. `together`: who does
    both samples in its own process."""
    yield Layout(gpus, together=together)
    for servers in sorted({max(1, round(gpus * part / PARTS)) for part in range(1, PARTS)}):
        if servers < gpus:
            yield Layout(gpus - servers, servers)


def simulated(case: Case, work: Work, layout: Layout) -> Iteration:
    return iteration(work, case.lengths, case.speed, layout, case.seed)


def best(case: Case, work: Work) -> Iteration:
    """The fastest layout that fits. `ConfigError` says why none does."""
    inside = case.config.rollout.engine == "local"
    tried = [placed(case, layout) for layout in layouts(case.gpus, inside)]
    fitting = [simulated(case, work, layout) for layout, why in tried if not why]
    if not fitting:
        raise ConfigError(
            f"{case.gpus} x {case.device.name}: {tried[0][1]}; take more GPUs or lora"
        )
    return min(fitting, key=lambda one: one.wall_s)


def grpo(work: Work) -> Work:
    """Whole episodes, as many for a task as RTPO draws rollouts."""
    episodes = work.trunks * (1 + work.siblings * work.turns)
    return replace(work, siblings=episodes, trunks=1, reverse=False)


def silent_share(success: float, siblings: int) -> float:
    """Of groups whose siblings all succeed or all fail. Example: (.5, 2) is .5."""
    return success**siblings + (1 - success) ** siblings


def success_of(silent: float, siblings: int) -> float:
    """The success rate, at least one half, at which that share of groups is silent."""
    low, high = 0.5, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if silent_share(middle, siblings) < silent else (low, middle)
    return low


def by_group_size(case: Case, work: Work, layout: Layout) -> Iterator[tuple[int, Iteration]]:
    """Iterations of other group sizes, silent shares following from one success rate of all
    boundaries (that of the assumed share at the recipe's size)."""
    success = success_of(case.lengths.silent, work.siblings)
    for size in GROUPS:
        siblings = size - 1
        lengths = replace(case.lengths, silent=silent_share(success, siblings))
        other = replace(case, lengths=lengths)
        yield size, simulated(other, replace(work, siblings=siblings), layout)


def packing_budget(case: Case, ranks: int) -> int:
    """The largest power of two of tokens in a micro-batch that fits a rank, at most
    `MOST_PACKED`."""
    budget, most = case.config.model.max_context, USABLE * case.device.memory_gib
    while budget < MOST_PACKED:
        config = replace(case.config, pack_tokens=2 * budget)
        held, step, _ = memory_gib(config, ranks)
        if device_sum(held, step) > most:
            break
        budget *= 2
    return budget


def show(case: Case, console: Console) -> None:
    """Print the forecast."""
    work = work_of(case.config)
    one = best(case, work)
    console.print(_table("assumed", ("what", "value"), asdict(case.lengths).items()))
    where = f"{case.gpus} x {case.device.name}"
    split = split_of(one.layout)
    rows = [(name, f"{s:,.2f} s", f"{s / one.wall_s:.0%}") for name, s in one.spans.items()]
    total = ("an iteration", f"{one.wall_s:,.2f} s", f"{one.gpu_hours:,.3f} GPU-hours")
    console.print(_table(f"{where}: {split}", ("span", "seconds", "share"), [*rows, total]))
    hours = one.gpu_hours * case.config.iterations
    console.print(f"{case.config.iterations} iterations: {hours:,.2f} GPU-hours")
    if work.reverse:
        _show_choices(case, work, one, console)
    twice = best(replace(case, gpus=2 * case.gpus), work)
    console.print(
        f"twice the GPUs: {one.wall_s / twice.wall_s:.2f} times as fast, "
        f"{twice.gpu_hours / one.gpu_hours:.2f} times the GPU-hours"
    )
    console.print("simulated: nothing was started")


def split_of(layout: Layout) -> str:
    """Example: `split_of(Layout(3, 5))` is "3 train, 5 sample, at most 256 sequences each"."""
    if layout.together:
        return "each does both"
    most = f"at most {layout.slots} sequences each"
    if layout.apart:
        return f"{layout.trainers} train, {layout.servers} sample, {most}"
    return f"each does both in turn (rollout.carrier=ipc), {most}"


def _show_choices(case: Case, work: Work, one: Iteration, console: Console) -> None:
    other = best(case, grpo(work))
    rows = []
    for count in range(len(SAVINGS) + 1):
        layout = replace(one.layout, savings=frozenset(SAVINGS[:count]))
        found = simulated(case, work, layout)
        name = f"+ {SAVINGS[count - 1]}" if count else "no saving"
        rows.append((name, f"{found.wall_s:,.2f} s", f"{found.gpu_hours / other.gpu_hours:.2f}"))
    episodes = grpo(work).siblings
    title = f"what each saving does (GRPO, {episodes} episodes a task: {other.wall_s:,.2f} s)"
    console.print(_table(title, ("RTPO with", "iteration", "GPU-hours / GRPO's"), rows))
    sizes = dict(by_group_size(case, work, one.layout))
    live = {size: found.live / found.gpu_hours for size, found in sizes.items()}
    size = max(live, key=live.__getitem__)
    tried = f"{GROUPS[0]} to {GROUPS[-1]} are compared"
    console.print(f"most groups with a signal for a GPU-hour: group_size={size} ({tried})")
    for every in sorted({1, 2, work.turns}):
        found = simulated(case, work, replace(one.layout, publish_every=every))
        console.print(f"publish every {every}: {found.wall_s:,.2f} s an iteration")
    budget = packing_budget(case, one.layout.trainers)
    more = " or more" if budget == MOST_PACKED else ""
    console.print(f"largest pack_tokens that fits: {budget:,}{more}")


def _table(title: str, head: Sequence[str], rows: Any) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in head:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in row))
    return table


def as_dict(found: Iteration) -> Mapping[str, Any]:
    """What `--json` prints of an iteration."""
    layout = {"trainers": found.layout.trainers, "servers": found.layout.servers}
    return {**layout, "wall_s": found.wall_s, "gpu_hours": found.gpu_hours, "spans": found.spans}
