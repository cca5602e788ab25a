"""Every algorithm's credit: groups of trajectories -> one advantage and one weight for each turn.

trajectories   one advantage an episode           grpo (GSPO, ARPO), dapo, dr_grpo, rloo, tree_grpo
turns          one for each of its turns          by_turn (SeeUPO), gigpo, steptool, attached
siblings       of one state, their first turn     rtpo, refuel

A credit is a function of groups, the configuration and its own options (keyword arguments). Weights
are final: they hold the paper's whole normalisation (groups, siblings, tokens), from the data and
never from how the data is cut into micro-batches. Turns that cannot move the policy get weight 0
and are never read again.

All but `dapo` are separable: what a group gets depends on the group and on how many there are, so
`credit([group])` with its weights divided by the number of groups is the credit within a stage.
"""

from __future__ import annotations

from fastturn.credit.base import Array, Credits, zero_advantage
from fastturn.credit.siblings import refuel, rtpo
from fastturn.credit.trajectories import dapo, dr_grpo, grpo, rloo, tree_grpo
from fastturn.credit.turns import attached, by_turn, gigpo, steptool

__all__ = [
    "Array",
    "Credits",
    "attached",
    "by_turn",
    "dapo",
    "dr_grpo",
    "gigpo",
    "grpo",
    "refuel",
    "rloo",
    "rtpo",
    "steptool",
    "tree_grpo",
    "zero_advantage",
]
