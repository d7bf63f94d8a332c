"""Laws of memory: what is foretold is what a loaded model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES
from tiny_models import write

from lightning_specdec.config import memory
from lightning_specdec.config.memory import available_bytes, gigabytes, require_memory
from lightning_specdec.models.loading import examine, load_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_model_takes_what_was_foretold_without_reading_its_weights(family: str, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    examined, model = examine(path, dtype="bfloat16"), load_model(path, dtype="bfloat16")
    assert examined.size.parameters == model.num_parameters
    assert examined.size.weight_bytes("bfloat16") == sum(weight.nbytes for weight in model.parameters())
    int8 = load_model(path, dtype="bfloat16", quantization="int8").pack()
    if family in ("llama", "gpt2"):
        foretold = examined.size.weight_bytes("bfloat16", "int8")
        scales = sum(weight.nbytes for weight in int8.parameters()) - foretold
        assert 0 < scales < 0.1 * foretold


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (available_bytes() or 0) > 10**7
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    require_memory("a model", 10**15, "cpu")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * 10**9)
    require_memory("a model", 10, "cpu")
    with pytest.raises(ValueError, match=r"for a model: it needs 3\.5 GB, but 3\.0 GB are free on cpu"):
        require_memory("a model", 35 * 10**8, "cpu")
    assert gigabytes(16_060_000_000) == "16.1 GB"


def test_a_containers_limit_counts_where_it_leaves_less(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "900\n",
        "sys/fs/cgroup/memory.stat": "anon 500\ninactive_file 300\n",
    }
    assert available_bytes(root=tmp_path) is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(root=tmp_path) == 8000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000\n")
    assert available_bytes(root=tmp_path) == 1000 - 900 + 300
