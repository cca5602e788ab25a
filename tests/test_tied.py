"""One weight for embedding and head: one gradient, of its size, whatever reaches it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastturn.policy import Policy

from .test_policy import OBJECTIVE, packed_loss, tiny


class Made(TorchDispatchMode):
    """Counts the tensors of one shape that operations make anew."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
            self.count += out.data_ptr() not in given
        return out


@pytest.mark.parametrize(("tied", "count"), [(True, 1), (False, 2)])
def test_a_tied_weight_gets_one_gradient_of_its_size(tied: bool, count: int) -> None:
    model = tiny("qwen3", torch.float32)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    policy = Policy(model)
    with Made(model.lm_head.weight.shape) as made:
        packed_loss(policy, OBJECTIVE).backward()
    assert made.count == count


def test_a_tied_embedding_that_does_more_is_called() -> None:
    """A hook on the embedding runs, and its effect reaches the loss."""
    model = tiny("qwen3", torch.float32)
    policy = Policy(model)
    plain = packed_loss(policy, OBJECTIVE)
    hook = model.get_input_embeddings().register_forward_hook(lambda *call: call[2] * 2)
    assert packed_loss(policy, OBJECTIVE) != plain
    hook.remove()
    assert packed_loss(policy, OBJECTIVE) == plain


def test_a_second_backward_pass_of_a_tied_weight_is_refused() -> None:
    loss = packed_loss(Policy(tiny("qwen3", torch.float32)), OBJECTIVE)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
