"""Draws from rows of logits, with exact log-probabilities, each row from a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fastturn.sampler.base import SamplingParams
from fastturn.types import Completion, Stop

_WORD = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], length: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), float64 [rows, length]; row i depends on `seeds[i]` alone.

    SplitMix64 (Steele, Lea and Flood, 2014) started at the mixed seed: number t of a row is a
    function of (seed, t), so longer budgets do not change earlier numbers.
    Example: `uniforms([7], 2)[0]` are the first two numbers of `uniforms([9, 7], 5)[1]`.
    """
    seed_R = np.array([seed & _WORD for seed in seeds], np.uint64)
    step_S = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
    word_RS = _mix(_mix(seed_R + _GOLDEN)[:, None] + step_S)
    # 52 bits: the largest number, 1 - 2^-52, times any total still rounds below that total.
    return (word_RS >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def draw(
    logits_RV: torch.Tensor, uniform_R: torch.Tensor, temperature: float, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [R] and float64 log-probabilities [R] under `softmax(logits / temperature)`.

    Inverse CDF: the first id whose cumulative mass exceeds `uniform * total`, summed in float64 in
    id order, so an id without mass is never drawn. Temperature 0 takes the first largest logit and
    reports its log-probability at temperature 1. `top_p` below 1 leaves the nucleus of every row
    (`nucleus`), whose log-probabilities these are.
    Example: probabilities (.2, .5, .3) and uniform .6 give id 1 and log .5.
    """
    if temperature not in (0.0, 1.0):
        logits_RV = logits_RV / temperature
    shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    if temperature == 0.0:
        token_R1 = shifted_RV.argmax(-1, keepdim=True)
        total_R1 = shifted_RV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    else:
        if top_p < 1.0:
            shifted_RV = nucleus(shifted_RV, top_p)
        mass_RV = shifted_RV.exp().cumsum(-1, dtype=torch.float64)
        total_R1 = mass_RV[:, -1:]
        token_R1 = torch.searchsorted(mass_RV, uniform_R.unsqueeze(-1) * total_R1, right=True)
        # Only NaN masses reach past the end; the clamp keeps the gather legal until they are seen.
        token_R1 = token_R1.clamp_(max=mass_RV.shape[-1] - 1)
    logprob_R1 = shifted_RV.gather(-1, token_R1).double() - total_R1.log()
    return token_R1.squeeze(-1), logprob_R1.squeeze(-1)


def nucleus(shifted_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with -inf outside the fewest likeliest ids that have `top_p` of the mass (Holtzman et
    al. 2020); ids as likely as the last of them stay as well.

    Example: probabilities (.2, .5, .3) and top_p .7 leave the last two.
    """
    sorted_RV = shifted_RV.sort(-1, descending=True).values
    mass_RV = sorted_RV.softmax(-1, dtype=torch.float64)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    last_R1 = (before_RV < top_p).sum(-1, keepdim=True) - 1
    return shifted_RV.masked_fill(shifted_RV < sorted_RV.gather(-1, last_R1), -torch.inf)


class Rows:
    """The completions of one wave while they are drawn; one row a completion.

    group_R: index of the row's context. budget_R: most tokens. uniform_RS: the row's stream.
    token_RS, logprob_RS: what was drawn, `count_R` of them. live_R: not ended yet.
    """

    def __init__(
        self,
        group_R: NDArray[np.int64],
        budget_R: NDArray[np.int64],
        seeds: Sequence[int],
        params: SamplingParams,
    ) -> None:
        rows, steps = len(group_R), int(budget_R.max())
        self.group_R, self.budget_R, self.params = group_R, budget_R, params
        self.uniform_RS = uniforms(seeds, steps)
        self.stop_ids = frozenset(params.stop_ids)
        self.token_RS = np.zeros((rows, steps), np.int32)
        self.logprob_RS = np.zeros((rows, steps), np.float32)
        self.count_R = np.zeros(rows, np.int64)
        self.live_R = np.ones(rows, bool)
        self.stopped_R = np.zeros(rows, bool)

    def draw(
        self, row_R: NDArray[np.int64], logits_RV: torch.Tensor, uniform_R: torch.Tensor
    ) -> torch.Tensor:
        """Draw one token for each of these rows, book it, and return the tokens."""
        token_R, logprob_R = draw(logits_RV, uniform_R, self.params.temperature, self.params.top_p)
        # One copy to the host a step; float64 holds every id exactly.
        drawn = torch.stack((token_R.double(), logprob_R)).cpu().numpy()
        if not np.isfinite(drawn[1]).all():
            raise FloatingPointError(
                "the policy's logits are not finite numbers; the weights have diverged: lower "
                "optim.lr or resume from an earlier checkpoint"
            )
        token = drawn[0].astype(np.int64)
        at = self.count_R[row_R]
        self.token_RS[row_R, at] = token
        self.logprob_RS[row_R, at] = drawn[1]
        self.count_R[row_R] = at + 1
        stopped = np.fromiter((t in self.stop_ids for t in token.tolist()), bool, len(token))
        self.stopped_R[row_R] = stopped
        self.live_R[row_R] = ~stopped & (at + 1 < self.budget_R[row_R])
        return token_R

    def completions(self, version: int) -> Iterator[Completion]:
        """One completion a row, in the order of rows."""
        for row, count in enumerate(self.count_R.tolist()):
            yield Completion(
                action_A=self.token_RS[row, :count].copy(),
                logprob_A=self.logprob_RS[row, :count].copy(),
                version=version,
                stop=Stop.STOP if self.stopped_R[row] else Stop.LENGTH,
            )
