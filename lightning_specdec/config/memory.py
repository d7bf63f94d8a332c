"""How much memory a model and its caches take, found before any weight is read, and how much is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.config.settings import Settings, setting

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one number in each type that models compute in."""
INT4_GROUP = 128
"""Weights that share a scale and a zero point in int4."""


@dataclass(frozen=True)
class ModelSize(Settings):
    """What decides how much memory a model takes, whatever its weights are.

    Args:
        parameters: all of them, shared ones counted once.
        matrix_parameters: those of the linear maps, which quantization replaces; the output head is one of them.
        kept_parameters: those that quantization leaves as they are: norms, biases and the table of embeddings, even
            where the output head shares it (the head is then a second copy).
        matrix_rows: outputs of the linear maps, all together: each has a scale of its own in int8.
        layers: that keep keys and values.
        kv_heads: heads that do, in each layer.
        head_size: numbers in a key.
        context: most tokens that the model reads; None if it has no limit.
    """

    parameters: int = setting(minimum=1)
    matrix_parameters: int = setting(minimum=1)
    kept_parameters: int = setting(minimum=1)
    matrix_rows: int = setting(minimum=1)
    layers: int = setting(minimum=1)
    kv_heads: int = setting(minimum=1)
    head_size: int = setting(minimum=1)
    context: int | None = setting(None, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept_parameters + self.matrix_parameters < self.parameters:
            raise ValueError("kept_parameters and matrix_parameters must together make all parameters, got less")

    def weight_bytes(self, dtype: str, quantization: str | None = None, *, packed: bool = False) -> int:
        """Bytes of the weights.

        int8 keeps one byte for a weight and one scale for a row; int4 half a byte, and a scale and a zero point for
        each `INT4_GROUP` weights. `packed`: laid out for a CPU's kernels, which takes a copy of an output head that
        shares the table's weight.
        """
        size = BYTES[dtype]
        if quantization is None:
            return size * (self.kept_parameters + self.matrix_parameters if packed else self.parameters)
        kept = self.kept_parameters * size
        if quantization == "int8":
            return kept + self.matrix_parameters + self.matrix_rows * size
        return kept + self.matrix_parameters // 2 + self.matrix_parameters // INT4_GROUP * 2 * size

    def cache_bytes(self, dtype: str, *, batch_size: int, length: int) -> int:
        """Bytes of the keys and values of `batch_size` rows of `length` tokens, or of as many as the model reads:
        layers * 2 * batch_size * length * kv_heads * head_size * bytes of a number."""
        length = length if self.context is None else min(length, self.context)
        return self.layers * 2 * batch_size * length * self.kv_heads * self.head_size * BYTES[dtype]


def peak_bytes(models: Sequence[tuple[ModelSize, str, str | None]], *, packed: bool) -> tuple[int, int]:
    """Bytes of the weights of several models (size, dtype, quantization) once they are loaded one after the other, and
    the most of them that is there at a time: what is quantized is read as it is first."""
    kept = peak = 0
    for size, dtype, quantization in models:
        peak = max(peak, kept + size.weight_bytes(dtype))
        kept += size.weight_bytes(dtype, quantization, packed=packed)
    return kept, max(peak, kept)


def available_bytes(device: str = "cpu", *, root: Path = Path("/")) -> int | None:
    """Bytes that a new model may take on this device; None where the system does not tell.

    On a CPU the least of what the machine has free and what each control group (version 2) above this process leaves.

    Args:
        root: where `proc` and `sys` are.
    """
    if device.startswith("cuda"):
        import torch

        free: int = torch.cuda.mem_get_info(torch.device(device))[0]
        return free
    found = []
    if (available := _entry(root / "proc/meminfo", "MemAvailable:")) is not None:
        found.append(available * 1024)
    groups = root / "sys/fs/cgroup"
    lines = (_read(root / "proc/self/cgroup") or "").splitlines()
    group = next((groups / line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), groups)
    for directory in (group, *group.parents):
        limit, used = _read(directory / "memory.max"), _read(directory / "memory.current")
        if limit is not None and used is not None and limit.strip() != "max":
            # The system drops files from its cache when memory is wanted.
            found.append(int(limit) - int(used) + (_entry(directory / "memory.stat", "inactive_file") or 0))
        if directory == groups:
            break
    return max(0, min(found)) if found else None


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    lines = (line.split() for line in (_read(path) or "").splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def require_memory(what: str, *, weights: int, caches: int = 0, device: str = "cpu", available: int | None) -> None:
    """Raise ValueError unless weights and caches fit what is available (None: nobody knows, so they may try)."""
    if available is None or weights + caches <= available:
        return
    parts = f"{gigabytes(weights)} of weights" + (f", {gigabytes(caches)} of caches" if caches else "")
    raise ValueError(
        f"not enough memory for {what}: it needs {gigabytes(weights + caches)} ({parts}), but "
        f"{gigabytes(available)} are free on {device}: take a smaller model, or a smaller dtype (bfloat16)"
    )


def gigabytes(count: int) -> str:
    """Bytes for a reader, in units of 10^9 or 10^6."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
