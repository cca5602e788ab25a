"""What scripts/gpu_check runs on a device: shapes, inputs and providers, ours and other libraries'.

One loss for all providers of the output layer: clipped surrogate, one advantage a sequence, mean
over tokens. Those that only have a cross-entropy (marked in their name) run the mean of it: the
same matrix products, less elementwise work.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastturn.kernels import (
    TreePlan,
    attention_implementations,
    linear_logprob,
    tree_attention,
    turn_surrogate,
)

from .cases import AttentionCase
from .measure import Provider

CLIP = 0.2
TOKENS = 512  # of a sequence


class Absent(RuntimeError):
    """A provider cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class HeadCase:
    """`half` is what every other sequence ("zero": advantage 0) or token ("clipped") is."""

    actions: int
    width: int
    vocab: int
    half: str = "live"
    dtype: str = "bfloat16"
    tokens: int = TOKENS

    @property
    def shape(self) -> str:
        return f"{self.actions}x{self.width}x{self.vocab}"


@dataclass(frozen=True, slots=True)
class HeadInputs:
    hidden_AD: Tensor
    head_VD: Tensor
    action_A: Tensor
    behavior_A: Tensor
    advantage_A: Tensor
    tokens: int

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """[loss, dhidden, dhead]."""
        leaves = (self.hidden_AD, self.head_VD)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


HEADS = (
    HeadCase(8192, 2048, 151936),
    HeadCase(16384, 2048, 151936),
    HeadCase(8192, 4096, 151936),
    HeadCase(4096, 576, 49152),
)
TOY_HEADS = tuple(HeadCase(a, d, v, dtype="float32", tokens=8) for a, d, v in [(32, 32, 130)])

# Heads of Qwen3-8B (32 over 8) and of Qwen3-1.7B (16 over 8).
ATTENTION = (
    AttentionCase("attention/siblings", 1, 4096, 8, 512, 32, 8, 128),
    AttentionCase("attention/trees", 16, 384, 4, 32, 32, 8, 128),
    AttentionCase("attention/65536 tokens, 1.7B", 8, 4096, 8, 512, 16, 8, 128),
    AttentionCase("attention/65536 tokens, 8B", 8, 4096, 8, 512, 32, 8, 128),
)
DENSE = 1 << 14  # most tokens of a dense mask
TOY_ATTENTION = (AttentionCase("attention/siblings", 2, 24, 2, 8, 4, 2, 16),)


def implementations(module: str) -> list[str]:
    """Names of the implementations of an op worth timing, Triton first.

    Example: `implementations("turn_surrogate")` is ["torch"] where no Triton kernel is registered.
    """
    table = importlib.import_module(f"fastturn.kernels.{module}").IMPLEMENTATIONS
    return [name for name in ("triton", "torch") if name in table]


def attention_names(device: str) -> list[str]:
    """Implementations of tree attention that have a gradient on `device`, Triton first."""
    reasons = attention_implementations(torch.device(device))
    return [name for name, reason in reasons.items() if reason is None and name != "reference"]


