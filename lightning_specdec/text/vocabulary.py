"""What each token of a model stands for, as bytes, so that two models' tokens can be compared by their content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

ROLES = ("bos", "eos", "pad", "unk")
"""What a special token can be there for."""
_SPACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
"""SentencePiece's mark for a space, as a decoder's step."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token, and the special tokens by name.

    A token's name in a tokenizer's file is spelt in one of several ways ("\u0120the", "\u2581the", "<0xE2>"). Its bytes
    are what all of them mean: tokens of two tokenizers are the same where their bytes are, and bytes joined are the
    text. A token without bytes is special: it steers the model and is no part of the text.

    Two vocabularies are equal when every number means the same token, whatever the roles: a chat model may end its
    turns with another token than the base model whose tokens it shares.

    Args:
        token_bytes: the bytes of each token by its number; None for special tokens and for numbers without a token.
        special: the special tokens' numbers, by role ("bos", "eos", "pad", "unk") where they have one, and by text.
        byte_tokens: tokens that stand for one byte each. A run of them that is no valid text shows one U+FFFD a byte.
        num_stripped: so many spaces at the start of a text are not shown.
    """

    token_bytes: tuple[bytes | None, ...]
    special: dict[str, int] = field(default_factory=dict)
    byte_tokens: frozenset[int] = frozenset()
    num_stripped: int = 0

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a tokenizer of transformers.

        Its decoder must be ByteLevel (GPT-2, Llama 3, Qwen), or replace SentencePiece's spaces, with or without a
        fallback to bytes (Llama 2, Mistral, Gemma).

        Raises:
            ValueError: it is of another kind.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        steps = [] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))
        by_letters = [step["type"] for step in steps] == ["ByteLevel"]
        falls_back, num_stripped = False, 0
        for step in [] if by_letters else steps or [{"type": "no decoder"}]:
            match step:
                case {"type": "ByteFallback"}:
                    falls_back = True
                case {"type": "Strip", "content": " ", "start": int(num_stripped), "stop": 0}:
                    pass
                case _ if step != _SPACE and step["type"] != "Fuse":
                    raise ValueError(
                        f"the tokenizer decodes by {step['type']}, of which no token's bytes are known: use a fast "
                        "tokenizer of bytes (ByteLevel) or of SentencePiece"
                    )
        names = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder().items()
        special = {number: token.content for number, token in added if token.special}
        token_bytes: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
        byte_tokens = set()
        for name, number in names.items():
            if number in special:
                continue
            if by_letters:
                token_bytes[number] = _byte_level(name)
            elif falls_back and (found := _BYTE.fullmatch(name)):
                token_bytes[number] = bytes([int(found[1], 16)])
                byte_tokens.add(number)
            else:
                token_bytes[number] = name.replace("\u2581", " ").encode()
        by_role = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
        by_name = {text: number for number, text in special.items()}
        by_name |= {role: number for role, number in by_role.items() if number is not None}
        return cls(tuple(token_bytes), by_name, frozenset(byte_tokens), num_stripped)

    def __len__(self) -> int:
        """One more than the highest number of a token; a model's output may have more rows than that."""
        return len(self.token_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.difference(other) is None

    def __hash__(self) -> int:
        return hash(self.token_bytes)

    def join(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a text, without its special tokens; numbers without a token have none."""
        return b"".join(
            self.token_bytes[token] or b"" for token in tokens if token < len(self.token_bytes)
        )

    @property
    def special_texts(self) -> dict[int, str]:
        """The special tokens' texts by their numbers."""
        return {number: text for text, number in self.special.items() if text not in ROLES}

    def difference(self, other: Vocabulary) -> str | None:
        """One line that names the first token that is not the same in both; None where there is none."""
        own_texts, other_texts = self.special_texts, other.special_texts
        if self.token_bytes == other.token_bytes and own_texts == other_texts:
            return None
        for token, (own, others) in enumerate(zip_longest(self.token_bytes, other.token_bytes)):
            meanings = own_texts.get(token, own), other_texts.get(token, others)
            if meanings[0] != meanings[1]:
                first, second = (
                    "missing" if meaning is None else repr(meaning) for meaning in meanings
                )
                return f"token {token} is {first} in the first and {second} in the second"
        return None


def _steps(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a backend's decoder in their order, as its file describes them."""
    if spec["type"] != "Sequence":
        yield spec
    for inner in spec.get("decoders", ()):
        yield from _steps(inner)


# GPT-2 spells bytes as letters: those that show as themselves, the others by letters from 256 on, in their order.
_SHOWN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
# Hidden letters lead out of latin-1.
_LETTER_TO_BYTE = dict.fromkeys(_HIDDEN, 0xFFFF) | {
    256 + place: byte for place, byte in enumerate(_HIDDEN)
}


def _byte_level(name: str) -> bytes:
    try:
        return name.translate(_LETTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:  # no spelling of bytes: a token that was added as plain text
        return name.encode()
