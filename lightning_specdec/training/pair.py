"""Training a target and one or several drafts side by side, in one run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import Drafter, ModelDrafter, StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import (
    Means,
    RoundMetrics,
    next_token_loss,
    next_token_means,
)

STAGED = "staged"
"""The name of the stages together."""


class PairTraining(SpeculativeTraining):
    """Trains a target and a smaller draft, or several drafts by name, on the same sequences.

    The sum of all losses is minimized; no loss has a gradient in another model's weights, and Adam treats every weight
    by itself, so that each model learns as if it were alone. (Clip gradients by value: a common norm couples them.)

    Args:
        target: the model whose output is wanted.
        draft: the draft model; it must share the target's vocabulary.
        drafts: draft models by name, instead of one; the first decodes unless another is named.
        stage_windows: make the drafts the stages of a `StagedDrafter`, the smallest first: draft tokens that a stage
            makes for the next one. Staging changes what the last draft costs and never what it proposes, so each draft
            is trained by itself.
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
        self.stage_windows = stage_windows
        models = {"draft": draft} if draft is not None else dict(drafts or {})
        drafters = {name: ModelDrafter(model) for name, model in models.items()}
        if not all(name.isidentifier() and name != STAGED for name in models):
            raise ValueError(
                f"drafts must have names that are identifiers and not {STAGED!r}, got {', '.join(models)}"
            )
        self.names = list(models) if stage_windows is None else list(models)[::-1]
        several: dict[str, Drafter] = {name: drafters[name] for name in self.names}
        if stage_windows is not None:
            several = {
                STAGED: StagedDrafter(list(drafters.values()), stage_windows=stage_windows),
                **several,
            }
        super().__init__(target, several if draft is None else drafters["draft"], **options)

    def new_metrics(self) -> RoundMetrics:
        prefixes = self.prefixes()
        return RoundMetrics(["", *prefixes], self.num_draft_tokens, main=prefixes[0])

    def prefixes(self) -> list[str]:
        """The prefixes of the drafts' metrics, the main one first: its metrics are shown without a prefix too."""
        return [f"{name}/" for name in self.names] if len(self.names) > 1 else [""]

    def score_all(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Logits `[B, T - 1, V]` of every draft by its prefix, the main one first, and of the target."""
        inputs = batch.tokens[:, :-1]
        drafters = [each for each in self.drafters.values() if isinstance(each, ModelDrafter)]
        logits = {
            name: each.model(inputs).logits
            for name, each in zip(self.prefixes(), drafters, strict=True)
        }
        return logits, self.target(inputs).logits

    def measure(self, batch: Batch, split: str) -> Means:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        values = next_token_means("target", target_logits, labels)
        loss, num_tokens = values["target_loss"]
        for prefix, logits in draft_logits.items():
            self.metrics.count(logits, target_logits, batch, prefix)
            values |= next_token_means(f"{prefix}draft", logits, labels)
            loss = loss + values[f"{prefix}draft_loss"][0]
        main = next(iter(draft_logits))
        values |= {name: values[main + name] for name in ("draft_loss", "draft_accuracy")}
        return {**values, "loss": (loss, num_tokens)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        losses = {
            f"{prefix}draft_loss": next_token_loss(each, labels)
            for prefix, each in draft_logits.items()
        }
        losses["target_loss"] = next_token_loss(target_logits, labels)
        self.log_losses(losses, (labels != IGNORED).sum())
        return torch.stack(list(losses.values())).sum()
