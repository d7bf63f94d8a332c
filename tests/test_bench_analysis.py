"""Laws of a report's answers: speedups are of equally many tokens, advice is proven, and what is
missing is named."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_records import cells_of, faster, report_of, row, standard, timed

from lightning_specdec.bench.records import Record, comparisons
from lightning_specdec.bench.statistics import Interval, ratio_interval
from lightning_specdec.report.answer import Advice, advise
from lightning_specdec.report.report import write

SURE = [1.8, 1.9, 2.0, 2.0, 2.0, 2.1, 2.2, 2.0]
UNSURE = [9.0, 9.0, 9.0, 9.0, 0.5, 0.5, 0.5, 9.0]


def advice_of(rows: Sequence[Record], dtype: str | None = None) -> Advice:
    (advice,) = advise(cells_of(rows), {"pair": dtype})
    return advice


def speedup_of(rows: Sequence[Record]) -> float | None:
    _, cell = cells_of(rows)
    speedup = cell.walltime_speedup
    return None if speedup is None else speedup.value


def test_a_shorter_text_is_not_a_faster_method() -> None:
    plain = timed([1.0, 3.0, 2.0], "standard")
    same_length = timed([0.5, 1.5, 1.0])
    half_as_long = timed([0.25, 1.5, 1.0], tokens=[24, 48, 48])
    assert speedup_of([plain, same_length]) == pytest.approx(2)
    assert speedup_of([plain, half_as_long]) == pytest.approx(2)


def test_a_batch_is_one_unit() -> None:
    plain = replace(timed([1.0, 2.0, 3.0], "standard", batch_size=2), seconds=5.0)
    speculative = replace(timed([1.0, 2.0, 3.0], batch_size=2), seconds=2.5)
    _, cell = cells_of([plain, speculative])
    assert cell.timings == ([[2.0, 3.0]], [[1.0, 1.5]]), (
        "a batch ends with its last prompt; the rest is shared out"
    )


def test_a_failed_repeat_is_shown_and_the_others_stay_but_are_not_advised() -> None:
    rows = [standard(), faster(SURE), row(repeat=1, error="no memory")]
    _, cell = cells_of(rows)
    assert cell.error == "no memory"
    assert len(cell.rows) == 1
    assert advice_of(rows).best is None


def test_the_advice_names_the_choice_and_its_speedup() -> None:
    advice = advice_of([standard(), faster(SURE), faster([1.2] * 8, num_draft_tokens=8)])
    assert advice.best is not None
    assert advice.best.walltime_speedup is not None
    value, low, high = advice.best.walltime_speedup
    assert advice.sentence == f"use ngram with window 4: {value:.2f}x [{low:.2f}, {high:.2f}]"
    assert advice.pays
    assert advice.choice == "ngram with window 4"


def test_the_advice_names_what_transformers_does_better() -> None:
    slower = faster([1.5] * 8, "generate")
    assert "transformers" not in advice_of([standard(), faster(SURE), slower]).sentence

    much_faster = faster([2.5] * 8, "generate")
    sentence = advice_of([standard(), faster(SURE), much_faster]).sentence
    assert sentence.endswith("; faster: transformers' generate, 2.50x [2.50, 2.50]")

    within_noise = faster([1.6, 4.0] * 4, "generate")
    sentence = advice_of([standard(), faster(SURE), within_noise]).sentence
    assert "; perhaps faster: transformers' generate, " in sentence


def test_if_all_choices_are_proven_slower_the_advice_is_not_to_speculate() -> None:
    advice = advice_of([standard(), faster([0.8] * 8)])
    assert (
        advice.sentence == "do not speculate: the best is ngram with window 4: 0.80x [0.80, 0.80]"
    )
    assert not advice.pays
    assert advice.choice == "off (best: ngram with window 4)"


def test_if_nothing_is_proven_the_advice_is_to_measure_more() -> None:
    advice = advice_of([standard(), faster(UNSURE)])
    assert advice.sentence.startswith("ngram with window 4: too noisy to tell: ")
    assert advice.sentence.endswith("; measure more prompts")
    assert not advice.pays
    assert advice.choice == "undecided (best: ngram with window 4)"


def test_nothing_is_advised_against_while_one_choice_may_be_faster() -> None:
    advice = advice_of([standard(), faster([0.8] * 8), faster(UNSURE, num_draft_tokens=2)])
    assert advice.choice == "undecided (best: ngram with window 2)"


def test_a_proven_choice_precedes_one_that_seems_faster() -> None:
    proven = faster([1.2] * 7 + [1.3], num_draft_tokens=1)
    advice = advice_of([standard(), proven, faster(UNSURE)])
    assert advice.sentence.startswith("use ngram with window 1: ")
    assert advice.sentence.endswith("; too noisy to choose between this and ngram with window 4")


def test_choices_within_noise_of_the_best_are_named() -> None:
    similar = [speedup + 0.02 for speedup in SURE]
    advice = advice_of([standard(), faster(SURE), faster(similar, num_draft_tokens=2)])
    assert advice.sentence.startswith("use ngram with window 2: ")
    assert advice.sentence.endswith("; too noisy to choose between this and ngram with window 4")

    six_equal = [faster(SURE, num_draft_tokens=window) for window in range(1, 7)]
    assert advice_of([standard(), *six_equal]).sentence.endswith(", 2 more")


@pytest.mark.parametrize(
    "fault", [{"lossless": False, "same_tokens": None}, {"same_tokens": False}, {"error": "no"}]
)
def test_what_changes_the_output_is_not_advised(fault: dict[str, Any]) -> None:
    wrong = replace(faster(SURE), **fault)
    assert advice_of([standard(), wrong], "float32").best is None
    # In bfloat16, rounding explains other tokens, and nothing else.
    is_allowed = "error" not in fault and "lossless" not in fault
    assert (advice_of([standard(), wrong], "bfloat16").best is not None) == is_allowed

    right = faster([1.5] * 8, num_draft_tokens=2)
    advice = advice_of([standard(), wrong, right], "float32")
    assert advice.best is not None
    assert advice.best.case.num_draft_tokens == 2


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_single_prompt_or_batch_proves_nothing_however_often_it_is_run(batch_size: int) -> None:
    num_prompts = 1 if batch_size == 1 else 8
    standard_rows = []
    faster_rows = []
    for repeat in range(5):
        speedups = [2.0 + repeat / 100] * num_prompts
        standard_rows.append(standard(num_prompts, batch_size=batch_size, repeat=repeat))
        faster_rows.append(faster(speedups, batch_size=batch_size, repeat=repeat))

    advice = advice_of([*standard_rows, *faster_rows])
    assert not advice.pays
    assert advice.sentence == (
        "ngram with window 4: too few runs to tell: 2.02x; measure more prompts"
    )
    single_run = advice_of([standard_rows[0], faster_rows[0]])
    assert "too few runs to tell: 2.00x" in single_run.sentence


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


def test_methods_that_gain_nothing_are_advised_in_one_run_of_twenty_at_most() -> None:
    """Twenty methods whose prompts are as often slower as faster.

    At odds of 5%, more than 8 of 50 runs would advise one in 1 of 1,000 cases. If each method is
    judged without regard to the others, about 20 runs do.
    """
    rng = random.Random(0)
    num_advised = 0
    for _ in range(50):
        rows = [standard(4, repeat=repeat) for repeat in range(2)]
        for window in range(1, 21):
            ratios = [rng.lognormvariate(0, 0.15) for _ in range(4)]
            for repeat in range(2):
                prompt_seconds = [ratio * rng.lognormvariate(0, 0.01) for ratio in ratios]
                rows.append(timed(prompt_seconds, num_draft_tokens=window, repeat=repeat))
        (advice,) = advise(comparisons(rows), {})
        num_advised += advice.pays
    assert num_advised <= 8


TRUE_RATIO = 1.8


def timings(
    rng: random.Random,
    num_repeats: int,
    num_prompts: int,
    *,
    run_noise: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of two methods: a machine that drifts by 10%, noise of 3%, prompts with ratios of a
    known mean.

    Args:
        run_noise: noise that all prompts of a run share.
    """
    prompt_noise = 0.15 if num_prompts > 1 else 0.0
    ratios = []
    for _ in range(num_prompts):
        ratios.append(TRUE_RATIO * rng.lognormvariate(-(0.15**2) / 2, prompt_noise))

    slow_seconds = []
    fast_seconds = []
    for _ in range(num_repeats):
        drift = rng.lognormvariate(0, 0.1)
        slow_scale = drift * rng.lognormvariate(0, run_noise)
        fast_scale = drift * rng.lognormvariate(0, run_noise)
        slow_seconds.append([ratio * slow_scale * rng.lognormvariate(0, 0.03) for ratio in ratios])
        fast_seconds.append([fast_scale * rng.lognormvariate(0, 0.03) for _ in ratios])
    return slow_seconds, fast_seconds


