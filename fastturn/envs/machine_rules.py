"""House rules of the machine. The outcome needs none of them: what is edited unread or restarted
unchecked works as well, and a removed folder takes the file that had to go with it.

A fulfilment is credited at most once for each file and service, so that doing the right thing over
and over earns nothing.
"""

from __future__ import annotations

from fastturn.envs.base import Action
from fastturn.envs.machine import TOOLS, Machine, config_of
from fastturn.envs.tools import arguments_of
from fastturn.rules import fulfilment, penalty, progress

MAGNITUDE = 0.25


def _removed(machine: Machine, action: Action) -> set[str]:
    """The files that are removed."""
    path = arguments_of(action, TOOLS, "rm").get("path")
    return set() if path is None else set(machine.below(path))


def _to_remove(machine: Machine) -> set[str]:
    """The files that were asked to be removed."""
    return {duty[1] for duty in machine.duties if duty[0] == "removed"}


def _edited(machine: Machine, action: Action) -> str | None:
    """The file that is edited, if it has this setting."""
    asked = arguments_of(action, TOOLS, "edit")
    file = str(asked.get("file"))
    return file if asked.get("setting") in machine.files.get(file, ()) else None


def _restarted(machine: Machine, action: Action) -> str | None:
    """The service that is restarted, if there is one."""
    service = arguments_of(action, TOOLS, "restart").get("service")
    return service if service is not None and config_of(service) in machine.files else None


@penalty(MAGNITUDE, twin="removes_asked")
def removes_unasked(machine: Machine, action: Action) -> bool:
    """Removes a file that nobody asked to remove."""
    return not _removed(machine, action) <= _to_remove(machine)


@fulfilment(MAGNITUDE, twin="removes_unasked")
def removes_asked(machine: Machine, action: Action) -> bool:
    """Removes what was asked and nothing else."""
    removed = _removed(machine, action)
    return bool(removed) and removed <= _to_remove(machine)


@penalty(MAGNITUDE, twin="edits_read")
def edits_unread(machine: Machine, action: Action) -> bool:
    """Edits a file that was not read."""
    file = _edited(machine, action)
    return file is not None and not machine.has_read(file)


@fulfilment(MAGNITUDE, twin="edits_unread")
def edits_read(machine: Machine, action: Action) -> bool:
    """Edits a file for the first time, having read it."""
    file = _edited(machine, action)
    new = not any(fact[:2] == ("set", file) for fact in machine.log)
    return file is not None and new and machine.has_read(file)


@penalty(MAGNITUDE, twin="restarts_checked")
def restarts_unchecked(machine: Machine, action: Action) -> bool:
    """Restarts a service whose configuration was not checked as it is."""
    service = _restarted(machine, action)
    return service is not None and not machine.has_checked(service)


@fulfilment(MAGNITUDE, twin="restarts_unchecked")
def restarts_checked(machine: Machine, action: Action) -> bool:
    """Restarts a service for the first time, its configuration checked."""
    service = _restarted(machine, action)
    new = ("restarted", service) not in machine.log
    return service is not None and new and machine.has_checked(service)


@progress(MAGNITUDE)
def duties_met(machine: Machine) -> float:
    """Share of the duties that are met."""
    return machine.share_met


RULES = (
    *(removes_unasked, removes_asked, edits_unread, edits_read),
    *(restarts_unchecked, restarts_checked),
    duties_met,
)
