"""Tokens become text while they arrive, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_specdec.text.vocabulary import Vocabulary

_NOT_A_CHARACTER = "\ufffd".encode()


@dataclass(frozen=True)
class Joining:
    """What a tokenizer's decoder does besides putting the tokens' bytes side by side.

    Args:
        first: what a token shows that begins the text, where that is not what it shows later on.
        num_stripped: so many spaces at the start of the text are not shown.
        closing: not shown where the text ends with it.
        byte_tokens: tokens that stand for one byte each. A run of them that is no valid text shows one U+FFFD a byte.
        special: what special tokens show; those that are missing here show nothing.
    """

    first: Callable[[int], str] | None = None
    num_stripped: int = 0
    closing: bytes = b""
    byte_tokens: frozenset[int] = frozenset()
    special: Mapping[int, bytes] = field(default_factory=dict)


PLAIN = Joining()
"""Bytes side by side, special tokens skipped: how byte-level tokenizers join."""


class TextStream:
    """One text that grows by tokens.

    Theory: a character may be spread over tokens, and what a byte means may depend on those behind it. So bytes are
    held back until they can no longer change: the start of a character until it is complete or broken, a run of byte
    tokens until it ends. All pieces together are then exactly what decoding all tokens at once gives, and each
    piece costs as much as its own tokens.

    Args:
        vocabulary: the tokens' bytes.
        joining: how they are joined: see `TextTokenizer.stream`.
    """

    def __init__(self, vocabulary: Vocabulary, joining: Joining = PLAIN) -> None:
        self._token_bytes, self._joining = vocabulary.token_bytes, joining
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._run = bytearray()  # the byte tokens since the last other token
        self._ready = bytearray()  # what came before them and is not shown yet
        self._num_to_strip = joining.num_stripped

    def push(self, tokens: Sequence[int], *, hold: int = 0) -> str:
        """The text that these tokens settle.

        Args:
            tokens: what follows those pushed before; numbers without a token show nothing.
            hold: so many bytes at the end are not shown yet, as they may be the beginning of a stop string.
        """
        for token in tokens:
            if token in self._joining.byte_tokens:
                self._begun = True
                self._run += self._token_bytes[token] or b""
            elif (piece := self._piece(token)) is not None:
                self._end_run()
                self._begun = True
                self._ready += piece
        held = max(hold - len(self._run), 0)
        if not self._run and self._ends_with_closing():
            held = max(held, len(self._joining.closing))
        return self._show(max(len(self._ready) - held, 0))

    def finish(self, *, drop: int = 0) -> str:
        """The rest of the text, without its last `drop` bytes; nothing is pushed after it."""
        self._end_run()
        if drop == 0 and self._ends_with_closing():
            drop = len(self._joining.closing)
        return self._show(max(len(self._ready) - drop, 0), final=True)

    def _piece(self, token: int) -> bytes | None:
        """What a token adds to the text; None when it is skipped."""
        piece = self._token_bytes[token] if token < len(self._token_bytes) else None
        if piece is None:
            piece = self._joining.special.get(token)
        if piece is None or self._begun or self._joining.first is None:
            return piece
        return self._joining.first(token).encode()

    def _end_run(self) -> None:
        """Settle what the byte tokens stand for."""
        if self._run:
            try:
                self._run.decode()
                self._ready += self._run
            except UnicodeDecodeError:
                self._ready += _NOT_A_CHARACTER * len(self._run)
            self._run.clear()

    def _ends_with_closing(self) -> bool:
        return bool(self._joining.closing) and self._ready.endswith(self._joining.closing)

    def _show(self, num_bytes: int, *, final: bool = False) -> str:
        text = self._decoder.decode(bytes(self._ready[:num_bytes]), final)
        del self._ready[:num_bytes]
        while self._num_to_strip and text.startswith(" "):
            self._num_to_strip, text = self._num_to_strip - 1, text[1:]
        if text:
            self._num_to_strip = 0
        return text
