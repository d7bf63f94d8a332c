"""Laws of memory: what is foretold is what a loaded model takes; what is free is the least that anyone grants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny_models import write

from lightning_specdec.config.memory import ModelSize, available_bytes, gigabytes, require_memory
from lightning_specdec.models.loading import examine, load_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_model_takes_what_was_foretold_without_reading_its_weights(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    for dtype in ("float32", "bfloat16"):
        examined, model = examine(path, dtype=dtype), load_model(path, dtype=dtype)
        assert examined.size.parameters == model.num_parameters
        assert examined.size.weight_bytes(dtype) == sum(weight.nbytes for weight in model.parameters())
        state = model.init_state(3, 29)
        model(torch.ones(3, 2, dtype=torch.long), state)
        assert state.memory_bytes == examined.size.cache_bytes(dtype, batch_size=3, length=30)  # one slot of padding
    assert examined.size.context == model.max_positions == 96


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights_take_what_was_foretold(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    model = load_model(path, dtype="bfloat16", quantization="int8").pack()
    foretold = examine(path).size.weight_bytes("bfloat16", "int8")
    assert foretold == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_take_what_was_foretold(tied: bool, tmp_path: Path) -> None:
    """Of sizes that the kernels' blocks divide, as those of real models: others are filled up."""
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    path = write(tmp_path, num_attention_heads=4, tie_word_embeddings=tied, **sizes)
    model = load_model(path, dtype="float32").pack()
    foretold = examine(path).size.weight_bytes("float32", packed=True)
    assert foretold == model.memory_bytes - sum(buffer.nbytes for buffer in model.buffers())


def test_four_bits_are_half_a_byte_and_their_scales() -> None:
    size = ModelSize(1280, 1280, 10, 10, layers=1, kv_heads=1, head_size=1)
    assert size.weight_bytes("bfloat16", "int4") == 10 * 2 + 640 + 10 * 2 * 2


def test_caches_are_layers_times_two_times_heads_times_size_times_length() -> None:
    size = ModelSize(100, 50, 50, 10, layers=32, kv_heads=8, head_size=128)
    assert size.cache_bytes("bfloat16", batch_size=4, length=1000) == 32 * 2 * 4 * 1000 * 8 * 128 * 2
    short = replace(size, context=500).cache_bytes("bfloat16", batch_size=4, length=1000)
    assert short == size.cache_bytes("bfloat16", batch_size=4, length=500), "no text is longer than the context"


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


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
GROUPS = MEMINFO | {"proc/self/cgroup": "3:memory,hugetlb:/x\n0::/box/inner\n"}


def group(path: str, limit: object, used: int, stat: str = "") -> dict[str, str]:
    """The files of one control group."""
    home = f"sys/fs/cgroup/{path}"
    return {f"{home}/memory.max": str(limit), f"{home}/memory.current": str(used), f"{home}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 8000 * 1024),
        (GROUPS, 8000 * 1024),
        (GROUPS | group("box/inner", "max", 5), 8000 * 1024),
        (GROUPS | group("box/inner", 3000, 500) | group("box", 2000, 900, "anon 1\ninactive_file 300\n"), 1400),
        (GROUPS | group("box", 4000, 1500) | group(".", 2**62, 1500), 2500),
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
    assert (available_bytes() or 0) > 10**7, "this machine tells what it has"


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    require_memory("a model", weights=10, available=10)
    require_memory("a model", weights=10**15, available=None)
    with pytest.raises(
        ValueError, match=r"for a model: it needs 3\.5 GB \(3\.0 GB of weights, 500\.0 MB of caches\), but"
    ):
        require_memory("a model", weights=3 * 10**9, caches=5 * 10**8, available=3 * 10**9)
    assert gigabytes(16_060_000_000) == "16.1 GB"
