"""A reduced draft vocabulary: the subset of the target's tokens that a draft scores.

Shapes: B rows, D hidden size, V tokens of the target, W tokens of the draft.
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
    """W of the target's V tokens, in the target's order: the only ones that a draft proposes.

    A reduced vocabulary makes the output head cheap (Zhao et al. 2025, "FR-Spec"; Li et al. 2025,
    "EAGLE-3"). All other tokens have draft probability 0.

    Args:
        tokens: the target's IDs of the draft's tokens, ascending; or how many tokens there are.
            In the latter case they are the first ones until `choose` selects them.
        vocab_size: V.

    Raises:
        ValueError: `tokens` are not ascending token IDs.
    """

    tokens: Tensor

    def __init__(self, tokens: int | Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        if isinstance(tokens, int):
            num_tokens = require_int("draft_vocabulary", tokens, 2, vocab_size)
            token_ids = torch.arange(num_tokens, device="cpu")
        else:
            token_ids = torch.tensor(self._checked_tokens(tokens), device="cpu")
        # Not stored with the weights, because the settings contain the tokens.
        self.register_buffer("tokens", token_ids, persistent=False)

    def _checked_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The token IDs; ValueError unless they are ascending and in range."""
        token_ids = []
        for token in tokens:
            token_id = require_int("a token of draft_vocabulary", token, 0, self.vocab_size - 1)
            token_ids.append(token_id)

        is_ascending = token_ids == sorted(set(token_ids))
        if len(token_ids) < 2 or not is_ascending:
            raise ValueError(
                f"draft_vocabulary must ascend and have at least two tokens, got {token_ids[:8]}"
            )
        return token_ids

    def __len__(self) -> int:
        return len(self.tokens)

    def choose(self, counts: Int[Tensor, "V"], required: Iterable[int] = ()) -> None:
        """Set it to the most frequent tokens.

        Args:
            counts: how often each token occurs. Of equally frequent tokens, lower IDs come first.
            required: tokens to include whatever their counts, such as those that end a text.

        Raises:
            ValueError: the required tokens do not fit.
        """
        required_tokens = sorted(set(required))
        if len(required_tokens) > len(self):
            raise ValueError(
                f"a draft vocabulary of {len(self)} has no room for {len(required_tokens)} tokens "
                "that are required"
            )
        scores = counts.clone().double()
        scores[required_tokens] = torch.inf
        tokens_by_rank = scores.sort(descending=True, stable=True).indices
        chosen_tokens = tokens_by_rank[: len(self)]
        self.tokens.copy_(chosen_tokens.sort().values)

    def become(self, tokens: Sequence[int]) -> None:
        """Replace its tokens by the same number of tokens.

        Raises:
            ValueError: they are not ascending token IDs, or not as many.
        """
        vocabulary = DraftVocabulary(tokens, self.vocab_size)
        if len(vocabulary) != len(self):
            raise ValueError(
                f"a draft vocabulary of {len(self)} tokens cannot become one of {len(vocabulary)}"
            )
        self.tokens.copy_(vocabulary.tokens)

    def arguments(self) -> list[int]:
        """The target's token IDs, as the constructor takes them."""
        return self.tokens.tolist()

    def spread(self, values: Float[Tensor, "*B W"], fill: float) -> Float[Tensor, "*B V"]:
        """Expand values of the draft's tokens to values of the target's tokens.

        Args:
            fill: value for tokens outside the draft's vocabulary: -inf for logits, 0 for
                probabilities.
        """
        shape = (*values.shape[:-1], self.vocab_size)
        target_values = values.new_full(shape, fill)
        return target_values.index_copy_(-1, self.tokens, values)

    def to_draft(self, tokens: Int[Tensor, "*B"], missing: int) -> Int[Tensor, "*B"]:
        """Convert the target's token IDs to the draft's.

        Args:
            missing: value for tokens outside the draft's vocabulary, and for negative ones.
        """
        insertion_points = torch.searchsorted(self.tokens, tokens)
        draft_tokens = insertion_points.clamp(max=len(self) - 1)
        is_in_vocabulary = self.tokens[draft_tokens] == tokens
        return torch.where(is_in_vocabulary, draft_tokens, missing)

    def check_has(self, tokens: Iterable[int], called: str) -> None:
        """Raise ValueError, which calls the tokens `called`, unless the draft has all of them."""
        missing_tokens = sorted(set(tokens) - set(self.arguments()))
        if missing_tokens:
            token_list = ", ".join(map(str, missing_tokens))
            raise ValueError(
                f"the draft's vocabulary of {len(self)} tokens leaves out {called} ({token_list})"
            )


def rows_of(
    weight: Float[Tensor, "V D"], vocabulary: DraftVocabulary | None
) -> Float[Tensor, "W D"]:
    """The rows of an output head for the draft's tokens; all rows if its vocabulary is None."""
    if vocabulary is None:
        return weight
    return weight[vocabulary.tokens]
