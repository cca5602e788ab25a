"""A calculator that is safe on any input: a whitelist over Python's expression tree, with caps.

Nothing is evaluated by Python itself, and every intermediate value is bounded, so a call takes
microseconds whatever is asked.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import threading
from collections.abc import Callable
from decimal import Decimal

from fastturn.envs.tools import Tool, ToolError

Number = int | float

MAX_CHARS = 200  # length of an expression
MAX_DEPTH = 100  # nesting of an expression (a sum of n terms nests n deep)
MAX_DIGITS = 40  # digits of any integer on the way
_BOUND = 10**MAX_DIGITS
_ALPHABET = re.compile(r"[0-9eE+\-*/%(). \t\n]*")

# Two threads that parse at once can end in a SystemError before CPython 3.13 (gh-106905 there).
_PARSING = threading.Lock()

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % **, parentheses.

    Integral values are written as integers, others with 6 decimals (below 1: 6 significant
    digits), without trailing zeros. Raises `ToolError` that says what is refused.

    Examples: `calculate("(37*12)/8")` is "55.5", `calculate("7/3")` is "2.333333".
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of `expression` as int or float, see `calculate`."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"expression longer than {MAX_CHARS} characters")
    if not expression.strip():
        raise ToolError("empty expression")
    if not _ALPHABET.fullmatch(expression):
        raise ToolError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        with _PARSING:
            tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not a valid expression") from None
    return _value(tree.body, 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(node, ast.Constant):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return _bounded(_apply(node.op, left, right))
    raise ToolError("only numbers, + - * / // % ** and parentheses are allowed")


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow):
        return _power(left, right)
    if type(op) not in _BINARY:
        raise ToolError("only the operators + - * / // % ** are allowed")
    try:
        return _BINARY[type(op)](left, right)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError(f"number larger than {MAX_DIGITS} digits") from None


def _power(base: Number, exponent: Number) -> Number:
    """`base ** exponent`, refused before it is computed when it could be large."""
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    if base < 0 and isinstance(exponent, float) and not exponent.is_integer():
        raise ToolError("root of a negative number")
    if base not in (-1, 0, 1) and abs(exponent) * abs(math.log10(abs(base))) > MAX_DIGITS:
        raise ToolError(f"power with more than {MAX_DIGITS} digits")
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > _BOUND:
        raise ToolError(f"number larger than {MAX_DIGITS} digits")
    result: Number = base**exponent
    return result


def _bounded(value: object) -> Number:
    if type(value) not in (int, float):
        raise ToolError("only whole and decimal numbers are allowed")
    assert isinstance(value, (int, float))
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("not a finite number")
    if abs(value) >= _BOUND:
        raise ToolError(f"number larger than {MAX_DIGITS} digits")
    return value


def format_number(value: Number) -> str:
    """`value` as people write it. Examples: 444.0 is "444", 1/3 is "0.333333", 1e-9 is
    "0.000000001"."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.6f}" if abs(value) >= 1 or value == 0 else f"{Decimal(f'{value:.5e}'):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


CALCULATOR = Tool(
    name="calculator",
    description="Evaluates one arithmetic expression.",
    parameters={
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "for example (37+5)*12"},
        },
        "required": ["expression"],
    },
    function=calculate,
    bounded=True,
)
