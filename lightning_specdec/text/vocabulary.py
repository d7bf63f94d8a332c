"""What each token of a model stands for, as bytes, so that two models' tokens can be compared by their content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

ROLES = ("bos", "eos", "pad", "unk")
"""What a special token can be there for."""

_SPACE = "\u2581"  # SentencePiece's mark for a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token, and the special tokens by name.

    Theory: a token's name in a tokenizer's file is spelt in one of several ways ("\u0120the", "\u2581the", "<0xE2>"),
    and one token may hold a part of a character only. Bytes are what all of them mean, so tokens of two
    tokenizers are the same where their bytes are, and bytes joined are the text. What has no bytes is special: it
    steers the model and is no part of the text.

    Two vocabularies are equal when every number means the same token. Roles are no part of that: a chat
    model may end its turns with another token than the base model whose tokens it shares.

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
            ValueError: its tokens are turned into text in a way that is not known here.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            names, to_bytes, special = _plain_tokenizer(tokenizer)
        else:
            names, to_bytes = backend.get_vocab(with_added_tokens=True), _decoder(backend.decoder)
            added = backend.get_added_tokens_decoder().items()
            special = {number: token.content for number, token in added if token.special}
        token_bytes: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
        for name, number in names.items():
            if number not in special:
                token_bytes[number] = to_bytes(name)
        by_name = {text: number for number, text in special.items()}
        by_role = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
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
        pieces = (self.token_bytes[token] for token in tokens if token < len(self.token_bytes))
        return b"".join(piece for piece in pieces if piece is not None)

    @property
    def special_texts(self) -> dict[int, str]:
        """The special tokens' texts by their numbers."""
        return {number: text for text, number in self.special.items() if text not in ROLES}

    def difference(self, other: Vocabulary) -> str | None:
        """One line that names the first token that is not the same in both; None where there is none."""
        own_texts, other_texts = self.special_texts, other.special_texts
        if self.token_bytes == other.token_bytes and own_texts == other_texts:
            return None
        pairs = zip_longest(self.token_bytes, other.token_bytes)
        for token, (own, others) in enumerate(pairs):
            meanings = own_texts.get(token, own), other_texts.get(token, others)
            if type(meanings[0]) is not type(meanings[1]) or meanings[0] != meanings[1]:
                first, second = ("missing" if meaning is None else repr(meaning) for meaning in meanings)
                return f"token {token} is {first} in the first and {second} in the second"
        return None


ToBytes = Callable[[str], bytes]


def _plain_tokenizer(tokenizer: Any) -> tuple[Mapping[str, int], ToBytes, dict[int, str]]:
    """Names, their bytes and the special tokens of a tokenizer that is written in Python."""
    names = tokenizer.get_vocab()
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    if getattr(tokenizer, "byte_decoder", None):
        return names, _byte_level, special
    if any(_SPACE in name for name in names):
        return names, lambda name: _byte_fallback(name.replace(_SPACE, " ")), special
    return names, lambda name: str(tokenizer.convert_tokens_to_string([name])).encode(), special


def _decoder(decoder: Any) -> ToBytes:
    """How a backend's decoder turns one token into bytes.

    Theory: a decoder is a chain of steps over a list of tokens. All that is known do their work token by
    token, but for the start of a text, where a leading space may go.
    """
    if decoder is None:  # the tokens are then joined by spaces
        return lambda name: f" {name}".encode()
    steps = _steps(decoder_steps(decoder))

    def to_bytes(name: str) -> bytes:
        value: str | bytes = name
        for step in steps:
            if isinstance(value, str):
                value = step(value)
        return value if isinstance(value, bytes) else value.encode()

    return to_bytes


def decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """What a backend's decoder does, as its file describes it, step by step."""
    return list(_flat(json.loads(decoder.__getstate__())))


def _flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's steps in their order, sequences of sequences laid out."""
    if spec["type"] == "Sequence":
        for inner in spec["decoders"]:
            yield from _flat(inner)
    else:
        yield spec


def _steps(specs: Iterable[dict[str, Any]]) -> list[Callable[[str], str | bytes]]:
    """A decoder's steps up to where it joins the tokens; a step that gives bytes is a token's last."""
    steps: list[Callable[[str], str | bytes]] = []
    for spec in specs:
        match spec:
            case {"type": "ByteLevel"}:
                steps.append(_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_byte_fallback_step)
            case {"type": "Metaspace", "replacement": mark} | {"type": "Replace", "pattern": {"String": mark}}:
                steps.append(_replacing(mark, spec.get("content", " ")))
            case {"type": "BPEDecoder", "suffix": suffix}:
                steps.append(_replacing(suffix, " "))
            case {"type": "WordPiece", "prefix": prefix, "cleanup": tidy}:
                steps.append(_word_piece(prefix, tidy=tidy))
            case {"type": "Fuse"}:  # what follows is done to the whole text
                break
            case _:
                raise ValueError(
                    f"the tokenizer decodes by {spec.get('type')}, of which no token's bytes are known: "
                    "use a tokenizer of bytes (ByteLevel), of SentencePiece (Metaspace, ByteFallback) or of words"
                )
    return steps


def _replacing(old: str, new: str) -> Callable[[str], str]:
    return lambda name: name.replace(old, new)


_TIDIED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m"}
_TIDIED |= {" do not": " don't", " 's": "'s", " 've": "'ve", " 're": "'re"}


def _word_piece(prefix: str, *, tidy: bool) -> Callable[[str], str]:
    def step(name: str) -> str:
        text = name.removeprefix(prefix) if name.startswith(prefix) else f" {name}"
        for untidy, tidied in _TIDIED.items() if tidy else ():
            text = text.replace(untidy, tidied)
        return text

    return step


def _byte_fallback_step(name: str) -> str | bytes:
    found = _BYTE.fullmatch(name)
    return name if found is None else bytes([int(found[1], 16)])


def _byte_fallback(name: str) -> bytes:
    value = _byte_fallback_step(name)
    return value if isinstance(value, bytes) else value.encode()


def _byte_level_table() -> dict[int, int]:
    """GPT-2's spelling of bytes as letters, from letters back to bytes; other letters below 256 lead out of latin-1."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: byte if byte in shown else 0xFFFF for byte in range(256)}
    return table | {256 + place: byte for place, byte in enumerate(hidden)}


_LETTER_TO_BYTE = _byte_level_table()


def _byte_level(name: str) -> bytes:
    try:
        return name.translate(_LETTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:  # no spelling of bytes: a token that was added as plain text
        return name.encode()
