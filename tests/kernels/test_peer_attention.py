"""Tree attention through FlexAttention and flash-attn. Neither has a CPU kernel with a gradient:
FlexAttention's mask and forward are compared here, flash-attn's calls are played by plain torch
with the same contract; scripts/gpu_check runs the real ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastturn.kernels import TreePlan, flash_attention, flex_attention, reference, tree_attention

# torch says that its uncompiled form is slow, which is the form that a CPU has.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def random_tree(tokens: int, seed: int, closing: float = 0.15) -> tuple[Tensor, Tensor]:
    """(end_T, position_T) of a tree in which every open interval closes at random."""
    rng = np.random.default_rng(seed)
    end, position, path = np.full(tokens, tokens), np.zeros(tokens, np.int64), []
    for t in range(tokens):
        while path and rng.random() < closing:
            end[path.pop()] = t
        position[t] = len(path)
        path.append(t)
    return torch.from_numpy(end), torch.from_numpy(position)


def draw(tokens: int, heads: int, keys: int, width: int = 16) -> list[Tensor]:
    sizes = heads, keys, keys
    return [torch.randn(tokens, n, width, requires_grad=True) for n in sizes]


def truth(qkv: list[Tensor], plan: TreePlan, scale: float, softcap: float | None) -> Tensor:
    wide = [x.double() for x in qkv]
    return reference.tree_attention(*wide, plan.end_T, scale, plan.window, plan.place_T, softcap)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


CASES = [
    (1, 2, 1, None, None),
    (37, 4, 2, None, None),
    (300, 4, 1, None, None),
    (129, 4, 2, None, 5.0),
    (128, 2, 2, None, None),
    (0, 2, 1, None, None),
]
WINDOWED = [(300, 2, 2, 20, None), (200, 2, 1, 1, 3.0)]


@pytest.mark.parametrize(("tokens", "heads", "keys", "window", "softcap"), CASES + WINDOWED)
def test_flex(tokens: int, heads: int, keys: int, window: int | None, softcap: float | None):
    end_T, position_T = random_tree(tokens, tokens)
    plan = TreePlan(end_T, window, position_T)
    qkv = [x.detach() for x in draw(tokens, heads, keys)]
    got = flex_attention.attend(*qkv, plan, 0.3, softcap)
    close(got, truth(qkv, plan, 0.3, softcap))


@pytest.mark.parametrize("window", [None, 30])
def test_flex_visits_the_blocks_that_hold_a_visible_pair(window: int | None):
    """None too few; without a window none too many; whole ones are marked whole."""
    tokens, block = 700, flex_attention.BLOCK
    end_T, position_T = random_tree(tokens, 1, closing=0.3)
    mask = flex_attention.block_mask(TreePlan(end_T, window, position_T))
    q_T1, k_T = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
    size = mask.seq_lengths[0]
    seen_TT = torch.eye(size, dtype=torch.bool)
    seen_TT[:tokens, :tokens] = (k_T <= q_T1) & (q_T1 < end_T)
    if window is not None:
        seen_TT[:tokens, :tokens] &= position_T.unsqueeze(1) - position_T < window
    pairs = seen_TT.view(size // block, block, size // block, block).transpose(1, 2).flatten(2)
    visited = mask.to_dense()[0, 0].bool()
    assert not (pairs.any(2) & ~visited).any()
    assert window is not None or torch.equal(pairs.any(2), visited)
    whole = torch.zeros_like(visited)
    counts, indices = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    for row, (count, columns) in enumerate(zip(counts.tolist(), indices.tolist(), strict=True)):
        whole[row, columns[:count]] = True
    assert not (whole & ~pairs.all(2)).any()


def test_flex_has_no_gradient_on_a_cpu():
    end_T, _ = random_tree(9, 0)
    with pytest.raises(ValueError, match="no backward; choose 'torch'"):
        tree_attention(*draw(9, 2, 1), end_T, impl="flex")


def played_forward(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, scale, causal, softcap=0.0):
    assert longest_q == cu_q.diff().max() and longest_k == cu_k.diff().max() and dropout == 0
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    for rows, keys in sequences(cu_q, cu_k):
        s = played_scores(q[rows], k[keys], scale, causal, softcap)[0]
        lse[:, rows] = s.logsumexp(-1)
        group = q.shape[1] // k.shape[1]
        out[rows] = torch.einsum("hqk,khe->qhe", s.softmax(-1), v[keys].repeat_interleave(group, 1))
    return out, lse, None, None


def played_backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, longest_q, longest_k, dropout, scale, causal,
    left, right, softcap, slopes, deterministic,
):  # fmt: skip
    assert (left, right, slopes, deterministic) == (-1, -1, None, True)
    group = q.shape[1] // k.shape[1]
    for rows, keys in sequences(cu_q, cu_k):
        wide_k, wide_v = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        s, slope = played_scores(q[rows], k[keys], scale, causal, softcap)
        p = torch.exp(s - lse[:, rows, None])
        delta = (dout[rows] * out[rows]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhe,khe->hqk", dout[rows], wide_v) - delta) * slope * scale
        dq[rows] = torch.einsum("hqk,khe->qhe", ds, wide_k)
        for into, weights, x in ((dk, ds, q[rows]), (dv, p, dout[rows])):
            grad = torch.einsum("hqk,qhe->khe", weights, x)
            into[keys] = grad.unflatten(1, (-1, group)).sum(2)


def played_scores(q, k, scale: float, causal: bool, softcap: float) -> tuple[Tensor, Any]:
    """Scores [H, Q, K], and their derivative by what the cap was applied to."""
    s = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    slope: Any = 1.0
    if softcap:
        slope = 1 - torch.tanh(s / softcap) ** 2
        s = softcap * torch.tanh(s / softcap)
    if causal:
        s = s.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), -torch.inf)
    return s, slope


def sequences(cu_q: Tensor, cu_k: Tensor):
    assert len(cu_q) == len(cu_k) and cu_q.dtype == cu_k.dtype == torch.int32
    bounds = pairwise(cu_q.tolist()), pairwise(cu_k.tolist())
    return ((slice(*q), slice(*k)) for q, k in zip(*bounds, strict=True))


@pytest.mark.parametrize(("tokens", "heads", "keys", "window", "softcap"), CASES)
def test_flash(tokens: int, heads: int, keys: int, window: int | None, softcap: float | None):
    """Both calls merged, with gradients; every token is written by exactly one segment."""
    calls = flash_attention.Calls(played_forward, played_backward)
    end_T, position_T = random_tree(tokens, tokens)
    plan, qkv = TreePlan(end_T, None, position_T), draw(tokens, heads, keys)
    out = flash_attention.merged(*qkv, plan, 0.3, softcap, calls)
    want = truth(qkv, plan, 0.3, softcap)
    close(out, want)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, upstream)
    for got, true in zip(grads, torch.autograd.grad(want, qkv, upstream.double()), strict=True):
        close(got, true.double())


def test_flash_reads_each_context_once_for_all_its_branches():
    """A context of 50 with 8 siblings of 10: 50 + 80 within, 80 x 50 above in one sequence."""
    end_T = torch.tensor([130] * 50 + [60 + 10 * i for i in range(8) for _ in range(10)])
    layout = flash_attention.layout(TreePlan(end_T))
    assert layout.within.cu_q.tolist() == [0, 60, *range(70, 140, 10)]
    assert layout.above is not None
    assert layout.above.cu_q.tolist() == [0, 70] and layout.above.cu_k.tolist() == [0, 50]
    assert layout.key_N.tolist() == list(range(50))


@pytest.mark.parametrize(
    ("window", "dtype", "width", "message"),
    [
        (4, torch.float16, 16, "expected attention over the whole history, got a window of 4"),
        (None, torch.float16, 16, "expected a CUDA tensor, got one on cpu"),
    ],
)
def test_flash_says_why_it_cannot(window, dtype, width, message):
    end_T, _ = random_tree(9, 0)
    qkv = [x.to(dtype) for x in draw(9, 2, 1, width)]
    with pytest.raises(ValueError, match=message):
        tree_attention(*qkv, end_T, window=window, impl="flash")


def test_a_sample_of_the_flash_layout_is_a_tree_again():
    """Segments cut in their middle: branches that leave a run of tokens half-way."""
    end_T = torch.tensor([8, 8, 5, 5, 5, 8, 7, 8])
    layout = flash_attention.layout(TreePlan(end_T))
    assert layout.within.cu_q.tolist() == [0, 5, 7, 8]
    assert layout.query_N.tolist() == [5, 6, 7] and layout.key_N.tolist() == [0, 1, 0, 1, 5]
