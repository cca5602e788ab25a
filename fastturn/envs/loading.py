"""Domains and functions by name: registered ones, and those in a file of the user's own."""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fastturn.config import Config, ConfigError
from fastturn.envs.base import DOMAINS, Domain, DomainError, Task
from fastturn.options import chosen, keywords, nearest
from fastturn.rules import Rule, Ruled, checked

logger = logging.getLogger(__name__)


def load_domain(config: Config) -> Domain:
    """The domain named by `data.domain` (a registered name, with options or without, or
    `file.py:function`), judged by its own path rules and those of the file `data.rules`, where
    there are any. Example: `data.domain=workshop:checks=4`.

    Raises `ConfigError` for an unknown name or option (the nearest is named), a missing file or
    function, or rules that cannot be trained on, and `DomainError` for tasks that cannot be used.
    """
    domain = _named(config)
    _check_parts(domain, config.data.domain)
    found = [*getattr(domain, "rules", ()), *_own_rules(config.data.rules)]
    rules = checked(list({id(rule): rule for rule in found}.values()))  # imported: the same rule
    trained = set(config.rewards) - {"outcome"}
    if trained and not rules:
        raise ConfigError(
            f"rewards={','.join(config.rewards)}: data.domain={config.data.domain!r} has no path "
            f"rules; declare some (docs/rules.md) in a file and name it by data.rules, or set "
            f"rewards=outcome"
        )
    if rules and not trained:
        logger.info(
            "path rules are counted only; rewards=outcome,penalty,fulfilment trains on them"
        )
    compliant = config.warm.compliant
    if compliant and not hasattr(domain, "compliant_demonstrator"):
        raise ConfigError(
            f"warm.compliant={compliant}: data.domain={config.data.domain!r} has no "
            f"compliant_demonstrator to show it; define one (docs/rules.md), or set 0"
        )
    return Ruled(domain, rules, compliant) if rules or compliant else domain


def _check_parts(domain: Domain, name: str) -> None:
    """`DomainError` for tasks or tools of another kind, and for held-out tasks of one id."""
    for part in ("train_tasks", "eval_tasks", "tools"):
        value = getattr(domain, part)
        if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise DomainError(
                f"data.domain={name!r}: its {part} are {type(value).__name__}, expected a list, or "
                f"what has a length and places like one"
            )
    held_out = list(domain.eval_tasks)
    for task in [*held_out, *domain.train_tasks[:1]]:
        if not isinstance(task, Task):
            raise DomainError(
                f"data.domain={name!r}: one of its tasks is {type(task).__name__}, expected a "
                f"fastturn.envs.Task"
            )
    (id, count), *_ = Counter(task.id for task in held_out).most_common(1) or [("", 1)]
    if count > 1:
        raise DomainError(
            f"data.domain={name!r}: {count} held-out tasks have the id {id!r}, by which episodes "
            f"are told apart; give each its own"
        )
    for tool in domain.tools:
        if not isinstance(tool, Mapping):
            raise DomainError(
                f"data.domain={name!r}: one of its tools is {type(tool).__name__}, expected its "
                f"schema, for example Tool(...).schema"
            )


def _own_rules(file: str) -> list[Rule]:
    """The rules declared in a file, in their order there."""
    if not file:
        return []
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"data.rules={file!r}: there is no such file; give a path that exists from {Path.cwd()}"
        )
    declared = vars(_own_module(path, "data.rules", file)).values()
    rules = [value for value in declared if isinstance(value, Rule)]
    if not rules:
        raise ConfigError(
            f"data.rules={file!r}: the file declares no rule; decorate a function with "
            f"fastturn.rules.penalty, fulfilment or progress"
        )
    return rules


def _named(config: Config) -> Domain:
    reference = config.data.domain
    if ".py:" in reference:
        return _own_domain(load_function(reference, "data.domain"), config)
    name, separator, options = reference.partition(":")
    if name not in DOMAINS:
        raise ConfigError(
            f"data.domain={name!r}: expected one of {', '.join(sorted(DOMAINS))} or a function of "
            f"yours as file.py:function; the nearest is {nearest(name, DOMAINS)!r}"
        )
    factory = DOMAINS[name]
    pairs = options.split(",") if separator else ()
    return factory(config, **chosen(pairs, keywords(factory), "data.domain", name))


def _own_domain(factory: Callable[..., Any], config: Config) -> Domain:
    """What a user's function makes of the configuration, or `ConfigError` with what is wrong."""
    name = config.data.domain
    try:
        domain: Domain = factory(config)
    except (ConfigError, DomainError):
        raise
    except Exception as error:
        raise ConfigError(
            f"data.domain={name!r}: it raised {type(error).__name__}: {error}{_where(error)}; a "
            f"domain is made from the configuration alone (docs/environments.md)"
        ) from error
    parts = ("tools", "train_tasks", "eval_tasks", "env", "demonstrator")
    missing = [part for part in parts if not hasattr(domain, part)]
    if missing:
        raise ConfigError(
            f"data.domain={name!r}: it made a {type(domain).__name__} without "
            f"{', '.join(missing)}; a domain has {', '.join(parts)} (docs/environments.md)"
        )
    return domain


def _where(error: Exception | SystemExit) -> str:
    """The file and line that raised, of an error that does not say so itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if isinstance(error, SyntaxError) else f", {last.filename}, line {last.lineno}"


def load_function(reference: str, key: str) -> Callable[..., Any]:
    """The function that `file.py:name` refers to; `key` is the setting named in errors.

    Example: `load_function("my_env.py:weather", "data.domain")`. Raises `ConfigError`.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"{key}={reference!r}: there is no file {file!r}; give a path that exists from "
            f"{Path.cwd()}"
        )
    function = getattr(_own_module(path, key, reference), name, None)
    if not callable(function):
        raise ConfigError(
            f"{key}={reference!r}: {file} has no function {name!r}; define it there or name "
            f"another one"
        )
    result: Callable[..., Any] = function
    return result


def _own_module(path: Path, key: str, value: str) -> ModuleType:
    """The module in a user's file, or `ConfigError` with what it raised and where."""
    try:
        return _load_module(path.resolve())
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}={value!r}: the file cannot be loaded ({type(error).__name__}: {error}"
            f"{_where(error)}); mend it, `python {path}` shows the same"
        ) from error


def _load_module(path: Path) -> ModuleType:
    """The module in the file `path`, loaded once under a name of its own, so that its classes can
    be pickled (snapshots) and no installed module is shadowed."""
    name = f"fastturn_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
