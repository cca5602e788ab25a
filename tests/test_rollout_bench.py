"""Synthetic rollouts: lengths are those that were fitted, and both providers sample as many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastturn.bench import cases, served
from fastturn.bench.layouts import random_model
from fastturn.bench.measure import WrongResult
from fastturn.bench.rollouts import DrawnCase, RolloutCase, check, providers, rates
from fastturn.lengths import FITTED
from fastturn.policy import Policy
from fastturn.sampler.local import LocalSampler

TINY = replace(cases.SMOLLM2, width=72, inner=96)


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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(random_model(TINY, 1).eval())
    asked = DrawnCase(contexts=3, context=40, tokens=12, lengths="gsm8k").inputs()
    sampler = LocalSampler(policy)
    check(policy, "fastturn", sampler, asked[0][0])
    run = providers(policy, 2, {"fastturn": sampler})
    wanted = 2 * sum(tokens for _, tokens in asked)
    assert {name: provider.sample(asked) for name, provider in run.items()} == {
        "fastturn": wanted,
        "generate": wanted,
    }
    assert set(rates(run, asked, 2)) == set(run)
    other = Policy(random_model(TINY, 1).eval())
    with torch.no_grad():
        other.model.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(WrongResult, match="other: log-probabilities differ"):
        check(policy, "other", LocalSampler(other), asked[0][0])


def test_where_there_is_no_vllm_it_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served, "engine", lambda: None)
    with served.served(Policy(random_model(TINY, 1).eval()), 64, 1) as samplers:
        assert samplers == {}
    assert (
        "vllm: left out; install fastturn[rollout], and vLLM beside it" in capsys.readouterr().out
    )
