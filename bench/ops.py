"""Kernels against plain torch on the same inputs: forward and backward time, peak extra memory.

    .venv/bin/python scripts/bench ops --threads 1 --no-record

Providers alternate in one process; their results must agree before anything is timed; memory is a
separate pass. `plain` is log-softmax, gather and autograd; for attention, a dense mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from fastturn.kernels import TreePlan, tree_attention, turn_surrogate

from . import cases, command
from .measure import Provider, check_equal, compared, peak_bytes, ratios, seconds
from .record import Measured

CLIP = 0.2
TOLERANCE = 2e-4  # float32, sums over 2048 rows


def surrogate_providers(inputs: cases.SurrogateInputs) -> dict[str, Provider]:
    """Loss and gradients by the kernel and by plain autograd."""
    leaves = (inputs.hidden_AD, inputs.head_VD)

    def step(loss: Tensor) -> Sequence[Tensor]:
        loss.backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return [loss.detach(), *grads]

    def plain_loss() -> Tensor:
        # Locals end with this function: no tensor outlives its use in the memory pass.
        logits_AV = inputs.hidden_AD @ inputs.head_VD.T
        all_AV = torch.log_softmax(logits_AV, dim=-1)
        logprob_A = all_AV.gather(1, inputs.action_A.unsqueeze(1)).squeeze(1)
        ratio_A = (logprob_A - inputs.behavior_A).clamp(-10, 10).exp()
        clipped_A = ratio_A.clamp(1 - CLIP, 1 + CLIP)
        gain_A = torch.minimum(ratio_A * inputs.advantage_A, clipped_A * inputs.advantage_A)
        return -(inputs.weight_A * gain_A).sum()

    def kernel_loss() -> Tensor:
        return turn_surrogate(
            inputs.hidden_AD,
            inputs.head_VD,
            inputs.action_A,
            behavior_A=inputs.behavior_A,
            advantage_A=inputs.advantage_A,
            weight_A=inputs.weight_A,
            clip_low=CLIP,
            clip_high=CLIP,
        ).loss

    return {"plain": lambda: step(plain_loss()), "fastturn": lambda: step(kernel_loss())}


def surrogate(repeats: int, device: str) -> Iterator[Measured]:
    """All rows live, half with advantage 0, half clipped: each kernel time relative to the first,
    alternating in one process."""
    every, timed = {}, {}
    for half in ("live", "zero", "clipped"):
        case = cases.SurrogateCase(half)
        run = surrogate_providers(cases.surrogate_inputs(case, device))
        check_equal(run, "plain", TOLERANCE)
        every[half] = (case, run)
        timed[f"fastturn {half}"] = run["fastturn"]
    timed["plain live"] = every["live"][1]["plain"]
    times = seconds(timed, repeats)
    live = times["fastturn live"]
    for half, (case, run) in every.items():
        config = asdict(case)
        mine = times[f"fastturn {half}"]
        yield Measured(case.name, "fastturn", "time", "s", tuple(mine), config)
        if half != "live":
            yield Measured(case.name, "fastturn", "time / live", "1", ratios(mine, live), config)
            continue
        plain = times["plain live"]
        yield Measured(case.name, "plain", "time", "s", tuple(plain), config)
        yield Measured(case.name, "fastturn", "time / plain", "1", ratios(live, plain), config)
        peaks = {name: peak_bytes(provider) for name, provider in run.items()}
        for name, peak in peaks.items():
            yield Measured(case.name, name, "peak extra memory", "MiB", (peak / 2**20,), config)
        share = peaks["fastturn"] / peaks["plain"]
        yield Measured(case.name, "fastturn", "peak extra memory / plain", "1", (share,), config)


def attention_providers(case: cases.AttentionCase, device: str) -> dict[str, Provider]:
    """Output and gradients by tiles and by a dense mask; masks and plans are made once."""
    qkv, end_T = cases.attention_inputs(case, device), case.end_T(device)
    plan = TreePlan(end_T)
    i_T = torch.arange(len(end_T), device=device)
    seen_TT = (i_T <= i_T.unsqueeze(1)) & (i_T.unsqueeze(1) < end_T)
    upstream_THE = torch.ones_like(qkv[0])

    def tiles() -> Sequence[Tensor]:
        out_THE = tree_attention(*qkv, end_T, plan=plan)
        return [out_THE.detach(), *torch.autograd.grad(out_THE, qkv, upstream_THE)]

    def dense() -> Sequence[Tensor]:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        out_1HTE = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen_TT, enable_gqa=True
        )
        out_THE = out_1HTE.squeeze(0).transpose(0, 1)
        return [out_THE.detach(), *torch.autograd.grad(out_THE, qkv, upstream_THE)]

    return {"dense": dense, "fastturn": tiles}


def attention(repeats: int, device: str) -> Iterator[Measured]:
    for case in cases.ATTENTION:
        run, config = attention_providers(case, device), asdict(case)
        check_equal(run, "dense", TOLERANCE)
        yield from compared(case.name, seconds(run, repeats), config)


OPS = {"surrogate": surrogate, "attention": attention}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("ops", __doc__, repeats=5)
    kind = command.one_of("op", OPS)
    parser.add_argument("ops", nargs="*", type=kind, default=list(OPS), help=", ".join(OPS))
    args = command.options(parser, argv)
    found = (one for name in args.ops for one in OPS[name](args.repeats, args.device))
    return command.report("ops", found, args)
