"""What RTPO costs beside GRPO, simulated: the paper's ratio, and what each saving makes of it.

    .venv/bin/python scripts/bench savings --no-record

The paper (section G.4, tables 14 and 15) has Qwen3-1.7B on four A100s, 160 trunks, G = 3: 1.413
times GRPO's GPU-hours for 1.40 times its tokens, and 89.6 % of groups without a signal. It states
neither turns nor their lengths nor how many sequences were in flight; these are the scenarios'.
GRPO, without any saving, draws as many episodes a task as the paper's tokens allow, a part of one
too. With more
GPUs there are more trunks, 40 a GPU, and three of four GPUs sample, so that overlaps can help.
Simulated numbers are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fastturn.devices import device_called
from fastturn.shape import Shape
from fastturn.simulate import SAVINGS, Layout, Lengths, Speed, Work, iteration, stepwise

from . import command
from .record import Measured

QWEN = Shape(28, 2048, 16, 8, 128, 6144, 151936, tied=True, head_norms=True)  # Qwen3-1.7B
PAPER_RATIO, PAPER_TOKENS = 1.413, 1.4
SILENT, SILENT_WHOLE = 0.896, 0.5
TRUNKS = 40  # a GPU
METRIC = "GPU-hours / GRPO's"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`turns` of `action` tokens with observations of 256, prompts of 1024, `slots` sequences in
    flight a GPU. `apart`: three of four GPUs sample and the others train."""

    gpus: int = 4
    turns: int = 3
    action: int = 600
    slots: int = 24
    apart: bool = False

    @property
    def name(self) -> str:
        who = "apart" if self.apart else "in turn"
        gpus = f"{self.gpus} GPUs {who}"
        return f"savings/{gpus}, {self.turns} turns of {self.action}, {self.slots} in flight"

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            prompt=1024, action=self.action, answer=256, silent=SILENT, silent_whole=SILENT_WHOLE
        )

    def layout(self, *savings: str) -> Layout:
        servers = 3 * self.gpus // 4 if self.apart else 0
        return Layout(self.gpus - servers, servers, frozenset(savings), self.slots)


STATED = Scenario(slots=4)
SCENARIOS = (
    STATED,
    *(Scenario(slots=slots) for slots in (8, 24, 64, 256)),
    *(Scenario(turns=6, action=256, slots=slots) for slots in (4, 24, 256)),
    *(Scenario(gpus=gpus, apart=True) for gpus in (4, 64, 1000, 10_000)),
)


def ratios(scenario: Scenario) -> dict[str, float]:
    """GPU-hours of RTPO over GRPO's with no saving ("naive"), and with one more at a time."""
    speed, lengths = Speed.of(device_called("A100"), QWEN), scenario.lengths
    tasks, turns = TRUNKS * scenario.gpus, scenario.turns
    ours = dict(stepwise(Work(tasks, turns, 2), lengths, speed, scenario.layout()))
    tokens, hours = [], []
    for episodes in range(2, 10):  # their tokens grow with the episodes of a task
        whole = Work(tasks, turns, episodes, reverse=False)
        one = iteration(whole, lengths, speed, scenario.layout())
        tokens, hours = [*tokens, one.tokens], [*hours, one.gpu_hours]
    wanted = ours["naive"].tokens / PAPER_TOKENS
    theirs = float(np.interp(wanted, tokens, hours))
    return {name: one.gpu_hours / theirs for name, one in ours.items()}


def measure(scenario: Scenario) -> Iterator[Measured]:
    found, config = ratios(scenario), asdict(scenario)
    for name in ("naive", *SAVINGS):
        yield Measured(scenario.name, name, METRIC, "1", (found[name],), config)


def main(argv: Sequence[str] | None = None) -> int:
    args = command.options(command.parser("savings", __doc__, repeats=1), argv)
    found = (row for scenario in SCENARIOS for row in measure(scenario))
    return command.report("savings", found, args)
