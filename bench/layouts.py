"""One group of siblings as an update reads it: padded, in separate rows, grouped, packed.

    padded           [S, C + longest], right padding and its mask: what `generate`-style trainers do
    rows             [1, Σ (C + n)], no padding: attention row by row
    prefix-grouper   [1, C + Σ n], PrefixGrouper's two attention calls a layer
    packed           [1, C + Σ (n - 1)], tree attention

All run one model with random weights, score the same actions with the same loss kernel on the rows
of the actions alone, and return the loss and the gradients of `WATCHED`. Only what precedes the
output layer differs. Ids, masks and plans that all layers share are made once a repetition.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from fastturn.kernels import turn_surrogate
from fastturn.loss import Objective
from fastturn.models import ATTENTION
from fastturn.pack import pack
from fastturn.policy import Policy
from fastturn.types import Boundary, Completion, Credit, Ending, Ids, Stop, Trajectory, Turn

from .cases import ModelShape, StepCase
from .measure import Provider

CLIP = 100.0  # no action is clipped: none leaves before the backward pass
PEER, PEER_PACKAGE = "prefix-grouper", "prefix_grouper"
LAYOUTS = ("padded", "rows", PEER, "packed")
UNIFORM = -11.0  # behaviour log-probability, about that of random weights
# The embedding is the output layer too; keys and values of the first layer get the gradients that
# siblings send to their context.
WATCHED = ("embed_tokens", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "down_proj")


def random_model(shape: ModelShape, layers: int) -> LlamaForCausalLM:
    """Llama's architecture in this shape with random weights, attention "sdpa"."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.keys,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )


def group(case: StepCase) -> list[Credit]:
    """Siblings with random ids, distinct from the first token on, advantages of both signs."""
    rng, vocab = np.random.default_rng(0), case.shape.vocab
    context_T = rng.integers(0, vocab, case.context, dtype=np.int32)
    first_N = rng.permutation(vocab)[: case.siblings].astype(np.int32)
    credits = []
    for number, length in enumerate(case.lengths):
        action_A = rng.integers(0, vocab, length, dtype=np.int32)
        action_A[0] = first_N[number]
        logprob_A = np.full(length, UNIFORM, np.float32)
        done = Completion(action_A=action_A, logprob_A=logprob_A, version=0, stop=Stop.STOP)
        turn = Turn(Boundary(0, context_T), done)
        trajectory = Trajectory("task", 0, (turn,), Ending.FINISHED)
        advantage_U = np.array([number - (case.siblings - 1) / 2 or 1.0])
        weight_U = np.array([1 / (case.siblings * length)])
        credits.append(Credit(trajectory, advantage_U, weight_U))
    return credits


