"""A text in another vocabulary: the same bytes, its own tokenizer's tokens, and nothing settled ever changes."""

from __future__ import annotations

import functools
import random
from copy import deepcopy
from typing import Any

import pytest
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
    return Vocabulary(tuple(piece if isinstance(piece, bytes) else None for piece in pieces), special)


FIRST = vocabulary(b"a", b"b", b"c", b"abc", b"\xe6", b"\xbc\xa2", b"x\xe6\xbc", b"\xa2", "eos=</s>", "bos=<s>", "<x>")
SECOND = vocabulary(b"ab", b"c", b"a", "\u6f22".encode(), b"\xa2", b"x", "eos=<end>", "<x>", b"b", "bos=<begin>")


def translated(*steps: list[int], **options: Any) -> TranslatedText:
    text = TranslatedText(Translation(FIRST, SECOND, **options))
    for step in steps:
        text.extend(step)
    return text


def test_tokens_are_matched_by_bytes_and_special_ones_by_text_or_role() -> None:
    assert Translation(FIRST, SECOND).pairs == {0: 2, 1: 8, 2: 1, 7: 4, 8: 6, 9: 9, 10: 7}
    assert Translation(FIRST, SECOND).share == 7 / 10


def test_tokens_of_the_same_bytes_are_guessed_as_one_and_all_are_read() -> None:
    first, second = vocabulary(b"a", b"b", b"a"), vocabulary(b"b", b"a", b"a", b"b")
    translation = Translation(first, second)
    assert translation.pairs == {2: 2, 1: 3}
    assert len(set(translation.pairs.values())) == len(translation.pairs)
    assert translation.whole == {0: 2, 1: 3, 2: 2}


def test_the_prompt_is_encoded_as_a_whole_and_what_follows_token_by_token() -> None:
    assert translated([0, 1, 2]).tokens == [0, 1], "ab, c"
    assert translated([2], [0], [1]).tokens == [1, 2, 8], "c, a, b"
    assert translated([2], [0, 1]).tokens == [1, 2, 8], "however many come at once"


def test_a_token_that_the_second_does_not_have_is_encoded_anew() -> None:
    assert translated([2], [3]).tokens == [1, 0, 1], "abc as ab, c"


def test_a_character_that_is_cut_waits_for_its_other_part() -> None:
    text = translated([2], [4])
    assert (text.tokens, text.waiting()) == ([1], [])
    text.extend([5])
    assert (text.tokens, text.waiting()) == ([1, 3], [])
    assert translated([2], [6, 7]).tokens == [1, 5, 3], "x and the character"
    assert translated([2, 4], [5]).tokens == [1, 3], "cut at the end of the prompt"


def test_bytes_that_wait_are_spelt_by_the_tokens_for_bytes() -> None:
    second = vocabulary(b"c", b"\xe6", b"\xbc", b"\xa2", "\u6f22".encode())
    text = TranslatedText(Translation(FIRST, second))
    text.extend([2])
    text.extend([6])
    assert (text.tokens, text.waiting()) == ([0], [1, 2]), "x is not there at all"
    text.extend([7])
    assert (text.tokens, text.waiting()) == ([0, 4], [])


def test_bytes_that_are_no_text_are_spelt_and_hold_nothing_up() -> None:
    assert translated([2], [7], [7, 0]).tokens == [1, 4, 4, 2]
    assert translated([2], [4, 0]).tokens == [1, 2], "the first part of a character, and no other part"
    endless = vocabulary(b"c", b"x\xe6", b"\xbc\xa2y\xe6")
    text = TranslatedText(Translation(endless, vocabulary(b"c", b"x", b"y", "\u6f22".encode())))
    text.extend([0])
    text.extend([1, *[2] * LONGEST_LOOSE])
    assert len(text.tokens) > LONGEST_LOOSE and text.tokens[:6] == [0, 1, 3, 2, 3, 2]


