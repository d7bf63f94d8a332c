"""Vocabularies of letters for the tiny models, and a draft that speaks another one than its target.

The draft's tokens are the target's in another order; some are missing, some are pairs of letters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.text.vocabulary import Vocabulary

PAIRS = (b"ab", b"ca", b"bd")
"""The draft's tokens that the target does not have."""


def letters(vocab_size: int) -> Vocabulary:
    """Token 0 is b"a", token 1 is b"b", and so on."""
    return Vocabulary(tuple(bytes([ord("a") + token]) for token in range(vocab_size)))


def other_letters(vocab_size: int) -> Vocabulary:
    """The letters from the last to the first but for every fourth, with pairs between them."""
    own = [
        piece
        for piece in letters(vocab_size).token_bytes[::-1]
        if piece is not None and piece[0] % 4
    ]
    return Vocabulary((own[0], PAIRS[0], *own[1:], *PAIRS[1:]))


class Renamed(LanguageModel):
    """A model over other tokens: each is read and scored as the token of the inner model that its first letter is.

    Pairs of letters are scored highest of all, so that a guesser that did not leave them out would say nothing else.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.tokens: Tensor
        self.model, self.vocab_size = model, len(vocabulary)
        self.vocabulary: Vocabulary = vocabulary
        pieces = [piece or b"a" for piece in vocabulary.token_bytes]
        self.register_buffer(
            "tokens", torch.tensor([piece[0] - ord("a") for piece in pieces]), persistent=False
        )
        self.register_buffer(
            "bonus", torch.tensor([30.0 * (len(piece) > 1) for piece in pieces]), persistent=False
        )

    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        return self.model.init_state(batch_size, max_length)

    def forward(
        self, tokens: Tensor, state: DecodeState | None = None, **options: Any
    ) -> ModelOutput:
        output = self.model(self.tokens[tokens], state, **options)
        return ModelOutput(output.logits[..., self.tokens] + self.bonus, output.features)

    def arguments(self) -> dict[str, Any]:
        return self.model.arguments()


def cross(model: LanguageModel, **options: Any) -> CrossVocabulary:
    """A drafter with that model for targets of as many tokens, under other names."""
    draft = Renamed(model, other_letters(model.vocab_size))
    encode = partial(encode_letters, draft.vocabulary)
    return CrossVocabulary(draft, letters(model.vocab_size), encode=encode, **options)


def encode_letters(vocabulary: Vocabulary, text: str) -> list[int]:
    """As a tokenizer would: pairs first; what it does not know is left out."""
    pieces, tokens = vocabulary.token_bytes, []
    while text:
        first = next(
            (piece for piece in (text[:2].encode(), text[:1].encode()) if piece in pieces), b""
        )
        tokens += [pieces.index(first)] if first else []
        text = text[max(1, len(first)) :]
    return tokens