class Update:
    """The model, the group as tensors on `device`, and one provider a layout.

    context_T int64 [C]; action_SA the actions of each sibling; action_A, advantage_A, weight_A all
    actions in the order of siblings.
    """

    def __init__(
        self, case: StepCase, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = torch.device(device)
        self.model: Any = random_model(case.shape, case.layers).to(self.device, dtype)
        self.policy = Policy(self.model)
        self.credits = group(case)
        turns = [credit.trajectory.turns[0] for credit in self.credits]
        self.context_T = self._ids(turns[0].boundary.context_T)
        self.action_SA = [self._ids(turn.completion.action_A) for turn in turns]
        self.lengths = list(case.lengths)
        self.action_A = torch.cat(self.action_SA)
        length_S = torch.tensor(self.lengths, device=self.device)

        def by_action(of: Callable[[Credit], float]) -> Tensor:
            each_S = torch.tensor([of(credit) for credit in self.credits], device=self.device)
            return each_S.repeat_interleave(length_S)

        self.behavior_A = torch.full_like(self.action_A, UNIFORM, dtype=torch.float32)
        self.advantage_A = by_action(lambda credit: float(credit.advantage_U[0]))
        self.weight_A = by_action(lambda credit: float(credit.weight_U[0]))
        parameters = dict(self.model.named_parameters())
        self.watched = [
            next(p for name, p in reversed(parameters.items()) if part in name) for part in WATCHED
        ]

    def _ids(self, id_T: Ids) -> Tensor:
        return torch.from_numpy(id_T.astype(np.int64)).to(self.device)

    def providers(self) -> dict[str, Provider]:
        """By layout; without the peer's package the peer is named on the terminal and left out."""
        found = {
            "padded": self._step(self._padded, "sdpa"),
            "rows": self._step(self._rows, "rows"),
            PEER: self._step(self._grouped, PEER),
            "packed": self._step(self._packed, ATTENTION),
        }
        if importlib.util.find_spec(PEER_PACKAGE) is None:
            print(f"{PEER}: left out, {PEER_PACKAGE} is not installed")
            del found[PEER]
        return found

    def _step(self, loss: Callable[[], Tensor], attention: str) -> Provider:
        def step() -> Sequence[Tensor]:
            self.model.set_attn_implementation(attention)
            self.model.zero_grad()
            with self.device:  # where new tensors are made
                value = loss()
            value.backward()
            return [value.detach(), *(p.grad for p in self.watched)]

        return step

    def _loss(self, hidden_AD: Tensor) -> Tensor:
        """Of the rows that predict each action, in the order of siblings."""
        return turn_surrogate(
            hidden_AD,
            self.model.get_output_embeddings().weight,
            self.action_A,
            behavior_A=self.behavior_A,
            advantage_A=self.advantage_A,
            weight_A=self.weight_A,
            clip_low=CLIP,
            clip_high=CLIP,
        ).loss

    def _hidden(self, **inputs: Any) -> Tensor:
        hidden_BTD: Tensor = self.model.base_model(use_cache=False, **inputs).last_hidden_state
        return hidden_BTD

    def _padded(self) -> Tensor:
        context_ST = self.context_T.expand(len(self.action_SA), -1)
        completion_ST = nn.utils.rnn.pad_sequence(self.action_SA, batch_first=True)
        real_ST = self._real(completion_ST)
        hidden_STD = self._hidden(
            input_ids=torch.cat([context_ST, completion_ST], 1),
            attention_mask=torch.cat([torch.ones_like(context_ST), real_ST], 1),
        )
        return self._loss(hidden_STD[:, len(self.context_T) - 1 : -1][real_ST.bool()])

    def _real(self, padded_ST: Tensor) -> Tensor:
        """1 where a token is an action, 0 where it is padding: int64 like an attention mask."""
        length_S1 = torch.tensor(self.lengths).unsqueeze(1)
        return (torch.arange(padded_ST.shape[1]) < length_S1).long()

    def _rows(self) -> Tensor:
        context = len(self.context_T)
        row_ST = [torch.cat([self.context_T, action_A[:-1]]) for action_A in self.action_SA]
        position_ST = [torch.arange(len(row_T)) for row_T in row_ST]
        hidden_1TD = self._hidden(
            input_ids=torch.cat(row_ST).unsqueeze(0),
            position_ids=torch.cat(position_ST).unsqueeze(0),
            rows=[len(row_T) for row_T in row_ST],
        )
        scored_T = torch.cat(position_ST) >= context - 1
        return self._loss(hidden_1TD[0, scored_T])

    def _grouped(self) -> Tensor:
        from prefix_grouper import PrefixGrouper

        context = len(self.context_T)
        grouper = PrefixGrouper([[context, *self.lengths]], padding_mode="right")
        completion_ST = nn.utils.rnn.pad_sequence(self.action_SA, batch_first=True)
        prefix_1T, real_ST = self.context_T.unsqueeze(0), self._real(completion_ST)
        position_T = torch.cat(
            [torch.arange(context), *(context + torch.arange(n) for n in self.lengths)]
        )
        hidden_1TD = self._hidden(
            input_ids=grouper.concat_input(
                prefix_1T, torch.ones_like(prefix_1T), completion_ST, real_ST
            ),
            position_ids=position_T.unsqueeze(0),
            grouper=grouper,
            suffix_mask=_after_context(context, real_ST, self.model.dtype),
        )
        _, _, suffix_STD, mask_ST = grouper.split_output(hidden_1TD, include_prefix_last=1)
        return self._loss(suffix_STD[:, :-1][mask_ST[:, 1:]])

    def _packed(self) -> Tensor:
        (batch,) = pack([self.credits], 1 << 30, self.device)
        loss: Tensor = self.policy(batch, Objective(clip_low=CLIP, clip_high=CLIP)).loss
        return loss


def _after_context(context: int, real_ST: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [S, 1, L, C + L]: the whole context, and causally the sibling's own tokens."""
    siblings, longest = real_ST.shape
    seen_LT = torch.ones(longest, context + longest, dtype=torch.bool).tril(context)
    mask_SLT = torch.zeros(siblings, 1, longest, context + longest, dtype=dtype)
    return mask_SLT.masked_fill_(~seen_LT, -torch.inf)


def _rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: list[int],
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each of the rows that lie one behind the other on the token axis."""
    each = zip(*(x.split(rows, dim=2) for x in (query, key, value)), strict=True)
    out = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in each
    ]
    return torch.cat([x.transpose(1, 2) for x in out], 1), None


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    grouper: Any,
    suffix_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PrefixGrouper around torch's attention. It passes masks of padding only, and flash attention
    aligns causality to the last key; here the context is causal, and siblings get a full mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        context = q.shape[2] == k.shape[2]
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if context else suffix_mask,
            is_causal=context,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    return grouper.forward(attend, query, key, value), None


AttentionInterface.register("rows", _rows_attention)
AttentionInterface.register(PEER, _grouped_attention)
