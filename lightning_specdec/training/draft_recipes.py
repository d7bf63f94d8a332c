"""Drafts that learn from their target: a smaller model, an early exit's head, heads for several tokens.

Shapes: N positions, D width of the hidden states, V vocabulary of the target, W of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_specdec.data import Batch
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, MultiTokenDrafter
from lightning_specdec.drafters.early_exit import ExitHead
from lightning_specdec.drafters.heads import rows_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM


class DistilledModelTraining(DistillationTraining):
    """Trains a smaller model as the draft: a new one, or some of the target's own layers.

    Args:
        draft: a new model with the target's vocabulary; None where `draft_layers` is given.
        draft_layers: the target's layers that the draft is made of, ascending, from 0. Such a draft needs far less
            training than a new one, and keeps the target's embeddings and output head.
        options: those of `DistillationTraining`.
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
            given = "neither" if draft is None else "both"
            raise ValueError(f"a draft is new or made of the target's layers, got {given}: give draft or draft_layers")
        self.draft_layers = None if draft_layers is None else list(draft_layers)

        def make_drafter(target: LanguageModel) -> ModelDrafter:
            model = self._of_layers(target) if draft is None else draft
            model.check_output_head()
            return ModelDrafter(model)

        super().__init__(make_drafter, target, **options)

    def _of_layers(self, target: LanguageModel) -> HuggingFaceLM:
        from lightning_specdec.models.huggingface import HuggingFaceLM

        if not isinstance(target, HuggingFaceLM):
            raise ValueError(f"draft_layers takes a transformers model apart, the target is a {type(target).__name__}")
        assert self.draft_layers is not None
        draft = target.with_layers(self.draft_layers)
        for part in (draft.model.get_input_embeddings(), draft.model.get_output_embeddings()):
            part.requires_grad_(False)
        return draft

    def layers(self) -> Sequence[int]:
        return ()

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        model = self.drafter.model
        last = (model.num_layers or 0) - 1
        output = model(batch.tokens[:, :-1], features=(last,), logits_for=slice(0, 0))
        return [DraftStep(output.features[last], 1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.drafter.model.output_logits(hidden[None])[0]


class ExitHeadTraining(DistillationTraining):
    """Trains an output head for the lower layers of the target, which stay as they are.

    Unlike LayerSkip (`EarlyExitTraining`), which trains the whole model. The head starts as the target's own norm and
    output head.

    Args:
        exit_layer: how many of the target's layers draft; a quarter when None.
        num_blocks: residual blocks of the head.
        draft_vocabulary: size of the head's vocabulary, the most frequent tokens of the training texts; the target's
            vocabulary when None.
        options: those of `DistillationTraining`.
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
            layer = max(1, (target.num_layers or 1) // 4) if exit_layer is None else exit_layer
            target.check_exit(layer)
            return EarlyExitDrafter(
                layer,
                head_layers=[layer],
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, **options)

    @property
    def head(self) -> ExitHead:
        """The head that is trained."""
        assert self.drafter.head is not None
        return self.drafter.head

    def layers(self) -> Sequence[int]:
        return (self.drafter.exit_layer - 1,)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output head, and its final norm if that is an RMSNorm."""
        weight = self.target.output_weight
        self.head.output.weight.copy_(rows_of(weight, self.draft_vocabulary))
        # Families store a norm's weight in several ways, so read it off the norm of large unit vectors.
        size = weight.shape[1]
        units = torch.eye(size, dtype=weight.dtype, device=weight.device)
        normed = cast("HuggingFaceLM", self.target).stack.norm(1000.0 * units[None])[0]
        if not (normed * (1 - units)).any():
            self.head.norm.weight.copy_(normed.diagonal() / size**0.5)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        return [DraftStep(outputs.features[self.drafter.exit_layer - 1][:, :-1], 1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        logits: Tensor = self.head(hidden)
        return logits


class MultiTokenTraining(DistillationTraining):
    """Trains a `MultiTokenDrafter`: heads that predict the tokens after the next from the target's last hidden state.

    Together with their target, which minimizes the sum of all cross-entropies (Gloeckle et al. 2024, equation 2); or
    with `freeze_target` from its distributions (Cai et al. 2024, "Medusa": Medusa-1).

    Args:
        num_heads: most draft tokens of a round.
        num_blocks: residual blocks of each head.
        draft_vocabulary: size of the heads' vocabulary for a frozen target, the most frequent tokens of the training
            texts; the target's vocabulary when None.
        freeze_target: whether the heads alone learn.
        options: those of `DistillationTraining`.
    """

    drafter: MultiTokenDrafter
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
            raise ValueError("a target that learns needs all its tokens: drop draft_vocabulary or give freeze_target")

        def make_drafter(target: LanguageModel) -> MultiTokenDrafter:
            return MultiTokenDrafter(
                num_heads,
                hidden_size=target.hidden_size or 0,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, freeze_target=freeze_target, **options)
        if self.num_draft_tokens > num_heads:
            raise ValueError(
                f"a round cannot have {self.num_draft_tokens} draft tokens of {num_heads} heads: lower "
                "num_draft_tokens or raise num_heads"
            )

    def loss_weights(self, num_steps: int) -> list[float]:
        return super().loss_weights(num_steps) if self.freeze_target else [1.0] * num_steps

    def layers(self) -> Sequence[int]:
        return self.drafter.features(self.target)

    def init_from_target(self) -> None:
        """Copy the target's output head into each head."""
        self.drafter.init_from(self.target)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        hidden = outputs.features[self.layers()[0]]
        ends = (max(0, hidden.shape[1] - 2 - i) for i in range(self.drafter.settings.num_heads))
        return [DraftStep(hidden[:, :end], 2 + i) for i, end in enumerate(ends)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.logits(number, hidden)
