"""Laws of tree attention: equal to the dense mask, forward and backward, for any tree."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastturn.kernels import TreePlan, tree_attention

MODULE = sys.modules["fastturn.kernels.tree_plan"]
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def forest(trees: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(end_T, position_T) of trees given as [context, sibling, sibling, ...] token counts."""
    end: list[int] = []
    position: list[int] = []
    for context, *siblings in trees:
        stop = len(end) + context + sum(siblings)
        end += [stop] * context
        position += range(context)
        for count in siblings:
            end += [len(end) + count] * count
            position += range(context, context + count)
    return torch.tensor(end, dtype=torch.int64), torch.tensor(position, dtype=torch.int64)


def inputs(tokens: int, heads: int, keys: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = (heads, keys, keys)
    return [torch.randn(tokens, n, width, dtype=DOUBLE).to(dtype).requires_grad_() for n in sizes]


def run(qkv: list[Tensor], end_T: Tensor, impl: str, **options: Any) -> list[Tensor]:
    """Output and the three gradients for one fixed upstream gradient."""
    out = tree_attention(*qkv, end_T, impl=impl, **options)
    upstream = torch.sin(torch.arange(out.numel(), dtype=DOUBLE)).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream)]


def assert_equal_to_reference(qkv: list[Tensor], end_T: Tensor, **options: Any) -> None:
    plain = {k: v for k, v in options.items() if k != "plan"}
    for got, want in zip(
        run(qkv, end_T, "torch", **options), run(qkv, end_T, "reference", **plain), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@st.composite
def nested_ends(draw: st.DrawFn) -> list[int]:
    """Any nesting: each token closes at or before the innermost interval that is still open."""
    tokens = draw(st.integers(1, 60))
    end: list[int] = []
    open_: list[int] = [tokens]
    for t in range(tokens):
        while open_[-1] <= t:
            open_.pop()
        end.append(draw(st.one_of(st.just(open_[-1]), st.integers(t + 1, open_[-1]))))
        open_.append(end[-1])
    return end


@settings(max_examples=40, deadline=None)
@given(nested_ends(), st.sampled_from([(2, 1), (3, 3), (4, 2)]), st.sampled_from([None, 1, 7]))
def test_any_tree(end: list[int], heads: tuple[int, int], window: int | None) -> None:
    end_T = torch.tensor(end)
    qkv = inputs(len(end), *heads, 4, DOUBLE)
    small = MODULE.SMALL, MODULE.BLOCK
    try:
        for MODULE.SMALL, MODULE.BLOCK in (small, (8, 8)):
            assert_equal_to_reference(qkv, end_T, window=window)
    finally:
        MODULE.SMALL, MODULE.BLOCK = small


@pytest.mark.parametrize("tokens", [0, 1, 2, 127, 128, 129, 300])
def test_one_chain_of_any_length(tokens: int) -> None:
    end_T = torch.full((tokens,), tokens, dtype=torch.int64)
    assert_equal_to_reference(inputs(tokens, 4, 2, 8, DOUBLE), end_T)


@pytest.mark.parametrize("window", [None, 20, 100])
def test_shared_context_with_siblings(window: int | None) -> None:
    """Windows are measured in positions: siblings restart behind their context."""
    end_T, position_T = forest([[150, 40, 70, 1], [30], [3, 5, 5], [200, 10]])
    plan = TreePlan(end_T, window, position_T)
    qkv = inputs(len(end_T), 6, 3, 8, DOUBLE)
    assert_equal_to_reference(qkv, end_T, window=window, position_T=position_T, plan=plan)


def test_padding_tokens_see_themselves_only() -> None:
    end_T, _ = forest([[140, 5]])
    end_T = torch.cat([end_T, torch.arange(146, 156)])
    qkv = inputs(len(end_T), 2, 1, 4, DOUBLE)
    out = run(qkv, end_T, "torch")[0]
    torch.testing.assert_close(out[145:], qkv[2][145:].detach().expand(-1, 2, -1))
    assert_equal_to_reference(qkv, end_T)


def test_scale() -> None:
    end_T, _ = forest([[20, 5]])
    assert_equal_to_reference(inputs(25, 2, 2, 4, DOUBLE), end_T, scale=0.1)


def test_gradcheck() -> None:
    end_T, _ = forest([[4, 2, 3], [2]])
    qkv = inputs(11, 4, 2, 3, DOUBLE)
    assert torch.autograd.gradcheck(lambda q, k, v: tree_attention(q, k, v, end_T), qkv)


def test_views_and_strides() -> None:
    """Inputs that are views into one projection, as models pass them."""
    end_T, _ = forest([[140, 9, 9]])
    tokens = len(end_T)
    whole = torch.randn(tokens, 8, 4, dtype=DOUBLE, requires_grad=True)
    grads = []
    for impl in ("torch", "reference"):
        q, k, v = whole.split([4, 2, 2], dim=1)
        out = tree_attention(q, k, v, end_T, impl=impl).transpose(0, 1)
        grads.append(torch.autograd.grad(out.cos().sum(), whole)[0])
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_no_less_accurate_than_attention_per_branch(dtype: torch.dtype) -> None:
    """Against float64: at most the error of one plain attention call for each whole branch."""
    context, counts = 160, [40, 30, 50]
    end_T, _ = forest([[context, *counts]])
    qkv = inputs(len(end_T), 4, 2, 16, dtype)
    truth = run([x.detach().double().requires_grad_() for x in qkv], end_T, "reference")
    upstream = torch.sin(torch.arange(truth[0].numel(), dtype=DOUBLE)).view(truth[0].shape)
    outs, start = [], context
    for number, count in enumerate(counts):
        own = torch.arange(start, start + count)
        index = torch.cat([torch.arange(context), own])
        q, k, v = (x[index].transpose(0, 1).unsqueeze(0) for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        outs.append(out if number == 0 else out[context:])
        start += count
    branch = torch.cat(outs)
    plain = [branch.detach(), *torch.autograd.grad(branch, qkv, upstream.to(dtype))]
    for got, peer, want in zip(run(qkv, end_T, "torch"), plain, truth, strict=True):
        errors = [float((x.double() - want).abs().max()) for x in (got, peer)]
        assert errors[0] <= 1.5 * errors[1] + 8 * torch.finfo(SINGLE).eps


def test_no_tile_pays_for_invisible_keys() -> None:
    """Scores computed for a context of 512 and 8 siblings of 64: little above the visible ones."""
    end_T, _ = forest([[512] + [64] * 8])
    visible = 512 * 513 // 2 + 8 * (64 * 512 + 64 * 65 // 2)
    computed = sum(t.count * t.queries * t.keys for t in TreePlan(end_T).tiles)
    assert visible <= computed <= 1.15 * visible


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_only_intervals_that_cross_are_refused(length: list[int]) -> None:
    tokens = len(length)
    end = [min(t + n, tokens) for t, n in enumerate(length)]
    crossing = [(i, j) for j in range(tokens) for i in range(j + 1, end[j]) if end[i] > end[j]]
    if not crossing:
        MODULE.check_nested(np.array(end))
        return
    with pytest.raises(ValueError, match="nested") as caught:
        MODULE.check_nested(np.array(end))
    found = re.search(r"at most \d+ at (\d+),.*of token (\d+),", str(caught.value))
    assert found is not None and (int(found[1]), int(found[2])) in crossing


@settings(max_examples=60, deadline=None)
@given(
    nested_ends(),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([(8, 8), (16, 4), (4, 16)]),
)
def test_block_lists_hold_every_visible_pair(
    end: list[int], window: int | None, size: tuple[int, int]
) -> None:
    """Blocks in the first part of a list are whole and visible throughout; without a window no
    block is listed for nothing; both directions list the same blocks."""
    queries, keys = size
    index = np.arange(len(end))
    position = np.array([sum(stop > t for stop in end[:t]) for t in index])
    seen = (index <= index[:, None]) & (index[:, None] < np.array(end))
    if window is not None:
        seen &= position[:, None] - position < window
    plan = TreePlan(torch.tensor(end), window, torch.from_numpy(position))
    want = {(t // queries, j // keys) for t, j in np.argwhere(seen)}
    by_query, by_key = plan.by_query(queries, keys), plan.by_key(queries, keys)
    pairs = {
        (block, other, place < middle)
        for block, first, middle, last in by_query.walk_N4.tolist()
        for place, other in enumerate(by_query.met[first:last].tolist(), first)
    }
    turned = {
        (other, block, place < middle)
        for block, first, middle, last in by_key.walk_N4.tolist()
        for place, other in enumerate(by_key.met[first:last].tolist(), first)
    }
    assert pairs == turned
    found = {(q, k) for q, k, _ in pairs}
    assert found == want if window is None else found >= want
    for q, k, unmasked in pairs:
        block = seen[q * queries : (q + 1) * queries, k * keys : (k + 1) * keys]
        whole = block.shape == (queries, keys) and bool(block.all())
        assert whole if unmasked else window is not None or not whole


def test_block_lists_start_with_the_longest_and_are_made_once() -> None:
    plan = TreePlan(torch.full((256,), 256))
    lists = plan.by_query(128, 128)
    assert lists.walk_N4.tolist() == [[1, 1, 2, 3], [0, 0, 0, 1]]
    assert lists.met.tolist() == [0, 0, 1]
    assert plan.by_query(128, 128) is lists
    assert [x.tolist() for x in TreePlan(torch.tensor([4, 2, 4, 4])).ends(2)] == [[2, 4], [4, 4]]


def test_a_million_tokens_in_small_trees_are_planned_in_proportion() -> None:
    """1024 trees of 1024 tokens: each lists the 36 pairs of its own 8 blocks and no others."""
    end_T = (torch.arange(1 << 20) // 1024 + 1) * 1024
    plan = TreePlan(end_T)
    assert len(plan.by_query(128, 128).met) == len(plan.by_key(128, 128).met) == 1024 * 36


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_T": torch.tensor([1, 1, 3])}, r"end_T.*t < end\[t\] <= 3.*got 1 at 1"),
        ({"end_T": torch.tensor([4, 3, 3])}, r"end_T.*got 4 at 0"),
        ({"end_T": torch.tensor([2, 3, 3])}, r"nested.*at most 2 at 1.*\[0, 2\).*got 3"),
        ({"end_T": torch.tensor([3, 3])}, r"end_T.*\[3\].*\[2\]"),
        ({"end_T": torch.ones(3)}, r"end_T.*int64.*float32"),
        ({"q_THE": torch.zeros(3, 3, 4)}, r"q_THE.*multiple of the 2 key heads.*3"),
        ({"k_TKE": torch.zeros(4, 2, 4)}, r"k_TKE.*\[3, any, 4\].*\[4, 2, 4\]"),
        ({"v_TKE": torch.zeros(3, 2, 4, dtype=DOUBLE)}, r"v_TKE.*float32.*float64"),
        ({"scale": 0.0}, r"scale.*> 0.*0"),
        ({"window": 0}, r"window.*>= 1.*0"),
        ({"window": 2.5}, r"window: expected a whole number >= 1, got 2.5 of type float"),
        ({"q_THE": torch.zeros(3, 0, 4)}, r"q_THE: expected at least one head .*0 heads of 4"),
        (dict.fromkeys(["q_THE", "k_TKE", "v_TKE"], torch.zeros(3, 2, 0)), r"got 2 heads of 0"),
        ({"plan": 3}, r"plan: expected a TreePlan, got int"),
        ({"plan": TreePlan(torch.tensor([1]))}, r"plan.*3 tokens.*1 tokens"),
        ({"impl": "flux"}, r"impl='flux'.*auto, triton, torch, flex, flash, reference"),
        ({"softcap": 0.0}, r"softcap: expected a finite number > 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "q_THE": torch.zeros(3, 4, 4),
        "k_TKE": torch.zeros(3, 2, 4),
        "v_TKE": torch.zeros(3, 2, 4),
        "end_T": torch.tensor([3, 3, 3]),
    }
    with pytest.raises(ValueError, match=message):
        tree_attention(**(good | change))


def test_autocast_has_no_influence():
    torch.manual_seed(0)
    end_T = torch.tensor([6, 2, 6, 6, 6, 6])
    shapes = ((6, 4, 16), (6, 2, 16), (6, 2, 16))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    upstream_THE = torch.randn(6, 4, 16)

    def found(inside: bool, backward_inside: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out_THE = tree_attention(*leaves, end_T, impl="torch")
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            return [out_THE, *torch.autograd.grad(out_THE, leaves, upstream_THE)]

    plain = found(False, False)
    for inside, backward_inside in ((True, False), (False, True), (True, True)):
        for got, want in zip(found(inside, backward_inside), plain, strict=True):
            assert torch.equal(got, want)
