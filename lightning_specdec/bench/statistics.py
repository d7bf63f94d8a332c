"""Medians and ratios with bootstrap intervals, percentiles, means with their spread.

Repeats and prompts are samples, and each is resampled with replacement (Efron 1979). The variance of the logarithm,
corrected by n / (n - 1) (Hesterberg 2015, section 5.4), gets Student's t of its own degrees of freedom, and the
half-width is the root of sum(variance t^2) (Cochran 1964): percentiles of resamples are too narrow for few prompts.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

LEVEL = 0.95
RESAMPLES = 1000
WIDEST = 10.0
"""An interval that reaches further than this many times its value says nothing."""
_STEPS = 4000
"""Of the integral that gives the quantiles of Student's t."""


class Interval(NamedTuple):
    """An estimate and its interval at `LEVEL`; both ends are NaN where a single value shows no spread."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval; None where it says nothing: of a single value, or wider than `WIDEST`."""
        return (self.low, self.high) if self.high <= WIDEST * self.value else None


class Variance(NamedTuple):
    """Variance of an estimate over one of its samples, and its degrees of freedom."""

    value: float
    freedom: int


class Estimate(NamedTuple):
    """The logarithm of a positive figure, and its variances over repeats and prompts; None over a single one."""

    log: float
    repeats: Variance | None
    prompts: Variance | None

    @property
    def interval(self) -> Interval:
        """The figure with its interval at `LEVEL`."""
        value, low = math.exp(self.log), self.bound((1 - LEVEL) / 2)
        return Interval(value, low, value * (value / low) if low else math.inf)

    def bound(self, outside: float) -> float:
        """The lower bound with these odds of lying below it; NaN where there is no spread."""
        known = [each for each in (self.repeats, self.prompts) if each is not None]
        width = math.fsum(each.value * student(each.freedom, outside) ** 2 for each in known)
        return math.exp(self.log - math.sqrt(width)) if known else math.nan


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of independent positive values, with its interval."""
    return _estimate([_checked("values", [[value] for value in values])], seed=seed).interval


def ratio_estimate(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], *, seed: int = 0
) -> Estimate:
    """Ratio of sums over prompts of medians over repeats; a list with a value for each prompt for each repeat.

    Both sides are resampled together, so what they share (a machine that drifts, a prompt that is hard) does not widen
    the interval.

    Raises:
        ValueError: no values, sides of different shapes, or a value that is not positive and finite.
    """
    sides = [_checked(name, rows) for name, rows in (("numerators", numerators), ("denominators", denominators))]
    if sides[0].shape != sides[1].shape:
        shapes = " and ".join(f"{len(side)} x {side.shape[1]}" for side in sides)
        raise ValueError(f"numerators and denominators must pair, got {shapes} (repeats x prompts): give as many")
    return _estimate(sides, seed=seed)


@functools.cache
def student(freedom: int, outside: float) -> float:
    """The quantile of Student's t that a share of `outside` lies beyond.

    With t = sqrt(freedom) tan(angle) the density is that of cos(angle)^(freedom - 1), whose integral is summed up.
    """
    angles = torch.linspace(0, math.pi / 2, _STEPS + 1, dtype=torch.float64)
    inside = torch.cumulative_trapezoid(angles.cos() ** (freedom - 1), angles)
    wanted = (1 - 2 * outside) * inside[-1].item()
    place = int(torch.searchsorted(inside, wanted))
    below, above = inside[place - 1].item() if place else 0.0, inside[place].item()
    return math.sqrt(freedom) * math.tan((place + (wanted - below) / (above - below)) * math.pi / 2 / _STEPS)


def percentiles(values: Sequence[float], shares: Sequence[float] = (0.50, 0.95, 0.99)) -> tuple[float, ...]:
    """The values below which these shares of all values lie, interpolated linearly."""
    if not values or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"percentiles need values and shares in [0, 1], got {len(values)} values and {shares}")
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    return tuple(torch.quantile(ordered, torch.tensor(shares, dtype=torch.float64)).tolist())


def finite(value: float | None) -> float | None:
    """The number, or None for one that is not known."""
    return None if value is None or not math.isfinite(value) else value


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); the latter is NaN for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _checked(name: str, rows: Sequence[Sequence[float]]) -> Float[Tensor, "R P"]:
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        sizes = sorted({len(row) for row in rows})
        raise ValueError(f"{name} must have as many prompts in every repeat, at least one, got {sizes}")
    for value in (value for row in rows for value in row):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be finite and positive, got {value}")
    return torch.tensor(rows, dtype=torch.float64)


def _estimate(sides: Sequence[Float[Tensor, "R P"]], *, seed: int) -> Estimate:
    """Of the summed medians of the only side, or of their ratio; the same are drawn of both."""
    sizes = sides[0].shape
    every = [torch.arange(size)[None] for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    variances: list[Variance | None] = [None, None]
    for axis, size in enumerate(sizes):
        if size > 1:
            drawn = list(every)
            drawn[axis] = torch.randint(size, (RESAMPLES, size), generator=generator)
            variances[axis] = Variance(_logs(sides, *drawn).var().item() * size / (size - 1), size - 1)
    return Estimate(_logs(sides, *every).item(), *variances)


def _logs(
    sides: Sequence[Float[Tensor, "R P"]], repeats: Int[Tensor, "S R"], prompts: Int[Tensor, "T P"]
) -> Float[Tensor, " U"]:
    """Of each draw, of repeats or of prompts: the logarithm of the summed medians, or of their ratio."""
    low, high = (repeats.shape[1] - 1) // 2, repeats.shape[1] // 2
    logs = []
    for side in sides:
        ordered = side[repeats].sort(dim=1).values
        medians = (ordered[:, low] + ordered[:, high]) / 2
        totals = medians.sum(1) if len(prompts) == 1 else medians[0, prompts].sum(1)
        logs.append(totals.log())
    return logs[0] if len(logs) == 1 else logs[0] - logs[1]
