"""Laws of the verdict: nothing is faster, slower or best without an interval that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from report_records import cells_of, faster, standard

from lightning_specdec.bench.records import Comparison
from lightning_specdec.bench.statistics import Interval, may_be_as_high
from lightning_specdec.bench.verdict import choose, judge

NO_INTERVAL = Interval(0.6, math.nan, math.nan)


@pytest.mark.parametrize(
    ("speedup", "num_pairs", "kind", "text"),
    [
        (Interval(1.36, 1.2, 1.51), 8, "faster", "faster: 1.36x [1.20, 1.51]"),
        (Interval(0.8, 0.71, 0.9), 8, "slower", "slower: 0.80x [0.71, 0.90]"),
        (
            Interval(1.4, 0.37, 5.39),
            8,
            "too noisy",
            "too noisy to tell: 1.40x [0.37, 5.39]",
        ),
        (Interval(1.5, 0.0, 4334.0), 8, "too noisy", "too noisy to tell: 1.50x"),
        (NO_INTERVAL, 1, "too few", "too few runs to tell: 0.60x"),
        (Interval(2.0, 1.9, 2.1), 1, "too few", "too few runs to tell: 2.00x"),
        (None, 0, "too few", "too few runs to tell"),
    ],
)
def test_only_an_interval_that_excludes_one_says_faster_or_slower(
    speedup: Interval | None,
    num_pairs: int,
    kind: str,
    text: str,
) -> None:
    verdict = judge(speedup, num_pairs)
    assert verdict.kind == kind
    assert verdict.text == text
    assert verdict.is_decided == (kind in ("faster", "slower"))


def test_the_text_names_the_level_of_its_interval() -> None:
    verdict = judge(Interval(1.1, 0.9, 1.3), 8, level=0.995)
    assert verdict.text == "too noisy to tell: 1.10x [0.90, 1.30] (99.5% interval)"


def comparisons_of(
    monkeypatch: pytest.MonkeyPatch, speedups: Sequence[Interval | None]
) -> list[Comparison]:
    """Comparisons with windows 1, 2, ... and these speedups."""
    rows = [standard()]
    for window in range(1, len(speedups) + 1):
        rows.append(faster([1.0] * 8, num_draft_tokens=window))

    def speedup_of(comparison: Comparison) -> Interval | None:
        window = comparison.case.num_draft_tokens
        return speedups[window - 1] if isinstance(window, int) else None

    monkeypatch.setattr(Comparison, "walltime_speedup", property(speedup_of))
    return cells_of(rows)[1:]


def test_the_best_is_marked_if_all_others_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = comparisons_of(monkeypatch, [Interval(1.2, 1.1, 1.3), Interval(4.0, 3.5, 4.5)])
    choice = choose(rows)
    assert choice.best is rows[1]
    assert choice.equals == ()
    assert [choice.remark(row) for row in rows] == ["", "<- best"]
    assert choice.text == "best: ngram 2 ExactMatch"


def test_rows_that_may_be_as_fast_as_the_best_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sure = Interval(4.02, 3.56, 4.54)
    unsure = Interval(6.10, 0.94, 39.37)
    slower = Interval(1.2, 1.1, 1.3)
    rows = comparisons_of(monkeypatch, [unsure, slower, sure])
    choice = choose(rows)
    assert choice.best is rows[2], "the only one that is proven far above 1"
    assert choice.equals == (rows[0],)
    remarks = [choice.remark(row) for row in rows]
    assert remarks == ["<- may be as fast", "", "<- best"]
    assert choice.text == "too noisy to choose between them: ngram 3 ExactMatch, ngram 1 ExactMatch"


@pytest.mark.parametrize(
    ("speedup", "reason"),
    [
        (Interval(0.8, 0.7, 0.9), "slower: 0.80x"),
        (Interval(1.4, 0.4, 5.0), "too noisy to tell: 1.40x"),
        (NO_INTERVAL, "too few runs to tell: 0.60x"),
    ],
)
def test_no_row_is_marked_if_none_is_proven_faster(
    speedup: Interval,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = comparisons_of(monkeypatch, [speedup])
    choice = choose([row])
    assert not choice.is_proven
    assert choice.remark(row) == ""
    assert choice.text.startswith("nothing here is proven faster than standard decoding: ")
    assert reason in choice.text


def test_nothing_is_chosen_from_rows_without_a_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(comparisons_of(monkeypatch, [None]))
    assert choice.best is None
    assert choice.text == "nothing to choose from"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(2.26, 2.08, 2.45), False),
        (Interval(3.40, 2.63, 4.40), True),
        (Interval(5.0, 4.5, 5.5), True),
        (Interval(1.7, math.nan, math.nan), False),
        (Interval(3.8, math.nan, math.nan), True),
        (None, True),
    ],
)
def test_a_speedup_may_be_as_high_if_its_interval_or_else_its_estimate_reaches_the_other(
    interval: Interval | None, expected: bool
) -> None:
    assert may_be_as_high(interval, Interval(4.04, 3.76, 4.33)) is expected
