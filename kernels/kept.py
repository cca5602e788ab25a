"""Results that a forward pass need not compute again, as one operator of torch.

Selective activation checkpointing keeps or repeats operators. It sees neither Triton's launches nor
which of many small products are one attention; it does see `fastturn::kept`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# From a checkout this is imported as kernels.kept too, by who looks for another package `kernels`.
NAMESPACE = __name__.partition(".")[0]
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define("kept(Tensor[] inputs, int call) -> Tensor[]")
OPERATOR = getattr(torch.ops, NAMESPACE).kept.default
_calls: dict[int, Callable[[], list[Tensor]]] = {}  # in progress; operators take no functions
_number = itertools.count()


def kept(compute: Callable[[], list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What `compute` makes of `inputs`: new tensors, without a graph. Where a checkpoint has kept
    them they are returned and nothing is computed.

    Example: `kept(lambda: [q @ k.mT], (q, k))` is `[q @ k.mT]`.
    """
    call = next(_number)
    _calls[call] = compute
    try:
        results: list[Tensor] = OPERATOR(list(inputs), call)
        return results
    finally:
        del _calls[call]


@torch.library.impl(LIBRARY, "kept", "CompositeExplicitAutograd")
def _compute(inputs: list[Tensor], call: int) -> list[Tensor]:
    return _calls[call]()
