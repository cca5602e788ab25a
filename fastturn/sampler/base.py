"""What every sampler promises: exact ids in, exact ids out, with the log-probabilities, the policy
version and the stop reason of each completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from fastturn.types import Completion, Ids


@dataclass(frozen=True, slots=True)
class Request:
    """`len(seeds)` independent completions of one exact context, at most `max_tokens` ids each.

    Completion i is drawn with uniform numbers that depend on `seeds[i]` alone, so it does not
    depend on what else is sampled beside it.
    Example: `Request(context_T=[1, 2, 3], max_tokens=8, seeds=(7, 8))` asks for two completions.
    """

    context_T: Ids
    max_tokens: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampled distribution is `softmax(logits / temperature)` over the whole vocabulary; an
    action ends with the first id of `stop_ids`, which belongs to it. Temperature 0 takes the most
    likely id and reports its log-probability at temperature 1. `top_p` below 1 is for evaluations:
    of each distribution the likeliest ids that together have this mass are left. Training never
    does so, because it scores the whole distribution.
    """

    temperature: float
    stop_ids: tuple[int, ...]
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """Counters of one `sample` call.

    context_tokens_flat: context tokens summed over completions, what a sampler that shares nothing
    reads. prefill_tokens: context tokens the model read in fact. decode_tokens: sampled tokens.
    decode_steps: forward passes after the prefill.
    Example: one context of 512 tokens, 8 completions of 64 tokens: 4096, 512, 512, 63.
    """

    context_tokens_flat: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Sampler(Protocol):
    """`sample` answers request by request, completions in the order of the seeds.

    `version` is stamped on every completion. `publish(version)` says that the weights are now those
    of `version`; whatever was cached for older weights is dropped. `stats` counts the last call.
    `close` lets go of what it holds; nothing is sampled afterwards.
    """

    version: int
    stats: SamplerStats

    def sample(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> list[list[Completion]]: ...

    def publish(self, version: int) -> None: ...

    def close(self) -> None: ...


class Stream(Protocol):
    """Requests to be answered in any order, each as `answer(key, completions)` from some thread;
    `answer(None, error)` when the sampler cannot go on.

    Keys are ordered: what has a smaller one is asked for first when not all can be. `settle` says
    that nothing will be submitted before something is answered. `close` ends it;
    what was not answered then never is.
    """

    def submit(self, key: Any, request: Request) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Streaming(Protocol):
    """A sampler that answers request by request, on devices of its own: `sample` without waiting
    for the slowest. All completions of a stream are of the version published when it was opened.
    """

    def stream(self, params: SamplingParams, answer: Callable[[Any, Any], None]) -> Stream: ...


class Batches:
    """The stream of a sampler that answers whole batches: what was submitted waits for `settle`,
    and is sampled in the order of the keys. `settle` raises what `Sampler.sample` raises."""

    def __init__(
        self, sampler: Sampler, params: SamplingParams, answer: Callable[[Any, Any], None]
    ) -> None:
        self.sampler, self.params, self.answer = sampler, params, answer
        self._waiting: list[tuple[Any, Request]] = []

    def submit(self, key: Any, request: Request) -> None:
        self._waiting.append((key, request))

    def settle(self) -> None:
        batch, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
        if batch:
            answers = self.sampler.sample([request for _, request in batch], self.params)
            for (key, _), completions in zip(batch, answers, strict=True):
                self.answer(key, completions)

    def close(self) -> None:
        self._waiting.clear()


def check_requests(
    requests: Sequence[Request], params: SamplingParams, vocabulary: int, max_context: int
) -> None:
    """`ValueError` for an empty or over-long context, an id outside the vocabulary, a budget below
    one or a negative temperature; names the request, the value and the remedy.

    Example: a context of 96 ids with `max_context=96` leaves no room to sample and is refused.
    """
    if not params.temperature >= 0:
        raise ValueError(f"temperature={params.temperature}: expected 0 (greedy) or more")
    for index, request in enumerate(requests):
        length = len(request.context_T)
        if not 1 <= length < max_context:
            raise ValueError(
                f"request {index}: a context of {length} tokens; the model reads at most "
                f"{max_context}, one of which must be sampled, so a context has 1 to "
                f"{max_context - 1}; shorten the context or raise model.max_context"
            )
        if request.max_tokens < 1:
            raise ValueError(
                f"request {index}: max_tokens={request.max_tokens}; expected at least 1"
            )
        low, high = int(request.context_T.min()), int(request.context_T.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"request {index}: token id {low if low < 0 else high}; the model's vocabulary "
                f"has ids 0 to {vocabulary - 1}; use the tokenizer that came with the model"
            )
