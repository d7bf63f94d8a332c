"""Vocabularies of letters for the tiny models, and a draft with another vocabulary than its target.

The draft's tokens are the target's in another order. Some are missing, some are pairs of letters.
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
"""Tokens of the draft that the target does not have."""


def letters(vocab_size: int) -> Vocabulary:
    """Token 0 is b"a", token 1 is b"b", and so on."""
    return Vocabulary(tuple(bytes([ord("a") + token]) for token in range(vocab_size)))


def other_letters(vocab_size: int) -> Vocabulary:
    """The letters in reverse order without every fourth one, with pairs between them."""
    pieces = []
    for piece in reversed(letters(vocab_size).token_bytes):
        if piece is not None and piece[0] % 4 != 0:
            pieces.append(piece)
    return Vocabulary((pieces[0], PAIRS[0], *pieces[1:], *PAIRS[1:]))


class Renamed(LanguageModel):
    """A model with other tokens, each of which is the inner model's token of its first letter.

    Pairs of letters have the highest scores, so that a drafter that did not exclude them would
    propose only pairs.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.tokens: Tensor
        self.model = model
        self.vocab_size = len(vocabulary)
        self.vocabulary: Vocabulary = vocabulary
        pieces = [piece or b"a" for piece in vocabulary.token_bytes]
        inner_tokens = [piece[0] - ord("a") for piece in pieces]
        bonuses = [30.0 if len(piece) > 1 else 0.0 for piece in pieces]
        self.register_buffer("tokens", torch.tensor(inner_tokens), persistent=False)
        self.register_buffer("bonus", torch.tensor(bonuses), persistent=False)

    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        return self.model.init_state(batch_size, max_length)

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        output = self.model(self.tokens[tokens], state, **options)
        return ModelOutput(output.logits[..., self.tokens] + self.bonus, output.features)

    def arguments(self) -> dict[str, Any]:
        return self.model.arguments()


def cross(model: LanguageModel, **options: Any) -> CrossVocabulary:
    """A drafter with that model under other tokens, for targets with the same number of tokens."""
    draft = Renamed(model, other_letters(model.vocab_size))
    encode = partial(encode_letters, draft.vocabulary)
    return CrossVocabulary(draft, letters(model.vocab_size), encode=encode, **options)


def encode_letters(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode as a tokenizer would: pairs first. Unknown letters are left out."""
    pieces = vocabulary.token_bytes
    tokens = []
    position = 0
    while position < len(text):
        pair = text[position : position + 2].encode()
        letter = text[position].encode()
        if pair in pieces and len(pair) == 2:
            tokens.append(pieces.index(pair))
            position += 2
            continue
        if letter in pieces:
            tokens.append(pieces.index(letter))
        position += 1
    return tokens
