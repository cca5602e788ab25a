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
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from fastturn.devices import Device
from fastturn.shape import Shape

Array = NDArray[np.float64]
MATRIX, MEMORY, LINK_S = 0.4, 0.6, 40e9  # shares of the data sheet that are reached; bytes/s
STEP_OVERHEAD_S, PAUSE_S = 0.004, 0.5  # of a decode step's launches; of servers at a publish
PASS_OVERHEAD_S = 0.02  # launches of an update
TURN_S, STAGE_S = 5e-5, 0.005  # a turn of an episode, and a stage, on one core
MOST_SERVERS = 8  # that are simulated; more of them do the same
# What the trainer leaves out or does at the same time, each exact: see `iteration`.
SAVINGS = ("silent", "share", "stream", "prefetch")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of episodes, in tokens: the prompt, thoughts of a turn, what it says or calls (`action`) and
    what the environment answers, each lognormal: a median, and a spread of its logarithm.
    `played`: the share of the turns behind the first that an episode goes on for. `tool_s`: seconds
    of a tool. Shares of groups without a signal, of turns (RTPO) and of whole episodes (GRPO)."""

    prompt: float = 512.0
    prompt_spread: float = 0.0
    think: float = 0.0
    think_spread: float = 0.0
    action: float = 256.0
    spread: float = 0.6
    answer: float = 256.0
    answer_spread: float = 0.0
    played: float = 1.0
    tool_s: float = 0.5
    silent: float = 0.63
    silent_whole: float = 0.42

    @property
    def turn_mean(self) -> float:
        """Tokens that the policy samples in a turn, without a limit."""
        return lognormal_mean(self.think, self.think_spread) + lognormal_mean(
            self.action, self.spread
        )

    @property
    def answer_mean(self) -> float:
        return lognormal_mean(self.answer, self.answer_spread)

    @property
    def prompt_mean(self) -> float:
        return lognormal_mean(self.prompt, self.prompt_spread)


def lognormal_mean(median: float, spread: float) -> float:
    """Example: (100, 0.6) is 120."""
    return median * math.exp(spread**2 / 2)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one GPU. A decode step: `step_s`, `sequence_s` for each sequence in it and
    `cached_s` for each token of their contexts. A token: `prefill_s` to be read, `train_s` to be
    trained on, with `pass_s` for each stage. `update_s`: an optimizer step on one GPU; `publish_s`:
    new weights to the sampler, and `pause_s` for servers to stop and prove that they arrived. Where
    the process that trains plays the episodes itself: `turn_s`, parsing, environment and
    bookkeeping of a turn of one; `stage_s`, what a stage takes besides.
    """

    step_s: float
    sequence_s: float
    cached_s: float
    prefill_s: float
    train_s: float
    update_s: float
    publish_s: float
    pause_s: float = 0.0
    pass_s: float = 0.0
    turn_s: float = 0.0
    stage_s: float = 0.0

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
            publish_s=2 * shape.parameters / LINK_S,
            pause_s=PAUSE_S,
            pass_s=PASS_OVERHEAD_S,
            turn_s=TURN_S,
            stage_s=STAGE_S,
        )

    def times(self, factors: Speed) -> Speed:
        """Every number times that of `factors`."""
        names = (field.name for field in fields(self))
        return Speed(**{name: getattr(self, name) * getattr(factors, name) for name in names})


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration: `tasks`, each with `trunks`; `siblings` fork at every boundary of `turns` turns
    (RTPO), or as many whole episodes (`reverse` false, GRPO). `turn_tokens`: most of a turn."""

    tasks: int
    turns: int
    siblings: int
    trunks: int = 1
    reverse: bool = True
    turn_tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class Layout:
    """`servers` GPUs sample and `trainers` train; without servers the same GPUs do both in turn.
    `savings`: any of `SAVINGS`. `slots`: sequences in flight on a server. `publish_every` stages.
    `together`: all episodes take their turns together, as with the sampler inside the trainer.
    """

    trainers: int
    servers: int = 0
    savings: frozenset[str] = frozenset(SAVINGS)
    slots: int = 256
    publish_every: int = 1
    together: bool = False

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

    def book(self, sampled: Decoded, live: float, speed: Speed) -> None:
        """What was sampled, and its turns where the trainer plays them itself."""
        self.tokens += sampled.tokens
        self.live += live
        if self.layout.together:
            self.add("host", speed.stage_s + sampled.turns * speed.turn_s / self.layout.trainers)

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
    turns: float


@dataclass(slots=True)
class Episodes:
    """Of one server. `action_NU`: tokens of the turns that are left, 0 behind the last;
    `answer_NU`: of what the environment says behind each; `context_N`: where they begin; `read_N`:
    how much of that each has to read."""

    action_NU: Array
    answer_NU: Array
    context_N: Array
    read_N: Array

    @property
    def turns_N(self) -> NDArray[np.int64]:
        return (self.action_NU > 0).sum(1)


def decode(episodes: Episodes, tool_s: float, speed: Speed, slots: int) -> Array:
    """When each episode ends on one server, every one at its own pace.

    Example: one episode of one turn of 10 tokens takes its prefill and 10 steps.
    """
    action_NU, turns_N = episodes.action_NU, episodes.turns_N
    count = len(action_NU)
    left_N, context_N, owed_N = (
        x.copy() for x in (action_NU[:, 0], episodes.context_N, episodes.read_N)
    )
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
        answer_N = episodes.answer_NU[done, turn_N[done]]
        turn_N[done] += 1
        ended = turn_N[done] == turns_N[done]
        end_N[done[ended]] = now
        on = done[~ended]
        left_N[on] = action_NU[on, turn_N[on]]
        owed_N[on] = answer_N[~ended]
        context_N[on] += answer_N[~ended]
        ready_N[on] = now + tool_s
    return end_N


def decode_together(episodes: Episodes, speed: Speed) -> Array:
    """When each ends if all take their turns together: a turn ends with its longest action.

    Example: turns of 4 and 10 tokens are 10 steps, of which 4 hold both.
    """
    count, turns = episodes.action_NU.shape
    end_N, context_N, owed_N = np.zeros(count), episodes.context_N.copy(), episodes.read_N.copy()
    now = 0.0
    for turn in range(turns):
        action_N, on = episodes.action_NU[:, turn], episodes.action_NU[:, turn] > 0
        now += float(owed_N[on].sum()) * speed.prefill_s
        now += float(action_N.max()) * speed.step_s + float(action_N.sum()) * speed.sequence_s
        now += float((action_N * (context_N + action_N / 2))[on].sum()) * speed.cached_s
        end_N[on] = now
        owed_N = episodes.answer_NU[:, turn]
        context_N += action_N + owed_N
    return end_N


def drawn(median: float, spread: float, size: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Whole tokens, lognormal."""
    if not median:
        return np.zeros(size)
    return np.round(rng.lognormal(math.log(median), spread, size))


