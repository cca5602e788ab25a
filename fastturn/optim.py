"""Optimisers and the update rule's bookkeeping: AdamW for training, Muon with AdamW for warm start.

Matrices of the blocks take weight decay and, in the warm start, orthogonalised momentum; norms,
biases and embeddings take neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fastturn.config import Optim, Warm


class Optimizers:
    """One or two torch optimisers with a common learning-rate factor, stepped together.

    `factor(step)` multiplies every base learning rate; `step` counts optimiser steps from 0.
    """

    def __init__(self, members: Iterable[torch.optim.Optimizer], warmup: int, total: int = 0):
        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / (warmup + 1))
            return rise * (1.0 - step / total if total else 1.0)

        self.members = list(members)
        self.schedules = [LambdaLR(member, factor) for member in self.members]

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad(set_to_none=True)

    def step(self) -> None:
        for member, schedule in zip(self.members, self.schedules, strict=True):
            member.step()
            schedule.step()

    @property
    def lr(self) -> float:
        """The learning rate of the next step (of the last member)."""
        return float(self.schedules[-1].get_last_lr()[0])

    def state_dict(self) -> dict[str, object]:
        return {
            "members": [member.state_dict() for member in self.members],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load_state_dict(self, state: dict[str, list[dict[str, Any]]]) -> None:
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


def training_optimizer(model: nn.Module, config: Optim) -> Optimizers:
    """AdamW with linear warm-up; weight decay on matrices only."""
    matrices, rest = split_parameters(model)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
        foreach=True,
    )
    return Optimizers([adamw], config.warmup_steps)


def warm_optimizer(model: nn.Module, config: Warm) -> Optimizers:
    """Linear decay to zero over the warm start; matrices by Muon when `muon_lr` is set."""
    matrices, rest = split_parameters(model)
    members: list[torch.optim.Optimizer] = []
    if config.muon_lr > 0:
        members.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.0))
    else:
        rest = matrices + rest
    members.append(torch.optim.AdamW(rest, lr=config.lr, weight_decay=0.0, foreach=True))
    return Optimizers(members, warmup=config.steps // 50, total=config.steps)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else); embeddings and heads belong to the rest."""
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    } | {id(parameter) for name, parameter in model.named_parameters() if "lm_head" in name}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            whole = parameter.ndim == 2 and id(parameter) not in tables
            (matrices if whole else rest).append(parameter)
    return matrices, rest
