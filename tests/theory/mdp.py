"""Turn-boundary decision processes small enough to enumerate, and their exact values.

A `TurnMDP` is the paper's turn-level model (appendix C.1) with numbers in every cell: at turn k in
state s a macro-action u is one whole response of `length_KSU[k, s, u]` tokens; executing it draws
one `Outcome` (reward of the turn, next state or the end of the episode). Dynamic programming gives
`Q_k(s, u)` and `V_k(s)` of any policy and of the best one (eqs. 19 and 20), in float64.

Episodes come out as the real `Trajectory` records, so that credit and packing see what they see in
training. They are written in a language of single-token facts, spoken by a bigram model:

    ids 0 .. U-1    the first token of macro-action u; all of the decision is in it
    id  U           filler: the rest of a macro-action, always certain
    ids U+1 ..      the context of turn k in state s, one id each (`TurnMDP.state_token`)

so the logits of (turn, state) are one column of a table, and a one-hot hidden state reads it.

Expectations are sums over every possible episode (`episodes`) and every possible group of siblings
(`draws`, as multisets with their multinomial probability): no sampling error, equality to 1e-12.

Axes: K turns, S states, U macro-actions. Example: `values(mdp, policy_KSU)` returns (Q_KSU, V_KS).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from fastturn.algorithms import algorithm_of
from fastturn.config import Config
from fastturn.credit import Credits
from fastturn.types import Boundary, Completion, Ending, SiblingGroup, Stop, Trajectory, Turn

Array = NDArray[np.float64]
NEVER = -1e4  # a logit whose probability is exactly zero in float64


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer of the environment: its probability, the turn's reward, the next state (None ends
    the episode). Example: `Outcome(0.25, 1.0, None)`, a success with probability one quarter."""

    probability: float
    reward: float
    state: int | None


@dataclass(frozen=True, slots=True)
class TurnMDP:
    """`outcomes[k][s][u]` are the answers to macro-action u; `start_S` is the law of S_0."""

    start_S: Array
    outcomes: list[list[list[tuple[Outcome, ...]]]]
    length_KSU: NDArray[np.int64]

    def __post_init__(self) -> None:
        cells = [cell for turn in self.outcomes for state in turn for cell in state]
        assert all(math.isclose(sum(o.probability for o in cell), 1.0) for cell in cells)
        assert len(cells) == self.length_KSU.size and self.length_KSU.min() > 0

    @property
    def shape(self) -> tuple[int, int, int]:
        K, S, U = self.length_KSU.shape
        return K, S, U

    @property
    def vocabulary(self) -> int:
        K, S, U = self.shape
        return U + 1 + K * S

    def state_token(self, turn: int, state: int) -> int:
        _, S, U = self.shape
        return U + 1 + turn * S + state

    def state_of(self, turn: Turn) -> tuple[int, int]:
        """(turn index, state) that a recorded turn was taken in."""
        _, S, U = self.shape
        k, s = divmod(int(turn.boundary.context_T[-1]) - U - 1, S)
        return k, s


def action_of(turn: Turn) -> int:
    return int(turn.completion.action_A[0])


def bernoulli(p: float) -> tuple[Outcome, ...]:
    """The episode ends, with reward 1 at probability p."""
    return (Outcome(p, 1.0, None), Outcome(1 - p, 0.0, None))


def random_mdp(
    rng: np.random.Generator, shape: tuple[int, int, int], terminal_only: bool = False
) -> TurnMDP:
    """Dense random transitions over all states; normal rewards, at the last turn only if asked for;
    lengths from 1 to 4 tokens."""
    K, S, U = shape

    def cell(k: int) -> tuple[Outcome, ...]:
        paid = 0.0 if terminal_only and k < K - 1 else 1.0
        law = rng.dirichlet(np.ones(S))
        ends = k == K - 1
        return tuple(
            Outcome(p, paid * rng.normal(), None if ends else s) for s, p in enumerate(law)
        )

    outcomes = [[[cell(k) for _ in range(U)] for _ in range(S)] for k in range(K)]
    return TurnMDP(rng.dirichlet(np.ones(S)), outcomes, rng.integers(1, 5, shape))


