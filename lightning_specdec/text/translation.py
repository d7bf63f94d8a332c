"""A text of one vocabulary in the tokens of another: shared tokens as they are, other tokens for the rest."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from lightning_specdec.text.vocabulary import Vocabulary

LONGEST_LOOSE = 24
"""Bytes that wait for a character to be completed; more than any token that begins with the end of another."""


class Translation:
    """The map from a first vocabulary to a second: by bytes, special tokens by text, or else by role.

    Args:
        first: the vocabulary that texts come in.
        second: the vocabulary to read them in.
        encode: the second's tokenizer for plain text, adding no special tokens; where it is None, each text
            is spelt from its left by the longest tokens that fit.
        start: a token that every text of the second begins with.

    Attributes:
        pairs: the second's token for each of the first's that may be drafted, one to one. Of several tokens with the
            same bytes the last one counts: single bytes come before words in SentencePiece's vocabularies.
        whole: what is read token by token: those that both have and that cut no character.
        special: the special tokens of `pairs`.
        filler: stands for a text that has no token in the second.
    """

    def __init__(
        self,
        first: Vocabulary,
        second: Vocabulary,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        start: int | None = None,
    ) -> None:
        self.first, self.second, self.start, self._encode = first, second, start, encode
        self._by_bytes = {piece: token for token, piece in enumerate(second.token_bytes) if piece}
        self._longest = max(map(len, self._by_bytes), default=0)
        self.special = _same_special(first, second)
        shared = [
            (t, piece)
            for t, piece in enumerate(first.token_bytes)
            if piece and piece in self._by_bytes
        ]
        last = {piece: token for token, piece in shared}
        self.pairs = {token: self._by_bytes[piece] for piece, token in last.items()} | self.special
        characters = (
            (token, piece)
            for token, piece in shared
            if piece.decode(errors="ignore").encode() == piece
        )
        self.whole = {token: self._by_bytes[piece] for token, piece in characters}
        self.filler = next(
            (second.special[role] for role in ("bos", "eos") if role in second.special), 0
        )

    def __deepcopy__(self, memo: object) -> Translation:
        return self  # the texts of all rows share it

    @property
    def share(self) -> float:
        """Tokens that both have / tokens of the smaller vocabulary."""
        return len(self.pairs) / max(1, min(len(self.first), len(self.second)))

    def encode_prompt(self, text: str) -> list[int]:
        """As the second's own tokenizer reads it, with whatever that does to spaces and capitals."""
        encoded = () if self._encode is None else self._encode(text)
        return [token for token in encoded if token < len(self.second)] or self.spell(text.encode())

    def encode_piece(self, text: str) -> list[int]:
        """Tokens of exactly these bytes: the tokenizer's, if it adds and drops nothing, else the longest that fit."""
        # SentencePiece puts a space before everything that it reads; one that is there anyway may be that space.
        for candidate in (text, text.removeprefix(" ")):
            tokens = self.encode_prompt(candidate)
            if self.second.join(tokens) == text.encode():
                return tokens
        return self.spell(text.encode())

    def spell(self, data: bytes) -> list[int]:
        """From the left, each time the longest token that fits; bytes that the second does not have are left out."""
        tokens, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._by_bytes), 0)
            if end:
                tokens.append(self._by_bytes[data[place:end]])
            place = end or place + 1
        return tokens


class TranslatedText:
    """A text that grows in the first vocabulary, and its tokens in the second.

    The prompt is encoded as a whole, as a language model is used to. What is generated afterwards comes a few tokens at
    a time, mostly the model's own draft tokens, so it is read token by token, which never changes what was read before.
    A token that the second does not have is encoded anew by its bytes; one that cuts a character waits for its other
    part. The tokens follow from the text and its prompt's end alone, not from what was read and taken back.

    Attributes:
        tokens: of the second, that will stay.
        num_covered: tokens of the first that were read.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.tokens: list[int] = []
        self.num_covered = 0
        self._loose = b""
        # At the prompt's end, and behind each token that followed: tokens of the second, and the bytes that wait.
        self._steps: list[tuple[int, bytes]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more of the text; the first call takes the prompt, or the first after going back into it."""
        translation, in_prompt, start = self.translation, not self._steps, self.translation.start
        if not self.tokens and start is not None and translation.special.get(tokens[0]) != start:
            self.tokens.append(start)
        pieces = translation.first.token_bytes
        for token in tokens:
            piece = pieces[token] if token < len(pieces) else None
            if piece is None:
                self._settle(in_prompt, final=True)
                self.tokens += [translation.special[token]] if token in translation.special else []
            elif token in translation.whole and not self._loose and not in_prompt:
                self.tokens.append(translation.whole[token])
            else:
                self._loose += piece
                if not in_prompt:
                    self._settle(in_prompt)
            self.num_covered += 1
            if not in_prompt:
                self._steps.append((len(self.tokens), self._loose))
        if in_prompt:
            self._settle(in_prompt)
            self.tokens = self.tokens or [translation.filler]
            self._steps.append((len(self.tokens), self._loose))

    def go_back(self, num_covered: int) -> None:
        """Forget what lies behind the first's first `num_covered` tokens.

        A prompt is encoded as a whole, so from within it the text goes back to its start, and another prompt follows.
        """
        num_behind = self.num_covered - num_covered
        if num_behind >= len(self._steps):
            self.begin_prompt()
        elif num_behind > 0:
            del self._steps[-num_behind:]
            num_tokens, self._loose = self._steps[-1]
            self.num_covered = num_covered
            del self.tokens[num_tokens:]

    def begin_prompt(self) -> None:
        """Another prompt follows."""
        self.num_covered, self._loose = 0, b""
        self.tokens.clear()
        self._steps.clear()

    def waiting(self) -> list[int]:
        """Tokens for the bytes of a character that is not complete, until it is."""
        return self.translation.spell(self._loose)

    def _settle(self, in_prompt: bool, *, final: bool = False) -> None:
        """Encode the bytes that wait; a character's first part goes on waiting unless nothing follows."""
        data, self._loose = self._loose, b""
        try:
            text, num_read = codecs.utf_8_decode(data, "replace" if in_prompt else "strict", final)
        except UnicodeDecodeError:  # it will never be text
            self.tokens += self.translation.spell(data)
            return
        if not in_prompt and num_read < len(data) <= LONGEST_LOOSE:
            self._loose = data
            return
        encode = self.translation.encode_prompt if in_prompt else self.translation.encode_piece
        self.tokens += encode(text) if text else []
        self._loose = data[num_read:]


def _same_special(first: Vocabulary, second: Vocabulary) -> dict[int, int]:
    """Special tokens of the same text, then those left of the same role; one to one."""
    others = {text: token for token, text in second.special_texts.items()}
    same = {token: others[text] for token, text in first.special_texts.items() if text in others}
    for role in ("eos", "bos", "pad", "unk"):
        token, other = first.special.get(role), second.special.get(role)
        if (
            token is not None
            and other is not None
            and token not in same
            and other not in same.values()
        ):
            same[token] = other
    return same
