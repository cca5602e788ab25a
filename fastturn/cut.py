"""Which sequences are read together: a token budget, groups kept whole, equal work for every rank.

Nothing here looks at a token. Once sequences are sorted, their lengths and the prefixes shared by
neighbours say all: sequences i < j share `min(shared[i+1 : j+1])` tokens, so the size of the tree
of any subset follows, and so does what it costs to train. Every rank computes the same plan from
the same numbers and makes tensors of its own part only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Cost:
    """Training cost of a packed tree, in tokens through the layers: the unit cancels in a balance.

    Forward and backward operations of L layers of width D, P weights each, H heads of width E:
    a token 6 · L · P; a visible pair 4 · L · H · E forward (scores, values) and 2.5 times that
    backward (scores again, four products), 14 in all; a scored action 6 · V · D in the head. The
    defaults are Qwen3-1.7B's ratios: P = 50.3 M, H · E = 2048, L = 28, V · D = 311 M give a pair
    9.5e-5 and an action 0.22. Other dense models are within a factor of four (SmolLM2-135M 3.8e-4
    and 0.27, Qwen3-8B 5e-5 and 0.09), where the token term leads in contexts of a few thousand.

    Example: 1000 tokens in a row, the last 100 scored: 1000 + 500,500 pairs · 9.5e-5 + 22 = 1069.5.
    """

    token: float = 1.0
    pair: float = 9.5e-5
    action: float = 0.22

    def span(self, kept: int, stop: int) -> float:
        """Of the tokens at depths kept .. stop - 1: the one at depth d sees d + 1."""
        pairs = (stop * (stop + 1) - kept * (kept + 1)) / 2
        return self.token * (stop - kept) + self.pair * pairs


COST = Cost()
CLOSE = 0.02  # ranks are even when their costs differ by this share of the mean
ROUNDS, TRIES = 4, 8  # exchanges for each rank, and how many are tried for one
SLACK = 0.03  # cost above the mean that a rank may add by levelling its micro-batches
HALVINGS = 8  # of the interval in which the level of a rank's micro-batches is searched


@dataclass(frozen=True, slots=True)
class Part:
    """A subset of the sorted sequences, by number in ascending order, with the size of its tree."""

    numbers: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0


class Forest:
    """Sorted sequences as numbers [N]: length, prefix shared with the one before (0 for the first),
    group, and how many actions are scored along it.

    Example: [1, 2, 3], [1, 2, 4], [5] have lengths 3, 3, 1 and shared 0, 2, 0; `join(Part(), [0,
    1])` is a tree of 4 tokens.
    """

    def __init__(
        self,
        length: Sequence[int],
        shared: Sequence[int],
        group: Sequence[int],
        actions: Sequence[int],
        cost: Cost = COST,
    ) -> None:
        self.length, self.group, self.actions, self.cost = length, group, actions, cost
        # least[k][i] = min(shared[i : i + 2 ** k]): a range minimum is two look-ups.
        rows = [np.asarray(shared, np.int64)]
        while (half := 1 << (len(rows) - 1)) * 2 <= len(length):
            rows.append(np.minimum(rows[-1][:-half], rows[-1][half:]))
        self._least: list[list[int]] = [row.tolist() for row in rows]

    def shared(self, left: int, right: int) -> int:
        """Tokens that sequences `left` < `right` begin with alike."""
        level = (right - left).bit_length() - 1
        row = self._least[level]
        return min(row[left + 1], row[right + 1 - (1 << level)])

    def known(self, numbers: Sequence[int], number: int) -> tuple[int, int]:
        """How many tokens of a sequence the tree of `numbers` has, and the place it would take."""
        at = bisect_left(numbers, number)
        before = self.shared(numbers[at - 1], number) if at else 0
        after = self.shared(number, numbers[at]) if at < len(numbers) else 0
        return max(before, after), at

    def join(self, part: Part, numbers: Iterable[int]) -> Part:
        """The tree of `part` with further sequences."""
        joined, tokens, cost = part.numbers.copy(), part.tokens, part.cost
        for number in numbers:
            kept, at = self.known(joined, number)
            joined.insert(at, number)
            tokens += self.length[number] - kept
            cost += self.cost.span(kept, self.length[number])
            cost += self.cost.action * self.actions[number]
        return Part(joined, tokens, cost)


def plan(forest: Forest, budget_T: int, ranks: int = 1) -> list[list[Part]]:
    """Micro-batches of every rank, equally many each (the last ones empty where there is less).

    A micro-batch is at most `budget_T` tokens, unless one sequence is longer. A group that fits is
    never divided. With one rank, micro-batches follow the order of the sequences, so that much is
    shared. With several, whole groups are dealt so that the costliest rank costs little, and every
    rank levels its micro-batches and reads the costliest first: ranks that wait for each other
    after every micro-batch then wait little.
    """
    units = _units(forest, budget_T)
    if ranks == 1:
        return [_fill(forest, units, budget_T)]
    # Neighbours share most, largest first is most even: which is better depends on the data.
    starts = (_largest_first(units, ranks), _in_order(forest, units, ranks))
    deals = [_even_out(forest, dealt, budget_T) for dealt in starts]
    dealt = min(deals, key=lambda units: _dearest_then_total(_fills(forest, units, budget_T)))
    filled = _fills(forest, dealt, budget_T)
    most, mean = max(map(len, filled)), sum(map(_cost, filled)) / ranks
    ceiling = max(*map(_cost, filled), (1 + SLACK) * mean)
    levelled = [_level(forest, mine, budget_T, (most, ceiling)) for mine in dealt]
    return [
        sorted(parts, key=lambda part: -part.cost) + [Part()] * (most - len(parts))
        for parts in levelled
    ]


def _cost(parts: Iterable[Part]) -> float:
    return sum(part.cost for part in parts)


def _fills(forest: Forest, dealt: Iterable[Sequence[Part]], budget_T: int) -> list[list[Part]]:
    return [_fill(forest, units, budget_T) for units in dealt]


def _dearest_then_total(filled: Sequence[Sequence[Part]]) -> tuple[float, float]:
    costs = [_cost(parts) for parts in filled]
    return max(costs), sum(costs)


def _units(forest: Forest, budget_T: int) -> list[Part]:
    """Groups in the order of their first sequence; one over the budget in pieces of siblings."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(forest.group):
        members.setdefault(group, []).append(number)
    units: list[Part] = []
    for numbers in members.values():
        whole = forest.join(Part(), numbers)
        if whole.tokens <= budget_T:
            units.append(whole)
        else:
            pieces = [forest.join(Part(), [number]) for number in numbers]
            units.extend(_fill(forest, pieces, budget_T))
    return sorted(units, key=_first)