def softmax(logits_KSU: Array) -> Array:
    e_KSU = np.exp(logits_KSU - logits_KSU.max(-1, keepdims=True))
    return e_KSU / e_KSU.sum(-1, keepdims=True)


def backup(mdp: TurnMDP, turn: int, next_S: Array, gamma: float) -> Array:
    """Q_SU of one turn, given the values of the states after it (eq. 20)."""
    _, S, U = mdp.shape
    q_SU = np.zeros((S, U))
    for s in range(S):
        for u in range(U):
            discount = gamma ** int(mdp.length_KSU[turn, s, u])
            q_SU[s, u] = sum(
                o.probability * (o.reward + (0 if o.state is None else discount * next_S[o.state]))
                for o in mdp.outcomes[turn][s][u]
            )
    return q_SU


def values(mdp: TurnMDP, policy_KSU: Array, gamma: float = 1.0) -> tuple[Array, Array]:
    """(Q_KSU, V_KS) of a policy; returns count from the turn on, as a sibling's return does."""
    K, S, _ = mdp.shape
    q_KSU, v_KS = np.zeros(mdp.shape), np.zeros((K + 1, S))
    for k in reversed(range(K)):
        q_KSU[k] = backup(mdp, k, v_KS[k + 1], gamma)
        v_KS[k] = (policy_KSU[k] * q_KSU[k]).sum(-1)
    return q_KSU, v_KS[:K]


def optimum(mdp: TurnMDP, gamma: float = 1.0) -> tuple[Array, Array]:
    """(Q*_KSU, V*_KS) by Bellman's optimality recursion."""
    K, S, _ = mdp.shape
    q_KSU, v_KS = np.zeros(mdp.shape), np.zeros((K + 1, S))
    for k in reversed(range(K)):
        q_KSU[k] = backup(mdp, k, v_KS[k + 1], gamma)
        v_KS[k] = q_KSU[k].max(-1)
    return q_KSU, v_KS[:K]


def visits(mdp: TurnMDP, policy_KSU: Array) -> Array:
    """Probability of standing in state s at boundary k; rows sum to the chance of getting there."""
    K, S, U = mdp.shape
    visit_KS = np.zeros((K + 1, S))
    visit_KS[0] = mdp.start_S
    for k in range(K):
        for s in range(S):
            for u in range(U):
                for o in mdp.outcomes[k][s][u]:
                    if o.state is not None:
                        p = visit_KS[k, s] * policy_KSU[k, s, u] * o.probability
                        visit_KS[k + 1, o.state] += p
    return visit_KS[:K]


def objective(mdp: TurnMDP, policy_KSU: Array) -> float:
    """J: the expected undiscounted return of an episode."""
    return float(mdp.start_S @ values(mdp, policy_KSU)[1][0])


def policy_gradient(mdp: TurnMDP, policy_KSU: Array) -> Array:
    """dJ/dlogits_KSU of a tabular softmax policy, undiscounted: visit · π · A."""
    q_KSU, v_KS = values(mdp, policy_KSU)
    return visits(mdp, policy_KSU)[..., None] * policy_KSU * (q_KSU - v_KS[..., None])


Step = tuple[int, int, int, float]  # turn, state, macro-action, reward


def trajectory(mdp: TurnMDP, policy_KSU: Array, steps: Sequence[Step]) -> Trajectory:
    """Steps of one episode as the record that sampler and environment would have written."""
    U = mdp.shape[2]
    turns, running = [], 0
    for k, s, u, reward in steps:
        action_A = np.full(mdp.length_KSU[k, s, u], U, np.int32)
        action_A[0] = u
        logprob_A = np.zeros(len(action_A), np.float32)
        logprob_A[0] = np.log(policy_KSU[k, s, u])
        boundary = Boundary(running, np.array([mdp.state_token(k, s)], np.int32))
        turns.append(Turn(boundary, Completion(action_A, logprob_A, 0, Stop.STOP), reward))
        running += 1 + len(action_A)
    return Trajectory("task", steps[0][0], tuple(turns), Ending.FINISHED)


def bigrams(turn: Turn) -> list[tuple[int, int]]:
    """(token read, token drawn after it) of every token of an action."""
    tokens = [int(turn.boundary.context_T[-1]), *turn.completion.action_A.tolist()]
    return list(pairwise(tokens))


