"""Optimisers and the update rule's bookkeeping: AdamW, or Muon with AdamW for what is no matrix.

Matrices of the blocks take weight decay and, where Muon has a rate, orthogonalised momentum; norms,
biases and embeddings take neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from fastturn import eight_bit
from fastturn.config import Optim, Warm

AdamW = Callable[[Sequence[dict[str, Any]], float, tuple[float, float]], torch.optim.Optimizer]


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

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The moments, by "member.parameter.field"; split as the parameters are. Those of 8 bits
        as float32 copies in host memory.

        Example: "0.model.norm.weight.exp_avg".
        """
        tensors = {}
        for place, member in enumerate(self.members):
            for name, parameter in model.named_parameters():
                for field, value in member.state.get(parameter, {}).items():
                    tensors[f"{place}.{name}.{field}"] = eight_bit.wide(value)
        return tensors

    def make_room(self, model: nn.Module, keys: Iterable[str]) -> None:
        """Empty state for `keys` of a saved `tensors`, ready to be read into."""
        parameters = dict(model.named_parameters())
        for key in keys:
            place, _, rest = key.partition(".")
            name, _, field = rest.rpartition(".")
            member, parameter = self.members[int(place)], parameters[name].detach()
            like = parameter.cpu() if eight_bit.is_eight_bit(member) else parameter
            empty = torch.zeros(()) if field == "step" else torch.zeros_like(like)
            member.state[parameters[name]][field] = empty

    def settle(self) -> None:
        """What has been read into the room, as the optimisers keep it."""
        for member in filter(eight_bit.is_eight_bit, self.members):
            for parameter, state in member.state.items():
                for field in eight_bit.SIGNED:
                    state[field] = eight_bit.narrow(member, parameter, field, state[field])

    @property
    def step_count(self) -> int:
        """Steps taken so far."""
        return int(self.schedules[-1].last_epoch)

    def resume_at(self, step_count: int) -> None:
        """The learning rates of a run that has taken so many steps."""
        for schedule in self.schedules:
            schedule.last_epoch = step_count
            rates = [
                base * factor(step_count)
                for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            ]
            for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], torch.Tensor):  # compiled steps read it where it is
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            schedule._last_lr = rates


def training_optimizer(model: nn.Module, config: Optim, adamw: AdamW | None = None) -> Optimizers:
    """Linear warm-up; weight decay on matrices only, and these by Muon when `muon_lr` is set.
    `adamw`: which AdamW, torch's unless given."""
    betas = (0.9, config.beta2)
    members = _members(model, config, betas, config.weight_decay, adamw or plain_adamw)
    return Optimizers(members, config.warmup_steps)


