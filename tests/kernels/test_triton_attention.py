"""Laws of tree attention's Triton kernels, in Triton's interpreter: any tree, width, grouping and
layout against the reference, bits, offsets beyond 32 bits, and one compilation for all lengths."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastturn.kernels import TreePlan, tree_attention, triton_attention
from fastturn.kernels.dispatch import choose
from fastturn.kernels.tree_attention import IMPLEMENTATIONS, WIDTHS
from fastturn.kernels.triton_attention import Shape, Shapes

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
NAMES = ("out", "dq", "dk", "dv")

pytestmark = pytest.mark.usefixtures("poisoned")


@contextmanager
def blocks(queries: int, keys: int) -> Iterator[None]:
    """Small blocks of all three kernels, so that few tokens have many."""
    shape = Shape(queries, keys, 4, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "shapes", lambda *_: Shapes(shape, shape, shape))
        yield


def packed(*moves: int) -> tuple[Tensor, Tensor]:
    """(end_T, position_T) of a stack machine: n pushes n tokens, -n pops n.

    Example: packed(2, 1, -1, 1) is a context of 2 with siblings of one token: end = [4, 4, 3, 4].
    """
    end: list[int] = []
    position: list[int] = []
    stack: list[int] = []
    for move in moves:
        for _ in range(move):
            position.append(len(stack))
            stack.append(len(end))
            end.append(0)
        for _ in range(-move):
            end[stack.pop()] = len(end)
    for index in stack:
        end[index] = len(end)
    return torch.tensor(end, dtype=torch.int64), torch.tensor(position, dtype=torch.int64)


def inputs(tokens: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens + width)
    return [
        torch.randn(tokens, n, width, generator=draw, dtype=DOUBLE).to(dtype).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


def run(qkv: list[Tensor], end_T: Tensor, impl: str, **options: Any) -> dict[str, Tensor]:
    """Output and the three gradients for one fixed upstream gradient."""
    out = tree_attention(*qkv, end_T, impl=impl, **options)
    upstream = torch.sin(torch.arange(out.numel(), dtype=DOUBLE)).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, qkv, upstream)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def check(oracle: Any, qkv: list[Tensor], end_T: Tensor, **options: Any) -> dict[str, Tensor]:
    got = run(qkv, end_T, "triton", **options)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = run(exact, end_T, "reference", **options)
    oracle(got, run(qkv, end_T, "reference", **options), truth, qkv[0].dtype)
    return got


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Any program of a stack machine of at most 50 tokens: trees, forks, padding; then a chain,
    so that the gradients of q and k, which errors are relative to, are not all nearly zero."""
    moves, depth, left = [], 0, 50
    for _ in range(draw(st.integers(1, 10))):
        push = draw(st.integers(1, max(1, min(left - 9, 20))))
        pop = draw(st.one_of(st.just(0), st.integers(0, depth + push), st.just(push)))
        moves += [push, -pop]
        depth, left = depth + push - pop, left - push
        if left < 10:
            break
    return packed(*moves, -depth, 12)


# Shrinking takes minutes in the interpreter; the failing example itself is small.
@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stacks(),
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.sampled_from([None, None, 2, 9]),
    st.sampled_from([(16, 16), (32, 16), (16, 32)]),
)
def test_any_tree(
    oracle: Any,
    tree: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    window: int | None,
    size: tuple[int, int],
) -> None:
    end_T, position_T = tree
    with blocks(*size):
        qkv = inputs(len(end_T), heads, 16, SINGLE)
        check(oracle, qkv, end_T, window=window, position_T=position_T)


TREES = {
    "one sibling": (40, 9),
    "64 siblings of one token": (20, *(1, -1) * 64),
    "siblings of every length": (37, *(n for k in range(1, 20, 3) for n in (k, -k))),
    "compaction: the end is dropped, a summary follows": (30, 20, -35, 6, 25, -20, 17),
    "side by side, then padding": (30, -30, 5, 3, -8, 1, -1, 33, 12, -45, *(1, -1) * 9),
}


