"""Laws of streamed text: whatever the cuts, the pieces add up to the whole, and no piece has half a character."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import text_cases

from lightning_specdec.text.stream import TextStream
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.text.vocabulary import Vocabulary


def cut(tokens: list[int], generator: random.Random) -> Iterator[list[int]]:
    """The tokens in chunks of random sizes, empty ones among them."""
    start = 0
    while start < len(tokens):
        size = generator.choice([0, 1, 1, 2, 3, 9])
        yield tokens[start : start + size]
        start += size


def streamed(tokenizer: TextTokenizer, tokens: list[int], generator: random.Random, *, show_special: bool) -> str:
    stream = tokenizer.stream(show_special=show_special)
    return "".join([*(stream.push(chunk) for chunk in cut(tokens, generator)), stream.finish()])


@pytest.mark.parametrize("show_special", [False, True])
@pytest.mark.parametrize("kind", text_cases.TOKENIZERS)
def test_the_pieces_of_random_tokens_add_up_to_the_whole_decode(kind: str, show_special: bool) -> None:
    generator, tokenizer = random.Random(1), TextTokenizer(text_cases.tokenizer(kind))
    size = len(tokenizer.vocabulary)
    for _ in range(600):
        tokens = [generator.randrange(size + 3) for _ in range(generator.randint(0, 12))]  # some are no token at all
        whole = tokenizer.decode(tokens, show_special=show_special)
        assert streamed(tokenizer, tokens, generator, show_special=show_special) == whole, tokens


@pytest.mark.parametrize("show_special", [False, True])
@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_the_pieces_of_broken_characters_add_up_to_the_whole_decode(kind: str, show_special: bool) -> None:
    """Among tokens of single bytes, where characters are complete, cut short or never begun."""
    generator, tokenizer = random.Random(2), TextTokenizer(text_cases.tokenizer(kind))
    pieces = tokenizer.vocabulary.token_bytes
    single = {piece[0]: token for token, piece in enumerate(pieces) if piece is not None and len(piece) == 1}
    if kind != "byte_level":
        names = text_cases.tokenizer(kind).get_vocab()
        single = {byte: names[f"<0x{byte:02X}>"] for byte in range(256)}
    assert len(single) == 256
    others = [token for token in range(len(pieces)) if token not in single.values()]
    for _ in range(600):
        raw = "".join(generator.choice("aé日🌩 ") for _ in range(generator.randint(1, 5))).encode()
        tokens = [single[byte] for byte in raw if generator.random() < 0.9]
        for _ in range(generator.choice([0, 0, 1, 2])):
            tokens.insert(generator.randint(0, len(tokens)), generator.choice([single[0xE2], *others]))
        whole = tokenizer.decode(tokens, show_special=show_special)
        assert streamed(tokenizer, tokens, generator, show_special=show_special) == whole, tokens


@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_text_that_was_encoded_streams_back_character_by_character(kind: str) -> None:
    tokenizer = TextTokenizer(text_cases.tokenizer(kind))
    for text in text_cases.SAMPLES:
        if kind == "metaspace" and text.startswith(" "):
            continue  # its decoder drops all spaces of the first token
        stream = tokenizer.stream()
        pieces = [stream.push([token]) for token in tokenizer.encode(text)]
        assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)
        assert "".join(pieces) + stream.finish() == text


def test_nothing_is_held_back_but_the_beginning_of_a_character() -> None:
    tokenizer = TextTokenizer(text_cases.tokenizer("byte_level"))
    for text in text_cases.SAMPLES:
        stream, shown, raw = tokenizer.stream(), "", b""
        for token in tokenizer.encode(text):
            shown += stream.push([token])
            raw += tokenizer.vocabulary.token_bytes[token] or b""
            held = len(raw) - len(shown.encode())
            assert held < 4 and (held == 0 or is_begun(raw[-held:])), (shown, raw)


def is_begun(raw: bytes) -> bool:
    """Whether a character begins with these bytes."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def test_a_run_of_byte_tokens_is_shown_once_it_has_ended() -> None:
    tokenizer = TextTokenizer(text_cases.tokenizer("sentencepiece"))
    e, acute, word = tokenizer.tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "▁the"])
    stream = tokenizer.stream()
    assert [stream.push([e]), stream.push([acute]), stream.push([word])] == ["", "", "é the"]
    stream = tokenizer.stream()
    assert [stream.push([word]), stream.push([e]), stream.push([word]), stream.finish()] == ["the", "", "� the", ""]


def test_a_push_costs_as_much_as_its_own_tokens() -> None:
    """What is kept from push to push is at most a character, however long the text."""
    tokenizer = TextTokenizer(text_cases.tokenizer("byte_level"))
    stream = tokenizer.stream()
    for _ in range(300):
        stream.push(tokenizer.encode(text_cases.TEXT[2]))
        assert len(stream._ready) + len(stream._run) + len(stream._decoder.getstate()[0]) < 4


@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_what_is_held_is_shown_later_and_what_is_dropped_never(kind: str) -> None:
    generator, tokenizer = random.Random(3), TextTokenizer(text_cases.tokenizer(kind))
    for text in text_cases.TEXT:
        text = text.strip()
        tokens, num_bytes = tokenizer.encode(text), len(text.encode())
        for drop in (0, 1, 2, 5, num_bytes, num_bytes + 9):
            stream, shown = tokenizer.stream(), ""
            for chunk in cut(tokens, generator):
                shown += stream.push(chunk, hold=max(drop, generator.randint(0, 6)))
            shown += stream.finish(drop=drop)
            assert shown == text.encode()[: max(num_bytes - drop, 0)].decode(errors="replace")


def test_a_stream_needs_no_more_than_bytes() -> None:
    stream = TextStream(Vocabulary((b"a", b"\xe2", None, b"\x82\xacb")))
    assert [stream.push([0, 1]), stream.push([2]), stream.push([3, 1]), stream.finish()] == ["a", "", "€b", "�"]
