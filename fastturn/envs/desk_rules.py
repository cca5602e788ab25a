"""House rules of the front desk. The outcome needs none of them: an office answers as well at
night, and whoever does not answer twice answers later as surely as a written message arrives.

A fulfilment is credited at most once for each contact and account, so that doing the right thing
over and over earns nothing.
"""

from __future__ import annotations

from fastturn.envs.base import Action
from fastturn.envs.desk import MOST_CALLS, TOOLS, Desk
from fastturn.envs.tools import arguments_of
from fastturn.rules import fulfilment, penalty, progress

MAGNITUDE = 0.25


def _contacted(desk: Desk, action: Action, tool: str) -> int | None:
    """Who is dialled or written to, if there is such a contact."""
    number = arguments_of(action, TOOLS, tool).get("contact")
    return number if number in desk.contacts else None


def _altered(desk: Desk, action: Action) -> int | None:
    """The account that is changed or refunded, if there is one."""
    account = arguments_of(action, TOOLS, "change", "refund").get("account")
    return account if account in desk.pins else None


def _refunded(desk: Desk, action: Action) -> tuple[int, int] | None:
    """Account and amount of a refund."""
    asked = arguments_of(action, TOOLS, "refund")
    return (asked["account"], asked["amount"]) if asked.get("account") in desk.pins else None


@penalty(MAGNITUDE, twin="dials_in_hours")
def dials_outside_hours(desk: Desk, action: Action) -> bool:
    """Dials a contact whose office is closed."""
    number = _contacted(desk, action, "dial")
    return number is not None and desk.closed_for(number) > 0


@fulfilment(MAGNITUDE, twin="dials_outside_hours")
def dials_in_hours(desk: Desk, action: Action) -> bool:
    """Dials a contact for the first time, while the office is open."""
    number = _contacted(desk, action, "dial")
    new = not {("rang", number), ("told", number)} & set(desk.log)
    return number is not None and new and desk.closed_for(number) == 0


@penalty(MAGNITUDE, twin="writes_instead")
def dials_too_often(desk: Desk, action: Action) -> bool:
    """Dials a contact who has left two calls unanswered."""
    number = _contacted(desk, action, "dial")
    return number is not None and desk.unanswered(number) >= MOST_CALLS


@fulfilment(MAGNITUDE, twin="dials_too_often")
def writes_instead(desk: Desk, action: Action) -> bool:
    """Writes to a contact who has left two calls unanswered."""
    number = _contacted(desk, action, "write")
    new = ("told", number) not in desk.log
    return number is not None and new and desk.unanswered(number) >= MOST_CALLS


@penalty(MAGNITUDE, twin="alters_verified")
def alters_unverified(desk: Desk, action: Action) -> bool:
    """Changes or refunds an account whose holder was not verified."""
    account = _altered(desk, action)
    return account is not None and ("verified", account) not in desk.log


@fulfilment(MAGNITUDE, twin="alters_unverified")
def alters_verified(desk: Desk, action: Action) -> bool:
    """Changes or refunds an account for the first time, its holder verified."""
    account = _altered(desk, action)
    new = not any(fact[:2] in (("changed", account), ("refunded", account)) for fact in desk.log)
    return new and ("verified", account) in desk.log


@penalty(MAGNITUDE, twin="refunds_confirmed")
def refunds_unconfirmed(desk: Desk, action: Action) -> bool:
    """Refunds an amount that the holder did not confirm."""
    paid = _refunded(desk, action)
    return paid is not None and ("confirmed", *paid) not in desk.log


@fulfilment(MAGNITUDE, twin="refunds_unconfirmed")
def refunds_confirmed(desk: Desk, action: Action) -> bool:
    """Refunds an account for the first time, the amount confirmed."""
    paid = _refunded(desk, action)
    if paid is None or ("confirmed", *paid) not in desk.log:
        return False
    return not any(fact[:2] == ("refunded", paid[0]) for fact in desk.log)


@progress(MAGNITUDE)
def duties_met(desk: Desk) -> float:
    """Share of the duties that are met."""
    return desk.share_met


RULES = (
    *(dials_outside_hours, dials_in_hours, dials_too_often, writes_instead),
    *(alters_unverified, alters_verified, refunds_unconfirmed, refunds_confirmed),
    duties_met,
)
