"""Training a draft and its target side by side, in one run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import PairMetrics, RoundMetrics, next_token_loss


class PairTraining(SpeculativeTraining):
    """Trains a small draft and a larger target on the same sequences, and measures what they would save together.

    Theory: speculation pays where the draft guesses what the target would say. Two models that learn the same task
    from the same data come to agree where the task leaves no choice, without either seeing the other. Each minimizes
    its own cross-entropy on the next token. One Adam minimizes the sum of the two losses: a loss has no gradient in
    the other model's weights, and Adam treats every weight by itself, so this is exactly two Adams, at half the
    cost of a step. (Clipping gradients by their common norm would couple the models; clip by value instead.)

    Args:
        target: the model whose output is wanted.
        draft: the model that guesses; it must share the target's vocabulary.
        options: those of `SpeculativeTraining`.
    """

    drafter: ModelDrafter

    def __init__(self, target: LanguageModel, draft: LanguageModel, **options: Any) -> None:
        super().__init__(target, ModelDrafter(draft), **options)

    def new_metrics(self) -> PairMetrics:
        return PairMetrics(self.num_draft_tokens)

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, PairMetrics)
        metrics.update(*self.score(batch), batch)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of draft and target, for every token of the batch but the last."""
        inputs = batch.tokens[:, :-1]
        return self.drafter.model(inputs).logits, self.target(inputs).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score(batch)
        losses = {
            "draft_loss": next_token_loss(draft_logits, labels),
            "target_loss": next_token_loss(target_logits, labels),
        }
        self.log_losses(losses, (labels != IGNORED).sum())
        return torch.stack(list(losses.values())).sum()
