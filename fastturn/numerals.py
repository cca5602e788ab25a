"""Numbers as people read them in a report."""

from __future__ import annotations

from typing import Any


def short(value: Any, digits: int = 3) -> str:
    """Example: 1234567 gives "1.23M", 0.00012 gives "0.00012", None gives "–", text stays."""
    if value is None or isinstance(value, str | bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) and abs(value) < 10_000:
        return f"{value:,}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def percent(share: float | None, digits: int = 1) -> str:
    """Example: .8634 gives "86.3 %", None gives "–"."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def fixed(value: float | None, digits: int = 2) -> str:
    """Example: 1234.5 gives "1,234.50", None gives "–"."""
    return "–" if value is None else f"{value:,.{digits}f}"


def hours(value: float) -> str:
    """Example: .0312 gives "0.031", 21.48 gives "21.5", 0 gives "0"."""
    return f"{value:.3f}" if 0.001 <= value < 1 else f"{value:.3g}"


def plural(n: int, noun: str) -> str:
    """Example: `plural(1, "task")` gives "1 task", `plural(2000, "task")` "2,000 tasks"."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def sign(value: float | None) -> str:
    """ "plus", "minus" or "zero"; "none" for an unknown value."""
    return "none" if value is None else "plus" if value > 0 else "minus" if value < 0 else "zero"
