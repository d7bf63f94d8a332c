"""The adaptive window counts with the costs of as many rows as are live."""

from __future__ import annotations

import json
from typing import Any

import cases
import pytest

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.decoding import AdaptiveWindow, Calibration, Request, window_from_dict
from lightning_specdec.decoding.calibration import batch_sizes_up_to
from lightning_specdec.decoding.windows import BatchCosts, Outcome, Plan

WIDTHS = (1, 2, 5)


def costs_of(wide_seconds: float) -> Calibration:
    """Costs where a call on five tokens of each row takes this long, and one on one token 1 s."""
    middle_seconds = 1 + (wide_seconds - 1) / 4
    return Calibration(WIDTHS, (1.0, middle_seconds, wide_seconds), (0.1,) * 3, 0.0, 0.05, 0.01)


ALONE = costs_of(1.1)
"""Wide calls are nearly free, so drafts pay."""

CROWDED = costs_of(9.0)
"""A call takes as long as its tokens, so that no draft pays."""


def rows_of(num_rows: int) -> list[Request]:
    rows = []
    for i in range(num_rows):
        row = Request(i, [1], max_new_tokens=1000, eos=frozenset(), speculative=True)
        row.num_prompt_read = 1
        rows.append(row)
    return rows


def windows_after(plan: Plan, num_rows: int, num_rounds: int, share: float = 1.0) -> list[int]:
    """The windows of the rows after some rounds in which this share of drafts is accepted."""
    rows = rows_of(num_rows)
    for _ in range(num_rounds):
        outcomes = []
        for row, window in zip(rows, plan.windows(rows), strict=True):
            outcomes.append(Outcome(row, window, window, int(share * window)))
        plan.learn(outcomes)
    return plan.windows(rows)


def test_costs_between_measured_sizes_are_linear() -> None:
    costs = BatchCosts({16: CROWDED, 1: ALONE, 4: costs_of(3.1)})
    assert costs.of(1) == ALONE
    assert costs.of(4) == costs_of(3.1)
    assert costs.of(16) == CROWDED

    # Two rows are a third of the way from one to four, eight a third from four to sixteen.
    assert costs.of(2).target_seconds[-1] == pytest.approx(1.1 + 2.0 / 3)
    assert costs.of(8).target_seconds[-1] == pytest.approx(3.1 + 5.9 / 3)

    # A batch of five rows has room for eight.
    assert costs.of(5) == costs.of(8)
    assert costs.of(0) == ALONE
    assert costs.of(100) == CROWDED


def test_one_size_stands_for_all() -> None:
    costs = BatchCosts({4: CROWDED})
    for num_rows in (1, 4, 64):
        assert costs.of(num_rows) == CROWDED


def test_the_seconds_of_a_lookup_are_between_those_of_both_sizes() -> None:
    lower = ALONE.changed(lookup_seconds=0.1)
    upper = CROWDED.changed(lookup_seconds=0.4)
    assert BatchCosts({1: lower, 4: upper}).of(2).lookup_seconds == pytest.approx(0.2)


def test_drafts_stop_while_many_rows_are_live_and_begin_again_with_few() -> None:
    plan = AdaptiveWindow({1: ALONE, 16: CROWDED}).plan(jointly=True)
    assert windows_after(plan, 1, 5) == [4]
    assert windows_after(plan, 16, 5) == [0] * 16
    assert windows_after(plan, 1, 5) == [4]


def test_drafts_go_on_where_they_pay_for_many_rows() -> None:
    plan = AdaptiveWindow({1: ALONE, 16: costs_of(1.5)}).plan(jointly=True)
    assert windows_after(plan, 16, 5) == [4] * 16


def test_rows_whose_output_depends_on_windows_do_not_follow_the_batch() -> None:
    window = AdaptiveWindow({1: ALONE, 16: CROWDED})
    assert windows_after(window.plan(jointly=False), 16, 5) == [4] * 16
    assert windows_after(window.plan(jointly=False), 1, 5) == [4]


def test_the_forced_tokens_of_a_grammar_follow_the_batch() -> None:
    plan = AdaptiveWindow({1: ALONE, 16: CROWDED}).plan(jointly=True)
    row = rows_of(1)
    assert plan.forced_windows(row) == [4]
    windows_after(plan, 16, 1)
    assert plan.forced_windows(row) == [0]


def test_a_record_has_the_costs_of_all_sizes() -> None:
    window = AdaptiveWindow({1: ALONE, 16: CROWDED})
    values = json.loads(json.dumps(window.to_dict()))
    again = window_from_dict(values)
    assert isinstance(again, AdaptiveWindow)
    assert again.costs.by_size == {1: ALONE, 16: CROWDED}

    single = window_from_dict(json.loads(json.dumps(AdaptiveWindow(ALONE).to_dict())))
    assert isinstance(single, AdaptiveWindow)
    assert single.calibration == ALONE


def test_costs_of_other_widths_are_refused() -> None:
    narrow = Calibration((1, 2), (1.0, 1.1), (0.1, 0.1), 0.0, 0.1, 0.0)
    with pytest.raises(ValueError, match="widths of all batch sizes must be the same"):
        AdaptiveWindow({1: ALONE, 4: narrow})
    with pytest.raises(ValueError, match="needs measured costs"):
        AdaptiveWindow({})
    for size in (0, -3, 1.5):
        with pytest.raises(ValueError, match="batch size must be"):
            AdaptiveWindow({size: ALONE})  # type: ignore[dict-item]
    wrong: list[Any] = [[], {"x": ALONE.to_dict()}, {"-1": ALONE.to_dict()}]
    for by_size in wrong:
        with pytest.raises(ValueError, match="batch size"):
            window_from_dict({"kind": "AdaptiveWindow", "calibrations": by_size})


def test_rounds_of_forced_tokens_follow_the_batch_too() -> None:
    plan = AdaptiveWindow({1: ALONE, 16: CROWDED}).plan(jointly=True)
    assert windows_after(plan, 1, 5) == [4]
    rows = rows_of(16)
    plan.learn([Outcome(row, 2, 2, 2, is_forced=True) for row in rows])
    assert plan.windows(rows) == [0] * 16


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (4, [1, 4]),
        (6, [1, 4, 8]),
        (16, [1, 4, 16]),
        (40, [1, 4, 16, 64]),
    ],
)
def test_sizes_up_to_the_largest_batch_are_measured(largest: int, sizes: list[int]) -> None:
    assert batch_sizes_up_to(largest) == sizes


def test_a_decoder_measures_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def load_or_measure(*pair: Any, batch_size: int) -> Calibration:
        measured.append(batch_size)
        return costs_of(batch_size + 1.0)

    monkeypatch.setattr("lightning_specdec.decoding.calibration.load_or_measure", load_or_measure)
    decoder = SpeculativeDecoder(
        cases.target("rnn"), cases.drafter("near", "rnn"), num_draft_tokens="auto"
    )
    window = decoder.window(batch_size=[1, 4])
    assert isinstance(window, AdaptiveWindow)
    assert measured == [1, 4]
    assert window.costs.by_size == {1: costs_of(2.0), 4: costs_of(5.0)}
