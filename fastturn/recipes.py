"""Recipes: named, complete configurations. Each is a function that returns a `Config`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from fastturn.config import Config, ConfigError, Data, Loss, Model, Optim, Sampling, Save, Warm


def quickstart() -> Config:
    """A small Qwen3 learns multi-turn calculator use on a CPU, from nothing, in two minutes."""
    return Config(
        recipe="quickstart",
        iterations=60,
        tasks=32,
        group_size=5,
        turns=4,
        data=Data(domain="calculator", eval_tasks=256),
        model=Model(layers=2, width=64, max_context=256),
        sampling=Sampling(turn_tokens=24, episode_tokens=96),
        optim=Optim(lr=5e-4, beta2=0.99, weight_decay=0.0, warmup_steps=10),
        warm=Warm(steps=600, batch=32, lr=3e-3, muon_lr=0.02),
        save=Save(every=20),
    )


def frontdesk() -> Config:
    """A small Qwen3 learns to run a front desk by its house rules, on a CPU, in two minutes."""
    return Config(
        recipe="frontdesk",
        iterations=24,
        tasks=32,
        group_size=5,
        turns=6,
        rewards=("outcome", "penalty", "fulfilment"),
        data=Data(domain="frontdesk", eval_tasks=256),
        model=Model(layers=2, width=64, vocabulary=448, max_context=256),
        sampling=Sampling(turn_tokens=20, episode_tokens=96),
        loss=Loss(epochs=3),
        optim=Optim(lr=5e-4, beta2=0.99, weight_decay=0.0, warmup_steps=10),
        warm=Warm(steps=600, batch=32, lr=3e-3, muon_lr=0.02, compliant=0.2),
        save=Save(every=20),
    )


def shell() -> Config:
    """The same for the operator of a simulated machine."""
    return replace(frontdesk(), recipe="shell", data=Data(domain="shell", eval_tasks=256))


def gsm8k_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct on GSM8K with a calculator tool (set data.path)."""
    return Config(
        recipe="gsm8k-smollm2",
        iterations=2,
        tasks=4,
        group_size=5,
        turns=4,
        data=Data(domain="math", eval_tasks=8),
        model=Model(path="smollm2-135m", max_context=1024),
        sampling=Sampling(temperature=0.9, turn_tokens=96, episode_tokens=256),
        pack_tokens=2048,
        loss=Loss(kl_coef=0.02),
        optim=Optim(lr=1e-5),
        warm=Warm(steps=12, batch=4, lr=1e-4),
        save=Save(every=1, keep=1),
    )


def mawps_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct on one-step word problems with a calculator: a real model
    learns on a CPU, in 22 minutes of a core (set data.path to MAWPS)."""
    return Config(
        recipe="mawps-smollm2",
        iterations=24,
        tasks=8,
        group_size=5,
        turns=3,
        data=Data(domain="math", eval_tasks=100),
        model=Model(path="smollm2-135m", max_context=512),
        sampling=Sampling(turn_tokens=48, episode_tokens=96),
        optim=Optim(lr=2e-5, beta2=0.99, weight_decay=0.0, warmup_steps=4),
        warm=Warm(steps=10, batch=8, lr=1e-4),
        save=Save(every=5, keep=1),
    )


def gsm8k_python_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct on GSM8K with Python in a sandbox (set data.path)."""
    recipe = gsm8k_smollm2()
    data = replace(recipe.data, domain="math:tool=python")
    return replace(recipe, recipe="gsm8k-python-smollm2", data=data)


def hotpotqa_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct on questions to search for (set data.domain, data.path)."""
    recipe = gsm8k_smollm2()
    return replace(
        recipe,
        recipe="hotpotqa-smollm2",
        turns=6,
        data=Data(domain="search:corpus=corpus.jsonl", path="questions.jsonl", eval_tasks=8),
        model=replace(recipe.model, max_context=2048),
        sampling=replace(recipe.sampling, turn_tokens=64, episode_tokens=320),
    )


def airline_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct at the airline desk of τ²-bench, a scripted customer."""
    recipe = gsm8k_smollm2()
    return replace(
        recipe,
        recipe="airline-smollm2",
        tasks=2,
        group_size=3,
        data=Data(domain="tau2:desk=airline,user=script", eval_tasks=4),
        model=replace(recipe.model, max_context=8192),
        pack_tokens=8192,
    )


def gym_smollm2() -> Config:
    """RTPO of SmolLM2-135M-Instruct on a generator of reasoning-gym, two tries an answer."""
    recipe = gsm8k_smollm2()
    data = Data(domain="gym:generator=leg_counting,tries=2", eval_tasks=8)
    return replace(recipe, recipe="gym-smollm2", turns=2, data=data)


RECIPES: dict[str, Callable[[], Config]] = {
    "quickstart": quickstart,
    "frontdesk": frontdesk,
    "shell": shell,
    "gsm8k-smollm2": gsm8k_smollm2,
    "mawps-smollm2": mawps_smollm2,
    "gsm8k-python-smollm2": gsm8k_python_smollm2,
    "hotpotqa-smollm2": hotpotqa_smollm2,
    "airline-smollm2": airline_smollm2,
    "gym-smollm2": gym_smollm2,
}


def recipe_of(name: str) -> Config:
    """The recipe of this name; `ConfigError` for an unknown one (the nearest is named)."""
    if name in RECIPES:
        return RECIPES[name]()
    if "=" in name:
        raise ConfigError(
            f"{name!r} stands where the recipe belongs; put one first, for example: "
            f"fastturn train quickstart {name}"
        )
    near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"unknown recipe {name!r}; the nearest is {near!r} (fastturn recipes lists all)"
    )
