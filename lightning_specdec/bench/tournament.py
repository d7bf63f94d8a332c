"""Successive halving: candidates take turns, and the time goes to those that may still win.

Knows nothing of models: a `Race` measures, and a synthetic one tests this file.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from lightning_specdec.bench.statistics import (
    LEVEL,
    NUM_BLOCKS,
    Interval,
    Pair,
    piece_interval,
    relative_interval,
)
from lightning_specdec.bench.verdict import Verdict, judge, level_among

STANDARD_NAME = "standard decoding"
"""What a candidate is compared with if there is no other one."""
FEWEST_TURNS = NUM_BLOCKS
"""Turns before a candidate is dropped."""
ENOUGH_TURNS = 24
"""Turns after which a tournament may end before its time is over."""
MOST_TURNS = 240
"""Turns after which candidates that are not told apart are as good as equal."""
CLOSE = 0.02
"""Candidates whose speeds differ by less than this share are not worth more time."""
QUALIFYING_TURNS = 4
"""Turns before a candidate fails to qualify."""
QUALIFYING_LEVEL = 0.99
"""Level of the interval by which it fails."""
DROP_LEVEL = 0.998
"""Level of the interval by which a candidate is dropped, and by which a tournament ends before its
time is over. It is high, because every turn is another chance of a mistake."""


class Race(ABC):
    """Measures candidates beside standard decoding, a piece of each in a turn.

    Attributes:
        failed: candidates that cannot be measured, and why.
    """

    failed: Mapping[str, str] = {}

    @abstractmethod
    def run_turn(self, names: Sequence[str]) -> None:
        """Measure a piece of standard decoding, and one of each of these candidates."""

    @abstractmethod
    def pairs(self, name: str) -> Mapping[int, Pair]:
        """By turn, seconds of standard decoding and of a candidate for the same tokens."""

    def all_pairs(self, name: str) -> Sequence[Pair]:
        """The pairs of a candidate in the order measured, with those of earlier races, if any."""
        return list(self.pairs(name).values())


class Tournament:
    """Finds the fastest of several candidates in a given time.

    A candidate is dropped if its interval shows that it is slower than the leader. The time is
    divided into stages, and after each stage at most half of the candidates go on. Those that may
    still win by their intervals, but look slowest, are set aside.

    Args:
        race: measures the candidates.
        names: the candidates; at least one.
        seconds: how long it may last.
        clock: returns the present time in seconds.

    Attributes:
        live: candidates that are still measured.
        slower: candidates that were dropped, and the leader at that time.
        set_aside: candidates that were given no more time.
    """

    def __init__(
        self,
        race: Race,
        names: Sequence[str],
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not names:
            raise ValueError("there is no candidate: give at least one")
        self.race = race
        self.names = list(names)
        self.live = list(names)
        self.slower: dict[str, str] = {}
        self.set_aside: list[str] = []
        self.num_turns = 0
        self._clock = clock
        self._started = clock()
        self._seconds = seconds

    def run(self, watch: Callable[[], None] = lambda: None) -> None:
        """Run until the time is over or more time would not change the answer.

        Args:
            watch: called after each turn.
        """
        num_stages = max(1, math.ceil(math.log2(max(1, len(self.names)))))
        for stage in range(1, num_stages + 1):
            stage_end = self._started + self._seconds * stage / num_stages
            # A stage has at least one turn, however slow the machine is.
            while True:
                self.run_turn()
                self._drop_slower()
                watch()
                if self._is_decided() or not self.seconds_left:
                    return
                if self._clock() >= stage_end:
                    break
            if stage < num_stages:
                self._keep(math.ceil(len(self.names) / 2**stage))

    def qualify(
        self,
        rivals: Mapping[str, str | None],
        watch: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Run until each candidate is proven slower or faster than its rival, or the time is over.

        Args:
            rivals: by candidate, what it must be as fast as: another candidate, or standard
                decoding if None. Candidates without an entry only take part.
            watch: called after each turn.

        Returns:
            The candidates that may be as fast as their rivals, the fastest first.
        """
        undecided = [name for name in self.live if name in rivals]
        while undecided:
            self.run_turn()
            watch()
            for name in list(undecided):
                if self._is_qualified(name, rivals[name]) is not None or name not in self.live:
                    undecided.remove(name)
            if not self.seconds_left or self.num_turns >= ENOUGH_TURNS:
                break

        qualified = []
        for name in rivals:
            if name in self.slower or name in self.race.failed:
                continue
            speedup = self._speedup_over(name, rivals[name], LEVEL)
            if speedup is None:
                continue
            # A single piece has no interval.
            hope = speedup.value if math.isnan(speedup.high) else speedup.high
            if hope >= 1:
                qualified.append((speedup.value, name))
            else:
                self.set_aside.append(name)
        return [name for _, name in sorted(qualified, reverse=True)]

    def _is_qualified(self, name: str, rival: str | None) -> bool | None:
        """Whether a candidate is faster than its rival; None if that is not proven yet.

        One that is slower gets no more time.
        """
        if self.num_turns < QUALIFYING_TURNS or name not in self.live:
            return None
        speedup = self._speedup_over(name, rival, QUALIFYING_LEVEL)
        if speedup is None:
            return None
        if speedup.high < 1:
            self.live.remove(name)
            self.slower[name] = STANDARD_NAME if rival is None else rival
            return False
        return True if speedup.low > 1 else None

    def _speedup_over(self, name: str, rival: str | None, level: float) -> Interval | None:
        if rival is None:
            return self.speedup(name, level)
        return self.relative(name, rival, level)

    def run_turn(self) -> None:
        """Run one turn of all live candidates; those that fail are live no more."""
        self.race.run_turn(self.live)
        self.num_turns += 1
        self.live = [name for name in self.live if name not in self.race.failed]

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        return max(0.0, self._started + self._seconds - self._clock())

    @property
    def leader(self) -> str | None:
        """The live candidate that the evidence favors; None if all have failed."""
        return max(self.live, key=self._lower_end, default=None)

    def speedup(self, name: str, level: float = LEVEL) -> Interval | None:
        """Seconds of standard decoding / seconds of a candidate; None before its first piece."""
        pairs = self.race.all_pairs(name)
        if not pairs:
            return None
        return piece_interval(pairs, level=level)

    def verdict(self, name: str) -> Verdict:
        """Whether a candidate is faster than standard decoding, as one of several candidates."""
        level = level_among(len(self.names))
        return judge(self.speedup(name, level), len(self.race.all_pairs(name)), level=level)

    def is_slower(self, name: str, other: str, level: float = LEVEL) -> bool:
        """Whether a candidate is proven slower than another one in the turns of both."""
        interval = self.relative(name, other, level)
        # A comparison with NaN is false: without an interval, nothing is proven.
        return interval is not None and interval.high < 1

    def relative(self, name: str, other: str, level: float = LEVEL) -> Interval | None:
        """Speed of a candidate / speed of another one, in the turns of both."""
        pairs = self.race.pairs(name)
        other_pairs = self.race.pairs(other)
        if not pairs or not other_pairs:
            return None
        first_turn = max(min(pairs), min(other_pairs))
        last_turn = min(max(pairs), max(other_pairs))
        turns = range(first_turn, last_turn + 1)
        common = [pairs.get(turn, (0.0, 0.0)) for turn in turns]
        other_common = [other_pairs.get(turn, (0.0, 0.0)) for turn in turns]
        if not any(map(sum, common)) or not any(map(sum, other_common)):
            return None
        return relative_interval(common, other_common, level=level)

    def equals(self, name: str) -> list[str]:
        """The other candidates that may be as fast, the fastest first.

        Their intervals reach that of the candidate, and so does the interval of the comparison in
        the turns of both, which are few for those that were set aside. Without an interval, the
        estimate must reach it.
        """
        lower_end = self._lower_end(name)
        others = []
        for other in sorted(self.names, key=self._lower_end, reverse=True):
            is_out = other in self.slower or other in self.race.failed
            if other == name or is_out or not self.race.pairs(other):
                continue
            if self._upper_end(other) >= lower_end and not self.is_slower(other, name):
                others.append(other)
        return others

    def _lower_end(self, name: str) -> float:
        speedup = self.speedup(name)
        if speedup is None:
            return -math.inf
        # A single piece has no interval, and must not lead before one that has.
        return speedup.value / 10 if math.isnan(speedup.low) else speedup.low

    def _upper_end(self, name: str) -> float:
        speedup = self.speedup(name)
        if speedup is None:
            return -math.inf
        # A single piece has no interval, and proves no more than its value.
        return speedup.value if math.isnan(speedup.high) else speedup.high

    def _promise(self, name: str) -> tuple[bool, float]:
        """What a candidate is kept for: a proven gain first, then the upper end."""
        is_proven = self._lower_end(name) > 1 and self._has_interval(name)
        return is_proven, self._upper_end(name)

    def _has_interval(self, name: str) -> bool:
        speedup = self.speedup(name)
        return speedup is not None and not math.isnan(speedup.low)

    def _drop_slower(self) -> None:
        leader = self.leader
        if leader is None or self.num_turns < FEWEST_TURNS:
            return
        for name in list(self.live):
            if name != leader and self.is_slower(name, leader, DROP_LEVEL):
                self.live.remove(name)
                self.slower[name] = leader

    def _keep(self, num_kept: int) -> None:
        """Set the slowest aside, by the upper ends of their intervals.

        One that is proven faster than standard decoding is never set aside for one that is not.
        """
        leader = self.leader
        if leader is None:
            return
        by_promise = sorted(self.live, key=self._promise, reverse=True)
        by_promise.remove(leader)
        kept = {leader, *by_promise[: num_kept - 1]}
        self.set_aside += [name for name in self.live if name not in kept]
        self.live = [name for name in self.live if name in kept]

    def _is_decided(self) -> bool:
        """Whether more turns would not change the answer."""
        leader = self.leader
        if leader is None or self.num_turns >= MOST_TURNS:
            return True
        if self.num_turns < ENOUGH_TURNS:
            return False
        # Every turn is another chance to end on a lucky one.
        speedup = self.speedup(leader, max(DROP_LEVEL, level_among(len(self.names))))
        if not judge(speedup, self.num_turns).is_decided:
            return False
        for name in self.live:
            if name == leader:
                continue
            interval = self.relative(name, leader)
            if interval is None or interval.low < 1 - CLOSE or interval.high > 1 + CLOSE:
                return False
        return True
