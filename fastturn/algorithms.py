"""The algorithms: what each of them samples, what it credits, and which loss it minimises.

    tasks -> roots -> [grow -> stages] -> sample -> groups -> credit -> pack -> surrogate

An algorithm is data for the one loop: functions from `expand.py` (which episodes are sampled) and
`credit/` (advantage and weight of every turn), the name of a surrogate of `loss.py`, and the
configuration that its paper uses. All sampling is `Rollout.grow` and `Rollout.fork` on points:

    episodes     one stage at the roots, `fork`                   grpo, dr_grpo, rloo, gspo, ...
    refilled     the same, silent groups replaced by new tasks    dapo
    trees        one stage at the roots, episodes branched off    tree_grpo, arpo
    boundaries   trunks are grown, stages fork at their turns     rtpo (all, reversed), refuel (one)

Options of an algorithm are the keyword arguments of its functions, set by `algorithm_options`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from fastturn import credit, expand, passes, tree
from fastturn.config import Config, ConfigError
from fastturn.credit import Credits, attached
from fastturn.episode import Point
from fastturn.options import Option, chosen, keywords, nearest
from fastturn.types import SiblingGroup

T = TypeVar("T")
Stages = Iterator[tuple[int, list[Point]]]


def always(stages: int, kl: float) -> bool:
    """Publish before every stage."""
    return True


def scheduled(stages: int, kl: float, *, publish_every: int = 1, publish_kl: float = 0.0) -> bool:
    """Publish when `publish_every` stages were trained since the last time, or when the tokens of
    the last one were `publish_kl` nats (above 0) from the policy that sampled them (RTPO, section
    G.6). In between siblings come from older weights: their ratio corrects turn k, and nothing
    corrects what follows it.

    Example: publish_every = 2 and stages that all train: before every second one.
    """
    return publish_every <= max(1, stages) or 0 < publish_kl < kl


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How an algorithm rolls out, what it credits and what it minimises.

    credit      groups, config -> advantages and weights
    path        the same for what path rules say of every turn (`channels.py`)
    passes      groups, config, log-ratios -> credits, one optimiser step each on the same samples
                (`passes.py`); None: the credit alone
    sample      rollout, points, n, key -> groups of n episodes a point (`tree.Rollout.fork`)
    stages      trunks, config, key -> (turn, points to sample at) in training order; None: no
                trunks are grown, one stage at the roots
    surrogate   one of `SURROGATES`, the losses of `loss.py`
    reverse     boundaries of all turns are sampled at, not one a trunk or root
    unsampled   members of G that are not sampled at a point (RTPO counts the trunk)
    least_group_size   smaller groups carry no signal
    candidates  tasks that are offered to `sample` for each one that is wanted
    due         stages since the last publish, KL to what was published -> whether to publish again
    whole_stage credits depend on all groups of the stage together
    presets     configuration that `algorithm=NAME` sets, before any other override
    """

    credit: Callable[..., Credits]
    path: Callable[..., Credits] = attached
    sample: Callable[..., list[SiblingGroup]] = tree.Rollout.fork
    stages: Callable[..., Stages] | None = None
    passes: Callable[..., Iterator[Credits]] | None = None
    due: Callable[..., bool] = always
    surrogate: str = "clip"
    reverse: bool = False
    unsampled: int = 0
    least_group_size: int = 2
    candidates: int = 1
    whole_stage: bool = False
    presets: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Option]:
        """The options with their defaults."""
        return {
            **keywords(self.credit),
            **keywords(self.path),
            **keywords(self.sample),
            **keywords(self.stages),
            **keywords(self.passes),
            **keywords(self.due),
            "surrogate": self.surrogate,
        }

    @property
    def lags(self) -> bool:
        """Whether a stage may be sampled by weights older than those it trains."""
        return not self.due(1, 0.0)

    @property
    def separate(self) -> bool:
        """Whether a group is nothing but a fork of its point, whatever the others are."""
        return self.sample in (tree.Rollout.fork, expand.forked)  # with an option it is another

    def given(self, options: Mapping[str, Option]) -> Algorithm:
        """The algorithm with its functions bound to options."""
        return replace(
            self,
            credit=_bound(self.credit, options),
            path=_bound(self.path, options),
            sample=_bound(self.sample, options),
            stages=self.stages and _bound(self.stages, options),
            passes=self.passes and _bound(self.passes, options),
            due=_bound(self.due, options),
            least_group_size=5 if float(options.get("agreed", 1)) < 1 else self.least_group_size,
            surrogate=str(options.get("surrogate", self.surrogate)),
        )


def _bound(function: Callable[..., T], options: Mapping[str, Option]) -> Callable[..., T]:
    given = {name: options[name] for name in keywords(function) if name in options}
    return partial(function, **given) if given else function


SURROGATES = ("clip", "sequence", "truncate", "mask", "regression")
# What the number of an option must be, in words and as a test, and the options it is asked of.
VALUES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("a share above 0 and at most 1", lambda x: 0 < x <= 1, ("agreed", "boundaries", "initial")),
    ("a number from 0 to 1", lambda x: 0 <= x <= 1, ("overlong", "step_discount")),
    ("a number above 0", lambda x: 0 < x < math.inf, ("eta", "bound", "least", "most")),
    ("1 or more", lambda x: x >= 1, ("rounds", "tokens", "publish_every")),
    ("0 or more", lambda x: 0 <= x < math.inf, ("best", "publish_kl")),
    ("0 (off) or 1 (on)", lambda x: x in (0, 1), ("leave_one_out", "continuations")),
    (
        "a finite number",
        math.isfinite,
        ("alpha", "beta", "threshold", "step_weight", "call_reward"),
    ),
)
STD = {"loss.normalize_std": "true"}

