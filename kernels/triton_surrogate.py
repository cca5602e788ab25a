"""`turn_surrogate` with the Triton epilogue: one launch a chunk between its matrix products.

logits = x · Wᵀ (float32) → `triton_epilogue.surrogate_rows` → dX = dZ · W, dW += dZᵀ · x.
Actions of row r of the call are first[r] : first[r + 1]; see `triton_rows` for the buffer. Extra
memory: one chunk of logits and dW (float32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rows import Chunk, Gradients, Live
from .triton_epilogue import launch, surrogate_rows
from .triton_rows import Products, add_rows, first_actions, float16_gain

if TYPE_CHECKING:
    from .turn_surrogate import Settings, Terms


class TritonPass:
    """One pass over the chunks of one call; results are attributes."""

    def __init__(
        self,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        terms: Terms,
        settings: Settings,
        wants: list[bool],
    ) -> None:
        self.hidden_RD, self.terms, self.settings = hidden_RD.detach(), terms, settings
        self.live = Live.of(terms.label_A, terms.row_A)
        self.first_R = first_actions(self.live)
        self.products = Products(head_VD, bias_V, len(self.live.row_R), wide=wants[2])
        self.gradients = Gradients(hidden_RD, head_VD, bias_V, wants)
        self.wanted = any(wants)
        count = len(terms.label_A)
        self.logprob_A, self.entropy_A, self.loss_A, self._coef_A, self._slope_A = (
            torch.empty(count, device=head_VD.device) for _ in range(5)
        )
        size_A = terms.weight_A.abs() * (terms.advantage_A.abs() + settings.kl_coef)
        self._gain = float16_gain(head_VD.dtype, size_A, self.live, settings.temperature)

    def run(self) -> None:
        for chunk in self.live.chunks(self.products.chunk, self.products.chunk):
            self._chunk(chunk)

    def loss(self) -> Tensor:
        return self.loss_A.sum(dtype=torch.float64).to(torch.float32)

    def _chunk(self, chunk: Chunk) -> None:
        products = self.products
        x_CD = products.hidden(self.hidden_RD, chunk.row_C)
        products.logits(x_CD)
        kept_C = self._launch(chunk)
        if not self.wanted:
            return
        row_N = kept_C.nonzero().squeeze(1)
        if not len(row_N):
            return
        count = len(chunk.row_C)
        dz_NV = products.kept(row_N, count)
        hidden_N = chunk.row_C
        if len(row_N) < count:  # rows without a coefficient leave here
            hidden_N = chunk.row_C[row_N]
            x_CD = products.hidden(self.hidden_RD, hidden_N)
        add_rows(self.gradients, products, hidden_N, dz_NV, x_CD, self._gain)

    def _launch(self, chunk: Chunk) -> Tensor:
        """Counts of non-zero coefficients, by row of the chunk."""
        terms, settings, products = self.terms, self.settings, self.products
        count, z_CV, dz_CV = len(chunk.row_C), products.buffer_CV, products.dz_CV
        kept_C = torch.empty(count, dtype=torch.int32, device=z_CV.device)
        has_reference = terms.reference_A is not None and settings.kl_coef != 0
        any_A = terms.weight_A  # stands for a pointer that is not read
        surrogate_rows[(count,)](
            z_CV,
            dz_CV,
            any_A if products.bias_V is None else products.bias_V,
            terms.label_A,
            self.first_R,
            any_A if terms.behavior_A is None else terms.behavior_A,
            terms.advantage_A,
            terms.weight_A,
            terms.reference_A if has_reference else any_A,
            self.logprob_A,
            self.entropy_A,
            self.loss_A,
            self._coef_A,
            self._slope_A,
            kept_C,
            chunk.start,
            products.vocab,
            z_CV.stride(0),
            dz_CV.stride(0),
            float(settings.temperature),
            1.0 if settings.softcap is None else float(settings.softcap),
            1.0 - settings.clip_low,
            1.0 + settings.clip_high,
            float(settings.kl_coef),
            self._gain,
            HAS_BIAS=products.bias_V is not None,
            HAS_CAP=settings.softcap is not None,
            HAS_BEHAVIOR=terms.behavior_A is not None,
            HAS_REFERENCE=has_reference,
            GRADIENT=self.wanted,
            **launch(products.vocab),
        )
        return kept_C
