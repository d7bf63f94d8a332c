"""The number of draft tokens per round: fixed, or chosen by acceptance rates and measured costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any
from weakref import WeakKeyDictionary

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.decoding.rows import Row

DEFAULT_WINDOW = 3
"""Draft tokens per round where nobody chooses."""
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
"""Acceptance rate that is assumed before a draft token was tested, and the number of tests that this is worth."""
NEIGHBOUR_WEIGHT = 6.0
"""The number of tests that the rate of the position before is worth to a position."""
MEMORY = 10.0
"""Tests of a position that are remembered; older ones fade."""
TRIAL_SHARE = 0.004
"""Share of the time that trials take where drafting does not pay."""


@dataclass(frozen=True)
class Calibration(Settings):
    """Measured seconds of the calls of a target and its drafter on one machine.

    Args:
        widths: tokens per target call that were measured, ascending from 1.
        target_seconds: seconds of a target call, for each width.
        loop_seconds: seconds of a round besides its model calls, for each width.
        draft_seconds: seconds of a draft apart from its tokens.
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
        rising = list(self.widths) == sorted({1, *self.widths})
        if not rising or not len(self.widths) == len(self.target_seconds) == len(self.loop_seconds):
            raise ValueError("widths must rise from 1 and have seconds each: measure again")

    def round_seconds(self, num_draft_tokens: int) -> float:
        """A round (of 0 draft tokens: a standard step) without its draft, linear between the measured widths."""
        width, seconds = num_draft_tokens + 1, map(add, self.target_seconds, self.loop_seconds)
        points = list(zip(self.widths, seconds, strict=True))
        (low, fast), (high, slow) = next(
            each for each in pairwise(points[:1] + points) if width <= each[1][0]
        )
        return slow - (slow - fast) * (high - width) / max(high - low, 1)


@dataclass
class Outcome:
    """A live row's round: how many draft tokens were requested, made, and accepted."""

    row: Row
    window: int
    num_made: int
    num_accepted: int


class Plan(ABC):
    """The windows of one session, round by round.

    Attributes:
        ahead: of all rows in the next round, before the last one is learnt from; None where that is not known.
    """

    ahead: int | None = None

    @abstractmethod
    def windows(self, rows: Sequence[Row]) -> list[int]:
        """The number of draft tokens that each row gets next; 0 for rows that are not live."""

    def learn(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Take in a round, in which these rows were live."""

    def keep_to_measured(self) -> None:  # noqa: B027
        """Choose measured windows alone from now on, since calls are recorded for each one."""


class Window(ABC):
    """How a session chooses the number of draft tokens per round. One object serves any number of sessions."""

    largest: int

    @abstractmethod
    def plan(self, *, jointly: bool) -> Plan:
        """The windows of a new session; `jointly` where they change no output, so that rows may share them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record from which `window_from_dict` makes it again."""


class FixedWindow(Window, Plan):
    """The same number of draft tokens in every round, fewer at a row's end; 0 is standard decoding."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.largest = self.ahead = require_int("num_draft_tokens", num_draft_tokens, 0)

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [min(self.largest, row.remaining - 1) if row.live else 0 for row in rows]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "FixedWindow", "num_draft_tokens": self.largest}


