"""Which sequences are read together: a token budget, groups kept whole, equal work for every rank.

Nothing here looks at a token. Once sequences are sorted, their lengths and the prefixes shared by
neighbours say all: sequences i < j share `min(shared[i+1 : j+1])` tokens, so the size of the tree
of any subset follows, and so does what it costs to train. Every rank computes the same plan from
the same numbers and makes tensors of its own part only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    shared. With several, whole groups go to the rank where the load becomes least, largest first,
    and every rank reads its most expensive micro-batch first: ranks that wait for each other after
    every micro-batch then wait least.
    """
    units = _units(forest, budget_T)
    dealt = [units] if ranks == 1 else _deal(forest, units, ranks)
    filled = [_fill(forest, mine, budget_T) for mine in dealt]
    if ranks > 1:
        filled = [sorted(parts, key=lambda part: -part.cost) for parts in filled]
    most = max(map(len, filled))
    return [parts + [Part()] * (most - len(parts)) for parts in filled]


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
    return sorted(units, key=lambda unit: unit.numbers[0])


def _fill(forest: Forest, units: Iterable[Part], budget_T: int) -> list[Part]:
    """Units in order, as many to a part as the budget takes."""
    parts: list[Part] = []
    for unit in units:
        joined = forest.join(parts[-1], unit.numbers) if parts else unit
        if parts and joined.tokens <= budget_T:
            parts[-1] = joined
        else:
            parts.append(unit)
    return parts


def _deal(forest: Forest, units: Sequence[Part], ranks: int) -> list[list[Part]]:
    """Units of every rank, in order: the largest first, each to where the load becomes least.

    What a unit's first sequence shares with a rank's sequences costs nothing there, so groups with
    one long context meet on one rank when the balance allows it.
    """
    loads = [0.0] * ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    dealt: list[list[Part]] = [[] for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: -unit.cost):
        after = [
            load + unit.cost - forest.cost.span(0, forest.known(mine, unit.numbers[0])[0])
            for load, mine in zip(loads, held, strict=True)
        ]
        rank = after.index(min(after))
        loads[rank] = after[rank]
        held[rank] = sorted(held[rank] + unit.numbers)
        dealt[rank].append(unit)
    return [sorted(mine, key=lambda unit: unit.numbers[0]) for mine in dealt]
