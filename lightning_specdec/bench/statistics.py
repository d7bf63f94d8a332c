"""Medians and ratios with bootstrap intervals, percentiles, means with their spread.

Theory: prompts are a sample, and repeats are one. Resampling either with replacement (Efron 1979) shows how far the
logarithm of the estimate moves with it; n values drawn from n move it too little, by sqrt((n - 1) / n) (Hesterberg
2015, "What Teachers Should Know About the Bootstrap", section 5.4). Each of the two variances gets Student's t of its
own degrees of freedom, and the interval's half-width is the root of sum(variance * t^2) (Cochran 1964): common degrees
of freedom would lend the repeats' many to prompts whose few happen to lie close. Percentiles of the resamples
themselves never leave what was seen: of few prompts they hold the truth in 80 to 90 of 100 cases, not 95.
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
"""An interval that ends further off than so many times its value says nothing."""
STEPS = 4000
"""Of the integral that gives the quantiles of Student's t."""


class Interval(NamedTuple):
    """An estimate, and what it lies between with `LEVEL`; both ends are NaN where a single value shows no spread."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """What it lies between; None where that says nothing: of a single value, or of so few that it may as well be
        `WIDEST` times as much."""
        return (self.low, self.high) if self.high <= WIDEST * self.value else None


class Variance(NamedTuple):
    """How far an estimate moves with one of the samples that it is of.

    Args:
        freedom: its degrees of freedom: those who were sampled, less one.
    """

    value: float
    freedom: int


class Estimate(NamedTuple):
    """A positive figure with its error.

    Args:
        log: its logarithm.
        repeats, prompts: of that, over either; None over a single one, which shows no spread.
    """

    log: float
    repeats: Variance | None
    prompts: Variance | None

    @property
    def interval(self) -> Interval:
        """What it lies between with `LEVEL`."""
        value, low = math.exp(self.log), self.bound((1 - LEVEL) / 2)
        return Interval(value, low, value * (value / low) if low else math.inf)

    def bound(self, outside: float) -> float:
        """The lower bound that it lies below with these odds; NaN where there is no spread."""
        known = [each for each in (self.repeats, self.prompts) if each is not None]
        if not known:
            return math.nan
        width = math.fsum(each.value * student(each.freedom, outside) ** 2 for each in known)
        return math.exp(self.log - math.sqrt(width))


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of independent values, with its interval.

    Raises:
        ValueError: no values, or one that is not positive and finite.
    """
    return _estimate([_checked("values", [[value] for value in values])], seed=seed).interval


def mean_interval(rows: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """The mean over prompts of their medians over the repeats, with its interval; a list for each repeat.

    Raises:
        ValueError: as `ratio_estimate`.
    """
    found = _estimate([_checked("values", rows)], seed=seed).interval
    return Interval(*(each / len(rows[0]) for each in found))


def ratio_estimate(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], *, seed: int = 0
) -> Estimate:
    """Median numerator / median denominator; both measured side by side.

    Give for each repeat a list with one value for each prompt: the prompts' medians over the repeats are summed.
    Repeats and prompts are resampled together on both sides, so what both sides share (a machine that drifts, a prompt
    that is hard) does not widen the interval.

    Raises:
        ValueError: no values, sides of different shapes, or a value that is not positive and finite.
    """
    sides = [_checked(name, rows) for name, rows in (("numerators", numerators), ("denominators", denominators))]
    if sides[0].shape != sides[1].shape:
        shapes = " and ".join(f"{len(side)} x {side.shape[1]}" for side in sides)
        raise ValueError(f"numerators and denominators must pair, got {shapes} (repeats x prompts): give as many")
    return _estimate(sides, seed=seed)


def middle(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each prompt the median over the repeats."""
    return [statistics.median(values) for values in zip(*rows, strict=True)]


@functools.cache
def student(freedom: int, outside: float) -> float:
    """The quantile of Student's t that a share of `outside` lies beyond.

    With t = sqrt(freedom) * tan(angle) the density is that of cos(angle)^(freedom - 1): its integral is summed up.
    """
    angles = torch.linspace(0, math.pi / 2, STEPS + 1, dtype=torch.float64)
    inside = torch.cumulative_trapezoid(angles.cos() ** (freedom - 1), angles)
    wanted = (1 - 2 * outside) * inside[-1].item()
    place = int(torch.searchsorted(inside, wanted))
    below, above = inside[place - 1].item() if place else 0.0, inside[place].item()
    return math.sqrt(freedom) * math.tan((place + (wanted - below) / (above - below)) * math.pi / 2 / STEPS)


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


def finite(value: float | None) -> float | None:
    """The number, or None for one that is not known."""
    return None if value is None or not math.isfinite(value) else value


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (of n - 1); the latter is NaN for a single value.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values must not be empty, got none: give at least one")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _checked(name: str, rows: Sequence[Sequence[float]]) -> Float[Tensor, "R P"]:
    if not rows or not rows[0]:
        raise ValueError(f"{name} must not be empty, got none: give at least one")
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{name} must have as many prompts in every repeat, got {sorted({len(row) for row in rows})}")
    for value in (value for row in rows for value in row):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be finite and positive, got {value}")
    return torch.tensor(rows, dtype=torch.float64)


def _estimate(sides: Sequence[Float[Tensor, "R P"]], *, seed: int) -> Estimate:
    """Of the summed medians of the only side, or of their ratio over the other's; the same are drawn of both."""
    sizes = sides[0].shape
    every = [torch.arange(size)[None] for size in sizes]
    log = _logs(sides, *every).item()
    generator = torch.Generator().manual_seed(seed)
    variances: list[Variance | None] = [None, None]
    for axis, size in enumerate(sizes):
        if size > 1:
            drawn = list(every)
            drawn[axis] = torch.randint(size, (RESAMPLES, size), generator=generator)
            variances[axis] = Variance(_logs(sides, *drawn).var().item() * size / (size - 1), size - 1)
    return Estimate(log, *variances)


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
