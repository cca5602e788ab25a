"""The production sampler: a client of plain `vllm serve` processes that proves every publish.

    sample  ── checks ── jobs ── Fleet.run ──> completions, all of the published version
    publish ── carrier.send ── new cache key ── canary on every server ──> proved, or PublishError

The canary: a fixed prompt goes through the very path that rollouts take, a few tokens are sampled,
and their log-probabilities must be those that the trainer's own weights give to the same ids. It
sees weights that did not arrive, another model, a stale prefix cache, raw or renormalised
log-probabilities and top-p alike.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from fastturn import lora
from fastturn.carriers.base import Carrier, FullWeights
from fastturn.pack import pack
from fastturn.policy import Policy
from fastturn.publish import TOLERANCE, PublishError, prove_canary
from fastturn.sampler import wire
from fastturn.sampler.base import Request, SamplerStats, SamplingParams, check_requests
from fastturn.sampler.calls import Ask, Found
from fastturn.sampler.fleet import Fleet
from fastturn.sampler.members import Member
from fastturn.sampler.server import EngineError, Server, ServerInfo
from fastturn.types import Boundary, Completion, Credit, Ending, Floats, Ids, Stop, Trajectory, Turn

logger = logging.getLogger(__name__)

CANARY_PROMPT, CANARY_TOKENS = 144, 16  # more than a block of any server's prefix cache (16 to 128)
CANARY_DEADLINE_S = 60.0
CONTROL_S = 30.0  # deadline of one control call


class VllmSampler:
    """Samples from `vllm serve` processes that hold the policy's weights.

    urls: the servers. carrier: how weights get there; None when they hold them already.
    model: name of the served model, where it matters. max_context: as `model.max_context`; the
    servers must read as much. concurrency: most completions in flight on one server. deadline_s:
    of one request. patience_s: how long to wait while no server answers. `on_event(name, n)`
    counts what goes wrong, `say(text)` tells it.

    Nothing is published at construction; `sample` before the first `publish` is refused. Raises
    `EngineError` (phase and URL) when a server does not answer, serves another model, reads less
    than `max_context`, or returns no usable log-probabilities.
    Example: `VllmSampler(["http://127.0.0.1:8000"], policy, FileCarrier())`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        policy: Policy,
        carrier: Carrier | None,
        *,
        model: str | None = None,
        max_context: int | None = None,
        concurrency: int = 256,
        deadline_s: float = 300.0,
        patience_s: float = 600.0,
        on_event: Callable[[str, int], None] = lambda name, n: None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.policy, self.carrier, self.on_event = policy, carrier, on_event
        limit = policy.max_context
        self.max_context = limit if max_context is None else min(max_context, limit)
        servers = [Server(url, min(CONTROL_S, deadline_s)) for url in urls]
        infos = [server.info() for server in servers]
        for info in infos:
            _check_server(info, model, self.max_context, carrier)
        self.version, self.salt, self.stats = -1, "", SamplerStats()
        self._published: int | None = None
        self._canary_s = min(CANARY_DEADLINE_S, deadline_s)
        self.fleet = Fleet(
            servers,
            infos,
            concurrency,
            deadline_s,
            patience_s,
            model=model,
            admit=self._admit,
            on_event=on_event,
            say=say,
        )
        try:
            for member in self.fleet.members:
                self._canary(member, salt=_salt(self.version))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.fleet.close()
        for member in self.fleet.members:
            member.server.close()
        if self.carrier is not None:
            self.carrier.close()

    # Publishing

    def publish(self, version: int) -> None:
        """Make every server hold the policy's weights, and prove it. With the version and weights
        of the last publish nothing is sent and the servers' caches stay good.

        Servers that do not answer are left for later; they get the weights when they are back.
        Raises `PublishError` when a server answers with other log-probabilities than the policy's,
        `EngineError` when none can be reached or a carrier fails.
        """
        state = self._weights_state()
        if version == self.version and state == self._published:
            return
        self._published = None  # until proved, nothing may be sampled
        members = self._send(version)
        self.version, self.salt = version, _salt(version)
        self.fleet.router.forget()
        for member in members:
            self._prove(member, self.salt)
            self.fleet.unbench(member)
        self._published = state

    def _send(self, version: int) -> list[Member]:
        """The servers that hold the weights now."""
        while True:
            members = self.fleet.reachable("publish")
            if self.carrier is None:
                return members
            try:
                self._carry(version, members)
                return members
            except EngineError as error:
                unusable = getattr(error, "unusable", ())
                lost = [m for m in members if m.url in unusable or not m.server.healthy()]
                kept = [m for m in members if m not in lost]
                if not lost or (not kept and any(m.server.healthy() for m in lost)):
                    raise
                for member in lost:
                    self.fleet.bench(member, str(error))
                if kept:
                    self._carry(version, kept)
                    return kept

    def _carry(self, version: int, members: Sequence[Member]) -> None:
        assert self.carrier is not None
        name, model = getattr(self.carrier, "adapter", None), self.policy.model
        weights = lora.adapter(model) if name else FullWeights(model)
        self.carrier.send(weights, version, [member.server for member in members])
        for member in members:
            member.model = name or member.model

    def _admit(self, member: Member) -> None:
        """A server that was away: believed when the canary holds, given the weights when not."""
        if self._published is None:
            raise EngineError("nothing is published yet", phase="publish", url=member.url)
        try:
            # Under a key of its own: should the weights be others, what they compute is not kept.
            self._prove(member, _salt(self.version))
            return
        except PublishError as error:
            why = str(error)
        except EngineError as error:
            if error.status is None or self.carrier is None:
                raise
            why = str(error)
        if self.carrier is None:
            raise EngineError(why, phase="publish", url=member.url)
        self.on_event("engine_republished", 1)
        self._carry(self.version, [member])
        try:
            self._prove(member, self.salt)
        except PublishError as error:
            raise EngineError(str(error), phase="publish", url=member.url) from error

    def _prove(self, member: Member, salt: str) -> None:
        """`PublishError` unless the server samples from the policy's weights."""
        context_T, choice = self._canary(member, salt)
        expected_A = self._logprobs(context_T, choice.action_A)
        try:
            prove_canary(expected_A, choice.logprob_A, self._coarser_dtype(member))
        except PublishError as error:
            raise PublishError(f"version {self.version} at {member.url}: {error}") from error
        if self.carrier is not None and choice.tag not in (None, str(self.version)):
            raise PublishError(
                f"{member.url} names its weights {choice.tag!r}, expected {str(self.version)!r}: "
                f"another program publishes to this server, or the version tag did not arrive"
            )
        member.tag = choice.tag

    def _canary(self, member: Member, salt: str) -> tuple[Ids, wire.Choice]:
        """A fixed prompt over the whole vocabulary, and what the server samples after it."""
        vocabulary = self._vocabulary
        length = max(1, min(CANARY_PROMPT, self.max_context - CANARY_TOKENS))
        context_T = (vocabulary - 1 - np.arange(length) * 7919 % vocabulary).astype(np.int32)
        tokens = min(CANARY_TOKENS, self.max_context - length)
        ask = wire.Ask(context_T, 1, tokens, SamplingParams(1.0, ()), salt)
        reply = self.fleet.ask(member, ask, vocabulary, self._canary_s)
        whole = [choice for choice in reply.choices if choice.stop is not None]
        if not whole:
            raise EngineError(
                "the canary came back without an answer; another program aborts requests",
                phase=wire.PHASE,
                url=member.url + member.path,
            )
        return context_T, whole[0]

    def _logprobs(self, context_T: Ids, action_A: Ids) -> Floats:
        """The policy's own log-probabilities at temperature 1."""
        done = Completion(action_A, np.zeros(len(action_A), np.float32), 0, Stop.LENGTH)
        turns = (Turn(Boundary(0, context_T), done),)
        credit = Credit(Trajectory("canary", 0, turns, Ending.TURNS), np.ones(1), np.ones(1))
        (batch,) = pack([[credit]], len(context_T) + len(action_A), self.policy.device)
        return self.policy.score(batch, 1.0).float().cpu().numpy()

    def _coarser_dtype(self, member: Member) -> torch.dtype:
        """Of the trainer's weights and the server's; what their arithmetic may differ by."""
        own = self.policy.head().weight_VD.dtype
        served = getattr(torch, member.info.dtype or "", own)
        return max(own, served, key=lambda dtype: TOLERANCE.get(dtype, 0.0))

    @property
    def _vocabulary(self) -> int:
        return len(self.policy.head().weight_VD)

    def _weights_state(self) -> int:
        """Grows with every in-place write to a parameter."""
        return sum(parameter._version for parameter in self.policy.parameters())

    # Sampling

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """Completions of every request, in order; see `sampler.base`. Seeds count completions and
        fix no draw: servers draw with their own generators.

        A budget that does not fit behind its context is cut to what does. Raises `ValueError` for
        impossible requests, `RuntimeError` when the weights changed since the last publish, and
        `EngineError` when servers cannot answer or their answers cannot be used.
        """
        check_requests(requests, params, self._vocabulary, self.max_context)
        self._check_ready(params)
        traffic = self.fleet.traffic
        before = traffic.prompt_tokens, traffic.cached_tokens
        asks = [self._ask(request, params) for request in requests]
        found = iter(self.fleet.run(asks, params, self.salt, self._vocabulary))
        answers = [
            self._completions(list(islice(found, n)), request)
            for request, (*_, n) in zip(requests, asks, strict=True)
        ]
        lengths = [len(done.action_A) for group in answers for done in group]
        self.stats = SamplerStats(
            context_tokens_flat=sum(len(r.context_T) * len(r.seeds) for r in requests),
            prefill_tokens=(traffic.prompt_tokens - before[0])
            - (traffic.cached_tokens - before[1]),
            decode_tokens=sum(lengths),
            decode_steps=max(lengths, default=1) - 1,
        )
        return answers

    def stream(self, params: SamplingParams, answer: Callable[[Any, Any], None]) -> ServerStream:
        """Requests answered as they are done; see `sampler.base.Streaming`. Raises what `sample`
        raises before it asks; `stats` stay those of the last `sample`."""
        self._check_ready(params)
        return ServerStream(self, params, answer)

    def _ask(self, request: Request, params: SamplingParams) -> Ask:
        """What to ask for; greedy completions are all the same."""
        n = len(request.seeds)
        budget = min(request.max_tokens, self.max_context - len(request.context_T))
        return request.context_T, budget, min(1, n) if params.temperature == 0 else n

    def _completions(self, found: Sequence[Found], request: Request) -> list[Completion]:
        """What answers a request, from the choices that `_ask` asked for."""
        done = []
        for choice, _ in found:
            assert choice.stop is not None
            done.append(Completion(choice.action_A, choice.logprob_A, self.version, choice.stop))
        return done if len(done) == len(request.seeds) else done * len(request.seeds)

    def _check_ready(self, params: SamplingParams) -> None:
        if self._published is None or self._weights_state() != self._published:
            raise RuntimeError(
                f"the policy's weights are not those of the last proved publish (version "
                f"{self.version}); call publish(version) after every update"
            )
        self.require_scores_at(params.temperature)

    def require_scores_at(self, temperature: float) -> None:
        """`EngineError` when a server reports log-probabilities of another distribution than the
        one that is sampled at this temperature."""
        if temperature in (0.0, 1.0):
            return
        for member in self.fleet.members:
            if member.info.logprobs_mode == "raw_logprobs":
                raise EngineError(
                    f"temperature {temperature:g} with raw log-probabilities, which are "
                    f"those of temperature 1; start the server with --logprobs-mode "
                    f"processed_logprobs",
                    phase=wire.PHASE,
                    url=member.url,
                )


