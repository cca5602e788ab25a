"""The policy: an unmodified transformers model, attention over packed trees, and the fused head.

    PackedBatch --> backbone on [1, T] --> hidden states of distinct sources [R, D]
                      |                        |
                      attend(layer, q, k, v)   turn_surrogate(head weight, actions, ...)
                      tree attention           loss, log-probabilities, sums, peaks

The model calls `attend` in every layer (`attention.py`): here a tree, in the sampler a recorder or
a decode cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastturn import activations, body, lora, models
from fastturn.attention import Attend, Backend, TreeAttention
from fastturn.config import Config, ConfigError
from fastturn.kernels import SurrogateOutput
from fastturn.loss import FUSED, Objective, surrogate_loss
from fastturn.pack import PackedBatch
from fastturn.vocabulary import Vocabulary, WholeVocabulary


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection as the model defines it: `logits = cap(scale * (h @ W.T + b))`."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in float32 (float64 for float64 weights), before the temperature."""
        logits_RV = nn.functional.linear(hidden_RD, self.weight_VD)
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        if self.bias_V is not None:
            logits_RV = logits_RV + self.bias_V
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.softcap is not None:
            logits_RV = self.softcap * torch.tanh(logits_RV / self.softcap)
        return logits_RV


class Policy(nn.Module):
    """A causal language model that trains on packed trees and computes its loss inside `forward`.

    `attention`: which implementation attends (`attention.choose`); "reference", to debug, is a
    dense mask and the plain loss.
    The model keeps its class, weights and names; its attention implementation becomes "fastturn"
    and its embedding loses its padding id, because no id is padding here.

    Raises `ConfigError` for models that a packed tree or the fused head would get wrong: recurrent
    layers, dropout, adapted or wrapped heads, changed logits. A ten-token probe compares packed
    with plain logits at construction, so what the checks do not know is refused as well.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto") -> None:
        super().__init__()
        self.model: Any = model
        self.backend = Backend(attention)
        impl = "reference" if attention == "reference" else "auto"
        self.vocabulary: Vocabulary = WholeVocabulary(impl)
        _check_model(model)
        _check_head(model)
        model.set_attn_implementation(models.ATTENTION)
        if model.config._attn_implementation != models.ATTENTION:
            raise ConfigError(
                f"{type(model).__name__} does not take its attention from transformers' "
                f"AttentionInterface; choose a model that does (Qwen3, Qwen2, Llama, Mistral)"
            )
        embedding: Any = model.get_input_embeddings()
        embedding.padding_idx = None
        self._probe()

    @classmethod
    def build(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> Policy:
        """The small model of the run, freshly initialised; see `models.build`."""
        return cls._configured(config, models.build(config, tokenizer))

    @classmethod
    def load(cls, config: Config) -> tuple[Policy, PreTrainedTokenizerBase]:
        """The model and tokenizer of `config.model.path`; see `models.load`."""
        model, tokenizer = models.load(config)
        return cls._configured(config, model), tokenizer

    @classmethod
    def _configured(cls, config: Config, model: PreTrainedModel) -> Policy:
        if config.model.lora_rank:
            lora.adapt(model, models.blocks(model), config)
        policy = cls(model, config.attention)
        body.prepare(policy.model, config.model.kernels)
        activations.keep(policy.model, config.model.gradient_checkpointing)
        return policy

    @property
    def device(self) -> torch.device:
        return self.head().weight_VD.device

    @property
    def max_context(self) -> int:
        """Most tokens the model reads: its own limit, or unlimited when it states none."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return int(limit) if limit else 2**31 - 1

    def forward(
        self,
        batch: PackedBatch,
        objective: Objective,
        reference_A: torch.Tensor | None = None,
    ) -> SurrogateOutput:
        """The loss of one packed batch; `loss` carries the graph. The clipped surrogate is computed
        inside the head, the others from log-probabilities (`loss.py`).

        `reference_A` float [A]: log-probabilities under the frozen reference, needed when
        `objective.kl_coef > 0`. An empty batch gives loss 0 with zero gradients.
        """
        if objective.surrogate != FUSED:
            scores = self._logprobs(batch, objective.temperature)
            return surrogate_loss(*scores, batch, objective, reference_A)
        head = self.head()
        hidden_RD, weight_VD, row_A = self._rows(batch, head.weight_VD)
        return self.vocabulary.surrogate(
            hidden_RD,
            weight_VD,
            batch.action_A,
            row_A=row_A,
            behavior_A=None if objective.on_policy else batch.behavior_A,
            advantage_A=batch.advantage_A,
            weight_A=batch.weight_A,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            temperature=objective.temperature / head.scale,
            kl_coef=objective.kl_coef,
            reference_A=reference_A,
            bias_V=head.bias_V,
            softcap=head.softcap,
        )

    @torch.no_grad()
    def score(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        """Log-probability [A] of every action at `temperature`, without a graph."""
        return self._logprobs(batch, temperature)[0]

    def _logprobs(
        self, batch: PackedBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [A] of every action, with a graph."""
        head = self.head()
        hidden_RD, weight_VD, row_A = self._rows(batch, head.weight_VD)
        return self.vocabulary.logprob(
            hidden_RD,
            weight_VD,
            batch.action_A,
            row_A=row_A,
            temperature=temperature / head.scale,
            bias_V=head.bias_V,
            softcap=head.softcap,
        )

    def hidden(
        self, token_T: torch.Tensor, position_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states [T, D] of tokens at positions, with the given attention."""
        return self._backbone(position_T, attend, input_ids=token_T.unsqueeze(0))

    def head(self) -> Head:
        """The output projection with the tensors that the model holds at this moment."""
        linear, config = self.model.get_output_embeddings(), self.model.config
        return Head(linear.weight, linear.bias, *_logit_transform(config))

    def _backbone(
        self, position_T: torch.Tensor, attend: Attend, **inputs: torch.Tensor
    ) -> torch.Tensor:
        out = self.model.base_model(
            position_ids=position_T.unsqueeze(0), use_cache=False, attend=attend, **inputs
        )
        hidden_TD: torch.Tensor = out.last_hidden_state.squeeze(0)
        return hidden_TD

    def _rows(
        self, batch: PackedBatch, weight_VD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states of the distinct source tokens [R, D], the head's weight as the loss is to
        read it, and the row of every action [A]."""
        row_T, row_A = torch.unique_consecutive(batch.source_A, return_inverse=True)
        token_T, position_T, end_T = batch.token_T, batch.position_T, batch.end_T
        if not len(token_T):
            # One unread token keeps every parameter in the graph: a process without work must
            # still take part in collectives.
            token_T, position_T = (x.new_zeros(1) for x in (token_T, position_T))
            end_T = position_T + 1
        attend = TreeAttention(end_T, position_T, self.backend, batch.plans)
        if is_plain_embedding(self.model.get_input_embeddings(), weight_VD):
            embedded_TD, held_VD = self.vocabulary.tied(weight_VD, token_T)
            inputs = {"inputs_embeds": embedded_TD.unsqueeze(0)}
        else:
            held_VD = self.vocabulary.held(weight_VD)
            inputs = {"input_ids": token_T.unsqueeze(0)}
        hidden_TD = self._backbone(position_T, attend, **inputs)
        return hidden_TD.index_select(0, row_T), held_VD, row_A

    @torch.no_grad()
    def _probe(self) -> None:
        """Two siblings on one context, packed, against one of them alone through the whole model.

        Catches what no list of model types can: layers that mix tokens without attention, logits
        changed after the projection, arguments that do not reach the attention.
        """
        head = self.head()
        if head.weight_VD.is_meta:
            return
        device, size = head.weight_VD.device, len(head.weight_VD)
        tokens = [(7 * i + 3) % size for i in range(10)]  # context 0-3, siblings 4-6 and 7-9
        positions, ends = [0, 1, 2, 3, 4, 5, 6, 4, 5, 6], [10] * 4 + [7] * 3 + [10] * 3
        packed_T, position_T, end_T = (
            torch.tensor(x, device=device) for x in (tokens, positions, ends)
        )
        # The model is on trial here, not the implementation, which may need another device.
        backend = Backend("auto")
        packed_TD = self.hidden(packed_T, position_T, TreeAttention(end_T, position_T, backend))
        alone_T = torch.tensor(tokens[:4] + tokens[7:], device=device)
        chain_T = torch.full((7,), 7, device=device)
        depth_T = torch.arange(7, device=device)
        plain = self.model(
            input_ids=alone_T.unsqueeze(0),
            position_ids=depth_T.unsqueeze(0),
            use_cache=False,
            attend=TreeAttention(chain_T, depth_T, backend),
        ).logits[0, 4:]
        error = (head.logits(packed_TD[7:]) - plain).abs().max()
        bound = 64 * torch.finfo(plain.dtype).eps ** 0.75 * plain.abs().max().clamp(min=1e-3)
        if not error <= bound:
            raise ConfigError(
                f"{type(self.model).__name__}: packed logits differ from plain ones by "
                f"{error:.2g} (bound {bound:.2g}); the model mixes tokens outside attention or "
                f"changes its logits in a way that is not known here; choose another model"
            )


@dataclass(frozen=True, slots=True)
class WithoutAdapter:
    """Scores as the model did before it was adapted."""

    policy: Policy

    def score(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        """See `Policy.score`."""
        with lora.switched_off(self.policy.model):
            return self.policy.score(batch, temperature)


def is_plain_embedding(module: nn.Module, weight_VD: torch.Tensor) -> bool:
    """Whether the module does no more than look up rows of this weight."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Embedding and module.weight is weight_VD and not hooked


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) that the model applies to `h @ W.T`."""
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None and scale != 1.0:
        raise ConfigError(
            f"{config.model_type}: both a logit scale ({scale:g}) and a softcap ({softcap:g}); "
            f"choose a model with at most one of them"
        )
    return float(scale), None if softcap is None else float(softcap)


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    models.check_layers(model.config, name)
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{name} carries a recurrent state between tokens, which packed siblings would share; "
            f"choose a model with plain attention (Qwen3, Qwen2, Llama, Mistral)"
        )
    for part, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        rate = rate or getattr(module, "attention_dropout", 0.0) or 0.0
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{name}: {part} has dropout {rate:g}; the trained policy would not be the sampled "
                f"one; set it to 0 in the model's configuration before loading"
            )


def _check_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__}: the head is a {type(head).__name__}, expected a plain Linear "
            f"(the fused loss reads its weight directly and would skip an adapter or a quantised "
            f"form); leave the head out of the adapter's target modules"
        )
    _logit_transform(model.config)
