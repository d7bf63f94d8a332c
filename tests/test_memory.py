"""Laws of memory: what is foretold is what a loaded model takes; what is free is the least that anyone grants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from tiny_models import write

from lightning_specdec.config.memory import ModelSize, available_bytes, gigabytes, require_memory
from lightning_specdec.models.loading import examine, load_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_model_takes_what_was_foretold_without_reading_its_weights(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    examined, model = examine(path, dtype="bfloat16"), load_model(path, dtype="bfloat16")
    assert examined.size.parameters == model.num_parameters
    assert examined.size.weight_bytes("bfloat16") == sum(weight.nbytes for weight in model.parameters())
    state = model.init_state(3, 29)
    model(torch.ones(3, 2, dtype=torch.long), state)
    held = sum(buffer.nbytes for pair in state.storage.layers.values() for buffer in pair)
    assert held == examined.size.cache_bytes("bfloat16", batch_size=3, length=30)  # one slot of padding
    assert examined.size.context == model.max_positions == 96
    int8 = load_model(path, dtype="bfloat16", quantization="int8").pack()
    if family in ("llama", "gpt2"):
        assert examined.size.weight_bytes("bfloat16", "int8") == sum(weight.nbytes for weight in int8.parameters())


def test_sizes_are_their_formulas() -> None:
    size = ModelSize(1280, 1280, 10, 10, layers=1, kv_heads=1, head_size=1)
    assert size.weight_bytes("bfloat16", "int4") == 10 * 2 + 640 + 10 * 2 * 2
    size = ModelSize(100, 50, 50, 10, layers=32, kv_heads=8, head_size=128)
    assert size.cache_bytes("bfloat16", batch_size=4, length=1000) == 32 * 2 * 4 * 1000 * 8 * 128 * 2
    short = replace(size, context=500).cache_bytes("bfloat16", batch_size=4, length=1000)
    assert short == size.cache_bytes("bfloat16", batch_size=4, length=500), "no text is longer than the context"
    with pytest.raises(ValueError, match="must together make all parameters"):
        ModelSize(10, 5, 4, 1, 1, 1, 1)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
GROUPS = MEMINFO | {"proc/self/cgroup": "3:memory,hugetlb:/x\n0::/box/inner\n"}


def group(path: str, limit: object, used: int, stat: str = "") -> dict[str, str]:
    """The files of one control group."""
    home = f"sys/fs/cgroup/{path}"
    return {f"{home}/memory.max": str(limit), f"{home}/memory.current": str(used), f"{home}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (GROUPS | group("box/inner", "max", 5), 8000 * 1024),
        (GROUPS | group("box/inner", 3000, 500) | group("box", 2000, 900, "anon 1\ninactive_file 300\n"), 1400),
        (GROUPS | group("box", 100, 150), 0),
        ({}, None),
    ],
)
def test_free_memory_is_the_least_that_machine_and_control_groups_leave(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_bytes(root=tmp_path) == expected


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    require_memory("a model", weights=10**15, available=None)
    told = r"for a model: it needs 3\.5 GB \(3\.0 GB of weights, 500\.0 MB of caches\), but"
    with pytest.raises(ValueError, match=told):
        require_memory("a model", weights=3 * 10**9, caches=5 * 10**8, available=3 * 10**9)
    assert gigabytes(16_060_000_000) == "16.1 GB"
