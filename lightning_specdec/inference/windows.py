"""How many tokens a round guesses: always the same number, or as many as pay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lightning_specdec.checks import require_int
from lightning_specdec.inference.costs import Calibration
from lightning_specdec.inference.planning import Course
from lightning_specdec.inference.rows import Row


@dataclass
class Outcome:
    """What became of one live row's guesses in a round: how many it was asked for, made, and saw accepted."""

    row: Row
    window: int
    num_made: int
    num_accepted: int


class Plan(ABC):
    """The windows of one session, round by round."""

    @abstractmethod
    def windows(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens to guess next for each row; 0 for rows that are not live."""

    def first_token(self, row: Row) -> int:
        """Where the part of the row's text begins that the draft gets to see."""
        return 0

    def learn(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Take in a round, in which these rows were live. Nothing to learn by default."""

    def resume(self, row: Row, former: Row, num_shared: int) -> None:  # noqa: B027
        """A row goes on from the first `num_shared` tokens of a former one's text.

        Whether the draft still has what it read of them depends on which rows came between, and windows must not. So
        they are planned as if it had. Nothing to take over by default.
        """


class Window(ABC):
    """How a session chooses its windows. It holds settings alone, so one serves any number of sessions."""

    largest: int

    @abstractmethod
    def plan(self, *, jointly: bool) -> Plan:
        """The windows of a new session.

        Args:
            jointly: whether the output is the same whatever the windows, so that rows may share what they learn.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record from which `window_from_dict` makes it again."""


class FixedWindow(Window):
    """The same number of guesses in every round, fewer where a row wants fewer.

    Args:
        num_draft_tokens: guesses per round.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.largest = require_int("num_draft_tokens", num_draft_tokens, 1)

    def plan(self, *, jointly: bool) -> Plan:
        return _FixedPlan(self.largest)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "FixedWindow", "num_draft_tokens": self.largest}


class _FixedPlan(Plan):
    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [min(self.num_draft_tokens, row.remaining - 1) if row.live else 0 for row in rows]


class AdaptiveWindow(Window):
    """As many guesses as make the expected tokens per second largest; none where standard decoding is faster.

    Theory: see `planning`. Estimates and costs are numbers that do not depend on the clock, so the same seed and the
    same calibration give the same windows. Where a rule's output does not depend on windows (`ExactMatch`; any lossless
    rule at temperature 0), the batch has one window, planned from what all its rows have shown. Elsewhere a
    round that begins at another place draws other tokens: a row is planned by its own history alone, as if the other
    rows were like it, and with the costs of the largest batch that was measured, so that it decodes as it would by
    itself. The price is that a row that guesses much widens the call for rows that do not, and that each row
    learns anew what its draft is worth. What lies behind a first rejection is never looked at: its uniform numbers
    are drawn again.

    A long prompt costs a draft much to read. It is shown only as much of the prompt's end as the promise allows for.

    Args:
        calibration: what calls cost, measured by `bench.calibration` and recorded with every result.
        max_draft_tokens: most guesses of a round; as many as the calibration knows the costs of when None.
    """

    def __init__(self, calibration: Calibration, *, max_draft_tokens: int | None = None) -> None:
        known = calibration.largest_window
        most = known if max_draft_tokens is None else max_draft_tokens
        self.calibration, self.largest = calibration, require_int("max_draft_tokens", most, 1, known)

    def plan(self, *, jointly: bool) -> Plan:
        return _JointPlan(self.calibration, self.largest) if jointly else _SeparatePlan(self.calibration, self.largest)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "AdaptiveWindow",
            "max_draft_tokens": self.largest,
            "calibration": self.calibration.to_dict(),
        }


class _Reader:
    """How far the draft has read one row's text.

    Args:
        first: where the part that it gets to see begins.
    """

    def __init__(self, first: int) -> None:
        self.first = self.read = first
        self.unread = 0

    def look(self, row: Row) -> int:
        """Tokens that the draft would have to read now, besides those that every round leaves behind."""
        self.unread = len(row.text) - self.read
        return self.unread

    def catch_up(self, row: Row) -> None:
        """The draft has guessed for the row."""
        self.read = len(row.text)


