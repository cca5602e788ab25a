"""The in-process sampler: the policy's own tensors, shared contexts, one small step a token.

    requests -> distinct contexts -> prefill (trie, or suffix of what the store knows)
                                        |  keys and values into the store
             -> rows, one a seed    -> draw -> decode step -> draw -> ... -> completions

Nothing is copied out of the policy, so a publish is free; whatever was computed with older weights
is dropped there. Sampling with weights that changed since the last publish is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from fastturn.policy import Policy
from fastturn.sampler.attention import (
    Block,
    DecodeAttention,
    RecordingTree,
    SuffixAttention,
    blocks,
)
from fastturn.sampler.base import Request, SamplerStats, SamplingParams, check_requests
from fastturn.sampler.draw import Rows
from fastturn.sampler.store import PrefixStore, Slots, order_key
from fastturn.trie import shared_prefix, trie
from fastturn.types import Completion, Ids


class LocalSampler:
    """Samples from a policy in this process, on whatever device its weights are.

    `prefill_tokens`: most tokens of one prefill pass. `resident_tokens`: most tokens (contexts and
    budgets) decoded at once; more requests are served in waves. `store_gib`: memory of keys and
    values kept for the next call at the same version; 0 keeps nothing between calls.

    Example: `LocalSampler(policy).sample([Request(ids, 16, (1, 2))], SamplingParams(1.0, (2,)))`
    gives one list of two completions.
    """

    def __init__(
        self,
        policy: Policy | PreTrainedModel,
        version: int = 0,
        *,
        max_context: int | None = None,
        prefill_tokens: int = 8192,
        resident_tokens: int = 65536,
        store_gib: float = 0.5,
    ) -> None:
        self.policy = policy if isinstance(policy, Policy) else Policy(policy)
        limit = self.policy.max_context
        self.max_context = limit if max_context is None else min(max_context, limit)
        self.prefill_tokens, self.resident_tokens = prefill_tokens, resident_tokens
        self.store, self.store_bytes = PrefixStore(), int(store_gib * 2**30)
        self.stats = SamplerStats()
        self.publish(version)

    def publish(self, version: int) -> None:
        """The policy's weights now are those of `version`; keys and values of others are gone."""
        self.version = version
        self.store.clear()
        self._published = self._weights_state()

    def close(self) -> None:
        """Drop the store."""
        self.store.clear()

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """Completions of every request, in order; see `sampler.base`.

        A budget that does not fit behind its context is cut to what does (the completion then ends
        with `Stop.LENGTH`). Raises `ValueError` for an empty or over-long context, an id outside
        the vocabulary, a budget below one or a negative temperature, `RuntimeError` when the
        weights changed since the last publish, `FloatingPointError` when the model's logits are
        not numbers.
        """
        self._check(requests, params)
        if self.store.used_bytes > self.store_bytes or not self.store_bytes:
            self.store.clear()
        self.stats = SamplerStats()
        answers: list[list[Completion]] = [[] for _ in requests]
        with self._evaluating(), torch.no_grad():
            for wave in _waves(requests, self.resident_tokens):
                self._serve(wave, requests, params, answers)
        return answers

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        check_requests(requests, params, len(self.policy.head().weight_VD), self.max_context)
        if self._weights_state() != self._published:
            raise RuntimeError(
                f"the policy's weights changed since publish({self.version}); samples would carry "
                f"the wrong version; call publish(version) after every update"
            )

    def _weights_state(self) -> int:
        """Grows with every in-place write to a parameter."""
        return sum(parameter._version for parameter in self.policy.parameters())

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, so that gradient checkpointing stays out of the way."""
        training = self.policy.training
        self.policy.eval()
        try:
            yield
        finally:
            self.policy.train(training)

    def _serve(
        self,
        wave: Sequence[int],
        requests: Sequence[Request],
        params: SamplingParams,
        answers: list[list[Completion]],
    ) -> None:
        """Prefill and decode the requests of one wave, and write their answers."""
        group_of: dict[bytes, int] = {}
        contexts: list[Ids] = []
        owners: list[int] = []  # the request of every row
        groups: list[int] = []  # the context of every row
        for index in wave:
            context_T = requests[index].context_T
            group = group_of.setdefault(context_T.tobytes(), len(contexts))
            if group == len(contexts):
                contexts.append(context_T)
            owners += [index] * len(requests[index].seeds)
            groups += [group] * len(requests[index].seeds)
        budget_R = np.array(
            [
                min(requests[i].max_tokens, self.max_context - len(requests[i].context_T))
                for i in owners
            ]
        )
        seeds = [seed for index in wave for seed in requests[index].seeds]
        rows = Rows(np.array(groups), budget_R, seeds, params)
        hidden_GD, slots_G = self._prefill(contexts)
        self._decode(rows, hidden_GD, contexts, slots_G)
        for owner, completion in zip(owners, rows.completions(self.version), strict=True):
            answers[owner].append(completion)
        self.stats = replace(
            self.stats,
            context_tokens_flat=self.stats.context_tokens_flat
            + sum(len(contexts[group]) for group in groups),
            decode_tokens=self.stats.decode_tokens + int(rows.count_R.sum()),
        )

    # Prefill

    def _prefill(self, contexts: Sequence[Ids]) -> tuple[torch.Tensor, list[Slots]]:
        """Hidden state [G, D] of the last token of every context, and the slots of all tokens."""
        order = sorted(range(len(contexts)), key=lambda g: order_key(contexts[g]))
        ordered = [contexts[g] for g in order]
        # At least the last token is read again: its hidden state is not stored.
        known = [self.store.longest(context_T[:-1]) for context_T in ordered]
        fresh = [not known_ for known_ in _worth_resuming(ordered, known)]
        hidden: list[Any] = [None] * len(contexts)
        slots: list[Any] = [None] * len(contexts)
        for part in _cut(ordered, known, fresh, self.prefill_tokens):
            read = self._read_trie if fresh[part[0]] else self._read_suffixes
            last_PD, slots_P = read([ordered[i] for i in part], [known[i] for i in part])
            for place, i in enumerate(part):
                hidden[order[i]], slots[order[i]] = last_PD[place], slots_P[place]
        return torch.stack(hidden), slots

    def _read_trie(
        self, contexts: Sequence[Ids], known: Sequence[Slots]
    ) -> tuple[torch.Tensor, list[Slots]]:
        """Sorted contexts as one tree; nothing of the store is used."""
        token_T, position_T, end_T, index = trie(contexts)
        attend = RecordingTree(
            self._tensor(end_T), self._tensor(position_T), self.store, self.policy.backend
        )
        hidden_TD = self._hidden(token_T, position_T, attend)
        last_G = self._tensor(np.array([index_T[-1] for index_T in index]))
        return hidden_TD[last_G], [attend.start + index_T for index_T in index]

    def _read_suffixes(
        self, contexts: Sequence[Ids], known: Sequence[Slots]
    ) -> tuple[torch.Tensor, list[Slots]]:
        """What the store does not know of contexts that it knows the beginning of."""
        known_G = np.array([len(slots) for slots in known])
        new_G = np.array([len(context_T) for context_T in contexts]) - known_G
        start = self.store.reserve(int(new_G.sum()))
        ends_G = np.cumsum(new_G)
        slots = [
            np.concatenate([slots_T, np.arange(start + end - new, start + end)])
            for slots_T, end, new in zip(known, ends_G, new_G, strict=True)
        ]
        attend = SuffixAttention(slots, known_G, start, self.store, self.policy.device)
        token_N = np.concatenate([c[k:] for c, k in zip(contexts, known_G, strict=True)])
        position_N = np.concatenate(
            [np.arange(k, len(c)) for c, k in zip(contexts, known_G, strict=True)]
        )
        hidden_ND = self._hidden(token_N, position_N, attend)
        return hidden_ND[self._tensor(ends_G - 1)], slots

    def _hidden(self, token_T: Ids, position_T: NDArray[np.int64], attend: Any) -> torch.Tensor:
        self.stats = replace(self.stats, prefill_tokens=self.stats.prefill_tokens + len(token_T))
        tokens = self._tensor(token_T.astype(np.int64))
        return self.policy.hidden(tokens, self._tensor(position_T), attend)

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.policy.device)

    # Decode

    def _decode(
        self,
        rows: Rows,
        hidden_GD: torch.Tensor,
        contexts: Sequence[Ids],
        slots_G: Sequence[Slots],
    ) -> None:
        """Draw all rows to their ends and store what they read."""
        head = self.policy.head()
        length_R = np.array([len(context_T) for context_T in contexts])[rows.group_R]
        row_R = np.arange(len(rows.group_R))
        uniform_RS = self._tensor(rows.uniform_RS)
        logits_RV = head.logits(hidden_GD)[self._tensor(rows.group_R)]
        token_R = rows.draw(row_R, logits_RV, uniform_RS[:, 0])
        for group in np.unique(rows.group_R[~rows.live_R]).tolist():  # these take no place
            self.store.insert(contexts[group], slots_G[group])
        attend = DecodeAttention(
            blocks(rows.group_R, rows.live_R, slots_G, self.policy.device), self.store
        )
        position_R = self._tensor(length_R)
        ended = True  # some row ended at the last draw
        step = 0
        while rows.live_R.any():
            if ended:
                now_R = attend.row_R
                place = np.empty(len(rows.group_R), np.int64)
                place[row_R] = np.arange(len(row_R))
                token_R = token_R[self._tensor(place[now_R])]
                row_R = now_R
                index = self._tensor(row_R)
                position_now_R, uniform_now_RS = position_R[index], uniform_RS[index]
            hidden_RD = self.policy.hidden(token_R, position_now_R + step, attend)
            step += 1
            before = len(row_R)
            token_R = rows.draw(row_R, head.logits(hidden_RD), uniform_now_RS[:, step])
            attend.advance()
            ended = int(rows.live_R[row_R].sum()) < before
            if ended:
                attend.keep(rows.live_R)
                for block in attend.sparse():
                    self._keep_finished(attend, block, rows, contexts, slots_G)
                    attend.repack(block)
        for block in attend.blocks:
            self._keep_finished(attend, block, rows, contexts, slots_G)
        self.stats = replace(self.stats, decode_steps=self.stats.decode_steps + step)

    def _keep_finished(
        self,
        attend: DecodeAttention,
        block: Block,
        rows: Rows,
        contexts: Sequence[Ids],
        slots_G: Sequence[Slots],
    ) -> None:
        """What a block's finished rows read stays in the store for the next turn."""
        stored = attend.store_finished(block, rows.live_R, rows.count_R - 1)
        for row, slots_S in stored.items():
            group = rows.group_R[row]
            read_S = rows.token_RS[row, : len(slots_S)]
            self.store.insert(
                np.concatenate([contexts[group], read_S]),
                np.concatenate([slots_G[group], slots_S]),
            )


