"""Tokens become text while they arrive, never with half a character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.text.vocabulary import Vocabulary, decoder_steps

_NOT_A_CHARACTER = "\ufffd".encode()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Joining:
    """What a tokenizer's decoder does besides putting the tokens' bytes side by side.

    Args:
        first: the text of a token that begins the text, where that differs from its text later on.
        num_stripped: so many spaces at the start of the text are not shown.
        byte_tokens: tokens that stand for one byte each. A run of them that is no valid text shows one U+FFFD a byte.
    """

    first: Callable[[int], str] | None = None
    num_stripped: int = 0
    byte_tokens: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> Joining:
        """Read from the decoder of a tokenizer of transformers, a chain of steps.

        Steps that look at one token alone are in the vocabulary's bytes. The others look at the text's start
        (SentencePiece's leading space, the first of several words), or at runs of byte tokens.

        Raises:
            ValueError: the decoder changes the joined text in a way that cannot be followed token by token.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return cls()
        byte_tokens: frozenset[int] = frozenset()
        num_stripped, words = 0, backend.decoder is None
        for step in [] if words else decoder_steps(backend.decoder):
            match step:
                case {"type": "ByteFallback"}:
                    names = backend.get_vocab(with_added_tokens=True).items()
                    byte_tokens = frozenset(number for name, number in names if _BYTE_TOKEN.fullmatch(name))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    num_stripped = start
                case {"type": "ByteLevel" | "Fuse" | "Replace"} | {"type": "Metaspace", "prepend_scheme": "never"}:
                    pass
                case {"type": "WordPiece" | "Metaspace"}:
                    words = True
                case _:
                    raise ValueError(
                        f"the tokenizer's decoder changes the joined text by {step['type']}, which no stream can "
                        "follow: decode the whole text instead"
                    )

        def first(token: int) -> str:
            return str(backend.decode([token], skip_special_tokens=False))

        return cls(first if words else None, num_stripped, byte_tokens)


class TextStream:
    """One text that grows by tokens.

    Bytes are held back until they can no longer change. All pieces together are exactly what decoding all tokens at
    once gives, and each piece costs as much as its own tokens.

    Args:
        vocabulary: the tokens' bytes.
        joining: how they are joined; bytes side by side, special tokens skipped, when None.
    """

    def __init__(self, vocabulary: Vocabulary, joining: Joining | None = None) -> None:
        self._token_bytes, self._joining = vocabulary.token_bytes, joining or Joining()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._run = bytearray()  # the byte tokens since the last other token
        self._ready = bytearray()  # what came before them and is not shown yet
        self._num_to_strip = self._joining.num_stripped

    def push(self, tokens: Sequence[int], *, hold: int = 0) -> str:
        """The text that these tokens settle.

        Args:
            tokens: what follows those pushed before; numbers without a token show nothing.
            hold: so many bytes at the end are not shown yet, as they may be the beginning of a stop string.
        """
        for token in tokens:
            piece = self._token_bytes[token] if token < len(self._token_bytes) else None
            if piece is None:
                continue
            if token in self._joining.byte_tokens:
                self._run += piece
            else:
                if not self._begun and self._joining.first is not None:
                    piece = self._joining.first(token).encode()
                self._end_run()
                self._ready += piece
            self._begun = True
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
