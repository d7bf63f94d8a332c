"""Laws of bench/statistics.py: intervals hold the truth as often as they say, pairing pays, small cases by hand."""

import math
import random

import pytest

from lightning_specdec.bench.statistics import (
    Estimate,
    Interval,
    Variance,
    mean_std,
    median_interval,
    percentiles,
    ratio_estimate,
    student,
)

TRUE_RATIO = 1.8


def timings(
    rng: random.Random, repeats: int, prompts: int, *, runs: float = 0.01
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of two methods: a machine that drifts by 10%, noise of 3%, prompts with ratios of a known mean.

    Args:
        runs: noise that all prompts of a run share.
    """
    ratios = [TRUE_RATIO * rng.lognormvariate(-(0.15**2) / 2, 0.15) for _ in range(prompts)]
    slow, fast = [], []
    for _ in range(repeats):
        drift = rng.lognormvariate(0, 0.1)
        mine, its = (drift * rng.lognormvariate(0, runs) for _ in range(2))
        slow.append([ratio * mine * rng.lognormvariate(0, 0.03) for ratio in ratios])
        fast.append([its * rng.lognormvariate(0, 0.03) for _ in ratios])
    return slow, fast


def even(rng: random.Random, prompts: int) -> tuple[list[list[float]], list[list[float]]]:
    """Five repeats of two methods that are as fast as each other, but not on every prompt."""
    ratios = [rng.lognormvariate(0, 0.3) for _ in range(prompts)]
    slow = [[rng.lognormvariate(0, 0.1) for _ in ratios] for _ in range(5)]
    return slow, [[ratio * rng.lognormvariate(0, 0.1) for ratio in ratios] for _ in range(5)]


@pytest.mark.parametrize("prompts", [4, 6, 9])
def test_an_interval_on_a_ratio_holds_the_truth_in_95_of_100_cases(prompts: int) -> None:
    """With another seed, fewer than 178 of 200 would at a true coverage of 0.95 in 1 of 5,000 cases, and 178 or more in
    1 of 80 cases at the 0.83 that percentiles of the resamples have of four prompts."""
    rng, found, width = random.Random(0), 0, 0.0
    for seed in range(200):
        interval = ratio_estimate(*timings(rng, 3, prompts), seed=seed).interval
        found += interval.low <= TRUE_RATIO <= interval.high
        width += (interval.high - interval.low) / 200
    assert found >= 178
    assert width < 4 * TRUE_RATIO * 0.15 * student(prompts - 1, 0.025) / math.sqrt(prompts)  # not by holding everything


def test_what_all_prompts_of_a_run_share_is_in_the_interval() -> None:
    """Nine prompts would say that they know the ratio well; three runs that differ by 20% do not. Odds as above."""
    rng = random.Random(1)
    intervals = [ratio_estimate(*timings(rng, 3, 9, runs=0.2), seed=seed).interval for seed in range(200)]
    assert sum(low <= TRUE_RATIO <= high for _, low, high in intervals) >= 178


@pytest.mark.parametrize("number", [4, 15])
def test_an_interval_on_a_median_holds_the_truth_in_95_of_100_cases(number: int) -> None:
    rng = random.Random(0)
    intervals = [median_interval([rng.lognormvariate(0, 0.5) for _ in range(number)], seed=i) for i in range(200)]
    assert sum(low <= 1 <= high for _, low, high in intervals) >= 178
    assert sum(low <= 10 <= high for _, low, high in intervals) < 20  # ten times the truth is nearly always outside


@pytest.mark.parametrize(
    ("freedom", "outside", "expected"),
    [(1, 0.025, 12.7062), (3, 0.025, 3.18245), (8, 0.025, 2.30600), (2, 0.001, 22.3271)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom: int, outside: float, expected: float) -> None:
    assert student(freedom, outside) == pytest.approx(expected, rel=1e-5)


def test_prompts_that_happen_to_lie_close_borrow_no_certainty_from_the_repeats() -> None:
    """Two prompts have one degree of freedom however many repeats there are: of each variance its own quantile."""
    found = Estimate(0.1, Variance(0.01**2, 4), Variance(0.002**2, 1))
    width = math.hypot(0.01 * 2.776445, 0.002 * 12.706205)
    assert found.interval.low == pytest.approx(math.exp(0.1 - width)) and found.bound(0.0025) < 1
    assert found.interval.high == pytest.approx(math.exp(0.1 + width))
    rng, prompts = random.Random(2), 2
    advised = sum(ratio_estimate(*even(rng, prompts), seed=i).bound(0.025) > 1 for i in range(200))
    assert advised <= 11, (
        "2.5%: 12 or more in 1 of 100 cases; at the 5.7% that a common quantile has, 11 or less in 1 of 2"
    )


def test_an_interval_that_may_as_well_be_ten_times_as_much_says_nothing() -> None:
    assert Interval(2.0, 1.0, 4.0).ends == (1.0, 4.0)
    for low, high in ((0.0, 4334.0), (0.0, math.inf), (math.nan, math.nan)):
        assert Interval(1.5, low, high).ends is None


def test_pairing_takes_what_both_sides_share_out_of_the_interval() -> None:
    rng = random.Random(1)
    slow, fast = timings(rng, 6, 12)
    hard = [rng.lognormvariate(0, 0.5) for _ in range(12)]
    slow, fast = (
        [[value * each for value, each in zip(row, hard, strict=True)] for row in side] for side in (slow, fast)
    )
    paired = ratio_estimate(slow, fast)
    apart = ratio_estimate(slow, [[row[(i + 5) % 12] for i in range(12)] for row in fast])
    assert paired.prompts and apart.prompts and paired.prompts.value < apart.prompts.value / 4
    drifting = [[1.0], [1.5], [2.0], [3.0], [0.7]]
    exact = ratio_estimate([[1.8 * each for each in row] for row in drifting], drifting).interval
    assert exact == pytest.approx((1.8, 1.8, 1.8))


def test_a_ratio_is_of_the_prompts_medians_summed() -> None:
    numerators = [[1.0, 10.0], [3.0, 30.0], [2.0, 20.0]]
    assert ratio_estimate(numerators, [[1.0, 1.0]] * 3).interval.value == pytest.approx((2 + 20) / 2)
    assert median_interval([3.0, 1.0, 2.0, 10.0]).value == pytest.approx(2.5)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = [float(i) ** 1.5 for i in range(1, 13)]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)
    assert median_interval(values, seed=3) != median_interval(values, seed=4)


def test_one_value_has_no_interval() -> None:
    value, low, high = ratio_estimate([[3.0]], [[2.0]]).interval
    assert (value, math.isnan(low), math.isnan(high)) == (pytest.approx(1.5), True, True)
    assert math.isnan(mean_std([5.0])[1])


def test_percentiles_and_spread_by_hand() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0], (0.0, 0.5, 1.0)) == (1.0, 2.5, 4.0)
    assert percentiles(range(101)) == (50, 95, 99)
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: median_interval([]), "at least one"),
        (lambda: median_interval([1.0, math.nan]), "values must be finite and positive, got nan"),
        (lambda: ratio_estimate([[1.0]], [[0.0]]), "denominators must be finite and positive, got 0.0"),
        (lambda: ratio_estimate([[1.0]], [[1.0], [2.0]]), "must pair, got 1 x 1 and 2 x 1"),
        (lambda: ratio_estimate([[1.0], [1.0, 2.0]], [[1.0], [1.0]]), "as many prompts in every repeat"),
        (lambda: percentiles([]), "percentiles need values"),
        (lambda: percentiles([1.0], [95]), "shares in"),
    ],
)
def test_bad_input_is_refused_with_one_line(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
