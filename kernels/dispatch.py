"""Which implementation of an op runs, and the checks that every implementation may rely on.

Checks run before any computation and raise `ValueError` with the argument, the expectation and the
value. They cost a few microseconds each; those that read data (label range, finite numbers, bias)
cost one reduction over [A] or [V].
"""

from __future__ import annotations

import importlib.util
import numbers
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

Op = TypeVar("Op", bound=Callable[..., object])

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PREFERRED = {"cuda": ("triton", "torch"), "cpu": ("torch",)}


def choose(
    impl: str, table: Mapping[str, Op], device: torch.device, dtype: torch.dtype | None = None
) -> Op:
    """The function named `impl`; "auto" is the first preferred one that the op has on `device`.

    "auto" passes over Triton where it is not installed and for float64, which it does not do; by
    name both raise `ValueError`, as does a CPU without Triton's interpreter.

    Example: `choose("auto", {"torch": f, "reference": g}, torch.device("cpu"))` is `f`.
    """
    if impl == "auto":
        names = PREFERRED.get(device.type, ("torch",))
        usable = (n for n in names if n in table)
        return next(table[n] for n in usable if n != "triton" or not triton_obstacle(device, dtype))
    if impl not in table:
        raise ValueError(f"impl={impl!r}: expected one of auto, {', '.join(table)}")
    obstacle = triton_obstacle(device, dtype) if impl == "triton" else None
    if obstacle:
        raise ValueError(f"impl='triton': {obstacle}")
    return table[impl]


def triton_obstacle(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why Triton cannot run arguments of this kind, with the remedy."""
    if importlib.util.find_spec("triton") is None:
        return "expected the package triton, which is not installed; pip install triton"
    if dtype == torch.float64:
        return "expected float32, bfloat16 or float16, got float64; impl='torch' does float64"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "expected a CUDA tensor, got a CPU tensor; set TRITON_INTERPRET=1 before triton is "
            "imported to interpret it, or use impl='torch'"
        )
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The ops choose the dtypes of their products themselves, in backward too."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def refuse_second_derivative(op: str) -> None:
    """For backward: `RuntimeError` under create_graph=True, where a gradient without a graph would
    silently count as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: expected a backward pass without create_graph=True, its gradient has no "
            f"derivative; impl='reference' has one"
        )


