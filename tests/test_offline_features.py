"""Laws of offline features: they are this target's outputs for these texts, computed once."""

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
    AutoFeatures,
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
    """A frozen target; do not write to it."""
    return deepcopy(cases.target(name)).requires_grad_(False)


def sequences(directory: Path, *, seed: int = 0) -> SequenceFile:
    """Rows of 2 to 21 tokens, some of them in each split."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for row_index in range(40):
        length = 2 + (7 * row_index) % 20
        row = torch.randint(cases.VOCAB, (length,), generator=generator).tolist()
        lines.append(",".join(map(str, row)) + "\n")
    path = directory / "rows.csv"
    path.write_text("".join(lines))
    data = SequenceFile(str(path), cases.VOCAB, num_val=5, num_test=3, batch_size=4)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return data


def prepared(
    data: TokenData,
    directory: Path,
    target: LanguageModel | None = None,
    **options: Any,
) -> OfflineFeatures:
    layers = options.pop("layers", LAYERS)
    features = OfflineFeatures(str(directory / "cache"), **options)
    features.prepare(target or frozen("llama"), data, layers, ["train", "val"])
    return features


def batches(data: TokenData, split: str) -> list[Batch]:
    """All rows, in another order."""
    rows = data.rows(split)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(len(rows), generator=generator)
    return [data.collate([rows[i] for i in group.tolist()]) for group in order.split(4)]


def real(values: Tensor, batch: Batch) -> Tensor:
    """The values of tokens, without those of padding."""
    is_token = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    return values[is_token]


def assert_real_values_close(actual: Tensor, expected: Tensor, batch: Batch) -> None:
    torch.testing.assert_close(real(actual, batch), real(expected, batch), atol=1e-5, rtol=1e-5)


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
    tmp_path: Path,
    name: str,
    tokens: Tensor | None,
) -> None:
    target, data = frozen(name), sequences(tmp_path)
    features = prepared(data, tmp_path, target, dtype="float32")
    assert len(list(tmp_path.glob(SHARDS))) > 2, "rows of several shards"
    for split in ("train", "val"):
        for batch in batches(data, split):
            actual = features.read(target, batch, split, layers=LAYERS, tokens=tokens)
            expected = OnlineFeatures().read(target, batch, split, layers=LAYERS, tokens=tokens)
            assert_real_values_close(actual.log_probs, expected.log_probs, batch)
            for layer in LAYERS:
                assert_real_values_close(actual.features[layer], expected.features[layer], batch)
            assert torch.equal(real(actual.choices, batch), real(expected.choices, batch))


def test_nothing_is_computed_twice_and_drafts_that_read_other_layers_share_features(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, target = sequences(tmp_path), frozen("llama")
    for layers in ([0], [0], [1], []):
        features = OfflineFeatures(also_layers=[1, 0], dtype="float32")
        shards_before = list(tmp_path.rglob("shard-*"))
        features.prepare(target, data, layers, ["train"])
        assert ("caching " in capsys.readouterr().err) == (not shards_before), "computed only once"
        batch = batches(data, "train")[0]
        actual = features.read(target, batch, "train", layers=layers, tokens=TOKENS)
        expected = OnlineFeatures().read(target, batch, "train", layers=layers, tokens=TOKENS)
        assert list(actual.features) == layers
        for layer in layers:
            assert_real_values_close(actual.features[layer], expected.features[layer], batch)


def test_the_size_is_said_before_it_starts_and_refused_where_there_is_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    data = sequences(tmp_path)
    calls = []
    sync = os.fsync

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        # Four shards are written by then.
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match="No space left on device") as fault:
        prepared(data, tmp_path)
    assert "shard-" in fault.value.filename
    finished_shards = contents(tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in finished_shards}
    assert len(finished_shards) == 4
    assert not list(tmp_path.rglob(".shard*"))

    # The next run adds the missing shards and does not touch the finished ones.
    prepared(data, tmp_path)
    assert finished_shards.items() <= contents(tmp_path).items()
    assert len(contents(tmp_path)) > 4
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in finished_shards}


def test_a_torn_shard_is_computed_again_and_a_dtype_that_is_none_refused(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    prepared(data, tmp_path)
    contents_before = contents(tmp_path)
    torn_path = sorted(tmp_path.glob(SHARDS))[1]
    torn_path.write_bytes(torn_path.read_bytes()[:-9])
    prepared(data, tmp_path)
    assert contents(tmp_path) == contents_before
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
    contents_before = contents(tmp_path)
    prepared(sequences(tmp_path, seed=int(name == "rows")), tmp_path, **OTHERS.get(name, {}))
    assert contents_before.items() < contents(tmp_path).items() and len(
        contents(tmp_path)
    ) == 2 * len(contents_before)


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
    features = AutoFeatures(str(tmp_path / "cache"))

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


@pytest.mark.parametrize("is_short", [True, False])
def test_a_run_that_reads_little_of_its_text_is_told_how_long_would_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_short: bool,
) -> None:
    data = sequences(tmp_path)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    features = AutoFeatures(str(tmp_path / "cache"))
    # To read the text takes 100 minutes, and the draft's steps as long again.
    monkeypatch.setattr(AutoFeatures, "_time_reading", lambda *arguments: 6000.0)
    minutes = 3.0 if is_short else 5.0
    monkeypatch.setattr(
        "lightning_specdec.training.offline_features.time_left", lambda trainer: 60 * minutes
    )
    features.prepare(frozen("llama"), data, LAYERS, ["train", "val"])
    message = capsys.readouterr().err
    advice = (
        "this run will learn from about 1.5% of the text, which is too little for most drafts: "
        "--minutes 4 would read 2% of it"
    )
    assert (advice in message) == is_short