def head_of(mdp: TurnMDP, logits_KSU: Array) -> Array:
    """The bigram model as an output layer [V, V]: column c holds the logits after token c."""
    K, S, U = mdp.shape
    head_VV = np.full((mdp.vocabulary, mdp.vocabulary), NEVER)
    head_VV[U, : U + 1] = 0.0  # after an action or filler: filler
    head_VV[:U, U + 1 :] = logits_KSU.reshape(K * S, U).T
    return head_VV


Weighted = tuple[float, Trajectory]


def episodes(mdp: TurnMDP, policy_KSU: Array, turn: int, state: int) -> list[Weighted]:
    """Every episode from a boundary to its end with its probability; they add up to 1."""

    def walk(k: int, s: int, p: float, steps: tuple[Step, ...]) -> Iterator[Weighted]:
        for u in np.flatnonzero(policy_KSU[k, s]).tolist():
            for o in mdp.outcomes[k][s][u]:
                chance = p * policy_KSU[k, s, u] * o.probability
                path = (*steps, (k, s, u, o.reward))
                if chance == 0:
                    continue
                if o.state is None:
                    yield chance, trajectory(mdp, policy_KSU, path)
                else:
                    yield from walk(k + 1, o.state, chance, path)

    return list(walk(turn, state, 1.0, ()))


def whole_episodes(mdp: TurnMDP, policy_KSU: Array) -> list[Weighted]:
    """Every episode from the start, S_0 drawn from its law."""
    starts = np.flatnonzero(mdp.start_S).tolist()
    return [
        (mdp.start_S[s] * p, episode)
        for s in starts
        for p, episode in episodes(mdp, policy_KSU, 0, s)
    ]


def sample(
    mdp: TurnMDP, policy_KSU: Array, turn: int, state: int, rng: np.random.Generator
) -> Trajectory:
    """One episode from a boundary, drawn."""
    steps: list[Step] = []
    place: int | None = state
    while place is not None:
        k = turn + len(steps)
        u = int(rng.choice(mdp.shape[2], p=policy_KSU[k, place]))
        cell = mdp.outcomes[k][place][u]
        o = cell[int(rng.choice(len(cell), p=[o.probability for o in cell]))]
        steps.append((k, place, u, o.reward))
        place = o.state
    return trajectory(mdp, policy_KSU, steps)


def draws(pool: Sequence[Weighted], n: int) -> Iterator[tuple[float, SiblingGroup]]:
    """Every group of n independent members of `pool`, as a multiset, with its probability."""
    for chosen in combinations_with_replacement(range(len(pool)), n):
        ways = math.factorial(n)
        for count in Counter(chosen).values():
            ways //= math.factorial(count)
        siblings = tuple(pool[i][1] for i in chosen)
        yield ways * math.prod(pool[i][0] for i in chosen), group_of(siblings)


def group_of(siblings: tuple[Trajectory, ...]) -> SiblingGroup:
    first = siblings[0]
    return SiblingGroup("task", 0, first.first_turn, first.turns[0].boundary.context_T, siblings)


def credited(groups: Sequence[SiblingGroup], config: Config) -> Credits:
    """The credit that training would give these groups."""
    return algorithm_of(config).credit(groups, config)


def members(config: Config) -> int:
    """Siblings or episodes in a group, as the trainer forks them: G less those not sampled."""
    return config.group_size - algorithm_of(config).unsampled


def mean_advantage(
    mdp: TurnMDP, pool: Sequence[Weighted], n: int, turn: int, config: Config
) -> Array:
    """E[A_j | S_k = s, u_j = u] as [S, U] over all groups of n from `pool`; NaN where never."""
    total_SU, mass_SU = np.zeros(mdp.shape[1:]), np.zeros(mdp.shape[1:])
    for p, group in draws(pool, n):
        for credit in credited([group], config)[0]:
            at = turn - credit.trajectory.first_turn
            if at < len(credit.trajectory.turns):
                step = credit.trajectory.turns[at]
                cell = (mdp.state_of(step)[1], action_of(step))
                total_SU[cell] += p * credit.advantage_U[at]
                mass_SU[cell] += p
    with np.errstate(invalid="ignore"):
        return total_SU / mass_SU
