"""The machine of domain "shell": a simulated file system, its services, and the commands.

Files are names of settings with whole numbers, and nothing outside this state is ever touched.
What happened is a log of facts, for example ("read", "web.conf"), ("set", "web.conf", "port", 907),
("checked", "web"), ("restarted", "web"), ("removed", "tmp/4821"); a duty of the task is the fact
that has to be there in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastturn.envs.base import Task
from fastturn.envs.stateful import acts
from fastturn.envs.tools import ToolError

SERVICES = ("web", "mail", "data")
SETTINGS = ("port", "limit", "level")
FOLDERS = ("tmp", "logs", "cache")
Fact = tuple[Any, ...]
Files = Mapping[str, Mapping[str, int]]


def config_of(service: str) -> str:
    """The file that a service reads when it starts. Example: `config_of("web")` is "web.conf"."""
    return f"{service}.conf"


@dataclass(frozen=True, slots=True)
class Machine:
    """The state of an episode. A `strict` machine refuses to edit what was not read and to restart
    what was not checked; any other one carries it out."""

    duties: tuple[Fact, ...]
    files: Files = field(default_factory=dict)
    strict: bool = False
    log: tuple[Fact, ...] = ()

    def after(self, *fact: Any) -> Machine:
        """This machine with one more fact."""
        return replace(self, log=(*self.log, fact))

    def below(self, path: str) -> tuple[str, ...]:
        """The files that removing `path` would remove: itself, or all in the folder."""
        return tuple(name for name in self.files if name == path or name.startswith(f"{path}/"))

    def has_read(self, file: str) -> bool:
        """Whether the file was read."""
        return ("read", file) in self.log

    def has_checked(self, service: str) -> bool:
        """Whether the configuration of the service was checked as it is now."""
        return self._after_edits(service, ("checked", service))

    def _after_edits(self, service: str, fact: Fact) -> bool:
        """Whether this happened, and no edit of the service's configuration after it."""
        file = config_of(service)
        edits = [at for at, done in enumerate(self.log) if done[:2] == ("set", file)]
        return fact in self.log[edits[-1] + 1 if edits else 0 :]

    def met(self, duty: Fact) -> bool:
        """Whether a duty is fulfilled as things stand."""
        kind, name, *rest = duty
        if kind == "restarted":
            return self._after_edits(name, duty)
        if kind == "removed":
            return name not in self.files
        setting, value = rest
        return self.files.get(name, {}).get(setting) == value

    @property
    def share_met(self) -> float:
        """Share of the duties that are met."""
        return sum(map(self.met, self.duties)) / len(self.duties)

    @property
    def solved(self) -> bool:
        """All duties are met, and no setting beside them was edited."""
        asked = {duty[:3] for duty in self.duties if duty[0] == "set"}
        edited = {fact[:3] for fact in self.log if fact[0] == "set"}
        return edited <= asked and self.share_met == 1


def begin(task: Task) -> Machine:
    """The machine as the task finds it."""
    return Machine(task.data["duties"], task.data["files"], task.data["strict"])


def _file(machine: Machine, file: str) -> Mapping[str, int]:
    if file not in machine.files:
        raise ToolError(f"there is no file {file!r}")
    return machine.files[file]


def _service(machine: Machine, service: str) -> Mapping[str, int]:
    if service not in SERVICES:
        raise ToolError(f"there is no service {service!r}")
    return _file(machine, config_of(service))


@acts(folder="string")
def ls(machine: Machine, folder: str) -> tuple[Machine, str]:
    """Lists the files in a folder; "." is the top."""
    depth = 0 if folder == "." else 1
    names = [name for name in machine.files if name.count("/") == depth]
    found = names if folder == "." else [name for name in names if name.startswith(f"{folder}/")]
    return machine, " ".join(found) or "empty"


@acts(file="string")
def cat(machine: Machine, file: str) -> tuple[Machine, str]:
    """Prints a file."""
    settings = _file(machine, file)
    text = " ".join(f"{name} {value}" for name, value in settings.items())
    return machine.after("read", file), text or "empty"


@acts(file="string", setting="string", value="integer")
def edit(machine: Machine, file: str, setting: str, value: int) -> tuple[Machine, str]:
    """Gives a setting in a file a new value."""
    settings = _file(machine, file)
    if setting not in settings:
        raise ToolError(f"there is no {setting!r} in {file}")
    if machine.strict and not machine.has_read(file):
        return machine, "refused"
    edited = replace(machine, files={**machine.files, file: {**settings, setting: value}})
    return edited.after("set", file, setting, value), "saved"


@acts(path="string")
def rm(machine: Machine, path: str) -> tuple[Machine, str]:
    """Removes a file, or a folder with all that is in it."""
    gone = machine.below(path)
    if not gone:
        raise ToolError(f"there is no file or folder {path!r}")
    left = {name: settings for name, settings in machine.files.items() if name not in gone}
    return replace(machine, files=left).after("removed", path), f"removed {len(gone)}"


@acts(service="string")
def check(machine: Machine, service: str) -> tuple[Machine, str]:
    """Checks the configuration of a service."""
    wrong = [name for name, value in _service(machine, service).items() if value < 1]
    return machine.after("checked", service), f"wrong {' '.join(wrong)}" if wrong else "valid"


@acts(service="string")
def restart(machine: Machine, service: str) -> tuple[Machine, str]:
    """Restarts a service, which then runs with its configuration as it is."""
    _service(machine, service)
    if machine.strict and not machine.has_checked(service):
        return machine, "refused"
    return machine.after("restarted", service), "restarted"


TOOLS = {tool.name: tool for tool in (ls, cat, edit, rm, check, restart)}
