"""What a slow call is doing, so that nothing that takes seconds is silent.

The library names slow steps with `Activity`. In Python, they are log records of `lightning_specdec`
while they last. The command line shows them with a `Reporter`: in a terminal as one line that is
redrawn, and elsewhere as a line every ten seconds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import TypeVar

from lightning_specdec.config.terminal import STATUS_LINE, note_output, say, seconds_since_output

log = logging.getLogger(__name__)

FIRST_SECONDS = 5.0
"""Time after which a slow call is first reported."""
REPORT_SECONDS = 10.0
"""Time between two reports."""
REDRAW_SECONDS = 0.5
"""Time between two updates of the line in a terminal."""


A = TypeVar("A", bound="Activity")


class Activity:
    """A step that may take seconds, as a context; `advance` counts its parts.

    Args:
        text: what is done, for example "measuring what a round costs".
        total: number of parts; None if it is unknown.
        unit: what a part is, for example "tokens".
        level: level of the log records in Python. A step that the caller did not ask for is a
            warning, which Python shows by default.
    """

    def __init__(
        self,
        text: str,
        total: int | None = None,
        *,
        unit: str = "",
        level: int = logging.INFO,
    ) -> None:
        self.text = text
        self.total = total
        self.unit = unit
        self.level = level
        self.num_done = 0
        self._start = time.monotonic()
        self._next_report = self._start + FIRST_SECONDS

    def __enter__(self: A) -> A:
        self._start = time.monotonic()
        self._next_report = self._start + FIRST_SECONDS
        _activities.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self in _activities:
            _activities.remove(self)

    def advance(self, count: int = 1) -> None:
        """Count parts that are done; reports the step if it has taken long."""
        self.num_done += count
        now = time.monotonic()
        if _reporter is None and now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            log.log(self.level, "%s", self.describe())

    def announce(self) -> None:
        """Report the step before it takes long, if it has no parts that `advance` could count."""
        if _reporter is None:
            log.log(self.level, "%s", self.text)

    @property
    def is_slow(self) -> bool:
        """Whether the step has taken so long that it is worth a report."""
        return time.monotonic() - self._start >= FIRST_SECONDS

    def describe(self) -> str:
        """The text with how far the step is, and an estimate of the time left."""
        elapsed = time.monotonic() - self._start
        if self.total is None:
            return f"{self.text}, {elapsed:.0f} s"
        description = f"{self.text}: {self.num_done} of {self.total} {self.unit}".rstrip()
        if 0 < self.num_done <= self.total:
            seconds_left = elapsed * (self.total - self.num_done) / self.num_done
            return f"{description}, about {seconds_left:.0f} s left"
        return f"{description}, {elapsed:.0f} s"


_activities: list[Activity] = []
"""The steps that run at present; the innermost is last."""
_reporter: Reporter | None = None


class Reporter:
    """Shows on stderr what the command line is doing, from a separate thread.

    Args:
        is_quiet: whether to show nothing.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._activity: Activity | None = None
        self._is_shown_elsewhere = False
        self._report_seconds: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")

    def start(self) -> None:
        """Begin to report."""
        global _reporter
        note_output()
        _reporter = self
        if not self.is_quiet:
            self._thread.start()

    def stop(self) -> None:
        """End the reports, and remove the line from the terminal."""
        global _reporter
        if _reporter is self:
            _reporter = None
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        STATUS_LINE.erase()

    def show(
        self,
        text: str,
        *,
        is_shown_elsewhere: bool = False,
        report_seconds: float | None = None,
    ) -> None:
        """Set what is done outside of any `Activity`; "" for nothing that takes time.

        Args:
            is_shown_elsewhere: whether a terminal has a progress bar for it.
            report_seconds: longest silence elsewhere; by default `REPORT_SECONDS`.
        """
        self._activity = Activity(text) if text else None
        self._report_seconds = report_seconds
        self._is_shown_elsewhere = is_shown_elsewhere

    def _run(self) -> None:
        while not self._stopped.wait(REDRAW_SECONDS):
            text = self._text()
            if text is None:
                STATUS_LINE.erase()
            elif sys.stderr.isatty():
                if not self._is_shown_elsewhere:
                    STATUS_LINE.draw(text)
            elif seconds_since_output() >= (self._report_seconds or REPORT_SECONDS):
                say(text, file=sys.stderr, flush=True)

    def _text(self) -> str | None:
        slow_steps = [activity for activity in list(_activities) if activity.is_slow]
        # The outermost of them says most about the time left.
        slow_step = slow_steps[0] if slow_steps else None
        descriptions = []
        activity = self._activity
        if activity is not None and (slow_step is None or slow_step.text != activity.text):
            descriptions.append(activity.describe())
        if slow_step is not None:
            descriptions.append(slow_step.describe())
        return "; ".join(descriptions) or None


def show_activity(
    text: str,
    *,
    is_shown_elsewhere: bool = False,
    report_seconds: float | None = None,
) -> None:
    """Tell the command line's reporter what is done, see `Reporter.show`."""
    if _reporter is not None:
        _reporter.show(text, is_shown_elsewhere=is_shown_elsewhere, report_seconds=report_seconds)
