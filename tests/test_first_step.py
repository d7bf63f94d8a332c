"""Laws of the time before a run's first step: it is spent on nothing that the run does not need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from test_offline_features import LAYERS, frozen, sequences

from lightning_specdec.data import Batch
from lightning_specdec.models import LanguageModel
from lightning_specdec.training import AutoFeatures, OnlineFeatures
from lightning_specdec.training.target_outputs import TargetOutputs, batches, token_counts

SECONDS_OF_ROW = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present time, which rises by `SECONDS_OF_ROW` for each row that the target reads."""
    now = [0.0]
    read = OnlineFeatures.read

    def read_slowly(
        self: OnlineFeatures, target: LanguageModel, batch: Batch, split: str, **options: Any
    ) -> TargetOutputs:
        now[0] += SECONDS_OF_ROW * len(batch.tokens)
        return read(self, target, batch, split, **options)

    monkeypatch.setattr(OnlineFeatures, "read", read_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_slow_target_reads_one_row_to_show_how_fast_it_reads(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    data = sequences(tmp_path)
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1
    )
    AutoFeatures(str(tmp_path / "cache")).prepare(frozen("llama"), data, LAYERS, ["train", "val"])
    assert clock == [SECONDS_OF_ROW]
    minutes = SECONDS_OF_ROW * len(data.rows("train")) / 60
    assert f"the target needs about {minutes:,.1f} minutes" in capsys.readouterr().err


def test_a_fast_target_reads_the_whole_sample_and_its_first_row_does_not_count(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_first_step.SECONDS_OF_ROW", 0.001)
    data = sequences(tmp_path)
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1
    )
    features = AutoFeatures(str(tmp_path / "cache"))
    seconds = features._time_reading(frozen("llama"), data, LAYERS)
    assert seconds == pytest.approx(0.001 * len(data.rows("train")))
    assert clock[0] == pytest.approx(0.001 * 2 * data.batch_size)


def test_the_tokens_of_many_batches_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sequences(tmp_path)
    expected = torch.zeros(64, dtype=torch.long)
    num_batches = 0
    for batch in batches(data, "train"):
        num_batches += 1
        for tokens, start, end in zip(
            batch.tokens, batch.prompt_lengths, batch.lengths, strict=True
        ):
            for token in tokens[start:end].tolist():
                expected[token] += 1

    num_counts = 0
    bincount = torch.bincount

    def count(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_counts
        num_counts += 1
        return bincount(*arguments, **options)

    monkeypatch.setattr(torch, "bincount", count)
    assert torch.equal(token_counts(data, 64), expected)
    assert num_counts == 1
    assert num_batches > 4

    # A part of the batches at a time.
    monkeypatch.setattr("lightning_specdec.training.target_outputs.COUNTED_AT_ONCE", 30)
    assert torch.equal(token_counts(data, 64), expected)
    assert 2 < num_counts < 1 + num_batches
