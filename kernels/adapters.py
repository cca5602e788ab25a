"""The fused output layer inside other trainers. Nothing of theirs is imported.

TRL, behind the construction of a `GRPOTrainer` and before `train()`:

    trainer = GRPOTrainer(...)
    fuse_trl(trainer)

TRL asks the model itself for log-probabilities: it calls `model(..., fused_lm_head=True)` and reads
`log_probs` and `entropy` of the answer. So that forward is what is replaced, and not a method of
the trainer: the head is read inside the root module's forward, where FSDP has gathered it, and
every loss, entropy bonus and metric of the trainer works on as before.

verl: `linear_cross_entropy` has the signature of `verl.utils.kernel.linear_cross_entropy`.
"""

from __future__ import annotations

import functools
import types
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .dispatch import check_float, check_number, check_tensor, without_autocast
from .linear_logprob import linear_logprob
from .vocabulary_parallel import vocabulary_parallel_logprob
from .vocabulary_slice import VocabularySlice, gather_numbers

IGNORED = -100  # label of a token that is not scored


class ScoredTokens(NamedTuple):
    """What TRL reads of a forward with `fused_lm_head=True`.

    log_probs, entropy  float [B, T - 1] (next token of each position but the last), 0 where the
                        label is -100
    aux_loss            None: routers are not scored
    """

    log_probs: Tensor
    entropy: Tensor
    aux_loss: None = None


def fuse_trl(trainer: Any) -> None:
    """Makes a TRL `GRPOTrainer` compute log-probabilities, entropies and their gradients by
    `linear_logprob`, for its model and its reference model.

    Rows whose upstream gradient is 0 (clipped, masked, a group without advantage) cost no backward
    products. Raises `ValueError` for what is no such trainer, for a router loss, and for an
    output layer that is no plain linear layer (an adapter on it would be skipped silently).

    Example: `fuse_trl(trainer); trainer.train()`.
    """
    for name in ("model", "args", "accelerator", "temperature"):
        if not hasattr(trainer, name):
            raise ValueError(
                f"trainer: expected a GRPOTrainer of TRL, got {type(trainer).__name__} without "
                f"`{name}`"
            )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "trainer: expected no router loss, got aux_loss_enabled=True; "
            "set router_aux_loss_coef=0 or keep the trainer's own output layer"
        )
    single = bool(getattr(trainer.args, "cast_lm_head_to_fp32", False))
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            model = trainer.accelerator.unwrap_model(model)
            if hasattr(model, "peft_config"):
                model = model.get_base_model()
            fuse_head(model, temperature=float(trainer.temperature), single=single)


def fuse_head(model: Any, *, temperature: float = 1.0, single: bool = False) -> None:
    """Replaces the forward of a Hugging Face causal model for calls with `fused_lm_head=True`;
    other calls (generation) run the forward that the model had.

    temperature  divides the logits
    single       project in float32, outside autocast

    `model(input_ids=..., labels=..., fused_lm_head=True)` gives `ScoredTokens`; labels of -100 are
    not scored. `shift_labels` in place of `labels` are scored without the shift, [B, T].
    Raises `ValueError` for an output layer that is no `torch.nn.Linear`, here and at each call.
    """
    previous = model.forward
    _output_layer(model)
    scale, softcap = _logit_rule(model.config)

    @functools.wraps(type(model).forward)  # generation checks its arguments by the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return previous(*args, **kwargs)
        kwargs.pop("num_items_in_batch", None)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits: expected False, routers are not scored")
        hidden_BTD = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        if shifted is None:
            if labels is None:
                raise ValueError("labels: expected labels or shift_labels, got neither")
            hidden_BTD, shifted = hidden_BTD[:, :-1], labels[:, 1:]
        layer = _output_layer(self)
        # softcap(s·x) / T is softcap' = softcap / s and T' = T / s applied to x.
        cap = None if softcap is None else softcap / scale
        return _score(hidden_BTD, layer, shifted, temperature / scale, cap, single)

    model.forward = types.MethodType(forward, model)


def _output_layer(model: Any) -> torch.nn.Linear:
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise ValueError(
            f"model: expected an output layer of type torch.nn.Linear, got {type(layer).__name__}; "
            f"an adapter on the output layer is not supported: leave lm_head out of its targets"
        )
    return layer


def _logit_rule(config: Any) -> tuple[float, float | None]:
    """(factor, softcap) that the model's own forward applies to its logits."""
    text = config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(text, name, None)) is not None:
            break
    else:
        factor = getattr(text, "logits_scaling", None)
        if factor is not None and text.model_type != "hyperclovax":
            factor = 1 / factor
    scale = 1.0 if factor is None else float(factor)
    if scale <= 0:
        raise ValueError(f"model: expected a positive factor of its logits, got {scale}")
    return scale, getattr(text, "final_logit_softcapping", None)


