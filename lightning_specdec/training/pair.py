"""Training a target and one or several drafts side by side, in one run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_specdec.data import Batch
from lightning_specdec.drafters import Drafter, ModelDrafter, StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import (
    Means,
    RoundMetrics,
    count_labels,
    next_token_loss,
    next_token_means,
)

STAGED = "staged"
"""The name of the drafter that all stages form together."""


class PairTraining(SpeculativeTraining):
    """Trains a target and a smaller draft, or several drafts by name, on the same sequences.

    The training minimizes the sum of all losses. No loss has a gradient in another model's weights,
    and Adam updates every weight separately, so each model learns as if it were trained alone.
    (Clip gradients by value: a common norm couples them.)

    Args:
        target: the model whose output is wanted.
        draft: the draft model; it must share the target's vocabulary.
        drafts: draft models by name, instead of one; the first one decodes by default.
        stage_windows: make the drafts the stages of a `StagedDrafter`, the smallest first: draft
            tokens that a stage proposes to the next one. Staging changes the cost of the last
            draft, never its proposals, so each draft is trained separately.
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        *,
        drafts: dict[str, LanguageModel] | None = None,
        stage_windows: int | None = None,
        **options: Any,
    ) -> None:
        if (draft is None) == (not drafts):
            raise ValueError(
                "a training has one draft or several by name: give either `draft` or `drafts`"
            )
        models = {"draft": draft} if draft is not None else dict(drafts or {})
        for name in models:
            if not name.isidentifier() or name == STAGED:
                raise ValueError(
                    f"drafts must have names that are identifiers and not {STAGED!r}, got "
                    f"{', '.join(models)}"
                )

        self.stage_windows = stage_windows
        drafters = {name: ModelDrafter(model) for name, model in models.items()}
        self.names = list(models)
        if stage_windows is not None:
            # The last stage is the largest draft: it comes first among the metrics.
            self.names.reverse()

        named_drafters: dict[str, Drafter] = {}
        if stage_windows is not None:
            stages = list(drafters.values())
            named_drafters[STAGED] = StagedDrafter(stages, stage_windows=stage_windows)
        for name in self.names:
            named_drafters[name] = drafters[name]
        # A single draft keeps the name that checkpoints give the only drafter.
        all_drafters = drafters["draft"] if draft is not None else named_drafters
        super().__init__(target, all_drafters, **options)

    def new_metrics(self) -> RoundMetrics:
        prefixes = self.prefixes()
        return RoundMetrics(["", *prefixes], self.num_draft_tokens, main=prefixes[0])

    def prefixes(self) -> list[str]:
        """The prefixes of the drafts' metrics; those of the first are shown without it too."""
        if len(self.names) == 1:
            return [""]
        return [f"{name}/" for name in self.names]

    def score_all(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Logits `[B, T - 1, V]` of every draft by its prefix, and of the target."""
        inputs = batch.tokens[:, :-1]
        models = [
            drafter.model for drafter in self.drafters.values() if isinstance(drafter, ModelDrafter)
        ]
        draft_logits = {}
        for prefix, model in zip(self.prefixes(), models, strict=True):
            draft_logits[prefix] = model(inputs).logits
        return draft_logits, self.target(inputs).logits

    def measure(self, batch: Batch, split: str) -> Means:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        means = next_token_means("target", target_logits, labels)
        loss, num_tokens = means["target_loss"]
        for prefix, logits in draft_logits.items():
            self.metrics.count(logits, target_logits, batch, prefix)
            means.update(next_token_means(f"{prefix}draft", logits, labels))
            draft_loss, _ = means[f"{prefix}draft_loss"]
            loss = loss + draft_loss

        main_prefix = self.prefixes()[0]
        for name in ("draft_loss", "draft_accuracy"):
            means[name] = means[main_prefix + name]
        means["loss"] = (loss, num_tokens)
        return means

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        loss_sums = {
            f"{prefix}draft_loss": next_token_loss(logits, labels, "sum")
            for prefix, logits in draft_logits.items()
        }
        loss_sums["target_loss"] = next_token_loss(target_logits, labels, "sum")

        num_tokens = count_labels(batch)
        means = {name: loss.detach() / max(1, num_tokens) for name, loss in loss_sums.items()}
        self.log_losses(means, num_tokens)
        return torch.stack(list(loss_sums.values())).sum() / self.mean_count(
            num_tokens, count_labels
        )
