"""The published losses, written out in float64: one plain forward a turn, nothing shared, nothing
packed (`CASES`), and the groups that they are compared on.

Returns, lengths and group sizes are such that every advantage and weight is a dyadic number, which
the float32 rows of a batch hold exactly; so the two sides may differ by float64 rounding only.
Siblings hold (log-probabilities with a graph, behaviour) a turn; losses are means over groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastturn.config import Config, Loss, Sampling, override
from fastturn.types import Boundary, Completion, Ending, SiblingGroup, Stop, Trajectory, Turn

from .test_policy import V, Wide

TEMPERATURE = 0.7
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LENGTHS = ((2, 2), (2, 2), (4, 4), (8, 8))  # 32 tokens a group
REWARDS = (  # of every turn of every sibling; the last two groups are silent
    ((0, 3), (0, 0), (0, 0), (0, 0)),
    ((0, 0), (0, 0), (3, 0), (0, 0)),
    ((0, 1), (0, 1), (0, 1), (0, 1)),
    ((0, 0), (0, 0), (0, 0), (0, 0)),
)
BAD = {(0, 1), (1, 2)}  # siblings whose first call was not JSON


@dataclass
class Sibling:
    """One trajectory as a formula sees it."""

    rewards: list[float]
    events: list[tuple[str, ...]]
    contexts: list[bytes]
    tree: int
    new: list[Tensor]  # log-probabilities of each turn's tokens
    old: list[Tensor]

    @property
    def ret(self) -> float:
        return sum(self.rewards)

    @property
    def ratios(self) -> Tensor:
        return (torch.cat(self.new) - torch.cat(self.old)).exp()

    def __len__(self) -> int:
        return sum(map(len, self.new))


Formula = Callable[[list[list[Sibling]]], Tensor]
Compared = Callable[[Sequence[float]], list[float]]  # returns -> advantages


def groups(model: torch.nn.Module, size: int = 4) -> list[SiblingGroup]:
    """Two turns each; siblings 0 and 1 of a group take the same first action, so that they share
    the state of turn 1. Behaviour is the policy's own plus noise, on both sides of the clip."""
    rng = np.random.default_rng(3)
    made = []
    for g, rewards in enumerate(REWARDS):
        context_T = rng.integers(3, V, 5 + g).astype(np.int32)
        answer_T = rng.integers(3, V, 3).astype(np.int32)
        first = rng.integers(3, V, 8).astype(np.int32)
        siblings = []
        for i in range(size):
            running, turns = np.empty(0, np.int32), []
            for u in range(2):
                push_T = answer_T if u else context_T
                action_A = rng.integers(3, V, LENGTHS[i][u]).astype(np.int32)
                if i < 2 and u == 0:
                    action_A = first[: LENGTHS[i][u]]
                boundary = Boundary(len(running), push_T)
                context = boundary.apply(running)
                noise_A = rng.normal(rng.normal(0, 0.3), 0.3, len(action_A))
                old_A = logprobs(model, context, action_A).detach().numpy() + noise_A
                done = Completion(action_A, old_A.astype(np.float32), 1, Stop.STOP)
                call = () if u else ("tool_call", "bad_json") if (g, i) in BAD else ("tool_call",)
                turns.append(Turn(boundary, done, float(rewards[i][u]), call))
                running = np.concatenate([context, action_A])
            siblings.append(Trajectory(f"t{g}", 0, tuple(turns), Ending.FINISHED, tree=i // 2))
        made.append(SiblingGroup(f"t{g}", 0, 0, context_T, tuple(siblings)))
    return made


def logprobs(model: torch.nn.Module, context: np.ndarray, action_A: np.ndarray) -> Tensor:
    tokens = torch.from_numpy(np.concatenate([context, action_A[:-1]]).astype(np.int64))
    with Wide():
        logits_TV = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        all_AV = (logits_TV[len(context) - 1 :] / TEMPERATURE).log_softmax(-1)
    labels_A1 = torch.from_numpy(action_A.astype(np.int64)).unsqueeze(1)
    return all_AV.gather(1, labels_A1).squeeze(1)


def as_siblings(model: torch.nn.Module, made: Sequence[SiblingGroup]) -> list[list[Sibling]]:
    return [
        [
            Sibling(
                [turn.reward for turn in trajectory.turns],
                [turn.events for turn in trajectory.turns],
                [context.tobytes() for context in trajectory.contexts()],
                trajectory.tree,
                [
                    logprobs(model, context, turn.completion.action_A)
                    for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True)
                ],
                [
                    torch.from_numpy(turn.completion.logprob_A.astype(np.float64))
                    for turn in trajectory.turns
                ],
            )
            for trajectory in group.siblings
        ]
        for group in made
    ]


def clipped(ratio_A: Tensor, advantage: float) -> Tensor:
    low, high = 1 - CLIP["clip_low"], 1 + CLIP["clip_high"]
    return torch.minimum(ratio_A * advantage, ratio_A.clamp(low, high) * advantage)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standardised(values: Sequence[float]) -> list[float]:
    differences = centred(values)
    std = (sum(d * d for d in differences) / max(1, len(values) - 1)) ** 0.5
    return [d / std if std else 0.0 for d in differences]


def centred(values: Sequence[float]) -> list[float]:
    return [v - mean(values) for v in values]


def f32(value: float) -> float:
    """As the rows of a batch hold it."""
    return float(np.float32(value))


def rtpo(batch: list[list[Sibling]]) -> Tensor:
    """1/(G-1) sum_j 1/T_jk sum_t min(r A, clip(r) A) over the tokens of turn k alone, A = R - mean
    (RTPO algorithm 1, eq. 6); G - 1 siblings are a group, k is their first turn."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for sibling in group:
            advantage = sibling.ret - mean([s.ret for s in group])
            ratio_A = (sibling.new[0] - sibling.old[0]).exp()
            total -= clipped(ratio_A, advantage).sum() / len(ratio_A) / len(group)
    return total / len(batch)


def grpo(batch: list[list[Sibling]]) -> Tensor:
    """1/G sum_i 1/|o_i| sum_t min(r A, clip(r) A), A = (R - mean) / std (Shao et al. 2024,
    eq. 3)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for sibling, advantage in zip(group, standardised([s.ret for s in group]), strict=True):
            total -= clipped(sibling.ratios, advantage).sum() / len(sibling) / len(group)
    return total / len(batch)


def dapo(batch: list[list[Sibling]], compared: Compared = centred) -> Tensor:
    """1 / sum_i |o_i| sum_i sum_t min(...), over groups with 0 < correct < G, returns lowered by
    the soft overlong punishment, L_max = 20 and L_cache = 16 (Yu et al. 2025, eq. 8, 11, 13)."""
    live = [group for group in batch if len({s.ret for s in group}) > 1]
    total = torch.zeros((), dtype=torch.float64)
    for group in live:
        lowered = [s.ret - min(1.0, max(0.0, (len(s) - 4) / 16)) for s in group]
        for sibling, advantage in zip(group, compared(lowered), strict=True):
            total -= clipped(sibling.ratios, f32(advantage)).sum()
    return total / sum(len(s) for group in live for s in group)


def dr_grpo(batch: list[list[Sibling]]) -> Tensor:
    """1/G sum_i sum_t min(...) / constant, A = R - mean (Liu et al. 2025, Dr. GRPO's
    objective); constant 16."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for sibling in group:
            advantage = sibling.ret - mean([s.ret for s in group])
            total -= clipped(sibling.ratios, advantage).sum() / 16 / len(group)
    return total / len(batch)


def gspo(batch: list[list[Sibling]]) -> Tensor:
    """1/G sum_i min(s A, clip(s) A), s = (pi(y)/pi_old(y))^(1/|y|) (Zheng et al. 2025,
    eq. 5 and 7)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for sibling, advantage in zip(group, standardised([s.ret for s in group]), strict=True):
            ratio = torch.stack(list(sibling.ratios)).prod() ** (1 / len(sibling))
            total -= clipped(ratio, advantage) / len(group)
    return total / len(batch)


def cispo(batch: list[list[Sibling]]) -> Tensor:
    """1 / sum_i |o_i| sum_i sum_t sg(clip(r)) A log pi (MiniMax 2025, eq. 4), no lower
    bound."""
    live = [group for group in batch if len({s.ret for s in group}) > 1]
    total = torch.zeros((), dtype=torch.float64)
    for group in live:
        for sibling, advantage in zip(group, standardised([s.ret for s in group]), strict=True):
            weight_A = sibling.ratios.detach().clamp(max=1 + CLIP["clip_high"])
            total -= (weight_A * advantage * torch.cat(sibling.new)).sum()
    return total / sum(len(s) for group in live for s in group)


def masked(batch: list[list[Sibling]]) -> Tensor:
    """GRPO whose tokens leave where r is outside [1 - low, 1 + high] (Ring team 2025, IcePop)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for sibling, advantage in zip(group, standardised([s.ret for s in group]), strict=True):
            r = sibling.ratios
            kept = r[(r >= 1 - CLIP["clip_low"]) & (r <= 1 + CLIP["clip_high"])]
            total -= (kept * advantage).sum() / len(sibling) / len(group)
    return total / len(batch)


def rloo(batch: list[list[Sibling]]) -> Tensor:
    """1/k sum_i (R_i - 1/(k-1) sum_{j != i} R_j) log pi(y_i) (Ahmadian et al. 2024, RLOO),
    with clipped token ratios in the place of log-probabilities."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for i, sibling in enumerate(group):
            others = [s.ret for j, s in enumerate(group) if j != i]
            total -= clipped(sibling.ratios, sibling.ret - mean(others)).sum() / len(group)
    return total / len(batch)


def gigpo(batch: list[list[Sibling]], compared: Compared = centred) -> Tensor:
    """A = A_E(trajectory) + w A_S(turn), A_S among turns in one state, by sum_k g^(k-t) r_k
    (Feng et al. 2025, eq. 3, 5, 7 and 8; F_norm is 1 or the std); w = 0.5, g = 0.5."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        togo = [[s.rewards[0] + 0.5 * s.rewards[1], s.rewards[1]] for s in group]
        episodes = compared([s.ret for s in group])
        for i, sibling in enumerate(group):
            for u in range(2):
                same = [
                    (j, v)
                    for j, other in enumerate(group)
                    for v in range(2)
                    if other.contexts[v] == sibling.contexts[u]
                ]
                step = compared([togo[j][v] for j, v in same])[same.index((i, u))]
                ratio_A = (sibling.new[u] - sibling.old[u]).exp()
                advantage = f32(episodes[i] + 0.5 * step)
                total -= clipped(ratio_A, advantage).sum() / len(sibling) / len(group)
    return total / len(batch)


def steptool(batch: list[list[Sibling]]) -> Tensor:
    """sum_t A_t log pi(a_t) with A_t = sum_k g^(k-t) (r_k + call reward) - baseline (Yu et al.
    2024, StepTool's policy gradient), the baseline the others' mean; g = 0.5, call reward 0.75."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        togo = []
        for s in group:
            first = s.rewards[0] + 0.75 * (s.events[0] == ("tool_call",))
            togo.append([first + 0.5 * s.rewards[1], s.rewards[1]])
        for i, sibling in enumerate(group):
            base = mean([r for j, other in enumerate(togo) if j != i for r in other])
            for u in range(2):
                ratio_A = (sibling.new[u] - sibling.old[u]).exp()
                part = clipped(ratio_A, togo[i][u] - base).sum()
                total -= part / len(sibling) / len(group)
    return total / len(batch)


def tree_grpo(batch: list[list[Sibling]], compared: Compared = centred) -> Tensor:
    """A = A_intra + A_inter, each R less the mean of its leaves, over their std in the paper's own
    setting (Ji et al. 2025, Tree-GRPO)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        among = compared([s.ret for s in group])
        for i, sibling in enumerate(group):
            tree = [j for j, s in enumerate(group) if s.tree == sibling.tree]
            within = compared([group[j].ret for j in tree])[tree.index(i)]
            advantage = f32(among[i] + within)
            total -= clipped(sibling.ratios, advantage).sum() / len(sibling) / len(group)
    return total / len(batch)


def refuel(batch: list[list[Sibling]]) -> Tensor:
    """((log r(y) - log r(y')) / eta - (R - R'))^2 over pairs y, y' at one state (Gao et al.
    2024, REFUEL), the turn of that state only; eta = 0.5."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        pairs = [(a, b) for i, a in enumerate(group) for b in group[:i]]
        for a, b in pairs:
            left, right = ((s.new[0] - s.old[0]).sum() for s in (a, b))
            total += ((left - right) / 0.5 - (a.ret - b.ret)) ** 2 / len(pairs)
    return total / len(batch)


STD = Loss(normalize_std=True, **CLIP)
PLAIN = Loss(**CLIP)


def preset(*pairs: str) -> Config:
    """What these settings come to with those of the algorithm, clipped as all here."""
    clip = [f"loss.{name}={value}" for name, value in CLIP.items()]
    return override(Config(), [*pairs, f"sampling.temperature={TEMPERATURE}", *clip])


CASES: dict[str, tuple[Formula, Config, int]] = {
    "rtpo": (rtpo, Config(algorithm="rtpo", loss=PLAIN), 4),
    "grpo": (grpo, Config(algorithm="grpo", loss=STD), 4),
    "arpo": (grpo, Config(algorithm="arpo", loss=STD), 4),
    "dapo": (
        dapo,
        Config(
            algorithm="dapo",
            loss=PLAIN,
            sampling=Sampling(TEMPERATURE, episode_tokens=20),
            algorithm_options=("overlong=0.8",),
        ),
        4,
    ),
    "dr_grpo": (
        dr_grpo,
        Config(algorithm="dr_grpo", loss=PLAIN, sampling=Sampling(TEMPERATURE, episode_tokens=16)),
        4,
    ),
    "gspo": (gspo, Config(algorithm="gspo", loss=STD), 4),
    "cispo": (cispo, Config(algorithm="cispo", loss=replace(STD, clip_low=1.0)), 4),
    "mask": (masked, Config(algorithm="grpo", loss=STD, algorithm_options=("surrogate=mask",)), 4),
    "rloo": (rloo, Config(algorithm="rloo", loss=PLAIN), 4),
    "gigpo": (
        gigpo,
        Config(
            algorithm="gigpo",
            loss=PLAIN,
            algorithm_options=("step_weight=0.5", "step_discount=0.5"),
        ),
        4,
    ),
    "steptool": (
        steptool,
        Config(
            algorithm="steptool",
            loss=PLAIN,
            algorithm_options=("call_reward=0.75", "step_discount=0.5"),
        ),
        4,
    ),
    "tree_grpo": (tree_grpo, Config(algorithm="tree_grpo", loss=PLAIN), 4),
    "refuel": (
        refuel,
        Config(
            algorithm="refuel",
            loss=replace(PLAIN, epochs=2),
            algorithm_options=("eta=0.5",),
        ),
        3,
    ),
    # As `algorithm=NAME` sets them.
    "dapo/preset": (
        partial(dapo, compared=standardised),
        preset("algorithm=dapo", "algorithm_options=overlong=0.8", "sampling.episode_tokens=20"),
        4,
    ),
    "gigpo/preset": (
        partial(gigpo, compared=standardised),
        preset("algorithm=gigpo", "algorithm_options=step_weight=0.5,step_discount=0.5"),
        4,
    ),
    "tree_grpo/preset": (
        partial(tree_grpo, compared=standardised),
        preset("algorithm=tree_grpo"),
        4,
    ),
}
