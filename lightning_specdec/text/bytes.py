"""Text as its UTF-8 bytes, one token each: a tokenizer that needs no file and no training."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_specdec.text.base import Tokenizer
from lightning_specdec.text.stream import TextStream
from lightning_specdec.text.vocabulary import Vocabulary

NAME = "bytes"
NUM_TOKENS = 256
_VOCABULARY = Vocabulary(tuple(bytes([byte]) for byte in range(NUM_TOKENS)))


class ByteTokenizer(Tokenizer):
    """Each byte of a text is a token.

    Theory: 256 tokens spell every text there is, so small models lose no weights to a large vocabulary and no text is
    unknown. The price is length: some four tokens where a tokenizer of pieces has one. Nothing is special, so nothing
    ends an answer.
    """

    name = NAME

    @property
    def vocabulary(self) -> Vocabulary:
        return _VOCABULARY

    @property
    def fingerprint(self) -> str:
        return NAME

    def encode(self, text: str) -> list[int]:
        """The bytes of a text; a lone surrogate, which has none, is written as "?"."""
        return list(text.encode("utf-8", "replace"))

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        return _VOCABULARY.join(tokens).decode("utf-8", "replace")

    def stream(self, *, show_special: bool = False) -> TextStream:
        return TextStream(_VOCABULARY)
