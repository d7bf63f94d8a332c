"""Where a run's time and memory go, phase by phase, and how busy a GPU was.

The clock is `inference.timing.PhaseTimer`: CUDA events on a GPU, a monotonic clock elsewhere. Memory is watched in a
run that nobody times, since looking at it takes time.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_specdec.inference.timing import PHASES, PhaseTimer

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SAMPLE_SECONDS = 0.1
"""Between two looks at a GPU."""


def whole(phases: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The phases of a run that took so many seconds: what no phase has seen belongs to the rest."""
    return {**phases, "rest": seconds - sum(phases[phase] for phase in PHASES if phase != "rest")}


class PeakMemory:
    """The most bytes that were held since the last look: by torch on a GPU, by the whole process on Linux.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.known = device.type == "cuda" or _CLEAR.exists()
        """Whether this system says."""
        self._forget()

    def _forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.known:
            _CLEAR.write_text("5")  # proc(5): the peak begins at what is held now

    def look(self) -> int:
        """The peak, which begins anew."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            lines = _STATUS.read_text().splitlines()
            peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        self._forget()
        return peak


class MemoryTimer(PhaseTimer):
    """Watches the peaks of a session's phases, in the place of its timer.

    Args:
        device: where the work runs.
        peaks: what was there before, by phase; kept up to date.
    """

    def __init__(self, device: torch.device, peaks: dict[str, int]) -> None:
        super().__init__(device)
        self.peaks, self._memory = peaks, PeakMemory(device)

    def lap(self, phase: str) -> None:
        super().lap(phase)
        if self._memory.known:
            self.peaks[phase] = max(self.peaks.get(phase, 0), self._memory.look())


@contextmanager
def gpu_utilization(device: torch.device) -> Iterator[list[float]]:
    """While it lasts, NVIDIA's tool looks how much of its time the GPU computes; the shares are there at the end.

    Nothing elsewhere, and where the tool is not there.
    """
    shares: list[float] = []
    program = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if program is None:
        yield shares
        return
    number = f"GPU-{torch.cuda.get_device_properties(device).uuid}".replace("GPU-GPU-", "GPU-")
    command = [program, f"--id={number}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    command += [f"--loop-ms={round(1000 * SAMPLE_SECONDS)}"]
    looking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield shares
    finally:
        looking.terminate()
        shares += [float(line) / 100 for line in looking.communicate()[0].split() if line.isdigit()]
