"""How a tokenizer of transformers joins its tokens, read from its decoder."""

from __future__ import annotations

import re
from typing import Any

from lightning_specdec.text.stream import PLAIN, Joining
from lightning_specdec.text.vocabulary import Vocabulary, decoder_steps

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def joining_of(tokenizer: Any, vocabulary: Vocabulary, *, show_special: bool = False) -> Joining:
    """What the tokenizer's decoder does besides putting bytes side by side.

    Theory: a decoder is a chain of steps. Those that look at one token alone are in the vocabulary's bytes. The others
    look at the text's start (SentencePiece's leading space, the first of several words), at its end (the space
    of a word's end), or at runs of byte tokens.

    Args:
        tokenizer: of transformers.
        vocabulary: its tokens' bytes.
        show_special: whether special tokens show their text.

    Raises:
        ValueError: the decoder changes the joined text in a way that cannot be followed token by token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return PLAIN
    steps: list[dict[str, Any]] = [{"type": None}] if backend.decoder is None else decoder_steps(backend.decoder)
    byte_tokens: frozenset[int] = frozenset()
    num_stripped, closing, words = 0, b"", False
    for step in steps:
        match step:
            case {"type": "ByteFallback"}:
                names = backend.get_vocab(with_added_tokens=True).items()
                byte_tokens = frozenset(number for name, number in names if _BYTE_TOKEN.fullmatch(name))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                num_stripped = start
            case {"type": "BPEDecoder"}:
                closing = b" "
            case {"type": "Metaspace", "prepend_scheme": "never"}:
                pass
            case {"type": "WordPiece" | "Metaspace" | None}:
                words = True
            case {"type": "ByteLevel" | "Fuse" | "Replace"}:
                pass
            case _:
                raise ValueError(
                    f"the tokenizer's decoder changes the joined text by {step['type']}, which no stream can "
                    "follow: decode the whole text instead"
                )

    def first(token: int) -> str:
        return str(backend.decode([token], skip_special_tokens=False))

    shown: dict[int, bytes] = {}
    if show_special:
        anchor = next((i for i, piece in enumerate(vocabulary.token_bytes) if piece and piece.strip().isalpha()), None)
        lead = [] if anchor is None else [anchor]
        before = backend.decode(lead, skip_special_tokens=False)
        for token in vocabulary.special_texts:
            shown[token] = backend.decode([*lead, token], skip_special_tokens=False).removeprefix(before).encode()
    return Joining(first if words else None, num_stripped, closing, byte_tokens, shown)
