"""The number of draft tokens per round: fixed, or chosen by acceptance rates and measured costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.decoding.requests import Request, power_of_two
from lightning_specdec.drafters import Draft

DEFAULT_WINDOW = 3
"""Draft tokens per round if nobody chooses."""

PRIOR_RATE = 0.8
"""Acceptance rate that is assumed before a draft token was tested."""

PRIOR_WEIGHT = 2.0
"""Number of tests that the prior rate is worth."""

NEIGHBOR_WEIGHT = 6.0
"""Number of tests that the rate of the previous position is worth to a position."""

MEMORY = 30.0
"""Number of tests of a position that are remembered; older ones fade."""

BUDGET = 1.02
"""Loss that drafting may add up to before it stops, in rounds of standard decoding. It is 1.6% of
64 tokens."""

BUDGET_PER_TOKEN = 0.006
"""What each token adds to a budget that was used, in rounds of standard decoding."""

LARGEST_DEBT = 1.5
"""Loss after which another trial is due at the latest when the budget is back, in the same unit."""

MOST_CREDIT = 6.0
"""Gain of earlier rounds that a draft may lose again before it stops, in the same unit. With less,
the draft would stop whenever it is unlucky."""


@dataclass(frozen=True)
class Calibration(Settings):
    """Measured seconds of the calls of a target and its drafter on one machine.

    Args:
        widths: tokens per target call that were measured, ascending from 1.
        target_seconds: seconds of a target call, for each width.
        loop_seconds: seconds of a round outside its model calls, for each width.
        draft_seconds: fixed seconds of a draft, in addition to those of its tokens.
        draft_step_seconds: seconds of each draft token.
        target_token_seconds: seconds of each prompt token that the target reads.
        lookup_seconds: of a drafter with a fallback, seconds of the lookup before it. The draft's
            seconds are then those of the fallback. None for other drafters.

    Raises:
        ValueError: the widths do not ascend from 1, or a width lacks its seconds.
    """

    widths: tuple[int, ...] = setting(minimum=1)
    target_seconds: tuple[float, ...] = setting(above=0)
    loop_seconds: tuple[float, ...] = setting(minimum=0)
    draft_seconds: float = setting(minimum=0)
    draft_step_seconds: float = setting(minimum=0)
    target_token_seconds: float = setting(minimum=0)
    lookup_seconds: float | None = setting(None, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        ascends_from_1 = list(self.widths) == sorted({1, *self.widths})
        num_widths = len(self.widths)
        have_seconds = num_widths == len(self.target_seconds) == len(self.loop_seconds)
        if not ascends_from_1 or not have_seconds:
            raise ValueError("widths must rise from 1 and have seconds each: measure again")

    def round_seconds(self, num_draft_tokens: int) -> float:
        """Seconds of a round without its draft, linear between the measured widths."""
        width = num_draft_tokens + 1
        index = next(i for i, measured in enumerate(self.widths) if measured >= width)
        upper_seconds = self.target_seconds[index] + self.loop_seconds[index]
        upper_width = self.widths[index]
        if upper_width == width:
            return upper_seconds

        lower_seconds = self.target_seconds[index - 1] + self.loop_seconds[index - 1]
        lower_width = self.widths[index - 1]
        difference = upper_seconds - lower_seconds
        return upper_seconds - difference * (upper_width - width) / (upper_width - lower_width)

    def towards(self, other: Calibration, share: float) -> Calibration:
        """The costs between these and others of the same widths, on a line.

        Args:
            share: 0 for these costs, 1 for the others.
        """

        def mixed(seconds: float, other_seconds: float) -> float:
            return seconds + share * (other_seconds - seconds)

        def all_mixed(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
            pairs = zip(seconds, others, strict=True)
            return tuple(mixed(value, other_value) for value, other_value in pairs)

        lookup_seconds = self.lookup_seconds
        if lookup_seconds is not None and other.lookup_seconds is not None:
            lookup_seconds = mixed(lookup_seconds, other.lookup_seconds)
        return Calibration(
            widths=self.widths,
            target_seconds=all_mixed(self.target_seconds, other.target_seconds),
            loop_seconds=all_mixed(self.loop_seconds, other.loop_seconds),
            draft_seconds=mixed(self.draft_seconds, other.draft_seconds),
            draft_step_seconds=mixed(self.draft_step_seconds, other.draft_step_seconds),
            target_token_seconds=mixed(self.target_token_seconds, other.target_token_seconds),
            lookup_seconds=lookup_seconds,
        )


class BatchCosts:
    """The costs of batches of several sizes: measured ones, and those between them on a line.

    Args:
        calibrations: measured costs by batch size; or those of one batch size, which then stand for
            all.

    Raises:
        ValueError: there are none, or their widths differ.
    """

    def __init__(self, calibrations: Calibration | Mapping[int, Calibration]) -> None:
        if isinstance(calibrations, Calibration):
            calibrations = {1: calibrations}
        if not calibrations:
            raise ValueError("an adaptive window needs measured costs")
        sizes = sorted(require_int("batch size", size, 1) for size in calibrations)
        self.by_size = {size: calibrations[size] for size in sizes}
        if len({costs.widths for costs in self.by_size.values()}) > 1:
            raise ValueError("the widths of all batch sizes must be the same: measure again")

    @property
    def smallest(self) -> Calibration:
        """The costs of the smallest measured batch."""
        return next(iter(self.by_size.values()))

    @property
    def widths(self) -> tuple[int, ...]:
        """The measured widths, which are the same for all batch sizes."""
        return self.smallest.widths

    def of(self, num_rows: int) -> Calibration:
        """The costs of a batch with this many live rows."""
        # Batches grow in powers of two; the empty rows of a batch take part in its calls.
        size = power_of_two(max(1, num_rows))
        sizes = list(self.by_size)
        if size <= sizes[0]:
            return self.by_size[sizes[0]]
        for lower, upper in pairwise(sizes):
            if size <= upper:
                share = (size - lower) / (upper - lower)
                return self.by_size[lower].towards(self.by_size[upper], share)
        return self.by_size[sizes[-1]]


def window_of(row: Request, largest: int) -> int:
    """The number of draft tokens that a row requests, up to `largest`.

    It is one less than the tokens that may follow, because the target adds the last one; and 0 for
    a row that is not live, or that reads a part of its prompt.
    """
    if not row.live or row.is_reading:
        return 0
    return min(largest, row.remaining - 1)


@dataclass
class Outcome:
    """A live row's round: how many draft tokens were requested, made, and accepted.

    Args:
        is_copied: whether the lookup of a drafter with a fallback made them.
        is_forced: whether they follow from a grammar, without a drafter. They say nothing about the
            drafter, and cost none of its time.
        num_requested: draft tokens that the plan requested. It exceeds `window` if the text ended
            within the draft tokens, since nothing is learned from those after the end.
    """

    row: Request
    window: int
    num_made: int
    num_accepted: int
    is_copied: bool = False
    is_forced: bool = False
    num_requested: int = 0


class Plan(ABC):
    """The windows of one session, round by round.

    Attributes:
        shared_window: the next round's window of all rows, if it is known before this round's
            outcome; else None.
    """

    shared_window: int | None = None

    @abstractmethod
    def windows(self, rows: Sequence[Request]) -> list[int]:
        """The number of draft tokens that each row requests next; 0 for rows that are not live."""

    def fallback_windows(self, rows: Sequence[Request]) -> list[int] | None:
        """Of a drafter with a fallback, the number of draft tokens that it requests of the
        fallback where the lookup finds nothing; None for as many as of the lookup.
        """
        return None

    def forced_windows(self, rows: Sequence[Request]) -> list[int] | None:
        """The number of draft tokens that each row may have of a grammar, without the drafter;
        None for as many as of the drafter.
        """
        return None

    def adjust(self, draft: Draft, windows: Sequence[int]) -> Draft:
        """Change a draft before the target reads it. Only calibration does."""
        return draft

    def learn(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Learn from a round, in which these rows were live."""

    def keep_to_measured(self) -> None:  # noqa: B027
        """Choose only measured windows from now on, since calls are recorded for each one."""


