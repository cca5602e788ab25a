"""What `fastturn check-env` asks of an environment: the contract that training relies on.

    domain -> episodes, recorded once (scripts and probes) -> CHECKS play them again -> lines

Each check asks one thing, and is left out where what it needs is missing already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastturn.config import Config
from fastturn.envs.base import Domain, Observation, unreadable, unusable
from fastturn.findings import FAIL, PASS, SKIP, WARN, Finding, Line
from fastturn.pool import DeadlineError
from fastturn.recorded import Answer, Record, Subject, replay

SLOW_STEP_S, SLOW_STATE_S, LARGE_STATE = 1.0, 0.05, 1 << 20
CONTRACT = 'docs/environments.md, "What the trainer relies on"'


def tasks_are_there(subject: Subject) -> Finding:
    """There is something to train on, and something to be tried on."""
    measured = (
        f"{len(subject.domain.train_tasks):,} training tasks, "
        f"{len(subject.domain.eval_tasks):,} held out"
    )
    if not len(subject.domain.train_tasks) or not len(subject.domain.eval_tasks):
        return Finding(FAIL, measured, "give it at least one of each")
    return Finding(PASS, measured)


def tasks_differ(subject: Subject) -> Finding:
    """Ids are unique, contents picklable, and no held-out task is trained on."""
    train, held_out = subject.domain.train_tasks, subject.domain.eval_tasks
    some = [train[i] for i in range(min(len(train), 2000))]
    ids = [task.id for task in [*some, *held_out]]
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        return Finding(FAIL, f"the id {twice!r} belongs to several tasks", "give each its own id")
    asked = {pickle.dumps(dict(task.data)) for task in some}
    common = [task.id for task in held_out if pickle.dumps(dict(task.data)) in asked]
    if common:
        return Finding(
            FAIL,
            f"{len(common)} held-out tasks are training tasks as well, such as {common[0]}",
            "keep them apart: success on them would show memory",
        )
    return Finding(PASS, f"{len(ids):,} compared")


def calls_return(subject: Subject) -> Finding:
    """Episodes can be played: no call hangs, and none but a step raises."""
    try:
        steps = sum(len(record.answers) for record in subject.records)
    except DeadlineError as error:
        return Finding(
            FAIL, str(error), "bound what it waits for, or raise data.env_timeout_s if it needs so"
        )
    return Finding(PASS, f"{len(subject.records)} episodes, {steps} steps")


def answers_are_observations(subject: Subject) -> Finding:
    """Whatever the policy says is answered by an observation of the right form."""
    for record in subject.records:
        wrong = unreadable(record.first, True) or next(
            (problem for answer in record.answers if (problem := _wrong(answer))), ""
        )
        if wrong:
            return Finding(FAIL, f"{record.where}: {wrong}", "mend start or step")
    return Finding(PASS, "messages for the policy, finite rewards")


def _wrong(answer: Any) -> str:
    """What is wrong with an answer, or nothing."""
    if isinstance(answer, Exception):
        return f"the step raised {type(answer).__name__}: {answer}"
    return unusable(answer) or unreadable(answer.messages, not answer.done)


def picklable(subject: Subject) -> Finding:
    """Every snapshot can be pickled: siblings and checkpoints get copies."""
    try:
        return Finding(PASS, f"{sum(len(states) for _, states in subject.states)} snapshots")
    except pickle.PicklingError as error:
        return Finding(
            FAIL,
            str(error),
            "keep in the snapshot plain data and classes of a module: no functions, locks, "
            "open files, connections",
        )


def repeatable(subject: Subject) -> Finding:
    """The same task and actions give the same answers in another instance."""
    for record in subject.records:
        env = subject.env()
        if env.start(record.task) != record.first:
            return Finding(FAIL, f"{record.where} began differently the second time", _DRAW)
        if found := _difference(record, replay(env, record)):
            return Finding(FAIL, found, _DRAW)
    return Finding(PASS, f"{len(subject.records)} episodes, twice each")


_DRAW = "draw any randomness from the task, or keep the generator in the state"
_ALL = "restore must bring back all that step reads (random state, files, clocks)"


def _difference(record: Record, answers: Sequence[Answer], first: int = 0) -> str:
    """Where `answers` differ from the recorded ones, or nothing."""
    for turn, (was, now) in enumerate(zip(record.answers[first:], answers, strict=True), first + 1):
        if repr(was) != repr(now):
            return f"{record.where}, turn {turn}: {was!r:.100} the first time, then {now!r:.100}"
    return ""


def snapshots_carry_all(subject: Subject) -> Finding:
    """From every snapshot, pickled and restored, the episode goes on as it did."""
    for record, states in subject.states:
        for turn, state in enumerate(states):
            again = replay(subject.restored(state), record, turn)
            if found := _difference(record, again, turn):
                return Finding(FAIL, f"restored: {found}", _ALL)
    return Finding(PASS, "each played to its end")


def restored_again(subject: Subject) -> Finding:
    """A snapshot of a restored instance is as good as the one it was restored from."""
    for record, states in subject.states:
        for turn, state in enumerate(states):
            twin = subject.restored(pickle.dumps(subject.restored(state).snapshot()))
            if found := _difference(record, replay(twin, record, turn), turn):
                return Finding(FAIL, f"restored twice: {found}", _ALL)
    return Finding(PASS, "snapshots of snapshots, each played to its end")


def snapshots_stay(subject: Subject) -> Finding:
    """Neither the instance a snapshot was taken of nor those restored from it change it."""
    for record in subject.records:
        env = subject.begun(record)
        for turn, action in enumerate(record.actions, 1):
            state, twin = env.snapshot(), subject.env()
            before = pickle.dumps(state)
            twin.restore(state)
            for each in (env, twin):
                each.step(action)
                if pickle.dumps(state) != before:
                    return Finding(
                        FAIL,
                        f"{record.where}, turn {turn}: a step changed the snapshot before it",
                        "snapshot must return a copy, and restore must copy it again",
                    )
    return Finding(PASS, "steps leave them alone")


def instances_are_apart(subject: Subject) -> Finding:
    """Episodes that are played at once, on threads, are answered as they are alone."""

    def again(record: Record) -> str:
        return _difference(record, replay(subject.begun(record), record))

    with ThreadPoolExecutor(8) as pool:
        found = next(filter(None, pool.map(again, subject.records * 2)), "")
    if found:
        return Finding(FAIL, f"beside others: {found}", "share no state between instances")
    return Finding(PASS, f"{2 * len(subject.records)} episodes, eight at a time")


def nothing_after_the_end(subject: Subject) -> Finding:
    """A step after the end raises, or earns nothing and ends again."""
    over = [record for record in subject.records if record.ended]
    for record in over:
        env = subject.begun(record)
        replay(env, record)
        more = env.step(record.actions[-1])
        if isinstance(more, Observation) and (more.reward or not more.done):
            return Finding(
                FAIL,
                f"{record.where}: a step after the end earns {more.reward:g}, done={more.done}",
                "raise an error, or answer with reward 0 and done=True",
            )
    if not over:
        return Finding(SKIP, "no episode came to its end")
    return Finding(PASS, f"{len(over)} ended episodes")


def bad_calls_count(subject: Subject) -> Finding:
    """Calls are counted, those that cannot be read as well."""
    if not subject.domain.tools:
        return Finding(SKIP, "the domain describes no tools")
    for record in subject.records:
        for action, answer in zip(record.actions, record.answers, strict=True):
            if isinstance(answer, Observation) and len(action.calls) != answer.events.count(
                "tool_call"
            ):
                return Finding(
                    WARN,
                    f"{record.where}: {len(action.calls)} calls, events {answer.events!r:.80}",
                    "begin the events of every call with tool_call (envs.tools.run_calls does)",
                )
    return Finding(PASS, "every call is an event")


def rewards_differ(subject: Subject) -> Finding:
    """Demonstrations earn something, and not everything earns the same."""
    totals = sorted(record.total for record in subject.records)
    measured = f"returns {totals[0]:.3g} to {totals[-1]:.3g}"
    shown = subject.shown
    if shown:
        solved = sum(record.total >= 1.0 for record in shown)
        measured += f"; {solved} of {len(shown)} demonstrations succeed"
        if not solved:
            return Finding(WARN, measured, "a demonstration should earn 1 or more in all")
    if totals[0] == totals[-1] and not shown:
        return Finding(SKIP, f"{measured}; there are no demonstrations to show more")
    return Finding(PASS, measured)


def timing(subject: Subject) -> Finding:
    """How long calls take, and how large a state is."""
    median = {name: float(np.median(seconds)) for name, seconds in subject.seconds.items()}
    size = max(len(state) for _, states in subject.states for state in states)
    told = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in median.items())
    measured = f"medians: {told}; a state has up to {size:,} bytes"
    if median["step"] > SLOW_STEP_S:
        return Finding(WARN, measured, "rollouts wait for steps: make them faster")
    if max(median["snapshot"], median["restore"]) > SLOW_STATE_S or size > LARGE_STATE:
        return Finding(
            WARN,
            measured,
            "every boundary keeps a snapshot and every sibling restores one: keep in it what "
            "changes, and in the domain what does not",
        )
    return Finding(PASS, measured)


@dataclass(frozen=True, slots=True)
class Check:
    """A question to a domain, asked when those that it `needs` were answered well."""

    name: str
    ask: Callable[[Subject], Finding]
    needs: tuple[str, ...] = ("calls return",)


CHECKS = (
    Check("tasks", tasks_are_there, ()),
    Check("held-out tasks", tasks_differ, ("tasks",)),
    Check("calls return", calls_return, ("tasks",)),
    Check("observations", answers_are_observations),
    Check("determinism", repeatable),
    Check("pickling", picklable),
    Check("snapshot round trip", snapshots_carry_all, ("pickling",)),
    Check("restore after restore", restored_again, ("pickling",)),
    Check("snapshots stay", snapshots_stay, ("pickling",)),
    Check("timing", timing, ("pickling",)),  # of the calls above: one instance at a time
    Check("concurrent instances", instances_are_apart),
    Check("step after end", nothing_after_the_end),
    Check("calls counted", bad_calls_count),
    Check("rewards", rewards_differ),
)


def conform(domain: Domain, config: Config) -> list[Line]:
    """Every check, one after the other.

    Example: of an environment that draws its hints from the global generator,
    `Line("determinism", "fail", "task train-0, turn 1: ...", "draw any randomness from ...")`.
    """
    subject = Subject(domain, config)
    found: dict[str, Finding] = {}
    for check in CHECKS:
        missing = [name for name in check.needs if found[name].status not in (PASS, WARN)]
        found[check.name] = (
            Finding(SKIP, f"needs {missing[0]!r} to pass") if missing else _asked(check, subject)
        )
    return [Line(name, f.status, f.measured, f.remedy) for name, f in found.items()]


def _asked(check: Check, subject: Subject) -> Finding:
    try:
        return check.ask(subject)
    except Exception as error:  # whatever it is, it is this check's finding
        return Finding(FAIL, f"{type(error).__name__}: {error}", CONTRACT)
