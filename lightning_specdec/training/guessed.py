"""Which tokens of a text a draft's guesses speak of, and which of them it is to learn to say.

Shapes: B rows, M places, D width of what an output head reads, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.data import Batch, TokenData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Guessed(NamedTuple):
    """What one guess of every round is made of.

    Args:
        hidden: what the draft's output head reads; `[:, x]` speaks of token `first + x`.
        first: the first token that is spoken of.
    """

    hidden: Float[Tensor, "B M D"]
    first: int

    @property
    def num_places(self) -> int:
        """M."""
        return self.hidden.shape[1]

    def before(self) -> slice:
        """The places of the tokens before those: where the target speaks of the same."""
        return slice(self.first - 1, self.first - 1 + self.num_places)

    def learned(self, batch: Batch, *, prompts: bool) -> Bool[Tensor, "B M"]:
        """The places whose tokens are learned from.

        Args:
            prompts: whether those of prompts are.
        """
        tokens = self.first + torch.arange(self.num_places, device=batch.tokens.device)
        starts = torch.ones_like(batch.lengths) if prompts else batch.prompt_lengths
        return (tokens < batch.lengths[:, None]) & (tokens >= starts[:, None])


def token_counts(data: TokenData, vocab_size: int) -> Int[Tensor, "V"]:
    """How often each token is said in the training split, prompts apart."""
    rows, counts = data.rows("train"), torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(rows), data.batch_size):
        batch = data.collate([rows[i] for i in range(start, min(start + data.batch_size, len(rows)))])
        places = torch.arange(batch.tokens.shape[1])
        said = (places < batch.lengths[:, None]) & (places >= batch.prompt_lengths[:, None])
        counts += torch.bincount(batch.tokens[said], minlength=vocab_size)
    return counts
