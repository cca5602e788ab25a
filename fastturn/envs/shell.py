"""Domain "shell": an operator of a simulated machine who edits, restarts and removes.

A task is one line, `set web port 907`, `set web port 907 and restart` or `remove tmp/4821`, or two
of them joined by "then". Reward 1 if every duty is met when the operator ends the episode. The way
there is free. The house rules (`machine_rules`) say which ways are proper: obeying them costs
turns, never the outcome, except at the level "gate", where the machine itself refuses what is
improper.

    level=normal   one duty; 5 turns are enough to do it properly
    level=easy     one duty, never a restart
    level=hard     two duties; 9 turns
    level=gate     two duties on a strict machine; 7 turns. The demonstrator seldom obeys throughout
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
from fastturn.envs.machine import (
    FOLDERS,
    SERVICES,
    SETTINGS,
    TOOLS,
    Fact,
    Machine,
    begin,
    config_of,
)
from fastturn.envs.machine_rules import RULES
from fastturn.envs.stateful import Plan, StateDomain, World, misread

_INSTRUCTIONS = (
    "You operate a machine. Do what the user asks by calling tools, one call at a time; a service "
    "such as web is configured in web.conf. House rules: remove nothing that you were not asked to "
    "remove; read a file before you edit it; check the configuration of a service, as it is then, "
    "before you restart it. When everything is done, say so in a sentence without a call."
)


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a scripted operator does what, as probabilities.

    `stops`: ends the episode instead of seeing to the next duty; `forgets`: leaves out a restart;
    `slips`: takes a wrong digit or folder. The rest is what the house rules ask for.
    """

    stops: float = 0.3
    forgets: float = 0.2
    slips: float = 0.2
    reads: float = 0.15
    checks: float = 0.15
    spares: float = 0.15


OBEYS = {"reads": 1.0, "checks": 1.0, "spares": 1.0}


@dataclass(frozen=True, slots=True)
class Level:
    """Which jobs a task may have, whether the machine is strict, and the demonstrator's habits."""

    jobs: tuple[tuple[str, ...], ...]
    strict: bool = False
    habits: Habits = Habits()


LEVELS = {
    "easy": Level((("set",), ("remove",))),
    "normal": Level((("set",), ("set and restart",), ("remove",))),
    "hard": Level((("set and restart", "remove"), ("set and restart", "set and restart"))),
    "gate": Level(
        (("set and restart", "set"),),
        strict=True,
        habits=Habits(slips=0.8, reads=0.25, checks=0.25),
    ),
}


def draw(level: Level, rng: random.Random) -> dict[str, Any]:
    """The data of one task: what is asked, as words and as duties, and the files there are."""
    services = rng.sample(SERVICES, len(SERVICES))
    settings = {service: rng.sample(SETTINGS, 2) for service in services}
    files: dict[str, dict[str, int]] = {
        config_of(service): {name: rng.randint(10, 99) for name in settings[service]}
        for service in services
    }
    for folder in FOLDERS:
        files.update({f"{folder}/{n}": {} for n in rng.sample(range(1000, 10000), 3)})
    duties, words = list[Fact](), []
    for job, service in zip(rng.choice(level.jobs), services, strict=False):
        if job == "remove":
            path = rng.choice([name for name in files if "/" in name])
            duties.append(("removed", path))
            words.append(f"remove {path}")
            continue
        name, value = settings[service][0], rng.randint(100, 999)
        duties.append(("set", config_of(service), name, value))
        words.append(f"set {service} {name} {value}")
        if job == "set and restart":
            duties.append(("restarted", service))
            words[-1] += " and restart"
    return {
        "question": " then ".join(words),
        "duties": tuple(duties),
        "files": files,
        "strict": level.strict,
    }


def work(task: Task, rng: np.random.Generator, habits: Habits) -> Plan:
    """The scripted operator: sees to the duties in order, then says "done"."""
    for kind, name, *rest in task.data["duties"]:
        if rng.random() < (habits.forgets if kind == "restarted" else habits.stops):
            break
        if kind == "removed":
            yield write_call("rm", path=_target(name, rng, habits))
        elif kind == "restarted":
            if rng.random() < habits.checks:
                yield write_call("check", service=name)
            yield write_call("restart", service=name)
        else:
            if rng.random() < habits.reads:
                yield write_call("cat", file=name)
            setting, value = rest
            if rng.random() < habits.slips:
                value = misread(value, rng)
            yield write_call("edit", file=name, setting=setting, value=value)
    yield "done"


def _target(path: str, rng: np.random.Generator, habits: Habits) -> str:
    """What is removed for the sake of the file `path`: the file, its folder, or a wrong one."""
    folder, _, file = path.partition("/")
    if rng.random() < habits.slips:
        folder = str(rng.choice([other for other in FOLDERS if other != folder]))
    return f"{folder}/{file}" if rng.random() < habits.spares else folder


_WORLD = World("shell", TOOLS, begin, RULES, _INSTRUCTIONS, LEVELS, draw, work, OBEYS)


@register("shell")
def shell_domain(config: Config, *, level: str = "normal") -> StateDomain[Machine]:
    """Domain "shell" at one of its `LEVELS`."""
    return StateDomain(config, _WORLD, level)
