"""Training an autoregressive head on a frozen target's hidden states, on rollouts of its own.

Shapes: B rows, T tokens, D width of the target's hidden states, N places, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.data import Batch
from lightning_specdec.drafters import DraftVocabulary, EagleDrafter
from lightning_specdec.drafters.draft_vocabulary import rows_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.eagle_rollout import rollouts
from lightning_specdec.training.given_target import the_target
from lightning_specdec.training.guessed import Guessed
from lightning_specdec.training.multi_token import hidden_size_of
from lightning_specdec.training.target_reading import Reading

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

HEAD_SIZE = 64


class EagleTraining(DistillationTraining):
    """Trains an `EagleDrafter` for a frozen target.

    Theory: see `EagleDrafter`, `rollouts` (the head is trained on what it makes of its own output) and
    `DistillationTraining`.

    Args:
        target: the model whose output is wanted; None where `target_checkpoint` says it.
        target_checkpoint: a checkpoint whose target is taken, or the directory of a transformers model.
        target_dtype: what a directory's model computes in; as it is stored when None.
        feature_layers: the target's layers whose hidden states are read; a low, a middle and a high one when None.
        num_heads: of the attention; as many as make each 64 wide when None.
        num_key_heads: that they share; as many when None.
        intermediate_size: of the inner network; four times the hidden size when None.
        attention_window: how many of the newest entries the attention looks at; all when None. One that most training
            texts are longer than lets the draft read texts of any length.
        draft_vocabulary: how many tokens the draft can say, the most frequent of the training texts; all when None.
        num_steps: guesses of the rollouts that are learned from; `num_draft_tokens` when None.
        random_lengths: whether the rollouts of a step end early at random, each guess followed by another one with the
            probability `position_decay`. All that are made count alike then, which is in expectation the same loss, at
            half the work for a decay of 0.6.
        options: those of `DistillationTraining`.
    """

    drafter: EagleDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        target_checkpoint: str | None = None,
        target_dtype: str | None = None,
        feature_layers: Sequence[int] | None = None,
        num_heads: int | None = None,
        num_key_heads: int | None = None,
        intermediate_size: int | None = None,
        attention_window: int | None = None,
        draft_vocabulary: int | None = None,
        num_steps: int | None = None,
        random_lengths: bool = False,
        **options: Any,
    ) -> None:
        target, tokenizer = the_target(target, target_checkpoint, True, dtype=target_dtype)
        size = hidden_size_of(target)
        heads = max(1, size // HEAD_SIZE) if num_heads is None else num_heads
        drafter = EagleDrafter(
            low_middle_high(target) if feature_layers is None else feature_layers,
            hidden_size=size,
            vocab_size=target.vocab_size,
            num_heads=heads,
            num_key_heads=heads if num_key_heads is None else num_key_heads,
            intermediate_size=4 * size if intermediate_size is None else intermediate_size,
            attention_window=attention_window,
            draft_vocabulary=draft_vocabulary,
        )
        self.num_steps = None if num_steps is None else require_int("num_steps", num_steps, 1, 64)
        self.random_lengths = random_lengths
        super().__init__(target, drafter, source=target_checkpoint, tokenizer=tokenizer, **options)
        if self.num_losses < self.num_draft_tokens:
            raise ValueError(
                f"a round of {self.num_draft_tokens} guesses is measured on rollouts of {self.num_losses}: lower "
                "num_draft_tokens or raise num_steps"
            )

    @property
    def num_losses(self) -> int:
        return self.num_draft_tokens if self.num_steps is None else self.num_steps

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.drafter.draft_vocabulary

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_steps": self.num_losses, "random_lengths": self.random_lengths}

    def layers(self) -> Sequence[int]:
        return self.drafter.feature_layers

    @torch.no_grad()
    def begin_from_target(self) -> None:
        """Let the output head be the target's."""
        self.drafter.network.output.weight.copy_(rows_of(self.target.output_weight, self.draft_vocabulary))

    def loss_weights(self, num_guesses: int) -> list[float]:
        if not self.random_lengths:
            return super().loss_weights(num_guesses)
        return [1 / sum(self.position_weights)] * num_guesses

    def steps_of(self, number: int) -> int:
        """How many guesses the rollouts of an optimizer's step make: a function of its number, so that a resumed run
        goes on alike."""
        if not (self.random_lengths and self.training):
            return self.num_losses
        noise = torch.rand(self.num_losses - 1, generator=torch.Generator().manual_seed(number))
        return 1 + int((noise < self.position_decay).long().cumprod(0).sum())

    def guesses(self, batch: Batch, reading: Reading) -> list[Guessed]:
        network = self.drafter.network
        features = network.features([reading.features[layer][:, :-1].float() for layer in self.layers()])
        embedded = self.target.embeddings(batch.tokens[:, 1:])
        steps = rollouts(network, embedded, features, self.steps_of(self.global_step))
        # The last entry speaks of the token behind the text; entries before a step's number belong to no round.
        return [Guessed(hidden[:, i:-1], 2 + i) for i, hidden in enumerate(steps)]

    def guess_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.network.logits(hidden)


def low_middle_high(target: LanguageModel) -> list[int]:
    """The layers that EAGLE-3 reads, of a target of any depth: the third, the middle one, the third last."""
    assert target.num_layers is not None
    last = target.num_layers - 1
    return sorted({min(2, last), target.num_layers // 2, max(0, last - 2)})
