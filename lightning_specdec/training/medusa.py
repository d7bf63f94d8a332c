"""Training heads on a frozen target's last hidden state, from the target's own distributions.

Shapes: N places, D width of the target's last hidden state, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_specdec.data import Batch
from lightning_specdec.drafters import DraftVocabulary, MultiTokenDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.given_target import the_target
from lightning_specdec.training.guessed import Guessed
from lightning_specdec.training.multi_token import check_window, hidden_size_of
from lightning_specdec.training.target_reading import Reading

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class MedusaTraining(DistillationTraining):
    """Trains a `MultiTokenDrafter` for a frozen target.

    Theory: as Medusa-1, but for what the heads learn from: a head is judged by what the target says of a token, not by
    the token alone (Cai et al. 2024, "Medusa"; see `DistillationTraining`). Heads that look further have the larger
    losses and matter less, so each counts less than the one before it.

    Args:
        target: the model whose output is wanted; None where `target_checkpoint` says it.
        target_checkpoint: a checkpoint whose target is taken, or the directory of a transformers model.
        target_dtype: what a directory's model computes in; as it is stored when None.
        num_heads: guesses of a round at most.
        num_blocks: residual blocks of each head.
        shared_output: whether the heads end in the target's own output head.
        draft_vocabulary: how many tokens the heads can say, the most frequent of the training texts; all when None.
        options: those of `DistillationTraining`.
    """

    drafter: MultiTokenDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        target_checkpoint: str | None = None,
        target_dtype: str | None = None,
        num_heads: int = 4,
        num_blocks: int = 1,
        shared_output: bool = False,
        draft_vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        target, tokenizer = the_target(target, target_checkpoint, True, dtype=target_dtype)
        drafter = MultiTokenDrafter(
            num_heads,
            hidden_size=hidden_size_of(target),
            vocab_size=target.vocab_size,
            num_blocks=num_blocks,
            shared_output=shared_output,
            draft_vocabulary=draft_vocabulary,
        )
        super().__init__(target, drafter, source=target_checkpoint, tokenizer=tokenizer, **options)
        check_window(self.num_draft_tokens, num_heads)

    @property
    def num_losses(self) -> int:
        return self.drafter.num_heads

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.drafter.draft_vocabulary

    def layers(self) -> Sequence[int]:
        return self.drafter.features(self.target)

    def begin_from_target(self) -> None:
        """Let each head's output layer be a copy of the target's."""
        self.drafter.init_from(self.target)

    def guesses(self, batch: Batch, reading: Reading) -> list[Guessed]:
        (layer,) = self.layers()
        hidden = reading.features[layer]
        # The last place that a head is asked about is so far ahead of the text's end as it looks.
        ends = (max(0, hidden.shape[1] - 2 - i) for i in range(self.drafter.num_heads))
        return [Guessed(hidden[:, :end], 2 + i) for i, end in enumerate(ends)]

    def guess_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.head_logits(number, hidden, self.target)
