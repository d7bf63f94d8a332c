"""Training a target and one or several drafts side by side, in one run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import Drafter, ModelDrafter, StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import PairMetrics, RoundMetrics, next_token_loss

STAGED = "staged"
"""The name of the stages together."""
_SHOWN = tuple(
    "draft_loss draft_perplexity draft_accuracy acceptance_rate block_efficiency sampling_acceptance_rate "
    "sampling_block_efficiency".split()
)
"""What is shown of each draft by its name."""


class DraftSizesMetrics(PairMetrics):
    """The metrics of the main draft under their own names, and of every draft as `NAME/...`.

    Args:
        num_draft_tokens: draft tokens of a round.
        names: the drafts, the main one first.
    """

    def __init__(self, num_draft_tokens: int, names: Sequence[str]) -> None:
        super().__init__(num_draft_tokens)
        self.main, *rest = names
        self.rest = nn.ModuleDict({name: PairMetrics(num_draft_tokens) for name in rest})

    def update_all(self, draft_logits: Mapping[str, Tensor], target_logits: Tensor, batch: Batch) -> None:
        """Count one batch of all drafts."""
        for name, logits in draft_logits.items():
            metrics: Any = self if name == self.main else self.rest[name]
            metrics.update(logits, target_logits, batch)

    def compute(self) -> dict[str, Tensor]:
        rest: dict[str, Any] = dict(self.rest.items())
        every = {self.main: super().compute(), **{name: metrics.compute() for name, metrics in rest.items()}}
        main = every[self.main]
        loss = main["target_loss"] + torch.stack([values["draft_loss"] for values in every.values()]).sum()
        named = {f"{name}/{key}": values[key] for name, values in every.items() for key in _SHOWN} if rest else {}
        return {**main, "loss": loss, **named}


class DraftSizesTraining(SpeculativeTraining):
    """Trains a target and drafts of several sizes on the same sequences, to find the size that pays.

    The sum of all losses is minimized; no loss has a gradient in another model's weights, and Adam treats every weight
    by itself, so that each model learns as if it were alone. (Clip gradients by value: a common norm couples them.)

    Args:
        target: the model whose output is wanted.
        drafts: draft models by name; they must share the target's vocabulary.
        main: the name of the one that predicts and that a checkpoint decodes with unless told otherwise; the first of
            them when None.
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self, target: LanguageModel, drafts: dict[str, LanguageModel], *, main: str | None = None, **options: Any
    ) -> None:
        names = list(drafts)
        if not names or any(not name.isidentifier() for name in names):
            raise ValueError(f"drafts must be models whose names are identifiers, got {', '.join(names) or 'none'}")
        main = names[0] if main is None else main
        if main not in drafts:
            raise ValueError(f"main must be one of the drafts ({', '.join(names)}), got {main!r}")
        names.sort(key=lambda name: name != main)
        self.names = names
        super().__init__(target, self.named({name: ModelDrafter(drafts[name]) for name in names}), **options)

    def named(self, drafters: dict[str, ModelDrafter]) -> Mapping[str, Drafter] | Drafter:
        """The drafters of the checkpoint: one, or several by name."""
        return drafters

    def new_metrics(self) -> DraftSizesMetrics:
        return DraftSizesMetrics(self.num_draft_tokens, self.names)

    def score_all(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Logits `[B, T - 1, V]` of every draft and of the target."""
        inputs = batch.tokens[:, :-1]
        drafts = [each for each in self.drafters.values() if isinstance(each, ModelDrafter)]
        logits = {name: each.model(inputs).logits for name, each in zip(self.names, drafts, strict=True)}
        return logits, self.target(inputs).logits

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, DraftSizesMetrics)
        metrics.update_all(*self.score_all(batch), batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        draft_logits, target_logits = self.score_all(batch)
        of_one = len(draft_logits) == 1
        losses = {
            "draft_loss" if of_one else f"{name}/draft_loss": next_token_loss(logits, labels)
            for name, logits in draft_logits.items()
        }
        losses["target_loss"] = next_token_loss(target_logits, labels)
        self.log_losses(losses, (labels != IGNORED).sum())
        return torch.stack(list(losses.values())).sum()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "main": self.draft_name}


class PairTraining(DraftSizesTraining):
    """Trains a small draft and a larger target on the same sequences; see `DraftSizesTraining`.

    Args:
        target: the model whose output is wanted.
        draft: the draft model; it must share the target's vocabulary.
        options: those of `SpeculativeTraining`.
    """

    drafter: ModelDrafter

    def __init__(self, target: LanguageModel, draft: LanguageModel, **options: Any) -> None:
        super().__init__(target, {"draft": draft}, **options)

    def named(self, drafters: dict[str, ModelDrafter]) -> Drafter:
        return drafters["draft"]

    def settings(self) -> dict[str, Any]:
        return SpeculativeTraining.settings(self)


class StagedTraining(DraftSizesTraining):
    """Trains a target and drafts of several sizes, which then draft in stages.

    Staging changes what the largest draft costs and never what it proposes, so each draft is trained by itself. The
    checkpoint decodes with the stages; each draft by itself is there under its own name.

    Args:
        target: the model whose output is wanted.
        drafts: draft models by name, the smallest first; they must share the target's vocabulary.
        stage_windows: draft tokens that a stage makes for the next one at a time: one number for all, or one for each
            but the last.
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafts: dict[str, LanguageModel],
        *,
        stage_windows: int | list[int] = 4,
        **options: Any,
    ) -> None:
        if STAGED in drafts:
            raise ValueError(f"no draft may be called {STAGED!r}, which is the name of all together: rename it")
        self.stages, self.stage_windows = list(drafts), stage_windows
        super().__init__(target, drafts, main=self.stages[-1] if drafts else None, **options)

    def named(self, drafters: dict[str, ModelDrafter]) -> Mapping[str, Drafter]:
        staged = StagedDrafter([drafters[name] for name in self.stages], stage_windows=self.stage_windows)
        return {STAGED: staged, **drafters}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "stage_windows": self.stage_windows}
