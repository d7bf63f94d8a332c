"""Training Medusa heads: at token t, head i predicts token t + 2 + i.

Shapes: N positions, D width of the target's hidden states, W tokens of the draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_specdec.data import Batch
from lightning_specdec.drafters import MedusaDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class MedusaTraining(DistillationTraining):
    """Trains the Medusa heads of a `MedusaDrafter` on the target's last hidden state.

    Without `freeze_target`, heads and target are trained together and minimize the sum of all
    cross-entropies (Gloeckle et al. 2024, equation 2). With it, the heads learn from the target's
    distributions (Cai et al. 2024, "Medusa": Medusa-1).

    Args:
        num_heads: number of heads, the maximum of draft tokens in a round.
        num_blocks: residual blocks of each head.
        draft_vocabulary: size of the heads' vocabulary for a frozen target, the most frequent
            tokens of the training texts; the target's vocabulary when None.
        freeze_target: whether only the heads are trained.
        options: see `DistillationTraining`.
    """

    drafter: MedusaDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        num_heads: int = 4,
        num_blocks: int = 1,
        draft_vocabulary: int | None = None,
        freeze_target: bool = False,
        **options: Any,
    ) -> None:
        if draft_vocabulary is not None and not freeze_target:
            raise ValueError(
                "a target that learns needs all its tokens: drop draft_vocabulary or give "
                "freeze_target"
            )

        def make_drafter(target: LanguageModel) -> MedusaDrafter:
            return MedusaDrafter(
                num_heads,
                hidden_size=target.hidden_size or 0,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, freeze_target=freeze_target, **options)
        if self.num_draft_tokens > num_heads:
            raise ValueError(
                f"a round cannot have {self.num_draft_tokens} draft tokens of {num_heads} heads: "
                "lower num_draft_tokens or raise num_heads"
            )

    @classmethod
    def recipe_arguments(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train Medusa heads for a frozen target of this shape."""
        return {
            "freeze_target": True,
            "num_heads": 4,
            "num_draft_tokens": 4,
            "draft_vocabulary": target.draft_vocabulary,
        }

    def loss_weights(self, num_steps: int) -> list[float]:
        """See `DistillationTraining`; heads that are trained with their target count alike."""
        if self.freeze_target:
            return super().loss_weights(num_steps)
        return [1.0] * num_steps

    def init_from_target(self) -> None:
        """Copy the target's output head into each head."""
        self.drafter.init_from(self.target)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: head i at token t predicts token t + 2 + i."""
        (last_layer,) = self.layers()
        hidden = outputs.features[last_layer]
        steps = []
        for head_index in range(self.drafter.settings.num_heads):
            offset = 2 + head_index
            num_positions = max(0, hidden.shape[1] - offset)
            steps.append(DraftStep(hidden[:, :num_positions], first_index=offset))
        return steps

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.logits(number, hidden)
