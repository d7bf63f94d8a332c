"""What an autoregressive head remembers of a batch of rows.

Shapes: B rows, T tokens, S slots, D width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.drafters.base import DraftState, Host
from lightning_specdec.models import KVState

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class EagleState(DraftState):
    """The target's features of each row's settled text, and the keys and values of the entries that were read.

    Theory: an entry joins a token's features with the token after it. The features lie in a static buffer by their
    positions and are written when the target has read a token, guesses too: those behind a rejection are written over
    before they are known. What the network made of its own guesses lies behind the entries that were read, and is
    forgotten when they are made.

    Args:
        batch_size: rows.
        max_length: tokens of a row at most.
        host: the target and its state.
    """

    def __init__(self, batch_size: int, max_length: int, host: Host) -> None:
        self.host = host
        self.known = [0] * batch_size
        """Tokens of each row whose features are known: once the target has read the text, all of it but the last."""
        self.read = KVState(batch_size, max_length, device=host.model.device)
        self.num_scored = 1
        """Places that the target scored in its last call."""
        self._features: Float[Tensor, "B S D"] | None = None

    def learn(self, features: Float[Tensor, "B T D"], num_scored: int, num_accepted: Sequence[int]) -> None:
        """Keep what the target made of the tokens of its last call: unread text, its last token, then guesses."""
        if self._features is None:
            # One slot more than tokens takes the padding.
            self._features = features.new_zeros(len(features), self.read.num_slots, features.shape[-1])
        self.num_scored, num_tokens, last = num_scored, features.shape[1], self._features.shape[1] - 1
        # The target has read all of the text and the guesses, so its lengths tell how long the text was.
        texts = [length - num_scored + 1 for length in self.host.state.consumed]
        starts = [min(known, length - 1) for known, length in zip(self.known, texts, strict=True)]
        if min(starts) == max(starts) and starts[0] + num_tokens <= last:
            self._features[:, starts[0] : starts[0] + num_tokens] = features
        else:
            places = self._places(starts, num_tokens).clamp(max=last)
            self._features.scatter_(1, places[..., None].expand_as(features), features)
        self.known = [length + count for length, count in zip(texts, num_accepted, strict=True)]

    def features(self, starts: Sequence[int], num_tokens: int, lengths: Sequence[int] | None) -> Float[Tensor, "B T D"]:
        """The features of so many tokens of each row, `lengths` of which are wanted (None: all), zeros behind those:
        what the target said of rejected guesses may be no number."""
        assert self._features is not None, "the target has not been called yet"
        last = self._features.shape[1] - 1
        if min(starts) == max(starts) and starts[0] + num_tokens <= last:
            found = self._features[:, starts[0] : starts[0] + num_tokens]
        else:
            places = self._places(starts, num_tokens).clamp(max=last)
            found = self._features.gather(1, places[..., None].expand(-1, -1, self._features.shape[-1]))
        if lengths is None:
            return found
        padding = self._places([0] * len(lengths), num_tokens) >= self._places(lengths, 1)
        return found.masked_fill(padding[..., None], 0)

    def _places(self, starts: Sequence[int], num_tokens: int) -> Int[Tensor, "B T"]:
        device = self.read.device
        return torch.tensor(starts, device=device)[:, None] + torch.arange(num_tokens, device=device)

    def select(self, rows: Sequence[int]) -> None:
        self.read.select(rows)
        if self._features is not None:
            source = torch.tensor(rows, device=self.read.device)
            taken = self._features[source.clamp(min=0)]
            self._features = taken.masked_fill((source < 0)[:, None, None], 0)
        self.known = [0 if row < 0 else self.known[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        self.read.clear(rows)
        if self._features is not None:  # a request that ended in NaN must not poison the next one
            self._features[list(rows)] = 0
        for row in rows:
            self.known[row] = 0

    def go_back(self, row: int, length: int) -> None:
        self.known[row] = min(self.known[row], length)
        lengths = list(self.read.consumed)
        lengths[row] = min(lengths[row], max(0, length - 1))  # the last entry joins the token behind that length
        self.read.truncate(lengths)
