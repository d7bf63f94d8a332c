"""The interval of a ratio of seconds: Student's t on the logarithm, over prompts and repeats."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

LEVEL = 0.95
"""Confidence level of intervals, if not given."""
WIDEST = 10.0
"""Intervals that end above this multiple of the value are not shown."""
MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median of normal samples / variance of their mean."""
MAX_EXPONENT = 700.0
"""Largest exponent whose exponential is finite in float64."""
_NUM_STEPS = 4000
"""Steps of the numerical integral for the quantiles of Student's t."""


class Interval(NamedTuple):
    """A ratio with its confidence interval.

    `low` and `high` are NaN for a single value, which shows no spread.
    """

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval; None if it is meaningless: for a single value, or beyond `WIDEST`."""
        # A comparison with NaN is false.
        if self.high <= WIDEST * self.value:
            return self.low, self.high
        return None


def ratio_interval(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    level: float = LEVEL,
) -> Interval:
    """Ratio of sums over prompts of medians over repeats, with its interval.

    Repeats and prompts are samples of the same ratio. The squared half-width of the logarithm is
    the sum of t^2 s^2 / n over both: s is the standard deviation of the n logarithms of ratios, one
    for each repeat or prompt, and t is Student's quantile for n - 1 degrees of freedom. The part of
    the repeats counts pi / 2 times, since a median varies more than a mean by that factor.

    Each ratio pairs both methods on the same prompt or in the same repeat. What they share, such as
    a machine that drifts or a difficult prompt, therefore does not widen the interval.

    Args:
        numerators, denominators: for each repeat, the positive seconds of each prompt.
        level: how often the interval contains the ratio.
    """
    top_seconds = torch.tensor(numerators, dtype=torch.float64)
    bottom_seconds = torch.tensor(denominators, dtype=torch.float64)
    top_total = top_seconds.quantile(0.5, dim=0).sum()
    bottom_total = bottom_seconds.quantile(0.5, dim=0).sum()
    value = (top_total / bottom_total).item()

    # Summed over repeats, a ratio for each prompt; summed over prompts, a ratio for each repeat.
    prompt_ratios = top_seconds.sum(0) / bottom_seconds.sum(0)
    repeat_ratios = top_seconds.sum(1) / bottom_seconds.sum(1)
    squared_width = _squared_half_width(prompt_ratios, level)
    squared_width += MEDIAN_VARIANCE * _squared_half_width(repeat_ratios, level)

    half_width = math.nan
    if top_seconds.numel() > 1:
        half_width = math.sqrt(squared_width)
    low = value * math.exp(-half_width)
    high = value * math.exp(min(half_width, MAX_EXPONENT))
    return Interval(value, low, high)


def _squared_half_width(ratios: torch.Tensor, level: float) -> float:
    """t^2 s^2 / n of the logarithms of n ratios; 0 for a single ratio."""
    num_ratios = len(ratios)
    if num_ratios < 2:
        return 0.0
    variance = ratios.log().var().item()
    quantile = student(num_ratios - 1, (1 - level) / 2)
    return float(quantile**2 * variance / num_ratios)


@functools.cache
def student(freedom: int, outside: float) -> float:
    """The quantile of Student's t that a draw exceeds with probability `outside`.

    With t = sqrt(freedom) tan(angle), the density is that of cos(angle)^(freedom - 1), which is
    integrated numerically. scipy would compute it too, but is not a dependency.
    """
    angles = torch.linspace(0, math.pi / 2, _NUM_STEPS + 1, dtype=torch.float64)
    cumulative = torch.cumulative_trapezoid(angles.cos() ** (freedom - 1), angles)
    target_area = (1 - 2 * outside) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target_area))
    return math.sqrt(freedom) * math.tan(angles[index + 1].item())
