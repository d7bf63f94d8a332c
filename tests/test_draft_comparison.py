"""Which of two drafts predicts live requests better: errors at the stated rate, and biases left
out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.rules import LogitBias, Sampling
from lightning_specdec.serve import draft_comparison
from lightning_specdec.serve.draft_comparison import (
    FALSE_ALARMS,
    FEWEST_ANSWERS,
    MOST_ANSWERS,
    MOST_ROUNDS,
    NO_DIFFERENCE,
    NUM_LOOKS,
    TOO_FEW_ALIKE,
    TOO_FEW_BEFORE,
    Answer,
    Comparison,
    Counts,
    DraftRecord,
    DraftTrial,
    Undecided,
    compare,
    level_of,
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


def answers_of(rate: float, seed: int, count: int) -> list[Answer]:
    """Random answers of a draft."""
    verdicts = Verdicts()
    traffic = Traffic(verdicts.trial, rate, seed)
    for _ in range(count):
        traffic.answer()
    return verdicts.trial.current.finished_in_order()


def run_trial(answers_before: Iterable[Answer], new_rate: float, seed: int) -> Verdicts:
    """The trial of a new draft, of up to 300 answers."""
    verdicts = Verdicts()
    verdicts.trial.current.answers.extend(answers_before)
    verdicts.trial.replaced(NEW)
    new = Traffic(verdicts.trial, new_rate, seed + 1_000_000)
    for _ in range(300):
        if verdicts.reported:
            break
        new.answer()
    return verdicts


def num_called_worse(trials: Iterable[Verdicts]) -> int:
    reported = chain.from_iterable(verdicts.reported for verdicts in trials)
    return sum(isinstance(result, Comparison) and result.is_worse for result in reported)


def test_a_draft_that_is_as_good_is_called_worse_in_one_of_a_hundred_trials_at_most() -> None:
    """200 trials of several comparisons each. At a rate of 1%, 7 or more false alarms have a
    probability of 0.5%. The rate is lower: 25 of 28,400 trials, simulated with the same arithmetic.
    With all eight comparisons after 1,000 answers of the previous draft, it was 16 of 3,000.
    """
    trials = (run_trial(answers_of(0.6, seed, 150), 0.6, seed) for seed in range(200))
    assert num_called_worse(trials) < 7


@pytest.mark.slow
def test_many_answers_before_the_swap_make_no_more_false_alarms() -> None:
    """1,000 trials after 1,000 answers. Their rate is almost certain, so that the errors of the few
    answers after the swap decide. At a rate of 1%, 20 or more false alarms have a probability of
    0.3%. The rate is lower: 15 of 8,400 simulated trials. With the large-sample variance and equal
    levels it would be 174 of 7,800, and this test would fail in 72% of cases.
    """
    num_worse = 0
    for first_seed in range(0, 1000, 25):
        # They cost more time than the trials, which they hardly tie to each other.
        answers_before = answers_of(0.6, first_seed, 1000)
        seeds = range(first_seed, first_seed + 25)
        num_worse += num_called_worse(run_trial(answers_before, 0.6, seed) for seed in seeds)
    assert num_worse < 20


def test_the_levels_of_all_comparisons_add_up_to_what_may_be_spent() -> None:
    levels = [level_of(look) for look in range(1, NUM_LOOKS + 1)]
    assert sum(levels) == pytest.approx(FALSE_ALARMS / 2)
    assert levels == sorted(levels)
    assert levels[0] > 0


def test_the_variance_is_that_of_leaving_out_each_answer() -> None:
    """By its definition: the rate again without each answer. The first answer has half of all
    rounds."""
    generator = random.Random(4)
    lengths = [100] + [generator.randint(2, 7) for _ in range(40)]
    accepted = [generator.randint(0, 3 * length) for length in lengths]
    # Answers of equal length, so that the other draft adds no variance.
    old = DraftRecord(OLD)
    new = DraftRecord(NEW)
    kind = (0.0, False, WINDOW)
    for record, answers in ((new, zip(lengths, accepted, strict=True)), (old, [(5, 5)] * 40)):
        for num_rounds, num_accepted in answers:
            counts = {kind: Counts(num_rounds, num_accepted)}
            record.answers.append(Answer(counts, is_finished=True))

    with mock.patch.object(draft_comparison, "FEWEST_ANSWERS", 2):
        comparison = compare(new, old, 0.01)
    assert comparison is not None
    rates = []
    for left_out in range(len(lengths)):
        other_rounds = sum(lengths) - lengths[left_out]
        rates.append((sum(accepted) - accepted[left_out]) / other_rounds)
    rate = sum(accepted) / sum(lengths)
    sum_of_squares = sum((other_rate - rate) ** 2 for other_rate in rates)
    variance = sum_of_squares * (len(lengths) - 1) / len(lengths)
    num_effective = sum(lengths) ** 2 / sum(length**2 for length in lengths)
    assert num_effective < 8
    assert comparison.difference == pytest.approx(rate - 1)
    # 1% of Student's t with this many degrees of freedom lies beyond the quantile.
    t_of_margin = comparison.margin / variance**0.5
    assert tail_of_t(t_of_margin, num_effective - 1) == pytest.approx(0.01, rel=0.02)
    # Too few answers of equal length for a real comparison.
    assert compare(new, old, 0.01) is None


def tail_of_t(value: float, degrees_of_freedom: float) -> float:
    """The probability of more than a value under Student's t distribution, by its density."""
    half = torch.tensor((degrees_of_freedom + 1) / 2, dtype=torch.float64)
    log_scale = torch.lgamma(half) - torch.lgamma(half - 0.5)
    log_scale -= 0.5 * math.log(degrees_of_freedom * math.pi)
    places = torch.linspace(0, value, 100_001, dtype=torch.float64)
    log_density = log_scale - half * torch.log1p(places**2 / degrees_of_freedom)
    return 0.5 - float(torch.trapezoid(log_density.exp(), places))


def test_one_answer_is_no_kind() -> None:
    """Its rate varies as if by nothing."""
    old = DraftRecord(OLD)
    new = DraftRecord(NEW)
    usual = (0.0, False, WINDOW)
    rare = (1.0, False, WINDOW)
    for record, rate in ((old, 2), (new, 1)):
        for _ in range(30):
            record.answers.append(Answer({usual: Counts(20, 40)}, is_finished=True))
        record.answers.append(Answer({rare: Counts(100, 100 * rate)}, is_finished=True))
    comparison = compare(new, old, 0.01)
    assert comparison is not None
    assert comparison.difference == 0
    assert comparison.num_rounds == 600


@pytest.mark.parametrize(("new_rate", "expected"), [(0.35, "worse"), (0.8, "better")])
def test_a_draft_that_is_clearly_worse_or_better_is_called_so(
    new_rate: float, expected: str
) -> None:
    for seed in range(20):
        (comparison,) = run_trial(answers_of(0.6, seed, 150), new_rate, seed).reported
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
    comparison = compare(new, old, 0.001)
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
