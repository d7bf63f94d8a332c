"""Where the time goes: seconds by phase, on the host's clock or on the GPU's."""

from __future__ import annotations

import sys
import time

import torch

MOST_MARKS = 1024
"""Marks that a GPU's timer keeps before it adds them up."""
PHASES = ("draft", "verify", "accept", "rest")


class PhaseTimer:
    """Adds up seconds by phase; the phases of a run add up to its whole.

    On a GPU calls return at once and run later, so events are recorded into the stream and read once it has been
    synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self.started = time.perf_counter()
        self._last = self.started
        if self._cuda:
            self._mark("")

    def _mark(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        if self._cuda:
            self._mark(phase)
            if len(self._marks) > MOST_MARKS:
                self.seconds()
            return
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def elapsed(self) -> float:
        """Seconds on the host's clock since the start."""
        return time.perf_counter() - self.started

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
                self._seconds[phase] += before.elapsed_time(after) / 1000
            self._marks = self._marks[-1:]
        return dict(self._seconds)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes held so far: by torch on a GPU, by the whole process on a CPU (peak resident set)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # of POSIX systems

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, kilobytes elsewhere
