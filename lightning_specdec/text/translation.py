"""A text of one vocabulary in the tokens of another: shared tokens, and other tokens by bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_specdec.text.vocabulary import Vocabulary

MAX_WAITING_BYTES = 24
"""Upper limit of the bytes that wait for the end of a character.

Longer than any token that cuts one.
"""


class Translation:
    """The map from a source vocabulary to a goal vocabulary, by the bytes of tokens.

    Special tokens are mapped by their text, or else by their role.

    Args:
        first: the source vocabulary.
        second: the goal vocabulary.
        encode: encodes plain text with the goal's tokenizer, without special tokens. If None, each
            text is encoded from left to right by the longest tokens that fit.
        start: a token that every text of the goal begins with.

    Attributes:
        pairs: the goal's token for each source token that may be drafted, one to one. Of several
            tokens with the same bytes the last one is used: in SentencePiece's vocabularies single
            bytes come before words.
        whole: the goal's token for each source token that is read unchanged: shared ones that
            contain whole characters.
        special: the special tokens of `pairs`.
        filler: replaces a text that has no token of the goal.
    """

    def __init__(
        self,
        first: Vocabulary,
        second: Vocabulary,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        start: int | None = None,
    ) -> None:
        self.first = first
        self.second = second
        self.start = start
        self._encode = encode
        self._by_bytes = {piece: token for token, piece in enumerate(second.token_bytes) if piece}
        self._longest_piece = max((len(piece) for piece in self._by_bytes), default=0)
        self.special = _pair_special_tokens(first, second)

        self.whole: dict[int, int] = {}
        last_token_of: dict[bytes, int] = {}
        for token, piece in enumerate(first.token_bytes):
            if not piece or piece not in self._by_bytes:
                continue
            last_token_of[piece] = token
            if _is_whole_text(piece):
                self.whole[token] = self._by_bytes[piece]

        self.pairs = {token: self._by_bytes[piece] for piece, token in last_token_of.items()}
        self.pairs.update(self.special)

        self.filler = second.special.get("bos", second.special.get("eos", 0))

    def __deepcopy__(self, memo: object) -> Translation:
        """The texts of all rows share one translation."""
        return self

    @property
    def share(self) -> float:
        """Number of shared tokens / tokens of the smaller vocabulary."""
        return len(self.pairs) / max(1, min(len(self.first), len(self.second)))

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens as the goal's own tokenizer reads a text, which may change spaces and capitals."""
        tokens: list[int] = []
        if self._encode is not None:
            tokens = [token for token in self._encode(text) if token < len(self.second)]
        return tokens or self.spell(text.encode())

    def encode_piece(self, text: str) -> list[int]:
        """Tokens of exactly these bytes: the tokenizer's, or else the longest that fit."""
        # SentencePiece puts a space before every text, which may be the space that the text begins
        # with.
        for candidate in (text, text.removeprefix(" ")):
            tokens = self.encode_prompt(candidate)
            if self.second.join(tokens) == text.encode():
                return tokens
        return self.spell(text.encode())

    def spell(self, data: bytes) -> list[int]:
        """From left to right the longest tokens that fit.

        Bytes that the goal does not have are left out.
        """
        tokens = []
        position = 0
        while position < len(data):
            length = self._longest_match(data, position)
            if length > 0:
                tokens.append(self._by_bytes[data[position : position + length]])
            position += max(length, 1)
        return tokens

    def _longest_match(self, data: bytes, position: int) -> int:
        """Length of the longest token at a position; 0 if there is none."""
        for length in range(min(self._longest_piece, len(data) - position), 0, -1):
            if data[position : position + length] in self._by_bytes:
                return length
        return 0


class _Step(NamedTuple):
    """The translated text after the prompt, or after a token that followed it."""

    num_tokens: int
    waiting_bytes: bytes


