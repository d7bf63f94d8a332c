"""Laws of decoding during training: logged values are those of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.models import RNN
from lightning_specdec.training import DecodeHeldOut, PairTraining

VOCAB = 23


def data(**arguments: Any) -> ArithmeticProgressions:
    return ArithmeticProgressions(
        VOCAB, 8, max_step=3, num_train=16, num_val=6, num_test=3, modulo=True, **arguments
    )


def fit(
    tmp_path: Path,
    *callbacks: Callback,
    max_epochs: int = 3,
    **options: Any,
) -> tuple[Trainer, PairTraining]:
    """A short run of a recurrent pair, which is fast."""
    torch.manual_seed(0)
    module = PairTraining(
        RNN(VOCAB, hidden_size=16), RNN(VOCAB, hidden_size=8, num_layers=1), num_draft_tokens=2
    )
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        num_sanity_val_steps=1,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(module, datamodule=data())
    return trainer, module


def test_the_plain_names_are_measured_and_the_estimates_say_so(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, DecodeHeldOut(num_prompts=3, max_new_tokens=9))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    prompts = [row[:3] for row in data().splits().val[:3]]
    decoder = SpeculativeDecoder(module.target, module.drafter)
    greedy = decoder.decode(prompts, max_new_tokens=9, num_draft_tokens=2)
    assert logged["val/block_efficiency"] == pytest.approx(greedy.block_efficiency)
    assert logged["val/acceptance_rate"] == pytest.approx(greedy.acceptance_rate or 0.0)
    assert logged["val/walltime_speedup"] > 0
    assert "val/teacher_forced_acceptance_rate" in logged
    assert "val/sampling_acceptance_rate" in logged


def test_a_checkpoint_can_be_chosen_by_what_was_measured(tmp_path: Path) -> None:
    efficiencies: list[float] = []

    class Watch(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                efficiencies.append(float(trainer.callback_metrics["val/block_efficiency"]))

    best = ModelCheckpoint(
        tmp_path, "best", monitor="val/block_efficiency", mode="max", save_on_train_epoch_end=True
    )
    fit(tmp_path, best, DecodeHeldOut(num_prompts=2, max_new_tokens=6), Watch(), max_epochs=4)
    assert len(efficiencies) == 4
    assert best.best_model_score == pytest.approx(max(efficiencies))


def test_decoding_changes_nothing_of_the_run(tmp_path: Path) -> None:
    class Modes(Callback):
        def on_train_batch_start(
            self,
            trainer: Trainer,
            pl_module: LightningModule,
            *args: Any,
        ) -> None:
            assert all(part.training for part in pl_module.modules())

    _, plain = fit(tmp_path)
    _, decoding = fit(tmp_path, DecodeHeldOut(num_prompts=2, max_new_tokens=4), Modes())
    weights = decoding.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_mixed_precision_trains_and_decodes(tmp_path: Path) -> None:
    trainer, module = fit(
        tmp_path, DecodeHeldOut(num_prompts=1, max_new_tokens=4), precision="bf16-mixed"
    )
    assert next(module.target.parameters()).dtype == torch.float32
    assert float(trainer.callback_metrics["val/block_efficiency"]) >= 1