class Window(ABC):
    """How a session chooses the number of draft tokens per round.

    One object serves any number of sessions.
    """

    largest: int

    @abstractmethod
    def plan(self, *, jointly: bool) -> Plan:
        """The windows of a new session; `jointly` if its rows may share them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record; `window_from_dict` is the inverse."""


class FixedWindow(Window, Plan):
    """The same number of draft tokens in every round, fewer at a row's end."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.largest = require_int("num_draft_tokens", num_draft_tokens, 0)
        self.shared_window = self.largest

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Request]) -> list[int]:
        return [window_of(row, self.largest) for row in rows]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "FixedWindow", "num_draft_tokens": self.largest}


class AdaptiveWindow(Window):
    """Chooses the window with the most expected tokens per second, 0 for standard decoding.

    It estimates acceptance rates from the rounds so far. Under a rule whose output does not depend
    on the window, the rows of a session share the estimate. Otherwise each row has its own, so
    that its output does not depend on the batch. The same seed and calibration give the same
    windows.

    Args:
        calibration: measured costs; or those of several batch sizes, by size. Rows that share the
            estimate then have the costs of as many rows as are live, and the others those of the
            smallest size, again so that their output does not depend on the batch. The largest
            window is the last width - 1.
    """

    def __init__(self, calibration: Calibration | Mapping[int, Calibration]) -> None:
        self.costs = BatchCosts(calibration)
        self.largest = self.costs.widths[-1] - 1

    @property
    def calibration(self) -> Calibration:
        """The costs of the smallest batch."""
        return self.costs.smallest

    def plan(self, *, jointly: bool) -> Plan:
        if jointly:
            return _SharedPlan(self.costs)
        return _RowPlan(self.calibration)

    def to_dict(self) -> dict[str, Any]:
        by_size = self.costs.by_size
        if len(by_size) == 1:
            return {"kind": "AdaptiveWindow", "calibration": self.calibration.to_dict()}
        values = {str(size): costs.to_dict() for size, costs in by_size.items()}
        return {"kind": "AdaptiveWindow", "calibrations": values}


def as_window(num_draft_tokens: int | str | Window | None) -> Window:
    """The window of a config: an integer is a fixed one; "auto" needs a `SpeculativeDecoder`."""
    if isinstance(num_draft_tokens, str):
        raise ValueError(
            'num_draft_tokens "auto" needs measured costs: use SpeculativeDecoder, '
            "or an AdaptiveWindow"
        )
    if isinstance(num_draft_tokens, Window):
        return num_draft_tokens
    if num_draft_tokens is None:
        return FixedWindow(DEFAULT_WINDOW)
    return FixedWindow(num_draft_tokens)


def window_from_dict(values: dict[str, Any]) -> Window:
    """The inverse of `Window.to_dict`, to decode again as in a record."""
    kind = values.get("kind")
    if kind == "FixedWindow":
        return FixedWindow(values["num_draft_tokens"])
    if kind == "AdaptiveWindow" and "calibrations" in values:
        by_size = values["calibrations"]
        if not isinstance(by_size, Mapping):
            raise ValueError(f"calibrations must map batch sizes to costs, got {by_size!r}")
        calibrations: dict[int, Calibration] = {}
        for size, costs in by_size.items():
            if not str(size).isdecimal():
                raise ValueError(f"a batch size must be an integer, got {size!r}")
            calibrations[int(size)] = Calibration.from_dict(costs)
        return AdaptiveWindow(calibrations)
    if kind == "AdaptiveWindow":
        return AdaptiveWindow(Calibration.from_dict(values["calibration"]))
    raise ValueError(f"a window is a FixedWindow or an AdaptiveWindow, got {kind!r}")


@dataclass
class Rate:
    """How often something happened; older trials fade."""

    hits: float = 0.0
    trials: float = 0.0

    def count(self, hit: bool) -> None:
        """Count one trial."""
        # Once there are `MEMORY` trials, a new one takes the place of one old one.
        fading = 1.0
        if self.trials:
            fading = min(1.0, (MEMORY - 1) / self.trials)
        self.hits = self.hits * fading + hit
        self.trials = self.trials * fading + 1


class Stage:
    """What was learned of one drafter: how often it drafts, and which positions are accepted.

    Args:
        num_positions: draft tokens of its largest window.
    """

    def __init__(self, num_positions: int) -> None:
        # The prior fades like real tests: it would keep a useless draft alive otherwise.
        self.positions = [Rate() for _ in range(max(1, num_positions))]
        self.positions[0] = Rate(PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self.offers = Rate(1.0, 1.0)
        """How often it made a token: a lookup may find nothing."""

    @property
    def offer_rate(self) -> float:
        """Share of the requests for which it made a draft."""
        return self.offers.hits / self.offers.trials

    def rates(self) -> list[float]:
        """The probability that each position is accepted if those before it are."""
        rates: list[float] = []
        for i, position in enumerate(self.positions):
            if i == 0:
                rates.append(position.hits / position.trials)
                continue
            # A position with few tests is estimated from the one before it.
            hits = position.hits + NEIGHBOR_WEIGHT * rates[-1]
            rates.append(hits / (position.trials + NEIGHBOR_WEIGHT))
        return rates

    def learn(self, num_made: int, num_accepted: int) -> None:
        """Learn from a draft: the accepted tokens were tested, and the rejected one after them."""
        num_tested = min(num_made, num_accepted + 1)
        for i in range(num_tested):
            self.positions[i].count(i < num_accepted)


@dataclass
class Estimate:
    """What one drafter is expected to do.

    Args:
        rates: the probability that each position is accepted if those before it are.
        offer_rate: the probability that there is a draft.
    """

    rates: Sequence[float]
    offer_rate: float

    def __post_init__(self) -> None:
        all_accepted_probability = 1.0
        expected_accepted = 0.0
        self.accepted = [0.0]
        """Expected accepted tokens of a draft, for each window."""
        for rate in self.rates:
            all_accepted_probability *= rate
            expected_accepted += all_accepted_probability
            self.accepted.append(expected_accepted)


NO_LOOKUP = Estimate((), 0.0)


class Controller:
    """The windows of one row, or of rows that share an estimate.

    It takes the windows with the most expected tokens per second, by acceptance rates for each
    position and measured costs (Leviathan et al. 2023, equation 1). A drafter with a fallback has
    two windows: one for rows in which its lookup finds something, and one for the others, which
    cost a draft of the fallback.

    What drafts lose against standard decoding is limited by a balance: nothing is drafted while it
    is below `-BUDGET`. Gains raise the balance. While drafts do not seem to pay, what the balance
    allows is used to try one draft token.

    Args:
        costs: measured costs, of one batch size or of several.
        measured_only: whether to choose only windows that were measured.

    Attributes:
        costs: those of a batch with as many rows as were live in the last round.
        window: of the next round; of a drafter with a fallback, the larger one of the two.
        draft_window: of the next round where the lookup of a drafter with a fallback finds
            nothing; the same as `window` for others.
        forced_window: of tokens that a grammar forces. They need no drafter and are nearly
            certain, so it is the same in all rounds.
    """

    def __init__(self, costs: Calibration | BatchCosts, *, measured_only: bool = False) -> None:
        if isinstance(costs, Calibration):
            costs = BatchCosts(costs)
        self.batch_costs = costs
        self.largest = costs.widths[-1] - 1
        self.choices: Sequence[int] = range(self.largest + 1)
        if measured_only:
            self.choices = [width - 1 for width in costs.widths]
        self._use_costs_of(1)

        self.draft = Stage(self.largest)
        self.lookup: Stage | None = None
        if self.costs.lookup_seconds is not None:
            self.lookup = Stage(self.largest)
            # A lookup finds something in some rounds only.
            self.lookup.offers = Rate(0.5, 2.0)

        self.balance = 0.0
        """Gain over standard decoding, in its rounds; negative for a loss."""
        self.fallback_balance = 0.0
        """The same of a fallback's drafts, up to 0, so that a lookup's gains pay for no trials."""
        self.lookup_window = 0
        self.draft_window = 0
        self.window = 0
        self._choose()

    def _use_costs_of(self, num_rows: int) -> None:
        """Count with the costs of a batch with this many live rows from now on."""
        self.num_rows = num_rows
        self.costs = self.batch_costs.of(num_rows)
        windows = range(self.largest + 1)
        self.round_seconds = [self.costs.round_seconds(window) for window in windows]
        self.draft_is_hopeless = self.best([1.0] * self.largest) == 0
        self.forced_window = max(
            self.choices, key=lambda window: (1 + window) / self.round_seconds[window]
        )

    def draft_seconds(self, window: int) -> float:
        """Seconds of a draft."""
        if window == 0:
            return 0.0
        return self.costs.draft_seconds + window * self.costs.draft_step_seconds

    def speed(
        self,
        lookup_window: int,
        draft_window: int,
        lookup: Estimate,
        draft: Estimate,
    ) -> float:
        """Expected tokens per second of each row with these windows."""
        hit_rate = lookup.offer_rate if lookup_window else 0.0
        all_hit = hit_rate**self.num_rows
        none_hit = (1 - hit_rate) ** self.num_rows

        # A drafter that finds nothing takes its time too; the target's call is wider only for a
        # draft. Its width is that of the row with the longest one.
        some_drafted = 1 - (1 - draft.offer_rate) ** self.num_rows
        standard = self.round_seconds[0]
        lookup_extra = self.round_seconds[lookup_window] - standard
        draft_extra = some_drafted * (self.round_seconds[draft_window] - standard)
        seconds = standard + (1 - all_hit) * self.draft_seconds(draft_window)
        seconds += all_hit * lookup_extra + none_hit * draft_extra
        seconds += (1 - all_hit - none_hit) * max(lookup_extra, draft_extra)
        if lookup_window:
            seconds += self.costs.lookup_seconds or 0.0

        copied = hit_rate * lookup.accepted[lookup_window] if lookup_window else 0.0
        drafted = (1 - hit_rate) * draft.offer_rate * draft.accepted[draft_window]
        return (1 + copied + drafted) / seconds

    def best(self, rates: Sequence[float], offer_rate: float = 1.0) -> int:
        """The window with the most expected tokens per second of a drafter without a lookup.

        0 if none beats standard decoding.

        Args:
            rates: the probability that each position is accepted if those before it are.
            offer_rate: the probability that there is a draft.
        """
        estimate = Estimate(rates, offer_rate)
        # In a tie, `max` returns the first choice: the smaller window.
        return max(self.choices, key=lambda window: self.speed(0, window, NO_LOOKUP, estimate))

    def _best_windows(self) -> tuple[int, int]:
        """The best windows of the lookup and of the draft by what was learned."""
        draft = Estimate(self.draft.rates(), self.draft.offer_rate)
        if self.lookup is None:
            return 0, self.best(draft.rates, draft.offer_rate)

        lookup = Estimate(self.lookup.rates(), self.lookup.offer_rate)
        lookup_window = draft_window = 0
        # Each of the two is best for the other after a few turns.
        for _ in range(2):
            lookup_window = max(
                self.choices, key=lambda window: self.speed(window, draft_window, lookup, draft)
            )
            draft_window = max(
                self.choices, key=lambda window: self.speed(lookup_window, window, lookup, draft)
            )
        return lookup_window, draft_window

    def _loss(self, lookup_window: int, draft_window: int) -> float:
        """What a round loses if all its tokens are rejected, in rounds of standard decoding."""
        standard = self.round_seconds[0]
        width = max(lookup_window, draft_window)
        seconds = self.round_seconds[width] - standard + self.draft_seconds(draft_window)
        if lookup_window:
            seconds += self.costs.lookup_seconds or 0.0
        return seconds / standard

    def _choose(self) -> None:
        """Set the windows of the next round: the best ones that the balance allows."""
        lookup_window, draft_window = self._best_windows()
        available = self.balance + BUDGET
        # A trial uses no credit: that was earned by drafts that paid.
        available_for_trial = min(self.balance, 0.0) + BUDGET

        smallest = next((choice for choice in self.choices if choice > 0), 0)
        tries_draft = draft_window == 0 and not self.draft_is_hopeless
        if self.lookup is not None:
            available_for_fallback = self.fallback_balance + BUDGET
            tries_draft = tries_draft and self._loss(0, smallest) <= available_for_fallback
        if tries_draft and self._loss(lookup_window, smallest) <= available_for_trial:
            draft_window = smallest
            self.balance = min(self.balance, 0.0)
        tries_lookup = lookup_window == 0 and self.lookup is not None
        if tries_lookup and self._loss(smallest, draft_window) <= available_for_trial:
            lookup_window = smallest
            self.balance = min(self.balance, 0.0)

        if available <= 0:
            draft_window = lookup_window = 0
        self.draft_window = draft_window
        self.lookup_window = lookup_window
        self.window = max(lookup_window, draft_window)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from a round, up to each row's first rejection: later noise is used again."""
        if not outcomes:
            return
        has_other_costs = len(outcomes) != self.num_rows
        if has_other_costs:
            self._use_costs_of(len(outcomes))
        # Neither rates nor balance know the tokens that a grammar forces: they would speak for a
        # useless drafter, and pay for its drafts.
        outcomes = [outcome for outcome in outcomes if not outcome.is_forced]
        if not outcomes:
            if has_other_costs:
                self._choose()
            return
        called_window = 0
        for outcome in outcomes:
            if outcome.window == 0:
                continue
            if self.lookup is not None:
                self.lookup.offers.count(outcome.is_copied)
            if outcome.is_copied and self.lookup is not None:
                self.lookup.learn(outcome.num_made, outcome.num_accepted)
                continue
            window = outcome.window
            if self.lookup is not None:
                window = min(window, self.draft_window)
            if window:
                called_window = max(called_window, window)
                self.draft.offers.count(outcome.num_made > 0)
                self.draft.learn(outcome.num_made, outcome.num_accepted)

        num_tokens = 1 + sum(outcome.num_accepted for outcome in outcomes) / len(outcomes)
        self._settle(outcomes, called_window, num_tokens)
        if self.lookup is not None:
            self._settle_fallback(outcomes, called_window, num_tokens)
        self._choose()

    def _settle(
        self,
        outcomes: Sequence[Outcome],
        called_window: int,
        num_tokens: float,
    ) -> None:
        """Add a round's gain over standard decoding to the balance.

        Args:
            called_window: draft tokens that were requested of the draft model; 0 for none.
            num_tokens: new tokens of each row, on average.
        """
        standard = self.round_seconds[0]
        width = max(outcome.num_made for outcome in outcomes)
        seconds = self.round_seconds[width] + self.draft_seconds(called_window)
        if self.lookup is not None and any(outcome.window for outcome in outcomes):
            seconds += self.costs.lookup_seconds or 0.0

        if self.balance < 0:
            self.balance = min(0.0, self.balance + BUDGET_PER_TOKEN * num_tokens)
        balance = self.balance + num_tokens - seconds / standard
        # A wide draft may lose more than the budget at once. It still gets a trial later.
        self.balance = min(MOST_CREDIT, max(-LARGEST_DEBT, balance))

    def _settle_fallback(
        self,
        outcomes: Sequence[Outcome],
        called_window: int,
        num_tokens: float,
    ) -> None:
        """As `_settle`, for what the fallback's drafts gained."""
        balance = min(0.0, self.fallback_balance + BUDGET_PER_TOKEN * num_tokens)
        if called_window:
            drafted = [outcome for outcome in outcomes if not outcome.is_copied]
            width = max(outcome.num_made for outcome in drafted)
            standard = self.round_seconds[0]
            seconds = self.draft_seconds(called_window) + self.round_seconds[width] - standard
            num_accepted = sum(outcome.num_accepted for outcome in drafted) / len(outcomes)
            balance += num_accepted - seconds / standard
        self.fallback_balance = min(0.0, max(-LARGEST_DEBT, balance))


