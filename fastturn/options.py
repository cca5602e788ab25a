"""Options that are named once: keyword-only arguments of a function, given as `name=value` text."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastturn.config import ConfigError

Option = float | int | str


def keywords(function: Callable[..., Any] | None) -> dict[str, Option]:
    """Keyword-only arguments with their defaults.

    Example: of `def f(groups, *, eta=1.0)` they are `{"eta": 1.0}`; of None there are none.
    """
    if function is None:
        return {}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def chosen(
    pairs: Sequence[str], known: Mapping[str, Option], key: str, owner: str
) -> dict[str, Option]:
    """What `name=value` pairs say, each value of the type of its default.

    `key` is the setting and `owner` whose options they are, for errors. Raises `ConfigError` for an
    unknown name (the nearest is named) and for a value that is not of the option's type.

    Example: `chosen(["eta=2"], {"eta": 1.0}, "algorithm_options", "refuel")` is `{"eta": 2.0}`.
    """
    found: dict[str, Option] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not known:
            raise ConfigError(f"{key}={pair!r}: {owner} has no options; leave it out")
        if name not in known or not separator:
            offered = ", ".join(f"{name}={value}" for name, value in known.items())
            raise ConfigError(
                f"{key}={pair!r}: expected name=value with an option of {owner} ({offered}); "
                f"the nearest is {nearest(name, known)!r}"
            )
        kind = type(known[name])
        try:
            found[name] = kind(text)
        except ValueError:
            raise ConfigError(
                f"{key}: {name}={text!r}: expected a value of type {kind.__name__}, "
                f"for example {name}={known[name]}"
            ) from None
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
