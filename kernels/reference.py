"""Every op in plain differentiable torch: the specification, and the oracle of the tests.

Nothing here is fast and nothing is saved on purpose: autograd differentiates what is written. All
arguments are as in the public ops; half-precision matmuls are rounded once and continue in float32.

    z = softcap(hidden · headᵀ + bias) / temperature
    logprob = z[action] - logsumexp(z)          entropy = -Σ p log p, 0 · (-inf) = 0
    loss = Σ_a weight_a [ -min(ρA, clip(ρ)A) + kl_coef · (exp(d) - d - 1) ]
    visible(q, k) = k <= q < end[k] and (no window or position[q] - position[k] < window)
"""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 10.0  # largest |log-ratio| that is exponentiated


def linear_logprob(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    row_A: Tensor | None = None,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    hidden_AD = hidden_RD if row_A is None else hidden_RD[row_A]
    z_AV = torch.nn.functional.linear(hidden_AD, head_VD)
    z_AV = z_AV.to(torch.promote_types(z_AV.dtype, torch.float32))
    z_AV = z_AV if bias_V is None else z_AV + bias_V
    if softcap is not None:  # forbidden ids stay forbidden
        z_AV = torch.where(z_AV == -torch.inf, z_AV, softcap * torch.tanh(z_AV / softcap))
    all_AV = torch.log_softmax(z_AV / temperature, dim=-1)
    finite_AV = all_AV.masked_fill(all_AV == -torch.inf, 0)
    entropy_A = -(all_AV.exp() * finite_AV).sum(-1)
    return all_AV.gather(1, action_A.unsqueeze(1)).squeeze(1), entropy_A


def turn_surrogate(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    row_A: Tensor,
    behavior_A: Tensor | None,
    advantage_A: Tensor,
    weight_A: Tensor,
    reference_A: Tensor | None,
    clip_low: float,
    clip_high: float,
    temperature: float,
    kl_coef: float,
    bias_V: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-probability and entropy of scored actions (every argument per action is theirs)."""
    logprob_A, entropy_A = linear_logprob(
        hidden_RD, head_VD, action_A, row_A, temperature, bias_V, softcap
    )
    old_A = logprob_A.detach() if behavior_A is None else behavior_A
    ratio_A = (logprob_A - old_A).clamp(-CLAMP, CLAMP).exp()
    clipped_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
    each_A = -torch.minimum(ratio_A * advantage_A, clipped_A * advantage_A)
    if reference_A is not None and kl_coef:
        d_A = (reference_A - logprob_A).clamp(-CLAMP, CLAMP)
        each_A = each_A + kl_coef * (d_A.exp() - d_A - 1)
    return (weight_A * each_A).sum(), logprob_A, entropy_A


def tree_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    end_T: Tensor,
    scale: float,
    window: int | None = None,
    position_T: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    i_T = torch.arange(end_T.shape[0], device=end_T.device)
    seen_TT = (i_T[None, :] <= i_T[:, None]) & (i_T[:, None] < end_T[None, :])
    if window is not None:
        place_T = i_T if position_T is None else position_T
        seen_TT &= place_T[:, None] - place_T[None, :] < window
    group = q_THE.shape[1] // max(k_TKE.shape[1], 1)
    k_THE, v_THE = (x.repeat_interleave(group, dim=1) for x in (k_TKE, v_TKE))
    s_HTT = torch.einsum("qhe,khe->hqk", q_THE, k_THE) * scale
    s_HTT = s_HTT if softcap is None else softcap * torch.tanh(s_HTT / softcap)
    wide = torch.promote_types(s_HTT.dtype, torch.float32)
    p_HTT = s_HTT.to(wide).masked_fill(~seen_TT, -torch.inf).softmax(-1).to(q_THE.dtype)
    return torch.einsum("hqk,khe->qhe", p_HTT, v_THE)