@pytest.mark.parametrize("moves", TREES.values(), ids=TREES)
@pytest.mark.parametrize("window", [None, 13])
def test_trees(oracle: Any, moves: tuple[int, ...], window: int | None) -> None:
    end_T, position_T = packed(*moves)
    with blocks(16, 16):
        qkv = inputs(len(end_T), (2, 1), 16, SINGLE)
        check(oracle, qkv, end_T, window=window, position_T=position_T)


@pytest.mark.parametrize("tokens", [0, 15, 16, 17, 32, 33])
def test_one_chain_of_any_length(oracle: Any, tokens: int) -> None:
    with blocks(16, 32):
        got = check(oracle, inputs(tokens, (2, 1), 32, SINGLE), packed(tokens)[0])
    assert got["out"].shape == (tokens, 2, 32)


def test_one_token() -> None:
    qkv = inputs(1, (2, 1), 16, SINGLE)
    with blocks(16, 16):
        got = run(qkv, packed(1)[0], "triton")
    assert torch.equal(got["out"], qkv[2].detach().expand(-1, 2, -1))
    assert max(float(got[name].abs().max()) for name in ("dq", "dk")) < 1e-6


@pytest.mark.parametrize(("width", "dtype"), [(w, HALF) for w in WIDTHS] + [(80, SINGLE)])
def test_every_width_with_its_own_blocks(oracle: Any, width: int, dtype: torch.dtype) -> None:
    end_T, position_T = packed(70, 60, -60, 1, -1, 9)
    check(oracle, inputs(len(end_T), (2, 1), width, dtype), end_T, position_T=position_T)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 90])
def test_float32_at_every_width(oracle: Any, width: int, window: int | None) -> None:
    end_T, position_T = packed(150, 60, -60, 1, -1, 90, -120, 40)
    qkv = inputs(len(end_T), (4, 2), width, SINGLE)
    check(oracle, qkv, end_T, window=window, position_T=position_T)


