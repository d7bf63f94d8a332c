"""Training one target and drafts that draft for each other, the smallest first, in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_specdec.drafters import Drafter, ModelDrafter, StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.draft_sizes import DraftSizesTraining

STAGED = "staged"
"""The name of the stages together."""


class StagedTraining(DraftSizesTraining):
    """Trains a target and drafts of several sizes, which then guess in stages.

    Theory: staging changes what the largest draft costs and never what it guesses, so the drafts are trained as if each
    were alone, and what the largest one keeps along known texts is what the stages keep. The checkpoint decodes with
    the stages; each draft by itself is there under its own name, so that what staging saves can be compared.

    Args:
        target: the model whose output is wanted.
        drafts: models that guess, by name, the smallest first; they must share the target's vocabulary.
        stage_windows: guesses that a stage makes for the next one at a time: one number for all, or one for each but
            the last.
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
