"""A text in another vocabulary: the same bytes, its own tokenizer's tokens, and nothing settled ever changes."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import tiny_tokenizers
from tiny_vocabularies import encode_letters

from lightning_specdec.text.translation import LONGEST_LOOSE, TranslatedText, Translation
from lightning_specdec.text.vocabulary import Vocabulary


def vocabulary(*pieces: bytes | str) -> Vocabulary:
    """Bytes are tokens of text, strings are special ones; "eos=</s>" has a role."""
    special: dict[str, int] = {}
    for token, piece in enumerate(pieces):
        if isinstance(piece, str):
            role, _, text = piece.rpartition("=")
            special |= {text: token} | ({role: token} if role else {})
    return Vocabulary(
        tuple(piece if isinstance(piece, bytes) else None for piece in pieces), special
    )


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
    assert double.pairs == {2: 2, 1: 3}, "of the same bytes one is drafted"
    assert double.whole == {0: 2, 1: 3, 2: 2}, "and all are read"


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
    steps, wanted = STEPS[name]
    text = TranslatedText(Translation(FIRST, SECOND))
    for step in steps:
        text.extend(step)
    assert text.tokens == wanted


def test_what_has_no_end_is_not_waited_for() -> None:
    endless = vocabulary(b"c", b"x\xe6", b"\xbc\xa2y\xe6")
    text = TranslatedText(Translation(endless, vocabulary(b"c", b"x", b"y", "\u6f22".encode())))
    text.extend([0])
    text.extend([1, *[2] * LONGEST_LOOSE])
    assert len(text.tokens) > LONGEST_LOOSE and text.tokens[:6] == [0, 1, 3, 2, 3, 2]


def test_a_text_begins_with_the_seconds_own_first_token_once() -> None:
    for prompt in ([2], [9, 2]):
        text = TranslatedText(Translation(FIRST, SECOND, start=9))
        text.extend(prompt)
        assert text.tokens == [9, 1]


def test_only_tokens_of_exactly_the_bytes_are_taken_from_a_tokenizer() -> None:
    """SentencePiece puts a space before a text, others change capitals: neither is said in the middle of a text."""
    second = vocabulary(b" a", b"a", b" ", b"b", b"ab")
    spaced = Translation(FIRST, second, encode=lambda text: encode_letters(second, f" {text}"))
    assert spaced.encode_piece("a") == [1]
    assert spaced.encode_piece(" a") == [0]
    assert spaced.encode_prompt("a") == [0]
    lower = Translation(FIRST, second, encode=lambda text: encode_letters(second, text.lower()))
    assert lower.encode_piece("aB") == [1]
    assert lower.encode_prompt("aB") == [4]
    assert Translation(FIRST, second, encode=lambda text: [99]).encode_prompt("ab") == [4], (
        "not one that it knows"
    )


def real(name: str) -> tuple[Any, Vocabulary]:
    tokenizer = tiny_tokenizers.KINDS[name]()
    return tokenizer, Vocabulary.of(tokenizer)


HARD = "the na\u00efve cat, 12 \u20ac \U0001f642 \u6f22\u5b57 caf\u00e9 \u00e9lan"


@pytest.mark.parametrize("other", ["sentencepiece", "byte_level"])
def test_texts_that_go_back_and_on_are_as_if_they_had_never_been_ahead(other: str) -> None:
    """Random texts of random tokens, special ones and parts of characters among them, with prompts of any length."""
    generator, (tokenizer, first), (reader, second) = (
        random.Random(7),
        real("byte_level"),
        real(other),
    )
    encode = functools.partial(reader.encode, add_special_tokens=False)
    translation = Translation(first, second, encode=encode, start=second.special.get("bos"))
    plain = tokenizer.encode(HARD, add_special_tokens=False)

    def drawn(number: int) -> list[int]:
        return [
            generator.choice([generator.choice(plain), generator.randrange(len(first))])
            for _ in range(number)
        ]

    for _ in range(60):
        prompt, answer = drawn(generator.randint(1, 12)), drawn(generator.randint(1, 12))
        text, fresh, again = (TranslatedText(translation) for _ in range(3))
        text.extend(prompt)
        text.extend(answer)
        kept = generator.randint(0, len(answer))
        text.go_back(len(prompt) + kept)
        assert text.num_covered == len(prompt) + kept
        fresh.extend(prompt)
        answer = [*answer[:kept], *drawn(3)]
        text.extend(answer[kept:])
        for token in answer:
            fresh.extend([token])
        assert (text.tokens, text.waiting()) == (fresh.tokens, fresh.waiting())
        shared = generator.randint(0, len(prompt) + len(answer))
        prompt = [*[*prompt, *answer][:shared], *drawn(generator.randint(1, 5))]
        text.begin_prompt()
        text.extend(prompt)
        again.extend(prompt)
        assert (text.tokens, text.waiting()) == (again.tokens, again.waiting())
