"""Does a new draft predict live requests worse than the one before it? A rule with stated errors.

The measure is the accepted draft tokens of a round of a row. Rounds of one answer resemble each
other, so answers are the samples: the rate of a draft is a ratio of sums over answers, and its
variance is that of the jackknife, which leaves out one answer at a time. Requests with other
settings have other rates, so only rounds of the same kind are compared, and the differences of all
kinds are averaged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import NormalDist

from lightning_specdec.decoding import Request
from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.serve.engine import DraftName, EngineObserver

FIRST_LOOK = 256
"""Recorded rounds of the new draft before the first comparison, which may have to wait for more
answers. Each later one waits for twice as many rounds as the one before it had."""
NUM_LOOKS = 8
"""Comparisons of a new draft, after which it stays."""
MOST_ROUNDS = FIRST_LOOK * 2**NUM_LOOKS
"""Recorded rounds of the new draft, after which it stays even if it was compared less often."""
FALSE_ALARMS = 0.01
"""How often a draft that predicts as well is called worse in any of its comparisons, at most."""
SPENT_FALSE_ALARMS = FALSE_ALARMS / 2
"""What the levels of all comparisons add up to. With few answers of different lengths, more are
false than the t distribution says: the other half is left for these."""
FEWEST_ANSWERS = 20
"""Answers of each draft that a comparison needs, as answers of equal length: a few long ones among
many short ones would decide a rate by themselves."""
ROUNDS_OF_ANSWER = 128
"""Rounds by which an answer counts. Longer ones would hold up those that began after them, and
outweigh the others."""
FEWEST_OF_KIND = 32
"""Rounds of each draft that make a kind count."""
FEWEST_ANSWERS_OF_KIND = 4
"""Answers of each draft that make a kind count: one answer does not show how much it varies."""
MOST_ANSWERS = 1000
"""Answers of a draft that are remembered; the oldest are forgotten."""

Kind = tuple[float, bool, int]
"""Temperature, whether logits processors run, and the draft tokens that were requested."""


@dataclass
class Counts:
    """Rounds, their accepted draft tokens, and the answers that they are part of."""

    num_rounds: int = 0
    num_accepted: int = 0
    num_answers: int = 1

    @property
    def is_enough(self) -> bool:
        """Whether a kind with these counts can be compared."""
        has_answers = self.num_answers >= FEWEST_ANSWERS_OF_KIND
        return has_answers and self.num_rounds >= FEWEST_OF_KIND


@dataclass
class Answer:
    """What one draft did in the first rounds of one request.

    Args:
        counts: of its rounds, by their kind.
        is_finished: whether no more rounds are counted.
    """

    counts: dict[Kind, Counts] = field(default_factory=dict)
    is_finished: bool = False


class DraftRecord:
    """The latest answers of one draft, in the order in which they began."""

    def __init__(self, name: DraftName) -> None:
        self.name = name
        self.answers: deque[Answer] = deque(maxlen=MOST_ANSWERS)
        # The requests whose rounds are counted. The texts of others are not kept.
        self._running: dict[Request, Answer] = {}

    def begin(self, row: Request) -> None:
        """Record a request from its first round on."""
        answer = Answer()
        self.answers.append(answer)
        self._running[row] = answer

    def count(self, row: Request, kind: Kind, num_accepted: int) -> bool:
        """Count a round of a request. Returns False if it is not recorded: the request began under
        another draft, or has had `ROUNDS_OF_ANSWER` rounds.
        """
        answer = self._running.get(row)
        if answer is None:
            return False
        counts = answer.counts.setdefault(kind, Counts())
        counts.num_rounds += 1
        counts.num_accepted += num_accepted
        return True

    def close_ended(self) -> None:
        """Finish the answers whose requests have ended, or have had as many rounds as count."""
        for row, answer in list(self._running.items()):
            if not row.live or row.num_rounds >= ROUNDS_OF_ANSWER:
                answer.is_finished = True
                del self._running[row]

    def stop(self) -> None:
        """Keep what a comparison may use, since another draft goes on with the rest."""
        self.close_ended()
        self.answers = deque(self.finished_in_order(), maxlen=MOST_ANSWERS)
        self._running.clear()

    def finished_in_order(self) -> list[Answer]:
        """The answers in their order, up to the first one that is not finished.

        Later ones that are finished already are the short ones, which may have other rates.
        """
        return list(takewhile(lambda answer: answer.is_finished, self.answers))

    @property
    def has_enough(self) -> bool:
        """Whether it can be compared with a draft that answers the same kinds of requests."""
        answers = self.finished_in_order()
        frequent_kinds = {kind for kind, counts in totals(answers).items() if counts.is_enough}
        lengths = []
        for answer in answers:
            kinds = frequent_kinds.intersection(answer.counts)
            lengths.append(sum(answer.counts[kind].num_rounds for kind in kinds))
        return num_of_equal_length(lengths) >= FEWEST_ANSWERS


@dataclass(frozen=True)
class Comparison:
    """The accepted draft tokens per round of two drafts, in requests of the same kinds.

    Args:
        name: the new draft.
        previous_name: the one before it.
        difference: of the new draft from the previous one, averaged over the kinds.
        margin: half the width of the interval of the difference.
        previous_rate: of the previous draft, averaged in the same way.
        num_rounds: of the new draft.
    """

    name: DraftName
    previous_name: DraftName
    difference: float
    margin: float
    previous_rate: float
    num_rounds: int

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.difference + self.margin < 0

    @property
    def is_better(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.difference - self.margin > 0

    def __str__(self) -> str:
        rate = self.previous_rate + self.difference
        low = self.difference - self.margin
        high = self.difference + self.margin
        return (
            f"{rate:.2f} accepted draft tokens per round instead of {self.previous_rate:.2f} "
            f"(difference {low:+.2f} to {high:+.2f}, {self.num_rounds} rounds)"
        )


@dataclass(frozen=True)
class Undecided:
    """A trial that has found no difference.

    Args:
        name: the new draft, which stays.
        reason: `NO_DIFFERENCE`, `TOO_FEW_ALIKE`, or `TOO_FEW_BEFORE`.
    """

    name: DraftName
    reason: str


NO_DIFFERENCE = "it predicts about as well as the one before"
"""Comparisons were made."""
TOO_FEW_ALIKE = "too few requests of the same kind were answered before and since to compare it"
"""No comparison was made."""
TOO_FEW_BEFORE = "the one before has finished too few answers to compare it with"
"""No comparison can be made."""


def totals(answers: Iterable[Answer]) -> dict[Kind, Counts]:
    """The counts of all answers by kind."""
    sums: dict[Kind, Counts] = {}
    for answer in answers:
        for kind, counts in answer.counts.items():
            total = sums.setdefault(kind, Counts(num_answers=0))
            total.num_answers += 1
            total.num_rounds += counts.num_rounds
            total.num_accepted += counts.num_accepted
    return sums


def compare(new: DraftRecord, previous: DraftRecord, level: float) -> Comparison | None:
    """Compare two drafts by their finished answers; None if these are too few.

    Args:
        level: how often the whole interval is below 0 although the drafts are equal.
    """
    new_answers = new.finished_in_order()
    previous_answers = previous.finished_in_order()
    new_totals = totals(new_answers)
    previous_totals = totals(previous_answers)

    # Kinds with many rounds of both count most, so that the error of the average is small.
    weights: dict[Kind, float] = {}
    for kind, counts in new_totals.items():
        previous_counts = previous_totals.get(kind)
        if previous_counts is not None and counts.is_enough and previous_counts.is_enough:
            num_rounds = counts.num_rounds
            num_previous = previous_counts.num_rounds
            weights[kind] = num_rounds * num_previous / (num_rounds + num_previous)
    if not weights:
        return None
    sum_of_weights = sum(weights.values())
    weights = {kind: weight / sum_of_weights for kind, weight in weights.items()}

    new_estimate = _weighted_rate(new_answers, new_totals, weights)
    previous_estimate = _weighted_rate(previous_answers, previous_totals, weights)
    if new_estimate is None or previous_estimate is None:
        return None
    variance = new_estimate.variance + previous_estimate.variance
    num_effective = min(new_estimate.num_effective, previous_estimate.num_effective)
    return Comparison(
        name=new.name,
        previous_name=previous.name,
        difference=new_estimate.rate - previous_estimate.rate,
        margin=_quantile(level, num_effective - 1) * math.sqrt(variance),
        previous_rate=previous_estimate.rate,
        num_rounds=sum(new_totals[kind].num_rounds for kind in weights),
    )


def num_of_equal_length(lengths: Sequence[float]) -> float:
    """How many answers of equal length have a rate as certain as answers of these (Kish 1965)."""
    sum_of_squares = sum(length**2 for length in lengths)
    if sum_of_squares == 0:
        return 0.0
    # Rounded, since lengths may be shares of a sum.
    return round(sum(lengths) ** 2 / sum_of_squares, 6)


def level_of(look: int) -> float:
    """How often a comparison may call a draft worse that is not.

    The levels add up to `SPENT_FALSE_ALARMS` (Bonferroni correction), so all comparisons together
    have at most these, however they depend on each other. They rise with the number of the
    comparison, since the first ones have the fewest answers, whose distribution is known worst.

    Args:
        look: number of the comparison, from 1 to `NUM_LOOKS`.
    """
    return SPENT_FALSE_ALARMS * look / (NUM_LOOKS * (NUM_LOOKS + 1) / 2)


def _quantile(level: float, degrees_of_freedom: float) -> float:
    """Half the width of an interval in standard errors, by Student's t distribution.

    It is the expansion of Abramowitz and Stegun 1964, 26.7.5.
    """
    z = NormalDist().inv_cdf(1 - level)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    n = degrees_of_freedom
    return z + first / n + second / n**2 + third / n**3


@dataclass(frozen=True)
class _Estimate:
    """A rate, the variance of its error, and the number of answers that it is from, as by
    `num_of_equal_length`."""

    rate: float
    variance: float
    num_effective: float


def _weighted_rate(
    answers: Sequence[Answer],
    sums: dict[Kind, Counts],
    weights: dict[Kind, float],
) -> _Estimate | None:
    """The average over the kinds of accepted draft tokens per round; None for too few answers.

    The variance is that of the jackknife (Efron 1982, chapter 3): the sum of squares of what
    the average changes by without each answer. The formula for large samples, which divides by all
    rounds instead of those of the other answers, is too small where few answers have most rounds.
    """
    rates = {kind: sums[kind].num_accepted / sums[kind].num_rounds for kind in weights}
    changes = []
    shares = []
    for answer in answers:
        kinds = [kind for kind in answer.counts if kind in weights]
        if not kinds:
            continue
        change = 0.0
        share = 0.0
        for kind in kinds:
            counts = answer.counts[kind]
            total = sums[kind].num_rounds
            excess = counts.num_accepted - rates[kind] * counts.num_rounds
            change += weights[kind] * excess / (total - counts.num_rounds)
            share += weights[kind] * counts.num_rounds / total
        changes.append(change)
        shares.append(share)

    num_effective = num_of_equal_length(shares)
    if num_effective < FEWEST_ANSWERS:
        return None
    rate = sum(weights[kind] * rates[kind] for kind in weights)
    num_answers = len(changes)
    sum_of_squares = sum(change**2 for change in changes)
    variance = sum_of_squares * (num_answers - 1) / num_answers
    return _Estimate(rate, variance, num_effective)


class DraftTrial(EngineObserver):
    """Records the drafts of an engine, and compares a new one with the one before it.

    A round counts if its draft tokens come from the draft itself: those that a grammar forces or a
    lookup copies do not, nor does an answer's first round, in which some drafts cannot draft yet.
    Its methods are called by the engine's thread.

    Args:
        name: the draft that the engine begins with.
        first_token_only: whether only the first draft token of a round counts. So it must be if
            the number of draft tokens follows from their acceptance.
        report: gets the comparison that decides a trial, or why there is none.
    """

    def __init__(
        self,
        name: DraftName,
        *,
        first_token_only: bool,
        report: Callable[[Comparison | Undecided], None],
    ) -> None:
        self.current = DraftRecord(name)
        # What the current draft is compared with; None if it is not on trial.
        self.previous: DraftRecord | None = None
        self._first_token_only = first_token_only
        self._report = report
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._num_rounds = 0
        self._num_looks = 0
        self._next_look = FIRST_LOOK

    def replaced(self, drafter: DraftName) -> None:
        self.current.stop()
        if self.previous is not None and drafter == self.previous.name:
            # It was swapped back.
            self.current = self.previous
            self.previous = None
            return
        if self.previous is None and self.current.has_enough:
            # A draft whose own trial is open would be a doubtful measure of the next one.
            self.previous = self.current
        self.current = DraftRecord(drafter)
        self._begin_trial()
        if self.previous is None:
            self._report(Undecided(drafter, TOO_FEW_BEFORE))

    def drafted(self, outcome: Outcome) -> None:
        row = outcome.row
        if row.num_rounds == 1:
            self.current.begin(row)
        elif not (outcome.is_forced or outcome.is_copied) and outcome.num_requested > 0:
            self._count(outcome)
        if not row.live or row.num_rounds == ROUNDS_OF_ANSWER:
            self.current.close_ended()
            if self.previous is not None and self._num_rounds >= self._next_look:
                self._look(self.previous)

    def _count(self, outcome: Outcome) -> None:
        num_requested = outcome.num_requested
        num_accepted = outcome.num_accepted
        if self._first_token_only:
            num_requested = 1
            num_accepted = min(num_accepted, 1)
        sampling = outcome.row.sampling
        kind = (round(sampling.temperature, 1), sampling.runs_on_host, num_requested)
        if self.current.count(outcome.row, kind, num_accepted):
            self._num_rounds += 1

    def _look(self, previous: DraftRecord) -> None:
        """Compare the drafts if that is possible, and end the trial if this decides it."""
        comparison = compare(self.current, previous, level_of(self._num_looks + 1))
        if comparison is not None:
            self._num_looks += 1
            self._next_look = min(2 * self._num_rounds, MOST_ROUNDS)
            if comparison.is_worse:
                # The trial goes on until the previous draft is back.
                self._report(comparison)
                return
            if comparison.is_better:
                self.previous = None
                self._report(comparison)
                return
        if self._num_looks >= NUM_LOOKS or self._num_rounds >= MOST_ROUNDS:
            self.previous = None
            reason = NO_DIFFERENCE if self._num_looks > 0 else TOO_FEW_ALIKE
            self._report(Undecided(self.current.name, reason))