class AdaptiveWindow(Window):
    """Chooses the draft tokens per round with the most expected tokens per second; 0 where standard decoding is faster.

    It estimates acceptance rates from the rounds so far. Under a rule whose output does not depend on the window, the
    rows of a session share the estimate. Otherwise each row has its own, so that its output does not depend on the
    batch. The same seed and calibration give the same windows.

    Args:
        calibration: measured costs. The largest window is its last width - 1.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration, self.largest = calibration, calibration.widths[-1] - 1

    def plan(self, *, jointly: bool) -> Plan:
        return _AdaptivePlan(self.calibration, jointly=jointly)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "AdaptiveWindow", "calibration": self.calibration.to_dict()}


def as_window(num_draft_tokens: int | str | Window | None) -> Window:
    """The window of a config: an integer is a fixed one, and "auto" needs a `SpeculativeDecoder`."""
    if isinstance(num_draft_tokens, str):
        raise ValueError(
            'num_draft_tokens "auto" needs measured costs: use SpeculativeDecoder, or an AdaptiveWindow'
        )
    if isinstance(num_draft_tokens, Window):
        return num_draft_tokens
    return FixedWindow(DEFAULT_WINDOW if num_draft_tokens is None else num_draft_tokens)


def window_from_dict(values: dict[str, Any]) -> Window:
    """The inverse of `Window.to_dict`, to decode again as a record says."""
    if values.get("kind") == "FixedWindow":
        return FixedWindow(values["num_draft_tokens"])
    if values.get("kind") == "AdaptiveWindow":
        return AdaptiveWindow(Calibration.from_dict(values["calibration"]))
    raise ValueError(f"a window is a FixedWindow or an AdaptiveWindow, got {values.get('kind')!r}")


@dataclass
class Rate:
    """How often something happened; older trials fade."""

    hits: float = 0.0
    trials: float = 0.0

    def count(self, hit: bool) -> None:
        kept = min(1.0, (MEMORY - 1) / self.trials) if self.trials else 1.0
        self.hits, self.trials = self.hits * kept + hit, self.trials * kept + 1


class Controller:
    """The windows of one row, or of rows that share an estimate.

    It takes the best window by acceptance rates for each position and measured costs (Leviathan et al. 2023, equation
    1). Where none beats standard decoding, one draft token is tried when the rounds since the last rejection are so
    many that the trial takes `TRIAL_SHARE` of their time.

    Attributes:
        window: of the next round.
    """

    def __init__(self, costs: Calibration, *, measured_only: bool = False) -> None:
        self.costs, largest = costs, costs.widths[-1] - 1
        self.choices = (
            [width - 1 for width in costs.widths] if measured_only else range(largest + 1)
        )
        self.round_seconds = [costs.round_seconds(window) for window in range(largest + 1)]
        # The prior fades like other tests: a useless draft would be kept alive by it otherwise.
        self.positions = [
            Rate(PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT),
            *(Rate() for _ in range(1, largest)),
        ]
        self.offers = Rate(1.0, 1.0)
        """How often the drafter made a token: a lookup may find nothing."""
        self.rounds_since_rejection = 0
        plain = self.round_seconds[0]
        trial_seconds = (
            costs.draft_seconds + costs.draft_step_seconds + self.round_seconds[1] - plain
        )
        self.rounds_before_trial = trial_seconds / (TRIAL_SHARE * plain)
        self.hopeless = self.best([1.0] * largest) == 0
        self.window = self.next_window()

    def best(self, rates: Sequence[float], offered: float = 1.0) -> int:
        """The window with the most expected tokens per second; 0 where none beats standard decoding.

        Args:
            rates: how likely each position is accepted, once those before are.
            offered: how likely there is a draft at all.
        """
        plain = self.round_seconds[0]
        speeds = [1 / plain]
        for window, accepted in enumerate(accumulate(accumulate(rates, mul)), start=1):
            draft = self.costs.draft_seconds + window * self.costs.draft_step_seconds
            seconds = draft + plain + offered * (self.round_seconds[window] - plain)
            speeds.append((1 + offered * accepted) / seconds)
        return max(self.choices, key=speeds.__getitem__)

    def next_window(self) -> int:
        """The best window by what was learnt; 1 or 0 where that is standard decoding."""
        if self.hopeless:
            return 0
        rate, rates = 0.0, []
        for i, each in enumerate(self.positions):
            weight = NEIGHBOUR_WEIGHT if i else 0.0
            rate = (each.hits + weight * rate) / (each.trials + weight)
            rates.append(rate)
        best = self.best(rates, self.offers.hits / self.offers.trials)
        return best or int(self.rounds_since_rejection >= self.rounds_before_trial)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Take in a round: of each row up to the first rejection, since the noise behind it is used again."""
        self.rounds_since_rejection += 1
        for each in outcomes:
            if each.window:
                self.offers.count(each.num_made > 0)
            for i in range(min(each.num_made, each.num_accepted + 1)):
                self.positions[i].count(i < each.num_accepted)
            if each.num_accepted < max(each.num_made, min(each.window, 1)):
                self.rounds_since_rejection = 0
        self.window = self.next_window()


class _AdaptivePlan(Plan):
    def __init__(self, calibration: Calibration, *, jointly: bool) -> None:
        self.new = partial(Controller, calibration)
        self.shared = self.new() if jointly else None
        self.own: WeakKeyDictionary[Row, Controller] = WeakKeyDictionary()

    def keep_to_measured(self) -> None:
        self.new = partial(self.new, measured_only=True)
        self.shared = self.shared and self.new()

    @property
    def ahead(self) -> int | None:  # type: ignore[override]
        return None if self.shared is None else self.shared.window

    def _controller(self, row: Row) -> Controller:
        if self.shared is None and row not in self.own:
            self.own[row] = self.new()
        return self.shared or self.own[row]

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [
            min(self._controller(row).window, row.remaining - 1) if row.live else 0 for row in rows
        ]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if self.shared is not None:
            self.shared.learn(outcomes)
        else:
            for each in outcomes:
                self._controller(each.row).learn([each])
