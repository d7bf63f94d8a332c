"""The interval of a ratio of seconds: Student's t on the logarithm, over prompts and over repeats."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

LEVEL = 0.95
WIDEST = 10.0
"""Intervals wider than this many times the value are not shown."""
_STEPS = 4000
"""Of the integral that gives the quantiles of Student's t."""


class Interval(NamedTuple):
    """A figure with its interval; both ends are NaN where a single value shows no spread."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval; None where it says nothing: of a single value, or wider than `WIDEST`."""
        return (self.low, self.high) if self.high <= WIDEST * self.value else None


def ratio_interval(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    level: float = LEVEL,
) -> Interval:
    """Ratio of sums over prompts of medians over repeats, with its interval.

    Repeats and prompts are samples of the same ratio. The squared half-width of the logarithm is the sum of
    t^2 s^2 / n over both: s is the standard deviation of the n logarithms of ratios, one for each repeat or prompt,
    and t is Student's quantile for n - 1 degrees of freedom. The part of the repeats counts pi / 2 times, since a
    median varies more than a mean by that factor. Each ratio pairs both methods on the same prompt or in the same
    repeat, so what they share (a machine that drifts, a difficult prompt) does not widen the interval.

    Args:
        numerators, denominators: a list for each repeat, with the positive seconds of each prompt.
        level: how often the interval contains the ratio.
    """
    top, bottom = (torch.tensor(side, dtype=torch.float64) for side in (numerators, denominators))
    value = (top.quantile(0.5, dim=0).sum() / bottom.quantile(0.5, dim=0).sum()).item()
    width = 0.0
    for axis, factor in (
        (0, 1.0),
        (1, math.pi / 2),
    ):  # summed over repeats: by prompt; over prompts: by repeat
        logs = (top.sum(axis) / bottom.sum(axis)).log()
        if (number := len(logs)) > 1:
            width += factor * student(number - 1, (1 - level) / 2) ** 2 * logs.var().item() / number
    half = math.sqrt(width) if top.numel() > 1 else math.nan
    return Interval(value, value * math.exp(-half), value * math.exp(min(half, 700.0)))


@functools.cache
def student(freedom: int, outside: float) -> float:
    """The quantile of Student's t that a share of `outside` lies beyond.

    With t = sqrt(freedom) tan(angle) the density is that of cos(angle)^(freedom - 1), which is integrated numerically.
    """
    angles = torch.linspace(0, math.pi / 2, _STEPS + 1, dtype=torch.float64)
    inside = torch.cumulative_trapezoid(angles.cos() ** (freedom - 1), angles)
    place = int(torch.searchsorted(inside, (1 - 2 * outside) * inside[-1]))
    return math.sqrt(freedom) * math.tan(angles[place + 1].item())
