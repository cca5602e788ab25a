"""Domain "frontdesk": a phone agent who tells contacts, changes accounts and pays refunds.

A task is one line, `call 482`, `change 517 phone 907 pin 35` or `refund 517 60 pin 35`, or two of
them joined by "then". Reward 1 if every duty is met when the agent ends the episode. The way there
is free. The house rules (`desk_rules`) say which ways are proper: obeying them costs turns, never
the outcome, except at the level "gate", where the desk itself refuses what is improper.

    level=normal   one duty; 6 turns are enough to do it properly
    level=easy     one duty, never a refund
    level=hard     two duties; 9 turns
    level=gate     two duties at a strict desk; 6 turns. The demonstrator seldom obeys throughout
                   and seldom gets a number right, so who imitates it solves next to nothing
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastturn.config import Config
from fastturn.envs.base import Task, register
from fastturn.envs.calls import write_call
from fastturn.envs.desk import FIELDS, MOST_CALLS, TOOLS, Contact, Desk, Fact, begin
from fastturn.envs.desk_rules import RULES
from fastturn.envs.stateful import Plan, StateDomain, World, misread

_INSTRUCTIONS = (
    "You are the front desk. Do what the user asks by calling tools, one call at a time; `call` "
    "means to ring a contact until the message is told. House rules: ring an office only while it "
    "is open; whoever leaves two calls unanswered is written to and not rung again; verify the "
    "holder with the pin before you change or refund an account; have a refund confirmed before "
    "you pay it. When everything is done, say so in a sentence without a call."
)


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a scripted agent does what, as probabilities.

    `stops`: ends the episode instead of seeing to the next duty; `gives_up`: leaves it at a call
    that was not answered; `slips`: gets a digit wrong. The rest is what the house rules ask for.
    """

    stops: float = 0.3
    gives_up: float = 0.15
    slips: float = 0.2
    asks_hours: float = 0.15
    waits: float = 0.5
    writes: float = 0.15
    verifies: float = 0.15
    confirms: float = 0.15


OBEYS = {"asks_hours": 1.0, "waits": 1.0, "writes": 1.0, "verifies": 1.0, "confirms": 1.0}


@dataclass(frozen=True, slots=True)
class Level:
    """Which duties a task may have, whether the desk is strict, and the demonstrator's habits."""

    duties: tuple[tuple[str, ...], ...]
    strict: bool = False
    habits: Habits = Habits()


LEVELS = {
    "easy": Level((("call",), ("change",))),
    "normal": Level((("call",), ("change",), ("refund",))),
    "hard": Level((("call", "change"), ("change", "refund"), ("call", "refund"))),
    "gate": Level(
        (("change", "refund"),),
        strict=True,
        habits=Habits(slips=0.8, verifies=0.25, confirms=0.25),
    ),
}


def draw(level: Level, rng: random.Random) -> dict[str, Any]:
    """The data of one task: what is asked, as words and as duties, and the desk behind it."""
    contacts, pins, duties, words = [], {}, list[Fact](), []
    accounts = rng.sample(range(100, 1000), 2)
    for kind, account in zip(rng.choice(level.duties), accounts, strict=False):
        pin = rng.randint(10, 99)
        if kind == "call":
            contact = _draw_contact(rng)
            contacts.append(contact)
            duties.append(("told", contact.number))
            words.append(f"call {contact.number}")
            continue
        pins[account] = pin
        if kind == "change":
            field, value = rng.choice(FIELDS), rng.randint(100, 999)
            duties.append(("changed", account, field, value))
            words.append(f"change {account} {field} {value} pin {pin}")
        else:
            amount = rng.randint(10, 99)
            duties.append(("refunded", account, amount))
            words.append(f"refund {account} {amount} pin {pin}")
    return {
        "question": " then ".join(words),
        "duties": tuple(duties),
        "hour": rng.randint(0, 23),
        "contacts": tuple(contacts),
        "pins": pins,
        "strict": level.strict,
    }


def _draw_contact(rng: random.Random) -> Contact:
    return Contact(
        number=rng.randint(100, 999),
        opens=rng.randint(7, 10),
        closes=rng.randint(16, 19),
        zone=rng.randint(-9, 9),
        busy=rng.choices((0, 1, 2, 3), (40, 25, 20, 15))[0],
    )


def work(task: Task, rng: np.random.Generator, habits: Habits) -> Plan:
    """The scripted agent: sees to the duties in order, then says "done"."""
    for kind, subject, *rest in task.data["duties"]:
        if rng.random() < habits.stops:
            break
        if kind == "told":
            yield from _reach(subject, rng, habits)
            continue
        if rng.random() < habits.verifies:
            yield write_call("verify", account=subject, pin=task.data["pins"][subject])
        if kind == "changed":
            field, value = rest
            value = _slip(value, rng, habits)
            yield write_call("change", account=subject, field=field, value=value)
        else:
            yield from _pay(subject, rest[0], rng, habits)
    yield "done"


def _reach(contact: int, rng: np.random.Generator, habits: Habits) -> Plan:
    if rng.random() < habits.asks_hours:
        heard = yield write_call("hours", contact=contact)
        if heard == "closed" and rng.random() < habits.waits:
            yield write_call("wait", contact=contact)
    heard, calls = "no answer", 0
    while heard == "no answer":
        if calls and rng.random() < habits.gives_up:
            return
        if calls >= MOST_CALLS and rng.random() < habits.writes:
            yield write_call("write", contact=contact)
            return
        heard = yield write_call("dial", contact=_slip(contact, rng, habits))
        calls += 1


def _pay(account: int, amount: int, rng: np.random.Generator, habits: Habits) -> Plan:
    amount = _slip(amount, rng, habits)
    if rng.random() < habits.confirms:
        yield write_call("confirm", account=account, amount=amount)
    yield write_call("refund", account=account, amount=amount)


def _slip(number: int, rng: np.random.Generator, habits: Habits) -> int:
    return misread(number, rng) if rng.random() < habits.slips else number


_WORLD = World("frontdesk", TOOLS, begin, RULES, _INSTRUCTIONS, LEVELS, draw, work, OBEYS)


@register("frontdesk")
def frontdesk_domain(config: Config, *, level: str = "normal") -> StateDomain[Desk]:
    """Domain "frontdesk" at one of its `LEVELS`."""
    return StateDomain(config, _WORLD, level)
