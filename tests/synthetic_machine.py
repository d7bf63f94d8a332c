"""A machine whose speed drifts, and that bursts of load slow down."""

from __future__ import annotations

import random


class Machine:
    """A synthetic machine: speed that drifts, and bursts of load that slow whatever runs.

    Args:
        burst_rate: bursts that begin in a second.
        burst_seconds: their mean duration.
        burst_factor: how much slower a burst makes everything.
    """

    DRIFT = 0.05
    NOISE = 0.03

    def __init__(
        self,
        rng: random.Random,
        burst_rate: float,
        burst_seconds: float,
        burst_factor: float,
    ) -> None:
        self.rng = rng
        self.burst_rate = burst_rate
        self.burst_seconds = burst_seconds
        self.burst_factor = burst_factor
        self.now = 0.0
        self.burst_end = 0.0
        self.next_burst = self._wait()
        self.log_speed = 0.0

    def _wait(self) -> float:
        return self.rng.expovariate(self.burst_rate) if self.burst_rate else float("inf")

    def run(self, work: float) -> float:
        """Seconds that work takes, which lasts as many seconds on an idle machine."""
        self.log_speed += self.rng.gauss(0, self.DRIFT)
        left = work * self.rng.lognormvariate(self.log_speed, self.NOISE)
        start = self.now
        while left > 0:
            is_burst = self.now < self.burst_end
            factor = self.burst_factor if is_burst else 1.0
            change = self.burst_end if is_burst else self.next_burst
            if left * factor <= change - self.now:
                self.now += left * factor
                break
            left -= (change - self.now) / factor
            self.now = change
            if is_burst:
                self.next_burst = self.now + self._wait()
            else:
                self.burst_end = self.now + self.rng.expovariate(1 / self.burst_seconds)
        return self.now - start
