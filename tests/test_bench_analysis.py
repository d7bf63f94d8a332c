"""Laws of what a report says: speedups are of as many tokens, advice is proven, and what is missing is told."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_rows import cells_of, faster, report_of, row, standard, timed

from lightning_specdec.bench.rows import ResultRow, comparisons
from lightning_specdec.bench.statistics import Interval, ratio_interval
from lightning_specdec.report.answer import Advice, advise
from lightning_specdec.report.report import write

SURE = [1.8, 1.9, 2.0, 2.0, 2.0, 2.1, 2.2, 2.0]
UNSURE = [9.0, 9.0, 9.0, 9.0, 0.5, 0.5, 0.5, 9.0]


def advice_of(rows: Sequence[ResultRow], dtype: str | None = None) -> Advice:
    (found,) = advise(cells_of(rows), {"pair": dtype})
    return found


def speedup_of(rows: Sequence[ResultRow]) -> float | None:
    found = cells_of(rows)[1].walltime_speedup
    return None if found is None else found.value


def test_a_shorter_text_is_not_a_faster_method_and_a_batch_is_one_unit() -> None:
    plain = timed([1.0, 3.0, 2.0], "standard")
    assert speedup_of([plain, timed([0.5, 1.5, 1.0])]) == pytest.approx(2)
    assert speedup_of([plain, timed([0.25, 1.5, 1.0], tokens=[24, 48, 48])]) == pytest.approx(2)
    batches = [
        timed([1.0, 2.0, 3.0], method, batch_size=2) for method in ("standard", "speculative")
    ]
    batches = [replace(batches[0], seconds=5.0), replace(batches[1], seconds=2.5)]
    (cell,) = cells_of(batches)[1:]
    assert cell.timings == ([[2.0, 3.0]], [[1.0, 1.5]]), (
        "a batch ends with its last prompt; the rest is shared out"
    )


def test_a_failed_repeat_is_shown_and_the_others_stay_but_are_not_advised() -> None:
    rows = [standard(), faster(SURE), row(repeat=1, error="no memory")]
    cell = cells_of(rows)[1]
    assert (cell.error, len(cell.rows)) == ("no memory", 1) and advice_of(rows).best is None


def test_the_advice_names_the_choice_its_speedup_and_what_transformers_does_better() -> None:
    found = advice_of([standard(), faster(SURE), faster([1.2] * 8, num_draft_tokens=8)])
    value, low, high = (found.best and found.best.walltime_speedup) or (0.0, 0.0, 0.0)
    assert found.sentence == f"use ngram with window 4: {value:.2f}x [{low:.2f}, {high:.2f}]"
    assert found.pays and found.choice == "ngram with window 4"
    slower, theirs = (faster([each] * 8, "generate") for each in (1.5, 2.5))
    assert "transformers" not in advice_of([standard(), faster(SURE), slower]).sentence
    assert advice_of([standard(), faster(SURE), theirs]).sentence.endswith(
        "; faster: transformers' generate, 2.50x [2.50, 2.50]"
    )


def test_where_nothing_is_proven_the_advice_is_not_to_speculate() -> None:
    found = advice_of([standard(), faster([0.8] * 8)])
    assert found.sentence == "do not speculate: the best is ngram with window 4: 0.80x [0.80, 0.80]"
    assert not found.pays and found.choice == "off (best: ngram with window 4)"
    found = advice_of([standard(), faster(UNSURE)])
    assert found.sentence.startswith("ngram with window 4: too noisy to tell: ")
    assert found.sentence.endswith("; measure more prompts")
    assert not found.pays and found.choice == "undecided (best: ngram with window 4)"
    sure = faster([1.2] * 7 + [1.3], num_draft_tokens=1)
    found = advice_of([standard(), sure, faster(UNSURE)])
    assert found.sentence.startswith("use ngram with window 1: "), (
        "a proven choice goes before a faster one"
    )


@pytest.mark.parametrize(
    "bad", [{"lossless": False, "same_tokens": None}, {"same_tokens": False}, {"error": "no"}]
)
def test_what_changes_the_output_is_not_advised(bad: dict[str, Any]) -> None:
    wrong = replace(faster(SURE), **bad)
    assert advice_of([standard(), wrong], "float32").best is None
    assert (advice_of([standard(), wrong], "bfloat16").best is not None) == (
        "error" not in bad and "lossless" not in bad
    )
    both = advice_of([standard(), wrong, faster([1.5] * 8, num_draft_tokens=2)], "float32")
    assert both.best is not None and both.best.case.num_draft_tokens == 2


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_single_prompt_or_batch_proves_nothing_however_often_it_is_run(batch_size: int) -> None:
    prompts = 1 if batch_size == 1 else 8
    rows = [standard(prompts, batch_size=batch_size, repeat=i) for i in range(5)]
    rows += [faster([2.0 + i / 100] * prompts, batch_size=batch_size, repeat=i) for i in range(5)]
    found = advice_of(rows)
    assert not found.pays
    assert found.sentence == (
        "ngram with window 4: too few runs to tell: 2.02x; measure more prompts"
    )
    assert "too few runs to tell: 2.00x" in advice_of([rows[0], rows[5]]).sentence


def test_methods_that_gain_nothing_are_advised_in_one_run_of_twenty_at_most() -> None:
    """Twenty methods whose prompts are as often slower as faster. At odds of 5%, more than 8 of 50 runs would advise
    one in 1 of 1,000 cases; where each method is judged as if it were alone, about 20 do."""
    rng, advised = random.Random(0), 0
    for _ in range(50):
        rows = [standard(4, repeat=i) for i in range(2)]
        for window in range(1, 21):
            ratios = [rng.lognormvariate(0, 0.15) for _ in range(4)]
            times = [[each * rng.lognormvariate(0, 0.01) for each in ratios] for _ in range(2)]
            rows += [timed(each, num_draft_tokens=window, repeat=i) for i, each in enumerate(times)]
        advised += advise(comparisons(rows), {})[0].pays
    assert advised <= 8


def test_choices_within_noise_of_the_best_are_named() -> None:
    similar = [each + 0.02 for each in SURE]
    found = advice_of([standard(), faster(SURE), faster(similar, num_draft_tokens=2)])
    assert found.sentence.endswith("; too noisy to choose between this and ngram with window 4")
    many = [faster(SURE, num_draft_tokens=window) for window in range(1, 7)]
    assert advice_of([standard(), *many]).sentence.endswith(", 2 more")


def test_nothing_is_advised_against_while_one_choice_may_be_faster() -> None:
    found = advice_of([standard(), faster([0.8] * 8), faster(UNSURE, num_draft_tokens=2)])
    assert found.choice == "undecided (best: ngram with window 2)"


def test_transformers_methods_within_noise_are_not_called_faster() -> None:
    theirs = faster([1.6, 4.0] * 4, "generate")
    sentence = advice_of([standard(), faster(SURE), theirs]).sentence
    assert "; perhaps faster: transformers' generate, " in sentence


def test_a_single_run_is_not_advised_against() -> None:
    (line,) = report_of([standard(1), faster([0.6])]).lines
    assert "do not speculate" not in line
    assert line.endswith("ngram with window 4: too few runs to tell: 0.60x; measure more prompts")


def test_no_predictions_are_counted_where_none_was_made(tmp_path: Path) -> None:
    report = report_of([standard(), faster(SURE, num_draft_tokens="auto")])
    assert report.predicted == ""
    assert "predictions" not in write(report, tmp_path).read_text(encoding="utf-8")
    report = report_of([standard(), faster(SURE)])
    assert report.predicted.endswith(" of 1 predictions are within 10% of the measured speedup.")


TRUE_RATIO = 1.8


def timings(
    rng: random.Random, repeats: int, prompts: int, *, runs: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of two methods: a machine that drifts by 10%, noise of 3%, prompts with ratios of a known mean.

    Args:
        runs: noise that all prompts of a run share.
    """
    ratios = [
        TRUE_RATIO * rng.lognormvariate(-(0.15**2) / 2, 0.15 * (prompts > 1))
        for _ in range(prompts)
    ]
    slow, fast = [], []
    for _ in range(repeats):
        drift = rng.lognormvariate(0, 0.1)
        mine, its = (drift * rng.lognormvariate(0, runs) for _ in range(2))
        slow.append([ratio * mine * rng.lognormvariate(0, 0.03) for ratio in ratios])
        fast.append([its * rng.lognormvariate(0, 0.03) for _ in ratios])
    return slow, fast