@pytest.mark.slow
def test_bfloat16(oracle: Any) -> None:
    end_T, _ = packed(150, 60, -60, 1, -1, 90, -120, 40)
    check(oracle, inputs(len(end_T), (4, 2), 128, torch.bfloat16), end_T)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_grouped_heads(oracle: Any, groups: int) -> None:
    end_T, _ = packed(18, 7, -7, 10)
    with blocks(32, 32):
        check(oracle, inputs(len(end_T), (8, 8 // groups), 16, HALF), end_T)


def test_padding_sees_itself_only() -> None:
    end_T, _ = packed(20, -20, *(1, -1) * 15)
    qkv = inputs(len(end_T), (2, 1), 16, SINGLE)
    with blocks(16, 16):
        out_THE = run(qkv, end_T, "triton")["out"]
    assert torch.equal(out_THE[20:], qkv[2][20:].detach().expand(-1, 2, -1))


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_scale_and_cap(oracle: Any, softcap: float | None, dtype: torch.dtype) -> None:
    end_T, position_T = packed(20, 9, -9, 12)
    qkv = inputs(len(end_T), (2, 1), 16, dtype)
    with blocks(16, 16):
        options = {"scale": 0.6, "softcap": softcap, "window": 14, "position_T": position_T}
        check(oracle, qkv, end_T, **options)


def test_large_scores() -> None:
    """Scores in the thousands of both signs: nothing overflows, and errors are of the order of the
    rounding of the scores themselves."""
    end_T, _ = packed(20, 9, -9, 12)
    q, k, v = inputs(len(end_T), (2, 1), 16, SINGLE)
    q, k = ((30 * x).detach().requires_grad_() for x in (q, k))
    largest = float(torch.einsum("qhe,kge->hqk", q, k).detach().abs().max()) / 4
    assert largest > 2000
    with blocks(16, 16):
        got = run([q, k, v], end_T, "triton")
    truth = run([x.detach().double().requires_grad_() for x in (q, k, v)], end_T, "reference")
    for name, want in truth.items():
        error = float((got[name] - want).abs().max() / want.abs().max())
        assert error < 2 * largest * torch.finfo(SINGLE).eps, (name, error)


def test_what_is_not_visible_has_no_weight_at_all() -> None:
    """A sibling full of enormous keys changes no bit of its siblings and its context."""
    end_T, _ = packed(18, 14, -14, 11)
    qkv = [x.detach() for x in inputs(len(end_T), (2, 1), 16, SINGLE)]
    changed = [x.clone() for x in qkv]
    for x in changed:
        x[18:32] = 1e4
    apart = torch.cat([torch.arange(18), torch.arange(32, 43)])
    with blocks(16, 16):
        outs = [tree_attention(*x, end_T, impl="triton")[apart] for x in (qkv, changed)]
    assert torch.equal(*outs)


def test_the_context_gets_the_gradients_of_all_its_siblings() -> None:
    """As the sum over siblings that are computed apart, each with its own copy of the context."""
    context, counts = 21, (9, 1, 17)
    end_T, _ = packed(context, *(n for c in counts for n in (c, -c)))
    q, k, v = inputs(len(end_T), (4, 2), 16, SINGLE)
    up_THE = torch.cos(torch.arange(q.numel(), dtype=SINGLE)).view(q.shape)
    up_THE[:context] = 0
    with blocks(16, 16):
        out = tree_attention(q, k, v, end_T, impl="triton")
        got = torch.autograd.grad(out, (q, k, v), up_THE)
    want = [torch.zeros_like(x) for x in (q, k, v)]
    start = context
    for count in counts:
        at = torch.cat([torch.arange(context), torch.arange(start, start + count)])
        leaves = [x.detach()[at].requires_grad_() for x in (q, k, v)]
        alone = tree_attention(*leaves, packed(len(at))[0], impl="reference")
        for sum_, grad in zip(want, torch.autograd.grad(alone, leaves, up_THE[at]), strict=True):
            sum_[at] += grad
        start += count
    for name, x, y in zip(NAMES[1:], got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=name)


def test_views_and_strides() -> None:
    """Views into one projection, transposed outputs, and a width that is not innermost."""
    end_T, _ = packed(20, 9, -9, 9)
    tokens = len(end_T)
    whole = inputs(tokens, (8, 1), 16, SINGLE)[0]
    turned = [x.detach().transpose(0, 2).contiguous() for x in whole.split([4, 2, 2], dim=1)]
    grads: dict[str, list[Tensor]] = {}
    for impl in ("triton", "reference"):
        q, k, v = whole.split([4, 2, 2], dim=1)
        leaves = [x.clone().requires_grad_() for x in turned]
        with blocks(16, 16):
            one = tree_attention(q, k, v, end_T, impl=impl).transpose(0, 1).cos().sum()
            two = tree_attention(*(x.transpose(0, 2) for x in leaves), end_T, impl=impl).sum()
            grads[impl] = [
                torch.autograd.grad(one, whole)[0], *torch.autograd.grad(two, leaves)
            ]  # fmt: skip
    for got, want in zip(grads["triton"], grads["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (2,), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted: tuple[int, ...]) -> None:
    end_T, _ = packed(18, 7, -7, 10)
    qkv = inputs(len(end_T), (2, 1), 16, SINGLE)
    with blocks(16, 16):
        whole = run(qkv, end_T, "triton")
        some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(qkv)]
        out = tree_attention(*some, end_T, impl="triton")
        up = torch.sin(torch.arange(out.numel(), dtype=DOUBLE)).view(out.shape).to(SINGLE)
        got = torch.autograd.grad(out, [some[i] for i in wanted], up)
    for i, grad in zip(wanted, got, strict=True):
        assert torch.equal(grad, whole[NAMES[i + 1]])


def test_the_same_call_gives_the_same_bits() -> None:
    end_T, position_T = packed(20, 9, -9, 15, -20, 9)
    qkv = inputs(len(end_T), (2, 1), 16, HALF)
    with blocks(16, 16):
        plan = TreePlan(end_T, 20, position_T)
        options = {"window": 20, "position_T": position_T}
        first = run(qkv, end_T, "triton", **options)
        again = run(qkv, end_T, "triton", plan=plan, **options)
    assert all(torch.equal(first[name], again[name]) for name in NAMES)


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Tokens 2^29 + 16 elements apart: an offset of 32 bits would wrap at the fifth. The pages in
    between are reserved, never touched."""
    stride, tokens, width = (1 << 29) + 16, 6, 16
    size = 2 * ((tokens - 1) * stride + width)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    qkv = inputs(tokens, (1, 1), width, HALF)
    end_T, _ = packed(3, 1, -1, 2)
    want = run(qkv, end_T, "triton")
    with mmap.mmap(-1, size, flags=flags) as pages:
        far = torch.frombuffer(pages, dtype=HALF).as_strided((tokens, 1, width), (stride, width, 1))
        for i, name in enumerate("qkv"):
            far.copy_(qkv[i].detach())
            moved = [*qkv[:i], far.detach().requires_grad_(), *qkv[i + 1 :]]
            got = run(moved, end_T, "triton")
            assert all(torch.equal(got[x], want[x]) for x in NAMES), name
            del moved, got
        del far


OUTSIDE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature
from fastturn.kernels import TreePlan, triton_attention as ta

seen = {}
NAMES = ("forward_blocks", "row_deltas", "query_gradients", "key_gradients")

class Recorder:
    def __init__(self, kernel):
        self.kernel = kernel
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            _, key, _ = self.bind(*args, **kwargs)
            seen.setdefault(self.kernel.__name__, set()).add(json.dumps([str(x) for x in key]))
        return launch

made = {}
for c in ta.configurations():
    made.setdefault(c.kernel.__name__, c)
for name in NAMES:
    setattr(ta, name, Recorder(getattr(ta, name)))
for tokens in (1, 2, 16, 100, 1000, 4096):
    whole = torch.zeros(tokens, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = whole.split([4, 2, 2], dim=1)
    end_T = torch.full((tokens,), tokens)
    out = ta.attend(q, k, v, TreePlan(end_T), 0.3 + tokens, None)
    out.backward(torch.zeros_like(out))
strides = []
for name in NAMES:
    c = made[name]
    source = ASTSource(c.kernel, c.signature, c.constexprs, c.attrs)
    options = {"num_warps": c.num_warps, "num_stages": c.num_stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    for line in found.asm["ttir"].splitlines():
        if "%stride_" in line and "tt.func" not in line:
            strides.append([name, line.strip()])
print(json.dumps({"seen": {k: sorted(v) for k, v in seen.items()}, "strides": strides}))
"""


@pytest.fixture(scope="module")
def compiled() -> Any:
    """What the compiler is asked for and makes, in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", OUTSIDE],
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_one_compilation_for_all_lengths_and_scales(compiled: Any) -> None:
    assert set(compiled["seen"]) == {
        "forward_blocks", "row_deltas", "query_gradients", "key_gradients",
    }  # fmt: skip
    assert {name: len(keys) for name, keys in compiled["seen"].items() if len(keys) != 1} == {}


def test_strides_are_widened_before_they_are_multiplied(compiled: Any) -> None:
    """In the compiler's intermediate language, for a GPU."""
    assert {name for name, _ in compiled["strides"]} == set(compiled["seen"])
    for name, line in compiled["strides"]:
        assert "arith.extsi" in line and "i32 to i64" in line, (name, line)


def test_auto_takes_triton_on_cuda_where_it_can() -> None:
    cuda = torch.device("cuda")
    assert choose("auto", IMPLEMENTATIONS, cuda, SINGLE) is IMPLEMENTATIONS["triton"]
    assert choose("auto", IMPLEMENTATIONS, cuda, DOUBLE) is IMPLEMENTATIONS["torch"]
    assert choose("auto", IMPLEMENTATIONS, torch.device("cpu"), HALF) is IMPLEMENTATIONS["torch"]


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (40, SINGLE, r"impl='triton'.*16, 32, 64, 80, 96, 128, 256.*got 40.*impl='torch'"),
        (512, HALF, r"impl='triton'.*got 512"),
        (64, DOUBLE, r"impl='triton'.*float64"),
    ],
)
def test_what_triton_cannot_do_is_named(width: int, dtype: torch.dtype, message: str) -> None:
    qkv = inputs(3, (2, 1), width, dtype)
    with pytest.raises(ValueError, match=message):
        tree_attention(*qkv, packed(3)[0], impl="triton")
    assert tree_attention(*qkv, packed(3)[0]).shape == (3, 2, width)
