"""A domain for tests of the loop: three turns, any digits; the reward is 1 if the last digits of
all three are even. A model that has seen a few demonstrations earns it one time in eight, and a
few iterations of any algorithm that works make it common. `Graded` pays a third for every even
answer at once, so that groups differ from the first iteration on."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastturn.config import Config
from fastturn.envs.base import Action, Observation, Task

TURNS = 3


@dataclass
class Parity:
    task: Task | None = None
    answers: list[str] = field(default_factory=list)

    def start(self, task: Task) -> list[dict]:
        self.task = task
        return [{"role": "user", "content": task.data["text"]}]

    def step(self, action: Action) -> Observation:
        self.answers.append(action.text.strip())
        if len(self.answers) < TURNS:
            reply = {"role": "tool", "content": str(len(self.answers))}
            return Observation((reply,), self.reward(), events=("tool_call",))
        return Observation((), self.reward(), True, ("answer",))

    def reward(self) -> float:
        return float(len(self.answers) == TURNS and all(map(even, self.answers)))

    def snapshot(self) -> tuple[Task | None, tuple[str, ...]]:
        return self.task, tuple(self.answers)

    def restore(self, snapshot: tuple[Task | None, tuple[str, ...]]) -> None:
        self.task, self.answers = snapshot[0], list(snapshot[1])


class GradedParity(Parity):
    def reward(self) -> float:
        return even(self.answers[-1]) / TURNS


def even(answer: str) -> bool:
    return answer[-1:].isdigit() and int(answer[-1]) % 2 == 0


class Domain:
    def __init__(self, config: Config) -> None:
        self.tools: list[dict] = []
        self.train_tasks = [Task(f"train-{i}", {"text": str(i)}) for i in range(100)]
        count = config.data.eval_tasks
        self.eval_tasks = [Task(f"eval-{i}", {"text": str(100 + i)}) for i in range(count)]

    def env(self) -> Parity:
        return Parity()

    def demonstrator(self, task, rng):
        return lambda messages: "".join(map(str, rng.integers(0, 10, rng.integers(1, 4))))


class Graded(Domain):
    def env(self) -> Parity:
        return GradedParity()
