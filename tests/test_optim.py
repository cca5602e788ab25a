"""Muon against torch's own, and what orthogonal means; schedules that go on where they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastturn.config import Optim
from fastturn.optim import Muon, orthogonal, training_optimizer


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonal_keeps_directions_and_evens_lengths(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonal(matrix) @ right.T
    assert lengths.max() / lengths.min() > 1.5
    assert turned.diagonal().min() > 0.65 and turned.diagonal().max() < 1.25
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-9
    assert not orthogonal(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_muon_moves_as_the_one_of_torch(shape):
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    pairs = (
        (ours, Muon([ours], lr=0.02)),
        (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)),
    )
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in pairs:
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - 1).abs().max()
    # torch rounds to bfloat16 in between.
    assert moved > 0.02 and (ours - theirs).abs().max() < 0.02 * moved


def test_rates_go_on_where_they_were():
    def made():
        return training_optimizer(nn.Linear(4, 4), Optim(lr=1e-2, warmup_steps=8))

    walked, resumed = made(), made()
    for _ in range(5):
        walked.step()
    resumed.resume_at(walked.step_count)
    for _ in range(3):
        assert walked.lr == resumed.lr > 0
        rates = [[g["lr"] for g in o.members[0].param_groups] for o in (walked, resumed)]
        assert rates[0] == rates[1]
        walked.step()
        resumed.step()
