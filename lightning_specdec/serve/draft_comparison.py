"""Does a new draft predict live requests worse than the one before it? A rule with stated errors.

The measure is the accepted draft tokens of a round of a row. Rounds of one answer resemble each
other, so answers are the samples: the rate of a draft is a ratio of sums over answers, with the
variance of a ratio estimator. Requests with other settings have other rates, so only rounds of the
same kind are compared, and the differences of all kinds are averaged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from lightning_specdec.decoding import Request
from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.serve.engine import DraftName, EngineObserver

FIRST_LOOK = 256
"""Rounds of the new draft at the first comparison. Each later one waits for twice as many."""
NUM_LOOKS = 8
"""Comparisons of a new draft, after which it stays."""
FALSE_ALARMS = 0.01
"""How often a draft that predicts as well is called worse in any of its comparisons, at most."""
FEWEST_ANSWERS = 20
"""Answers of each draft that a comparison needs."""
FEWEST_OF_KIND = 32
"""Rounds of each draft that make a kind count."""
MOST_ANSWERS = 1000
"""Answers of a draft that are remembered; the oldest are forgotten."""

Kind = tuple[float, bool, int]
"""Temperature, whether logits processors run, and the draft tokens that were requested."""


@dataclass
class Counts:
    """Rounds, and their accepted draft tokens."""

    num_rounds: int = 0
    num_accepted: int = 0


@dataclass
class Answer:
    """What one draft did for one request.

    Args:
        row: the request while it runs; None once it has ended.
        counts: of its rounds, by their kind.
    """

    row: Request | None
    counts: dict[Kind, Counts] = field(default_factory=dict)

    def close_if_ended(self) -> bool:
        """Whether the request has ended, whose text is then not kept."""
        if self.row is not None and not self.row.live:
            self.row = None
        return self.row is None


class DraftRecord:
    """The latest answers of one draft, in the order in which they began."""

    def __init__(self, name: DraftName) -> None:
        self.name = name
        self.answers: deque[Answer] = deque(maxlen=MOST_ANSWERS)
        self._running: dict[Request, Answer] = {}

    def begin(self, row: Request) -> None:
        """Record a request from its first round on."""
        answer = Answer(row)
        self.answers.append(answer)
        self._running[row] = answer

    def count(self, row: Request, kind: Kind, num_accepted: int) -> None:
        """Count a round of a request, unless it began under another draft."""
        answer = self._running.get(row)
        if answer is None:
            return
        counts = answer.counts.setdefault(kind, Counts())
        counts.num_rounds += 1
        counts.num_accepted += num_accepted

    def forget_ended(self) -> None:
        """Forget the requests that have ended, and keep their counts."""
        for row, answer in list(self._running.items()):
            if answer.close_if_ended():
                del self._running[row]

    def stop(self) -> None:
        """Drop the requests that still run, since another draft goes on with them."""
        self.forget_ended()
        finished = [answer for answer in self.answers if answer.row is None]
        self.answers = deque(finished, maxlen=MOST_ANSWERS)
        self._running.clear()

    def finished(self) -> list[Answer]:
        """The answers in their order, up to the first one that is not finished.

        Later ones that are finished already are the short ones, which may have other rates.
        """
        finished = []
        for answer in self.answers:
            if not answer.close_if_ended():
                break
            finished.append(answer)
        return finished


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


def totals(answers: Iterable[Answer]) -> dict[Kind, Counts]:
    """The counts of all answers by kind."""
    sums: dict[Kind, Counts] = {}
    for answer in answers:
        for kind, counts in answer.counts.items():
            total = sums.setdefault(kind, Counts())
            total.num_rounds += counts.num_rounds
            total.num_accepted += counts.num_accepted
    return sums


def compare(new: DraftRecord, previous: DraftRecord) -> Comparison | None:
    """Compare two drafts by their finished answers; None if these are too few."""
    new_answers = new.finished()
    previous_answers = previous.finished()
    new_totals = totals(new_answers)
    previous_totals = totals(previous_answers)

    # Kinds with many rounds of both count most, so that the error of the average is small.
    weights: dict[Kind, float] = {}
    for kind, counts in new_totals.items():
        num_rounds = counts.num_rounds
        num_previous = previous_totals.get(kind, Counts()).num_rounds
        if min(num_rounds, num_previous) >= FEWEST_OF_KIND:
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
    num_answers = min(new_estimate.num_answers, previous_estimate.num_answers)
    return Comparison(
        name=new.name,
        previous_name=previous.name,
        difference=new_estimate.rate - previous_estimate.rate,
        margin=_quantile(num_answers) * math.sqrt(variance),
        previous_rate=previous_estimate.rate,
        num_rounds=sum(new_totals[kind].num_rounds for kind in weights),
    )


def _quantile(num_answers: int) -> float:
    """Half the width of an interval in standard errors, by Student's t distribution.

    Its quantile to first order is that of Abramowitz and Stegun 1964, 26.7.5.
    """
    normal = NormalDist().inv_cdf(1 - FALSE_ALARMS / NUM_LOOKS)
    return normal + (normal**3 + normal) / (4 * (num_answers - 1))


@dataclass(frozen=True)
class _Estimate:
    """A rate, the variance of its error, and the number of answers that it is from."""

    rate: float
    variance: float
    num_answers: int


def _weighted_rate(
    answers: Sequence[Answer],
    sums: dict[Kind, Counts],
    weights: dict[Kind, float],
) -> _Estimate | None:
    """The average over the kinds of accepted draft tokens per round; None for too few answers.

    The error is that of a sum of ratios of sums, to first order: each answer adds its accepted
    tokens less those that its rounds have on average (Cochran 1977, section 6.3).
    """
    rates = {kind: sums[kind].num_accepted / sums[kind].num_rounds for kind in weights}
    deviations = []
    for answer in answers:
        kinds = [kind for kind in answer.counts if kind in weights]
        if not kinds:
            continue
        deviation = 0.0
        for kind in kinds:
            counts = answer.counts[kind]
            excess = counts.num_accepted - rates[kind] * counts.num_rounds
            deviation += weights[kind] * excess / sums[kind].num_rounds
        deviations.append(deviation)

    num_answers = len(deviations)
    if num_answers < FEWEST_ANSWERS:
        return None
    rate = sum(weights[kind] * rates[kind] for kind in weights)
    sum_of_squares = sum(deviation**2 for deviation in deviations)
    variance = sum_of_squares * num_answers / (num_answers - 1)
    return _Estimate(rate, variance, num_answers)


class DraftTrial(EngineObserver):
    """Records the drafts of an engine, and compares a new one with the one before it.

    A round counts if its draft tokens come from the draft itself: those that a grammar forces or a
    lookup copies do not, nor does an answer's first round, in which some drafts cannot draft yet.
    Its methods are called by the engine's thread.

    Args:
        name: the draft that the engine begins with.
        first_token_only: whether only the first draft token of a round counts. So it must be if
            the number of draft tokens follows from their acceptance.
        report: gets the comparison that ends a trial; None if it has found no difference.
    """

    def __init__(
        self,
        name: DraftName,
        *,
        first_token_only: bool,
        report: Callable[[Comparison | None], None],
    ) -> None:
        self.current = DraftRecord(name)
        # What the current draft is compared with; None if it is not on trial.
        self.previous: DraftRecord | None = None
        self._first_token_only = first_token_only
        self._report = report
        self._num_rounds = 0
        self._num_looks = 0

    def replaced(self, drafter: DraftName) -> None:
        self.current.stop()
        if self.previous is not None and drafter == self.previous.name:
            # It was swapped back.
            self.current = self.previous
            self.previous = None
            return
        if self.previous is None:
            # A draft whose own trial is open would be a doubtful measure of the next one.
            self.previous = self.current
        self.current = DraftRecord(drafter)
        self._num_rounds = 0
        self._num_looks = 0

    def drafted(self, outcome: Outcome) -> None:
        row = outcome.row
        if row.num_rounds == 1:
            self.current.begin(row)
        elif not (outcome.is_forced or outcome.is_copied) and outcome.num_requested > 0:
            self._count(outcome)
        if not row.live:
            self.current.forget_ended()

    def _count(self, outcome: Outcome) -> None:
        num_requested = outcome.num_requested
        num_accepted = outcome.num_accepted
        if self._first_token_only:
            num_requested = 1
            num_accepted = min(num_accepted, 1)
        sampling = outcome.row.sampling
        kind = (round(sampling.temperature, 1), sampling.runs_on_host, num_requested)
        self.current.count(outcome.row, kind, num_accepted)
        self._num_rounds += 1
        if self.previous is not None and self._num_rounds >= FIRST_LOOK * 2**self._num_looks:
            self._look(self.previous)

    def _look(self, previous: DraftRecord) -> None:
        """Compare the drafts, and end the trial if it is decided or was the last comparison."""
        comparison = compare(self.current, previous)
        self._num_looks += 1
        if comparison is not None and comparison.is_worse:
            # The trial goes on until the previous draft is back.
            self._report(comparison)
        elif comparison is not None and comparison.is_better:
            self.previous = None
            self._report(comparison)
        elif self._num_looks == NUM_LOOKS:
            self.previous = None
            self._report(None)
