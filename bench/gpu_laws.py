"""Correctness of every op on a device, against the reference in float64.

The oracle: err(x) = max|x - truth| / max|truth|, and err(op) <= 2·err(reference in the same dtype)
+ 8·eps(accumulator) for every output and gradient, by name. Offsets beyond 2^31 are proven twice:
by more logits than that in one call, and by rows that lie that far apart in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastturn.kernels import linear_logprob, tree_attention, turn_surrogate

from .cases import AttentionCase
from .gpu_ops import implementations

Named = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """One output or gradient: right when `error <= allowed`. NaN is never right."""

    name: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class LawCase:
    """Arguments of the output-layer ops; half of the actions are beyond the clip range."""

    hidden_RD: Tensor
    head_VD: Tensor
    action_A: Tensor
    row_A: Tensor
    shift_A: Tensor
    advantage_A: Tensor
    weight_A: Tensor
    bias_V: Tensor | None
    options: Mapping[str, Any]  # temperature, softcap

    def at(self, dtype: torch.dtype) -> LawCase:
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return replace(
            self, hidden_RD=self.hidden_RD.to(dtype), head_VD=self.head_VD.to(dtype), bias_V=bias_V
        )

    def leaves(self) -> Named:
        named = {"hidden": self.hidden_RD, "head": self.head_VD}
        if self.bias_V is not None:
            named["bias"] = self.bias_V
        return {name: x.detach().requires_grad_() for name, x in named.items()}

    def surrogate(self, impl: str, logprob_A: Tensor) -> Named:
        """`logprob_A` is the truth that behaviour and reference are shifted from."""
        leaves = self.leaves()
        out = turn_surrogate(
            leaves["hidden"],
            leaves["head"],
            self.action_A,
            row_A=self.row_A,
            behavior_A=logprob_A - self.shift_A,
            reference_A=logprob_A + 0.5 * self.shift_A,
            advantage_A=self.advantage_A,
            weight_A=self.weight_A,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.05,
            bias_V=leaves.get("bias"),
            impl=impl,
            **self.options,
        )
        named = {"loss": out.loss, "logprob": out.logprob_A, "entropy": out.entropy_A}
        named |= {f"sum {name}": x for name, x in out.sums.items()}
        return _with_gradients(named, out.loss, leaves)

    def score(self, impl: str) -> Named:
        leaves = self.leaves()
        logprob_A, entropy_A = linear_logprob(
            leaves["hidden"],
            leaves["head"],
            self.action_A,
            row_A=self.row_A,
            bias_V=leaves.get("bias"),
            impl=impl,
            **self.options,
        )
        total = (logprob_A * self.advantage_A).sum() + (entropy_A * self.weight_A).sum()
        return _with_gradients({"logprob": logprob_A, "entropy": entropy_A}, total, leaves)


def _with_gradients(named: Named, loss: Tensor, leaves: Named) -> Named:
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {name: x.detach() for name, x in named.items()}
    return named | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def law_case(
    rows: int,
    width: int,
    vocab: int,
    device: str,
    *,
    per_row: int = 1,
    bias: bool = False,
    **options: Any,
) -> LawCase:
    """Random in float64, logits of spread 1. Log-ratios keep away from the edges of the clip, so
    that rounding moves no action across."""
    draw = torch.Generator(device).manual_seed(rows + width + vocab)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, device=device, dtype=torch.float64)

    actions = rows * per_row
    edges = torch.tensor([-0.5, -0.05, 0.05, 0.5], dtype=torch.float64, device=device)
    return LawCase(
        normal(rows, width),
        normal(vocab, width) * width**-0.5,
        torch.randint(vocab, (actions,), generator=draw, device=device),
        torch.arange(actions, device=device) // per_row,
        edges[torch.randint(4, (actions,), generator=draw, device=device)],
        normal(actions),
        normal(actions).abs() + 0.1,
        normal(vocab) if bias else None,
        options,
    )


def compare(label: str, op: Named, plain: Named, truth: Named, dtype: torch.dtype) -> list[Check]:
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return [
        Check(
            f"{label} {name}",
            _error(op[name], truth[name]),
            2 * _error(plain[name], truth[name]) + 8 * eps,
        )
        for name in truth
    ]


def _error(value: Tensor, truth: Tensor) -> float:
    scale = truth.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((value.double() - truth).abs().max() / scale)


def _score_exactly(case: LawCase) -> Tensor:
    with torch.no_grad():
        return linear_logprob(
            case.hidden_RD,
            case.head_VD,
            case.action_A,
            row_A=case.row_A,
            bias_V=case.bias_V,
            impl="reference",
            **case.options,
        )[0]


def variants(device: str, *, toy: bool) -> Iterator[tuple[str, LawCase]]:
    """Plain, everything at once, several labels on a row, and one row; ragged vocabularies."""
    rows, width, vocab = (9, 32, 130) if toy else (257, 576, 49155)
    yield "plain", law_case(rows, width, vocab, device)
    yield (
        "bias, temperature, softcap",
        law_case(rows, width, vocab, device, bias=True, temperature=0.7, softcap=20.0),
    )
    yield "3 labels a row", law_case(rows // 3, width, vocab, device, per_row=3)
    yield "1 row", law_case(1, width, vocab, device)


def head_checks(impl: str, case: LawCase, dtype: torch.dtype, label: str) -> Iterator[Check]:
    """Every output and gradient of both ops of the output layer, where they have `impl`."""
    narrow = case.at(dtype)
    exact = narrow.at(torch.float64)
    logprob_A = _score_exactly(exact)
    trio = ((narrow, impl), (narrow, "reference"), (exact, "reference"))
    for op in ("turn_surrogate", "linear_logprob"):
        if impl not in implementations(op):
            continue
        score = op == "linear_logprob"
        runs = [one.score(how) if score else one.surrogate(how, logprob_A) for one, how in trio]
        yield from compare(f"{op} {label}", *runs, dtype)


def attention_checks(
    impl: str, case: AttentionCase, dtype: torch.dtype, device: str
) -> list[Check]:
    draw = torch.Generator(device).manual_seed(0)
    end_T = case.end_T(device)
    sizes = [(len(end_T), heads, case.width) for heads in (case.heads, case.keys, case.keys)]
    qkv = [torch.randn(*size, generator=draw, device=device).to(dtype) for size in sizes]
    up_THE = torch.randn(*sizes[0], generator=draw, device=device).to(dtype)

    def run(how: str, wide: torch.dtype) -> Named:
        leaves = [x.to(wide, copy=True).requires_grad_() for x in qkv]
        out_THE = tree_attention(*leaves, end_T, impl=how)
        grads = torch.autograd.grad(out_THE, leaves, up_THE.to(wide))
        return dict(zip(("out", "dq", "dk", "dv"), (out_THE.detach(), *grads), strict=True))

    runs = run(impl, dtype), run("reference", dtype), run("reference", torch.float64)
    return compare(f"tree_attention {impl} {dtype}", *runs, dtype)


def repeats_itself(impl: str, case: LawCase, dtype: torch.dtype) -> bool:
    """Two runs of the surrogate agree bit for bit."""
    narrow = case.at(dtype)
    logprob_A = torch.full(case.action_A.shape, -3.0, device=case.action_A.device)
    first, second = (narrow.surrogate(impl, logprob_A) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def row_alone(impl: str, case: LawCase, dtype: torch.dtype) -> bool:
    """Log-probability and dhidden of the first row are the same bits alone and in the batch."""
    logprob_A = torch.full(case.action_A.shape, -3.0, device=case.action_A.device)
    whole, alone = (
        part.at(dtype).surrogate(impl, logprob_A[: len(part.action_A)])
        for part in (case, rows_of(case, 0, 1))
    )
    return all(torch.equal(whole[name][:1], alone[name]) for name in ("logprob", "dhidden"))


def rows_of(case: LawCase, start: int, stop: int) -> LawCase:
    """Rows start:stop of a case with one action a row."""
    cut = slice(start, stop)
    per_action = ("action_A", "shift_A", "advantage_A", "weight_A")
    return replace(
        case,
        hidden_RD=case.hidden_RD[cut],
        row_A=case.row_A[: stop - start],
        **{name: getattr(case, name)[cut] for name in per_action},
    )


def _by_parts(case: LawCase, logprob_A: Tensor, rows: int) -> Named:
    """The reference surrogate over `rows` rows at a time, losses and dhead summed in float64."""
    parts, total = [], torch.zeros_like(case.head_VD, dtype=torch.float64)
    for start in range(0, len(case.action_A), rows):
        part = rows_of(case, start, start + rows)
        found = part.surrogate("reference", logprob_A[start : start + rows])
        parts.append({name: found[name].double() for name in ("loss", "logprob", "dhidden")})
        total += found["dhead"].double()
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("logprob", "dhidden")}
    return joined | {"loss": torch.stack([part["loss"] for part in parts]).sum(), "dhead": total}


def many_logits(impl: str, device: str, *, toy: bool) -> list[Check]:
    """16384 rows of 151936 logits: 2.5e9 > 2^31 in one call."""
    rows, width, vocab, at_once = (12, 32, 130, 4) if toy else (16384, 64, 151936, 512)
    dtype = torch.float32 if toy else torch.bfloat16
    case = law_case(rows, width, vocab, device).at(dtype)
    exact = case.at(torch.float64)
    logprob_A = torch.cat(
        [_score_exactly(rows_of(exact, i, i + at_once)) for i in range(0, rows, at_once)]
    )
    truth, plain = (_by_parts(one, logprob_A, at_once) for one in (exact, case))
    got = case.surrogate(impl, logprob_A)
    return compare(f"turn_surrogate {impl} {rows}x{vocab} logits", got, plain, truth, dtype)


def far_rows(impl: str, device: str, *, toy: bool) -> Iterator[Check]:
    """Rows of hidden states and of the head that lie 2^31 elements and more apart in memory."""
    apart = 1 << (7 if toy else 32)
    dtype = torch.float32 if toy else torch.bfloat16
    case = law_case(9, 32, 130, device).at(dtype)
    logprob_A = _score_exactly(case.at(torch.float64))
    pair = [one.surrogate("reference", logprob_A) for one in (case, case.at(torch.float64))]
    for name in ("hidden_RD", "head_VD"):
        near = getattr(case, name)
        stride = max(apart // len(near), near.shape[1]) // 8 * 8
        room = torch.empty(stride * len(near), dtype=dtype, device=device)
        far = room.as_strided(near.shape, (stride, 1))
        far.copy_(near)
        got = replace(case, **{name: far}).surrogate(impl, logprob_A)
        yield from compare(f"turn_surrogate {impl} far {name}", got, *pair, dtype)
        del room, far
