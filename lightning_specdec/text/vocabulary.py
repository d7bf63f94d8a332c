"""What each token of a model stands for, as bytes, so that two models' tokens can be compared by their content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

ROLES = ("bos", "eos", "pad", "unk")
"""What a special token can be there for."""
_SPACE = "\u2581"  # SentencePiece's mark for a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TIDIED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m"}
_TIDIED |= {" do not": " don't", " 's": "'s", " 've": "'ve", " 're": "'re"}

Step = Callable[[str], str | bytes]
"""A step of a tokenizer's decoder on one token; one that gives bytes is the token's last."""


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
    """

    token_bytes: tuple[bytes | None, ...]
    special: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a tokenizer of transformers.

        Raises:
            ValueError: its tokens are turned into text in an unknown way.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # written in Python
            names = tokenizer.get_vocab()
            special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
            if getattr(tokenizer, "byte_decoder", None):
                steps: list[Step] = [_byte_level]
            elif any(_SPACE in name for name in names):
                steps = [partial(_replace, old=_SPACE, new=" "), _byte_fallback]
            else:
                steps = [lambda name: str(tokenizer.convert_tokens_to_string([name]))]
        else:
            names, steps = backend.get_vocab(with_added_tokens=True), _steps(backend.decoder)
            added = backend.get_added_tokens_decoder().items()
            special = {number: token.content for number, token in added if token.special}
        token_bytes: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
        for name, number in names.items():
            if number not in special:
                value: str | bytes = name
                for step in steps:
                    value = step(value) if isinstance(value, str) else value
                token_bytes[number] = value if isinstance(value, bytes) else value.encode()
        by_role = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
        by_name = {text: number for number, text in special.items()}
        return cls(tuple(token_bytes), by_name | {role: n for role, n in by_role.items() if n is not None})

    def __len__(self) -> int:
        """One more than the highest number of a token; a model's output may have more rows than that."""
        return len(self.token_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.difference(other) is None

    def __hash__(self) -> int:
        return hash(self.token_bytes)

    def join(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a text, without its special tokens; numbers without a token have none."""
        return b"".join(self.token_bytes[token] or b"" for token in tokens if token < len(self.token_bytes))

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
                first, second = ("missing" if meaning is None else repr(meaning) for meaning in meanings)
                return f"token {token} is {first} in the first and {second} in the second"
        return None


def decoder_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The steps of a backend's decoder in their order, as its file describes them."""

    def flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if spec["type"] != "Sequence":
            yield spec
        for inner in spec.get("decoders", ()):
            yield from flat(inner)

    return flat(json.loads(decoder.__getstate__()))


def _steps(decoder: Any) -> list[Step]:
    """The steps of a decoder up to where it joins the tokens."""
    if decoder is None:  # the tokens are then joined by spaces
        return [lambda name: f" {name}"]
    steps: list[Step] = []
    for spec in decoder_steps(decoder):
        match spec:
            case {"type": "ByteLevel"}:
                steps.append(_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_byte_fallback)
            case {"type": "Metaspace", "replacement": old} | {"type": "Replace", "pattern": {"String": old}}:
                steps.append(partial(_replace, old=old, new=spec.get("content", " ")))
            case {"type": "WordPiece", "prefix": prefix, "cleanup": tidy}:
                steps.append(partial(_word_piece, prefix=prefix, tidy=tidy))
            case {"type": "Fuse"}:  # what follows is done to the whole text
                break
            case _:
                raise ValueError(
                    f"the tokenizer decodes by {spec.get('type')}, of which no token's bytes are known: "
                    "use a tokenizer of bytes (ByteLevel), of SentencePiece (Metaspace, ByteFallback) or of words"
                )
    return steps


def _replace(name: str, old: str, new: str) -> str:
    return name.replace(old, new)


def _word_piece(name: str, prefix: str, tidy: bool) -> str:
    text = name.removeprefix(prefix) if name.startswith(prefix) else f" {name}"
    for untidy, tidied in _TIDIED.items() if tidy else ():
        text = text.replace(untidy, tidied)
    return text


def _byte_fallback(name: str) -> str | bytes:
    found = _BYTE.fullmatch(name)
    return name if found is None else bytes([int(found[1], 16)])


# GPT-2 spells bytes as letters: those that show as themselves, the others by letters from 256 on, in their order.
_SHOWN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
# Hidden letters lead out of latin-1.
_LETTER_TO_BYTE = dict.fromkeys(_HIDDEN, 0xFFFF) | {256 + place: byte for place, byte in enumerate(_HIDDEN)}


def _byte_level(name: str) -> bytes:
    try:
        return name.translate(_LETTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:  # no spelling of bytes: a token that was added as plain text
        return name.encode()
