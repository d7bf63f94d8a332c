"""Medians and ratios with bootstrap intervals, percentiles, means with their spread.

Knows nothing of what the numbers are: numbers in, numbers out.

Theory: the interval holds what resampling the data with replacement gives in 95 of 100 cases (Efron 1979). Few values
give too short an interval so; its ends are moved out as far as Student's t is wider than the normal distribution, and
by sqrt(n / (n - 1)) (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5.4).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

LEVEL = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    """An estimate, and what it lies between with `LEVEL`; both ends are NaN where a single value shows no spread."""

    value: float
    low: float
    high: float


def median_interval(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The median of independent values, with its bootstrap interval.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    data = _checked("values", [[value] for value in values])
    return _interval([data], seed=seed, resamples=resamples)


def ratio_interval(
    numerators: Sequence[float] | Sequence[Sequence[float]],
    denominators: Sequence[float] | Sequence[Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Median numerator / median denominator, with its bootstrap interval; both measured side by side.

    Give one value for each repeat, or for each repeat a list with one for each prompt: then the prompts' medians over
    the repeats are summed. Repeats and prompts are resampled together on both sides, so what both sides share (a
    machine that drifts, a prompt that is long) does not widen the interval.

    Raises:
        ValueError: no values, sides of different shapes, or a value that is not positive and finite.
    """
    sides = [
        _checked(name, [[row] if isinstance(row, int | float) else row for row in rows], positive=True)
        for name, rows in (("numerators", numerators), ("denominators", denominators))
    ]
    if sides[0].shape != sides[1].shape:
        shapes = " and ".join(f"{len(side)} x {side.shape[1]}" for side in sides)
        raise ValueError(f"numerators and denominators must pair, got {shapes} (repeats x prompts): give as many")
    return _interval(sides, seed=seed, resamples=resamples)


def percentiles(values: Sequence[float], shares: Sequence[float] = (0.50, 0.95, 0.99)) -> tuple[float, ...]:
    """The values below which these shares of all values lie, straight lines drawn between neighbours.

    Raises:
        ValueError: no values, or a share outside [0, 1].
    """
    if not values:
        raise ValueError("values must not be empty, got none: give at least one")
    ordered = sorted(values)
    found = []
    for share in shares:
        if not 0 <= share <= 1:
            raise ValueError(f"a share must lie in [0, 1], got {share}: give 0.95 for 95%")
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
    return tuple(found)


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (of n - 1); the latter is NaN for a single value.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values must not be empty, got none: give at least one")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _checked(name: str, rows: Sequence[Sequence[float]], *, positive: bool = False) -> Float[Tensor, "R P"]:
    if not rows or not rows[0]:
        raise ValueError(f"{name} must not be empty, got none: give at least one")
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{name} must have as many prompts in every repeat, got {sorted({len(row) for row in rows})}")
    for value in (value for row in rows for value in row):
        if not math.isfinite(value) or (positive and value <= 0):
            raise ValueError(f"{name} must be finite{' and positive' if positive else ''}, got {value}")
    return torch.tensor(rows, dtype=torch.float64)


def _interval(sides: Sequence[Float[Tensor, "R P"]], *, seed: int, resamples: int) -> Interval:
    """The summed medians of the only side, or their ratio over the other's; the same are drawn of both."""
    num_repeats, num_prompts = sides[0].shape
    every = [torch.arange(size)[None] for size in (num_repeats, num_prompts)]
    value = _estimate(sides, *every).item()
    if num_repeats * num_prompts == 1:
        return Interval(value, math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(size, (resamples, size), generator=generator) for size in (num_repeats, num_prompts)]
    estimates = _estimate(sides, *drawn).tolist()
    outside = _share_outside(num_prompts if num_prompts > 1 else num_repeats)
    low, high = percentiles(estimates, (outside, 1 - outside))
    return Interval(value, low, high)


def _estimate(
    sides: Sequence[Float[Tensor, "R P"]], repeats: Int[Tensor, "S R"], prompts: Int[Tensor, "S P"]
) -> Float[Tensor, " S"]:
    """Of each draw: medians over its repeats, summed over its prompts; with two sides the first's over the second's."""
    middle = repeats.shape[1] // 2, (repeats.shape[1] - 1) // 2
    totals = []
    for side in sides:
        ordered = side[repeats].sort(dim=1).values
        medians = (ordered[:, middle[0]] + ordered[:, middle[1]]) / 2
        totals.append(medians.expand(len(prompts), -1).gather(1, prompts).sum(1))
    return totals[0] if len(totals) == 1 else totals[0] / totals[1]


def _share_outside(number: int) -> float:
    """The share of resamples that lies beyond each end, for so many independent values."""
    normal, freedom = statistics.NormalDist(), number - 1
    z = normal.inv_cdf((1 + LEVEL) / 2)
    terms = (  # Student's t from the normal quantile (Abramowitz and Stegun 1964, 26.7.5)
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
    )
    return normal.cdf(-math.sqrt(number / freedom) * math.fsum(terms))