ALGORITHMS: dict[str, Algorithm] = {
    "rtpo": Algorithm(
        credit.rtpo,
        path=credit.rtpo,
        sample=expand.forked,
        stages=expand.every_boundary,
        due=scheduled,
        reverse=True,
        unsampled=1,
        least_group_size=3,
    ),
    "rtpo_off_policy": Algorithm(
        passes.forked_turns,
        path=passes.forked_turns,
        stages=expand.every_boundary_at_once,
        passes=passes.rtpo_off_policy,
        reverse=True,
        unsampled=1,
        least_group_size=3,
        whole_stage=True,
    ),
    "grpo": Algorithm(credit.grpo, presets=STD),
    "dapo": Algorithm(
        credit.dapo,
        sample=expand.refilled,
        candidates=3,
        whole_stage=True,
        presets=STD | {"loss.clip_high": "0.28", "loss.kl_coef": "0"},
    ),
    "dr_grpo": Algorithm(credit.dr_grpo, presets={"loss.kl_coef": "0"}),
    "gspo": Algorithm(
        credit.grpo,
        surrogate="sequence",
        presets=STD | {"loss.clip_low": "3e-4", "loss.clip_high": "4e-4", "loss.kl_coef": "0"},
    ),
    "cispo": Algorithm(
        partial(credit.dapo, overlong=0.0),
        surrogate="truncate",
        whole_stage=True,
        presets=STD | {"loss.clip_low": "1", "loss.clip_high": "4", "loss.kl_coef": "0"},
    ),
    "rloo": Algorithm(credit.rloo),
    "gigpo": Algorithm(credit.gigpo, presets=STD),
    "steptool": Algorithm(credit.steptool),
    "seeupo": Algorithm(
        credit.by_turn,
        passes=passes.seeupo,
        surrogate="sequence",
        whole_stage=True,
        presets=STD,
    ),
    "tree_grpo": Algorithm(credit.tree_grpo, sample=expand.forest, presets=STD | {"trunks": "2"}),
    "arpo": Algorithm(credit.grpo, sample=expand.branched, presets=STD),
    "refuel": Algorithm(
        credit.refuel,
        path=credit.refuel,
        stages=expand.one_boundary,
        surrogate="regression",
        presets={"loss.kl_coef": "0"},
    ),
}


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a run with its options.

    Raises `ConfigError` for an unknown algorithm, option or surrogate (the nearest is named) and
    for a value that is not of the option's type.
    """
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"algorithm={config.algorithm!r}: expected one of {', '.join(ALGORITHMS)}; "
            f"the nearest is {nearest(config.algorithm, ALGORITHMS)!r}"
        )
    algorithm = ALGORITHMS[config.algorithm]
    return algorithm.given(_options(config, algorithm.options))


def presets(name: str) -> list[str]:
    """The `key=value` overrides that choosing an algorithm brings; none for an unknown one."""
    if name not in ALGORITHMS:
        return []
    return [f"{key}={value}" for key, value in ALGORITHMS[name].presets.items()]


def _check_together(config: Config, options: Mapping[str, Option]) -> None:
    """`ConfigError` for settings that are right alone and do nothing, or harm, together."""
    least, most = (float(options.get(name, 1.0)) for name in ("least", "most"))
    if least > most:
        raise ConfigError(
            f"algorithm_options: least={least:g} is above most={most:g}: expected bounds of a "
            f"weight, the lower one first; exchange them"
        )
    if float(options.get("publish_kl", 0.0)) and options["publish_every"] == 1:
        raise ConfigError(
            f"algorithm_options: publish_kl={options['publish_kl']} does nothing while every stage "
            f"is published; set publish_every={config.turns} as well (or how many stages may pass "
            f"at most), or leave publish_kl out"
        )
    best = int(options.get("best", 0))
    if best and best >= config.trunks:
        raise ConfigError(
            f"algorithm_options: best={best} chooses among trunks={config.trunks} trunks "
            f"a task: expected fewer than there are; raise trunks, or leave best out"
        )
    if "rounds" in options and config.trunks > config.group_size:
        raise ConfigError(
            f"trunks={config.trunks}: {config.algorithm} grows that many trees a task, and "
            f"group_size={config.group_size} counts all their leaves; set "
            f"trunks={config.group_size} or less, or raise group_size"
        )


def _options(config: Config, known: Mapping[str, Option]) -> dict[str, Option]:
    """What `algorithm_options` says, each value of the type of its default."""
    given = chosen(config.algorithm_options, known, "algorithm_options", config.algorithm)
    for expected, holds, names in VALUES:
        for name in (name for name in names if name in given):
            if not holds(float(given[name])):
                raise ConfigError(f"algorithm_options: {name}={given[name]}: expected {expected}")
    _check_together(config, {**known, **given})
    surrogate = given.get("surrogate", SURROGATES[0])
    if surrogate not in SURROGATES:
        raise ConfigError(
            f"algorithm_options: surrogate={surrogate!r}: expected one of "
            f"{', '.join(SURROGATES)}; the nearest is {nearest(str(surrogate), SURROGATES)!r}"
        )
    return given
