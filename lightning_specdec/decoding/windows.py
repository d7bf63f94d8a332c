"""The number of draft tokens per round: fixed, or chosen by acceptance rates and measured costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.decoding.requests import Request
from lightning_specdec.drafters import Draft

DEFAULT_WINDOW = 3
"""Draft tokens per round if nobody chooses."""

PRIOR_RATE = 0.8
"""Acceptance rate that is assumed before a draft token was tested."""

PRIOR_WEIGHT = 2.0
"""Number of tests that the prior rate is worth."""

NEIGHBOR_WEIGHT = 6.0
"""Number of tests that the rate of the previous position is worth to a position."""

MEMORY = 10.0
"""Number of tests of a position that are remembered; older ones fade."""

TRIAL_SHARE = 0.004
"""Share of the time that trials take if drafting does not pay."""


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

    Raises:
        ValueError: the widths do not ascend from 1, or a width lacks its seconds.
    """

    widths: tuple[int, ...] = setting(minimum=1)
    target_seconds: tuple[float, ...] = setting(above=0)
    loop_seconds: tuple[float, ...] = setting(minimum=0)
    draft_seconds: float = setting(minimum=0)
    draft_step_seconds: float = setting(minimum=0)
    target_token_seconds: float = setting(minimum=0)

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


def window_of(row: Request, largest: int) -> int:
    """The number of draft tokens that a row requests, up to `largest`.

    It is one less than the tokens that may follow, because the target adds the last one; and 0 for
    a row that is not live.
    """
    if not row.live:
        return 0
    return min(largest, row.remaining - 1)


@dataclass
class Outcome:
    """A live row's round: how many draft tokens were requested, made, and accepted."""

    row: Request
    window: int
    num_made: int
    num_accepted: int


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
        calibration: measured costs. The largest window is its last width - 1.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.largest = calibration.widths[-1] - 1

    def plan(self, *, jointly: bool) -> Plan:
        if jointly:
            return _SharedPlan(self.calibration)
        return _RowPlan(self.calibration)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "AdaptiveWindow", "calibration": self.calibration.to_dict()}


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


class Controller:
    """The windows of one row, or of rows that share an estimate.

    It takes the best window by acceptance rates for each position and measured costs (Leviathan et
    al. 2023, equation 1). If none beats standard decoding, it tries one draft token from time to
    time: so rarely that trials take `TRIAL_SHARE` of the time.

    Args:
        costs: measured costs.
        measured_only: whether to choose only windows that were measured.

    Attributes:
        window: of the next round.
    """

    def __init__(self, costs: Calibration, *, measured_only: bool = False) -> None:
        self.costs = costs
        largest = costs.widths[-1] - 1
        self.choices: Sequence[int] = range(largest + 1)
        if measured_only:
            self.choices = [width - 1 for width in costs.widths]
        self.round_seconds = [costs.round_seconds(window) for window in range(largest + 1)]

        # The prior fades like real tests: it would keep a useless draft alive otherwise.
        self.positions = [Rate() for _ in range(max(1, largest))]
        self.positions[0] = Rate(PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self.offers = Rate(1.0, 1.0)
        """How often the drafter made a token: a lookup may find nothing."""

        # A trial is a round with one draft token. It costs more than a round of standard decoding.
        self.rounds_since_rejection = 0
        standard_seconds = self.round_seconds[0]
        draft_seconds = costs.draft_seconds + costs.draft_step_seconds
        trial_seconds = draft_seconds + self.round_seconds[1] - standard_seconds
        self.rounds_before_trial = trial_seconds / (TRIAL_SHARE * standard_seconds)

        best_if_all_accepted = self.best([1.0] * largest)
        self.hopeless = best_if_all_accepted == 0
        self.window = self.choose_window()

    def best(self, rates: Sequence[float], offer_rate: float = 1.0) -> int:
        """The window with the most expected tokens per second; 0 if none beats standard decoding.

        Args:
            rates: the probability that each position is accepted if those before it are.
            offer_rate: the probability that there is a draft.
        """
        standard_seconds = self.round_seconds[0]
        speeds = [1 / standard_seconds]
        all_accepted_probability = 1.0
        expected_accepted = 0.0
        for window, rate in enumerate(rates, start=1):
            all_accepted_probability *= rate
            expected_accepted += all_accepted_probability
            # A drafter that finds nothing takes its time too; the target's call is wider only for
            # a draft.
            drafting_seconds = self.costs.draft_seconds + window * self.costs.draft_step_seconds
            extra_seconds = offer_rate * (self.round_seconds[window] - standard_seconds)
            seconds = drafting_seconds + standard_seconds + extra_seconds
            expected_tokens = 1 + offer_rate * expected_accepted
            speeds.append(expected_tokens / seconds)
        # In a tie, `max` returns the first choice: the smaller window.
        return max(self.choices, key=speeds.__getitem__)

    def choose_window(self) -> int:
        """The best window by what was learned.

        If that is standard decoding: 1 when a trial is due, else 0.
        """
        if self.hopeless:
            return 0

        # A position with few tests is estimated from the one before it.
        rates: list[float] = []
        for i, position in enumerate(self.positions):
            if i == 0:
                rates.append(position.hits / position.trials)
                continue
            hits = position.hits + NEIGHBOR_WEIGHT * rates[-1]
            rates.append(hits / (position.trials + NEIGHBOR_WEIGHT))

        offer_rate = self.offers.hits / self.offers.trials
        best = self.best(rates, offer_rate)
        if best == 0 and self.rounds_since_rejection >= self.rounds_before_trial:
            return 1
        return best

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from a round, up to each row's first rejection: later noise is used again."""
        self.rounds_since_rejection += 1
        for outcome in outcomes:
            if outcome.window:
                self.offers.count(outcome.num_made > 0)

            # The accepted tokens were tested, and the rejected one after them if there is one.
            num_tested = min(outcome.num_made, outcome.num_accepted + 1)
            for i in range(num_tested):
                self.positions[i].count(i < outcome.num_accepted)

            # A draft that was requested and not made counts as one rejected token.
            num_expected = max(outcome.num_made, min(outcome.window, 1))
            if outcome.num_accepted < num_expected:
                self.rounds_since_rejection = 0
        self.window = self.choose_window()


class _SharedPlan(Plan):
    """One controller for all rows."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._controller = Controller(calibration)

    def keep_to_measured(self) -> None:
        self._controller = Controller(self._calibration, measured_only=True)

    @property
    def shared_window(self) -> int | None:  # type: ignore[override]
        return self._controller.window

    def windows(self, rows: Sequence[Request]) -> list[int]:
        return [window_of(row, self._controller.window) for row in rows]

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

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._controller(outcome.row).learn([outcome])
