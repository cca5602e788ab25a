"""How long an iteration would take: episodes, servers and a trainer as events, seconds counted.

    Lengths (assumed, or of a run) ─┐
    Speed (device and shape) ───────┼─> iteration(...) -> Iteration: wall-clock, by span
    Layout (GPUs, savings) ─────────┘

Episodes of drawn lengths share the slots of their server, whose steps take longer the more
sequences and the longer contexts they hold; tools keep their own episode waiting; groups are
trained when they are whole, or when the stage is. Equal seeds give equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastturn.devices import Device
from fastturn.shape import Shape

Array = NDArray[np.float64]
MATRIX, MEMORY, LINK_S = 0.4, 0.6, 40e9  # shares of the data sheet that are reached; bytes/s
STEP_OVERHEAD_S, PUBLISH_OVERHEAD_S = 0.004, 0.5  # of a decode step's launches; of pause and proof
MOST_SERVERS = 8  # that are simulated; more of them do the same
# What the trainer leaves out or does at the same time, each exact: see `iteration`.
SAVINGS = ("silent", "share", "stream", "prefetch")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of episodes: tokens of the prompt, of an action (lognormal around its median, `spread`) and
    of what the environment answers; seconds of a tool; shares of groups without a signal, of turns
    (RTPO) and of whole episodes (GRPO)."""

    prompt: float = 512.0
    action: float = 256.0
    spread: float = 0.6
    answer: float = 256.0
    tool_s: float = 0.5
    silent: float = 0.63
    silent_whole: float = 0.42


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one GPU. A decode step: `step_s`, `sequence_s` for each sequence in it and
    `cached_s` for each token of their contexts. A token: `prefill_s` to be read, `train_s` to be
    trained on. `update_s`: an optimizer step on one GPU; `publish_s`: new weights to all servers.
    """

    step_s: float
    sequence_s: float
    cached_s: float
    prefill_s: float
    train_s: float
    update_s: float
    publish_s: float

    @classmethod
    def of(cls, device: Device, shape: Shape) -> Speed:
        """From a data sheet, in bfloat16 with float32 moments: 2 bytes a weight are read by every
        decode step, 2 FLOPs a weight and token forward and 6 with gradients, 28 bytes a weight are
        moved by the optimizer. `MATRIX` and `MEMORY` are the shares that are reached."""
        active, flops_s = shape.active_parameters, device.flops_s * MATRIX
        bytes_s = device.bytes_s * MEMORY
        return cls(
            step_s=2 * active / bytes_s + STEP_OVERHEAD_S,
            sequence_s=2 * active / flops_s,
            cached_s=2 * shape.cache_token / bytes_s,
            prefill_s=2 * active / flops_s,
            train_s=6 * active / flops_s,
            update_s=28 * shape.parameters / bytes_s,
            publish_s=2 * shape.parameters / LINK_S + PUBLISH_OVERHEAD_S,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration: `tasks`, each with `trunks`; `siblings` fork at every boundary of `turns` turns
    (RTPO), or as many whole episodes (`reverse` false, GRPO)."""

    tasks: int
    turns: int
    siblings: int
    trunks: int = 1
    reverse: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """`servers` GPUs sample and `trainers` train; without servers the same GPUs do both in turn.
    `savings`: any of `SAVINGS`. `slots`: sequences in flight on a server. `publish_every` stages.
    """

    trainers: int
    servers: int = 0
    savings: frozenset[str] = frozenset(SAVINGS)
    slots: int = 256
    publish_every: int = 1

    @property
    def gpus(self) -> int:
        return self.trainers + self.servers

    @property
    def apart(self) -> bool:
        return self.servers > 0


@dataclass(slots=True)
class Iteration:
    """`spans` in seconds of the trainer, which sum to the wall-clock; tokens that were sampled;
    groups with a signal."""

    layout: Layout
    spans: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    live: float = 0.0

    def add(self, span: str, seconds: float) -> None:
        self.spans[span] = self.spans.get(span, 0.0) + seconds

    @property
    def wall_s(self) -> float:
        return math.fsum(self.spans.values())

    @property
    def gpu_hours(self) -> float:
        return self.wall_s * self.layout.gpus / 3600


@dataclass(slots=True)
class Decoded:
    """Of a stage: when each group was whole, and what was sampled."""

    whole_G: Array
    tokens: float


def decode(
    action_NU: Array, context_N: Array, read_N: Array, lengths: Lengths, speed: Speed, slots: int
) -> Array:
    """When each episode ends on one server. `action_NU`: tokens of the turns that are left;
    `context_N`: where they begin; `read_N`: how much of that each has to read.

    Example: one episode of one turn of 10 tokens takes its prefill and 10 steps.
    """
    count, turns = action_NU.shape
    left_N, context_N, owed_N = action_NU[:, 0].copy(), context_N.copy(), read_N.copy()
    turn_N, ready_N, end_N = np.zeros(count, int), np.zeros(count), np.full(count, np.inf)
    in_N = np.zeros(count, bool)  # has a slot
    now = 0.0
    while np.isinf(end_N).any():
        free = slots - int(in_N.sum())
        waiting = np.flatnonzero(np.isinf(end_N) & ~in_N & (ready_N <= now))[:free]
        in_N[waiting] = True
        now += float(owed_N[waiting].sum()) * speed.prefill_s
        owed_N[waiting] = 0
        coming = ready_N[np.isinf(end_N) & ~in_N]
        coming = coming[coming > now]
        if not in_N.any():
            now = float(coming.min())
            continue
        step_s = speed.step_s + float((speed.sequence_s + speed.cached_s * context_N[in_N]).sum())
        steps = float(left_N[in_N].min())
        if len(coming) and in_N.sum() < slots:
            steps = min(steps, max(1.0, math.ceil((float(coming.min()) - now) / step_s)))
        now += steps * step_s
        left_N[in_N] -= steps
        context_N[in_N] += steps
        done = np.flatnonzero(in_N & (left_N <= 0))
        in_N[done] = False
        turn_N[done] += 1
        last = done[turn_N[done] == turns]
        end_N[last] = now
        on = done[turn_N[done] < turns]
        left_N[on] = action_NU[on, turn_N[on]]
        owed_N[on] = lengths.answer
        context_N[on] += lengths.answer
        ready_N[on] = now + lengths.tool_s
    return end_N


