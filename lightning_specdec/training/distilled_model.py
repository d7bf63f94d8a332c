"""Training a small model as the draft of a frozen target: a new one, or some of the target's own layers.

Shapes: N places, D width of the draft's hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_specdec.data import Batch
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.given_target import the_target
from lightning_specdec.training.guessed import Guessed
from lightning_specdec.training.target_reading import Reading

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM


class DistilledModelTraining(DistillationTraining):
    """Trains a smaller model to be the draft of a frozen target.

    Theory: a model that is made of some of the target's layers knows its embeddings and much of what it knows, so it
    needs far less training than a new one (see `models.fewer_layers.with_layers`). Its embeddings and output head are
    the target's, which is where its words are; they need not be learnt again.

    Args:
        target: the model whose output is wanted; None where `target_checkpoint` says it.
        draft: a new model of the same vocabulary; None where `draft_layers` says it.
        target_checkpoint: a checkpoint whose target is taken, or the directory of a transformers model.
        target_dtype: what a directory's model computes in; as it is stored when None.
        draft_layers: the target's layers that the draft is made of, ascending, from 0.
        freeze_embeddings: whether a draft that is made of layers keeps the target's embeddings and output head.
        options: those of `DistillationTraining`.
    """

    drafter: ModelDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        *,
        target_checkpoint: str | None = None,
        target_dtype: str | None = None,
        draft_layers: Sequence[int] | None = None,
        freeze_embeddings: bool = True,
        **options: Any,
    ) -> None:
        if (draft is None) == (draft_layers is None):
            given = "neither" if draft is None else "both"
            raise ValueError(f"a draft is new or made of the target's layers, got {given}: give draft or draft_layers")
        target, tokenizer = the_target(target, target_checkpoint, True, dtype=target_dtype)
        if draft_layers is not None:
            draft = _of_layers(target, draft_layers, freeze_embeddings)
        assert draft is not None
        _check_head(draft)
        self.draft_layers = None if draft_layers is None else list(draft_layers)
        self.freeze_embeddings = freeze_embeddings
        super().__init__(target, ModelDrafter(draft), source=target_checkpoint, tokenizer=tokenizer, **options)

    @property
    def num_losses(self) -> int:
        return 1

    def settings(self) -> dict[str, Any]:
        own = {"draft_layers": self.draft_layers, "freeze_embeddings": self.freeze_embeddings}
        return {**super().settings(), **own}

    def layers(self) -> Sequence[int]:
        return ()

    def guesses(self, batch: Batch, reading: Reading) -> list[Guessed]:
        model = self.drafter.model
        assert model.num_layers is not None
        last = model.num_layers - 1
        output = model(batch.tokens[:, :-1], features=(last,), logits_for=slice(0, 0))
        return [Guessed(output.features[last], 1)]

    def guess_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.drafter.model.output_logits(hidden[None])[0]


def _of_layers(target: LanguageModel, layers: Sequence[int], freeze_embeddings: bool) -> HuggingFaceLM:
    """The draft that these layers make."""
    from lightning_specdec.models.fewer_layers import with_layers
    from lightning_specdec.models.huggingface import HuggingFaceLM

    if not isinstance(target, HuggingFaceLM):
        raise ValueError(f"draft_layers takes a transformers model apart, the target is a {type(target).__name__}")
    draft = with_layers(target, layers)
    if freeze_embeddings:
        for part in (draft.model.get_input_embeddings(), draft.model.get_output_embeddings()):
            part.requires_grad_(False)
    return draft


def _check_head(draft: LanguageModel) -> None:
    """Raise ValueError unless the draft's hidden states and its output head can be had one by one."""
    if draft.num_layers is None:
        raise ValueError(f"{type(draft).__name__} gives no hidden states, and learns from its own: take another draft")
    draft.check_output_head()