class _SharedPlan(Plan):
    """One controller for all rows."""

    def __init__(self, costs: BatchCosts) -> None:
        self._costs = costs
        self._controller = Controller(costs)

    def keep_to_measured(self) -> None:
        self._controller = Controller(self._costs, measured_only=True)

    @property
    def shared_window(self) -> int | None:  # type: ignore[override]
        return self._controller.window

    def windows(self, rows: Sequence[Request]) -> list[int]:
        return [window_of(row, self._controller.window) for row in rows]

    def fallback_windows(self, rows: Sequence[Request]) -> list[int] | None:
        if self._controller.lookup is None:
            return None
        return [window_of(row, self._controller.draft_window) for row in rows]

    def forced_windows(self, rows: Sequence[Request]) -> list[int] | None:
        return [window_of(row, self._controller.forced_window) for row in rows]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._controller.learn(outcomes)


class _RowPlan(Plan):
    """A controller for each row, so that no row depends on its batch."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._measured_only = False
        self._controllers: WeakKeyDictionary[Request, Controller] = WeakKeyDictionary()

    def keep_to_measured(self) -> None:
        self._measured_only = True

    def _controller(self, row: Request) -> Controller:
        if row not in self._controllers:
            controller = Controller(self._calibration, measured_only=self._measured_only)
            self._controllers[row] = controller
        return self._controllers[row]

    def windows(self, rows: Sequence[Request]) -> list[int]:
        windows = []
        for row in rows:
            # A row that is not live needs no controller.
            largest = self._controller(row).window if row.live else 0
            windows.append(window_of(row, largest))
        return windows

    def fallback_windows(self, rows: Sequence[Request]) -> list[int] | None:
        if self._calibration.lookup_seconds is None:
            return None
        windows = []
        for row in rows:
            largest = self._controller(row).draft_window if row.live else 0
            windows.append(window_of(row, largest))
        return windows

    def forced_windows(self, rows: Sequence[Request]) -> list[int] | None:
        windows = []
        for row in rows:
            largest = self._controller(row).forced_window if row.live else 0
            windows.append(window_of(row, largest))
        return windows

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._controller(outcome.row).learn([outcome])
