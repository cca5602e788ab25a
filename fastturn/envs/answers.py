"""Answers as numbers: the boxed part of a text, and whether two answers are the same number.

Exact (integers and fractions), instant, and safe on any input; what is not plainly a number is left
to `verify`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 100  # no number that people write is longer
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|([+-]?\d+)\s*/\s*(\d+)")
_DECORATION = re.compile(r"\\text\{\s*(?:dollars?|cents?|percent)\s*\}|\\[!,;: ]|\\\$|[$€£]|\\%|%")


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, braces balanced; None without one.

    Example: `boxed("so \\boxed{\\frac{1}{2}}")` is `\\frac{1}{2}`.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i].strip()
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of `text` if it is plainly one number: integer, decimal, simple fraction,
    with thousands separators, currency or percent signs around it (a percent sign is decoration:
    50% reads as 50). None otherwise.

    Examples: "$1,234.50" is 2469/2, "\\frac{3}{4}" is 3/4, "12 apples" is None.
    """
    if len(text) > MAX_CHARS:
        return None
    plain = _DECORATION.sub("", text).strip().removesuffix(".")
    plain = plain.replace("{,}", ",").replace("\u2212", "-")
    fraction = _FRACTION.fullmatch(plain)
    if fraction:
        sign, top, bottom, left, right = fraction.groups()
        numerator = int(left if left is not None else f"{sign}{top}")
        denominator = int(right if left is not None else bottom)
        return Fraction(numerator, denominator) if denominator else None
    if not plain.strip("+-.,") or not _NUMBER.fullmatch(plain):
        return None
    return Fraction(plain.replace(",", ""))


def same_number(gold: str, answer: str) -> bool | None:
    """Whether two answers are the same number; None if one of them is not plainly a number.

    Examples: ("42", "42.0") is True, ("42", "41") False, ("42", "x = 42") None.
    """
    left, right = as_number(gold), as_number(answer)
    return None if left is None or right is None else left == right
