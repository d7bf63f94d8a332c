"""What trained drafts are made of: a draft vocabulary and residual blocks.

Shapes: B rows, D width of the hidden state, V tokens of the target, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.config.checks import require_int

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class DraftVocabulary(nn.Module):
    """W tokens of the target's V, in the target's order: the only ones that a draft proposes.

    It makes the output head cheap (Zhao et al. 2025, "FR-Spec"). All other tokens have draft probability 0.

    Args:
        tokens: the target's numbers of the draft's tokens, ascending; or how many there will be, chosen later by
            `choose` and until then the first ones.
        vocab_size: V.

    Raises:
        ValueError: they are no ascending numbers of tokens.
    """

    tokens: Tensor

    def __init__(self, tokens: int | Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        if isinstance(tokens, int):
            values = torch.arange(
                require_int("draft_vocabulary", tokens, 2, vocab_size), device="cpu"
            )
        else:
            numbers = [
                require_int("a token of draft_vocabulary", token, 0, vocab_size - 1)
                for token in tokens
            ]
            if len(numbers) < 2 or numbers != sorted(set(numbers)):
                raise ValueError(
                    f"draft_vocabulary must ascend and have two tokens at least, got {numbers[:8]}"
                )
            values = torch.tensor(numbers, device="cpu")
        # Not stored with the weights: a setting has them.
        self.register_buffer("tokens", values, persistent=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def choose(self, counts: Int[Tensor, "V"], required: Iterable[int] = ()) -> None:
        """Make it the most frequent tokens.

        Args:
            counts: how often each token occurs; of equally frequent ones the first goes first.
            required: tokens that are taken whatever their counts, as those that end a text.

        Raises:
            ValueError: it has no room for these.
        """
        must = sorted(set(required))
        if len(must) > len(self):
            raise ValueError(
                f"a draft vocabulary of {len(self)} has no room for {len(must)} tokens that it must have"
            )
        ranked = counts.clone().double()
        ranked[must] = torch.inf
        self.tokens.copy_(
            ranked.sort(descending=True, stable=True).indices[: len(self)].sort().values
        )

    def become(self, tokens: Sequence[int]) -> None:
        """Make it these tokens, as many as it has; ValueError if they are not."""
        other = DraftVocabulary(tokens, self.vocab_size)
        if len(other) != len(self):
            raise ValueError(
                f"a draft vocabulary of {len(self)} tokens cannot become one of {len(other)}"
            )
        self.tokens.copy_(other.tokens)

    def arguments(self) -> list[int]:
        """The target's numbers, as the constructor takes them."""
        return self.tokens.tolist()

    def spread(self, values: Float[Tensor, "*B W"], fill: float) -> Float[Tensor, "*B V"]:
        """Values of the draft's tokens as values of the target's, with `fill` for those that the draft does not have.

        Logits are filled with -inf, probabilities with 0.
        """
        room = values.new_full((*values.shape[:-1], self.vocab_size), fill)
        return room.index_copy_(-1, self.tokens, values)

    def to_draft(self, tokens: Int[Tensor, "*B"], missing: int) -> Int[Tensor, "*B"]:
        """The draft's numbers of the target's tokens; `missing` for those it does not have, and for negative ones."""
        found = torch.searchsorted(self.tokens, tokens).clamp(max=len(self) - 1)
        return torch.where(self.tokens[found] == tokens, found, missing)

    def check_has(self, tokens: Iterable[int], called: str) -> None:
        """Raise ValueError, which calls the tokens that name, unless the draft has these."""
        missing = sorted({*tokens} - {*self.arguments()})
        if missing:
            raise ValueError(
                f"the draft's vocabulary of {len(self)} tokens leaves out {called} ({str(missing)[1:-1]})"
            )


def rows_of(
    weight: Float[Tensor, "V D"], vocabulary: DraftVocabulary | None
) -> Float[Tensor, "W D"]:
    """The rows of an output head for a draft's tokens: all where it has no vocabulary of its own."""
    return weight if vocabulary is None else weight[vocabulary.tokens]


class Block(nn.Module):
    """Medusa's residual block: the hidden state, and a linear layer's activation on top; zero to begin with."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The next block's input."""
        return hidden + nn.functional.silu(self.linear(hidden))
