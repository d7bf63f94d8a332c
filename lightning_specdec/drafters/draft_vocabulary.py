"""The few tokens that a draft can say, and what their numbers are among the target's.

Theory: the output head of a draft is most of its work where the vocabulary is large, and nearly all text is made of a
few thousand tokens. A draft that can say those alone is cheaper and as good almost everywhere (Zhao et al. 2025,
"FR-Spec"; Li et al. 2025, "EAGLE-3"). Nothing is lost: what it cannot say has probability 0 in its distribution, which
is as true a distribution as any other, and the verdict makes the output right.

Shapes: B rows, V tokens of the target, W of the draft, D width of what an output head reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.checks import require_int

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class DraftVocabulary(nn.Module):
    """W tokens of the target's V, in the target's order.

    Args:
        tokens: the target's numbers of the draft's tokens, ascending; or how many there will be, chosen later by
            `choose` and until then the first ones.
        vocab_size: V.

    Raises:
        ValueError: they are no ascending numbers of tokens.
    """

    tokens: Tensor
    places: Tensor

    def __init__(self, tokens: int | Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        chosen = range(require_int("draft_vocabulary", tokens, 2, vocab_size)) if isinstance(tokens, int) else tokens
        numbers = torch.tensor(checked(chosen, vocab_size), device="cpu")
        # Not stored with the weights: an argument says them.
        self.register_buffer("tokens", numbers, persistent=False)
        self.register_buffer("places", _places(numbers, vocab_size), persistent=False)

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
            raise ValueError(f"a draft vocabulary of {len(self)} has no room for {len(must)} tokens that it must have")
        ranked = counts.clone().double()
        ranked[torch.tensor(must, dtype=torch.long)] = torch.inf
        self._take(ranked.sort(descending=True, stable=True).indices[: len(self)].sort().values)

    def become(self, tokens: Sequence[int]) -> None:
        """Make it these tokens, as many as it has.

        Raises:
            ValueError: they are no ascending numbers of tokens, or others in number.
        """
        if len(tokens) != len(self):
            raise ValueError(f"a draft vocabulary of {len(self)} tokens cannot become one of {len(tokens)}")
        self._take(torch.tensor(checked(tokens, self.vocab_size)))

    def _take(self, tokens: Int[Tensor, "W"]) -> None:
        self.tokens.copy_(tokens)
        self.places.copy_(_places(tokens, self.vocab_size))

    def arguments(self) -> list[int]:
        """The target's numbers, as the constructor takes them."""
        numbers: list[int] = self.tokens.tolist()
        return numbers

    def to_target(self, logits: Float[Tensor, "*B W"]) -> Float[Tensor, "*B V"]:
        """Logits over the target's tokens: -inf for what the draft cannot say."""
        room = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return room.index_copy_(-1, self.tokens, logits)

    def spread(self, probs: Float[Tensor, "*B W"]) -> Float[Tensor, "*B V"]:
        """Probabilities over the target's tokens: 0 of what the draft cannot say."""
        return probs.new_zeros(*probs.shape[:-1], self.vocab_size).index_copy_(-1, self.tokens, probs)

    def restrict(self, values: Float[Tensor, "*B V"]) -> Float[Tensor, "*B W"]:
        """What the draft's tokens have, of values over the target's."""
        return values.index_select(-1, self.tokens)

    def to_draft(self, tokens: Int[Tensor, "*B"], missing: int) -> Int[Tensor, "*B"]:
        """The draft's numbers of the target's tokens; `missing` for what it cannot say, and for negative ones."""
        found = self.places[tokens.clamp(min=0)]
        return found.masked_fill((found < 0) | (tokens < 0), missing)

    def check_has(self, tokens: Iterable[int], called: str) -> None:
        """Raise ValueError unless the draft can say these tokens.

        Args:
            called: what they are.
        """
        missing = sorted(token for token in tokens if int(self.places[token]) < 0)
        if missing:
            raise ValueError(
                f"the draft's vocabulary of {len(self)} tokens leaves out {called} ({', '.join(map(str, missing))}), "
                "so no guess could end a text: make one that has it"
            )


def rows_of(weight: Float[Tensor, "V D"], vocabulary: DraftVocabulary | None) -> Float[Tensor, "W D"]:
    """The rows of an output head for the tokens that a draft can say: all where it has no vocabulary of its own."""
    return weight if vocabulary is None else weight[vocabulary.tokens]


def checked(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens, if they are ascending numbers of the target's tokens.

    Raises:
        ValueError: they are not.
    """
    numbers = [require_int("a token of draft_vocabulary", token, 0, vocab_size - 1) for token in tokens]
    if len(numbers) < 2:
        raise ValueError(f"a draft vocabulary has two tokens at least, got {len(numbers)}")
    for before, after in zip(numbers, numbers[1:], strict=False):
        if after <= before:
            raise ValueError(f"draft_vocabulary must ascend, and {after} follows {before}: sort it, each token once")
    return numbers


def _places(tokens: Int[Tensor, "W"], vocab_size: int) -> Int[Tensor, "V"]:
    """The draft's number of each token of the target, -1 where it has none."""
    places = torch.full((vocab_size,), -1, device=tokens.device)
    places[tokens] = torch.arange(len(tokens), device=tokens.device)
    return places
