"""What goes over the wire to a vLLM server and what comes back, checked.

    Ask -> body -> POST /v1/completions or /inference/v1/generate -> read -> Reply

Token ids in, token ids and log-probabilities out. Everything that changes the sampled distribution
is sent, so that the server's own defaults (a model's generation_config.json) change nothing. No
seed is sent: a seeded request ends the CPU engine when its prefill is cut into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from fastturn.sampler.base import SamplingParams
from fastturn.sampler.server import EngineError
from fastturn.types import Floats, Ids, Stop

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
PHASE = "sample"
# What servers send in place of a log-probability that they do not have, or of minus infinity.
NO_LOGPROB = -9999.0
_REMEDIES = {
    400: "the server reads less, or other ids, than the trainer: compare its model and "
    "--max-model-len with model.path and model.max_context",
    401: "the server was started with --api-key; start it without one on a private address",
    403: "the route is switched off; start the server with the command that fastturn serve prints",
    404: "the server serves another model, or has no such route; compare /v1/models with the "
    "command that fastturn serve prints",
}


class BrokenAnswer(ValueError):
    """A body that ends early or is no JSON: nothing of it is used, the request is sent again."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`n` completions of one context, at most `max_tokens` ids each, as one HTTP request.

    `salt`: the key of the prefix cache, another one for every state of the weights.
    Example: `Ask(context_T=[1, 2, 3], n=2, max_tokens=8, params=SamplingParams(1.0, (2,)),
    salt="7-Jx...")`.
    """

    context_T: Ids
    n: int
    max_tokens: int
    params: SamplingParams
    salt: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion as received. `stop` is None when the server gave it up before its end (its
    ids are then a correct beginning). `tag`: the weight version that the server names, if any."""

    action_A: Ids
    logprob_A: Floats
    stop: Stop | None
    tag: str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The completions of one request, at most `n`; `cached_tokens` is None where unreported."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int | None


def body(ask: Ask, model: str, generate: bool) -> bytes:
    """The JSON body, for `GENERATE` when `generate`, else for `COMPLETIONS`."""
    sampling: dict[str, Any] = {
        "n": ask.n,
        "max_tokens": ask.max_tokens,
        "temperature": ask.params.temperature,
        "top_p": ask.params.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": list(ask.params.stop_ids),
        "ignore_eos": True,  # an action ends with the renderer's stop ids and no others
        "skip_special_tokens": False,
    }
    context = ask.context_T.tolist()
    if generate:
        sampling["detokenize"] = False
        message = {"model": model, "token_ids": context, "sampling_params": sampling}
    else:
        # Releases without the first field name ids in the second's way.
        flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        message = {"model": model, "prompt": context, **sampling, **flags}
    return json.dumps({**message, "cache_salt": ask.salt}, separators=(",", ":")).encode()


def read(data: bytes, ask: Ask, vocabulary: int, url: str) -> Reply:
    """The checked answer to `ask`.

    Raises `BrokenAnswer` when the body is not whole, `EngineError` when it is and the trainer
    cannot use it: no log-probabilities, ids outside the vocabulary, an end of the server's own.
    """
    try:
        message = json.loads(data)
        entries = message["choices"]
        usage = message.get("usage") or {}
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenAnswer(f"{len(data)} bytes that end with {data[-40:]!r}") from error
    if not isinstance(entries, list) or len(entries) > ask.n:
        _refuse(f"the answer has {_count(entries)} choices, expected at most {ask.n}", url)
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        choices=tuple(_choice(entry, ask, vocabulary, url) for entry in entries),
        prompt_tokens=int(usage.get("prompt_tokens") or len(ask.context_T)),
        cached_tokens=details.get("cached_tokens"),
    )


def refused(status: int, data: bytes, url: str) -> EngineError:
    """The error of a 4xx answer, with what the server says and what to do."""
    try:
        said = json.loads(data)
        said = said.get("error", said.get("detail", said))
        said = said.get("message", said) if isinstance(said, Mapping) else said
    except (ValueError, AttributeError):
        said = data.decode(errors="replace")
    reason = " ".join(str(said).split())[:300] or "no reason given"
    remedy = _REMEDIES.get(status, "look at the server's log")
    message = f"HTTP {status}, expected 200: {reason}; {remedy}"
    return EngineError(message, phase=PHASE, url=url, status=status)


def _choice(entry: Mapping[str, Any], ask: Ask, vocabulary: int, url: str) -> Choice:
    logprobs = entry.get("logprobs") or {}
    values = logprobs.get("token_logprobs")  # /v1/completions
    if values is None:
        values = [item.get("logprob") for item in logprobs.get("content") or ()]
    ids = entry.get("token_ids")
    if ids is None:
        ids = _named_ids(logprobs.get("tokens") or ())
    finish = entry.get("finish_reason")
    if finish not in ("stop", "length", "abort"):
        _refuse(f"finish_reason {finish!r}, expected stop, length or abort", url)
    if len(values) != len(ids) or None in values or min(values, default=0.0) <= NO_LOGPROB:
        _refuse(
            f"{len(ids)} tokens came with {len(values) - values.count(None)} log-probabilities; "
            f"the trainer needs one for each: start the server with the command that fastturn "
            f"serve prints",
            url,
        )
    action_A, logprob_A = np.array(ids, np.int32), np.array(values, np.float32)
    if len(ids) and not (action_A.min() >= 0 and action_A.max() < vocabulary):
        _refuse(
            f"token id {max(ids)} lies outside the trainer's vocabulary of {vocabulary}: the "
            f"server serves another model or tokenizer than model.path",
            url,
        )
    if not np.isfinite(logprob_A).all():
        _refuse("a log-probability is not finite: the served weights have diverged", url)
    stop = None if finish == "abort" else _stop(finish, ids, ask, url)
    return Choice(action_A, logprob_A, stop, _tag(entry.get("weight_versions")))


def _stop(finish: str, ids: Sequence[int], ask: Ask, url: str) -> Stop:
    """Why it ended, by the sampler's own rule: the first stop id, which belongs to the action."""
    stops = frozenset(ask.params.stop_ids)
    early = next((i for i, token in enumerate(ids[:-1]) if token in stops), None)
    ended = bool(ids) and ids[-1] in stops
    if early is not None or (finish == "stop" and not ended):
        where = f"goes on after stop id {ids[early]}" if early is not None else "ends elsewhere"
        _refuse(
            f"an action of {len(ids)} tokens {where}; expected to end with one of the stop ids "
            f"{sorted(stops)}: start the server with --generation-config vllm",
            url,
        )
    if not ended and len(ids) != ask.max_tokens:
        _refuse(
            f"an action was cut after {len(ids)} of {ask.max_tokens} tokens: the server's "
            f"--max-model-len is smaller than the trainer's model.max_context",
            url,
        )
    return Stop.STOP if ended else Stop.LENGTH


def _named_ids(tokens: Sequence[str]) -> list[int]:
    """`["token_id:5"]` -> `[5]`; what is not so named counts as missing."""
    return [int(t.removeprefix("token_id:")) for t in tokens if t.startswith("token_id:")]


def _tag(spans: Sequence[Mapping[str, Any]] | None) -> str | None:
    """The one version of all tokens; "mixed" when the weights changed on the way."""
    tags = {str(span.get("version")) for span in spans or ()}
    return next(iter(tags)) if len(tags) == 1 else ("mixed" if tags else None)


def _count(entries: object) -> object:
    return len(entries) if isinstance(entries, list) else "no"


def _refuse(message: str, url: str) -> NoReturn:
    raise EngineError(message, phase=PHASE, url=url)
