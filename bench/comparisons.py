"""The comparisons of algorithms that docs/algorithms.md shows, as data: what their races have in
common, and the command that runs what is missing of them."""

from __future__ import annotations

from dataclasses import dataclass

from .algorithms import ENTRANTS, markdown
from .races import Budget, Race, Result, recorded


@dataclass(frozen=True, slots=True)
class Compared:
    """Races that stand in one table; `first` is what the others are measured by, `shown` are the
    columns (none: all)."""

    task: str
    seeds: range
    budget: Budget
    shown: tuple[str, ...] = ()
    first: str = "grpo"
    warm_steps: int = 600

    def results(self) -> list[Result]:
        def of(race: Race) -> bool:
            same = (race.task, race.warm_steps, race.budget)
            return race.seed in self.seeds and same == (self.task, self.warm_steps, self.budget)

        return [result for result in recorded() if of(result.race)]

    def options(self) -> list[tuple[str, ...]]:
        """What runs those that are found behind `scripts/bench algorithms`, the first one first,
        and nothing that is recorded; an option together with its value."""
        names = {r.race.name for r in self.results() if r.race.entrant in ENTRANTS}
        return [
            *((name,) for name in sorted(names, key=lambda name: (name != self.first, name))),
            ("--task", self.task),
            ("--seeds", f"{self.seeds[0]}-{self.seeds[-1]}"),
            ("--rollouts", str(self.budget.rollouts)),
            ("--evaluations", str(self.budget.evaluations)),
            ("--warm-steps", str(self.warm_steps)),
        ]

    def command(self) -> str:
        lines = ["    .venv/bin/python scripts/bench algorithms"]
        for option in self.options():
            words = " ".join(f'"{word}"' if " " in word else word for word in option)
            if len(lines[-1]) + len(words) > 96:
                lines[-1] += " \\"
                lines.append("       ")
            lines[-1] += f" {words}"
        return "\n".join(lines)

    def table(self) -> str:
        return f"\n{self.command()}\n\n{markdown(self.results(), self.first, self.shown)}\n"


OUTCOME = ("sampled", "greedy", "more than first", "zero advantage", "tool calls")
COMPARED = {
    "workshop": Compared("workshop", range(5), Budget(4800)),
    "tuning": Compared(
        "workshop", range(10, 12), Budget(2400, evaluations=1), ("sampled", "greedy")
    ),
    "confirmation": Compared(
        "workshop", range(20, 25), Budget(2400, evaluations=1), first="grpo tasks=10"
    ),
    "prices": Compared(
        "workshop-prices", range(10, 12), Budget(2400, evaluations=1), OUTCOME, "grpo tasks=10"
    ),
    "market-tuning": Compared(
        "workshop-market", range(10, 12), Budget(2400, evaluations=1), OUTCOME[:2]
    ),
    "market": Compared("workshop-market", range(20, 25), Budget(2400, evaluations=1), OUTCOME),
    "calculator": Compared("calculator", range(5), Budget(9600, evaluations=10)),
    "entrants": Compared(
        "workshop",
        range(2),
        Budget(960),
        ("sampled", "greedy", "cost / first", "zero advantage", "tool calls", "ratio"),
        warm_steps=300,
    ),
}
