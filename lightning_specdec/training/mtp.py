"""Training the multi-token prediction layers of a target: layer i at token t predicts t + 2 + i.

Shapes: N positions, D width of the target's hidden states, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_specdec.data import Batch
from lightning_specdec.drafters import MtpDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.mtp import MtpNetwork
from lightning_specdec.models.mtp_building import new_mtp
from lightning_specdec.models.mtp_files import load_mtp, num_mtp_layers, reason_against_mtp
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class MtpTraining(DistillationTraining):
    """Trains the prediction layers of an `MtpDrafter` on a frozen target.

    The loss is that of section 2.2 of the DeepSeek-V3 report. Training starts from the layers in
    the target's checkpoint, or from new ones if it has none.

    Args:
        num_layers: how many layers are trained; when None, as many as the target's config lists, or
            one.
        options: see `DistillationTraining`.
    """

    drafter: MtpDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        num_layers: int | None = None,
        **options: Any,
    ) -> None:
        def make_drafter(target: LanguageModel) -> MtpDrafter:
            return MtpDrafter(network=_initial_layers(target, num_layers))

        super().__init__(make_drafter, target, **options)
        if not self.freeze_target:
            raise ValueError("prediction layers are trained alone: drop freeze_target")

    @classmethod
    def recipe_arguments(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train the prediction layers of a target of this shape."""
        return {"num_draft_tokens": 2}

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: layer i at token t predicts token t + 2 + i."""
        (last_layer,) = self.layers()
        hidden = outputs.features[last_layer].float()
        assert isinstance(self.target, HuggingFaceLM)
        layer_outputs = self.drafter.network.read_text(self.target, batch.tokens, hidden)
        steps = []
        for index, output in enumerate(layer_outputs):
            # The last entry predicts the token after the text.
            steps.append(DraftStep(output[:, :-1], first_index=2 + index))
        return steps

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        logits: Tensor = self.drafter.network.logits(self.target, hidden)
        return logits.float()


def _initial_layers(target: LanguageModel, num_layers: int | None) -> MtpNetwork:
    """The layers of the target's checkpoint in float32, or new ones.

    Raises:
        ValueError: transformers builds no such layers for the target.
    """
    if reason_against_mtp(target) is None:
        return load_mtp(target, num_layers).float()
    if not isinstance(target, HuggingFaceLM):
        raise ValueError(
            f"{type(target).__name__} can have no prediction layers: train a model of transformers"
        )
    return new_mtp(target, num_layers or num_mtp_layers(target) or 1).float()
