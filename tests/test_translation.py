"""A text in another vocabulary has the same bytes, and its earlier tokens never change."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import tiny_tokenizers
from tiny_vocabularies import encode_letters

from lightning_specdec.text.translation import MAX_WAITING_BYTES, TranslatedText, Translation
from lightning_specdec.text.vocabulary import Vocabulary


def vocabulary(*pieces: bytes | str) -> Vocabulary:
    """Bytes are tokens of text, strings are special tokens, and "eos=</s>" has a role."""
    special: dict[str, int] = {}
    token_bytes: list[bytes | None] = []
    for token, piece in enumerate(pieces):
        if isinstance(piece, bytes):
            token_bytes.append(piece)
            continue
        token_bytes.append(None)
        role, _, text = piece.rpartition("=")
        special[text] = token
        if role:
            special[role] = token
    return Vocabulary(tuple(token_bytes), special)


FIRST = vocabulary(
    b"a",
    b"b",
    b"c",
    b"abc",
    b"\xe6",
    b"\xbc\xa2",
    b"x\xe6\xbc",
    b"\xa2",
    "eos=</s>",
    "bos=<s>",
    "<x>",
)
SECOND = vocabulary(
    b"ab", b"c", b"a", "\u6f22".encode(), b"\xa2", b"x", "eos=<end>", "<x>", b"b", "bos=<begin>"
)


def test_tokens_are_matched_by_bytes_and_special_ones_by_text_or_role() -> None:
    assert Translation(FIRST, SECOND).pairs == {0: 2, 1: 8, 2: 1, 7: 4, 8: 6, 9: 9, 10: 7}
    assert Translation(FIRST, SECOND).share == 7 / 10
    double = Translation(vocabulary(b"a", b"b", b"a"), vocabulary(b"b", b"a", b"a", b"b"))
    assert double.pairs == {2: 2, 1: 3}, "of several tokens with the same bytes, one is drafted"
    assert double.whole == {0: 2, 1: 3, 2: 2}, "all of them are read"


STEPS: dict[str, tuple[list[list[int]], list[int]]] = {
    "a prompt is encoded as a whole": ([[0, 1, 2]], [0, 1]),
    "what follows it token by token": ([[2], [0], [1]], [1, 2, 8]),
    "however many come at once": ([[2], [0, 1]], [1, 2, 8]),
    "abc, which the second does not have, as ab and c": ([[2], [3]], [1, 0, 1]),
    "a character that is cut waits": ([[2], [4]], [1]),
    "for its other part": ([[2], [4], [5]], [1, 3]),
    "within a token too": ([[2], [6, 7]], [1, 5, 3]),
    "and at the end of a prompt": ([[2, 4], [5]], [1, 3]),
    "bytes that are no text are spelt": ([[2], [7], [7, 0]], [1, 4, 4, 2]),
    "the first part of a character, and no other part": ([[2], [4, 0]], [1, 2]),
    "special tokens are read by themselves": ([[2, 8, 0, 1]], [1, 6, 0]),
    "and end what waits": ([[2], [4, 10, 5]], [1, 7, 4]),
    "BOS is BOS": ([[9, 2]], [9, 1]),
    "a text of no token begins with BOS": ([[99]], [9]),
    "no text": ([], []),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_text_is_read_in_the_seconds_tokens(name: str) -> None:
    steps, expected = STEPS[name]
    text = TranslatedText(Translation(FIRST, SECOND))
    for step in steps:
        text.extend(step)
    assert text.tokens == expected


def test_what_has_no_end_is_not_waited_for() -> None:
    endless = vocabulary(b"c", b"x\xe6", b"\xbc\xa2y\xe6")
    text = TranslatedText(Translation(endless, vocabulary(b"c", b"x", b"y", "\u6f22".encode())))
    text.extend([0])
    text.extend([1, *[2] * MAX_WAITING_BYTES])
    assert len(text.tokens) > MAX_WAITING_BYTES and text.tokens[:6] == [0, 1, 3, 2, 3, 2]


def test_a_text_begins_with_the_seconds_own_first_token_once() -> None:
    for prompt in ([2], [9, 2]):
        text = TranslatedText(Translation(FIRST, SECOND, start=9))
        text.extend(prompt)
        assert text.tokens == [9, 1]


def test_only_tokens_of_exactly_the_bytes_are_taken_from_a_tokenizer() -> None:
    """SentencePiece puts a space before a text, other tokenizers change capitals."""
    second = vocabulary(b" a", b"a", b" ", b"b", b"ab")
    spaced = Translation(FIRST, second, encode=lambda text: encode_letters(second, f" {text}"))
    assert spaced.encode_piece("a") == [1]
    assert spaced.encode_piece(" a") == [0]
    assert spaced.encode_prompt("a") == [0]
    lower = Translation(FIRST, second, encode=lambda text: encode_letters(second, text.lower()))
    assert lower.encode_piece("aB") == [1]
    assert lower.encode_prompt("aB") == [4]
    unknown = Translation(FIRST, second, encode=lambda text: [99])
    assert unknown.encode_prompt("ab") == [4], "a token outside the vocabulary is not used"


def real(name: str) -> tuple[Any, Vocabulary]:
    tokenizer = tiny_tokenizers.KINDS[name]()
    return tokenizer, Vocabulary.of(tokenizer)


HARD = "the na\u00efve cat, 12 \u20ac \U0001f642 \u6f22\u5b57 caf\u00e9 \u00e9lan"


@pytest.mark.parametrize("other", ["sentencepiece", "byte_level"])
def test_texts_that_go_back_and_on_are_as_if_they_had_never_been_ahead(other: str) -> None:
    """Random texts and prompts, with special tokens and parts of characters."""
    generator = random.Random(7)
    tokenizer, first = real("byte_level")
    reader, second = real(other)
    encode = functools.partial(reader.encode, add_special_tokens=False)
    translation = Translation(first, second, encode=encode, start=second.special.get("bos"))
    plain = tokenizer.encode(HARD, add_special_tokens=False)

    def draw_tokens(num_tokens: int) -> list[int]:
        tokens = []
        for _ in range(num_tokens):
            candidates = [generator.choice(plain), generator.randrange(len(first))]
            tokens.append(generator.choice(candidates))
        return tokens

    for _ in range(60):
        prompt = draw_tokens(generator.randint(1, 12))
        answer = draw_tokens(generator.randint(1, 12))
        text = TranslatedText(translation)
        text.extend(prompt)
        text.extend(answer)

        num_kept = generator.randint(0, len(answer))
        text.truncate(len(prompt) + num_kept)
        assert text.num_covered == len(prompt) + num_kept
        answer = [*answer[:num_kept], *draw_tokens(3)]
        text.extend(answer[num_kept:])

        fresh = TranslatedText(translation)
        fresh.extend(prompt)
        for token in answer:
            fresh.extend([token])
        assert (text.tokens, text.waiting()) == (fresh.tokens, fresh.waiting())

        num_shared = generator.randint(0, len(prompt) + len(answer))
        whole = [*prompt, *answer]
        next_prompt = [*whole[:num_shared], *draw_tokens(generator.randint(1, 5))]
        text.begin_prompt()
        text.extend(next_prompt)
        fresh = TranslatedText(translation)
        fresh.extend(next_prompt)
        assert (text.tokens, text.waiting()) == (fresh.tokens, fresh.waiting())
