"""Training an output head for a frozen target's lower layers, from the target's own distributions.

Shapes: N places, D hidden size, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_specdec.data import Batch
from lightning_specdec.drafters import DraftVocabulary, EarlyExitDrafter
from lightning_specdec.drafters.draft_vocabulary import rows_of
from lightning_specdec.drafters.early_exit import ExitHead
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.given_target import the_target
from lightning_specdec.training.guessed import Guessed
from lightning_specdec.training.target_reading import Reading

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM

_LARGE = 1000.0
"""What a norm is asked about, so that what it adds to a square before the root does not matter."""


class ExitHeadTraining(DistillationTraining):
    """Trains an exit of a frozen target: its lower layers stay as they are, an output head learns to read them.

    Theory: LayerSkip trains the whole model for its exits (`EarlyExitTraining`). A target that must stay as it is
    leaves the head alone: it begins as the target's own final norm and output head, and blocks before them turn what
    the layer says towards what these read.

    Args:
        target: the model whose output is wanted; None where `target_checkpoint` says it.
        target_checkpoint: a checkpoint whose target is taken, or the directory of a transformers model.
        target_dtype: what a directory's model computes in; as it is stored when None.
        exit_layer: how many of the target's layers guess; a quarter when None.
        num_blocks: residual blocks of the head.
        draft_vocabulary: how many tokens the head can say, the most frequent of the training texts; all when None.
        options: those of `DistillationTraining`.
    """

    drafter: EarlyExitDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        target_checkpoint: str | None = None,
        target_dtype: str | None = None,
        exit_layer: int | None = None,
        num_blocks: int = 2,
        draft_vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        target, tokenizer = the_target(target, target_checkpoint, True, dtype=target_dtype)
        exit_layer = max(1, (target.num_layers or 1) // 4) if exit_layer is None else exit_layer
        target.check_exit(exit_layer)
        drafter = EarlyExitDrafter(
            exit_layer,
            head_layers=[exit_layer],
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_blocks=num_blocks,
            draft_vocabulary=draft_vocabulary,
        )
        super().__init__(target, drafter, source=target_checkpoint, tokenizer=tokenizer, **options)

    @property
    def num_losses(self) -> int:
        return 1

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.drafter.draft_vocabulary

    @property
    def head(self) -> ExitHead:
        """What learns."""
        assert self.drafter.head is not None
        return self.drafter.head

    def layers(self) -> Sequence[int]:
        return (self.drafter.exit_layer - 1,)

    @torch.no_grad()
    def begin_from_target(self) -> None:
        """Let the head be the target's final norm, where that is an RMSNorm, and its output head."""
        weight = self.target.output_weight
        self.head.output.weight.copy_(rows_of(weight, self.draft_vocabulary))
        # Read off what the norm makes of unit vectors, since families write its weight in several ways.
        size = weight.shape[1]
        units = torch.eye(size, dtype=weight.dtype, device=weight.device)
        made = cast("HuggingFaceLM", self.target).stack.norm(_LARGE * units[None])[0]
        if not (made * (1 - units)).any():
            self.head.norm.weight.copy_(made.diagonal() / size**0.5)

    def guesses(self, batch: Batch, reading: Reading) -> list[Guessed]:
        (layer,) = self.layers()
        return [Guessed(reading.features[layer][:, :-1], 1)]

    def guess_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        logits: Tensor = self.head(hidden)
        return logits
