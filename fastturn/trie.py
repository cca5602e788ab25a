"""The stack machine: sequences of ids that begin alike, written once.

    pop to the longest prefix that the stack and the next sequence share, push the rest

Training packs scored turns with it, the in-process sampler the contexts that it prefills. What a
token is worth remembering for is one integer: the packed index at which it was popped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fastturn.types import Ids

Indices = NDArray[np.int64]


def shared_prefix(left_T: Ids, right_T: Ids) -> int:
    """Length of the longest common prefix. Example: [1, 2, 3] and [1, 2, 4, 5] give 2."""
    least = min(len(left_T), len(right_T))
    differs_T = left_T[:least] != right_T[:least]
    first = int(differs_T.argmax()) if least else 0
    return first if least and differs_T[first] else least


def trie(sequences: Iterable[Ids]) -> tuple[Ids, Indices, Indices, list[Indices]]:
    """Sequences as one packed tree: token_T, position_T, end_T and, for every sequence, the packed
    indices of its tokens. `visible(q, k) = k <= q < end_T[k]`.

    Sequences with a common prefix must be neighbours (any lexicographic order does); others are
    right too, but share less. No sequences give empty arrays.

    Example: [1, 2, 3] and [1, 2, 4] pack into tokens 1, 2, 3, 4 with positions 0, 1, 2, 2 and ends
    4, 4, 3, 4; the second sequence's indices are 0, 1, 3.
    """
    stack_T, index_T = np.empty(0, np.int32), np.empty(0, np.int64)
    tokens, positions, indices = [stack_T], [index_T], []
    closed: list[tuple[Indices, int]] = []  # (packed indices, the index at which they ended)
    size = 0
    for sequence_T in sequences:
        kept, length = shared_prefix(stack_T, sequence_T), len(sequence_T)
        closed.append((index_T[kept:], size))
        tokens.append(sequence_T[kept:])
        positions.append(np.arange(kept, length))
        index_T = np.concatenate([index_T[:kept], np.arange(size, size + length - kept)])
        indices.append(index_T)
        stack_T, size = sequence_T, size + length - kept
    closed.append((index_T, size))
    end_T = np.empty(size, np.int64)
    for popped, end in closed:
        end_T[popped] = end
    return np.concatenate(tokens), np.concatenate(positions), end_T, indices