def test_special_tokens_end_what_is_loose_and_are_left_out_where_nothing_is_like_them() -> None:
    assert translated([2, 8, 0, 1]).tokens == [1, 6, 0]
    assert translated([2], [4, 10, 5]).tokens == [1, 7, 4]
    lonely = Translation(FIRST, vocabulary(b"c", b"a"))
    text = TranslatedText(lonely)
    text.extend([9, 2, 10, 99])
    assert text.tokens == [0]


def test_a_text_begins_with_the_seconds_own_first_token_once() -> None:
    assert translated([2], start=9).tokens == [9, 1]
    assert translated([9, 2], start=9).tokens == [9, 1]
    assert translated([9, 2]).tokens == [9, 1]


def test_a_text_without_any_token_of_the_second_is_not_empty() -> None:
    assert TranslatedText(Translation(FIRST, SECOND)).tokens == []
    assert translated([99]).tokens == [9], "its BOS"
    text = TranslatedText(Translation(FIRST, vocabulary(b"q", b"c")))
    text.extend([0])
    assert text.tokens == [0]


def test_going_back_and_on_equals_a_text_that_was_never_ahead() -> None:
    ahead = translated([2, 8], [0], [3], [6])
    ahead.go_back(4)
    assert (ahead.num_covered, ahead.tokens) == (4, [1, 6, 2, 0, 1])
    ahead.go_back(2)
    ahead.extend([0, 1])
    assert (ahead.num_covered, ahead.tokens) == (4, [1, 6, 2, 8]), "what follows is no prompt, and read one by one"
    ahead.go_back(1)
    assert (ahead.num_covered, ahead.tokens) == (0, []), "the prompt's tokens are one whole"
    ahead.extend([2])
    assert (ahead.num_covered, ahead.tokens) == (1, [1])


def test_a_copy_goes_on_by_itself() -> None:
    text = translated([2], [4])
    other = deepcopy(text)
    other.extend([5, 0])
    assert (text.tokens, other.tokens) == ([1], [1, 3, 2])
    text.extend([5])
    assert text.tokens == [1, 3]


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
    assert Translation(FIRST, second, encode=lambda text: [99]).encode_prompt("ab") == [4], "not one that it knows"


def real(name: str) -> tuple[Any, Vocabulary]:
    pytest.importorskip("transformers")
    import tiny_tokenizers

    tokenizer = tiny_tokenizers.KINDS[name]()
    return tokenizer, Vocabulary.of(tokenizer)


HARD = "the na\u00efve cat, 12 \u20ac \U0001f642 \u6f22\u5b57 caf\u00e9 \u00e9lan"


@pytest.mark.parametrize("other", ["sentencepiece", "byte_level"])
def test_texts_that_go_back_and_on_are_as_if_they_had_never_been_ahead(other: str) -> None:
    """Random texts of random tokens, special ones and parts of characters among them, with prompts of any length."""
    generator, (tokenizer, first), (reader, second) = random.Random(7), real("byte_level"), real(other)
    encode = functools.partial(reader.encode, add_special_tokens=False)
    translation = Translation(first, second, encode=encode, start=second.special.get("bos"))
    plain = tokenizer.encode(HARD, add_special_tokens=False)

    def drawn(number: int) -> list[int]:
        return [generator.choice([generator.choice(plain), generator.randrange(len(first))]) for _ in range(number)]

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


def test_the_tokens_of_whole_words_are_the_tokenizers_own() -> None:
    tokenizer, first = real("byte_level")
    reader, second = real("sentencepiece")
    text = TranslatedText(
        Translation(first, second, encode=lambda plain: reader.encode(plain, add_special_tokens=False))
    )
    prompt = "where the cat was"
    text.extend(tokenizer.encode(prompt, add_special_tokens=False))
    assert text.tokens == reader.encode(prompt, add_special_tokens=False)
    text.extend(tokenizer.encode(" \u20ac", add_special_tokens=False))
    assert text.tokens[-1:] == reader.convert_tokens_to_ids(["\u2581\u20ac"]), "split over tokens in the first"
