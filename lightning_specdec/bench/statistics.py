"""The interval of a ratio of seconds: Student's t on its logarithm, over independent units.

Every interval of a speedup comes from here. Units are blocks of pieces that alternated
(`piece_interval`), or prompts and repeats (`ratio_interval`).
"""

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
NUM_BLOCKS = 8
"""Blocks that pieces are summed into, long enough to be independent of each other."""
_NUM_STEPS = 4000
"""Steps of the numerical integral for the quantiles of Student's t."""


Pair = tuple[float, float]
"""Seconds of standard decoding and of another method for the same tokens."""


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


def piece_interval(pairs: Sequence[Pair], *, level: float = LEVEL) -> Interval:
    """Ratio of sums over pieces that alternated, with its interval.

    A burst of load outlasts a piece, so neighboring pieces are not independent. The pieces are
    therefore summed into `NUM_BLOCKS` consecutive blocks, which are the units of the interval.
    Simulations with drift and bursts show that it contains the ratio in its share of cases.

    Args:
        pairs: for each piece, the positive seconds of both methods, in the order measured.
        level: how often the interval contains the ratio.
    """
    seconds = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    num_blocks = min(NUM_BLOCKS, len(seconds))
    blocks = torch.stack([block.sum(0) for block in torch.tensor_split(seconds, num_blocks)])
    top_seconds, bottom_seconds = blocks.unbind(1)
    value = (top_seconds.sum() / bottom_seconds.sum()).item()
    squared_width = _squared_half_width(top_seconds, bottom_seconds, level)
    return _interval(value, squared_width, has_spread=len(seconds) > 1)


def relative_interval(
    pairs: Sequence[Pair],
    other_pairs: Sequence[Pair],
    *,
    level: float = LEVEL,
) -> Interval:
    """How much faster one method is than another that took turns with it, with an interval.

    Both took turns with the same standard decoding. What its timings have in common, such as a
    piece of text where every draft fails, does not widen the interval.

    Args:
        pairs, other_pairs: for each turn, the seconds of standard decoding and of the method for
            the same tokens; zeros for a turn in which a method ran no piece.
    """
    seconds = torch.tensor([pairs, other_pairs], dtype=torch.float64).reshape(2, -1, 2)
    num_blocks = min(NUM_BLOCKS, seconds.shape[1])
    blocks = torch.stack([part.sum(1) for part in torch.tensor_split(seconds, num_blocks, dim=1)])
    totals = blocks.sum(0)
    speedups = totals[:, 0] / totals[:, 1]
    value = (speedups[0] / speedups[1]).item()

    shares = blocks / blocks.mean(0)
    deviations = shares[:, :, 0] - shares[:, :, 1]
    squared_width = _squared_width(deviations[:, 0] - deviations[:, 1], level)
    return _interval(value, squared_width, has_spread=seconds.shape[1] > 1)


def ratio_interval(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    level: float = LEVEL,
) -> Interval:
    """Ratio of sums over prompts of medians over repeats, with its interval.

    Repeats and prompts are samples of the same ratio. The squared half-width of the logarithm is
    the sum of t^2 s^2 / n over both, see `_squared_half_width`. The part of the repeats counts
    pi / 2 times, since a median varies more than a mean by that factor.

    Each sample pairs both methods on the same prompt or in the same repeat. What they share, such
    as a machine that drifts or a difficult prompt, therefore does not widen the interval.

    Args:
        numerators, denominators: for each repeat, the positive seconds of each prompt.
        level: how often the interval contains the ratio.
    """
    top_seconds = torch.tensor(numerators, dtype=torch.float64)
    bottom_seconds = torch.tensor(denominators, dtype=torch.float64)
    top_total = top_seconds.quantile(0.5, dim=0).sum()
    bottom_total = bottom_seconds.quantile(0.5, dim=0).sum()
    value = (top_total / bottom_total).item()

    # Summed over repeats, a sample for each prompt; summed over prompts, one for each repeat.
    squared_width = _squared_half_width(top_seconds.sum(0), bottom_seconds.sum(0), level)
    repeat_width = _squared_half_width(top_seconds.sum(1), bottom_seconds.sum(1), level)
    squared_width += MEDIAN_VARIANCE * repeat_width
    return _interval(value, squared_width, has_spread=top_seconds.numel() > 1)


def _interval(value: float, squared_width: float, *, has_spread: bool) -> Interval:
    half_width = math.sqrt(squared_width) if has_spread else math.nan
    low = value * math.exp(-min(half_width, MAX_EXPONENT))
    high = value * math.exp(min(half_width, MAX_EXPONENT))
    return Interval(value, low, high)


def _squared_half_width(tops: torch.Tensor, bottoms: torch.Tensor, level: float) -> float:
    """t^2 s^2 / n of the logarithm of sum(tops) / sum(bottoms); 0 for a single sample.

    Each sample moves the logarithm by top / mean(tops) - bottom / mean(bottoms), in first order.
    Their standard deviation is s. The mean of the samples' own logarithms would not do: where one
    side has rare slow samples, it varies less than the ratio of the sums.
    """
    return _squared_width(tops / tops.mean() - bottoms / bottoms.mean(), level)


def _squared_width(deviations: torch.Tensor, level: float) -> float:
    """t^2 s^2 / n of deviations whose mean is 0; 0 for a single one."""
    num_samples = len(deviations)
    if num_samples < 2:
        return 0.0
    variance = deviations.square().sum().item() / (num_samples - 1)
    quantile = student(num_samples - 1, (1 - level) / 2)
    return float(quantile**2 * variance / num_samples)


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


def may_be_as_high(interval: Interval | None, other: Interval | None) -> bool:
    """Whether a ratio may be as high as another one: its interval reaches that of the other.

    Without an interval, its value must reach it.
    """
    if interval is None or other is None:
        return True
    upper_end = interval.value if math.isnan(interval.high) else interval.high
    # A comparison with NaN is false: if the other one has no interval, nothing is proven.
    return not upper_end < other.low