@pytest.mark.parametrize(
    ("num_prompts", "num_repeats", "run_noise"),
    [(4, 3, 0.01), (9, 3, 0.01), (9, 3, 0.2), (1, 6, 0.2)],
)
def test_an_interval_contains_the_truth_in_95_of_100_cases(
    num_prompts: int,
    num_repeats: int,
    run_noise: float,
) -> None:
    """With other seeds, fewer than 178 of 200 would at a true coverage of 0.95 in 1 of 5,000
    cases."""
    rng = random.Random(1)
    num_with_truth = 0
    num_with_wrong_ratio = 0
    for _ in range(200):
        slow_seconds, fast_seconds = timings(rng, num_repeats, num_prompts, run_noise=run_noise)
        _, low, high = ratio_interval(slow_seconds, fast_seconds)
        num_with_truth += low <= TRUE_RATIO <= high
        num_with_wrong_ratio += low <= 10 * TRUE_RATIO <= high
    assert num_with_truth >= 178
    assert num_with_wrong_ratio < 20, "intervals do not contain everything"


def test_what_both_sides_share_is_not_in_the_interval() -> None:
    drifting_seconds = [[1.0, 20.0], [1.5, 30.0], [2.0, 40.0], [0.7, 14.0]]
    slower_seconds = []
    for repeat_seconds in drifting_seconds:
        slower_seconds.append([1.8 * seconds for seconds in repeat_seconds])
    assert ratio_interval(slower_seconds, drifting_seconds) == pytest.approx((1.8, 1.8, 1.8))


def test_one_value_has_no_interval_and_a_wide_one_is_not_shown() -> None:
    value, low, high = ratio_interval([[3.0]], [[2.0]])
    assert value == pytest.approx(1.5)
    assert math.isnan(low)
    assert math.isnan(high)
    assert Interval(2.0, 1.0, 4.0).ends == (1.0, 4.0)
    for low, high in ((0.0, 4334.0), (0.0, math.inf), (math.nan, math.nan)):
        assert Interval(1.5, low, high).ends is None
