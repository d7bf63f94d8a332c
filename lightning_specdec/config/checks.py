"""Checks of values that a user passes. Each failure is a ValueError with the cause and a remedy."""

from __future__ import annotations

import math
import os

BUILTIN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Python's own errors that building a network from corrupt data can raise."""


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is an integer from `low` to `high`.

    Raises:
        ValueError: it is not.
    """
    if high is None:
        bounds = f"at least {low}"
    else:
        bounds = f"from {low} to {high}"

    # bool is a subclass of int, but True is never meant as a number here.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return value


def require_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """Return `value` as a float if it is a finite number in the interval.

    Args:
        low_open: whether the interval excludes `low`.

    Raises:
        ValueError: it is not a number, not finite, or outside the interval.
    """
    opening = "(" if low_open or math.isinf(low) else "["
    closing = ")" if math.isinf(high) else "]"
    interval = f"{opening}{low:g}, {high:g}{closing}"

    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")

    is_too_low = value < low or (low_open and value == low)
    if not math.isfinite(value) or is_too_low or value > high:
        raise ValueError(f"{name} must be in {interval}, got {value:g}")
    return float(value)


def environment_key(variable: str | None) -> str | None:
    """The key in an environment variable, as `--api_key_env` names it; None without a variable.

    Raises:
        ValueError: the variable is not set, or is empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"the environment variable {variable} holds no key: set it, or drop --api_key_env"
        )
    return key
