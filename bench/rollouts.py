"""Sampled tokens per second: the in-process sampler against `model.generate`, side by side.

    .venv/bin/python scripts/bench rollouts --threads 1 --no-record

SmolLM2-135M's shape with random weights, float32: 8 siblings of each context of 512 tokens, 64 new
tokens each. `generate` reads every context once a sibling, the sampler once. Time runs from ids to
finished completions, prefill included. Sampled log-probabilities must agree with the unmodified
model's own attention before timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from fastturn.models import ATTENTION
from fastturn.policy import Policy
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler
from fastturn.types import Ids

from . import command
from .cases import SMOLLM2
from .layouts import random_model
from .measure import WrongResult, ratios
from .record import Measured

LOGPROB_TOLERANCE = 1e-4

Provider = Callable[[Sequence[Ids], int], int]  # contexts, new tokens -> tokens sampled in all


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

    def inputs(self) -> list[Ids]:
        rng = np.random.default_rng(0)
        shape = (self.contexts, self.context)
        return list(rng.integers(0, SMOLLM2.vocab, shape).astype(np.int32))


def providers(policy: Policy, siblings: int) -> dict[str, Provider]:
    """Both sample `siblings` completions of every context, without stop ids."""
    sampler = LocalSampler(policy)

    def shared(contexts: Sequence[Ids], tokens: int) -> int:
        sampler.publish(sampler.version + 1)  # nothing is left over from the last repetition
        seeds = np.arange(len(contexts) * siblings).reshape(-1, siblings).tolist()
        requests = [
            Request(context_T, tokens, tuple(own))
            for context_T, own in zip(contexts, seeds, strict=True)
        ]
        answers = sampler.sample(requests, SamplingParams(1.0, ()))
        return sum(len(done.action_A) for group in answers for done in group)

    def generate(contexts: Sequence[Ids], tokens: int) -> int:
        prompt_BT = torch.from_numpy(np.stack(contexts).astype(np.int64)).to(policy.device)
        prompt_BT = prompt_BT.repeat_interleave(siblings, 0)
        plan = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
        model: Any = policy.model
        model.set_attn_implementation("sdpa")
        out_BT = model.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), generation_config=plan
        )
        model.set_attn_implementation(ATTENTION)
        return int(out_BT[:, prompt_BT.shape[1] :].numel())

    return {"fastturn": shared, "generate": generate}


@torch.no_grad()
def check(policy: Policy, context_T: Ids) -> None:
    """`WrongResult` when sampled log-probabilities are not those of the unmodified model."""
    request = Request(context_T, 8, (1, 2))
    ((done, _),) = LocalSampler(policy).sample([request], SamplingParams(1.0, ()))
    tokens_T = torch.from_numpy(np.concatenate([context_T, done.action_A]).astype(np.int64))
    policy.model.set_attn_implementation("sdpa")
    logits_AV = policy.model(tokens_T.unsqueeze(0).to(policy.device)).logits[0]
    policy.model.set_attn_implementation(ATTENTION)
    all_AV = logits_AV[len(context_T) - 1 : -1].double().log_softmax(-1).cpu()
    want_A = all_AV.gather(1, tokens_T[len(context_T) :].unsqueeze(1)).squeeze(1)
    error = float((want_A - torch.from_numpy(done.logprob_A)).abs().max())
    if not error <= LOGPROB_TOLERANCE:
        raise WrongResult(
            f"fastturn: log-probabilities differ from the model's by {error:.2g}, "
            f"above {LOGPROB_TOLERANCE:.0e}"
        )


def rates(
    run: Mapping[str, Provider], contexts: Sequence[Ids], tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of each provider, alternating, after a short call of each."""
    found: dict[str, list[float]] = {name: [] for name in run}
    for provider in run.values():
        provider([context_T[:32] for context_T in contexts], 2)
    for _ in range(repeats):
        for name, provider in run.items():
            start = time.perf_counter()
            sampled = provider(contexts, tokens)  # ends with ids on the host, so it has waited
            found[name].append(sampled / (time.perf_counter() - start))
    return found


def measure(policy: Policy, case: RolloutCase, repeats: int) -> Iterator[Measured]:
    contexts, config = case.inputs(), asdict(case)
    check(policy, contexts[0])
    found = rates(providers(policy, case.siblings), contexts, case.tokens, repeats)
    for name, values in found.items():
        yield Measured(case.name, name, "rate", "tokens/s", tuple(values), config)
    gain = ratios(found["fastturn"], found["generate"])
    yield Measured(case.name, "fastturn", "speed-up over generate", "1", gain, config)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("rollouts", __doc__, repeats=3)
    usual = RolloutCase()
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, default=usual.context)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--layers", type=int, default=usual.layers)
    args = command.options(parser, argv)
    model: Any = random_model(SMOLLM2, args.layers)
    policy = Policy(model.to(args.device).eval())
    each = (
        RolloutCase(contexts=contexts, context=args.context, tokens=args.tokens, layers=args.layers)
        for contexts in args.contexts
    )
    found = (one for case in each for one in measure(policy, case, args.repeats))
    return command.report("rollouts", found, args)
