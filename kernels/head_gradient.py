"""The head's gradient over many micro-batches: one float32 sum, rounded once.

Autograd adds the gradients of micro-batches in the head's dtype: in bfloat16 each addition rounds,
and the error grows with their number. A `HeadGradient` keeps the sum in float32 instead:

    total = HeadGradient(head_VD)
    for batch in micro_batches:
        turn_surrogate(..., head_gradient=total).loss.backward()
    total.flush()                      # head_VD.grad is there, rounded once
    optimizer.step()

Memory: V · D · 4 bytes from the first backward pass until `flush`, beside the sum of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import check_float
from .rows import wide_dtype


class HeadGradient:
    """The sum of the gradients of one head, in float32 (float64 for a float64 head).

    head_VD  the leaf whose `grad` receives the sum; ops may be called with any head of its shape
             and device (a copy in another dtype, the whole parameter that a wrapper gathered)

    Autograd sees no gradient of the head, so hooks that reduce gradients over processes do not run
    for it: call `flush`, then reduce `head_VD.grad`, then step. Other uses of the same tensor (tied
    embeddings) get their gradients from autograd as always, and `flush` adds to them.
    Not for several threads at once.

    Example: a head of bfloat16 ones, gradients 1 and 2^-9 added one after the other: `flush` gives
    1.0 + 2^-9 rounded once.
    """

    def __init__(self, head_VD: Tensor) -> None:
        check_float("head_VD", head_VD, (None, None), head_VD)
        if not (head_VD.is_leaf and head_VD.requires_grad):
            raise ValueError(
                "head_VD: expected a leaf that requires a gradient, got "
                f"is_leaf={head_VD.is_leaf}, requires_grad={head_VD.requires_grad}; "
                "pass the parameter itself"
            )
        self.head_VD = head_VD
        self._sum_VD: Tensor | None = None

    @property
    def sum_VD(self) -> Tensor:
        """What was added since the last `flush`; zeros at first."""
        if self._sum_VD is None:
            wide = wide_dtype(self.head_VD.dtype)
            self._sum_VD = torch.zeros_like(self.head_VD, dtype=wide, requires_grad=False)
        return self._sum_VD

    def add(self, dhead_VD: Tensor, scale: Tensor) -> None:
        """sum += scale · dhead, with a 0-dim `scale`; nothing is read back from the device."""
        self.sum_VD.addcmul_(dhead_VD, scale.to(dhead_VD.dtype))

    def flush(self) -> None:
        """Adds the sum to `head_VD.grad`, rounded to its dtype once, and begins anew."""
        if self._sum_VD is None:
            return
        total_VD, self._sum_VD = self._sum_VD, None
        if self.head_VD.grad is None:
            self.head_VD.grad = total_VD.to(self.head_VD.dtype)
        else:
            self.head_VD.grad.copy_(total_VD.add_(self.head_VD.grad))


def check_head_gradient(head_gradient: HeadGradient | None, head_VD: Tensor, impl: str) -> None:
    """The sum belongs to a head like this one, and the implementation knows of it."""
    if head_gradient is None:
        return
    if not isinstance(head_gradient, HeadGradient):
        raise ValueError(
            f"head_gradient: expected a HeadGradient, got {type(head_gradient).__name__}"
        )
    if impl == "reference":
        raise ValueError("head_gradient: expected None with impl='reference'")
    theirs = head_gradient.head_VD
    wide = wide_dtype(head_VD.dtype)
    if wide_dtype(theirs.dtype) != wide:
        raise ValueError(f"head_gradient: expected one that sums in {wide}, got {theirs.dtype}")
    if theirs.shape != head_VD.shape or theirs.device != head_VD.device:
        raise ValueError(
            f"head_gradient: expected one of a head {list(head_VD.shape)} on {head_VD.device}, got "
            f"{list(theirs.shape)} on {theirs.device}"
        )
