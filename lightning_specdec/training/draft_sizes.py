"""Training one target and several drafts of different sizes, in one run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import PairMetrics, RoundMetrics, next_token_loss

_SHOWN = (
    "draft_loss",
    "draft_perplexity",
    "draft_accuracy",
    "acceptance_rate",
    "block_efficiency",
    "sampling_acceptance_rate",
    "sampling_block_efficiency",
)
"""What is shown of each draft by its name."""


class DraftSizesMetrics(PairMetrics):
    """The metrics of the main draft under their own names, and of every draft as `NAME/...`.

    Args:
        num_draft_tokens: guesses of a round.
        names: the drafts, the main one first.
    """

    def __init__(self, num_draft_tokens: int, names: Sequence[str]) -> None:
        super().__init__(num_draft_tokens)
        self.main, *rest = names
        self.rest = nn.ModuleDict({name: PairMetrics(num_draft_tokens) for name in rest})

    def of(self, name: str) -> PairMetrics:
        """One draft's metrics."""
        found = self if name == self.main else self.rest[name]
        assert isinstance(found, PairMetrics)
        return found

    def update_all(self, draft_logits: Mapping[str, Tensor], target_logits: Tensor, batch: Batch) -> None:
        """Count one batch of all drafts."""
        for name, logits in draft_logits.items():
            self.of(name).update(logits, target_logits, batch)

    def compute(self) -> dict[str, Tensor]:
        main = super().compute()
        every = {self.main: main, **{name: self.of(name).compute() for name in self.rest}}
        named = {f"{name}/{key}": values[key] for name, values in every.items() for key in _SHOWN}
        losses = [main["target_loss"], *(values["draft_loss"] for values in every.values())]
        return {**main, "loss": torch.stack(losses).sum(), **named}


class DraftSizesTraining(SpeculativeTraining):
    """Trains a target and drafts of several sizes on the same sequences, to find the size that pays.

    Theory: a larger draft is right more often and costs more for each guess. Which size pays depends on the target and
    on the machine: the walltime_speedup is block_efficiency / (num_draft_tokens * cost_ratio + 1) (Leviathan et al.
    2023, theorem 3.8). One run gives all drafts the same target and the same batches, so that what is compared is their
    size; its checkpoint holds them all by name. As in `PairTraining`, the sum of all losses is minimized, and no loss
    has a gradient in another model's weights.

    Args:
        target: the model whose output is wanted.
        drafts: models that guess, by name; they must share the target's vocabulary.
        main: the name of the one that predicts and that a checkpoint decodes with unless told otherwise; the first of
            them when None.
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self, target: LanguageModel, drafts: dict[str, LanguageModel], *, main: str | None = None, **options: Any
    ) -> None:
        names = list(drafts)
        if not names or any(not name.isidentifier() for name in names):
            raise ValueError(f"drafts must be models, each with a word for a name, got {', '.join(names) or 'none'}")
        first = names[0] if main is None else main
        if first not in drafts:
            raise ValueError(f"main must be one of the drafts ({', '.join(names)}), got {first!r}")
        names.sort(key=lambda name: name != first)
        self.names = names
        super().__init__(target, self.named({name: ModelDrafter(drafts[name]) for name in names}), **options)

    def named(self, drafters: dict[str, ModelDrafter]) -> Mapping[str, Drafter]:
        """What the checkpoint will hold, by name: the drafts; a subclass may put before them what it makes of them."""
        return drafters

    def new_metrics(self) -> DraftSizesMetrics:
        return DraftSizesMetrics(self.num_draft_tokens, self.names)

    def score_all(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Logits `[B, T - 1, V]` of every draft and of the target."""
        inputs = batch.tokens[:, :-1]
        draft_logits = {
            name: each.model(inputs).logits for name, each in self.drafters.items() if isinstance(each, ModelDrafter)
        }
        return draft_logits, self.target(inputs).logits

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, DraftSizesMetrics)
        metrics.update_all(*self.score_all(batch), batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        losses = {f"{name}/draft_loss": next_token_loss(logits, labels) for name, logits in draft_logits.items()}
        losses["target_loss"] = next_token_loss(target_logits, labels)
        self.log_losses(losses, (labels != IGNORED).sum())
        return torch.stack(list(losses.values())).sum()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "main": self.draft_name}
