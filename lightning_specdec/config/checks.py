"""Checks of what a user hands in: each failure is a ValueError that says what was wrong, what was got, what to do."""

from __future__ import annotations

import math

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
"""What building a network from broken data raises of Python's own errors."""


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value`, if it is an integer from `low` to `high`."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
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
    """`value` as a float, if it is a finite number in [low, high], or in (low, high] with `low_open`."""
    interval = f"{'(' if low_open or math.isinf(low) else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")
    if not math.isfinite(value) or value > high or value < low or (low_open and value == low):
        raise ValueError(f"{name} must be in {interval}, got {value:g}")
    return float(value)
