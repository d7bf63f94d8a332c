"""Where the time goes: seconds by phase, on the host's clock or on the GPU's."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import torch

MOST_MARKS = 1024
"""Marks that a GPU's timer keeps before it adds them up."""

PHASES = ("draft", "verify", "accept", "rest")
_PAUSE = "pause"
"""Mark of the end of a pause, whose time belongs to no phase."""


class PhaseTimer:
    """Adds up seconds by phase; the phases of a run add up to its duration.

    On a GPU calls return at once and run later, so events are recorded into the stream and read
    once it has been synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self.started = time.perf_counter()
        self._last_lap = self.started
        self._paused_at: float | None = None
        if self._on_gpu:
            self._mark("")

    def _mark(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        if self._on_gpu:
            self._mark(phase)
            if len(self._marks) > MOST_MARKS:
                self.seconds()
            return
        now = time.perf_counter()
        self._seconds[phase] += now - self._last_lap
        self._last_lap = now

    def pause(self) -> None:
        """Count no time until `resume`, so that another decoding can run in between."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Count time again after `pause`; without one, nothing changes."""
        if self._paused_at is None:
            return
        paused_seconds = time.perf_counter() - self._paused_at
        self._paused_at = None
        self.started += paused_seconds
        self._last_lap += paused_seconds
        if self._on_gpu:
            self._mark(_PAUSE)

    def elapsed(self) -> float:
        """Seconds on the host's clock since the start, without pauses."""
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        return now - self.started

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            for (_, start), (phase, end) in pairwise(self._marks):
                if phase != _PAUSE:
                    self._seconds[phase] += start.elapsed_time(end) / 1000
            self._marks = self._marks[-1:]
        return dict(self._seconds)


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use so far: of torch on a GPU, of the whole process on a CPU (peak resident
    set).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # exists on POSIX systems only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # bytes there, kilobytes elsewhere
    return peak * 1024
