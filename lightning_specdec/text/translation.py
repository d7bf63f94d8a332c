"""Text of one vocabulary told in another: the tokens that both have, and other tokens for the rest."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from lightning_specdec.text.vocabulary import ROLES, Vocabulary

LONGEST_LOOSE = 24
"""Bytes that wait for a character to be completed; more than any token that begins with the end of another."""


class Translation:
    """The way from a first vocabulary to a second.

    Theory: tokens are the same where their bytes are; special tokens where their text is, or else their role. Guesses
    need a one-to-one map, or two tokens would claim the same probability: of several tokens with the same bytes the
    last stands for all, since the spellings of single bytes come before words in SentencePiece's vocabularies.
    Reading is less strict: every token of the first is read as the second's with its bytes.

    Args:
        first: the vocabulary that texts come in.
        second: the one that they are told in.
        encode: the second's tokenizer for plain text, adding no special tokens; where it is None, each text
            is spelt from its left by the longest tokens that fit.
        start: a token that every text of the second begins with.
    """

    def __init__(
        self,
        first: Vocabulary,
        second: Vocabulary,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        start: int | None = None,
    ) -> None:
        self.first, self.second, self.start = first, second, start
        self._encode = encode
        self._by_bytes = {piece: token for token, piece in enumerate(second.token_bytes) if piece}
        self._longest = max(map(len, self._by_bytes), default=0)
        self.special = _same_special(first, second)
        own = {piece: token for token, piece in enumerate(first.token_bytes) if piece}
        words = {token: self._by_bytes[piece] for piece, token in own.items() if piece in self._by_bytes}
        self.pairs: dict[int, int] = words | self.special
        """The second's token for each of the first's that may be guessed, one to one."""
        self.whole = {
            token: self._by_bytes[piece]
            for token, piece in enumerate(first.token_bytes)
            if piece in self._by_bytes and _is_whole(piece)
        }
        """What is read token by token: those that both have and that cut no character."""

    @property
    def share(self) -> float:
        """Tokens that both have / tokens of the smaller vocabulary."""
        return len(self.pairs) / max(1, min(len(self.first), len(self.second)))

    @property
    def filler(self) -> int:
        """What stands for a text that has no token in the second."""
        return next((self.second.special[role] for role in ("bos", "eos") if role in self.second.special), 0)

    def encode_prompt(self, text: str) -> list[int]:
        """As the second's own tokenizer reads it, with whatever that does to spaces and capitals."""
        return self._encoded(text) or self.spell(text.encode())

    def encode_piece(self, text: str) -> list[int]:
        """Tokens of exactly these bytes: the tokenizer's, if it adds and drops nothing, else the longest that fit."""
        data = text.encode()
        # SentencePiece puts a space before everything that it reads; one that is there anyway may be that space.
        for candidate in (text, text[1:]) if text.startswith(" ") else (text,):
            tokens = self._encoded(candidate)
            if tokens and self.second.join(tokens) == data:
                return tokens
        return self.spell(data)

    def _encoded(self, text: str) -> list[int]:
        if self._encode is None:
            return self.spell(text.encode())
        return [token for token in self._encode(text) if token < len(self.second)]

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

    Theory: what a language model is used to are the tokens that its own tokenizer makes. So the prompt is encoded as a
    whole; what is generated afterwards comes a few tokens at a time and is mostly the model's own guesses, so it is
    read token by token, which never changes what was read before. A token that the second does not have is
    turned into its bytes and encoded; one that cuts a character waits, as bytes, for the character's other part.

    The tokens follow from the text and from where its prompt ends, and from nothing that was read and taken back.

    Args:
        translation: the two vocabularies.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.num_covered = 0
        """Tokens of the first that were taken in."""
        self.tokens: list[int] = []
        """Tokens of the second that will stay."""
        self._loose = bytearray()
        self._breaks: list[tuple[int, int]] = []
        """Places within the prompt that nothing reaches across: tokens of the first, and of the second."""
        self._steps: list[tuple[int, bytes]] = []
        """At the prompt's end, and behind each token that followed: tokens of the second, and the bytes that wait."""

    @property
    def _is_prompt(self) -> bool:
        """Whether the prompt is still to come, or to end."""
        return not self._steps

    def copy(self) -> TranslatedText:
        """Another one, which goes on by itself."""
        other = TranslatedText(self.translation)
        other.num_covered, other.tokens, other._loose = self.num_covered, list(self.tokens), bytearray(self._loose)
        other._breaks, other._steps = list(self._breaks), list(self._steps)
        return other

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in more of the text; the first call takes the prompt, and the first after going back into it its end."""
        start = self.translation.start
        if not self.tokens and start is not None and self.translation.special.get(tokens[0]) != start:
            self.tokens.append(start)
        was_prompt = self._is_prompt
        for token in tokens:
            self._take(token)
            self.num_covered += 1
            if not was_prompt:
                self._steps.append((len(self.tokens), bytes(self._loose)))
            elif not self._loose:
                self._breaks.append((self.num_covered, len(self.tokens)))
        if was_prompt:
            self._settle(final=False)
            self.tokens = self.tokens or [self.translation.filler]
            self._steps.append((len(self.tokens), bytes(self._loose)))

    def _take(self, token: int) -> None:
        translation = self.translation
        pieces = translation.first.token_bytes
        piece = pieces[token] if token < len(pieces) else None
        if piece is None:
            self._settle(final=True)
            if token in translation.special:
                self.tokens.append(translation.special[token])
        elif token in translation.whole and not self._loose and not self._is_prompt:
            self.tokens.append(translation.whole[token])
        else:
            self._loose += piece
            if not self._is_prompt:
                self._settle(final=False)

    def go_back(self, num_covered: int) -> None:
        """Forget what lies behind the first's first `num_covered` tokens.

        Those of a prompt are one whole, so from within it the text goes back further, and another prompt follows.
        """
        num_behind = self.num_covered - num_covered
        if num_behind >= len(self._steps):
            self.begin_prompt(num_covered)
        elif num_behind > 0:
            del self._steps[-num_behind:]
            num_tokens, loose = self._steps[-1]
            self.num_covered, self._loose = num_covered, bytearray(loose)
            del self.tokens[num_tokens:]

    def begin_prompt(self, num_covered: int) -> None:
        """Another prompt follows, which begins with the first's first `num_covered` tokens: keep what it will keep."""
        while self._breaks and self._breaks[-1][0] > num_covered:
            self._breaks.pop()
        self.num_covered, num_tokens = self._breaks[-1] if self._breaks else (0, 0)
        del self.tokens[num_tokens:]
        self._loose.clear()
        self._steps.clear()

    def waiting(self) -> list[int]:
        """Tokens for the bytes of a character that is not complete, until it is."""
        return self.translation.spell(bytes(self._loose))

    def _settle(self, *, final: bool) -> None:
        """Encode the bytes that are loose; a character's first part stays loose unless nothing follows."""
        if not self._loose:
            return
        data = bytes(self._loose)
        try:
            text, num_read = codecs.utf_8_decode(data, "replace" if self._is_prompt else "strict", final)
        except UnicodeDecodeError:  # it will never be text
            self.tokens += self.translation.spell(data)
            self._loose.clear()
            return
        if not self._is_prompt and num_read < len(data) <= LONGEST_LOOSE:
            return
        encode = self.translation.encode_prompt if self._is_prompt else self.translation.encode_piece
        self.tokens += encode(text) if text else []
        del self._loose[:num_read]


def _is_whole(piece: bytes) -> bool:
    """Whether these bytes are whole characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _same_special(first: Vocabulary, second: Vocabulary) -> dict[int, int]:
    """Special tokens of the same text, then those left of the same role; one to one."""
    others = {text: token for token, text in second.special_texts.items()}
    same = {token: others[text] for token, text in first.special_texts.items() if text in others}
    for role in sorted(ROLES, key=("eos", "bos", "pad", "unk").index):
        token, other = first.special.get(role), second.special.get(role)
        if token is not None and other is not None and token not in same and other not in same.values():
            same[token] = other
    return same
