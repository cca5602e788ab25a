"""What is asked of a fleet in one go: orders of completions, cut into jobs, found one by one."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fastturn.sampler import wire
from fastturn.sampler.base import SamplingParams
from fastturn.sampler.members import Failure, Member
from fastturn.sampler.routing import Keys
from fastturn.types import Floats, Ids

MOST_SIBLINGS = 64  # completions of one request; 0.32 refuses more than --max-num-seqs


@dataclass(slots=True)
class Job:
    """Completions still to be sampled: `places` in the result, all of one context, or the rest of
    one whose first ids (`begun`) are there already. Jobs wait in the order of their ranks."""

    context_T: Ids
    max_tokens: int
    places: list[int]
    rank: Any = 0
    keys: Keys = ()
    begun: tuple[Ids, Floats] | None = None
    attempts: int = 0

    @property
    def cost(self) -> float:
        return len(self.context_T) + len(self.places) * self.max_tokens


Ask = tuple[Ids, int, int]  # context, most tokens, completions
Found = tuple[wire.Choice, Member]
Ended = tuple[Member, Job, wire.Reply | Failure | Exception]


@dataclass(slots=True)
class Order:
    """Completions that are answered together, by the place that each has in its call."""

    key: Any
    found: dict[int, Found | None]


@dataclass(slots=True)
class Call:
    """Jobs that share their parameters and weights. `answer(key, choices)` gets every order when
    its last completion is there. `sealed`: no order will be added."""

    params: SamplingParams
    salt: str
    vocabulary: int
    answer: Callable[[Any, list[Found]], None]
    sealed: bool = False
    orders: dict[int, Order] = field(default_factory=dict)  # of every place that is not found
    places: int = 0  # of all orders
    pending: deque[Job] = field(default_factory=deque)
    ended: asyncio.Queue[Ended | None] = field(default_factory=asyncio.Queue)  # None: look again
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def add(self, key: Any, context_T: Ids, max_tokens: int, n: int, keys: Keys) -> None:
        """`n` completions more, in requests of at most `MOST_SIBLINGS`."""
        places = range(self.places, self.places + n)
        self.places += n
        order = Order(key, dict.fromkeys(places))
        self.orders.update(dict.fromkeys(places, order))
        for start in range(0, n, MOST_SIBLINGS):
            part = list(places[start : start + MOST_SIBLINGS])
            self.wait(Job(context_T, max_tokens, part, key, keys))

    def wait(self, job: Job) -> None:
        insort(self.pending, job, key=attrgetter("rank"))

    def keep(self, place: int, choice: wire.Choice, member: Member) -> None:
        order = self.orders.pop(place, None)
        if order is None:  # the call was closed
            return
        order.found[place] = choice, member
        whole = [found for found in order.found.values() if found is not None]
        if len(whole) == len(order.found):
            self.answer(order.key, whole)
