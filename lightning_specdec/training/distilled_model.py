"""Training a smaller language model as the draft: a new one, or some of the target's own layers.

Shapes: N positions, D width of the draft's hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_specdec.data import Batch
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM


class DistilledModelTraining(DistillationTraining):
    """Trains a smaller model to predict what the target predicts.

    Args:
        draft: a new model with the target's vocabulary; None where `draft_layers` is given.
        draft_layers: indices of the target's layers that the draft consists of, ascending, from 0.
            Such a draft needs far less training than a new model. It keeps the target's embeddings
            and output head unchanged.
        options: see `DistillationTraining`.
    """

    drafter: ModelDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        *,
        draft_layers: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if (draft is None) == (draft_layers is None):
            num_given = "neither" if draft is None else "both"
            raise ValueError(
                f"a draft is new or made of the target's layers, got {num_given}: give draft or "
                "draft_layers"
            )
        self.draft_layers = None if draft_layers is None else list(draft_layers)

        def make_drafter(target: LanguageModel) -> ModelDrafter:
            model = self._model_of_layers(target) if draft is None else draft
            model.check_output_head()
            return ModelDrafter(model)

        super().__init__(make_drafter, target, **options)

    @classmethod
    def layers_recipe(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train a draft from the first and last tenth of the target's layers.

        Raises:
            ValueError: the target has one layer only.
        """
        target.require_several_layers("a draft of its layers would be the target")
        num_at_each_end = max(1, target.num_layers // 10)
        first_layers = range(num_at_each_end)
        last_layers = range(target.num_layers - num_at_each_end, target.num_layers)
        draft_layers = sorted({*first_layers, *last_layers})
        if len(draft_layers) == target.num_layers:
            # Of two layers, the first one drafts.
            draft_layers = [0]
        return {
            "draft_layers": draft_layers,
            "num_draft_tokens": 3,
            "learning_rate": 0.0005,
        }

    @classmethod
    def pair_recipe(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train a new, smaller Llama.

        It has a quarter of the target's width and an eighth of its layers.
        """
        # A multiple of 64, at least 32, which heads of 32 divide.
        quarter = target.hidden_size // 4
        hidden_size = max(32, quarter // 64 * 64)
        model = {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "vocab_size": target.vocab_size,
            "num_hidden_layers": max(1, target.num_layers // 8),
            "num_attention_heads": hidden_size // 32,
            "max_position_embeddings": target.max_positions,
            "tie_word_embeddings": True,
        }
        return {
            "draft": {"class_path": "HuggingFaceLM", "init_args": {"model": model}},
            "num_draft_tokens": 3,
        }

    def _model_of_layers(self, target: LanguageModel) -> HuggingFaceLM:
        """A model with some of the target's layers; its embeddings and output head are frozen."""
        # Imports transformers, which other drafts do without.
        from lightning_specdec.models.huggingface import HuggingFaceLM

        if not isinstance(target, HuggingFaceLM):
            raise ValueError(
                "draft_layers takes a transformers model apart, the target is a "
                f"{type(target).__name__}"
            )
        assert self.draft_layers is not None
        draft = target.with_layers(self.draft_layers)
        draft.model.get_input_embeddings().requires_grad_(False)
        draft.model.get_output_embeddings().requires_grad_(False)
        return draft

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: one step, since all draft tokens come from one model."""
        model = self.drafter.model
        last_layer = (model.num_layers or 0) - 1
        # Only hidden states are needed here: `step_logits` computes the logits of the learned
        # positions.
        no_positions = slice(0, 0)
        output = model(batch.tokens[:, :-1], features=(last_layer,), logits_for=no_positions)
        hidden = output.features[last_layer]
        return [DraftStep(hidden, first_index=1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.drafter.model.output_logits(hidden[None])[0]
