"""The target's lower layers as a language model over the target's own state.

Shapes: B rows, T tokens, D hidden size, V vocabulary, W tokens that a head of its own scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.models import DecodeState, ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.base import Plain, select
from lightning_specdec.models.state import Lengths

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class LowerState(DecodeState):
    """How far the lower layers have read: the target's state, with a length of its own for the lower half.

    Theory: keys and values lie in the target's buffers, below its upper half's lengths or ahead of them. What the
    lower layers made of the tokens ahead is kept until the upper layers take it over, which ends this state's use: the
    next round begins with another one, where the target is then.

    Args:
        whole: the target's state; the lower half can be ahead of it, never behind.
    """

    def __init__(self, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed), whole.device)
        self.whole, self._origin = whole, whole.consumed
        self.consumed, self.committed = list(whole.consumed), list(whole.consumed)
        self._chunks: list[Tensor] = []

    @property
    def memory_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None) -> None:
        """Keep what the lower layers made of T more tokens, and count the valid ones as consumed."""
        ahead, width = self.ahead, sum(chunk.shape[1] for chunk in self._chunks)
        if min(ahead) == width:
            self._chunks.append(hidden)
        else:
            num_tokens, size = hidden.shape[1:]
            places = torch.tensor(ahead, device=self.device)[:, None] + torch.arange(num_tokens, device=self.device)
            room = nn.functional.pad(torch.cat(self._chunks, dim=1), (0, 0, 0, num_tokens))
            self._chunks = [room.scatter_(1, places[..., None].expand(-1, -1, size), hidden)]
        self.advance(hidden.shape[1], valid_lengths)

    @property
    def ahead(self) -> list[int]:
        """By how many tokens of each row the lower half is ahead."""
        return [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]

    def exit_states(self, num_layers: int) -> ExitStates:
        """What the upper layers go on from."""
        return ExitStates(num_layers, torch.cat(self._chunks, dim=1), self.ahead)

    def _go_back(self) -> None:
        pass  # what lies behind a length is written over

    def _select(self, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> None:
        raise AssertionError("the rows are the target's: it selects them")


class ExitModel(LanguageModel):
    """The target's lower layers and an output head as a language model over a `LowerState`.

    Args:
        target: the whole model.
        num_layers: how many lower layers.
        head: turns their output to logits; the target's own final norm and head when None.
        tokens: those that the head scores; what it cannot say is -inf in the model's logits. All when None.
    """

    num_layers: int

    def __init__(
        self, target: LanguageModel, num_layers: int, head: nn.Module | None, tokens: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        target.check_exit(num_layers)
        self.target, self.num_layers, self.head, self.tokens = target, num_layers, head, tokens
        self.vocab_size, self.vocabulary = target.vocab_size, target.vocabulary
        self.max_positions = target.max_positions

    def init_state(self, batch_size: int, max_length: int) -> LowerState:
        return LowerState(self.target.init_state(batch_size, max_length))

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
        parents: Int[Tensor, "B T"] | None = None,
    ) -> ModelOutput:
        if parents is not None or features:
            raise ValueError("the lower layers read one path of tokens, and give no features")
        if state is None:
            layer = self.num_layers - 1
            hidden = self.target(tokens, features=(layer,), logits_for=slice(0, 0)).features[layer]
        else:
            assert isinstance(state, LowerState)
            hidden = self.target.lower(tokens, state.whole, state.consumed, self.num_layers)
            state.append(hidden, valid_lengths)
        return ModelOutput(self.logits(select(hidden, logits_for)), logits_for=logits_for)

    def logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """What the head makes of the lower layers' output."""
        if self.head is None:
            return self.target.exit_logits(hidden)
        scores: Tensor = self.head(hidden)
        return scores if self.tokens is None else self.tokens.to_target(scores)

    def arguments(self) -> dict[str, Plain]:
        raise ValueError("the lower layers belong to their target: save that")
