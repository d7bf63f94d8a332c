"""Laws of offline features: they are the target's outputs for the texts, computed once, and never
another target's.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cli_fixtures import here
from families import tiny
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_specdec.data import Batch, SequenceFile, TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import (
    FeaturesByNeed,
    OfflineFeatures,
    OnlineFeatures,
    offline_features,
)

__all__ = ["here"]

TOKENS = torch.tensor([1, 2, 5, 9])
"""The draft's vocabulary."""
LAYERS = [0, 1]
SHARDS = "cache/train-*/shard-*.safetensors"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_features, "SHARD_ROWS", 4)


@functools.cache
def frozen(name: str) -> LanguageModel:
    """A target that does not learn; read it, do not write to it."""
    return deepcopy(cases.target(name)).requires_grad_(False)


def sequences(directory: Path, *, seed: int = 0) -> SequenceFile:
    """Rows of 2 to 21 tokens, some of them in each split."""
    noise = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(cases.VOCAB, (2 + (7 * i) % 20,), generator=noise).tolist() for i in range(40)
    ]
    path = directory / "rows.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    data = SequenceFile(str(path), cases.VOCAB, num_val=5, num_test=3, batch_size=4)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return data


def prepared(
    data: TokenData, directory: Path, target: LanguageModel | None = None, **options: Any
) -> OfflineFeatures:
    layers = options.pop("layers", LAYERS)
    features = OfflineFeatures(str(directory / "cache"), **options)
    features.prepare(target or frozen("llama"), data, layers, ["train", "val"])
    return features


def batches(data: TokenData, split: str) -> list[Batch]:
    """All rows, in another order."""
    rows = data.rows(split)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        data.collate([rows[i] for i in order[first : first + 4]])
        for first in range(0, len(rows), 4)
    ]


def real(values: Tensor, batch: Batch) -> Tensor:
    """What belongs to tokens, not to padding."""
    return values[torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("shard-*"))
    }


def other_weights() -> LanguageModel:
    target = deepcopy(frozen("llama"))
    with torch.no_grad():
        next(target.parameters())[0, 0] += 1e-3
    return target


@pytest.mark.parametrize("name", ["llama", "transformer", "rnn"])
@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all", "some"])
def test_features_kept_in_float32_are_the_targets_outputs(
    tmp_path: Path, name: str, tokens: Tensor | None
) -> None:
    target, data = frozen(name), sequences(tmp_path)
    features = prepared(data, tmp_path, target, dtype="float32")
    assert len(list(tmp_path.glob(SHARDS))) > 2, "rows of several shards"
    for split in ("train", "val"):
        for batch in batches(data, split):
            found, wanted = (
                each.read(target, batch, split, layers=LAYERS, tokens=tokens)
                for each in (features, OnlineFeatures())
            )
            pairs = [(found.log_probs, wanted.log_probs)]
            pairs += [(found.features[layer], wanted.features[layer]) for layer in LAYERS]
            for own, other in pairs:
                torch.testing.assert_close(
                    real(own, batch), real(other, batch), atol=1e-5, rtol=1e-5
                )
            assert torch.equal(real(found.choices, batch), real(wanted.choices, batch))


def test_nothing_is_computed_twice_and_drafts_that_read_other_layers_share_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, target = sequences(tmp_path), frozen("llama")
    for layers in ([0], [0], [1], []):
        features = OfflineFeatures(also_layers=[1, 0], dtype="float32")
        said = list(tmp_path.rglob("shard-*"))
        features.prepare(target, data, layers, ["train"])
        assert ("caching " in capsys.readouterr().err) == (not said), "computed for the first alone"
        batch = batches(data, "train")[0]
        found = features.read(target, batch, "train", layers=layers, tokens=TOKENS)
        wanted = OnlineFeatures().read(target, batch, "train", layers=layers, tokens=TOKENS)
        assert list(found.features) == layers
        for layer in layers:
            pair = (real(each.features[layer], batch) for each in (found, wanted))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


def test_the_size_is_said_before_it_starts_and_refused_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, usage = sequences(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        ValueError, match=r"takes up to \d\.\d MB in .*cache, 0\.0 MB are free: .*cache_dir"
    ):
        prepared(data, tmp_path)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 10**9))
    prepared(data, tmp_path)
    assert "(3.0 GB free)\n" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_finished_shards_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, calls, sync = sequences(tmp_path), [], os.fsync

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # four shards are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match="No space left on device") as fault:
        prepared(data, tmp_path)
    assert "shard-" in fault.value.filename
    left = contents(tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in left}
    assert len(left) == 4 and not list(tmp_path.rglob(".shard*"))
    prepared(data, tmp_path)
    assert left.items() <= contents(tmp_path).items() and len(contents(tmp_path)) > 4
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in left}


def test_a_torn_shard_is_computed_again_and_a_dtype_that_is_none_refused(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    prepared(data, tmp_path)
    whole = contents(tmp_path)
    torn = sorted(tmp_path.glob(SHARDS))[1]
    torn.write_bytes(torn.read_bytes()[:-9])
    prepared(data, tmp_path)
    assert contents(tmp_path) == whole
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32"):
        prepared(data, tmp_path, dtype="float16")


OTHERS: dict[str, dict[str, Any]] = {
    "target": {"target": other_weights()},
    "layers": {"layers": [1, 2]},
    "dtype": {"dtype": "float32"},
}


@pytest.mark.parametrize("name", [*OTHERS, "rows"])
def test_features_of_something_else_are_computed_beside_them(tmp_path: Path, name: str) -> None:
    prepared(sequences(tmp_path), tmp_path)
    before = contents(tmp_path)
    prepared(sequences(tmp_path, seed=int(name == "rows")), tmp_path, **OTHERS.get(name, {}))
    assert before.items() < contents(tmp_path).items() and len(contents(tmp_path)) == 2 * len(
        before
    )


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_target_without_a_separate_output_head_is_read_online_in_a_run_of_any_length(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    target = HuggingFaceLM(tiny(family, vocab_size=cases.VOCAB)).requires_grad_(False)
    data = sequences(tmp_path)
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=100
    )
    features = FeaturesByNeed(str(tmp_path / "cache"))

    # Reading is not timed for a decision that the family has already made.
    with monkeypatch.context() as patch:
        patch.setattr(OnlineFeatures, "read", None)
        features.prepare(target, data, LAYERS, ["train", "val"])
    message = capsys.readouterr().err
    assert "hidden states are computed online, in each step: " in message
    assert "its layers differ in their attention span" in message
    assert not (tmp_path / "cache").exists()

    batch = batches(data, "train")[0]
    outputs = features.read(target, batch, "train", layers=LAYERS, tokens=TOKENS)
    expected = OnlineFeatures().read(target, batch, "train", layers=LAYERS, tokens=TOKENS)
    assert torch.equal(outputs.log_probs, expected.log_probs)

    with pytest.raises(ValueError, match="cannot be cached.*: give OnlineFeatures"):
        prepared(data, tmp_path, target)