def warm_optimizer(model: nn.Module, config: Warm, adamw: AdamW | None = None) -> Optimizers:
    """Linear decay to zero over the warm start; matrices by Muon when `muon_lr` is set."""
    members = _members(model, config, (0.9, 0.999), 0.0, adamw or plain_adamw)
    return Optimizers(members, warmup=config.steps // 50, total=config.steps)


def adamw_of(dtype: str) -> AdamW:
    """The AdamW of `model.dtype`: torch's, or torchao's with moments of 8 bits."""
    return eight_bit.adamw if dtype == "mixed8" else plain_adamw


def plain_adamw(
    groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """torch's, all tensors in few kernels."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=True)


def _members(
    model: nn.Module,
    rates: Optim | Warm,
    betas: tuple[float, float],
    weight_decay: float,
    adamw: AdamW,
) -> list[torch.optim.Optimizer]:
    matrices, rest = split_parameters(model)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    members: list[torch.optim.Optimizer] = []
    if rates.muon_lr > 0:
        members.append(Muon(matrices, rates.muon_lr, weight_decay))
        groups = groups[1:] if rest else []  # adapters are matrices only
    if groups:
        members.append(adamw(groups, rates.lr, betas))
    return members


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one (Jordan et al., 2024).

    For a matrix [A, B] with gradient g: `m <- .95 m + .05 g`, `u = .05 g + .95 m`, then
    `w <- (1 - lr * weight_decay) w - lr * max(1, A / B) ** .5 * orthogonal(u)`. Split matrices keep
    split momenta; updates alone are made whole, because orthogonality is of the whole, and ranks
    share them out. Of experts [E, A, B] every one is a matrix, and whole where it is held.
    """

    MOMENTUM = 0.95

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; there is no closure to evaluate."""
        for group in self.param_groups:
            for few in _alike([matrix for matrix in group["params"] if matrix.grad is not None]):
                turned = _orthogonal([self._update(matrix) for matrix in few])
                for matrix, direction in zip(few, turned, strict=True):
                    rows, columns = matrix.shape[-2:]
                    rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                    if group["weight_decay"]:
                        matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(direction.to(matrix.dtype), alpha=-rate)

    def _update(self, matrix: nn.Parameter) -> torch.Tensor:
        """The gradient with the momentum that it has just been added to."""
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - self.MOMENTUM)
        return gradient.lerp(state["momentum"], self.MOMENTUM)


def _alike(matrices: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Matrices of one shape, at most as many at a time as ranks hold parts of them; experts of a
    layer alone."""
    shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        shapes.setdefault(tuple(matrix.shape), []).append(matrix)
    for alike in shapes.values():
        first: Any = alike[0]
        parted = isinstance(first, DTensor) and first.ndim == 2
        count = first.device_mesh.size(-1) if parted else 1
        for start in range(0, len(alike), count):
            yield alike[start : start + count]


def _orthogonal(updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`orthogonal` of matrices of one shape, split over ranks as they were.

    The i-th is made whole on rank i alone of those that hold its rows, and split again:

        rank 0: rows 0 of A, B     all    rank 0: A     orthogonal    all    rows 0 of A', B'
        rank 1: rows 1 of A, B    to all  rank 1: B                  to all  rows 1 of A', B'
    """
    first = updates[0]
    if not isinstance(first, DTensor):
        return [orthogonal(update) for update in updates]
    if first.ndim == 3:
        return [_like(first, orthogonal(cast(DTensor, update).to_local())) for update in updates]
    mesh, (rows, columns) = first.device_mesh, first.shape
    group = mesh.get_group(mesh.ndim - 1)  # before it are dimensions of copies
    size, rank = group.size(), group.rank()
    share = -(-rows // size)
    held = [columns * max(0, min(share, rows - share * other)) for other in range(size)]
    given = [held[rank] * (other < len(updates)) for other in range(size)]
    taken = [count * (rank < len(updates)) for count in held]
    parts_N = torch.cat([cast(DTensor, update).to_local().flatten() for update in updates])
    whole_N = parts_N.new_empty(sum(taken))
    dist.all_to_all_single(whole_N, parts_N, taken, given, group)
    if rank < len(updates):
        whole_N = orthogonal(whole_N.view(rows, columns)).flatten().to(parts_N.dtype)
    dist.all_to_all_single(parts_N, whole_N, given, taken, group)
    return [_like(first, part) for part in parts_N.view(len(updates), -1, columns)]


def _like(whole: DTensor, part: torch.Tensor) -> DTensor:
    """What this rank holds of a tensor that is split as `whole` is."""
    split = part, whole.device_mesh, whole.placements
    return DTensor.from_local(*split, run_check=False, shape=whole.shape, stride=whole.stride())


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Singular values moved to about 1 (.7 to 1.2), singular vectors kept; bfloat16 on GPUs, where
    it is fast and the steps correct its rounding, elsewhere the dtype of the matrix. [A, B], or
    [E, A, B] for E matrices at once.

    Five steps of the quintic `x <- a x + (b xx' + c (xx')^2) x` from unit Frobenius norm, with the
    coefficients that grow small singular values fastest. A zero matrix stays zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else); embeddings and heads belong to the rest, the
    experts of a layer, stacked in one tensor, to the matrices."""
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    } | {id(parameter) for name, parameter in model.named_parameters() if "lm_head" in name}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            stacked = parameter.ndim == 3 and ".experts." in name
            whole = stacked or (parameter.ndim == 2 and id(parameter) not in tables)
            (matrices if whole else rest).append(parameter)
    return matrices, rest