class TranslatedText:
    """A text that grows in the source vocabulary, and its tokens in the goal vocabulary.

    The prompt is encoded as a whole, as language models expect. What is generated afterwards
    arrives a few tokens at a time and consists mostly of the model's own draft tokens, so it is
    read token by token, which never changes earlier tokens. A token that the goal does not have is
    encoded by its bytes. A token that cuts a character waits for the other part. The tokens depend
    on the text and on the end of its prompt only, not on what was read and rolled back.

    Attributes:
        tokens: tokens of the goal that will not change.
        num_covered: number of source tokens that have been read.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.tokens: list[int] = []
        self.num_covered = 0
        self._waiting_bytes = b""
        # The state at the prompt's end and after each token that followed, to roll back to.
        self._steps: list[_Step] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more of the text.

        The first call reads the prompt, and so does the first after `begin_prompt`.
        """
        if self._steps:
            for token in tokens:
                self._read_generated(token)
                self._steps.append(_Step(len(self.tokens), self._waiting_bytes))
        else:
            self._read_prompt(tokens)
            self._steps.append(_Step(len(self.tokens), self._waiting_bytes))
        self.num_covered += len(tokens)

    def truncate(self, num_covered: int) -> None:
        """Roll back to the first `num_covered` source tokens.

        A prompt is encoded as a whole. To roll back into it is to start again, and another prompt
        follows.
        """
        num_removed = self.num_covered - num_covered
        if num_removed >= len(self._steps):
            self.begin_prompt()
        elif num_removed > 0:
            del self._steps[-num_removed:]
            step = self._steps[-1]
            del self.tokens[step.num_tokens :]
            self._waiting_bytes = step.waiting_bytes
            self.num_covered = num_covered

    def begin_prompt(self) -> None:
        """Start again. Another prompt follows."""
        self.num_covered = 0
        self._waiting_bytes = b""
        self.tokens.clear()
        self._steps.clear()

    def waiting(self) -> list[int]:
        """Tokens for the bytes of a character that is not complete yet."""
        return self.translation.spell(self._waiting_bytes)

    def _read_prompt(self, tokens: Sequence[int]) -> None:
        translation = self.translation
        start = translation.start
        if start is not None and translation.special.get(tokens[0]) != start:
            self.tokens.append(start)

        for token in tokens:
            piece = self._piece(token)
            if piece is not None:
                self._waiting_bytes += piece
                continue
            self._encode_prompt_bytes(is_complete=True)
            if token in translation.special:
                self.tokens.append(translation.special[token])

        self._encode_prompt_bytes(is_complete=False)
        if not self.tokens:
            self.tokens.append(translation.filler)

    def _read_generated(self, token: int) -> None:
        translation = self.translation
        piece = self._piece(token)
        if piece is None:
            self._encode_generated_bytes(is_complete=True)
            if token in translation.special:
                self.tokens.append(translation.special[token])
        elif token in translation.whole and not self._waiting_bytes:
            self.tokens.append(translation.whole[token])
        else:
            self._waiting_bytes += piece
            self._encode_generated_bytes(is_complete=False)

    def _piece(self, token: int) -> bytes | None:
        """The bytes of a source token; None for special tokens and unknown ids."""
        token_bytes = self.translation.first.token_bytes
        return token_bytes[token] if token < len(token_bytes) else None

    def _encode_prompt_bytes(self, *, is_complete: bool) -> None:
        """Encode the waiting bytes of a prompt, invalid ones as U+FFFD.

        Args:
            is_complete: whether nothing follows that could complete the last character. Otherwise
                it keeps waiting.
        """
        data = self._waiting_bytes
        text, num_read = codecs.utf_8_decode(data, "replace", is_complete)
        if text:
            self.tokens += self.translation.encode_prompt(text)
        self._waiting_bytes = data[num_read:]

    def _encode_generated_bytes(self, *, is_complete: bool) -> None:
        """Encode the waiting bytes after a prompt, exactly.

        Args:
            is_complete: whether nothing follows that could complete the last character. Otherwise
                all bytes keep waiting, up to a limit.
        """
        data = self._waiting_bytes
        try:
            text, num_read = codecs.utf_8_decode(data, "strict", is_complete)
        except UnicodeDecodeError:
            # These bytes will never be text.
            self.tokens += self.translation.spell(data)
            self._waiting_bytes = b""
            return

        if num_read < len(data) <= MAX_WAITING_BYTES:
            return
        if text:
            self.tokens += self.translation.encode_piece(text)
        self._waiting_bytes = data[num_read:]


def _is_whole_text(piece: bytes) -> bool:
    """Whether bytes are valid UTF-8, so that they cut no character."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pair_special_tokens(first: Vocabulary, second: Vocabulary) -> dict[int, int]:
    """Special tokens of the same text, then the remaining ones of the same role, one to one."""
    second_by_text = {text: token for token, text in second.special_texts.items()}
    pairs = {
        token: second_by_text[text]
        for token, text in first.special_texts.items()
        if text in second_by_text
    }
    for role in ("eos", "bos", "pad", "unk"):
        first_token = first.special.get(role)
        second_token = second.special.get(role)
        if first_token is None or second_token is None:
            continue
        if first_token not in pairs and second_token not in pairs.values():
            pairs[first_token] = second_token
    return pairs
