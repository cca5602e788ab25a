"""What the values in a run's files are, as data; where one is something else.

A form is a type (`float` takes whole numbers, too), `(form, None)` for what may be unknown,
`[form]` for a list, or an object's `{name: form}`, in which `...` stands for all other names. What
an object names it must have, unless that may be unknown.
"""

from __future__ import annotations

from typing import Any

_WORDS: dict[type, str] = {
    **{str: "a text", int: "a whole number", float: "a number"},
    **{dict: "an object", list: "a list"},
}


def _document(**forms: Any) -> dict[Any, Any]:
    """Everything may be missing; what is not named is a number."""
    return {name: (form, None) for name, form in forms.items()} | {...: (float, None)}


_NUMBERS = {...: float}
_TURN = {
    **{"context": str, "action": str, "events": ([str], None)},
    **{"reward": (float, None), "advantage": (float, None)},
}
_POOLS = {
    "trainer": {"spans": _NUMBERS, ...: float},
    "servers": ({"busy": float, "idle": _NUMBERS, ...: float}, None),
}

_SETTINGS = {"algorithm": (str, None), "turns": (int, None), ...: object}

CONFIG = _document(config=_SETTINGS, recipe=_SETTINGS)
RECORD = _document(
    **{"kind": str, "split": str, "iteration": int, "stage": int, "steps": int},
    **dict.fromkeys(("spans", "counts", "endings", "hits", "overlap_saved_s"), _NUMBERS),
)
SAMPLE = _document(task=str, ending=str, turns=[_TURN], iteration=int, stage=int)
SUMMARY = _document(
    **dict.fromkeys(("recipe", "algorithm", "device_kind", "energy_note", "commit"), str),
    **dict.fromkeys(("spans", "counts", "idle", "overlap_saved_s"), _NUMBERS),
    **dict.fromkeys(("hits_before", "hits_after"), _NUMBERS),
    **{"versions": {...: str}, "pools": _POOLS, "devices": int, "eval_tasks": int},
    levels=[{"success": float, "device_seconds": float, ...: (float, None)}],
)


def misfit(value: Any, form: Any, at: str) -> str:
    """Where a value is not of its form, and what was expected; "" when it fits.

    Example: `misfit({"a": "x"}, {...: float}, "spans")` is "spans.a: expected a number, got 'x'".
    """
    match form:
        case (inner, None):
            return "" if value is None else misfit(value, inner, at)
        case dict() if isinstance(value, dict):
            rest = form.get(..., object)
            names = [name for name in dict.fromkeys((*form, *value)) if name is not ...]
            found = (misfit(value.get(n), form.get(n, rest), f"{at}.{n}") for n in names)
        case [inner] if isinstance(value, list):
            found = (misfit(part, inner, f"{at}[{n}]") for n, part in enumerate(value))
        case type() if isinstance(value, (int, float) if form is float else form):
            return ""
        case _:
            kind = form if isinstance(form, type) else type(form)
            return f"{at}: expected {_WORDS[kind]}, got {repr(value)[:60]}"
    return next(filter(None, found), "")
