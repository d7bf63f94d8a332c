"""The bytes that each token of a model stands for, so that tokens can be compared by content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

ROLES = ("bos", "eos", "pad", "unk")
"""Roles that a special token can have."""

SPACE_MARK = "\u2581"
"""SentencePiece's spelling of a space in token names."""

DecoderStep = Mapping[str, Any]
"""One step of a tokenizer's decoder, as tokenizer.json describes it."""

REPLACE_SPACE_MARK = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
WORD_DECODERS = frozenset({"Metaspace", "WordPiece", "BPEDecoder", "Fuse"})
"""Decoders that map each token to text separately, apart from the first and the last token."""

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token, and the special tokens by name.

    Tokenizer files spell tokens in several ways ("\u0120the", "\u2581the", "<0xE2>"). The bytes are
    what all spellings mean: tokens of two tokenizers are the same if their bytes are, and joined
    bytes are the text. A token without bytes is special: it steers the model and is no part of the
    text.

    Two vocabularies are equal if every token id means the same token, whatever the roles: a chat
    model may end its turns with another token than the base model whose tokens it shares.

    Args:
        token_bytes: bytes of each token by its id; None for special tokens and for unused ids.
        special: ids of the special tokens, by role ("bos", "eos", "pad", "unk") if they have one,
            and by text.
        byte_tokens: tokens that stand for one byte each. A run of them that is not valid UTF-8 is
            shown as one U+FFFD for each byte.
        num_stripped: number of leading spaces that are removed from a text.
        first_token_bytes: bytes of tokens that are different at the start of a text.
        num_stripped_at_end: number of trailing spaces that are removed from a text.
    """

    token_bytes: tuple[bytes | None, ...]
    special: dict[str, int] = field(default_factory=dict)
    byte_tokens: frozenset[int] = frozenset()
    num_stripped: int = 0
    first_token_bytes: Mapping[int, bytes] = field(default_factory=dict)
    num_stripped_at_end: int = 0

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a transformers tokenizer.

        Supported decoders: ByteLevel (GPT-2, Llama 3, Qwen); steps that replace SentencePiece's
        spaces, with or without byte fallback (Llama 2, Mistral, Gemma); and Metaspace, WordPiece
        and BPEDecoder.

        Raises:
            ValueError: the tokenizer has another kind of decoder.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            raise ValueError(_unknown_decoder("no decoder"))
        steps = _decoder_steps(json.loads(decoder.__getstate__()))
        step_types = [step["type"] for step in steps]

        special_texts: dict[int, str] = {}
        for token, added in backend.get_added_tokens_decoder().items():
            if added.special:
                special_texts[token] = added.content

        ids_by_name: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        names = {token: name for name, token in ids_by_name.items() if token not in special_texts}
        if step_types == ["ByteLevel"]:
            table = _byte_level_table(names)
        elif WORD_DECODERS.issuperset(step_types):
            table = _word_table(names, decoder.decode)
        else:
            table = _sentencepiece_table(names, steps)

        num_ids = max(ids_by_name.values(), default=-1) + 1
        token_bytes = tuple(table.token_bytes.get(token) for token in range(num_ids))
        return cls(
            token_bytes=token_bytes,
            special=_special_ids(tokenizer, special_texts),
            byte_tokens=table.byte_tokens,
            num_stripped=table.num_stripped,
            first_token_bytes=table.first_token_bytes,
            num_stripped_at_end=table.num_stripped_at_end,
        )

    def __len__(self) -> int:
        """One more than the highest token id. A model's output may have more rows."""
        return len(self.token_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.difference(other) is None

    def __hash__(self) -> int:
        return hash(self.token_bytes)

    def join(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a text without its special tokens.

        Ids outside the vocabulary add nothing.
        """
        num_ids = len(self.token_bytes)
        pieces = [self.token_bytes[token] for token in tokens if token < num_ids]
        return b"".join(piece for piece in pieces if piece is not None)

    @property
    def special_texts(self) -> dict[int, str]:
        """The texts of the special tokens by their ids."""
        return {token: text for text, token in self.special.items() if text not in ROLES}

    def difference(self, other: Vocabulary) -> str | None:
        """One line that names the first token that differs; None if there is none."""
        if self.token_bytes == other.token_bytes and self.special_texts == other.special_texts:
            return None

        meanings = zip_longest(self._meanings(), other._meanings())
        for token, (meaning, other_meaning) in enumerate(meanings):
            if meaning != other_meaning:
                return (
                    f"token {token} is {_describe(meaning)} in the first "
                    f"and {_describe(other_meaning)} in the second"
                )
        return None

    def _meanings(self) -> list[bytes | str | None]:
        """What each token means: bytes of text, or the text of a special token."""
        special_texts = self.special_texts
        return [special_texts.get(token, piece) for token, piece in enumerate(self.token_bytes)]


@dataclass(frozen=True)
class _TokenTable:
    """What a decoder makes of the tokens of text. See `Vocabulary` for the fields."""

    token_bytes: dict[int, bytes]
    byte_tokens: frozenset[int] = frozenset()
    num_stripped: int = 0
    first_token_bytes: dict[int, bytes] = field(default_factory=dict)
    num_stripped_at_end: int = 0


def _decoder_steps(description: DecoderStep) -> list[DecoderStep]:
    """The steps of a decoder in their order, nested sequences flattened."""
    if description["type"] != "Sequence":
        return [description]
    steps = []
    for inner in description["decoders"]:
        steps.extend(_decoder_steps(inner))
    return steps


def _special_ids(tokenizer: Any, special_texts: Mapping[int, str]) -> dict[str, int]:
    """Ids of the special tokens by their text and by their role."""
    ids = {text: token for token, text in special_texts.items()}
    for role in ROLES:
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is not None:
            ids[role] = token
    return ids


def _byte_level_table(names: Mapping[int, str]) -> _TokenTable:
    return _TokenTable({token: _byte_level_bytes(name) for token, name in names.items()})


def _sentencepiece_table(names: Mapping[int, str], steps: Sequence[DecoderStep]) -> _TokenTable:
    """The bytes of SentencePiece's tokens.

    Raises:
        ValueError: a step of the decoder is of another kind.
    """
    has_byte_fallback = False
    num_stripped = 0
    for step in steps:
        if step["type"] == "ByteFallback":
            has_byte_fallback = True
        elif step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0:
            num_stripped = step["start"]
        elif step != REPLACE_SPACE_MARK and step["type"] != "Fuse":
            raise ValueError(_unknown_decoder(step["type"]))

    token_bytes = {}
    byte_tokens = set()
    for token, name in names.items():
        byte_name = BYTE_NAME.fullmatch(name)
        if has_byte_fallback and byte_name is not None:
            token_bytes[token] = bytes.fromhex(byte_name[1])
            byte_tokens.add(token)
        else:
            token_bytes[token] = name.replace(SPACE_MARK, " ").encode()
    return _TokenTable(token_bytes, frozenset(byte_tokens), num_stripped)


def _unknown_decoder(name: str) -> str:
    return (
        f"the tokenizer decodes by {name}, for which the bytes of a token are unknown: use a fast "
        "tokenizer of bytes (ByteLevel) or of SentencePiece"
    )


def _word_table(names: Mapping[int, str], decode: Callable[[list[str]], str]) -> _TokenTable:
    """Ask the decoder for the text of each token: between two other ones, first and last.

    WordPiece puts a space before a word and BPEDecoder one after it, except at the start or end of
    a text.
    """
    # What the first and the last of two tokens "a" contribute to their text.
    before = "a"
    after = decode(["a", "a"]).removeprefix(before)

    token_bytes = {}
    first_token_bytes = {}
    num_stripped_at_end = 0
    for token, name in names.items():
        inner_text = decode(["a", name, "a"]).removeprefix(before).removesuffix(after)
        first_text = decode([name, "a"]).removesuffix(after)
        last_text = decode(["a", name]).removeprefix(before)

        token_bytes[token] = inner_text.encode()
        if first_text != inner_text:
            first_token_bytes[token] = first_text.encode()
        if inner_text == f"{last_text} ":
            num_stripped_at_end = 1
    return _TokenTable(
        token_bytes, first_token_bytes=first_token_bytes, num_stripped_at_end=num_stripped_at_end
    )


def _describe(meaning: bytes | str | None) -> str:
    return "missing" if meaning is None else repr(meaning)


def _byte_level_letters() -> dict[int, int]:
    """A translation table from GPT-2's letters to bytes.

    GPT-2 spells bytes as letters: printable bytes as themselves, the others as the letters from 256
    on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden_bytes = [byte for byte in range(256) if byte not in printable]
    # A letter that stands for no byte is mapped outside latin-1, so that encoding it fails.
    letters = dict.fromkeys(hidden_bytes, 0xFFFF)
    for index, byte in enumerate(hidden_bytes):
        letters[256 + index] = byte
    return letters


LETTER_TO_BYTE = _byte_level_letters()


def _byte_level_bytes(name: str) -> bytes:
    try:
        return name.translate(LETTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        # The name spells no bytes: the token was added as plain text.
        return name.encode()
