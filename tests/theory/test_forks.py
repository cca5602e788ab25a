"""Theorems 2 and 3 on the real tree: trunks, stages and forks played through `tree.Rollout`, with a
sampler that draws from a table. Sampled, so with a stated error; everything else is enumerated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fastturn.config import Config
from fastturn.envs.base import Action, Observation, Task
from fastturn.episode import Point
from fastturn.play import Unmetered
from fastturn.render import Conversation
from fastturn.sampler.base import Request, SamplerStats, SamplingParams
from fastturn.tree import Rollout, stages
from fastturn.types import Boundary, Completion, Hit, Ids, SiblingGroup, Stop, Trunk

from .mdp import Array, Outcome, TurnMDP, action_of, credited, members, softmax, values

CONFIG = Config(algorithm="rtpo", group_size=5, turns=3, seed=11)
TRUNKS = 1400


@dataclass
class TableEnv:
    """The process as an environment; its state is the turn and the state."""

    mdp: TurnMDP
    place: tuple[int, int] = (0, 0)

    def start(self, task: Task) -> list[dict]:
        self.place = (0, task.data["state"])
        return [self._message()]

    def step(self, action: Action) -> Observation:
        (outcome,) = self.mdp.outcomes[self.place[0]][self.place[1]][int(action.text)]
        if outcome.state is None:
            return Observation(reward=outcome.reward, done=True)
        self.place = (self.place[0] + 1, outcome.state)
        return Observation((self._message(),), outcome.reward)

    def snapshot(self) -> tuple[int, int]:
        return self.place

    def restore(self, snapshot: tuple[int, int]) -> None:
        self.place = snapshot

    def _message(self) -> dict:
        return {"role": "user", "content": str(self.mdp.state_token(*self.place))}


@dataclass
class TableDomain:
    mdp: TurnMDP
    tools: list = field(default_factory=list)

    def env(self) -> TableEnv:
        return TableEnv(self.mdp)


class TableRenderer:
    """One token a message, the whole history kept."""

    stop_ids = ()

    def start(self, messages: Sequence[dict]) -> Conversation:
        context_T = _tokens(messages)
        return Conversation((), context_T, Boundary(0, context_T))

    def advance(
        self, conversation: Conversation, action_A: Ids, messages: Sequence[dict]
    ) -> Conversation:
        new_T = _tokens(messages)
        running_T = np.concatenate([conversation.context_T, action_A])
        return Conversation((), np.concatenate([running_T, new_T]), Boundary(len(running_T), new_T))

    def parse(self, action_A: Ids) -> Action:
        return Action(str(action_A[0]))

    def fits(self, conversation: Conversation) -> bool:
        return True

    def located(self, action_A: Ids, hits: tuple[Hit, ...]) -> tuple[Hit, ...]:
        return hits


def _tokens(messages: Sequence[dict]) -> Ids:
    return np.array([int(m["content"]) for m in messages], np.int32)


@dataclass
class TableSampler:
    """Draws macro-actions from the policy of the published version; a seed is a uniform number."""

    mdp: TurnMDP
    policies: list[Array]
    version: int = 0
    stats: SamplerStats = field(default_factory=SamplerStats)

    def publish(self, version: int) -> None:
        self.version = version

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        return [[self._draw(request, seed) for seed in request.seeds] for request in requests]

    def _draw(self, request: Request, seed: int) -> Completion:
        _, S, U = self.mdp.shape
        k, s = divmod(int(request.context_T[-1]) - U - 1, S)
        law_U = self.policies[self.version][k, s]
        u = int(np.searchsorted(law_U.cumsum()[:-1], seed / 2**63))
        action_A = np.full(self.mdp.length_KSU[k, s, u], U, np.int32)
        action_A[0] = u
        logprob_A = np.zeros(len(action_A), np.float32)
        logprob_A[0] = np.log(law_U[u])
        return Completion(action_A, logprob_A, self.version, Stop.STOP)


def walk() -> TurnMDP:
    """Three turns, two states, two actions; the next state is the state with the action's twist,
    and at turn 1 action 1 of state 1 stops early. Nothing is left to chance. A turn's own reward
    outweighs what comes after, which keeps the error of a sampled mean small."""
    reward_KSU = np.array(
        [[[5.0, -4.4], [-5.2, 4.6]], [[1.6, -1.4], [-1.3, 1.5]], [[0.4, -0.4], [-0.3, 0.5]]]
    )
    outcomes = [
        [
            [(Outcome(1.0, float(reward_KSU[k, s, u]), None if k == 2 else s ^ u),) for u in (0, 1)]
            for s in (0, 1)
        ]
        for k in range(3)
    ]
    outcomes[1][1][1] = (Outcome(1.0, 1.5, None),)
    length_KSU = np.array([[[1, 2], [3, 1]], [[2, 2], [1, 3]], [[1, 1], [2, 1]]])
    return TurnMDP(np.array([0.5, 0.5]), outcomes, length_KSU)


Played = list[tuple[Point, SiblingGroup]]


@pytest.fixture(scope="module")
def played() -> tuple[TurnMDP, list[Array], list[Trunk], Played]:
    """Trunks of an old policy (version 0), siblings of the current one (version 1)."""
    mdp, rng = walk(), np.random.default_rng(5)
    policies = [softmax(0.3 * rng.normal(size=mdp.shape)) for _ in range(2)]
    sampler = TableSampler(mdp, policies)
    run = Rollout(TableDomain(mdp), TableRenderer(), sampler, CONFIG, Unmetered())
    tasks = [Task(f"t{i}", {"state": i % 2}) for i in range(TRUNKS)]
    trunks = run.grow(run.roots(tasks), ("trunk",))
    sampler.publish(1)
    groups: Played = []
    for k, points in stages(trunks):
        groups += zip(points, run.fork(points, members(CONFIG), ("fork", k)), strict=True)
    return mdp, policies, trunks, groups


def projected(mdp: TurnMDP, q_KSU: Array, v_KS: Array, group: SiblingGroup) -> float:
    """Σ_j A_j · A(S_k, u_j) of one group, with the credit that training gives it."""
    total = 0.0
    for credit in credited([group], CONFIG)[0]:
        step = credit.trajectory.turns[0]
        k, s = mdp.state_of(step)
        total += credit.advantage_U[0] * (q_KSU[k, s, action_of(step)] - v_KS[k, s])
    return total


def test_forked_siblings_estimate_the_current_advantage(played):
    """Eqs. 56 and 84 through trunks, stages and forks: projected on the true advantages of the
    current policy, the siblings' advantages amount to (G-2)/(G-1) of it, all turns together, under
    trunks of another policy. Within 4 standard errors, and one is below 0.8 %: an error of 5 % is
    more than 6 of them."""
    mdp, policies, _, groups = played
    q_KSU, v_KS = values(mdp, policies[1])
    size = members(CONFIG)
    full_KS = size * (policies[1] * (q_KSU - v_KS[..., None]) ** 2).sum(-1)
    share = np.array(
        [projected(mdp, q_KSU, v_KS, group) / full_KS[point.env_state] for point, group in groups]
    )
    error = share.std() / np.sqrt(len(share))
    assert error < 0.008 * 0.75
    assert abs(share.mean() - 0.75) < 4 * error


def test_old_trunks_choose_states_and_nothing_else(played):
    """Section 3.3 on the trunk: siblings carry the current version, the trunk's own actions are in
    no group, every boundary of every trunk has one group in its exact state, and stages run from
    the last turn to the first."""
    mdp, _, trunks, groups = played
    order = [point.turn for point, _ in groups]
    assert order == sorted(order, reverse=True)
    assert len(groups) == sum(len(trunk.trajectory.turns) for trunk in trunks)
    assert len({len(trunk.trajectory.turns) for trunk in trunks}) == 2
    own = {id(turn) for trunk in trunks for turn in trunk.trajectory.turns}
    for point, group in groups:
        assert len(group.siblings) == CONFIG.group_size - 1
        for sibling in group.siblings:
            assert mdp.state_of(sibling.turns[0]) == point.env_state
            assert all(t.completion.version == 1 and id(t) not in own for t in sibling.turns)


def test_frequencies_of_forks_follow_the_current_policy(played):
    """Eq. 60: siblings of one boundary draw independently from the current policy. Counts of both
    actions are within 4.5 standard deviations of their binomial in every state of every turn, and
    pairs of siblings agree as often as independent draws do."""
    _, policies, _, groups = played
    draws = defaultdict(list)
    for point, group in groups:
        draws[point.env_state].append([action_of(s.turns[0]) for s in group.siblings])
    assert len(draws) == 6
    for place, rows in draws.items():
        table, p = np.array(rows), policies[1][(*place, 1)]
        spread = np.sqrt(p * (1 - p) * table.size)
        assert abs(table.sum() - p * table.size) < 4.5 * spread, place
        same = (table[:, ::2] == table[:, 1::2]).ravel()
        chance = p**2 + (1 - p) ** 2
        spread = np.sqrt(chance * (1 - chance) * same.size)
        assert abs(same.sum() - chance * same.size) < 4.5 * spread, place