def _worth_resuming(ordered: Sequence[Ids], known: Sequence[Slots]) -> list[bool]:
    """For sorted contexts: resume from the store (True), or read anew in the tree (False).

    Resumed contexts share nothing new with each other, so the store must know at least half of the
    context and half of what it shares with its neighbours.
    """
    shared = [0, *(shared_prefix(a, b) for a, b in pairwise(ordered)), 0]
    return [
        2 * len(slots) >= max(len(context_T), shared[i], shared[i + 1])
        for i, (context_T, slots) in enumerate(zip(ordered, known, strict=True))
    ]


def _cut(
    ordered: Sequence[Ids], known: Sequence[Slots], fresh: Sequence[bool], budget_T: int
) -> Iterator[list[int]]:
    """Indices of sorted contexts, in passes of one kind with at most `budget_T` new tokens; a
    context over the budget is a pass of its own."""
    for kind in (True, False):
        part: list[int] = []
        size = 0
        for i in (i for i, is_fresh in enumerate(fresh) if is_fresh is kind):
            if kind and part:
                start = shared_prefix(ordered[part[-1]], ordered[i])
            else:
                start = 0 if kind else len(known[i])
            if part and size + len(ordered[i]) - start > budget_T:
                yield part
                part, size, start = [], 0, 0 if kind else start
            part.append(i)
            size += len(ordered[i]) - start
        if part:
            yield part


def _waves(requests: Sequence[Request], resident_tokens: int) -> Iterator[list[int]]:
    """Indices of requests with at least one seed, in waves of at most `resident_tokens` tokens
    (context and budgets), neighbours in token order together."""
    asked = [i for i, request in enumerate(requests) if request.seeds]
    asked.sort(key=lambda i: order_key(requests[i].context_T))
    wave: list[int] = []
    size = 0
    for i in asked:
        need = len(requests[i].context_T) + requests[i].max_tokens * len(requests[i].seeds)
        if wave and size + need > resident_tokens:
            yield wave
            wave, size = [], 0
        wave.append(i)
        size += need
    if wave:
        yield wave