def check_tensor(name: str, value: object) -> None:
    """`value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")


def check_float(name: str, value: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    """`value` is a plain floating tensor of `shape` (None: any size) on the device of `like`."""
    check_tensor(name, value)
    if hasattr(value, "placements"):
        raise ValueError(
            f"{name}: expected a plain tensor, got a sharded {type(value).__name__}; "
            f"call the op where the parameter is gathered (inside the root module's forward)"
        )
    if value.dtype not in FLOATS:
        raise ValueError(f"{name}: expected a floating dtype, got {value.dtype}")
    _check_place(name, value, shape, like)


def check_index(name: str, value: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    """`value` is an int64 tensor of `shape` on the device of `like`."""
    check_tensor(name, value)
    if value.dtype != torch.int64:
        raise ValueError(f"{name}: expected int64, got {value.dtype}")
    _check_place(name, value, shape, like)


def _check_place(name: str, value: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    got = tuple(value.shape)
    if len(got) != len(shape) or any(w not in (None, g) for g, w in zip(got, shape, strict=True)):
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{want}], got {list(got)}")
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {value.device}")
    if value.device.type == "meta":
        raise ValueError(f"{name}: expected a tensor with data, got one on the device meta")


def check_range(name: str, value: Tensor, stop: int) -> None:
    """Every entry lies in [0, stop)."""
    if value.numel():
        low, high = (int(bound) for bound in value.aminmax())
        if low < 0 or high >= stop:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: expected entries in [0, {stop}), got {bad}")


def check_sorted(name: str, value: Tensor) -> None:
    """Entries never decrease."""
    if bool((value[1:] < value[:-1]).any()):
        place = int((value[1:] < value[:-1]).nonzero()[0])
        pair = f"{int(value[place])} before {int(value[place + 1])}"
        raise ValueError(f"{name}: expected non-decreasing entries, got {pair} at {place}")


def check_finite(name: str, value: Tensor) -> None:
    """No NaN and no infinity."""
    finite = value.isfinite()
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        raise ValueError(f"{name}: expected finite numbers, got {float(value[place])} at {place}")


def check_number(name: str, value: float, low: float, *, open_low: bool = False) -> None:
    """`low <= value < inf`, or `low < value` with `open_low`."""
    sign = ">" if open_low else ">="
    given: object = value  # whatever came, and no tensor: comparing one waits for its device
    if not isinstance(given, numbers.Real):
        raise ValueError(
            f"{name}: expected a Python number {sign} {low}, got {value!r} of type "
            f"{type(value).__name__}; convert it with float()"
        )
    if not (low < value if open_low else low <= value) or value == float("inf"):
        raise ValueError(f"{name}: expected a finite number {sign} {low}, got {value}")


def check_count(name: str, value: int, low: int) -> None:
    """A whole number of at least `low`."""
    given: object = value
    if not isinstance(given, numbers.Integral) or value < low:
        raise ValueError(
            f"{name}: expected a whole number >= {low}, got {value!r} of type "
            f"{type(value).__name__}"
        )


def check_bias(bias_V: Tensor) -> None:
    """No NaN and no +inf; -inf forbids an id."""
    allowed_V = bias_V.detach() < torch.inf
    if not bool(allowed_V.all()):
        place = int((~allowed_V).nonzero()[0])
        raise ValueError(
            f"bias_V: expected finite numbers or -inf, got {float(bias_V[place])} at {place}"
        )


def check_allowed(action_A: Tensor, bias_V: Tensor | None) -> None:
    """No action is an id that the bias forbids: its log-probability is -inf, and no loss of it is
    finite."""
    if bias_V is not None and len(action_A):
        shut_A = bias_V.detach()[action_A] == -torch.inf
        if bool(shut_A.any()):
            bad = int(action_A[shut_A][0])
            raise ValueError(
                f"action_A (scored actions): expected ids that bias_V allows, got {bad}, whose "
                f"bias is -inf; give such actions weight 0"
            )


def check_head(
    hidden_RD: Tensor,
    head_VD: Tensor,
    action_A: Tensor,
    row_A: Tensor | None,
    temperature: float,
    bias_V: Tensor | None,
    softcap: float | None,
) -> None:
    """The arguments that `turn_surrogate` and `linear_logprob` share."""
    check_tensor("hidden_RD", hidden_RD)
    check_float("hidden_RD", hidden_RD, (None, None), hidden_RD)
    check_float("head_VD", head_VD, (None, hidden_RD.shape[1]), hidden_RD)
    if head_VD.dtype != hidden_RD.dtype:
        raise ValueError(f"head_VD: expected {hidden_RD.dtype} like hidden_RD, got {head_VD.dtype}")
    check_index("action_A", action_A, (None,), hidden_RD)
    check_range("action_A", action_A, head_VD.shape[0])
    if row_A is None:
        if hidden_RD.shape[0] != action_A.shape[0]:
            raise ValueError(
                f"action_A: expected one action for each of the {hidden_RD.shape[0]} rows of "
                f"hidden_RD, got {action_A.shape[0]}; pass row_A when they differ"
            )
    else:
        check_index("row_A", row_A, (action_A.shape[0],), hidden_RD)
        check_range("row_A", row_A, hidden_RD.shape[0])
        check_sorted("row_A", row_A)
    check_number("temperature", temperature, 0.0, open_low=True)
    if bias_V is not None:
        check_float("bias_V", bias_V, (head_VD.shape[0],), hidden_RD)
        check_bias(bias_V)
    if softcap is not None:
        check_number("softcap", softcap, 0.0, open_low=True)
