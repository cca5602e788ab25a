"""Fused ops of the trainer: output layer with loss, log-probabilities, and tree attention.

They import torch and nothing of the rest of the package. `impl` picks an implementation by name:
"torch" (chunked, exact), "reference" (`reference.py`, the plain specification) or "auto".
"""

from .linear_logprob import linear_logprob
from .tree_attention import TreePlan, tree_attention
from .turn_surrogate import SurrogateOutput, turn_surrogate

__all__ = ["SurrogateOutput", "TreePlan", "linear_logprob", "tree_attention", "turn_surrogate"]