def _first(unit: Part) -> int:
    return unit.numbers[0]


def _fill(
    forest: Forest, units: Iterable[Part], budget_T: int, most: float = math.inf
) -> list[Part]:
    """Units in order, as many to a part as the budget and the cost `most` take."""
    parts: list[Part] = []
    for unit in units:
        joined = forest.join(parts[-1], unit.numbers) if parts else unit
        if parts and joined.tokens <= budget_T and joined.cost <= most:
            parts[-1] = joined
        else:
            parts.append(unit)
    return parts


def _level(
    forest: Forest, units: Sequence[Part], budget_T: int, most: tuple[int, float]
) -> list[Part]:
    """Units in parts within the budget, the costliest as cheap as can be found without more parts
    or a higher sum than `most`: what neighbours share is lost where they are parted."""
    best = _fill(forest, units, budget_T)
    low, high = 0.0, max((part.cost for part in best), default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        parts = _fill(forest, units, budget_T, middle)
        if len(parts) <= most[0] and _cost(parts) <= most[1]:
            best, high = parts, middle
        else:
            low = middle
    return best


def _in_order(forest: Forest, units: Sequence[Part], ranks: int) -> list[list[Part]]:
    """Equal lengths of the order, in cost beyond what a unit shares with the one before it."""
    added = [unit.cost for unit in units]
    for place, (left, right) in enumerate(pairwise(units), 1):
        kept = forest.shared(left.numbers[0], right.numbers[0])
        added[place] -= forest.cost.span(0, kept)
    middle = np.cumsum(added) - np.array(added) / 2
    rank_N = np.minimum((middle * ranks / max(sum(added), 1e-9)).astype(int), ranks - 1)
    return [[u for u, at in zip(units, rank_N, strict=True) if at == rank] for rank in range(ranks)]


def _largest_first(units: Sequence[Part], ranks: int) -> list[list[Part]]:
    """Every unit to the rank with the least so far, the largest first."""
    loads, dealt = [0.0] * ranks, [list[Part]() for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: -unit.cost):
        rank = loads.index(min(loads))
        loads[rank] += unit.cost
        dealt[rank].append(unit)
    return [sorted(mine, key=_first) for mine in dealt]


def _even_out(forest: Forest, dealt: list[list[Part]], budget_T: int) -> list[list[Part]]:
    """Units of every rank after moves and swaps that bring the costs of two ranks together."""
    dealt = [list(units) for units in dealt]
    filled = _fills(forest, dealt, budget_T)
    for _ in range(ROUNDS * len(dealt)):
        costs = [_cost(parts) for parts in filled]
        order = sorted(range(len(costs)), key=costs.__getitem__)
        low, high = order[0], order[-1]
        if costs[high] - costs[low] <= CLOSE * sum(costs) / len(costs):
            break
        pairs = [(high, rank) for rank in order[:-1]] + [(rank, low) for rank in order[-2:0:-1]]
        trials = (
            (dear, cheap, units, parts)
            for dear, cheap in pairs
            for units in _exchanges(dealt[dear], dealt[cheap], costs[dear] - costs[cheap])
            for parts in [_fills(forest, units, budget_T)]
            if max(map(_cost, parts)) < costs[dear]
        )
        better = next(trials, None)
        if better is None:
            break
        dear, cheap, units, parts = better
        dealt[dear], dealt[cheap] = units
        filled[dear], filled[cheap] = parts
    return dealt


def _exchanges(
    high: Sequence[Part], low: Sequence[Part], gap: float
) -> Iterator[tuple[list[Part], list[Part]]]:
    """Units of both after one of `high` is moved to `low`, or swapped with one of it: those first
    whose own costs come closest to closing the gap."""
    back = [None, *low]
    gain = np.array([[u.cost - (v.cost if v else 0.0) for v in back] for u in high])
    for at in np.argsort(np.abs(gain - gap / 2), axis=None, kind="stable")[:TRIES].tolist():
        given, taken = high[at // len(back)], back[at % len(back)]
        rest = [unit for unit in high if unit is not given] + ([taken] if taken else [])
        more = [unit for unit in low if unit is not taken] + [given]
        yield sorted(rest, key=_first), sorted(more, key=_first)