class _AdaptivePlan(Plan):
    """What both ways of planning share: how far the draft has read each row."""

    def __init__(self, calibration: Calibration, largest: int) -> None:
        self.calibration, self.largest = calibration, largest
        self._readers: WeakKeyDictionary[Row, _Reader] = WeakKeyDictionary()

    def first_token(self, row: Row) -> int:
        reader = self._readers.get(row)
        return 0 if reader is None else reader.first

    def resume(self, row: Row, former: Row, num_shared: int) -> None:
        reader = self._readers.get(former)
        if reader is not None and reader.first < min(num_shared, row.prompt_length - 1):
            self._readers[row] = _Reader(reader.first)
            self._readers[row].read = min(reader.read, num_shared)

    def _look(self, row: Row, course: Course) -> int:
        """Tokens that the draft would have to read of the row now."""
        reader = self._readers.get(row)
        if reader is None:
            length = row.prompt_length
            course.prompt_seconds += length * course.costs.target_token_seconds
            reader = self._readers[row] = _Reader(length - max(min(2, length), course.readable(length)))
        return reader.look(row)


class _JointPlan(_AdaptivePlan):
    """One window for all rows, from one estimate."""

    def __init__(self, calibration: Calibration, largest: int) -> None:
        super().__init__(calibration, largest)
        self.course = Course(calibration.costs[-1], largest)

    def windows(self, rows: Sequence[Row]) -> list[int]:
        if (costs := self.calibration.at(len(rows))) is not self.course.costs:
            self.course.set_costs(costs)
        unread = max(self._look(row, self.course) for row in rows if row.live)
        window = self.course.choose(max(row.remaining for row in rows if row.live), unread)
        return [min(window, row.remaining - 1) if row.live else 0 for row in rows]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        window, readers = max(each.window for each in outcomes), [self._readers[each.row] for each in outcomes]
        unread = max(reader.unread for reader in readers)
        self.course.learn(window, unread, [(each.window, each.num_made, each.num_accepted) for each in outcomes])
        if window:
            for reader, outcome in zip(readers, outcomes, strict=True):
                reader.catch_up(outcome.row)


class _SeparatePlan(_AdaptivePlan):
    """Each row by itself."""

    def __init__(self, calibration: Calibration, largest: int) -> None:
        super().__init__(calibration, largest)
        self._courses: WeakKeyDictionary[Row, Course] = WeakKeyDictionary()

    def resume(self, row: Row, former: Row, num_shared: int) -> None:
        super().resume(row, former, num_shared)
        if former in self._courses:
            self._courses[row] = self._courses[former]

    def _window(self, row: Row) -> int:
        course = self._courses.get(row)
        if course is None:
            course = self._courses[row] = Course(self.calibration.costs[-1], self.largest)
        return course.choose(row.remaining, self._look(row, course))

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [self._window(row) if row.live else 0 for row in rows]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for each in outcomes:
            reader = self._readers[each.row]
            outcome = each.window, each.num_made, each.num_accepted
            self._courses[each.row].learn(each.window, reader.unread, [outcome])
            if each.window:
                reader.catch_up(each.row)


def as_window(num_draft_tokens: int | Window) -> Window:
    """A window from what users give: an integer is a fixed one."""
    return num_draft_tokens if isinstance(num_draft_tokens, Window) else FixedWindow(num_draft_tokens)


def window_from_dict(values: dict[str, Any]) -> Window:
    """The inverse of `Window.to_dict`, to decode again as a record says.

    Raises:
        ValueError: the values describe no window.
    """
    if values.get("kind") == "FixedWindow":
        return FixedWindow(values["num_draft_tokens"])
    if values.get("kind") == "AdaptiveWindow":
        calibration = Calibration.from_dict(values["calibration"])
        return AdaptiveWindow(calibration, max_draft_tokens=values["max_draft_tokens"])
    raise ValueError(f"a window is a FixedWindow or an AdaptiveWindow, got {values.get('kind')!r}")
