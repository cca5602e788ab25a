"""The configuration: overrides, their types, errors that name the key, the value, the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastturn.config import Config, ConfigError, as_dict, check, fields, from_dict, override
from fastturn.recipes import RECIPES

POSITIVE = [
    *("tasks", "trunks", "turns", "pack_tokens", "threads", "warm.batch", "save.keep", "optim.lr"),
    *("sampling.temperature", "sampling.turn_tokens", "sampling.episode_tokens"),
    *("loss.epochs", "loss.minibatches", "data.tool_timeout_s", "data.env_timeout_s"),
    *("model.layers", "model.width", "model.vocabulary", "model.max_context", "data.eval_tasks"),
]
MAY_BE_ZERO = [
    *("seed", "iterations", "eval_every", "save.every", "warm.steps", "warm.lr", "warm.muon_lr"),
    *("loss.clip_low", "loss.clip_high", "loss.kl_coef"),
    *("optim.weight_decay", "optim.warmup_steps", "optim.clip_norm"),
]
DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def documented() -> dict[str, str]:
    """key -> default, from the tables of the document."""
    rows = re.findall(
        r"^\| `([\w.]+)` \| (?:`(.*?)`|\(empty\)) \| \S.*\|$", DOCUMENT.read_text(), re.M
    )
    assert len({key for key, _ in rows}) == len(rows), "a key is documented twice"
    return dict(rows)


def plain(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def test_every_key_is_documented_with_its_default():
    assert documented() == {key: plain(value) for key, _, value in fields(Config())}


def test_at_most_sixty_eight_keys():
    keys = [key for key, _, _ in fields(Config())]
    assert len(keys) == len(set(keys)) <= 68


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_named_and_described(name):
    config = RECIPES[name]()
    assert check(config) is config
    assert config.recipe == name
    assert len((RECIPES[name].__doc__ or "").split("\n")[0]) > 20


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name):
    config = RECIPES[name]()
    assert from_dict(as_dict(config)) == config


def test_round_trip_of_unusual_values():
    pairs = ["optim.lr=3e-7", "trackers=tensorboard,wandb", "data.path=a=b,c.jsonl", "gamma=0.97"]
    config = override(Config(), [*pairs, "loss.normalize_std=true", "model.dtype=bfloat16"])
    assert from_dict(as_dict(config)) == config
    assert config.data.path == "a=b,c.jsonl"


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("iterations=3", 3),
        ("iterations=1e3", 1000),
        ("seed=9007199254740993", 9007199254740993),
        ("optim.lr=3e-4", 3e-4),
        ("optim.weight_decay=0", 0.0),
        ("loss.normalize_std=true", True),
        ("loss.normalize_std=0", False),
        ("model.gradient_checkpointing=selective", "selective"),
        ("model.dtype=bfloat16", "bfloat16"),
        ("trackers=tensorboard,wandb", ("tensorboard", "wandb")),
        ("trackers=", ()),
        ("data.path=tasks.jsonl", "tasks.jsonl"),
        ("algorithm=grpo", "grpo"),
    ],
)
def test_values_take_the_type_of_their_key(pair, value):
    got = dict((key, v) for key, _, v in fields(override(Config(), [pair])))[pair.split("=")[0]]
    assert got == value and type(got) is type(value)


def test_the_last_override_wins_and_the_original_is_untouched():
    config = Config()
    assert override(config, ["seed=1", "seed=2"]).seed == 2
    assert config == Config()


def test_overrides_are_checked_together():
    """Two pairs that only work together may come in any order."""
    config = override(Config(), ["group_size=2", "algorithm=grpo"])
    assert config.group_size == 2


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("iteratons", "iterations"),
        ("group-size", "group_size"),
        ("lr", "optim.lr"),
        ("optim.warmup", "optim.warmup_steps"),
        ("data.pth", "data.path"),
        ("turn_tokens", "sampling.turn_tokens"),
        ("kl_coef", "loss.kl_coef"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'.*'{nearest}'"):
        override(Config(), [f"{key}=1"])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["iterations"], "'iterations': expected key=value"),
        (["iterations=many"], "iterations='many': expected a value of type int"),
        (["iterations=1.5"], "iterations='1.5': expected a value of type int"),
        (["iterations=inf"], "iterations='inf': expected a value of type int"),
        (["optim.lr=fast"], "optim.lr='fast': expected a value of type float"),
        (["loss.normalize_std=maybe"], "loss.normalize_std='maybe': expected true or false"),
        (["model.dtype=float8"], "model.dtype='float8': expected one of float32, bfloat16"),
        (["attention=flsh"], "attention='flsh': expected one of auto, triton, torch, flex, flash"),
        (
            ["algorithm=grp"],
            "algorithm='grp': expected one of rtpo, .*; the nearest is 'grpo'",
        ),
        (["group_size=2"], "group_size=2: rtpo needs at least 3.*set group_size=3"),
        (["algorithm=grpo", "group_size=1"], "group_size=1: grpo needs at least 2"),
        (["gamma=0"], r"gamma=0.0: expected a discount in \(0, 1\]"),
        (["gamma=1.01"], "gamma=1.01: expected a discount"),
        (["loss.clip_low=1.5"], "loss.clip_low=1.5: expected at most 1"),
        (["optim.beta2=1"], "optim.beta2=1.0: expected a decay rate"),
        (["optim.lr=nan"], "optim.lr=nan: expected a finite number"),
        (["optim.lr=inf"], "optim.lr=inf: expected a finite number"),
        (["tasks=4", "loss.minibatches=5"], r"loss.minibatches=5: at most one a task \(tasks=4\)"),
    ],
)
def test_a_value_that_cannot_work_is_named(pairs, message):
    with pytest.raises(ConfigError, match=message):
        override(Config(), pairs)


@pytest.mark.parametrize("key", POSITIVE)
def test_positive_numbers(key):
    with pytest.raises(ConfigError, match=f"{re.escape(key)}=0.*: expected a positive number"):
        override(Config(), [f"{key}=0"])


@pytest.mark.parametrize("key", MAY_BE_ZERO)
def test_numbers_that_may_be_zero(key):
    override(Config(), [f"{key}=0"])
    with pytest.raises(ConfigError, match=f"{re.escape(key)}=-1.*: expected zero or more"):
        override(Config(), [f"{key}=-1"])


def test_an_unknown_key_in_a_saved_configuration_is_an_error():
    with pytest.raises(ConfigError, match=r"unknown key 'optim.beta3'.*'optim.beta2'"):
        from_dict({**as_dict(Config()), "optim.beta3": 0.9})