def head_inputs(case: HeadCase, device: str) -> HeadInputs:
    """Random, logits of spread 1; log-ratios ±0.05, or ±1 on the losing side where clipped."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, device=device)

    hidden_AD = normal(case.actions, case.width).to(dtype)
    head_VD = (normal(case.vocab, case.width) * case.width**-0.5).to(dtype)
    action_A = torch.randint(case.vocab, (case.actions,), generator=draw, device=device)
    # Mostly positive: a loss that cancels to nothing could not be compared relatively.
    advantage_B = normal(case.actions // case.tokens) + 0.5
    if case.half == "zero":
        advantage_B[::2] = 0
    advantage_A = advantage_B.repeat_interleave(case.tokens)
    with torch.no_grad():
        logprob_A, _ = linear_logprob(hidden_AD, head_VD, action_A, impl="torch")
    behavior_A = logprob_A + 0.05 * normal(case.actions).sign()
    if case.half == "clipped":
        behavior_A[::2] = (logprob_A - advantage_A.sign())[::2]
    hidden_AD.requires_grad_()
    head_VD.requires_grad_()
    return HeadInputs(hidden_AD, head_VD, action_A, behavior_A, advantage_A, case.tokens)


def ours(inputs: HeadInputs, impl: str) -> Provider:
    weight_A = torch.full_like(inputs.advantage_A, 1 / len(inputs.advantage_A))

    def run() -> list[Tensor]:
        out = turn_surrogate(
            inputs.hidden_AD,
            inputs.head_VD,
            inputs.action_A,
            behavior_A=inputs.behavior_A,
            advantage_A=inputs.advantage_A,
            weight_A=weight_A,
            clip_low=CLIP,
            clip_high=CLIP,
            impl=impl,
        )
        return inputs.gradients(out.loss)

    return run


def _surrogate(inputs: HeadInputs, logprob_A: Tensor) -> Tensor:
    ratio_A = (logprob_A - inputs.behavior_A).clamp(-10, 10).exp()
    clipped_A = ratio_A.clamp(1 - CLIP, 1 + CLIP)
    gain_A = torch.minimum(ratio_A * inputs.advantage_A, clipped_A * inputs.advantage_A)
    return -gain_A.mean()


def _plain_logprob(hidden_AD: Tensor, head_VD: Tensor, action_A: Tensor) -> Tensor:
    all_AV = torch.log_softmax(F.linear(hidden_AD, head_VD).float(), dim=-1)
    return all_AV.gather(1, action_A.unsqueeze(1)).squeeze(1)


def plain(inputs: HeadInputs) -> Provider:
    def run() -> list[Tensor]:
        logprob_A = _plain_logprob(inputs.hidden_AD, inputs.head_VD, inputs.action_A)
        return inputs.gradients(_surrogate(inputs, logprob_A))

    return run


def _compile(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """On CPU only the graphs are made: generating C++ code would measure a compiler."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(function, backend=backend, dynamic=False)


def compiled(inputs: HeadInputs) -> Provider:
    def loss(hidden_AD: Tensor, head_VD: Tensor, action_A: Tensor) -> Tensor:
        return _surrogate(inputs, _plain_logprob(hidden_AD, head_VD, action_A))

    fast = _compile(loss, inputs.hidden_AD.device.type)
    return lambda: inputs.gradients(fast(inputs.hidden_AD, inputs.head_VD, inputs.action_A))


def _package(name: str, where: str) -> Any:
    """The module `where` of the package `name`, or `Absent`."""
    if importlib.util.find_spec(name) is None:
        raise Absent(f"{name} is not installed")
    return importlib.import_module(where)


def liger_grpo(inputs: HeadInputs) -> Provider:
    library = _package("liger_kernel", "liger_kernel.chunked_loss")
    function = library.LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=inputs.hidden_AD.is_cuda,
        use_ref_model=False,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        loss_type="bnpo",
    )

    def rows(x_A: Tensor) -> Tensor:
        return x_A.unflatten(0, (-1, inputs.tokens))

    action_BT, behavior_BT = rows(inputs.action_A), rows(inputs.behavior_A)
    mask_BT, advantage_B = torch.ones_like(action_BT), rows(inputs.advantage_A)[:, 0]

    def run() -> list[Tensor]:
        loss, *_ = function(
            rows(inputs.hidden_AD),
            inputs.head_VD,
            action_BT,
            mask_BT,
            advantage_B,
            old_per_token_logps=behavior_BT,
        )
        return inputs.gradients(loss)

    return run


def trl_selective(inputs: HeadInputs) -> Provider:
    library = _package("trl", "trl.trainer.utils")

    def run() -> list[Tensor]:
        logits_AV = F.linear(inputs.hidden_AD, inputs.head_VD)
        logprob_A = library.selective_log_softmax(logits_AV, inputs.action_A)
        return inputs.gradients(_surrogate(inputs, logprob_A.float()))

    return run


def _needs_cuda(inputs: HeadInputs, name: str) -> None:
    if not inputs.hidden_AD.is_cuda:
        raise Absent(f"{name} needs a CUDA device")


def liger_flce(inputs: HeadInputs) -> Provider:
    library = _package("liger_kernel", "liger_kernel.transformers")
    _needs_cuda(inputs, "the fused cross-entropy of liger_kernel")
    function = library.LigerFusedLinearCrossEntropyLoss()
    return lambda: inputs.gradients(function(inputs.head_VD, inputs.hidden_AD, inputs.action_A))


def cce(inputs: HeadInputs) -> Provider:
    library = _package("cut_cross_entropy", "cut_cross_entropy")
    _needs_cuda(inputs, "cut_cross_entropy's kernel")
    entropy = library.linear_cross_entropy
    return lambda: inputs.gradients(entropy(inputs.hidden_AD, inputs.head_VD, inputs.action_A))