def stage(
    groups: int,
    siblings: int,
    turns: tuple[int, int],
    lengths: Lengths,
    speed: Speed,
    layout: Layout,
    *,
    rng: np.random.Generator,
) -> Decoded:
    """`siblings` of `groups` boundaries at turn `turns[0]` of `turns[1]`, over the servers."""
    first, last = turns
    servers = layout.servers or layout.trainers
    shown = min(servers, MOST_SERVERS, groups)
    mine = max(1, round(groups / servers))
    context = float(lengths.prompt + first * (lengths.action + lengths.answer))
    whole, tokens = [], 0.0
    for _ in range(shown):
        draws = rng.lognormal(
            math.log(lengths.action), lengths.spread, (mine * siblings, last - first)
        )
        action_NU = np.maximum(1.0, np.round(draws))
        read_N = np.full(mine * siblings, context)
        if "share" in layout.savings:
            read_N.reshape(mine, siblings)[:, 1:] = 0.0  # one request: the context is read once
        start_N = np.full(mine * siblings, context)
        end_N = decode(action_NU, start_N, read_N, lengths, speed, layout.slots)
        whole.append(end_N.reshape(mine, siblings).max(1))
        tokens += float(action_NU.sum())
    whole_G = np.resize(np.sort(np.concatenate(whole)), groups)
    return Decoded(np.sort(whole_G), tokens * groups / (shown * mine))


def iteration(
    work: Work, lengths: Lengths, speed: Speed, layout: Layout, seed: int = 0
) -> Iteration:
    """One iteration. Without savings: every group is trained on, every sibling with a context of
    its own, and trainer and servers take turns. "silent": groups without a signal are left out;
    "share": a context is read once a group, by servers and by the trainer; "stream": groups are
    trained while others decode; "prefetch": the next trunks grow while servers would be idle."""
    rng, found = np.random.default_rng(seed), Iteration(layout)
    parts = (lengths, speed, layout)
    boundaries = work.tasks * work.trunks if work.reverse else work.tasks
    trunks = stage(boundaries, 1, (0, work.turns), *parts, rng=rng) if work.reverse else None
    idle_s = 0.0
    for number, turn in enumerate(reversed(range(work.turns)) if work.reverse else [0]):
        sampled = stage(boundaries, work.siblings, (turn, work.turns), *parts, rng=rng)
        trained = range(turn, turn + 1) if work.reverse else range(work.turns)
        silent = lengths.silent if work.reverse else lengths.silent_whole
        tokens = tokens_trained(trained, work.siblings, lengths, "share" in layout.savings)
        kept = 1.0 - silent if "silent" in layout.savings else 1.0
        group_s = kept * tokens * speed.train_s / layout.trainers
        idle_s += _train(found, sampled, group_s, layout)
        found.add("optimizer", speed.update_s / layout.trainers)
        if number % layout.publish_every == 0:
            found.add("publish", speed.publish_s)
        found.tokens += sampled.tokens
        found.live += boundaries * (1.0 - silent)
    if trunks is not None:
        found.tokens += trunks.tokens
        hidden = idle_s if "prefetch" in layout.savings and layout.apart else 0.0
        found.add("trunk_decode", max(0.0, float(trunks.whole_G[-1]) - hidden))
    return found


def _train(found: Iteration, sampled: Decoded, group_s: float, layout: Layout) -> float:
    """Book a stage's decode and training; returns how long servers were idle in it."""
    decode_s, train_s = float(sampled.whole_G[-1]), group_s * len(sampled.whole_G)
    if "stream" in layout.savings and layout.apart:
        done_s = 0.0
        for whole_s in sampled.whole_G:
            done_s = max(done_s, float(whole_s)) + group_s
    else:
        done_s = decode_s + train_s
    found.add("sibling_decode", done_s - train_s)
    found.add("forward_backward", train_s)
    return done_s - decode_s


def tokens_trained(turns: Sequence[int], siblings: int, lengths: Lengths, share: bool) -> float:
    """Tokens that a group's update reads: contexts once a group or once a sibling.

    Example: turn 0, 2 siblings, prompt 100, action 10: 120 shared, 220 not.
    """
    context = lengths.prompt + turns[0] * (lengths.action + lengths.answer)
    mean = lengths.action * math.exp(lengths.spread**2 / 2)
    own = mean * len(turns) + lengths.answer * (len(turns) - 1)
    return context * (1 if share else siblings) + own * siblings


def stepwise(
    work: Work, lengths: Lengths, speed: Speed, layout: Layout, seed: int = 0
) -> Iterator[tuple[str, Iteration]]:
    """The same iteration with no saving, and with one more at a time, in the order of `SAVINGS`."""
    for count in range(len(SAVINGS) + 1):
        name = SAVINGS[count - 1] if count else "naive"
        savings = frozenset(SAVINGS[:count])
        chosen = Layout(
            layout.trainers, layout.servers, savings, layout.slots, layout.publish_every
        )
        yield name, iteration(work, lengths, speed, chosen, seed)