@pytest.mark.parametrize(
    ("prompts", "repeats", "runs"), [(4, 3, 0.01), (9, 3, 0.01), (9, 3, 0.2), (1, 6, 0.2)]
)
def test_an_interval_contains_the_truth_in_95_of_100_cases(
    prompts: int, repeats: int, runs: float
) -> None:
    """With other seeds, fewer than 178 of 200 would at a true coverage of 0.95 in 1 of 5,000 cases."""
    rng = random.Random(1)
    intervals = [ratio_interval(*timings(rng, repeats, prompts, runs=runs)) for _ in range(200)]
    assert sum(low <= TRUE_RATIO <= high for _, low, high in intervals) >= 178
    assert (
        sum(low <= 10 * TRUE_RATIO <= high for _, low, high in intervals) < 20
    )  # not by containing everything


def test_what_both_sides_share_is_not_in_the_interval() -> None:
    drifting = [[1.0, 20.0], [1.5, 30.0], [2.0, 40.0], [0.7, 14.0]]
    exact = ratio_interval([[1.8 * each for each in row] for row in drifting], drifting)
    assert exact == pytest.approx((1.8, 1.8, 1.8))


def test_one_value_has_no_interval_and_a_wide_one_is_not_shown() -> None:
    value, low, high = ratio_interval([[3.0]], [[2.0]])
    assert (value, math.isnan(low), math.isnan(high)) == (pytest.approx(1.5), True, True)
    assert Interval(2.0, 1.0, 4.0).ends == (1.0, 4.0)
    for low, high in ((0.0, 4334.0), (0.0, math.inf), (math.nan, math.nan)):
        assert Interval(1.5, low, high).ends is None
