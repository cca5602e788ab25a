"""The front desk of domain "frontdesk": contacts, accounts, what has been done, and the tools.

Everything that happened is a fact in one log, for example ("rang", 482), ("told", 482),
("verified", 517), ("changed", 517, "phone", 907), ("refunded", 517, 60). A duty of the task is the
fact that has to be there in the end, so tools, duties and rules speak of the same things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastturn.envs.base import Task
from fastturn.envs.stateful import acts
from fastturn.envs.tools import ToolError

FIELDS = ("phone", "street", "email")
MOST_CALLS = 2  # calls to one who does not answer
Fact = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Contact:
    """Somebody to ring. The office is open from hour `opens` to hour `closes` of its own clock,
    `zone` hours ahead of the desk's. The first `busy` calls are not answered, whatever the hour."""

    number: int
    opens: int = 9
    closes: int = 17
    zone: int = 0
    busy: int = 0

    def closed_for(self, hour: int) -> int:
        """Hours until the office opens, at hour `hour` of the desk's clock; 0 while it is open.

        Example: `Contact(482, zone=3).closed_for(20)` is 10: it is 23:00 there.
        """
        there = (hour + self.zone) % 24
        return 0 if self.opens <= there < self.closes else (self.opens - there) % 24


@dataclass(frozen=True, slots=True)
class Desk:
    """The state of an episode. `pins` are those of the accounts there are. A `strict` desk refuses
    changes and refunds that break the house rules; any other one carries them out."""

    duties: tuple[Fact, ...]
    hour: int = 12
    contacts: Mapping[int, Contact] = field(default_factory=dict)
    pins: Mapping[int, int] = field(default_factory=dict)
    strict: bool = False
    log: tuple[Fact, ...] = ()

    def after(self, *fact: Any) -> Desk:
        """This desk with one more fact."""
        return replace(self, log=(*self.log, fact))

    def closed_for(self, contact: int) -> int:
        """Hours until the office of this contact opens; 0 while it is open."""
        return self.contacts[contact].closed_for(self.hour)

    def unanswered(self, contact: int) -> int:
        """How many calls this contact has not answered."""
        return self.log.count(("rang", contact))

    def met(self, duty: Fact) -> bool:
        """Whether a duty is fulfilled as things stand: the last value of a field counts, and a
        refund only if the account got no other one."""
        if duty[0] == "told":
            return duty in self.log
        values = [fact for fact in self.log if fact[:-1] == duty[:-1]]
        return (values if duty[0] == "refunded" else values[-1:]) == [duty]

    @property
    def share_met(self) -> float:
        """Share of the duties that are met."""
        return sum(map(self.met, self.duties)) / len(self.duties)

    @property
    def solved(self) -> bool:
        """All duties are met, and nothing was changed or refunded beside them."""
        asked = {duty[:-1] for duty in self.duties}
        touched = {fact[:-1] for fact in self.log if fact[0] in ("changed", "refunded")}
        return touched <= asked and self.share_met == 1


def begin(task: Task) -> Desk:
    """The desk as the task finds it."""
    contacts = {contact.number: contact for contact in task.data["contacts"]}
    pins, duties = dict(task.data["pins"]), task.data["duties"]
    return Desk(duties, task.data["hour"], contacts, pins, task.data["strict"])


def _contact(desk: Desk, number: int) -> Contact:
    if number not in desk.contacts:
        raise ToolError(f"there is no contact {number}")
    return desk.contacts[number]


def _account(desk: Desk, account: int) -> None:
    if account not in desk.pins:
        raise ToolError(f"there is no account {account}")


@acts(contact="integer")
def hours(desk: Desk, contact: int) -> tuple[Desk, str]:
    """Says whether the office of a contact is open now."""
    return desk, "closed" if _contact(desk, contact).closed_for(desk.hour) else "open"


@acts(contact="integer")
def wait(desk: Desk, contact: int) -> tuple[Desk, str]:
    """Waits until the office of a contact is open."""
    left = _contact(desk, contact).closed_for(desk.hour)
    return replace(desk, hour=(desk.hour + left) % 24), f"{left} h later"


@acts(contact="integer")
def dial(desk: Desk, contact: int) -> tuple[Desk, str]:
    """Rings a contact, who hears the message if somebody answers."""
    called = _contact(desk, contact)
    if desk.unanswered(contact) < called.busy:
        return desk.after("rang", contact), "no answer"
    return desk.after("told", contact), "told"


@acts(contact="integer")
def write(desk: Desk, contact: int) -> tuple[Desk, str]:
    """Leaves the message in writing, for one who has not answered two calls."""
    _contact(desk, contact)
    if desk.unanswered(contact) < MOST_CALLS:
        raise ToolError(f"ring {contact} first, {MOST_CALLS} times")
    return desk.after("told", contact), "told"


@acts(account="integer", pin="integer")
def verify(desk: Desk, account: int, pin: int) -> tuple[Desk, str]:
    """Checks the identity of the holder of an account."""
    _account(desk, account)
    if desk.pins[account] != pin:
        return desk, "wrong pin"
    return desk.after("verified", account), "verified"


@acts(account="integer", field=FIELDS, value="integer")
def change(desk: Desk, account: int, field: str, value: int) -> tuple[Desk, str]:
    """Gives a field of an account a new value."""
    _account(desk, account)
    if desk.strict and ("verified", account) not in desk.log:
        return desk, "refused"
    return desk.after("changed", account, field, value), "changed"


@acts(account="integer", amount="integer")
def confirm(desk: Desk, account: int, amount: int) -> tuple[Desk, str]:
    """Asks the holder of an account whether this amount is to be refunded."""
    _account(desk, account)
    return desk.after("confirmed", account, amount), "yes"


@acts(account="integer", amount="integer")
def refund(desk: Desk, account: int, amount: int) -> tuple[Desk, str]:
    """Pays an amount back, which cannot be undone."""
    _account(desk, account)
    allowed = {("verified", account), ("confirmed", account, amount)} <= set(desk.log)
    if desk.strict and not allowed:
        return desk, "refused"
    return desk.after("refunded", account, amount), "refunded"


TOOLS = {tool.name: tool for tool in (hours, wait, dial, write, verify, change, confirm, refund)}
