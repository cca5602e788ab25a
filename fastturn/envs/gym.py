"""Tasks of the package reasoning-gym: a hundred generators, each with its own verifier.

`data.domain=gym:generator=leg_counting`; the answer is `\\boxed{...}`. Verifiers give shaped scores
(a wrong answer may earn 0.07) and are written for text that is the answer and nothing else, so the
box is opened first, and only a full score is a reward. Several of them evaluate what they are
given, so they run in the sandbox, as programs of the model do; one that raises, or is late, is the
event `verifier_error`.
"""

from __future__ import annotations

import base64
import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs.answers import boxed
from fastturn.envs.base import Action, DomainError, Env, Message, Observation, Task, register
from fastturn.envs.calls import spoken
from fastturn.envs.sandbox import Sandbox, shared
from fastturn.envs.tools import Grade, ToolEnv
from fastturn.options import nearest

TASKS = 2_000  # of a run: some generators make all of theirs at once, and some have not many more
_EVAL_SEED = 0x5EED  # the same held-out tasks for every run, whatever its seed
MOST_CHARS = 10_000  # of an answer
_INSTRUCTIONS = "Think step by step, then give your answer as \\boxed{answer}."
_VERIFY = """
import base64, pickle, reasoning_gym
name, answer, entry = pickle.loads(base64.b64decode({given!r}))
print(float(reasoning_gym.get_score_answer_fn(name)(answer, entry)))
"""


class Verifier:
    """Scores of a generator's answers, in a process that can do no harm.

    Example: `Verifier("chain_sum", sandbox)(entry, "4")` is 1.0 where the answer is 4.
    """

    def __init__(self, generator: str, sandbox: Sandbox) -> None:
        self._generator, self._sandbox = generator, sandbox

    def __call__(self, entry: Mapping[str, Any], answer: str) -> float | None:
        """The score, 0 to 1; None when the verifier raised or did not end."""
        if answer == entry["answer"]:
            return 1.0
        if len(answer) > MOST_CHARS:
            return 0.0
        given = base64.b64encode(pickle.dumps((self._generator, answer, dict(entry)))).decode()
        outcome = self._sandbox.run([_VERIFY.format(given=given)])
        last = outcome.output.strip().rpartition("\n")[2]
        try:
            return min(max(float(last), 0.0), 1.0) if outcome.finished else None
        except ValueError:
            return None


def grade(verifier: Verifier, task: Task, text: str) -> Grade:
    """1 for a box with a full score. Events: "answer", "no_answer", "verifier_error"."""
    answer = boxed(spoken(text))
    if answer is None:
        return Grade(0.0, ("no_answer",))
    score = verifier(task.data["entry"], answer)
    if score is None:
        return Grade(0.0, ("answer", "verifier_error"))
    return Grade(float(score >= 1.0), ("answer",))


class TriesEnv(ToolEnv):
    """An episode without tools in which a wrong answer may be given again: `tries` answers at most.

    Example: with two tries, a wrong first answer is answered by "That is not right. Try again.".
    """

    def __init__(
        self,
        prompt: Callable[[Task], list[Message]],
        grade: Callable[[Task, str], Grade],
        tries: int,
    ) -> None:
        super().__init__({}, prompt, grade)
        self._left = tries

    def step(self, action: Action) -> Observation:
        """Grade the answer; ask again while tries are left."""
        task = self._task
        answer = super().step(action)
        if not answer.done or answer.reward >= 1.0 or self._left == 1:
            return answer
        self._task, self._left = task, self._left - 1
        again = {"role": "user", "content": "That is not right. Try again."}
        return Observation((again,), events=answer.events)

    def snapshot(self) -> tuple[Any, int]:
        """The task, and how many answers may still be given."""
        return super().snapshot(), self._left

    def restore(self, snapshot: tuple[Any, int]) -> None:
        """Continue from `snapshot`."""
        task, self._left = snapshot
        super().restore(task)


class Generated(Sequence[Task]):
    """The tasks of a data set, made when they are asked for; in place of one that is held out comes
    the next that is not."""

    def __init__(self, entries: Any, part: str, held_out: frozenset[str] = frozenset()) -> None:
        self._entries, self._part, self._held_out = entries, part, held_out

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        for offset in range(len(self)):
            entry = self._entries[(number + offset) % len(self)]
            if entry["question"] not in self._held_out:
                return Task(f"{self._part}-{number}", {"entry": entry})
        raise DomainError(
            f"all {len(self)} training tasks are held out; lower data.eval_tasks, or choose a "
            "generator with more of them"
        )


def create(generator: str, seed: int, size: int) -> Any:
    """The generator's data set. Raises `ConfigError` for a name that is unknown or not usable."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "data.domain=gym needs the package reasoning-gym, which is not installed; run: "
            'pip install "fastturn[gym]"'
        )
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if generator not in DATASETS:
        raise ConfigError(
            f"data.domain=gym:generator={generator}: reasoning-gym has no such generator; the "
            f"nearest is {nearest(generator, DATASETS)!r}, for example "
            "data.domain=gym:generator=leg_counting"
        )
    try:
        return reasoning_gym.create_dataset(generator, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.domain=gym:generator={generator}: {size} tasks cannot be made ({error}); set "
            "another size or data.eval_tasks, or choose another generator"
        ) from error


@register("gym")
class GymDomain:
    """Domain "gym". Options: `generator`, a name of reasoning-gym; `tries`, the answers that an
    episode may give; `size`, the training tasks. Instructions go into the prompt only for a
    pretrained model (`model.path` is set)."""

    def __init__(
        self, config: Config, *, generator: str = "", tries: int = 1, size: int = TASKS
    ) -> None:
        if config.data.path:
            raise ConfigError(
                f"data.path={config.data.path!r}: the domain 'gym' makes its own tasks; leave "
                "data.path empty"
            )
        if not 1 <= tries <= config.turns:
            raise ConfigError(
                f"data.domain: tries={tries}: expected 1 to turns={config.turns}, because every "
                "try is a turn"
            )
        # Seeds of runs are small numbers; the held-out one is none of them.
        held_out = Generated(create(generator, _EVAL_SEED, config.data.eval_tasks), "eval")
        different = {task.data["entry"]["question"]: task for task in held_out}
        self.eval_tasks: Sequence[Task] = list(different.values())
        entries = create(generator, config.seed, size)
        self.train_tasks: Sequence[Task] = Generated(entries, "train", frozenset(different))
        self.tools: list[dict[str, Any]] = []
        self._described, self._tries = bool(config.model.path), tries
        self._grade = partial(grade, Verifier(generator, shared(config.data.tool_timeout_s)))

    def env(self) -> Env:
        """One episode."""
        return TriesEnv(self._prompt, self._grade, self._tries)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["entry"]["question"]}]
        if self._described:
            messages.insert(0, {"role": "system", "content": _INSTRUCTIONS})
        return messages

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """Boxes the generator's own answer. Raises `ConfigError` where it has only a verifier."""
        answer = task.data["entry"]["answer"]
        if answer is None:
            raise ConfigError("this generator has no answers to show; set warm.steps=0")
        return lambda messages: f"\\boxed{{{answer}}}"
