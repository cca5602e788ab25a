"""A procedure in which care pays later: long, sparsely rewarded, and easily done too quickly.

An order is a row of numbers, `47 82`. The policy calls `set` with each of them in turn; a wrong
one spoils the piece and ends the episode. Then it may call `gauge` 1, 2, ..., and says `done` when
it likes, but within the `turns` of the recipe, after which the workshop closes. Some pieces have a
hidden flaw, which the last gauge mends; a flawed piece that was not mended fails. The reward, at
the end: the price of the order if all went well, and its gain.

    steps     numbers of an order: each is a chance to spoil the piece
    checks    gauges: what care costs, in turns
    flaws     share of pieces with a flaw: what care is worth
    prices    orders pay 1 to this much, evenly in its logarithm (1: all pay 1)
    market    orders gain or lose up to this much, evenly, whatever is done, so that no ending is
              the better for it; held-out orders do neither
    take      whether the order must be taken first, by a call that leaves no choice

Price and gain are drawn for each episode in its first turn, and shown to nobody: what a state is
worth then varies with more than what the policy did. With `take`, all that the policy decides is
decided after the draw.

    careful   probability that a demonstration begins to gauge
    slip      probability that a demonstration sets a wrong number
    think     whether demonstrations say what comes next before they call (a scratch part that
              `context=strip_think` drops from later contexts)

An episode needs at most steps + checks + 1 turns, one more with `take`. Without gauges
(`checks=0`) nothing is hidden and it is a chain like the calculator's.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.base import Action, Env, Message, Observation, Task, register
from fastturn.envs.calls import END_THINK, THINK
from fastturn.envs.drawn import TrainTasks, held_out_tasks
from fastturn.envs.tools import Tool, ToolError, run_calls

_INSTRUCTIONS = (
    "{opening}all set with each number of the order, from left to right; a wrong number spoils the "
    "piece. Then call gauge with 1, 2 and so on up to {checks}: the last one mends a hidden flaw, "
    "if there is one. Then say: done"
)
_PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
}
_NOTHING = {"type": "object", "properties": {}}


def _unused(*ignored: int) -> str:
    raise AssertionError("every environment binds tools of its own")


_SET = Tool("set", "Sets the next number of the order.", _PARAMETERS, _unused, bounded=True)
_GAUGE = Tool("gauge", "Reads a gauge.", _PARAMETERS, _unused, bounded=True)
_TAKE = Tool("take", "Takes the order.", _NOTHING, _unused, bounded=True)


def draw_order(
    rng: random.Random, *, steps: int, checks: int, flaws: float, **terms: float
) -> dict[str, Any]:
    """An order of `steps` numbers from 10 to 99, whether its piece is flawed, and the `terms` of
    its episodes, "prices", "market" and "take".

    Example: `{"question": "47 82", "order": (47, 82), "flawed": False, "checks": 4} | terms`.
    """
    order = tuple(rng.randint(10, 99) for _ in range(steps))
    flawed = checks > 0 and rng.random() < flaws
    return {
        "question": " ".join(map(str, order)),
        "order": order,
        "flawed": flawed,
        "checks": checks,
        **terms,
    }


@dataclass(frozen=True, slots=True)
class Piece:
    """The state of an episode: its task, whether the order is taken, turns so far, how many numbers
    are set and gauges read, whether a wrong number has spoiled it, and what it pays (0: not drawn
    yet) and gains on top."""

    task: Task
    taken: bool
    turns: int = 0
    placed: int = 0
    gauged: int = 0
    spoiled: bool = False
    price: float = 0.0
    gain: float = 0.0

    def one_turn_on(self, seed: int) -> Piece:
        """With its price and its gain, drawn if it has none."""
        later = replace(self, turns=self.turns + 1)
        if self.price:
            return later
        rng, data = random.Random(seed), self.task.data
        price = math.pow(data["prices"], rng.random())
        return replace(later, price=price, gain=data["market"] * rng.uniform(-1.0, 1.0))

    @property
    def delivered(self) -> float:
        """What it would bring now."""
        return self.price * self.good + self.gain

    @property
    def complete(self) -> bool:
        return self.placed == len(self.task.data["order"])

    @property
    def good(self) -> bool:
        """Whether it would pass now."""
        mended = not self.task.data["flawed"] or self.gauged == self.task.data["checks"]
        return self.complete and mended and not self.spoiled


class WorkshopEnv:
    """One piece, from its order to the end, which comes with turn `turns` at the latest. `prompt`
    gives the first messages of a task."""

    def __init__(self, prompt: Callable[[Task], list[Message]], brief: bool, turns: int) -> None:
        self._prompt, self._brief, self._turns = prompt, brief, turns
        self._piece: Piece | None = None
        self._over = False
        self._tools = {
            _SET.name: replace(_SET, function=self._set),
            _GAUGE.name: replace(_GAUGE, function=self._gauge),
            _TAKE.name: replace(_TAKE, function=self._take),
        }

    def start(self, task: Task) -> list[Message]:
        """Begin `task`; returns its first messages."""
        self._piece = Piece(task, taken=not task.data["take"])
        return self._prompt(task)

    def step(self, action: Action) -> Observation:
        """Carry out the calls of `action`; without any it ends the episode and is rewarded."""
        assert not self._over, "nothing comes after done"
        self._piece = self._now.one_turn_on(action.seed)
        if not action.calls:
            return self._ended(self._now.delivered, "delivered")
        replies = run_calls(action, self._tools, timeout_s=0.0)  # they bound themselves
        events = tuple(event for reply in replies for event in reply.events)
        if self._now.spoiled or self._now.turns >= self._turns:
            why = "spoiled" if self._now.spoiled else "late"
            return self._ended(self._now.gain, *events, why)
        messages = tuple(
            {"role": "tool", "content": "error"} if self._brief and reply.failed else reply.message
            for reply in replies
        )
        return Observation(messages, events=events)

    def _ended(self, reward: float, *events: str) -> Observation:
        self._over = True
        return Observation((), reward, True, events)

    def snapshot(self) -> Piece | None:
        """The piece as it is (frozen)."""
        return self._piece

    def restore(self, snapshot: Piece | None) -> None:
        """Continue from `snapshot`."""
        self._piece = snapshot

    @property
    def _now(self) -> Piece:
        assert self._piece is not None, "start or restore comes before step"
        return self._piece

    def _take(self) -> str:
        if self._now.taken:
            raise ToolError("the order is taken")
        self._piece = replace(self._now, taken=True)
        return "ok"

    def _set(self, n: int) -> str:
        piece = self._now
        if not piece.taken:
            raise ToolError("take the order first")
        if piece.complete:
            raise ToolError("all numbers of the order are set")
        right = piece.task.data["order"][piece.placed]
        self._piece = replace(piece, placed=piece.placed + 1, spoiled=piece.spoiled or n != right)
        return "ok"

    def _gauge(self, n: int) -> str:
        piece = self._now
        if not piece.complete:
            raise ToolError("set all numbers of the order first")
        if piece.gauged == piece.task.data["checks"] or n != piece.gauged + 1:
            raise ToolError(f"the gauges are 1 to {piece.task.data['checks']}, one after the other")
        self._piece = replace(piece, gauged=n)
        return "ok"


@register("workshop")
class Workshop:
    """Domain "workshop"; its options are explained at the top of this file."""

    def __init__(
        self,
        config: Config,
        *,
        steps: int = 2,
        checks: int = 4,
        flaws: float = 0.25,
        prices: float = 1.0,
        market: float = 0.0,
        take: int = 0,
        careful: float = 0.5,
        slip: float = 0.3,
        think: int = 1,
    ) -> None:
        for name, value in {"flaws": flaws, "careful": careful, "slip": slip}.items():
            if not 0 <= value <= 1:
                raise ConfigError(f"data.domain: {name}={value}: expected a share from 0 to 1")
        if not 1 <= steps <= 9 or not 0 <= checks <= 9:
            raise ConfigError(
                f"data.domain: steps={steps},checks={checks}: expected 1 to 9 steps, 0 to 9 checks"
            )
        for name, most, least in (("prices", prices, 1), ("market", market, 0)):
            if not least <= most <= 1e6:
                raise ConfigError(f"data.domain: {name}={most}: expected {least} to 1e6")
        if config.data.path:
            raise ConfigError(
                f"data.path={config.data.path!r}: the domain 'workshop' makes its own tasks; "
                f"leave data.path empty"
            )
        orders = partial(draw_order, steps=steps, checks=checks, flaws=flaws)
        draw = partial(orders, prices=prices, market=market, take=bool(take))
        self._script = partial(Demonstrator, careful=careful, slip=slip, think=bool(think))
        self._described, self._turns = bool(config.model.path), config.turns
        used = (*((_TAKE,) if take else ()), _SET, _GAUGE) if self._described else ()
        self.tools: list[dict[str, Any]] = [tool.schema for tool in used]
        self.eval_tasks: Sequence[Task] = held_out_tasks(partial(draw, market=0.0), config.data)
        self.train_tasks: Sequence[Task] = TrainTasks(draw, config.seed, self.eval_tasks)

    def env(self) -> Env:
        """One episode."""
        return WorkshopEnv(self._prompt, brief=not self._described, turns=self._turns)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["question"]}]
        if self._described:
            opening = "Call take. Then c" if task.data["take"] else "C"
            content = _INSTRUCTIONS.format(opening=opening, checks=task.data["checks"])
            messages.insert(0, {"role": "system", "content": content})
        return messages

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """A policy that knows the way, slips, and gauges or does not, so that a model that imitates
        it has something to learn from rewards."""
        return self._script(task, rng)


@dataclass(slots=True)
class Demonstrator:
    """See `Workshop.demonstrator`. Reads where the episode is from the messages alone."""

    task: Task
    rng: np.random.Generator
    careful: float
    slip: float
    think: bool

    def __call__(self, messages: Sequence[Message]) -> str:
        order, checks = self.task.data["order"], self.task.data["checks"]
        done = sum(m["role"] == "tool" and m["content"] == "ok" for m in messages)
        done -= self.task.data["take"]
        if done < 0:
            return self._call("take")
        if done < len(order):
            return self._call("set", n=self._slipped(order[done]))
        gauge = done - len(order) + 1
        stops = gauge == 1 and self.rng.random() >= self.careful
        if gauge > checks or stops:
            return self._thought("end", "done")
        return self._call("gauge", n=gauge)

    def _slipped(self, number: int) -> int:
        if self.rng.random() >= self.slip:
            return number
        return 10 + (number - 10 + int(self.rng.integers(1, 90))) % 90

    def _call(self, name: str, **arguments: int) -> str:
        thought = " ".join(map(str, (name, *arguments.values())))
        return self._thought(thought, workshop_call(name, **arguments))

    def _thought(self, thought: str, text: str) -> str:
        return f"{THINK}{thought}{END_THINK}{text}" if self.think else text


def workshop_call(name: str, **arguments: int) -> str:
    """The text of a call. Example: `workshop_call("set", n=47)` is
    `<tool_call>{"name": "set", "arguments": {"n": 47}}</tool_call>`."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