def episodes_of(
    count: int, turns: tuple[int, int], work: Work, lengths: Lengths, rng: np.random.Generator
) -> Episodes:
    """`count` episodes at turn `turns[0]` of at most `turns[1]`: each has at least that one."""
    first, last = turns
    size = count, last - first
    thought_NU = drawn(lengths.think, lengths.think_spread, size, rng)
    said_NU = drawn(lengths.action, lengths.spread, size, rng)
    action_NU = np.clip(thought_NU + said_NU, 1.0, work.turn_tokens)
    turns_N = _turns(count, turns, lengths.played, rng)
    action_NU[np.arange(size[1]) >= turns_N[:, None]] = 0.0
    before = first * (min(lengths.turn_mean, work.turn_tokens) + lengths.answer_mean)
    context_N = drawn(lengths.prompt, lengths.prompt_spread, (count,), rng) + before
    answer_NU = drawn(lengths.answer, lengths.answer_spread, size, rng)
    return Episodes(action_NU, answer_NU, context_N, context_N.copy())


def reach(turns: int, played: float) -> Array:
    """The share of episodes that reach each turn: turns behind the first are binomial.

    Example: 3 turns of which half are played: 1, 3/4, 1/4.
    """
    behind = turns - 1
    share_K = [
        math.comb(behind, k) * played**k * (1 - played) ** (behind - k) for k in range(turns)
    ]
    return np.cumsum(share_K[::-1])[::-1]


