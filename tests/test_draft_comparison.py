"""Which of two drafts predicts live requests better: errors at the stated rate, and biases left
out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import pytest

from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.rules import LogitBias, Sampling
from lightning_specdec.serve.draft_comparison import (
    FEWEST_ANSWERS,
    MOST_ANSWERS,
    MOST_ROUNDS,
    NO_DIFFERENCE,
    TOO_FEW_ALIKE,
    TOO_FEW_BEFORE,
    Comparison,
    DraftRecord,
    DraftTrial,
    Undecided,
    compare,
)
from lightning_specdec.serve.engine import DraftName

OLD = DraftName("old", "EagleDrafter")
NEW = DraftName("new", "EagleDrafter")
WINDOW = 4


@dataclass(eq=False)
class Row:
    """What a trial reads of a request."""

    sampling: Sampling = field(default_factory=Sampling)
    num_rounds: int = 0
    live: bool = True


class Traffic:
    """Random answers: of different lengths, each with its own acceptance rate.

    Args:
        trial: what is told.
        rate: mean acceptance rate of a draft token.
        seed: of the answers.
    """

    def __init__(self, trial: DraftTrial, rate: float, seed: int) -> None:
        self.trial = trial
        self.rate = rate
        self.generator = random.Random(seed)

    def answer(self, sampling: Sampling | None = None, **changes: Any) -> None:
        generator = self.generator
        row = Row(sampling or Sampling())
        # Answers differ more than rounds of one answer do.
        rate = min(0.97, max(0.02, self.rate + generator.uniform(-0.25, 0.25)))
        num_rounds = generator.choice([3, 8, 12, 40])
        for number in range(num_rounds):
            num_accepted = 0
            while num_accepted < WINDOW and generator.random() < rate:
                num_accepted += 1
            finish(self.trial, row, num_accepted, is_last=number == num_rounds - 1, **changes)


def finish(
    trial: DraftTrial, row: Any, num_accepted: int, *, is_last: bool = False, **changes: Any
) -> None:
    """A round of a row."""
    row.num_rounds += 1
    row.live = not is_last
    options = {"num_requested": WINDOW, **changes}
    trial.drafted(Outcome(row, WINDOW, WINDOW, num_accepted, **options))


class Verdicts:
    """Collects what a trial reports."""

    def __init__(self, *, first_token_only: bool = False) -> None:
        self.reported: list[Comparison | Undecided] = []
        self.trial = DraftTrial(OLD, first_token_only=first_token_only, report=self.reported.append)


def run_trial(old_rate: float, new_rate: float, seed: int, most_answers: int = 300) -> Verdicts:
    verdicts = Verdicts()
    old = Traffic(verdicts.trial, old_rate, seed)
    for _ in range(150):
        old.answer()
    verdicts.trial.replaced(NEW)
    new = Traffic(verdicts.trial, new_rate, seed + 10_000)
    for _ in range(most_answers):
        if verdicts.reported:
            break
        new.answer()
    return verdicts


def test_a_draft_that_is_as_good_is_called_worse_in_one_of_a_hundred_trials_at_most() -> None:
    """200 trials of several comparisons each. At a rate of 1%, 7 or more false alarms have a
    probability of 0.5%.
    """
    num_worse = 0
    for seed in range(200):
        reported = run_trial(0.6, 0.6, seed).reported
        num_worse += sum(isinstance(result, Comparison) and result.is_worse for result in reported)
    assert num_worse < 7


@pytest.mark.parametrize(("new_rate", "expected"), [(0.35, "worse"), (0.8, "better")])
def test_a_draft_that_is_clearly_worse_or_better_is_called_so(
    new_rate: float, expected: str
) -> None:
    for seed in range(20):
        (comparison,) = run_trial(0.6, new_rate, seed).reported
        assert isinstance(comparison, Comparison)
        assert comparison.is_worse == (expected == "worse")
        assert comparison.is_better == (expected == "better")
        assert comparison.name == NEW
        assert comparison.previous_name == OLD


def test_the_difference_is_that_of_accepted_tokens_per_round_by_hand() -> None:
    old = DraftRecord(OLD)
    new = DraftRecord(NEW)
    greedy = (0.0, False, 4)
    hot = (1.0, False, 4)
    for record, accepted in ((old, {greedy: 2, hot: 1}), (new, {greedy: 3, hot: 0})):
        for number in range(FEWEST_ANSWERS):
            row: Any = Row()
            record.begin(row)
            for kind, num_accepted in accepted.items():
                # Twice as many greedy rounds as others.
                for i in range(4 if kind == greedy else 2):
                    record.count(row, kind, num_accepted + (1 if (number + i) % 2 else -0))
            row.live = False
        record.close_ended()
    comparison = compare(new, old)
    assert comparison is not None
    # Weights of 40 and 20: the harmonic parts of 80 and 40 rounds each.
    assert comparison.difference == pytest.approx((2 * 1 + 1 * -1) / 3)
    assert comparison.previous_rate == pytest.approx((2 * 2.5 + 1.5) / 3)
    assert comparison.num_rounds == 120


def test_rounds_of_other_settings_are_not_compared() -> None:
    """All requests of the old draft are greedy, those of the new one sampled: no verdict."""
    verdicts = Verdicts()
    old = Traffic(verdicts.trial, 0.9, 1)
    for _ in range(100):
        old.answer()
    verdicts.trial.replaced(NEW)
    new = Traffic(verdicts.trial, 0.2, 2)
    others = (Sampling(1.0), Sampling(processors=(LogitBias(((2, 3.0),)),)))
    for number in range(200):
        new.answer(others[number % 2])
    assert verdicts.reported == []
    # A mix of requests that changes does not matter if the rates of each kind are the same.
    verdicts = Verdicts()
    for is_new in (False, True):
        if is_new:
            verdicts.trial.replaced(NEW)
        greedy = Traffic(verdicts.trial, 0.8, 3 + is_new)
        hot = Traffic(verdicts.trial, 0.3, 5 + is_new)
        for number in range(200):
            is_greedy = number % 5 == 0 if is_new else number % 5 > 0
            if is_greedy:
                greedy.answer()
            else:
                hot.answer(Sampling(1.0))
    assert verdicts.reported == []


def test_forced_and_copied_draft_tokens_do_not_count() -> None:
    verdicts = Verdicts()
    for rate, name in ((0.6, OLD), (0.3, NEW)):
        if name == NEW:
            verdicts.trial.replaced(NEW)
        traffic = Traffic(verdicts.trial, rate, 7)
        sure = Traffic(verdicts.trial, 0.95, 8)
        for number in range(120):
            traffic.answer()
            # More tokens that a grammar forces would hide that the draft is worse.
            for _ in range(5 if name == NEW else 1):
                sure.answer(is_forced=number % 2 == 0, is_copied=number % 2 == 1)
    comparison = verdicts.reported[0]
    assert isinstance(comparison, Comparison)
    assert comparison.is_worse
    assert comparison.previous_rate < 2


def decode(
    trial: DraftTrial,
    answer_lengths: Iterable[int],
    rate: float,
    num_rounds: int,
    **changes: Any,
) -> None:
    """Rounds of eight requests at a time; an answer has so many rounds."""
    generator = random.Random(5)
    lengths = iter(answer_lengths)
    running: dict[int, tuple[Row, int]] = {}
    for number in range(num_rounds):
        slot = number % 8
        if slot not in running:
            running[slot] = (Row(), next(lengths))
        row, length = running[slot]
        num_accepted = sum(generator.random() < rate for _ in range(WINDOW))
        is_last = row.num_rounds + 1 == length
        finish(trial, row, num_accepted, is_last=is_last, **changes)
        if is_last:
            del running[slot]


@pytest.mark.parametrize(
    ("lengths_before", "lengths_after", "num_rounds"),
    [
        (repeat(3000), repeat(3000), 80_000),
        (repeat(100), chain([6000], repeat(100)), 8_000),
        (repeat(100), repeat(3000), 80_000),
    ],
    ids=["long answers", "one long answer first", "longer answers than before"],
)
def test_long_answers_do_not_hide_a_worse_draft(
    lengths_before: Iterable[int], lengths_after: Iterable[int], num_rounds: int
) -> None:
    verdicts = Verdicts()
    decode(verdicts.trial, lengths_before, 0.6, 80_000)
    verdicts.trial.replaced(NEW)
    decode(verdicts.trial, lengths_after, 0.0, num_rounds)
    assert verdicts.reported
    comparison = verdicts.reported[0]
    assert isinstance(comparison, Comparison)
    assert comparison.is_worse


def test_a_previous_draft_with_too_few_answers_is_named_at_the_swap() -> None:
    verdicts = Verdicts()
    decode(verdicts.trial, repeat(100), 0.6, 8 * 200)
    verdicts.trial.replaced(NEW)
    assert verdicts.reported == [Undecided(NEW, TOO_FEW_BEFORE)]
    assert verdicts.trial.previous is None
    decode(verdicts.trial, repeat(100), 0.1, 20_000)
    assert len(verdicts.reported) == 1

    # The draft after it is compared with this one.
    verdicts.trial.replaced(DraftName("third", "EagleDrafter"))
    assert verdicts.trial.previous is not None
    assert verdicts.trial.previous.name == NEW


def test_a_trial_without_any_comparison_ends_with_another_result_than_no_difference() -> None:
    verdicts = Verdicts()
    decode(verdicts.trial, repeat(50), 0.6, 4_000)
    verdicts.trial.replaced(NEW)
    # The numbers of requested draft tokens differ, so nothing can be compared.
    decode(verdicts.trial, repeat(50), 0.1, MOST_ROUNDS - 2_000, num_requested=2)
    assert verdicts.reported == []
    decode(verdicts.trial, repeat(50), 0.1, 4_000, num_requested=2)
    assert verdicts.reported == [Undecided(NEW, TOO_FEW_ALIKE)]
    assert verdicts.trial.previous is None


def test_an_equal_draft_stays_after_the_last_comparison() -> None:
    verdicts = Verdicts()
    decode(verdicts.trial, repeat(50), 0.6, 40_000)
    verdicts.trial.replaced(NEW)
    decode(verdicts.trial, repeat(50), 0.6, MOST_ROUNDS + 2_000)
    assert verdicts.reported == [Undecided(NEW, NO_DIFFERENCE)]
    assert verdicts.trial.previous is None


def test_rounds_that_are_not_recorded_bring_no_comparison_nearer() -> None:
    """Requests that began under the previous draft go on for long."""
    verdicts = Verdicts()
    decode(verdicts.trial, repeat(50), 0.6, 4_000)
    rows = [Row() for _ in range(8)]
    for row in rows:
        finish(verdicts.trial, row, 2)
    verdicts.trial.replaced(NEW)
    for _ in range(MOST_ROUNDS // 8):
        for row in rows:
            finish(verdicts.trial, row, 2)
    assert verdicts.reported == []
    decode(verdicts.trial, repeat(50), 0.1, 4_000)
    comparison = verdicts.reported[0]
    assert isinstance(comparison, Comparison)
    assert comparison.is_worse


def test_short_answers_that_end_first_do_not_stand_for_all() -> None:
    record = DraftRecord(NEW)
    rows: list[Any] = [Row() for _ in range(5)]
    for row in rows:
        record.begin(row)
        record.count(row, (0.0, False, 4), 1)
    for row in (rows[0], rows[2], rows[3]):
        row.live = False
    record.close_ended()
    assert len(record.finished_in_order()) == 1
    rows[1].live = False
    record.close_ended()
    assert len(record.finished_in_order()) == 4
    # Once another draft goes on with the last one, the rest is all that there is.
    record.stop()
    assert len(record.finished_in_order()) == 4
    record.count(rows[4], (0.0, False, 4), 1)
    assert len(record.finished_in_order()) == 4


def test_a_request_counts_for_the_draft_under_which_it_began() -> None:
    verdicts = Verdicts()
    old_record = verdicts.trial.current
    row = Row()
    finish(verdicts.trial, row, 1)
    finish(verdicts.trial, row, 1)
    verdicts.trial.replaced(NEW)
    finish(verdicts.trial, row, 4)
    finish(verdicts.trial, row, 4, is_last=True)
    assert not verdicts.trial.current.answers
    assert not old_record.answers


def test_with_adaptive_windows_only_the_first_draft_token_counts() -> None:
    verdicts = Verdicts(first_token_only=True)
    row = Row()
    for num_requested, num_accepted in ((4, 4), (4, 3), (1, 1), (2, 0), (0, 0)):
        finish(verdicts.trial, row, num_accepted, num_requested=num_requested)
    (answer,) = verdicts.trial.current.answers
    (counts,) = answer.counts.values()
    # The first round does not count, nor does a round without a draft.
    assert (counts.num_rounds, counts.num_accepted) == (3, 2)


def test_the_next_draft_is_compared_with_the_last_one_that_passed() -> None:
    verdicts = Verdicts()
    trial = verdicts.trial
    first_record = trial.current
    decode(trial, repeat(50), 0.6, 4_000)
    trial.replaced(NEW)
    third = DraftName("third", "EagleDrafter")
    trial.replaced(third)
    assert trial.previous is first_record
    assert trial.current.name == third
    # Swapped back, the first draft goes on with what is known of it.
    trial.replaced(OLD)
    assert trial.current is first_record
    assert trial.previous is None


def test_old_answers_and_texts_are_forgotten() -> None:
    verdicts = Verdicts()
    traffic = Traffic(verdicts.trial, 0.5, 3)
    for _ in range(MOST_ANSWERS + 10):
        traffic.answer()
    record = verdicts.trial.current
    assert len(record.answers) == MOST_ANSWERS
    assert len(record.finished_in_order()) == MOST_ANSWERS
