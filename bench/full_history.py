"""What a trainer computes that scores turns in the whole history instead of in their contexts.

Where contexts forget (`context=strip_think`, `truncate:N`, `summarise`), the tokens of a turn were
drawn after one sequence of ids and are scored after another, so their ratio is not one before
anything has moved (RTPO, eq. 2). This is the common way to train whole episodes, and a measuring
device here: the same rollouts, the same credit, the same loss, other contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fastturn import trainer
from fastturn.algorithms import algorithm_of
from fastturn.credit import Credits
from fastturn.envs.base import Domain, Task
from fastturn.render import Renderer
from fastturn.run import Run
from fastturn.types import SiblingGroup, Trajectory

from .quickstarts import Varied


def with_history(
    domain: Domain, renderer: Renderer, task: Task, trajectory: Trajectory
) -> Trajectory:
    """The whole episode `trajectory` of `task` with the contexts that `renderer` gives it: its
    actions are carried out again, and the environment, given the same, answers the same.

    With a renderer that keeps everything these are full histories. Example: an action
    `<think>a</think>b` that its next turn read as `b` is read whole.
    """
    assert trajectory.first_turn == 0, "the history of a sibling lies in its trunk"
    env = domain.env()
    conversation = renderer.start(env.start(task))
    turns = []
    for turn in trajectory.turns:
        turns.append(replace(turn, boundary=conversation.boundary))
        action_A = turn.completion.action_A
        if len(turns) < len(trajectory.turns):
            answer = env.step(renderer.parse(action_A))
            conversation = renderer.advance(conversation, action_A, answer.messages)
    return replace(trajectory, turns=tuple(turns))


class FullHistory(Varied):
    """Scores every group in the full history of its episodes."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        most = self.config.model.max_context
        self.run = run
        self.renderer = Renderer(run.tokenizer, run.domain.tools, "keep", most)

    def update(
        self,
        chunks: Iterable[Sequence[SiblingGroup]],
        planned: int,
        version: int,
        key: tuple[int, ...],
        moved: bool = False,
    ) -> tuple[dict[str, Any], Credits]:
        """As `Learner.update`, without the proof that samples are the policy's own: in these
        contexts they are not, which is what is measured."""
        offered = self.config.tasks * algorithm_of(self.config).candidates
        tasks = {task.id: task for task in trainer.pick(self.run, key[0], offered, "train")}
        told = ([self._told(group, tasks[group.task]) for group in chunk] for chunk in chunks)
        return super().update(told, planned, version, key, moved=True)

    def _told(self, group: SiblingGroup, task: Task) -> SiblingGroup:
        domain = self.run.domain
        siblings = (with_history(domain, self.renderer, task, t) for t in group.siblings)
        return replace(group, siblings=tuple(siblings))