# Providers of another loss are compared with this one instead of the surrogate.
CROSS_ENTROPY = {"liger FLCE (cross-entropy)": liger_flce, "CCE (cross-entropy)": cce}
PEERS: dict[str, Callable[[HeadInputs], Provider]] = {
    "plain torch": plain,
    "compiled torch": compiled,
    "liger GRPO": liger_grpo,
    "TRL selective": trl_selective,
    **CROSS_ENTROPY,
}


def scorers(inputs: HeadInputs, *, backward: bool) -> Iterator[tuple[str, Callable[[], Provider]]]:
    """Log-probabilities of the actions, alone or with an arbitrary upstream gradient."""
    fast = _compile(_plain_logprob, inputs.hidden_AD.device.type)

    def mine(impl: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda h, w, a: linear_logprob(h, w, a, impl=impl)[0]

    def provider(score: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Provider:
        def run() -> list[Tensor]:
            with torch.set_grad_enabled(backward):
                logprob_A = score(inputs.hidden_AD, inputs.head_VD, inputs.action_A)
            if not backward:
                return [logprob_A.detach()]
            return inputs.gradients((logprob_A * inputs.advantage_A).mean())

        return run

    named = {f"fastturn {impl}": mine(impl) for impl in implementations("linear_logprob")}
    named |= {"plain torch": _plain_logprob, "compiled torch": fast}
    for name, score in named.items():
        yield name, partial(provider, score)


def attenders(case: AttentionCase, device: str, dtype: torch.dtype) -> dict[str, Provider]:
    """Output and gradients; plans, masks and block masks are made once, outside."""
    draw = torch.Generator(device).manual_seed(0)
    end_T = case.end_T(device)
    qkv = [
        torch.randn(len(end_T), heads, case.width, generator=draw, device=device, dtype=dtype)
        for heads in (case.heads, case.keys, case.keys)
    ]
    for x in qkv:
        x.requires_grad_()
    upstream_THE = torch.ones_like(qkv[0])
    plan = TreePlan(end_T)

    def step(attend: Callable[..., Tensor]) -> Provider:
        def run() -> list[Tensor]:
            out_THE = attend(*qkv)
            return [out_THE.detach(), *torch.autograd.grad(out_THE, qkv, upstream_THE)]

        return run

    def mine(impl: str) -> Callable[..., Tensor]:
        return lambda q, k, v: tree_attention(q, k, v, end_T, plan=plan, impl=impl)

    named = {f"fastturn {impl}": mine(impl) for impl in attention_names(device)}
    named["sdpa, replicated rows"] = _replicated(case, device)
    if len(end_T) <= DENSE:
        named["sdpa, dense mask"] = _dense(end_T, case.heads // case.keys)
    return {name: step(attend) for name, attend in named.items()}


def _dense(end_T: Tensor, groups: int) -> Callable[..., Tensor]:
    i_T = torch.arange(len(end_T), device=end_T.device)
    seen_TT = (i_T <= i_T.unsqueeze(1)) & (i_T.unsqueeze(1) < end_T)

    def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        # Repeated keys: torch's memory-efficient kernel takes a mask but no grouped heads.
        k_THE, v_THE = (x.repeat_interleave(groups, dim=1) for x in (k_TKE, v_TKE))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THE, k_THE, v_THE))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT)[0].transpose(0, 1)

    return attend


def _replicated(case: AttentionCase, device: str) -> Callable[..., Tensor]:
    """A row for each sibling with its own copy of the context, by torch's fastest causal kernel."""
    size = case.context + case.siblings * case.tokens
    place = torch.arange(case.context + case.tokens, device=device)
    sibling_S1 = torch.arange(case.siblings, device=device).unsqueeze(1)
    row_SN = torch.where(place < case.context, place, place + sibling_S1 * case.tokens)
    tree_J11 = torch.arange(case.trees, device=device).view(-1, 1, 1) * size
    index_BN = (tree_J11 + row_SN).flatten(0, 1)
    first_T = torch.empty(case.trees * size, dtype=torch.int64, device=device)
    first_T[index_BN.flatten().flip(0)] = torch.arange(index_BN.numel(), device=device).flip(0)

    def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        q, k, v = (x[index_BN].transpose(1, 2) for x in (q_THE, k_TKE, v_TKE))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[first_T]

    return attend
