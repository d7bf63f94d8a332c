"""Estimate the memory of a model's weights before reading any, and measure what is free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.config.settings import Settings, setting

_BYTES_PER_NUMBER = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSize(Settings):
    """The counts that determine a model's memory.

    Args:
        parameters: all parameters, with shared ones counted once.
        matrix_parameters: parameters of linear layers, which quantization replaces. The output
            head is one of them.
        kept_parameters: parameters that quantization leaves unchanged: norms, biases, and the
            embedding table. If the output head shares that table, the head becomes a second copy.
    """

    parameters: int = setting(minimum=1)
    matrix_parameters: int = setting(minimum=1)
    kept_parameters: int = setting(minimum=1)

    def weight_bytes(
        self,
        dtype: str,
        quantization: str | None = None,
        *,
        packed: bool = False,
    ) -> int:
        """Bytes of the weights, without the scales of quantized ones, which add a few percent.

        Args:
            packed: whether weights are laid out for a CPU's kernels. This copies an output head
                that shares the embedding table.
        """
        number_bytes = _BYTES_PER_NUMBER[dtype]
        if quantization == "int8":
            return number_bytes * self.kept_parameters + self.matrix_parameters
        if quantization == "int4":
            return number_bytes * self.kept_parameters + self.matrix_parameters // 2
        if packed:
            return number_bytes * (self.kept_parameters + self.matrix_parameters)
        return number_bytes * self.parameters

    def openvino_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Bytes of the weights in OpenVINO: the matrices in the converted file, which is mapped,
        and once more in the processor's layout. The embedding is mapped from the model's file."""
        kept_bytes = _BYTES_PER_NUMBER[dtype] * self.kept_parameters
        matrix_bytes = self.weight_bytes(dtype, quantization, packed=True) - kept_bytes
        return kept_bytes + 2 * matrix_bytes


def peak_bytes(
    models: Sequence[tuple[ModelSize, str, str | None]],
    *,
    packed: bool,
    in_openvino: bool = False,
) -> int:
    """Peak bytes while several models (size, dtype, quantization) are loaded one after another.

    A model that will be quantized or converted is read unchanged first.

    Args:
        packed: whether weights are laid out for a CPU's kernels.
        in_openvino: whether the models run in OpenVINO. While the first start converts a model, its
            weights and the converted ones are in memory.
    """
    loaded_bytes = 0
    peak = 0
    for size, dtype, quantization in models:
        if in_openvino:
            final_bytes = size.openvino_bytes(dtype, quantization)
        else:
            final_bytes = size.weight_bytes(dtype, quantization, packed=packed)
        peak = max(peak, loaded_bytes + size.weight_bytes(dtype))
        loaded_bytes += final_bytes
    return max(peak, loaded_bytes)


def available_bytes(device: str = "cpu", *, root: Path = Path("/")) -> int | None:
    """Bytes that a new model may take on this device; None if the system does not report it.

    On a CPU this is the machine's free memory, or what the container's limit (control groups,
    version 2) leaves if that is less.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]

    limits: list[int] = []
    with suppress(OSError, KeyError):
        kilobytes = _read_counters(root / "proc/meminfo")["MemAvailable:"]
        limits.append(1024 * kilobytes)

    control_group = root / "sys/fs/cgroup"
    # Without a limit, memory.max contains the word "max", which is no integer.
    with suppress(OSError, KeyError, ValueError):
        limit = int((control_group / "memory.max").read_text())
        used = int((control_group / "memory.current").read_text())
        # The kernel drops inactive file pages when a process needs the memory.
        reclaimable = _read_counters(control_group / "memory.stat")["inactive_file"]
        limits.append(max(0, limit - used + reclaimable))
    return min(limits, default=None)


def _read_counters(path: Path) -> dict[str, int]:
    """Read a file whose lines start with a name and an integer."""
    counters = {}
    for line in path.read_text().splitlines():
        words = line.split()
        counters[words[0]] = int(words[1])
    return counters


def require_memory(what: str, needed: int, device: str) -> None:
    """Raise ValueError unless the device has this many bytes, or does not report its memory."""
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ValueError(
            f"not enough memory for {what}: it needs {gigabytes(needed)}, but "
            f"{gigabytes(available)} are free on {device}: use a smaller model, or a smaller "
            "dtype (bfloat16)"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated.

    On a CPU, torch raises a RuntimeError that only its text distinguishes.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def gigabytes(count: int) -> str:
    """Format bytes for a reader, in units of 10^9 or 10^6."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB"
