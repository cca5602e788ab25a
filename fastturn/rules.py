"""Path rules: what an action was worth on the way, whatever comes of it (RLVP, Li & Shi 2026).

A rule is a pure function of the state before an action and the action. It is declared beside the
environment or in a file of the user's own (`data.rules=my_rules.py`):

    @penalty(0.25, twin="dials_in_hours")
    def dials_outside_hours(state: Desk, action: Action) -> bool:
        \"\"\"Dials a contact whose office is closed.\"\"\"
        call = action.call
        return call is not None and call.name == "dial" and not state.is_open(call.arguments)

The state is what `Env.snapshot` returned, so environments know nothing of rules: `Ruled` wraps a
domain, and what its episodes met comes out as `Observation.path`, beside the outcome's reward and
never in it. An action of several calls is judged call by call, each at the state before it.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fastturn.config import ConfigError
from fastturn.types import Channel, Hit

if TYPE_CHECKING:  # built-in domains import their rules' decorators from here
    from fastturn.envs.base import Action, Domain, Env, Message, Observation, Task

    Predicate = Callable[[Any, Action], bool]
    Potential = Callable[[Any], float]
    Move = tuple[Any, Action, Any]  # state before, an action of at most one call, state after
    Script = Callable[[Sequence[Message]], str]


class RuleError(RuntimeError):
    """A rule that could not be evaluated: names the rule, the action and what went wrong."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as its decorator made it. `worth(before, action, after)` is what the action earns
    (0: the rule does not apply); calling the rule is calling the function that was decorated.

    Example: `penalty(0.25, twin="asks")(f)` earns -0.25 where `f(state, action)` is true.
    """

    name: str
    channel: Channel
    magnitude: float
    worth: Callable[[Any, Action, Any], float]
    function: Callable[..., Any]
    twin: str = ""
    description: str = ""

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def judge(self, before: Any, action: Action, after: Any) -> float:
        """`worth`, or `RuleError` when the rule raises, or the result is no finite number or
        larger than the magnitude."""
        try:
            value = float(self.worth(before, action, after))
        except Exception as error:
            raise RuleError(
                f"the rule {self.name} raised {type(error).__name__}: {error}; a rule must answer "
                f"for every action, also for {action.text[:200]!r}"
            ) from error
        if not math.isfinite(value):
            raise RuleError(f"the rule {self.name} gave {value}; expected a finite number")
        if abs(value) > self.magnitude * (1 + 1e-9):
            raise RuleError(
                f"the rule {self.name} gave {value:g}, more than its magnitude "
                f"{self.magnitude:g}: expected a potential between 0 and 1; divide it by its range"
            )
        return value


def penalty(magnitude: float, twin: str) -> Callable[[Predicate], Rule]:
    """Decorator: every action for which the predicate is true earns `-magnitude`. `twin` names the
    fulfilment that is earned by doing the same thing properly."""
    return _two_sided(Channel.PENALTY, -1.0, magnitude, twin)


def fulfilment(magnitude: float, twin: str) -> Callable[[Predicate], Rule]:
    """Decorator: every action for which the predicate is true earns `magnitude`. `twin` names the
    penalty of the bad move that this one replaces."""
    return _two_sided(Channel.FULFILMENT, 1.0, magnitude, twin)


def progress(magnitude: float) -> Callable[[Potential], Rule]:
    """Decorator of a potential, a function of the state in [0, 1]: an action earns `magnitude`
    times what it changed the potential by (potential-based shaping, Ng et al. 1999)."""

    def declare(function: Potential) -> Rule:
        def worth(before: Any, action: Action, after: Any) -> float:
            return magnitude * (function(after) - function(before))

        return _rule(Channel.PROGRESS, magnitude, worth, function)

    return declare


def _two_sided(
    channel: Channel, sign: float, magnitude: float, twin: str
) -> Callable[[Predicate], Rule]:
    def declare(function: Predicate) -> Rule:
        def worth(before: Any, action: Action, after: Any) -> float:
            return sign * magnitude if function(before, action) else 0.0

        return _rule(channel, magnitude, worth, function, twin)

    return declare


def _rule(
    channel: Channel,
    magnitude: float,
    worth: Callable[[Any, Action, Any], float],
    function: Callable[..., Any],
    twin: str = "",
) -> Rule:
    lines = (inspect.getdoc(function) or "").splitlines()
    description = lines[0] if lines else ""
    return Rule(function.__name__, channel, magnitude, worth, function, twin, description)


def checked(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """`rules`, or `ConfigError` when they cannot be trained on: two of one name, a penalty or
    fulfilment without its twin, or a magnitude that one hit could buy a success with.

    An outcome is worth 1, so magnitudes lie in (0, 1).
    """
    named = {rule.name: rule for rule in rules}
    for name, count in Counter(rule.name for rule in rules).items():
        if count > 1:
            raise ConfigError(f"the rule {name!r} is declared {count} times; rename one of them")
    for rule in rules:
        if not (isinstance(rule.magnitude, int | float) and 0 < rule.magnitude < 1):
            raise ConfigError(
                f"the rule {rule.name!r} has magnitude {rule.magnitude!r}: expected a number "
                f"between 0 and 1, because success is worth 1 and must stay worth more than any "
                f"one move; 0.25 is a usual choice"
            )
        _check_twin(rule, named)
    return tuple(rules)


OPPOSITE = {Channel.PENALTY: Channel.FULFILMENT, Channel.FULFILMENT: Channel.PENALTY}


def _check_twin(rule: Rule, named: dict[str, Rule]) -> None:
    if rule.channel not in OPPOSITE:
        return
    opposite, twin = OPPOSITE[rule.channel], named.get(rule.twin)
    if twin is None or twin.channel is not opposite:
        have = [name for name, other in named.items() if other.channel is opposite]
        raise ConfigError(
            f"the {rule.channel} {rule.name!r} names the twin {rule.twin!r}: expected a "
            f"{opposite} among these rules ({', '.join(have) or 'there is none'}); declare one, "
            f"so that avoiding the move is not the only way to earn anything"
        )


@dataclass(frozen=True, slots=True)
class Ruled:
    """A domain whose episodes are judged by `rules`.

    `compliant`: the share of demonstrations that the domain's `compliant_demonstrator` gives.
    """

    domain: Domain
    rules: tuple[Rule, ...]
    compliant: float = 0.0

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self.domain.tools

    @property
    def train_tasks(self) -> Sequence[Task]:
        return self.domain.train_tasks

    @property
    def eval_tasks(self) -> Sequence[Task]:
        return self.domain.eval_tasks

    def env(self) -> Env:
        return Judged(self.domain.env, self.rules)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Script:
        if self.compliant and rng.random() < self.compliant:
            script: Script = self.domain.compliant_demonstrator(task, rng)  # type: ignore[attr-defined]
            return script
        return self.domain.demonstrator(task, rng)


class Judged:
    """An environment whose observations say which rules the action met.

    `make` makes the environment itself. Of an action with several calls the states in between are
    found by carrying the calls out one by one in another instance, which by the contract of `Env`
    gives the same states.
    """

    def __init__(self, make: Callable[[], Env], rules: Sequence[Rule]) -> None:
        self._make, self._rules, self._env = make, rules, make()

    def start(self, task: Task) -> list[Message]:
        return self._env.start(task)

    def snapshot(self) -> Any:
        return self._env.snapshot()

    def restore(self, snapshot: Any) -> None:
        self._env.restore(snapshot)

    def step(self, action: Action) -> Observation:
        """The environment's observation, with `path`."""
        observation, moves = self.carry_out(action)
        hits = [
            Hit(rule.name, rule.channel, value, call)
            for call, move in enumerate(moves)
            for rule in self._rules
            if (value := rule.judge(*move))
        ]
        return replace(observation, path=tuple(hits))

    def carry_out(self, action: Action) -> tuple[Observation, list[Move]]:
        """The environment's observation, and what rules are to judge."""
        before = self._env.snapshot()
        observation = self._env.step(action)
        apart = _apart(action)
        between = self._between(before, apart[:-1]) if len(apart) > 1 else []
        states = [before, *between, self._env.snapshot()]
        moves = [
            (start, one, end) for one, (start, end) in zip(apart, pairwise(states), strict=False)
        ]
        return observation, moves

    def _between(self, state: Any, moves: Iterable[Action]) -> Iterator[Any]:
        """The state after each of the moves; fewer where a call ended the episode."""
        other = self._make()
        other.restore(state)
        for move in moves:
            done = other.step(move).done
            if done:
                return
            yield other.snapshot()


def _apart(action: Action) -> list[Action]:
    """The action taken apart: one for each call; an action without calls is one move."""
    if len(action.calls) < 2:
        return [action]
    return [replace(action, calls=(call,)) for call in action.calls]
