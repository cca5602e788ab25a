"""What episodes of held-out tasks come to: success of one and of several tries, tools, lengths.

Tries are lists of episodes, one list a task; one that was lost counts as not solved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastturn.envs.base import CALL_FAILURES
from fastturn.types import Ending, Trajectory

Tries = Sequence[Sequence[Trajectory]]
RESAMPLES = 2000
SURE = 0.95


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The chance that at least one of k tries solves the task, unbiased from n of which `solved`
    did: 1 - C(n - solved, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Example: `pass_at_k(4, 1, 2)` is 1/2.
    """
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over tasks; the same for the same values.

    Example: of values that are all equal it is that value twice.
    """
    value_N = np.asarray(values, np.float64)
    rng = np.random.default_rng(0)
    mean_R = value_N[rng.integers(0, len(value_N), (RESAMPLES, len(value_N)))].mean(1)
    low, high = np.quantile(mean_R, [(1 - SURE) / 2, (1 + SURE) / 2])
    return float(low), float(high)


def failure(episode: Trajectory) -> str:
    """Why an episode did not solve its task, by the first of these that holds: it did not end by
    itself (how it ended), gave no answer, answered wrongly with or without a call that failed."""
    events = [event for turn in episode.turns for event in turn.events]
    if episode.ending is not Ending.FINISHED:
        return str(episode.ending)
    if "no_answer" in events:
        return "no answer"
    return "wrong, a call failed" if failed_calls(episode) else "wrong"


def calls(episode: Trajectory) -> int:
    """Attempted tool calls, readable or not."""
    return sum(turn.events.count("tool_call") for turn in episode.turns)


def failed_calls(episode: Trajectory) -> int:
    """Calls that could not be read or carried out. An event behind "tool_call" is of that call;
    where the environment ended the episode it may be the verdict instead, so there the names of the
    tool layer count alone."""
    finished = episode.ending is Ending.FINISHED
    return sum(
        before == "tool_call"
        and event != "tool_call"
        and (event in CALL_FAILURES or not finished or turn is not episode.turns[-1])
        for turn in episode.turns
        for before, event in zip(turn.events, turn.events[1:], strict=False)
    )


def occurred(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The share of episodes in which each event occurred that is not of a call: what environments
    say of answers ("exact_match")."""
    found = Counter(
        event
        for episode in episodes
        for event in {event for turn in episode.turns for event in turn.events}
        if event not in CALL_FAILURES and event != "tool_call"
    )
    return {event: count / len(episodes) for event, count in sorted(found.items())}


def measures(tries: Tries, samples: int) -> dict[str, Any]:
    """All measures of `samples` tries a task, shares and means over episodes unless named else.

    `pass@k` for k = 1 and the powers of two up to `samples`, each with its interval over tasks;
    `reward` is the mean reward of an episode (F1, where the domain's reward is that), with its
    interval over tasks.
    """
    episodes = [episode for tried in tries for episode in tried]
    total = len(tries) * samples
    found: dict[str, Any] = {"tasks": len(tries), "samples": samples}
    for k in (2**power for power in range(samples.bit_length())):
        values = [pass_at_k(samples, sum(e.success for e in tried), k) for tried in tries]
        found[f"pass@{k}"] = float(np.mean(values))
        found[f"pass@{k}_interval"] = interval(values)

    def mean(measure: Callable[[Trajectory], float]) -> float:
        return sum(map(measure, episodes)) / max(1, len(episodes))

    rewards = [sum(e.discounted_return() for e in tried) / len(tried) for tried in tries if tried]
    attempted, errors = mean(calls), mean(failed_calls)
    solved = sum(episode.success for episode in episodes)
    sampled = sum(episode.tokens_sampled for episode in episodes)
    unsolved = [episode for episode in episodes if not episode.success]
    modes, ended = Counter(map(failure, unsolved)), Counter(e.ending for e in episodes)
    return found | {
        "reward": mean(lambda e: e.discounted_return()),
        "reward_interval": interval(rewards or [0.0]),
        "violation_free": mean(lambda e: e.violation_free),
        "tool_calls": attempted,
        "tool_errors": errors,
        "tool_success": 1 - errors / attempted if attempted else None,
        "turns": mean(lambda e: len(e.turns)),
        "response_tokens": mean(lambda e: e.tokens_sampled),
        "tokens_per_success": sampled / solved if solved else None,
        **{f"ended_{ending}": ended[ending] / max(1, len(episodes)) for ending in Ending},
        "lost": total - len(episodes),
        "events": occurred(episodes),
        "failures": {mode: count / max(1, total) for mode, count in modes.most_common()},
    }
