"""How much memory a model's weights take, found before any weight is read, and how much is free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.config.settings import Settings, setting

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one number in each type that models compute in."""


@dataclass(frozen=True)
class ModelSize(Settings):
    """What decides how much memory a model takes, whatever its weights are.

    Args:
        parameters: all of them, shared ones counted once.
        matrix_parameters: those of the linear maps, which quantization replaces; the output head is one of them.
        kept_parameters: those that quantization leaves as they are: norms, biases and the table of embeddings, even
            where the output head shares it (the head is then a second copy).
    """

    parameters: int = setting(minimum=1)
    matrix_parameters: int = setting(minimum=1)
    kept_parameters: int = setting(minimum=1)

    def weight_bytes(
        self, dtype: str, quantization: str | None = None, *, packed: bool = False
    ) -> int:
        """Bytes of the weights; without the scales of quantized ones, which take some percent more.

        Args:
            packed: laid out for a CPU's kernels, which takes a copy of an output head that shares the table's weight.
        """
        size = _BYTES[dtype]
        if quantization is not None:
            return size * self.kept_parameters + self.matrix_parameters // (
                1 if quantization == "int8" else 2
            )
        return size * (self.kept_parameters + self.matrix_parameters if packed else self.parameters)


def peak_bytes(models: Sequence[tuple[ModelSize, str, str | None]], *, packed: bool) -> int:
    """The most bytes at a time while the weights of several models (size, dtype, quantization) are loaded one after the
    other: what is quantized is read as it is first."""
    kept = peak = 0
    for size, dtype, quantization in models:
        peak = max(peak, kept + size.weight_bytes(dtype))
        kept += size.weight_bytes(dtype, quantization, packed=packed)
    return max(peak, kept)


def available_bytes(device: str = "cpu", *, root: Path = Path("/")) -> int | None:
    """Bytes that a new model may take on this device; None where the system does not tell.

    On a CPU: what the machine has free, or the container's limit (control groups, version 2) leaves.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    found: list[int] = []
    group = root / "sys/fs/cgroup"
    with suppress(OSError, KeyError):
        found.append(1024 * _entries(root / "proc/meminfo")["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):  # without a limit it says "max"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(
            max(0, limit - used + _entries(group / "memory.stat")["inactive_file"])
        )  # files can be dropped
    return min(found, default=None)


def _entries(path: Path) -> dict[str, int]:
    """The number behind each name of a file."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


def require_memory(what: str, needed: int, device: str) -> None:
    """Raise ValueError unless so many bytes fit what is available; where nobody knows, they may try."""
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ValueError(
            f"not enough memory for {what}: it needs {gigabytes(needed)}, but {gigabytes(available)} are free on "
            f"{device}: take a smaller model, or a smaller dtype (bfloat16)"
        )


def gigabytes(count: int) -> str:
    """Bytes for a reader, in units of 10^9 or 10^6."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
