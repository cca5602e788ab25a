"""Synthetic rollouts: lengths are those that were fitted, and both providers sample as many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastturn.bench import cases
from fastturn.bench.layouts import random_model
from fastturn.bench.rollouts import DrawnCase, RolloutCase, check, providers
from fastturn.lengths import FITTED
from fastturn.policy import Policy


def test_lengths_are_those_of_the_case() -> None:
    asked = RolloutCase(contexts=3, context=20, tokens=7).inputs()
    assert [(len(context_T), tokens) for context_T, tokens in asked] == [(20, 7)] * 3


@pytest.mark.parametrize("name", FITTED)
def test_drawn_lengths_have_the_median_and_the_tail_that_were_fitted(name: str) -> None:
    case = DrawnCase(contexts=2000, context=10**6, tokens=10**6, lengths=name)
    asked = case.inputs()
    contexts, actions = ([len(c) for c, _ in asked], [tokens for _, tokens in asked])
    fitted = {"think": 0.0, "action": 256.0, "spread": 0.6, **FITTED[name]}
    assert np.median(actions) == pytest.approx(fitted["think"] + fitted["action"], rel=0.1)
    assert np.quantile(actions, 0.99) > 1.3 * np.median(actions)
    assert min(contexts) < 1.5 * fitted["prompt"] < np.quantile(contexts, 0.9)
    again = case.inputs()
    assert all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(asked, again, strict=True))
    short = replace(case, context=30, tokens=40).inputs()
    assert max(len(c) for c, _ in short) == 30 and max(tokens for _, tokens in short) == 40


def test_both_providers_sample_what_was_asked() -> None:
    shape = replace(cases.SMOLLM2, width=72, inner=96)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(random_model(shape, 1).eval())
    asked = DrawnCase(contexts=3, context=40, tokens=12, lengths="gsm8k").inputs()
    check(policy, asked[0][0])
    wanted = 2 * sum(tokens for _, tokens in asked)
    assert [provider(asked) for provider in providers(policy, 2).values()] == [wanted, wanted]
