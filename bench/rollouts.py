"""Sampled tokens per second: the in-process sampler against `model.generate`, side by side.

The shape is SmolLM2-135M with random weights: 8 siblings of each context of 512 tokens, 64 new
tokens each. `generate` reads every context once a sibling, the sampler once. Time counts from
prompts to finished completions, prefill included; providers alternate within one process, and a
sampled completion is checked against the plain model before anything is timed.

    python -m fastturn.bench.rollouts --threads 1 --contexts 1 4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from fastturn.policy import Policy
from fastturn.sampler.base import Request, SamplingParams
from fastturn.sampler.local import LocalSampler

SIBLINGS, CONTEXT_TOKENS, NEW_TOKENS = 8, 512, 64
LOGPROB_TOLERANCE = 1e-4


def smollm2_shape(layers: int = 30) -> LlamaForCausalLM:
    """SmolLM2-135M's architecture with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    ).eval()


def providers(
    policy: Policy, context_tokens: int, new_tokens: int
) -> dict[str, Callable[[np.ndarray], int]]:
    """Name -> function that samples `SIBLINGS` completions of every row of contexts [B, T] and
    returns how many tokens it sampled."""
    sampler = LocalSampler(policy)
    model: Any = policy.model

    def shared(context_BT: np.ndarray) -> int:
        sampler.publish(sampler.version + 1)
        requests = [
            Request(context_T, new_tokens, tuple(range(SIBLINGS * i, SIBLINGS * (i + 1))))
            for i, context_T in enumerate(context_BT)
        ]
        answers = sampler.sample(requests, SamplingParams(1.0, ()))
        return sum(len(done.action_A) for group in answers for done in group)

    def generate(context_BT: np.ndarray) -> int:
        model.set_attn_implementation("sdpa")
        prompt = torch.from_numpy(context_BT.astype(np.int64)).repeat_interleave(SIBLINGS, 0)
        prompt = prompt.to(policy.device)
        plan = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
        with torch.no_grad():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=plan
            )
        model.set_attn_implementation("fastturn")
        return int(out[:, context_tokens:].numel())

    return {"fastturn": shared, "transformers.generate": generate}


def check(policy: Policy, context_T: np.ndarray) -> float:
    """Largest difference between sampled log-probabilities and the plain model's, after 8 tokens.

    Raises `AssertionError` above `LOGPROB_TOLERANCE`: wrong samples have no speed.
    """
    sampler = LocalSampler(policy)
    ((done, *_),) = sampler.sample([Request(context_T, 8, (1, 2))], SamplingParams(1.0, ()))
    policy.model.set_attn_implementation("sdpa")
    tokens = torch.from_numpy(np.concatenate([context_T, done.action_A]).astype(np.int64))
    with torch.no_grad():
        logits = policy.model(tokens.unsqueeze(0).to(policy.device)).logits[0]
    policy.model.set_attn_implementation("fastturn")
    all_AV = logits[len(context_T) - 1 : -1].double().log_softmax(-1).cpu()
    want_A = all_AV.gather(1, tokens[len(context_T) :].unsqueeze(1)).squeeze(1)
    error = float((want_A - torch.from_numpy(done.logprob_A)).abs().max())
    if not error <= LOGPROB_TOLERANCE:
        raise AssertionError(f"log-probabilities differ by {error:.2g}, above {LOGPROB_TOLERANCE}")
    return error


def measure(
    run: dict[str, Callable[[np.ndarray], int]], context_BT: np.ndarray, repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of every provider, `repeats` times, alternating."""
    rates: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(repeats):
        for name, sample in run.items():
            start = time.perf_counter()
            tokens = sample(context_BT)
            rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollouts", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--context-tokens", type=int, default=CONTEXT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    model: Any = smollm2_shape(options.layers)
    policy = Policy(model.to("cuda" if torch.cuda.is_available() else "cpu"))
    rng = np.random.default_rng(0)
    size = (max(options.contexts), options.context_tokens)
    context_BT = rng.integers(0, 49152, size).astype(np.int32)
    print(f"log-probability error {check(policy, context_BT[0]):.1e}")
    run = providers(policy, options.context_tokens, options.new_tokens)
    warm = providers(policy, options.context_tokens, 2)
    for name in warm:
        warm[name](context_BT[:1, :32])
    for contexts in options.contexts:
        rates = measure(run, context_BT[:contexts], options.repeats)
        medians = {name: float(np.median(values)) for name, values in rates.items()}
        ratio = medians["fastturn"] / medians["transformers.generate"]
        print(
            f"{contexts} contexts x {SIBLINGS} siblings, {options.threads} threads: "
            + ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in medians.items())
            + f", ratio {ratio:.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
