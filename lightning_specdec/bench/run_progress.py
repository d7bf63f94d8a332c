"""How far a measurement is, and how long the rest of it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Any

from lightning_specdec.bench.pieces import Tape
from lightning_specdec.config.activity import Activity

REPORT_SECONDS = 5.0
"""Longest silence of the command line while it measures."""


class RunProgress(Activity):
    """Counts the runs of a measurement, and estimates the time of those that are left.

    Each case has its own speed, which is known from its first answers on. A case that has not begun
    is expected to be as fast as the same way to decode in another group, or else as the mean of all
    cases that have.

    Args:
        text: what is measured.
        num_runs: how often each case still runs, by its cell.
        way_of: what cells of several groups have in common, by cell.

    Attributes:
        deadline: when the runs end even if not all is done, on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        text: str,
        num_runs: Mapping[Any, int],
        way_of: Mapping[Any, Hashable] | None = None,
    ) -> None:
        super().__init__(text, sum(num_runs.values()), unit="runs")
        self._num_left: dict[Hashable, int] = dict(num_runs)
        self._way_of: dict[Hashable, Hashable] = dict(way_of or {})
        self._run_seconds: dict[Hashable, float] = {}
        self._current_seconds: dict[Hashable, float] = {}
        self._timed_seconds = 0.0
        self._wall_seconds = 0.0
        self._last_time: float | None = None
        self.deadline = math.inf

    def resume(self) -> None:
        """Continue the clock of the wall time, which `pause` stops while a group is prepared."""
        self._last_time = time.perf_counter()

    def pause(self) -> None:
        self._last_time = None

    def after_piece(self, cell: Hashable, tape: Tape, max_tokens: int) -> None:
        """Learn from the piece that a case has just run.

        Args:
            max_tokens: new tokens of each answer if none ends early.
        """
        seconds_before = self._current_seconds.get(cell, 0.0)
        self._current_seconds[cell] = tape.seconds
        self._timed_seconds += tape.seconds - seconds_before
        now = time.perf_counter()
        if self._last_time is not None:
            self._wall_seconds += now - self._last_time
            self._last_time = now

        expected_seconds = tape.expected_seconds(max_tokens)
        if expected_seconds is not None:
            self._run_seconds[cell] = expected_seconds
        self.advance(0)

    def finish_run(self, cell: Hashable) -> None:
        """Count a run of a case."""
        self._current_seconds.pop(cell, None)
        if self._num_left.get(cell, 0) > 0:
            self._num_left[cell] -= 1
            self.advance()

    def drop(self, cell: Hashable) -> None:
        """Leave out the runs of a case that has failed."""
        self._current_seconds.pop(cell, None)
        num_dropped = self._num_left.pop(cell, 0)
        assert self.total is not None
        self.total -= num_dropped

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds of all runs that are left; None before the first piece."""
        if not self._run_seconds:
            return None
        total_seconds = 0.0
        for cell, num_left in self._num_left.items():
            if num_left:
                seconds = num_left * self._expected_run_seconds(cell)
                total_seconds += max(0.0, seconds - self._current_seconds.get(cell, 0.0))
        # Time between the pieces, such as that of writing the rows, is not in their clocks.
        overhead = self._wall_seconds / self._timed_seconds if self._timed_seconds else 1.0
        seconds_until_deadline = max(0.0, self.deadline - time.monotonic())
        return min(total_seconds * max(1.0, overhead), seconds_until_deadline)

    def _expected_run_seconds(self, cell: Hashable) -> float:
        if cell in self._run_seconds:
            return self._run_seconds[cell]
        way = self._way_of.get(cell)
        same_way = []
        for other_cell, seconds in self._run_seconds.items():
            if way is not None and self._way_of.get(other_cell) == way:
                same_way.append(seconds)
        return fmean(same_way or self._run_seconds.values())

    def describe(self) -> str:
        seconds_left = self.seconds_left
        if seconds_left is None:
            seconds = time.monotonic() - self._start
            return f"{self.text}: 0 of {self.total} runs, {seconds:.0f} s"
        description = f"{self.text}: {self.num_done} of {self.total} runs"
        return f"{description}, about {seconds_left:.0f} s left"
