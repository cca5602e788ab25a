"""Path rules: what the policies of τ²-bench's desks ask for, as far as a call shows it.

Each sentence of a policy that can be checked is a penalty for breaking it and a credit for doing
the same thing properly; a credit is given once for what it is about. Sentences that some of the
package's own reference calls break are in `STRICT`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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
FLOWN = {"landed", "flying"}  # of a flight on its date
CANCEL, REBOOK = ("cancel_reservation",), ("update_reservation_flights",)
MODIFY = (*REBOOK, "update_reservation_baggages")
# The airline's agent "must make sure the rules apply before calling the API" of these; in retail it
# "should check its status before taking the action".
CHECKED = frozenset(
    {
        *(*CANCEL, *REBOOK, "cancel_pending_order"),
        *(f"modify_pending_order_{what}" for what in ("address", "items", "payment")),
        *("return_delivered_order_items", "exchange_delivered_order_items"),
    }
)
LOOKS = ("get_reservation_details", "get_order_details")


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


def _named(action: Action, tools: Collection[str]) -> str | None:
    """The reservation or order that a call of one of `tools` names, if it is one."""
    call = action.call
    if call is None or call.name not in tools:
        return None
    named = (call.arguments.get(key) for key in _RECORDS)
    return next((value for value in named if isinstance(value, str)), None)


def _before(state: State, record: str, tools: Collection[str]) -> bool:
    """Whether an earlier call of one of `tools` named the record."""
    return any(
        record in (arguments.get(key) for key in _RECORDS)
        for name, arguments in state.calls
        if name in tools
    )


def _first(state: State, action: Action, tools: Collection[str]) -> bool:
    """Whether a call of one of `tools` names a record that none of them has named before."""
    record = _named(action, tools)
    return record is not None and not _before(state, record, tools)


@penalty(MAGNITUDE, twin="changes_after_looking")
def changes_without_looking(state: State, action: Action) -> bool:
    """Cancels or changes a reservation or order that it has not looked at."""
    record = _named(action, CHECKED)
    return record is not None and not _before(state, record, LOOKS)


@fulfilment(MAGNITUDE, twin="changes_without_looking")
def changes_after_looking(state: State, action: Action) -> bool:
    """Cancels or changes a reservation or order for the first time, having looked at it."""
    record = _named(action, CHECKED)
    looked = record is not None and _before(state, record, LOOKS)
    return looked and _first(state, action, CHECKED)


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


# --- what the airline allows ----------------------------------------------------------------------


def _reservation(state: State, action: Action, tools: Collection[str]) -> Any:
    """The reservation that a call of one of the tools names, if it stands."""
    record = _named(action, tools)
    if state.databases is None or record is None:
        return None
    found = state.databases.desk.reservations.get(record)
    return found if found is not None and found.status != "cancelled" else None


def _statuses(state: State, reservation: Any) -> set[str]:
    """Of the flights of a reservation, on their dates."""
    assert state.databases is not None
    flights = state.databases.desk.flights
    return {flights[leg.flight_number].dates[leg.date].status for leg in reservation.flights}


def _may_be_cancelled(state: State, reservation: Any) -> bool:
    """Not yet flown; and booked within a day, business, insured (whether the reason is covered is
    not in the database), or with a flight that the airline has cancelled."""
    statuses = _statuses(state, reservation)
    if statuses & FLOWN:
        return False
    fresh = NOW - datetime.fromisoformat(reservation.created_at) <= timedelta(days=1)
    covered = reservation.cabin == "business" or reservation.insurance == "yes"
    return fresh or covered or "cancelled" in statuses


@penalty(MAGNITUDE, twin="cancels_properly")
def cancels_against_policy(state: State, action: Action) -> bool:
    """Cancels a reservation that no clause of the policy lets it cancel."""
    reservation = _reservation(state, action, CANCEL)
    return reservation is not None and not _may_be_cancelled(state, reservation)


@fulfilment(MAGNITUDE, twin="cancels_against_policy")
def cancels_properly(state: State, action: Action) -> bool:
    """Cancels a reservation that a clause of the policy may cover."""
    reservation = _reservation(state, action, CANCEL)
    return reservation is not None and _may_be_cancelled(state, reservation)


def _legs(flights: Any) -> list[tuple[Any, Any]] | None:
    """Number and date of each flight of a call; None for what is no list of flights."""
    if not isinstance(flights, list) or not all(isinstance(leg, dict) for leg in flights):
        return None
    return [(leg.get("flight_number"), leg.get("date")) for leg in flights]


def _modifiable(state: State, action: Action) -> bool | None:
    """Whether the policy lets the call modify its reservation; None for any other call.

    "Basic economy flights cannot be modified", no cabin "if any flight in the reservation has
    already been flown", and bags may be added but not removed.
    """
    reservation = _reservation(state, action, MODIFY)
    if reservation is None or action.call is None:
        return None
    arguments = action.call.arguments
    if action.call.name == "update_reservation_baggages":
        total = arguments.get("total_baggages")
        return total >= reservation.total_baggages if isinstance(total, int) else None
    legs = _legs(arguments.get("flights"))
    if legs is None:
        return None
    booked = [(leg.flight_number, leg.date) for leg in reservation.flights]
    if legs != booked and reservation.cabin == "basic_economy":
        return False
    return arguments.get("cabin") == reservation.cabin or not _statuses(state, reservation) & FLOWN


@penalty(MAGNITUDE, twin="modifies_properly")
def modifies_against_policy(state: State, action: Action) -> bool:
    """Changes flights of basic economy, the cabin after a flight, or takes bags away."""
    return _modifiable(state, action) is False


@fulfilment(MAGNITUDE, twin="modifies_against_policy")
def modifies_properly(state: State, action: Action) -> bool:
    """Modifies a reservation for the first time, as the policy allows."""
    return _first(state, action, MODIFY) and _modifiable(state, action) is True


def _keeps_route(state: State, action: Action) -> bool | None:
    """Whether new flights begin and end where the reservation does; None for any other call."""
    reservation = _reservation(state, action, REBOOK)
    legs = _legs(action.call.arguments.get("flights")) if action.call is not None else None
    if reservation is None or not legs or state.databases is None:
        return None
    flights = state.databases.desk.flights
    flown = [flights.get(number) for number, _ in legs if isinstance(number, str)]
    if len(flown) < len(legs) or None in flown:
        return None
    returns = reservation.flight_type == "round_trip"
    last = reservation.origin if returns else reservation.destination
    ends = (flown[0].origin, flown[-1].destination) == (reservation.origin, last)
    return ends and reservation.destination in {flight.destination for flight in flown}


@penalty(MAGNITUDE, twin="keeps_route")
def changes_route(state: State, action: Action) -> bool:
    """Changes the origin or the destination of a reservation."""
    return _keeps_route(state, action) is False


@fulfilment(MAGNITUDE, twin="changes_route")
def keeps_route(state: State, action: Action) -> bool:
    """Changes flights for the first time, between the same airports."""
    return _first(state, action, REBOOK) and _keeps_route(state, action) is True


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


KEPT: dict[str, tuple[Rule, ...]] = {
    "airline": (calls_with_company, calls_alone, modifies_against_policy, modifies_properly),
    "retail": (calls_with_company, calls_alone),
}
# Reference calls leave out most reads, identify nobody, and break clauses in four tasks.
STRICT: dict[str, tuple[Rule, ...]] = {
    "airline": (
        *(changes_without_looking, changes_after_looking),
        *(cancels_against_policy, cancels_properly, changes_route, keeps_route),
    ),
    "retail": (
        *(changes_without_looking, changes_after_looking),
        *(serves_unidentified, identifies_first),
    ),
}


def rules_of(desk: str, asks: bool, strict: bool) -> tuple[Rule, ...]:
    """The rules of a desk that the package's reference calls keep; with `strict`, those too that
    some of them break. `asks`: somebody is there to be asked. Telecom's solo mode has none: its
    policy is a workflow, which its assertions judge."""
    if desk not in KEPT:
        return ()
    asked = _consent(desk) if asks else ()
    return (*KEPT[desk], *asked, *(STRICT[desk] if strict else ()))