def _score(
    hidden_BTD: Tensor,
    layer: torch.nn.Linear,
    label_BT: Tensor,
    temperature: float,
    softcap: float | None,
    single: bool,
) -> ScoredTokens:
    kind = hidden_BTD.device.type
    dtype = torch.float32 if single else hidden_BTD.dtype
    if not single and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    bias_V = layer.bias
    scored_BT = label_BT != IGNORED
    with without_autocast(hidden_BTD.device):
        logprob_A, entropy_A = linear_logprob(
            hidden_BTD[scored_BT].to(dtype),
            layer.weight.to(dtype),
            label_BT[scored_BT],
            temperature=temperature,
            bias_V=bias_V,
            softcap=softcap,
        )
    # masked_scatter keeps the graph when nothing is scored: such a batch has gradient 0.
    logprob_BT, entropy_BT = (
        x.new_zeros(scored_BT.shape).masked_scatter(scored_BT, x) for x in (logprob_A, entropy_A)
    )
    return ScoredTokens(logprob_BT, entropy_BT)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of that name: (log-probabilities, entropies) of `labels`, differentiable.

    hidden     [N, D], or any leading shape, flattened; weight [V, D] of the same dtype
    labels     integers in [0, V), N of them
    reduction  "none": log-probabilities [N]; "sum" or "mean": one number. Entropies are [N] always.
    dist_process_group  the head is split over its ranks in rank order and `weight` is this rank's
               part; parts may differ (their sizes are gathered at each call). All ranks have the
               same hidden and labels.

    Both are float32 (float64 for float64 inputs). Log-probabilities are negative, as verl's are.
    Raises `ValueError` naming hidden, weight, labels, temperature or reduction; with a process
    group on every rank, also where the argument of another rank is wrong.

    Example: logits [0, 0] and label 1 give ([-0.693], [0.693]).
    """
    reduction = (reduction or "none").lower()
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r}: expected one of none, sum, mean")
    heat = 1.0 if temperature is None else temperature
    part = _part(hidden, weight, labels, heat, dist_process_group)
    hidden_AD, action_A = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    if part is None:
        logprob_A, entropy_A = linear_logprob(hidden_AD, weight, action_A, temperature=heat)
    else:
        logprob_A, entropy_A = vocabulary_parallel_logprob(
            hidden_AD, weight, action_A, part=part, temperature=heat
        )
    if reduction == "none":
        return logprob_A, entropy_A
    return (logprob_A.sum() if reduction == "sum" else logprob_A.mean()), entropy_A


def _part(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> VocabularySlice | None:
    """This rank's slice of the head, or None without a group. `ValueError` for wrong arguments of
    any rank on every rank: one that went on alone would wait for the others for ever."""
    problem, mine = None, [-1, -1]
    try:
        _check_verl(hidden, weight, labels, temperature)
        mine = [weight.shape[0], int(labels.max()) if labels.numel() else -1]
    except ValueError as error:
        problem = error
    if group is not None:
        device = weight.device if isinstance(weight, Tensor) else "cpu"
        numbers = gather_numbers(mine, group, device)
        refused = [rank for rank, (rows, _) in enumerate(numbers) if rows < 0]
        if refused and problem is None:
            problem = ValueError(
                f"hidden, weight, labels: expected correct arguments on all ranks, rank "
                f"{refused[0]} refused its own"
            )
    else:
        numbers = [mine]
    if problem is not None:
        raise problem
    stops = tuple(accumulate(rows for rows, _ in numbers))
    largest = max(label for _, label in numbers)
    if largest >= stops[-1]:
        raise ValueError(f"labels: expected entries in [0, {stops[-1]}), got {largest}")
    return None if group is None else VocabularySlice(stops, dist.get_rank(group), group)


def _check_verl(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> None:
    for name, value in {"hidden": hidden, "weight": weight, "labels": labels}.items():
        check_tensor(name, value)
    if not hidden.ndim:
        raise ValueError("hidden: expected shape [..., D], got []")
    check_float("hidden", hidden, (None,) * hidden.ndim, hidden)
    check_float("weight", weight, (None, hidden.shape[-1]), hidden)
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: expected {hidden.dtype} like hidden, got {weight.dtype}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels: expected integers, got {labels.dtype}")
    count = hidden.shape[:-1].numel()
    if labels.numel() != count or labels.device != hidden.device:
        raise ValueError(
            f"labels: expected {count} on {hidden.device} like hidden, got {labels.numel()} on "
            f"{labels.device}"
        )
    if count and int(labels.min()) < 0:
        raise ValueError(f"labels: expected entries >= 0, got {int(labels.min())}")
    check_number("temperature", temperature, 0.0, open_low=True)
