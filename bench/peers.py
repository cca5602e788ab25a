"""The loss of the output layer beside other libraries': time and gradient error, in one process.

    .venv/bin/python scripts/bench peers --threads 1 --no-record

One loss for all: clipped surrogate, mean over a sequence's tokens, mean over sequences, forward and
backward. `liger` is `LigerFusedLinearGRPOLoss` as it comes (loss compiled), `trl` is the chunked
log-probability function of TRL with the loss in plain torch. A peer that is not installed is named
and left out. Times alternate and only count once all results agree with plain torch; beside them
stands their share of the floor, three matrix products of that size timed in the same rounds. Errors
are against plain torch in float64 on the same inputs, over several draws of them; `rounding` is the
float64 gradient itself in the inputs' dtype, below which nothing can be.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from fastturn.kernels import linear_logprob, turn_surrogate

from . import command
from .cases import SMOLLM2
from .measure import Provider, check_equal, compared, seconds
from .record import Measured

CLIP = 0.2
TOLERANCE = 2e-4  # float32, sums over 2048 rows
PACKAGES = {"liger": "liger_kernel", "trl": "trl"}
SEEDS = 12
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PeerCase:
    """`sequences` of `tokens` scored tokens each, one advantage a sequence."""

    sequences: int
    tokens: int
    width: int
    vocab: int
    dtype: str

    @property
    def name(self) -> str:
        return f"grpo/{self.sequences}x{self.tokens}/{self.dtype}"


TIMED = PeerCase(16, 128, SMOLLM2.width, SMOLLM2.vocab, "float32")
ERROR = PeerCase(64, 16, 64, 512, "bfloat16")


@dataclass(frozen=True, slots=True)
class PeerInputs:
    hidden_BTD: Tensor
    head_VD: Tensor
    action_BT: Tensor
    behavior_BT: Tensor
    advantage_B: Tensor

    def to(self, dtype: torch.dtype) -> PeerInputs:
        """The same numbers as leaves of another dtype."""
        hidden_BTD, head_VD = (
            x.detach().to(dtype).requires_grad_() for x in (self.hidden_BTD, self.head_VD)
        )
        old_BT, advantage_B = self.behavior_BT, self.advantage_B
        wide = torch.promote_types(dtype, torch.float32)
        return PeerInputs(
            hidden_BTD, head_VD, self.action_BT, old_BT.to(wide), advantage_B.to(wide)
        )


def peer_inputs(case: PeerCase, device: str, seed: int = 0) -> PeerInputs:
    """Random weights; log-ratios of ±0.05, so that no token is clipped: nothing is skipped."""
    draw = torch.Generator().manual_seed(seed)
    shape = case.sequences, case.tokens
    dtype = DTYPES[case.dtype]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(device)

    hidden_BTD = normal(*shape, case.width).to(dtype)
    head_VD = (normal(case.vocab, case.width) * case.width**-0.5).to(dtype)
    action_BT = torch.randint(case.vocab, shape, generator=draw).to(device)
    logprob_A, _ = linear_logprob(hidden_BTD.flatten(0, 1), head_VD, action_BT.flatten())
    behavior_BT = logprob_A.view(shape) + 0.05 * normal(*shape).sign()
    inputs = PeerInputs(hidden_BTD, head_VD, action_BT, behavior_BT, normal(case.sequences))
    return inputs.to(dtype)


def surrogate_mean(inputs: PeerInputs, logprob_BT: Tensor) -> Tensor:
    ratio_BT = (logprob_BT - inputs.behavior_BT).exp()
    advantage_B1 = inputs.advantage_B.unsqueeze(1)
    clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1).mean()


def plain_loss(inputs: PeerInputs) -> Tensor:
    z_BTV = torch.nn.functional.linear(inputs.hidden_BTD, inputs.head_VD)
    all_BTV = torch.log_softmax(z_BTV.to(inputs.behavior_BT.dtype), -1)
    logprob_BT = all_BTV.gather(2, inputs.action_BT.unsqueeze(2)).squeeze(2)
    return surrogate_mean(inputs, logprob_BT)


def fastturn_loss(inputs: PeerInputs) -> Tensor:
    sequences, tokens = inputs.action_BT.shape
    return turn_surrogate(
        inputs.hidden_BTD.flatten(0, 1),
        inputs.head_VD,
        inputs.action_BT.flatten(),
        behavior_A=inputs.behavior_BT.flatten(),
        advantage_A=inputs.advantage_B.repeat_interleave(tokens),
        weight_A=torch.full_like(inputs.behavior_BT, 1 / (sequences * tokens)).flatten(),
        clip_low=CLIP,
        clip_high=CLIP,
    ).loss


def liger_loss(compiled: bool) -> Callable[[PeerInputs], Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        loss_type="grpo",
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        compiled=compiled,
    )

    def loss(inputs: PeerInputs) -> Tensor:
        value: Tensor = module(
            inputs.hidden_BTD,
            inputs.head_VD,
            inputs.action_BT,
            torch.ones_like(inputs.behavior_BT),
            inputs.advantage_B,
            old_per_token_logps=inputs.behavior_BT,
        )[0]
        return value

    return loss


def trl_loss(inputs: PeerInputs) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logprob_A = ChunkedLogProbFunction.apply(
        inputs.hidden_BTD.flatten(0, 1),
        inputs.head_VD,
        None,
        inputs.action_BT.flatten(),
        1.0,
        32768,  # columns of a tile, as its trainers call it
        None,
        1.0,
        ("entropy",),
    )[0]
    return surrogate_mean(inputs, logprob_A.view_as(inputs.action_BT))


def losses(compiled: bool) -> dict[str, Callable[[PeerInputs], Tensor]]:
    """By provider; peers that are not installed are named on the terminal and left out."""
    found: dict[str, Callable[[PeerInputs], Tensor]] = {"fastturn": fastturn_loss}
    for peer, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{peer}: left out, {package} is not installed")
        else:
            found[peer] = liger_loss(compiled) if peer == "liger" else trl_loss
    return found


def step(loss: Callable[[PeerInputs], Tensor], inputs: PeerInputs) -> list[Tensor]:
    """Loss, gradient of the hidden states, gradient of the head."""
    value = loss(inputs)
    leaves = (inputs.hidden_BTD, inputs.head_VD)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def providers(inputs: PeerInputs, compiled: bool) -> dict[str, Provider]:
    def provider(loss: Callable[[PeerInputs], Tensor]) -> Provider:
        return lambda: step(loss, inputs)

    return {name: provider(loss) for name, loss in losses(compiled).items()}


def times(case: PeerCase, repeats: int, device: str) -> Iterator[Measured]:
    """Forward and backward of each, and ours relative to each peer within a round."""
    inputs, config = peer_inputs(case, device), asdict(case)
    run = providers(inputs, compiled=True)
    check_equal({"plain": lambda: step(plain_loss, inputs)} | run, "plain", TOLERANCE)
    product = partial(_product, inputs.hidden_BTD.detach().flatten(0, 1), inputs.head_VD.detach())
    found = seconds(run | {"product": product}, repeats)
    one = found.pop("product")
    yield from compared(case.name, found, config)
    for name, values in found.items():
        share = tuple(3 * floor / value for floor, value in zip(one, values, strict=True))
        yield Measured(case.name, name, "fraction of floor", "1", share, config)


def _product(hidden_AD: Tensor, head_VD: Tensor) -> list[Tensor]:
    return [torch.mm(hidden_AD, head_VD.T)]


def errors_of(case: PeerCase, device: str, seed: int = 0) -> dict[str, dict[str, float]]:
    """max |x - truth| / max |truth| of each gradient, by provider; plain torch is among them, and
    `rounding`."""
    inputs = peer_inputs(case, device, seed)
    truth = step(plain_loss, inputs.to(torch.float64))
    results = {"rounding": [x.to(inputs.head_VD.dtype) for x in truth]}
    for name, loss in ({"plain": plain_loss} | losses(compiled=False)).items():
        results[name] = step(loss, inputs)
    return {
        name: {
            of: float((x.double() - right).abs().max() / right.abs().max())
            for of, x, right in zip(("loss", "dhidden", "dhead"), got, truth, strict=True)
        }
        for name, got in results.items()
    }


def errors(case: PeerCase, repeats: int, device: str) -> Iterator[Measured]:
    """Gradient errors of each draw, and ours relative to each peer's on the same draw."""
    config = asdict(case)
    draws = [errors_of(case, device, seed) for seed in range(SEEDS)]
    for name in draws[0]:
        for of in ("dhidden", "dhead"):
            values = tuple(found[name][of] for found in draws)
            yield Measured(case.name, name, f"{of} error", "1", values, config)
            if name != "fastturn":
                share = tuple(found["fastturn"][of] / found[name][of] for found in draws)
                yield Measured(case.name, "fastturn", f"{of} error / {name}", "1", share, config)


PARTS = {"time": (times, TIMED), "error": (errors, ERROR)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("peers", __doc__, repeats=5)
    kind = command.one_of("part", PARTS)
    parser.add_argument("parts", nargs="*", type=kind, default=list(PARTS), help=", ".join(PARTS))
    args = command.options(parser, argv)
    chosen = (PARTS[name] for name in args.parts)
    found = (one for part, case in chosen for one in part(case, args.repeats, args.device))
    return command.report("peers", found, args)
