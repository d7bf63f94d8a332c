"""How much memory a model and its caches take, found before any weight is read, and how much is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_specdec.checks import require_int

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one number in each type that models compute in."""
INT4_GROUP = 128
"""Weights that share a scale and a zero point in int4."""
QUANTIZATIONS = ("int8", "int4")


@dataclass(frozen=True)
class ModelSize:
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

    parameters: int
    matrix_parameters: int
    kept_parameters: int
    matrix_rows: int
    layers: int
    kv_heads: int
    head_size: int
    context: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "context" or value is not None:
                require_int(field.name, value, 1, 2**63)
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
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
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


def without_memory(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device: all its shapes and no numbers.

    Args:
        config: transformers' own.
        trust_remote_code: whether the model's own Python code may run.

    Raises:
        ValueError: as transformers does, for a configuration of no causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def measure(model: PreTrainedModel) -> ModelSize:
    """The size of a model of transformers, with or without memory."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    maps = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    # GPT-2's maps keep their matrix the other way round.
    rows = [m.weight.shape[1] if isinstance(m, Conv1D) else m.weight.shape[0] for m in maps]
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    # An output head that shares the table's weight does not take it along when it is quantized.
    shared = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    alone = {id(module.weight): module.weight.numel() for module in maps if id(module.weight) not in shared}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        parameters=parameters,
        kept_parameters=parameters - sum(alone.values()),
        matrix_parameters=sum(module.weight.numel() for module in maps),
        matrix_rows=sum(rows),
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        context=getattr(text, "max_position_embeddings", None),
    )


def available_bytes(device: str = "cpu", *, root: Path = Path("/")) -> int | None:
    """Bytes that a new model may take on this device; None where the system does not tell.

    On a CPU the least of what the machine has free and what each control group above this process leaves it.

    Args:
        root: where `proc` and `sys` are.
    """
    if device.startswith("cuda"):
        import torch

        free: int = torch.cuda.mem_get_info(torch.device(device))[0]
        return free
    found = [free for free in (_machine_bytes(root), *_group_bytes(root)) if free is not None]
    return max(0, min(found)) if found else None


def _machine_bytes(root: Path) -> int | None:
    if (meminfo := _read(root / "proc/meminfo")) is not None:
        for line in meminfo.splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if root != Path("/"):
        return None
    try:  # no Linux: all there is, for want of what is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _group_bytes(root: Path) -> list[int]:
    """What each control group from this process's own upwards leaves free, of version 1 and 2."""
    left: list[int] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            limit, used = (_read(directory / name) for name in names[:2])
            if limit is not None and used is not None and limit.strip() != "max":
                left.append(int(limit) - int(used) + _reclaimable(directory, names[2]))
            if directory == base:
                break
    return left


def _reclaimable(group: Path, name: str) -> int:
    """Bytes of files that the system drops when memory is wanted."""
    for line in (_read(group / "memory.stat") or "").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


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
