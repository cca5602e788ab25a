"""The three ways the sampler attends; each is an `Attend` for the registered attention.

trie prefill    contexts packed as one tree, each distinct prefix once      RecordingTree
suffix prefill  new tokens of contexts whose beginning is in the store      SuffixAttention
decode          one token a row; siblings share their context's keys        DecodeAttention
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fastturn.attention import Backend, Scores, TreeAttention
from fastturn.sampler.store import PrefixStore, Slots

_REPACK_BELOW = 0.7  # live share of a block's places under which it is rebuilt
# Padded place-key pairs that a block may waste before it is cut in two: about what one more block
# costs in calls.
_WASTED_PAIRS = 4096


class RecordingTree(TreeAttention):
    """Tree attention that also writes keys and values into the store, from slot `start` on."""

    def __init__(
        self, end_T: torch.Tensor, position_T: torch.Tensor, store: PrefixStore, backend: Backend
    ) -> None:
        super().__init__(end_T, position_T, backend)
        self.store, self.start = store, store.reserve(len(end_T))

    def __call__(
        self,
        layer: int,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        self.store.write(layer, self.start, k_1KTE[0].transpose(0, 1), v_1KTE[0].transpose(0, 1))
        return super().__call__(layer, q_1HTE, k_1KTE, v_1KTE, scores)


class SuffixAttention:
    """The last tokens of several contexts, each over its whole context, most of it from the store.

    `slots_G`: all slots of each context; `known_G`: how many of them were there before. The new
    tokens of all contexts lie one after the other on the token axis, in the order of their slots
    from `start` on.
    """

    def __init__(
        self,
        slots_G: Sequence[Slots],
        known_G: NDArray[np.int64],
        start: int,
        store: PrefixStore,
        device: torch.device,
    ) -> None:
        self.store, self.start = store, start
        new_G = np.array([len(slots) for slots in slots_G]) - known_G
        self.slot_GT = padded(slots_G, device)
        group_N = np.repeat(np.arange(len(new_G)), new_G)
        place_N = np.concatenate([np.arange(n) for n in new_G])
        self.shape = (len(new_G), int(new_G.max()))
        self.flat_N = torch.from_numpy(group_N * self.shape[1] + place_N).to(device)
        # Places past a context's end read real slots and are thrown away.
        self.position_GS1 = torch.from_numpy(known_G[:, None, None]).to(device) + torch.arange(
            self.shape[1], device=device
        ).view(1, -1, 1)

    def __call__(
        self,
        layer: int,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        self.store.write(layer, self.start, k_1KTE[0].transpose(0, 1), v_1KTE[0].transpose(0, 1))
        k_GTKE, v_GTKE = self.store.read(layer, self.slot_GT)
        q_NHE = q_1HTE[0].transpose(0, 1)
        repeat = q_NHE.shape[1] // k_GTKE.shape[2]
        q_GSHE = q_NHE.new_zeros(self.shape[0] * self.shape[1], *q_NHE.shape[1:])
        q_GSHE[self.flat_N] = q_NHE
        out_GHSE = _attention(
            q_GSHE.view(*self.shape, *q_NHE.shape[1:]).transpose(1, 2),
            k_GTKE.repeat_interleave(repeat, 2).transpose(1, 2),
            v_GTKE.repeat_interleave(repeat, 2).transpose(1, 2),
            self._visible(scores.window),
            scores,
        )
        out_NHE = out_GHSE.transpose(1, 2).reshape(-1, *q_NHE.shape[1:])[self.flat_N]
        return out_NHE.unsqueeze(0)

    def _visible(self, window: int | None) -> torch.Tensor:
        key_T = torch.arange(self.slot_GT.shape[1], device=self.slot_GT.device)
        visible_GST = key_T <= self.position_GS1
        if window is not None:
            visible_GST &= key_T > self.position_GS1 - window
        return visible_GST.unsqueeze(1)


@dataclass(slots=True, eq=False)
class LayerCache:
    """One layer of a block: context keys (transposed for the score product) and values, stored once
    a group, and what each place has sampled so far."""

    k_GKET: torch.Tensor
    v_GKTE: torch.Tensor
    k_GKNSE: torch.Tensor
    v_GKNSE: torch.Tensor


@dataclass(slots=True, eq=False)
class Block:
    """Groups of similar context length: `groups * width` places, of which `place_R` are live.

    `slot_GT`: context slots in the store; `length_G`: context lengths. `row_R`: the sampler's row
    in each live place. `seat_P`: the sampler's row that each place was given (-1: none), live or
    finished, so that finished rows can be stored.
    """

    slot_GT: torch.Tensor
    length_G: torch.Tensor
    padded: bool
    width: int
    place_R: NDArray[np.int64]
    row_R: NDArray[np.int64]
    seat_P: NDArray[np.int64]
    layers: list[LayerCache] = field(default_factory=list)
    index_R: torch.Tensor | None = None  # place_R on the device; None: every place is live

    @property
    def groups(self) -> int:
        return len(self.length_G)

    def seat(self, place_R: NDArray[np.int64], row_R: NDArray[np.int64]) -> None:
        """These rows in these places are live from now on."""
        self.place_R, self.row_R = place_R, row_R
        full = len(place_R) == self.groups * self.width
        self.index_R = None if full else torch.from_numpy(place_R).to(self.length_G.device)


class DecodeAttention:
    """One new token a row. A group's rows attend to its context as one matrix product; each also
    has its own sampled past; one softmax spans both.

    Rows lie on the token axis block by block. `step` counts the tokens sampled before this one.
    """

    def __init__(self, blocks: list[Block], store: PrefixStore) -> None:
        self.blocks, self.store, self.step = blocks, store, 0
        self._bias: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def advance(self) -> None:
        """The next forward pass is one token further."""
        self.step += 1
        self._bias = {key: bias for key, bias in self._bias.items() if key[1] is None}

    @property
    def row_R(self) -> NDArray[np.int64]:
        """The sampler's rows in the order of the token axis."""
        return np.concatenate([block.row_R for block in self.blocks])

    def keep(self, live: NDArray[np.bool_]) -> None:
        """Drop finished rows; `live` is indexed by the sampler's row numbers."""
        for block in self.blocks:
            kept_R = live[block.row_R]
            if not kept_R.all():
                block.seat(block.place_R[kept_R], block.row_R[kept_R])

    def sparse(self) -> list[Block]:
        """Blocks worth rebuilding: their live rows fit into clearly fewer places."""
        found = []
        for block in self.blocks:
            count_G = np.bincount(block.place_R // block.width, minlength=1)
            needed = np.count_nonzero(count_G) * count_G.max()
            if needed < _REPACK_BELOW * block.groups * block.width:
                found.append(block)
        return found

    def repack(self, block: Block) -> None:
        """Rebuild one block around its live rows: fewer groups, fewer places a group. What its
        finished rows had sampled is lost, so `store_finished` comes first."""
        self._bias.clear()
        if not len(block.place_R):
            self.blocks.remove(block)
            return
        group_R = block.place_R // block.width
        kept_G, group_R, count_G = np.unique(group_R, return_inverse=True, return_counts=True)
        width = int(count_G.max())
        rank_R = np.arange(len(group_R)) - np.repeat(np.cumsum(count_G) - count_G, count_G)
        place_R = group_R * width + rank_R
        source_P = np.repeat(kept_G * block.width, width)  # unused places copy any other one
        source_P[place_R] = block.place_R
        _shrink(block, kept_G, source_P, width)
        block.seat_P = np.full(len(source_P), -1)
        block.seat_P[place_R] = block.row_R
        block.seat(place_R, block.row_R)

    def store_finished(
        self, block: Block, live: NDArray[np.bool_], fed: NDArray[np.int64]
    ) -> dict[int, Slots]:
        """Copy the past of a block's finished rows into the store: sampler's row -> its slots.

        `fed[row]`: sampled tokens that the model has read. Each row is stored once.
        """
        place_F = np.flatnonzero((block.seat_P >= 0) & ~live[block.seat_P])
        row_F = block.seat_P[place_F]
        block.seat_P[place_F] = -1
        length_F = fed[row_F]
        total = int(length_F.sum())
        start = self.store.reserve(total)
        ends_F = np.cumsum(length_F)
        device = block.length_G.device
        place_N = torch.from_numpy(np.repeat(place_F, length_F)).to(device)
        step_N = np.arange(total) - np.repeat(ends_F - length_F, length_F)
        step = torch.from_numpy(step_N).to(device)
        at = (place_N // block.width, slice(None), place_N % block.width, step)
        for layer, cache in enumerate(block.layers):
            self.store.write(layer, start, cache.k_GKNSE[at], cache.v_GKNSE[at])
        slots_F = np.split(np.arange(start, start + total), ends_F[:-1])
        return dict(zip(row_F.tolist(), slots_F, strict=True)) if len(row_F) else {}

    def __call__(
        self,
        layer: int,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        q_RHE, k_RKE, v_RKE = (x[0].transpose(0, 1) for x in (q_1HTE, k_1KTE, v_1KTE))
        outs, first = [], 0
        for index, block in enumerate(self.blocks):
            rows = slice(first, first + len(block.row_R))
            first = rows.stop
            if layer == len(block.layers):
                block.layers.append(self._open(layer, block, k_RKE))
            self._push(block.layers[layer], block, k_RKE[rows], v_RKE[rows])
            bias = self._context_bias(index, scores.window)
            outs.append(self._attend(block.layers[layer], block, q_RHE[rows], scores, bias))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)

    def _open(self, layer: int, block: Block, k_RKE: torch.Tensor) -> LayerCache:
        """Copy a block's contexts of one layer from the store, in product order."""
        k_GTKE, v_GTKE = self.store.read(layer, block.slot_GT)
        groups, _, heads, _ = k_GTKE.shape
        own = (groups, heads, block.width, 0)
        return LayerCache(
            k_GKET=k_GTKE.permute(0, 2, 3, 1).contiguous(),
            v_GKTE=v_GTKE.transpose(1, 2).contiguous(),
            k_GKNSE=k_RKE.new_zeros(*own, k_GTKE.shape[-1]),
            v_GKNSE=k_RKE.new_zeros(*own, v_GTKE.shape[-1]),
        )

    def _push(
        self, cache: LayerCache, block: Block, k_RKE: torch.Tensor, v_RKE: torch.Tensor
    ) -> None:
        """Append each row's new key and value to its own past."""
        if cache.k_GKNSE.shape[3] <= self.step:
            cache.k_GKNSE, cache.v_GKNSE = _longer(cache.k_GKNSE), _longer(cache.v_GKNSE)
        for past_GKNSE, new_RKE in ((cache.k_GKNSE, k_RKE), (cache.v_GKNSE, v_RKE)):
            target_GNKE = past_GKNSE[:, :, :, self.step].transpose(1, 2)
            if block.index_R is None:
                target_GNKE.copy_(new_RKE.reshape(target_GNKE.shape))
            else:
                group_R, place_R = block.index_R // block.width, block.index_R % block.width
                target_GNKE[group_R, place_R] = new_RKE

    def _attend(
        self,
        cache: LayerCache,
        block: Block,
        q_RHE: torch.Tensor,
        scores: Scores,
        bias_G11T: torch.Tensor | None,
    ) -> torch.Tensor:
        groups, heads, _, keys = cache.k_GKET.shape
        query_heads, width = q_RHE.shape[1:]
        first = 0 if scores.window is None else max(0, self.step + 1 - scores.window)
        own = slice(first, self.step + 1)
        k_GKNsE, v_GKNsE = cache.k_GKNSE[:, :, :, own], cache.v_GKNSE[:, :, :, own]
        if block.index_R is None:
            q_PHE = q_RHE
        else:
            q_PHE = q_RHE.new_zeros(groups * block.width, query_heads, width)
            q_PHE[block.index_R] = q_RHE
        # N places a group, J query heads a key head: the N * J queries of a group and key head are
        # the rows of one product with the context's keys.
        split = (groups, block.width, heads, query_heads // heads, width)
        q_GKNJE = q_PHE.reshape(split).transpose(1, 2)
        q_GKMJE = q_GKNJE.reshape(groups, heads, -1, width)
        score_GKNJT = (q_GKMJE @ cache.k_GKET).view(*q_GKNJE.shape[:-1], keys)
        past_GKNJS = q_GKNJE @ k_GKNsE.transpose(-1, -2)
        score = torch.cat([score_GKNJT, past_GKNJS], -1)
        score = score.to(torch.promote_types(score.dtype, torch.float32)).mul_(scores.scale(width))
        if scores.softcap is not None:
            score = score.div_(scores.softcap).tanh_().mul_(scores.softcap)
        if bias_G11T is not None:
            score[..., :keys] += bias_G11T
        weight = score.softmax(-1).to(q_RHE.dtype)
        context_GKMT = weight[..., :keys].reshape(groups, heads, -1, keys)
        out_GKNJE = (context_GKMT @ cache.v_GKTE).view(*q_GKNJE.shape[:-1], -1)
        out_GKNJE = out_GKNJE + weight[..., keys:] @ v_GKNsE
        out_PHE = out_GKNJE.transpose(1, 2).reshape(groups * block.width, query_heads, -1)
        return out_PHE if block.index_R is None else out_PHE[block.index_R]

    def _context_bias(self, index: int, window: int | None) -> torch.Tensor | None:
        """0 where a row sees a context key, -inf where not; None when all see all. [G, 1, 1, 1, T].

        Context key j has position j, the row's own token position `length + step`.
        """
        if (index, window) not in self._bias:
            block = self.blocks[index]
            bias = None
            if block.padded or window is not None:
                length_G1 = block.length_G.unsqueeze(1)
                key_T = torch.arange(block.slot_GT.shape[1], device=length_G1.device)
                hidden_GT = key_T >= length_G1
                if window is not None:
                    hidden_GT = hidden_GT | (key_T <= length_G1 + (self.step - window))
                zeros_GT = torch.zeros(hidden_GT.shape, device=length_G1.device)
                bias = zeros_GT.masked_fill_(hidden_GT, -torch.inf)[:, None, None, None]
            self._bias[index, window] = bias
        return self._bias[index, window]


def _attention(
    q_GHSE: torch.Tensor,
    k_GHTE: torch.Tensor,
    v_GHTE: torch.Tensor,
    visible_G1ST: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Masked attention; torch's own has no cap on the scores."""
    scale = scores.scale(q_GHSE.shape[-1])
    if scores.softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q_GHSE, k_GHTE, v_GHTE, attn_mask=visible_G1ST, scale=scale
        )
    score = q_GHSE @ k_GHTE.transpose(-1, -2)
    score = score.to(torch.promote_types(score.dtype, torch.float32)).mul_(scale / scores.softcap)
    score = score.tanh_().mul_(scores.softcap).masked_fill_(~visible_G1ST, -torch.inf)
    return score.softmax(-1).to(q_GHSE.dtype) @ v_GHTE


def blocks(
    group_R: NDArray[np.int64],
    live_R: NDArray[np.bool_],
    slots_G: Sequence[Slots],
    device: torch.device,
) -> list[Block]:
    """Live rows in blocks of groups (contexts) with similar lengths."""
    row_R = np.flatnonzero(live_R)
    if not len(row_R):
        return []
    live_G, count_G = np.unique(group_R[row_R], return_counts=True)
    row_R = row_R[np.argsort(group_R[row_R], kind="stable")]
    by_group = np.split(row_R, np.cumsum(count_G)[:-1])
    length_G = np.array([len(slots_G[group]) for group in live_G])
    order = np.argsort(length_G, kind="stable")
    parts: list[list[int]] = []
    for at in order.tolist():
        if not parts or _waste([*parts[-1], at], length_G, count_G) > _WASTED_PAIRS:
            parts.append([])
        parts[-1].append(at)
    return [
        _block([slots_G[live_G[at]] for at in part], [by_group[at] for at in part], device)
        for part in parts
    ]


def _waste(part: Sequence[int], length_G: NDArray[np.int64], count_G: NDArray[np.int64]) -> int:
    """Place-key pairs that a block of these groups computes in vain."""
    lengths, counts = length_G[part], count_G[part]
    return int(len(part) * lengths.max() * counts.max() - (lengths * counts).sum())


def _block(
    slots_G: Sequence[Slots], rows_G: Sequence[NDArray[np.int64]], device: torch.device
) -> Block:
    lengths = np.array([len(slots) for slots in slots_G])
    width = max(map(len, rows_G))
    place_R = np.concatenate([g * width + np.arange(len(r)) for g, r in enumerate(rows_G)])
    row_R = np.concatenate(rows_G)
    seat_P = np.full(len(rows_G) * width, -1)
    seat_P[place_R] = row_R
    block = Block(
        slot_GT=padded(slots_G, device),
        length_G=torch.from_numpy(lengths).to(device),
        padded=bool((lengths != lengths.max()).any()),
        width=width,
        place_R=place_R,
        row_R=row_R,
        seat_P=seat_P,
    )
    block.seat(place_R, row_R)
    return block


def padded(slots_G: Sequence[Slots], device: torch.device) -> torch.Tensor:
    """Slots of every group, cut short ones filled with slot 0: int64 [G, T]."""
    slot_GT = np.zeros((len(slots_G), max(map(len, slots_G))), np.int64)
    for row, slots in zip(slot_GT, slots_G, strict=True):
        row[: len(slots)] = slots
    return torch.from_numpy(slot_GT).to(device)


def _longer(past_GKNSE: torch.Tensor) -> torch.Tensor:
    """The same past with room for twice as many steps, at least 16."""
    shape = list(past_GKNSE.shape)
    steps = shape[3]
    shape[3] = max(16, 2 * steps)
    longer = past_GKNSE.new_zeros(shape)
    longer[:, :, :, :steps] = past_GKNSE
    return longer


def _shrink(
    block: Block, kept_G: NDArray[np.int64], source_P: NDArray[np.int64], width: int
) -> None:
    """Keep some groups of a block, and in them the places `source_P` (old numbering), in order."""
    device = block.length_G.device
    kept = torch.from_numpy(kept_G).to(device)
    source = torch.from_numpy(source_P).to(device)
    group_P, place_P = source // block.width, source % block.width

    def places(past_GKNSE: torch.Tensor) -> torch.Tensor:
        moved_PKSE = past_GKNSE[group_P, :, place_P]
        return moved_PKSE.unflatten(0, (len(kept), width)).transpose(1, 2).contiguous()

    for cache in block.layers:
        if len(kept) < block.groups:
            cache.k_GKET, cache.v_GKTE = cache.k_GKET[kept], cache.v_GKTE[kept]
        cache.k_GKNSE, cache.v_GKNSE = places(cache.k_GKNSE), places(cache.v_GKNSE)
    block.slot_GT, block.length_G, block.width = block.slot_GT[kept], block.length_G[kept], width
