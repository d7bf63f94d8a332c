"""Tokens become text while they arrive, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lightning_specdec.text.vocabulary import Vocabulary

_NOT_A_CHARACTER = "\ufffd".encode()


class TextStream:
    """One text that grows by tokens.

    Bytes are held back until they can no longer change. All pieces together are exactly what decoding all tokens at
    once gives, and each piece costs as much as its own tokens.

    Args:
        vocabulary: the tokens' bytes, and how they are joined.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # the byte tokens since the last other token
        self._ready = bytearray()  # what came before them and is not shown yet
        self._num_to_strip = vocabulary.num_stripped

    def push(self, tokens: Sequence[int], *, hold: int = 0) -> str:
        """The text that these tokens settle.

        Args:
            tokens: what follows those pushed before; numbers without a token show nothing.
            hold: so many bytes at the end are not shown yet, as they may be the beginning of a stop string.
        """
        for token in tokens:
            piece = self._vocabulary.join([token])
            if token in self._vocabulary.byte_tokens:
                self._run += piece
            elif piece:
                self._end_run()
                self._ready += piece
        return self._show(len(self._ready) - max(hold - len(self._run), 0))

    def finish(self, *, drop: int = 0) -> str:
        """The rest of the text, without its last `drop` bytes; nothing is pushed after it."""
        self._end_run()
        return self._show(len(self._ready) - drop, final=True)

    def _end_run(self) -> None:
        """Settle what the byte tokens stand for."""
        if self._run:
            try:
                self._run.decode()
                self._ready += self._run
            except UnicodeDecodeError:
                self._ready += _NOT_A_CHARACTER * len(self._run)
            self._run.clear()

    def _show(self, num_bytes: int, *, final: bool = False) -> str:
        num_bytes = max(num_bytes, 0)
        text = self._decoder.decode(bytes(self._ready[:num_bytes]), final)
        del self._ready[:num_bytes]
        while self._num_to_strip and text.startswith(" "):
            self._num_to_strip, text = self._num_to_strip - 1, text[1:]
        if text:
            self._num_to_strip = 0
        return text
