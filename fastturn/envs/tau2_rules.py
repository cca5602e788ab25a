"""Path rules: what the policies of τ²-bench's desks ask for, as far as a call shows it.

Each sentence of a policy that can be checked is a penalty for breaking it and a credit for doing
the same thing properly; a credit is given once for what it is about.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

from fastturn.envs.base import Action
from fastturn.envs.calls import CLOSE, OPEN, parse_action, spoken
from fastturn.envs.tau2_customer import consents
from fastturn.envs.tau2_desk import Desk, State
from fastturn.rules import Rule, fulfilment, penalty

MAGNITUDE = 0.25
NOW = datetime(2024, 5, 15, 15)  # "The current time is", in the airline's policy
_CALLS = re.compile(rf"{OPEN}.*?({CLOSE}|$)", re.DOTALL)
_RECORDS = ("reservation_id", "order_id")  # arguments that name what a call changes


def words(action: Action) -> str:
    """What an action says, its thinking and its calls left out.

    Example: `words(parse_action("A moment. <tool_call>{}</tool_call>"))` is "A moment."."""
    return _CALLS.sub("", spoken(action.text)).strip()


# --- one call at a time, and nothing beside it ----------------------------------------------------


def _alone(action: Action) -> bool:
    return len(parse_action(action.text).calls) < 2 and not words(action)


@penalty(MAGNITUDE, twin="calls_alone")
def calls_with_company(state: State, action: Action) -> bool:
    """Makes several calls at once, or speaks beside a call."""
    return action.call is not None and not _alone(action)


@fulfilment(MAGNITUDE, twin="calls_with_company")
def calls_alone(state: State, action: Action) -> bool:
    """The first call, one and without a word."""
    return action.call is not None and not state.calls and _alone(action)


# --- look before you change -----------------------------------------------------------------------


def _changed(desk: str, action: Action) -> str | None:
    """The reservation or order that a call changes, if it names one."""
    call = action.call
    if call is None or not Desk.opened(desk).changes(call.name):
        return None
    named = (call.arguments.get(key) for key in _RECORDS)
    return next((value for value in named if isinstance(value, str)), None)


def _named(state: State, record: str, desk: str, written: bool) -> bool:
    """Whether an earlier call that reads (or writes) named the record."""
    opened = Desk.opened(desk)
    return any(
        record in (arguments.get(key) for key in _RECORDS)
        for name, arguments in state.calls
        if opened.changes(name) == written
    )


def _looking(desk: str) -> tuple[Rule, Rule]:
    @penalty(MAGNITUDE, twin="changes_after_looking")
    def changes_without_looking(state: State, action: Action) -> bool:
        """Changes a reservation or order that it has not looked at."""
        record = _changed(desk, action)
        return record is not None and not _named(state, record, desk, written=False)

    @fulfilment(MAGNITUDE, twin="changes_without_looking")
    def changes_after_looking(state: State, action: Action) -> bool:
        """Changes a reservation or order for the first time, having looked at it."""
        record = _changed(desk, action)
        if record is None or _named(state, record, desk, written=True):
            return False
        return _named(state, record, desk, written=False)

    return changes_without_looking, changes_after_looking


# --- nothing changes before the customer says yes -------------------------------------------------


def _consent(desk: str) -> tuple[Rule, Rule]:
    opened = Desk.opened(desk)

    def writes(action: Action) -> bool:
        return action.call is not None and opened.changes(action.call.name)

    def agreed(state: State) -> bool:
        return consents([text for who, text in state.dialogue if who == "user"][-1])

    @penalty(MAGNITUDE, twin="changes_confirmed")
    def changes_unconfirmed(state: State, action: Action) -> bool:
        """Changes something before the customer has said yes."""
        return writes(action) and not agreed(state)

    @fulfilment(MAGNITUDE, twin="changes_unconfirmed")
    def changes_confirmed(state: State, action: Action) -> bool:
        """The first change, the customer having said yes."""
        first = not any(opened.changes(name) for name, _ in state.calls)
        return writes(action) and agreed(state) and first

    return changes_unconfirmed, changes_confirmed


# --- what the airline may cancel ------------------------------------------------------------------


def _cancelled(state: State, action: Action) -> Any:
    """The reservation that a call cancels, if there is one that can be."""
    call = action.call
    if call is None or call.name != "cancel_reservation" or state.databases is None:
        return None
    reservations = state.databases.desk.reservations
    id = call.arguments.get("reservation_id")
    found = reservations.get(id) if isinstance(id, str) else None
    return found if found is not None and found.status != "cancelled" else None


def _may_be_cancelled(state: State, reservation: Any) -> bool:
    """Booked within a day, business, insured (whether the reason is covered is not in the
    database), or with a flight that the airline has cancelled."""
    assert state.databases is not None
    flights = state.databases.desk.flights
    by_airline = any(
        flights[leg.flight_number].dates[leg.date].status == "cancelled"
        for leg in reservation.flights
    )
    fresh = NOW - datetime.fromisoformat(reservation.created_at) <= timedelta(days=1)
    return fresh or by_airline or reservation.cabin == "business" or reservation.insurance == "yes"


@penalty(MAGNITUDE, twin="cancels_properly")
def cancels_against_policy(state: State, action: Action) -> bool:
    """Cancels a reservation that no clause of the policy lets it cancel."""
    reservation = _cancelled(state, action)
    return reservation is not None and not _may_be_cancelled(state, reservation)


@fulfilment(MAGNITUDE, twin="cancels_against_policy")
def cancels_properly(state: State, action: Action) -> bool:
    """Cancels a reservation that a clause of the policy may cover."""
    reservation = _cancelled(state, action)
    return reservation is not None and _may_be_cancelled(state, reservation)


# --- who is calling -------------------------------------------------------------------------------


def _identifies(name: str) -> bool:
    return name.startswith("find_user_id_")


@penalty(MAGNITUDE, twin="identifies_first")
def serves_unidentified(state: State, action: Action) -> bool:
    """Reads or changes an account or order before the customer was found by email or name."""
    call = action.call
    private = call is not None and {"user_id", "order_id"} & set(call.arguments)
    return bool(private) and not any(_identifies(name) for name, _ in state.calls)


@fulfilment(MAGNITUDE, twin="serves_unidentified")
def identifies_first(state: State, action: Action) -> bool:
    """The first call finds the customer by email or name."""
    return action.call is not None and not state.calls and _identifies(action.call.name)


OWN: dict[str, tuple[Rule, ...]] = {
    "airline": (cancels_against_policy, cancels_properly),
    "retail": (serves_unidentified, identifies_first),
}


def rules_of(desk: str, asks: bool) -> tuple[Rule, ...]:
    """The rules of a desk; `asks`: somebody is there to be asked. Telecom's solo mode has none: its
    policy is a workflow, which its assertions judge."""
    if desk not in OWN:
        return ()
    shared = (calls_with_company, calls_alone, *_looking(desk))
    return (*shared, *OWN[desk], *(_consent(desk) if asks else ()))
