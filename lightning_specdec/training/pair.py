"""Training a draft and its target side by side, in one run.

Knows nothing of files or logs; decodes only to predict.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_specdec import checkpoint as checkpoint_file
from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import IGNORED, Batch, SequenceData
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.inference import speculative_decode
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.metrics import PairMetrics, next_token_loss


class PairTraining(LightningModule):
    """Trains a small draft and a larger target on the same sequences, and measures what they would save together.

    Theory: speculation pays where the draft guesses what the target would say. Two models that learn the same task
    from the same data come to agree where the task leaves no choice, without either seeing the other. Each minimizes
    its own cross-entropy on the next token. One Adam minimizes the sum of the two losses: a loss has no gradient in
    the other model's weights, and Adam treats every weight by itself, so this is exactly two Adams, at half the
    cost of a step. (Clipping gradients by their common norm would couple the models; clip by value instead.)

    Args:
        target: the model whose output is wanted.
        draft: the model that guesses; it must share the target's vocabulary.
        learning_rate: of Adam.
        num_draft_tokens: guesses of a round, for the metrics and for predictions.
        max_new_tokens: new tokens of each prediction.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        *,
        learning_rate: float = 0.001,
        num_draft_tokens: int = 3,
        max_new_tokens: int = 7,
    ) -> None:
        super().__init__()
        self.learning_rate = require_number("learning_rate", learning_rate, low=0.0, low_open=True)
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        self.target = target
        self.drafter = ModelDrafter(draft)
        self.drafter.check_target(target)
        self.val_metrics = PairMetrics(num_draft_tokens)
        self.test_metrics = PairMetrics(num_draft_tokens)

    def setup(self, stage: str) -> None:
        data = self._data()
        if data.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the data have a vocabulary of {data.vocab_size} tokens, the models one of {self.target.vocab_size}: "
                "give both the same vocab_size"
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Fused: one launch for all weights, where the plain form takes about ten for each.
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=True)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits `[B, T - 1, V]` of draft and target for every token of the batch but the first."""
        inputs = batch.tokens[:, :-1]
        return self.drafter.model(inputs).logits, self.target(inputs).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score(batch)
        losses = {
            "train/draft_loss": next_token_loss(draft_logits, labels),
            "train/target_loss": next_token_loss(target_logits, labels),
        }
        num_tokens = int((labels != IGNORED).sum())
        self.log_dict(losses, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=num_tokens)
        return torch.stack(list(losses.values())).sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_metrics.update(*self.score(batch), batch)

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_all("val", self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_metrics.update(*self.score(batch), batch)

    def on_test_epoch_start(self) -> None:
        self.test_metrics.reset()

    def on_test_epoch_end(self) -> None:
        self._log_all("test", self.test_metrics)

    def _log_all(self, split: str, metrics: PairMetrics) -> None:
        values = {f"{split}/{name}": value for name, value in metrics.compute().items()}
        self.log_dict(values, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """Continue each row's prompt speculatively; the output is the target's own, token for token."""
        result = speculative_decode(
            self.target,
            self.drafter,
            batch.prompts(),
            max_new_tokens=self.max_new_tokens,
            num_draft_tokens=self.num_draft_tokens,
        )
        rows = []
        for index, row in zip(batch.indices.tolist(), result.rows, strict=True):
            values = {"index": index, "prompt": row.prompt, "tokens": row.tokens, "num_rounds": row.num_rounds}
            rows.append(values if row.counts is None else {**values, "num_accepted": row.counts.num_accepted})
        return rows

    def recipe(self) -> dict[str, Any]:
        """How this pair is being trained, in plain values: what it takes to do it again, and how far it has come."""
        data = self._data()
        shown = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name.endswith("loss")}
        return {
            "training": type(self).__name__,
            "learning_rate": self.learning_rate,
            "num_draft_tokens": self.num_draft_tokens,
            "data": type(data).__name__,
            "data_arguments": data.arguments(),
            "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
            "epochs": self.trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "steps": self.trainer.global_step,
            "losses": shown,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the networks, so that the file is enough by itself for decoding."""
        checkpoint["lightning_specdec"] = checkpoint_file.describe(
            self.target, self.drafter, prompts=self._data().prompts(), recipe=self.recipe()
        )

    def _data(self) -> SequenceData:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SequenceData):
            raise ValueError(f"PairTraining needs a SequenceData as its data, got {type(data).__name__}")
        return data
