"""Laws of memory: what is foretold is what a loaded model takes; what is free is the least that anyone grants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny_models import write

from lightning_specdec.memory import ModelSize, available_bytes, gigabytes, require_memory
from lightning_specdec.models.loading import examine, load_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_model_takes_what_was_foretold_without_reading_its_weights(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    for dtype in ("float32", "bfloat16"):
        examined, model = examine(path, dtype=dtype), load_model(path, dtype=dtype)
        assert examined.size.parameters == model.num_parameters
        assert examined.weight_bytes == sum(weight.nbytes for weight in model.parameters())
        state = model.init_state(3, 29)
        model(torch.ones(3, 2, dtype=torch.long), state)
        assert state.memory_bytes == examined.size.cache_bytes(dtype, batch_size=3, length=30)  # one slot of padding
    assert examined.size.context == model.max_positions == 96


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights_take_what_was_foretold(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    model = load_model(path, dtype="bfloat16", quantization="int8").pack()
    foretold = examine(path, dtype="bfloat16", quantization="int8").weight_bytes
    assert foretold == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_take_what_was_foretold(tied: bool, tmp_path: Path) -> None:
    """Of sizes that the kernels' blocks divide, as those of real models: others are filled up."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    path = write(tmp_path, vocab_size=128, tie_word_embeddings=tied, **sizes)
    model = load_model(path, dtype="float32").pack()
    foretold = examine(path).size.weight_bytes("float32", packed=True)
    assert foretold == model.memory_bytes - sum(buffer.nbytes for buffer in model.buffers())


def test_four_bits_are_half_a_byte_and_their_scales() -> None:
    size = ModelSize(1280, 1280, 10, 10, layers=1, kv_heads=1, head_size=1)
    assert size.weight_bytes("bfloat16", "int4") == 10 * 2 + 640 + 10 * 2 * 2
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, got 'int3'"):
        size.weight_bytes("bfloat16", "int3")


def test_caches_are_layers_times_two_times_heads_times_size_times_length() -> None:
    size = ModelSize(100, 50, 50, 10, layers=32, kv_heads=8, head_size=128)
    assert size.cache_bytes("bfloat16", batch_size=4, length=1000) == 32 * 2 * 4 * 1000 * 8 * 128 * 2
    short = replace(size, context=500)
    assert 2 * short.cache_bytes("bfloat16", batch_size=4, length=1000) == size.cache_bytes(
        "bfloat16", batch_size=4, length=1000
    ), "no text is longer than the context"


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((0, 1, 1, 1, 1, 1, 1), "parameters must be"),
        ((10, 5, 4, 1, 1, 1, 1), "must together make all parameters"),
        ((10, 10, 5, 1, 1, 1, -1), "head_size must be"),
    ],
)
def test_sizes_that_cannot_be_are_refused(numbers: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelSize(*numbers)


def system(root: Path, files: dict[str, str]) -> Path:
    """A `proc` and a `sys` of these files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
V2 = {"proc/self/cgroup": "0::/box/inner\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n3:memory,hugetlb:/box\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 8000 * 1024),
        (MEMINFO | V2, 8000 * 1024),
        (
            MEMINFO | V2 | {"sys/fs/cgroup/box/inner/memory.max": "max", "sys/fs/cgroup/box/inner/memory.current": "5"},
            8000 * 1024,
        ),
        (
            MEMINFO
            | V2
            | {
                "sys/fs/cgroup/box/inner/memory.max": "3000",
                "sys/fs/cgroup/box/inner/memory.current": "500",
                "sys/fs/cgroup/box/memory.max": "2000",
                "sys/fs/cgroup/box/memory.current": "900",
                "sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 300\n",
            },
            2000 - 900 + 300,
        ),
        (
            MEMINFO
            | V1
            | {
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4000",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1500",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500",
            },
            2500,
        ),
        (
            MEMINFO
            | V1
            | {
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "100",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "150",
            },
            0,
        ),
        ({}, None),
    ],
)
def test_free_memory_is_the_least_that_machine_and_control_groups_leave(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert available_bytes(root=system(tmp_path, files)) == expected


def test_this_machine_tells_what_it_has() -> None:
    free = available_bytes()
    assert free is not None and free > 10**7


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    require_memory("a model", weights=10, available=10)
    require_memory("a model", weights=10**15, available=None)
    with pytest.raises(
        ValueError, match=r"for a model: it needs 3\.5 GB \(3\.0 GB of weights, 500\.0 MB of caches\), but"
    ):
        require_memory("a model", weights=3 * 10**9, caches=5 * 10**8, available=3 * 10**9)
    assert gigabytes(16_060_000_000) == "16.1 GB"