def _turns(
    count: int, turns: tuple[int, int], played: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """How many more turns episodes have that reached turn `turns[0]`."""
    first, last = turns
    reach_K = reach(last, played)[first:]
    go_on_K = reach_K[1:] / np.maximum(reach_K[:-1], 1e-300)
    return 1 + np.cumprod(rng.random((count, last - first - 1)) < go_on_K, axis=1).sum(1)


def stage(
    groups: int,
    siblings: int,
    turn: int,
    work: Work,
    lengths: Lengths,
    cost: tuple[Speed, Layout],
    *,
    rng: np.random.Generator,
) -> Decoded:
    """`siblings` of `groups` boundaries at a turn, played to their ends over the servers."""
    speed, layout = cost
    whole, tokens, turns = [], 0.0, 0
    for mine in dealt(groups, layout.servers or layout.trainers):
        episodes = episodes_of(mine * siblings, (turn, work.turns), work, lengths, rng)
        shape = mine, siblings
        episodes.context_N = np.repeat(episodes.context_N[::siblings], siblings)
        episodes.read_N = episodes.context_N.copy()
        if "share" in layout.savings:
            episodes.read_N.reshape(shape)[:, 1:] = 0.0  # one request: the context is read once
        if layout.together:
            end_N = decode_together(episodes, speed)
        else:
            end_N = decode(episodes, lengths.tool_s, speed, layout.slots)
        whole.append(end_N.reshape(shape).max(1))
        tokens += float(episodes.action_NU.sum())
        turns += int(episodes.turns_N.sum())
    shown_G = np.sort(np.concatenate(whole))
    scale = groups / len(shown_G)
    whole_G = shown_G[(np.arange(1, groups + 1) * len(shown_G) - 1) // groups]
    return Decoded(whole_G, tokens * scale, turns * scale)


def dealt(groups: int, servers: int) -> list[int]:
    """How many groups each server takes, for `MOST_SERVERS` of them that stand for all.

    Example: 8 groups over 3 servers are [2, 3, 3].
    """
    busy = min(groups, servers)
    few, more = groups // busy, groups % busy
    shown = min(busy, MOST_SERVERS)
    longer = math.ceil(more * shown / busy)  # the slowest is among those with one more
    return [few] * (shown - longer) + [few + 1] * longer


def iteration(
    work: Work, lengths: Lengths, speed: Speed, layout: Layout, seed: int = 0
) -> Iteration:
    """One iteration. Without savings: every group is trained on, every sibling with a context of
    its own, and trainer and servers take turns. "silent": groups without a signal are left out, and
    of stages of such groups alone (silent independently of each other) the step and the publish;
    "share": a context is read once a group, by servers and by the trainer; "stream": groups are
    trained while others decode; "prefetch": the next trunks grow while servers would be idle."""
    rng, found = np.random.default_rng(seed), Iteration(layout)
    cost = speed, layout
    roots = work.tasks * work.trunks if work.reverse else work.tasks
    trunks = stage(roots, 1, 0, work, lengths, cost, rng=rng) if work.reverse else None
    idle_s, same = 0.0, 1.0  # the chance that weights are those of the last publish
    reach_K = reach(work.turns, lengths.played)
    for number, turn in enumerate(reversed(range(work.turns)) if work.reverse else [0]):
        groups = round(roots * reach_K[turn])
        if not groups:
            continue
        sampled = stage(groups, work.siblings, turn, work, lengths, cost, rng=rng)
        silent = lengths.silent if work.reverse else lengths.silent_whole
        tokens = tokens_trained(turn, work, lengths, "share" in layout.savings)
        left_out = silent if "silent" in layout.savings else 0.0
        step = 1.0 - left_out**groups  # the chance that any group is read
        read_s = (1.0 - left_out) * tokens * speed.train_s
        idle_s += _train(found, sampled, (read_s + step * speed.pass_s / groups), layout)
        found.add("optimizer", step * speed.update_s / layout.trainers)
        same *= 1.0 - step
        if (number + 1) % layout.publish_every == 0 or turn == 0:
            pause_s = 0.0 if layout.together else speed.pause_s
            found.add("publish", (1.0 - same) * (speed.publish_s + pause_s))
            same = 1.0
        found.book(sampled, groups * (1.0 - silent), speed)
    if trunks is not None:
        found.book(trunks, 0.0, speed)
        hidden = idle_s if "prefetch" in layout.savings and layout.apart else 0.0
        found.add("trunk_decode", max(0.0, float(trunks.whole_G[-1]) - hidden))
    return found


def _train(found: Iteration, sampled: Decoded, gpu_s: float, layout: Layout) -> float:
    """Book a stage's decode and training, `gpu_s` of a GPU for a group; returns how long servers
    were idle in it."""
    group_s = gpu_s / layout.trainers
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


def tokens_trained(turn: int, work: Work, lengths: Lengths, share: bool) -> float:
    """Tokens that a group's update reads: contexts once a group or once a sibling.

    Example: turn 0 of RTPO, 2 siblings, prompt 100, action 10: 120 shared, 220 not.
    """
    said = min(lengths.turn_mean, work.turn_tokens)
    context = lengths.prompt_mean + turn * (said + lengths.answer_mean)
    more = 0.0 if work.reverse else lengths.played * (work.turns - 1)  # turns behind the first
    own = said * (1 + more) + lengths.answer_mean * more
    return context * (1 if share else work.siblings) + own * work.siblings


def stepwise(
    work: Work, lengths: Lengths, speed: Speed, layout: Layout, seed: int = 0
) -> Iterator[tuple[str, Iteration]]:
    """The same iteration with no saving, and with one more at a time, in the order of `SAVINGS`."""
    for count in range(len(SAVINGS) + 1):
        name = SAVINGS[count - 1] if count else "naive"
        savings = frozenset(SAVINGS[:count])
        yield name, iteration(work, lengths, speed, replace(layout, savings=savings), seed)
