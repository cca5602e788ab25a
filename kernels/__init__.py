"""Fused ops of the trainer: output layer with loss, log-probabilities, and tree attention.

They import torch and nothing of the rest of the package. `impl` picks an implementation by name:
"torch" (chunked, exact), "triton" (CUDA), "reference" (`reference.py`, the plain specification) or
"auto".
"""

from .head_gradient import HeadGradient
from .linear_logprob import linear_logprob
from .tree_attention import attention_implementations, tree_attention
from .tree_plan import TreePlan
from .turn_reduce import TurnRatioOutput, turn_ratio_surrogate, turn_reduce
from .turn_surrogate import SurrogateOutput, turn_surrogate
from .vocabulary_parallel import vocabulary_parallel_logprob, vocabulary_parallel_surrogate
from .vocabulary_slice import VocabularySlice

__all__ = [
    "HeadGradient",
    "SurrogateOutput",
    "TreePlan",
    "TurnRatioOutput",
    "VocabularySlice",
    "attention_implementations",
    "linear_logprob",
    "tree_attention",
    "turn_ratio_surrogate",
    "turn_reduce",
    "turn_surrogate",
    "vocabulary_parallel_logprob",
    "vocabulary_parallel_surrogate",
]
