"""Training an output head for the target's lower layers, which draft unchanged.

Shapes: N positions, D width of the target's hidden states, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_specdec.data import Batch
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.drafters.draft_vocabulary import rows_of
from lightning_specdec.drafters.early_exit import ExitHead
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM


class ExitHeadTraining(DistillationTraining):
    """Trains an output head on the output of one of the target's lower layers.

    The target stays unchanged, unlike in LayerSkip (`EarlyExitTraining`), which trains the whole
    model. The head starts as a copy of the target's final norm and output head.

    Args:
        exit_layer: number of the target's layers that draft; a quarter of them when None.
        num_blocks: residual blocks of the head.
        draft_vocabulary: size of the head's vocabulary, the most frequent tokens of the training
            texts; the target's vocabulary when None.
        options: see `DistillationTraining`.
    """

    drafter: EarlyExitDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        exit_layer: int | None = None,
        num_blocks: int = 2,
        draft_vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        def make_drafter(target: LanguageModel) -> EarlyExitDrafter:
            num_exit_layers = exit_layer
            if num_exit_layers is None:
                num_exit_layers = max(1, (target.num_layers or 1) // 4)
            target.check_exit(num_exit_layers)
            return EarlyExitDrafter(
                num_exit_layers,
                head_layers=[num_exit_layers],
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, **options)

    @classmethod
    def recipe_arguments(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train an exit's head for a target of this shape.

        Raises:
            ValueError: the target has one layer only.
        """
        target.require_several_layers("an exit needs a layer to skip")
        return {
            "num_draft_tokens": 2,
            "draft_vocabulary": target.draft_vocabulary,
        }

    @property
    def head(self) -> ExitHead:
        """The head that is trained."""
        assert self.drafter.head is not None
        return self.drafter.head

    @property
    def _feature_layer(self) -> int:
        """Index of the layer whose output the head reads, counted from 0."""
        return self.drafter.exit_layer - 1

    def layers(self) -> Sequence[int]:
        return (self._feature_layer,)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output head, and its final norm if that is an RMSNorm."""
        output_weight = self.target.output_weight
        self.head.output.weight.copy_(rows_of(output_weight, self.draft_vocabulary))

        # Families store a norm's weight w in several ways (Gemma stores w - 1), so measure it: an
        # RMSNorm maps the i-th unit vector, scaled up so that epsilon does not matter, to
        # w_i * sqrt(D) at i and to 0 elsewhere.
        size = output_weight.shape[1]
        units = torch.eye(size, dtype=output_weight.dtype, device=output_weight.device)
        final_norm = cast("HuggingFaceLM", self.target).stack.norm
        normed = final_norm(1000.0 * units[None])[0]

        off_diagonal = normed * (1 - units)
        is_rms_norm = not off_diagonal.any()
        if is_rms_norm:
            self.head.norm.weight.copy_(normed.diagonal() / size**0.5)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: one head drafts all tokens, so one step represents all."""
        return [DraftStep(outputs.features[self._feature_layer][:, :-1], first_index=1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.head(hidden)
