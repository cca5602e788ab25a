"""Sampled tokens per second: the in-process sampler beside `model.generate` and a vLLM server.

    .venv/bin/python scripts/bench rollouts --threads 1 --no-record
    .venv/bin/python scripts/bench rollouts --contexts --lengths gsm8k --no-record

SmolLM2-135M's shape with random weights, float32: 8 siblings of each context of 512 tokens, 64 new
tokens each, or lengths drawn from what was fitted to data (`fastturn/lengths.py`), with their long
tails. `generate` reads every context once a sibling and takes a batch to its longest action, the
sampler does neither. `vllm` is a server with the same weights and as many threads (besides them its
HTTP side has a process), asked through our client, one request for all siblings. Time runs from ids
to finished completions, prefill included; no context is cached when it begins. Sampled
log-probabilities must agree with the unmodified model's own attention before timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from fastturn.lengths import FITTED, lengths_of
from fastturn.models import ATTENTION
from fastturn.policy import Policy
from fastturn.sampler.base import Request, Sampler, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.types import Ids

from . import command
from .cases import SMOLLM2
from .layouts import random_model
from .measure import WrongResult, ratios
from .record import Measured
from .served import served

LOGPROB_TOLERANCE = 1e-4
TURNS = 4  # of an episode with drawn lengths

Asked = tuple[Ids, int]  # a context and how many tokens each of its siblings has


@dataclass(frozen=True, slots=True)
class Provider:
    """`sample` gives how many tokens it has sampled in all; `fresh` forgets what it has read."""

    sample: Callable[[Sequence[Asked]], int]
    fresh: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class RolloutCase:
    contexts: int = 1
    context: int = 512
    siblings: int = 8
    tokens: int = 64
    layers: int = 30

    @property
    def name(self) -> str:
        return f"rollouts/contexts={self.contexts}"

    def inputs(self) -> list[Asked]:
        rng = np.random.default_rng(0)
        return [(random_ids(rng, self.context), self.tokens) for _ in range(self.contexts)]


@dataclass(frozen=True, slots=True)
class DrawnCase(RolloutCase):
    """Lengths of `lengths`, a name of `FITTED`; `context` and `tokens` are the most there may be.
    A context is a prompt and what none to `TURNS` - 1 turns have added."""

    contexts: int = 4
    context: int = 1024
    tokens: int = 256
    lengths: str = "tool-dialogues"

    @property
    def name(self) -> str:
        return f"rollouts/{self.lengths} contexts={self.contexts}"

    def inputs(self) -> list[Asked]:
        rng, of = np.random.default_rng(0), lengths_of([self.lengths])

        def drawn(median: float, spread: float) -> int:
            return round(median * rng.lognormal(0.0, spread))

        def action() -> int:
            return drawn(of.think, of.think_spread) + drawn(of.action, of.spread)

        found = []
        for _ in range(self.contexts):
            length = drawn(of.prompt, of.prompt_spread)
            for _ in range(rng.integers(TURNS)):
                length += action() + drawn(of.answer, of.answer_spread)
            context_T = random_ids(rng, min(max(length, 1), self.context))
            found.append((context_T, min(max(action(), 1), self.tokens)))
        return found


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, SMOLLM2.vocab, count).astype(np.int32)


def providers(
    policy: Policy, siblings: int, samplers: Mapping[str, Sampler]
) -> dict[str, Provider]:
    """All sample `siblings` completions of every context, without stop ids."""
    found = {name: of_sampler(sampler, siblings) for name, sampler in samplers.items()}
    return found | {"generate": Provider(generated(policy, siblings))}


def of_sampler(sampler: Sampler, siblings: int) -> Provider:
    """One request for all siblings of a context."""

    def sample(asked: Sequence[Asked]) -> int:
        seeds = np.arange(len(asked) * siblings).reshape(-1, siblings).tolist()
        requests = [
            Request(context_T, tokens, tuple(own))
            for (context_T, tokens), own in zip(asked, seeds, strict=True)
        ]
        answers = sampler.sample(requests, SamplingParams(1.0, ()))
        return sum(len(done.action_A) for group in answers for done in group)

    return Provider(sample, lambda: sampler.publish(sampler.version + 1))


def generated(policy: Policy, siblings: int) -> Callable[[Sequence[Asked]], int]:
    """A row for every sibling, all to the longest action."""

    def generate(asked: Sequence[Asked]) -> int:
        """Contexts are padded on their left; what lies behind an action's end is not counted."""
        longest = max(len(context_T) for context_T, _ in asked)
        prompt_BT = torch.zeros(len(asked), longest, dtype=torch.long)
        mask_BT = torch.zeros_like(prompt_BT)
        for row, (context_T, _) in enumerate(asked):
            prompt_BT[row, -len(context_T) :] = torch.from_numpy(context_T.astype(np.int64))
            mask_BT[row, -len(context_T) :] = 1
        prompt_BT, mask_BT = (
            x.repeat_interleave(siblings, 0).to(policy.device) for x in (prompt_BT, mask_BT)
        )
        plan = GenerationConfig(
            max_new_tokens=max(tokens for _, tokens in asked),
            **{"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None},
        )
        model: Any = policy.model
        model.set_attn_implementation("sdpa")
        model.generate(prompt_BT, attention_mask=mask_BT, generation_config=plan)
        model.set_attn_implementation(ATTENTION)
        return siblings * sum(tokens for _, tokens in asked)

    return generate


@torch.no_grad()
def check(policy: Policy, name: str, sampler: Sampler, context_T: Ids) -> None:
    """`WrongResult` when sampled log-probabilities are not those of the unmodified model."""
    sampler.publish(sampler.version + 1)
    ((done, _),) = sampler.sample([Request(context_T, 8, (1, 2))], SamplingParams(1.0, ()))
    tokens_T = torch.from_numpy(np.concatenate([context_T, done.action_A]).astype(np.int64))
    policy.model.set_attn_implementation("sdpa")
    logits_AV = policy.model(tokens_T.unsqueeze(0).to(policy.device)).logits[0]
    policy.model.set_attn_implementation(ATTENTION)
    all_AV = logits_AV[len(context_T) - 1 : -1].double().log_softmax(-1).cpu()
    want_A = all_AV.gather(1, tokens_T[len(context_T) :].unsqueeze(1)).squeeze(1)
    error = float((want_A - torch.from_numpy(done.logprob_A)).abs().max())
    if not error <= LOGPROB_TOLERANCE:
        raise WrongResult(
            f"{name}: log-probabilities differ from the model's by {error:.2g}, "
            f"above {LOGPROB_TOLERANCE:.0e}"
        )


def rates(
    run: Mapping[str, Provider], asked: Sequence[Asked], repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of each provider, alternating, after a short call of each."""
    found: dict[str, list[float]] = {name: [] for name in run}
    for provider in run.values():
        provider.sample([(context_T[:32], 2) for context_T, _ in asked])
    for _ in range(repeats):
        for name, provider in run.items():
            provider.fresh()
            start = time.perf_counter()
            sampled = provider.sample(asked)  # ends with ids on the host, so it has waited
            found[name].append(sampled / (time.perf_counter() - start))
    return found


def measure(
    policy: Policy, case: RolloutCase, samplers: Mapping[str, Sampler], repeats: int
) -> Iterator[Measured]:
    asked, config = case.inputs(), asdict(case)
    for name, sampler in samplers.items():
        check(policy, name, sampler, asked[0][0])
    found = rates(providers(policy, case.siblings, samplers), asked, repeats)
    for name, values in found.items():
        yield Measured(case.name, name, "rate", "tokens/s", tuple(values), config)
        if name != "fastturn":
            gain = ratios(found["fastturn"], values)
            yield Measured(case.name, "fastturn", f"speed-up over {name}", "1", gain, config)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("rollouts", __doc__, repeats=3)
    usual = RolloutCase()
    parser.add_argument("--contexts", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--context", type=int, default=usual.context)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--layers", type=int, default=usual.layers)
    known = command.one_of("lengths", FITTED)
    parser.add_argument("--lengths", type=known, nargs="*", default=["tool-dialogues"])
    args = command.options(parser, argv)
    model: Any = random_model(SMOLLM2, args.layers)
    policy = Policy(model.to(args.device).eval())
    each = [
        RolloutCase(contexts=contexts, context=args.context, tokens=args.tokens, layers=args.layers)
        for contexts in args.contexts
    ]
    each += [DrawnCase(layers=args.layers, lengths=name) for name in args.lengths]
    longest = max(len(context_T) + tokens for case in each for context_T, tokens in case.inputs())
    with served(policy, longest, args.threads) as others:
        samplers: dict[str, Sampler] = {"fastturn": LocalSampler(policy), **others}
        found = (one for case in each for one in measure(policy, case, samplers, args.repeats))
        return command.report("rollouts", found, args)
