"""A run of given minutes leaves time for its last validation, as measured, and for a step."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightning_specdec.training import TimeLimit
from lightning_specdec.training.optimizers import (
    BATCHES_SHARE,
    DECODING_SHARE,
    LEAST_DECODING,
    PACKING_FACTOR,
    SAVE_SECONDS,
    START_UP_FACTOR,
    check_start_up,
)

BATCH_SECONDS = 2.0
NUM_BATCHES = 10
DECODE_SECONDS = 12.0
VALIDATION_SECONDS = BATCH_SECONDS * NUM_BATCHES + DECODE_SECONDS + SAVE_SECONDS
RESERVED_SECONDS = VALIDATION_SECONDS + PACKING_FACTOR * DECODE_SECONDS
"""The verdict decodes as much as a validation, and packs the weights."""


def fake_trainer() -> Any:
    decoding = SimpleNamespace(estimated_seconds=lambda trainer, module: DECODE_SECONDS)
    return SimpleNamespace(
        num_sanity_val_batches=[1],
        num_val_batches=[NUM_BATCHES],
        callbacks=[object(), decoding],
        strategy=SimpleNamespace(broadcast=lambda value: value),
        sanity_checking=False,
        should_stop=False,
    )


def started(minutes: float, start_up_seconds: float, monkeypatch: pytest.MonkeyPatch) -> TimeLimit:
    """A limit that has measured a validation batch, at the beginning of the training."""
    monkeypatch.setattr(TimeLimit, "began", time.monotonic() - start_up_seconds)
    limit = TimeLimit(minutes)
    limit._start_time[RunningStage.VALIDATING] = 0.0
    limit._end_time[RunningStage.VALIDATING] = BATCH_SECONDS
    limit.on_sanity_check_end(fake_trainer(), None)  # type: ignore[arg-type]
    limit.on_train_start(fake_trainer(), None)  # type: ignore[arg-type]
    return limit


def test_the_last_validation_and_a_step_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = started(2.0, 5.0, monkeypatch)
    expected = 120 - 5 - RESERVED_SECONDS
    assert limit.time_remaining() == pytest.approx(expected, abs=2)

    limit._step_start = time.monotonic() - 3
    trainer = fake_trainer()
    limit.on_train_batch_end(trainer)
    assert limit.time_remaining() == pytest.approx(expected - 3, abs=2)
    assert not trainer.should_stop

    # A validation that took longer than estimated counts from then on.
    limit._start_time[RunningStage.VALIDATING] = 0.0
    limit.on_validation_start(trainer, None)  # type: ignore[arg-type]
    limit._start_time[RunningStage.VALIDATING] = time.monotonic() - 50
    limit.on_validation_end(trainer, None)  # type: ignore[arg-type]
    assert limit.time_remaining() == pytest.approx(
        120 - 5 - 50 - SAVE_SECONDS - PACKING_FACTOR * DECODE_SECONDS, abs=2
    )


def test_with_little_time_the_end_of_a_run_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fraction of what is left is decoded, and the rest is for training."""
    limit = started(1.0, 20.0, monkeypatch)
    num_batches = int(BATCHES_SHARE * (60 - 20) / BATCH_SECONDS)
    assert 1 < num_batches < NUM_BATCHES
    seconds_after_batches = 60 - 20 - BATCH_SECONDS * num_batches - SAVE_SECONDS
    decode_seconds = max(LEAST_DECODING * DECODE_SECONDS, DECODING_SHARE * seconds_after_batches)
    assert decode_seconds < DECODE_SECONDS
    expected = seconds_after_batches - (1 + PACKING_FACTOR) * decode_seconds
    assert limit.time_remaining() == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("start_up_seconds", [52.0, 58.0])
def test_the_advice_for_a_time_that_is_too_short_works(
    start_up_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if start-up takes twice as long, and a cache takes half of what is left."""
    with pytest.raises(
        ValueError, match="is too short: .* s passed before the first step"
    ) as error:
        started(1.0, start_up_seconds, monkeypatch)
    advice = re.search(r"give --minutes (\d+) or more", str(error.value))
    assert advice is not None
    minutes = int(advice[1])
    seconds_left = 60 * minutes - 2 * start_up_seconds
    limit = started(minutes, 2 * start_up_seconds + seconds_left / 2, monkeypatch)
    assert (limit.time_remaining() or 0) > 0


def test_a_time_that_start_up_uses_is_refused_before_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TimeLimit, "began", time.monotonic() - 40)
    check_start_up(2.0)
    needed = START_UP_FACTOR * 40
    assert needed > 60
    with pytest.raises(ValueError, match="starting up took 40 s so far, give --minutes 4 or more"):
        check_start_up(1.0)


def test_a_time_that_is_over_is_refused_before_outputs_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module = LightningModule()
    monkeypatch.setattr(TimeLimit, "began", time.monotonic() - 40)
    TimeLimit(1.0).setup(trainer, module, "fit")
    TimeLimit(0.5).setup(trainer, module, "validate")
    with pytest.raises(ValueError, match="--minutes 0.5 is too short"):
        TimeLimit(0.5).setup(trainer, module, "fit")