class ServerStream:
    """A call of the servers that stays open for requests (`sampler.base.Stream`)."""

    def __init__(
        self, sampler: VllmSampler, params: SamplingParams, answer: Callable[[Any, Any], None]
    ) -> None:
        self._sampler, self._params, self._answer = sampler, params, answer
        self._requests: dict[Any, Request] = {}
        vocabulary = sampler._vocabulary
        self._call = sampler.fleet.open(params, sampler.salt, vocabulary, self._answered)
        self._call.on_failure(lambda error: answer(None, error))

    def submit(self, key: Any, request: Request) -> None:
        sampler = self._sampler
        check_requests([request], self._params, sampler._vocabulary, sampler.max_context)
        self._requests[key] = request
        self._call.submit({key: sampler._ask(request, self._params)})

    def settle(self) -> None:
        """Nothing waits for this: requests are on their way already."""

    def close(self) -> None:
        self._call.close()

    def _answered(self, key: Any, found: Sequence[Found]) -> None:
        self._answer(key, self._sampler._completions(found, self._requests.pop(key)))


def _salt(version: int) -> str:
    """A key of the prefix cache that no other run and no earlier state of the weights had."""
    return f"{version}-{secrets.token_urlsafe(32)}"


def _check_server(
    info: ServerInfo, model: str | None, max_context: int, carrier: Carrier | None
) -> None:
    """`EngineError` when a server cannot serve this trainer."""

    def refuse(message: str) -> None:
        raise EngineError(message, phase="probe", url=info.url)

    if model is not None and info.model != model:
        refuse(f"it serves {info.model!r}, expected {model!r}; start it with --served-model-name")
    if info.max_model_len is not None and info.max_model_len < max_context:
        refuse(
            f"it reads at most {info.max_model_len} tokens, model.max_context is {max_context}; "
            f"start it with --max-model-len {max_context} or lower model.max_context"
        )
    if info.logprobs_mode not in (None, "processed_logprobs", "raw_logprobs"):
        refuse(
            f"it returns {info.logprobs_mode}, which are no log-probabilities; start it with "
            f"--logprobs-mode processed_logprobs"
        )
    if carrier is not None and carrier.name not in info.carriers:
        offered = ", ".join(info.carriers) or "none"
        refuse(
            f"weights cannot reach it by {carrier.name!r} (it offers: {offered}); start it with "
            f"the command that fastturn serve prints, or choose another rollout.carrier"
        )
