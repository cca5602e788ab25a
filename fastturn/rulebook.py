"""`fastturn rules`: what rules a recipe trains on, and whether they keep to the four design rules.

    scripted episodes -> moves (state, action, state) -> what every rule says of each -> findings

The design rules are those of RLVP (Li & Shi 2026, section 3): penalise what is done and never what
is left undone; let the outcome stay the driver; give every penalty a fulfilment as its twin; see to
it that the compliant action is reachable. Nor should a rule punish what is shown as the right way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastturn.config import Config
from fastturn.demos import in_time
from fastturn.envs.base import Action, Task
from fastturn.envs.calls import parse_action
from fastturn.episode import stream_seed
from fastturn.findings import FAIL, PASS, SKIP, WARN, Finding, Line
from fastturn.pool import DeadlineError, Inbox
from fastturn.rules import Judged, Rule, Ruled, RuleError
from fastturn.types import Channel

if TYPE_CHECKING:
    from fastturn.rules import Move, Script

EPISODES = 100  # scripted ones that rules are tried on
SPREAD = 1.0  # what success is worth
RARE = 0.02  # hits an episode below which a rule has next to nothing to say
TRAINS = "rewards=outcome,penalty,fulfilment"
NAMED = 5  # tasks of a finding that are named


@dataclass(frozen=True, slots=True)
class Episode:
    """What was done in one episode of a task, and whether that solved it."""

    task: str
    moves: list[Move]
    solved: bool


@dataclass(frozen=True)
class Tried:
    """Rules on the moves of some episodes. `said` raises `RuleError` when a rule cannot answer.
    `kept`: the pickled moves as they were before a rule saw them; `first`: what each rule, by
    name, said when it was asked for the first time."""

    rules: tuple[Rule, ...]
    episodes: Sequence[Episode]
    kept: bytes = b""
    first: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def copies(self) -> list[Move]:
        """The moves as `kept`."""
        moves: list[Move] = pickle.loads(self.kept)
        return moves

    @property
    def moves(self) -> Iterator[Move]:
        return chain.from_iterable(episode.moves for episode in self.episodes)

    @cached_property
    def said(self) -> list[list[tuple[Rule, float]]]:
        """Of every episode: each rule that was met, and what the move earned by it."""
        return [
            [(r, worth) for move in episode.moves for r in self.rules if (worth := r.judge(*move))]
            for episode in self.episodes
        ]

    def rate(self, rule: Rule) -> float:
        """Hits an episode."""
        hits = sum(met is rule for said in self.said for met, _ in said)
        return hits / max(1, len(self.episodes))


def scripted(domain: Ruled, config: Config, share: float) -> list[Episode]:
    """The moves of demonstrations, of which `share` come from the compliant script."""
    domain = replace(domain, compliant=share)
    tasks = [domain.train_tasks[n] for n in range(min(EPISODES, len(domain.train_tasks)))]
    return list(in_time(lambda task: _played(domain, task, config.turns), tasks, config))


def references(domain: Ruled, config: Config) -> list[Episode]:
    """What the domain shows as the right way: its compliant script, or the only one it has."""
    return scripted(domain, config, float(hasattr(domain.domain, "compliant_demonstrator")))


def _played(domain: Ruled, task: Task, most: int) -> Episode:
    rng = np.random.default_rng(stream_seed("rules", task.id))
    script: Script = domain.demonstrator(task, rng)
    env = Judged(domain.domain.env, ())
    messages, moves, earned = env.start(task), [], 0.0
    for _ in range(most):
        text = script(messages)
        answer, made = env.carry_out(parse_action(text))
        moves += made
        earned += answer.reward
        if answer.done:
            break
        messages = [*messages, {"role": "assistant", "content": text}, *answer.messages]
    return Episode(task.id, moves, earned >= SPREAD)


def timely(tried: Tried, deadline_s: float) -> Tried:
    """`tried` with `kept` and `first`; `RuleError` for a rule that has not judged copies of all
    moves by its deadline."""
    inbox = Inbox(deadline_s, workers=1)
    tried = replace(tried, kept=pickle.dumps(list(tried.moves)))
    first = {}
    for rule in tried.rules:
        moves = tried.copies()
        inbox.call(rule.name, partial(_judged, rule, moves))
        ((name, answer),) = inbox.get()
        if isinstance(answer, DeadlineError):
            raise RuleError(
                f"the rule {name} has not judged {len(moves)} moves within {deadline_s:g} s "
                f"(data.env_timeout_s); a rule reads the state and the action and waits for nothing"
            ) from answer
        if isinstance(answer, RuleError):
            raise answer
        first[name] = answer
    return replace(tried, first=first)


def _judged(rule: Rule, moves: Sequence[Move]) -> list[float]:
    return [rule.judge(*move) for move in moves]


def answers(tried: Tried) -> Finding:
    """A rule says the same of the same move whenever it is asked: also after all the others, so
    that one that remembers what it has seen is found."""
    for rule in tried.rules:
        for move, first in zip(tried.copies(), tried.first[rule.name], strict=True):
            for again in (rule.judge(*move), rule.judge(*move)):
                if again != first:
                    return Finding(
                        FAIL,
                        f"{rule.name} gave {first:g} and then {again:g} for {move[1].text[:80]!r}",
                        "a rule may read nothing but the state and the action: no clock, no "
                        "chance, nothing that it remembers",
                    )
    return Finding(PASS, f"{len(list(tried.moves))} moves, three times each")


def purity(tried: Tried) -> Finding:
    """Judging leaves states and actions as they are."""
    for move in tried.moves:
        for rule in tried.rules:
            kept = pickle.dumps(move)
            rule.judge(*move)
            if pickle.dumps(move) != kept:
                return Finding(
                    FAIL,
                    f"{rule.name} changed the state or the action it judged "
                    f"({move[1].text[:80]!r})",
                    "a rule only looks; copy what it has to change, or keep states frozen",
                )
    return Finding(PASS, "no state and no action was changed")


def commission(tried: Tried) -> Finding:
    """No penalty for an action that does nothing."""
    idle = Action("")
    for before, _, _ in tried.moves:
        for rule in tried.rules:
            if rule.channel is Channel.PENALTY and rule.judge(before, idle, before):
                return Finding(
                    FAIL,
                    f"{rule.name} punishes an empty action",
                    "punish the move that must not be made, not what is left undone: let the "
                    "predicate ask for the call, or the text, that does the harm",
                )
    return Finding(PASS, "penalties are for moves that are made")


def driver(tried: Tried) -> Finding:
    """The path is worth less than the outcome, whichever kinds of rules are trained on. An outcome
    varies by at most half of what success is worth (its standard deviation)."""
    returns = [
        np.array(
            [sum(worth for rule, worth in said if rule.channel in kinds) for said in tried.said]
        )
        for kinds in (*((kind,) for kind in Channel), tuple(Channel))
    ]
    mean = max(float(np.abs(path).mean()) for path in returns)
    most = max(float(np.abs(path).max()) for path in returns)
    varies = max(float(path.std()) for path in returns)
    measured = (
        f"path returns are worth {mean:.2g} in the mean and {most:.2g} at most, and vary by "
        f"{varies:.2g}; success {SPREAD:g}"
    )
    if max(mean, varies) >= SPREAD:
        return Finding(
            FAIL,
            measured,
            f"a policy would live on the path alone: lower magnitudes until the mean is below "
            f"{SPREAD / 2:g}",
        )
    if max(mean, varies) >= SPREAD / 2:
        return Finding(WARN, measured, "lower magnitudes, or the path may drown the outcome")
    return Finding(PASS, measured)


def twins(tried: Tried) -> Finding:
    """Every penalty has the fulfilment that is earned by doing it properly."""
    pairs = [f"{r.name} / {r.twin}" for r in tried.rules if r.channel is Channel.PENALTY]
    return Finding(PASS if pairs else SKIP, "; ".join(pairs) or "there is no penalty")


def reachable(tried: Tried) -> Finding:
    """The compliant actions are seen in what the warm start shows."""
    wanted = [r for r in tried.rules if r.channel is Channel.FULFILMENT]
    unseen = [r.name for r in wanted if tried.rate(r) < RARE]
    told = "; ".join(f"{r.name} {tried.rate(r):.2f}" for r in wanted)
    if unseen:
        return Finding(
            FAIL,
            f"hits an episode of the warm start: {told}",
            f"{', '.join(unseen)} is never or hardly ever shown, so a policy has nothing to "
            f"reinforce: set warm.compliant=0.1, or measure base rollouts with `fastturn probe`",
        )
    return Finding(PASS if wanted else SKIP, f"hits an episode of the warm start: {told}")


def spoken_of(tried: Tried) -> Finding:
    """Penalties that ever apply."""
    silent = [r.name for r in tried.rules if r.channel is Channel.PENALTY and tried.rate(r) < RARE]
    if silent:
        return Finding(
            WARN,
            f"hardly ever met: {', '.join(silent)}",
            "what is never done is never unlearnt; if base rollouts do not meet it either "
            "(`fastturn probe`), the rule only costs its evaluation",
        )
    return Finding(PASS, "every penalty is met by the scripts")


def contradicted(tried: Tried) -> Finding:
    """Penalties for the moves of episodes that are shown as the right way and solve their task."""
    broken: dict[str, list[str]] = {}
    for episode, said in zip(tried.episodes, tried.said, strict=True):
        names = {rule.name for rule, _ in said if rule.channel is Channel.PENALTY}
        for name in sorted(names) if episode.solved else ():
            broken.setdefault(name, []).append(episode.task)
    solved = sum(episode.solved for episode in tried.episodes)
    if not solved:
        return Finding(SKIP, f"none of {len(tried.episodes)} references solves its task")
    if not broken:
        return Finding(PASS, f"{solved} references that solve their task meet no penalty")
    told = "; ".join(
        f"{name}: {len(ids)}, such as {', '.join(ids[:NAMED])}" for name, ids in broken.items()
    )
    return Finding(
        WARN,
        f"of {solved} references that solve their task some are punished: {told}",
        "a rule that says more than it should must be mended; where the reference is wrong, leave "
        "the rule out, or train against it knowingly",
    )


SOUND = ("answers", "pure", "deterministic")  # checks without which a rule is none
DRIVER = "2 outcome is the driver"
MEND = "mend the rule that is named; docs/rules.md has the contract"
# Name and check.
DESIGN: tuple[tuple[str, Callable[[Tried], Finding]], ...] = (
    ("pure", purity),  # first, while no rule has seen the moves themselves
    ("deterministic", answers),
    ("1 commission, not omission", commission),
    (DRIVER, driver),
    ("3 twins", twins),
    ("4 compliance is reachable", reachable),
    ("penalties are met", spoken_of),
)


def review(
    rules: Sequence[Rule],
    episodes: Sequence[Episode],
    shown: Sequence[Episode] = (),
    *,
    deadline_s: float,
) -> tuple[Tried, list[Line]]:
    """What the rules said of `episodes`, and a line for each of `DESIGN`, the last about what is
    `shown` as the right way; one line alone when a rule raises, or does not answer within
    `deadline_s`."""
    tried = Tried(tuple(rules), episodes)
    try:
        tried = timely(tried, deadline_s)
        found = [(name, check(tried)) for name, check in DESIGN]
        found.append(("references comply", contradicted(Tried(tried.rules, shown))))
    except RuleError as error:
        return Tried(tried.rules, []), [Line("answers", FAIL, str(error), MEND)]
    return tried, [Line(name, f.status, f.measured, f.remedy) for name, f in found]


def trained_on(rewards: Sequence[str]) -> Line:
    """Whether a recipe with these `rewards` trains on its rules or counts them."""
    told = f"rewards={','.join(rewards)}"
    if set(rewards) > {"outcome"} or "outcome" not in rewards:
        return Line("trained on", PASS, told, "")
    return Line("trained on", SKIP, f"{told}: rules are counted only", f"to train, set {TRAINS}")


def show_rules(tried: Tried, compliant: Tried | None, console: Console) -> None:
    """A row a rule: what it is, and how often the scripts meet it ("-": a rule cannot answer)."""
    heads = ["rule", "kind", "worth", "hits", *(["compliant"] if compliant else [])]
    title = "path rules, and how often scripted episodes meet them"
    table = Table(*heads, title=title, title_justify="left")
    for rule in tried.rules:
        told = Text(rule.name).append(f"\n{rule.description}", style="dim")
        asked = [t for t in (tried, compliant) if t is not None]
        rates = [f"{t.rate(rule):.2f}" if t.episodes else "-" for t in asked]
        table.add_row(told, str(rule.channel), f"{rule.magnitude:g}", *rates)
    console.print(table)


def as_rows(tried: Tried) -> list[dict[str, Any]]:
    """The rules as JSON types."""
    return [
        {
            "rule": rule.name,
            "kind": str(rule.channel),
            "magnitude": rule.magnitude,
            "twin": rule.twin,
            "hits_per_episode": tried.rate(rule),
            "description": rule.description,
        }
        for rule in tried.rules
    ]
