"""Gradients of every algorithm, from groups through credit, pack and policy, against its published
loss in float64 (`formulas.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fastturn.algorithms import algorithm_of
from fastturn.loss import Objective
from fastturn.pack import DividedGroupError, pack
from fastturn.policy import Policy

from .formulas import CASES, TEMPERATURE, as_siblings, groups
from .test_policy import Wide, tiny


def gradients(model: torch.nn.Module, losses: Sequence[Tensor]) -> list[Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_published_loss(case: str) -> None:
    """In one micro-batch and in several."""
    formula, config, size = CASES[case]
    plain, model = tiny("qwen3"), tiny("qwen3")
    made = groups(plain, size)
    algorithm = algorithm_of(config)
    objective = Objective(
        TEMPERATURE, config.loss.clip_low, config.loss.clip_high, surrogate=algorithm.surrogate
    )
    want = gradients(plain, [formula(as_siblings(plain, made))])
    scale = max(float(grad.abs().max()) for grad in want)
    assert scale > 1e-3
    credits = algorithm.credit(made, config)
    whole = pack(credits, 10_000)
    budget_T = 30 if case in ("refuel", "rtpo") else 60  # these read one turn of two
    cut = pack(credits, budget_T, whole_groups=objective.whole_groups)
    assert len(whole) == 1 < len(cut)
    with Wide():
        policy = Policy(model)
        for batches in (whole, cut):
            outputs = [policy(batch, objective) for batch in batches]
            got = gradients(model, [output.loss for output in outputs])
            for one, other in zip(got, want, strict=True):
                assert float((one - other).abs().max()) <= 1e-9 * scale
            clips = sum(o.sums["clipped_low"] + o.sums["clipped_high"] for o in outputs)
            assert clips > 0 or case == "refuel"


@pytest.mark.parametrize("name", ["gspo", "refuel"])
def test_a_group_that_would_be_divided_is_refused(name: str) -> None:
    config = CASES[name][1]
    credits = algorithm_of(config).credit(groups(tiny("qwen3")), config)
    with pytest.raises(DividedGroupError, match=r"pack_tokens=12: a group .* set pack_tokens=\d+"):
        pack(credits, 12, whole_groups=True)
    assert len(pack(credits, 12)) > 4


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith(("dapo", "cispo"))])
def test_credit_is_separable_where_no_whole_stage_is_needed(case: str) -> None:
    """`credit([group]) / number of groups` is the credit within a stage."""
    config = CASES[case][1]
    algorithm, made = algorithm_of(config), groups(tiny("qwen3"))
    assert not algorithm.whole_stage
    together = algorithm.credit(made, config)
    for group, members in zip(made, together, strict=True):
        for alone, one in zip(algorithm.credit([group], config)[0], members, strict=True):
            np.testing.assert_allclose(alone.weight_U / len(made), one.weight_U, rtol=1e-15)
            np.testing.assert_array_equal(alone.advantage_U, one.advantage_U)


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_token_level_normalisation_needs_the_whole_stage(name: str) -> None:
    config = CASES[name][1]
    algorithm, made = algorithm_of(config), groups(tiny("qwen3"))
    assert algorithm.whole_stage
    alone = algorithm.credit(made[:1], config)[0][0].weight_U
    assert np.all(algorithm.credit(made, config)[0][0].weight_U == alone / 2)  # two are silent


@pytest.mark.parametrize("surrogate", ["sequence", "truncate", "mask", "regression"])
def test_no_actions_are_no_loss_with_gradients_of_zero(surrogate: str) -> None:
    """A rank without work still takes part in collectives."""
    policy = Policy(tiny("qwen3", torch.float32))
    config = CASES["grpo"][1]
    (one,) = pack(algorithm_of(config).credit(groups(tiny("qwen3")), config), 10_000)
    rows = [name for name in type(one).__slots__ if name not in ("tokens_flat", "plans")]
    empty = replace(one, **{name: getattr(one, name)[:0] for name in rows}, plans={})
    output = policy(empty, Objective(surrogate=surrogate, kl_coef=0.1), one.behavior_A[:0])
    output.loss.backward()
    assert output.loss.item() == 0 and output.sums["actions"] == 0
    found = [p.grad for p in policy.parameters()]
    assert all(grad is not None and not grad.any() for grad in found)
