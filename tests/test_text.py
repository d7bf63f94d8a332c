"""Laws of text: what goes in comes out, whatever the cuts; chats are the model's template, and what was said stays."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import text_cases
import torch
from cli_fixtures import call, here, succeed
from transformers import GenerationConfig

from lightning_specdec import RNN, ModelDrafter, SpeculativeDecoder
from lightning_specdec.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer

__all__ = ["here"]
HELLO = [{"role": "user", "content": "the oak"}]
TEXTS = [
    *text_cases.SAMPLES,
    "\x00\x7f\u0080\uffff\U0010ffff",
    "a\r\nb",
    "".join(map(chr, range(0, 3000, 7))),
]
of_every_kind = pytest.mark.parametrize("kind", text_cases.TOKENIZERS)


def shared(kind: str) -> TextTokenizer:
    return TextTokenizer(text_cases.tokenizer(kind))


def cut(tokens: list[int], generator: random.Random) -> Iterator[list[int]]:
    """The tokens in chunks of random sizes, empty ones among them."""
    start = 0
    while start < len(tokens):
        size = generator.choice([0, 1, 1, 2, 3, 9])
        yield tokens[start : start + size]
        start += size


def check_stream(tokenizer: Tokenizer, tokens: list[int], generator: random.Random) -> None:
    """Chunks of any size give the whole text."""
    stream = tokenizer.stream()
    pieces = [*(stream.push(chunk) for chunk in cut(tokens, generator)), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(tokens), tokens


@of_every_kind
def test_the_pieces_of_a_text_add_up_to_the_whole_decode(kind: str) -> None:
    """Of random tokens, and of tokens of single bytes, whose characters are complete, cut short or never begun."""
    generator, tokenizer = random.Random(1), shared(kind)
    pieces, names = tokenizer.vocabulary.token_bytes, text_cases.tokenizer(kind).get_vocab()
    if kind == "byte_level":
        single = {
            piece[0]: token
            for token, piece in enumerate(pieces)
            if piece is not None and len(piece) == 1
        }
    else:
        single = {byte: names[f"<0x{byte:02X}>"] for byte in range(256)}
    assert len(single) == 256
    for _ in range(600):
        whole = [
            generator.randrange(len(pieces) + 3) for _ in range(generator.randint(0, 12))
        ]  # some are no token
        raw = "".join(generator.choice("aé日🌩 ") for _ in range(generator.randint(1, 5))).encode()
        broken = [single[byte] for byte in raw if generator.random() < 0.9]
        for _ in range(generator.choice([0, 0, 1, 2])):
            other = generator.choice([single[0xE2], generator.randrange(len(pieces))])
            broken.insert(generator.randint(0, len(broken)), other)
        for tokens in (whole, broken):
            check_stream(tokenizer, tokens, generator)


# Tokenizers with byte tokens change some control characters.
READ_BACK = [(kind, text) for kind in ("bytes", "byte_level") for text in TEXTS] + [
    (kind, text) for kind in ("sentencepiece", "gemma") for text in text_cases.SAMPLES
]


@pytest.mark.parametrize(("kind", "text"), READ_BACK)
def test_any_text_comes_back_and_streams_without_half_a_character(kind: str, text: str) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else shared(kind)
    tokens, stream, shown = tokenizer.encode(text), tokenizer.stream(), ""
    for token in tokens:
        shown += stream.push([token])
        assert text.startswith(shown), "what is shown is what stands there"
    assert shown + stream.finish() == tokenizer.decode(tokens) == text


@of_every_kind
def test_what_is_held_is_shown_later_and_what_is_dropped_never(kind: str) -> None:
    generator, tokenizer = random.Random(3), shared(kind)
    for text in text_cases.TEXT:
        text = text.strip()
        tokens, num_bytes = tokenizer.encode(text), len(text.encode())
        for drop in (0, 1, 2, 5, num_bytes, num_bytes + 9):
            stream, shown = tokenizer.stream(), ""
            for chunk in cut(tokens, generator):
                shown += stream.push(chunk, hold=max(drop, generator.randint(0, 6)))
            shown += stream.finish(drop=drop)
            assert shown == text.encode()[: max(num_bytes - drop, 0)].decode(errors="replace")


def test_bytes_are_tokens_and_nothing_is_special() -> None:
    tokenizer = ByteTokenizer()
    check_stream(tokenizer, [*range(256), *range(256)], random.Random(0))
    assert tokenizer.decode([104, 105, 300]) == "hi", (
        "a model may have more outputs than there are bytes"
    )
    assert tokenizer.encode("a\ud800b") == [97, 63, 98]
    assert not tokenizer.eos and tokenizer.start is None and not tokenizer.has_chat_template
    assert not tokenizer.vocabulary.special_texts and len(tokenizer.vocabulary) == 256
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat(HELLO)


@pytest.fixture
def text_ckpt(tmp_path: Path, here: object) -> str:
    """A tiny untrained pair whose tokens are bytes."""
    torch.manual_seed(0)
    target, draft = (RNN(256, embedding_size=8, hidden_size=size) for size in (16, 8))
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), prompts=[list("def café(".encode())])
    decoder.read_text(ByteTokenizer())
    decoder.save(tmp_path / "text.ckpt")
    return str(tmp_path / "text.ckpt")


def test_a_checkpoint_of_text_takes_and_gives_text(text_ckpt: str, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(text_ckpt)
    assert isinstance(decoder.tokenizer, ByteTokenizer)
    whole = decoder.decode_standard("def main(", max_new_tokens=30, temperature=1.0)
    place, stop = next(
        (i, chr(token)) for i, token in enumerate(whole.tokens[0]) if 32 < token < 127
    )
    row = decoder.decode("def main(", max_new_tokens=30, stop=stop, temperature=1.0).rows[0]
    assert row.prompt == list(b"def main(")
    assert row.stop_reason == "stop" and row.tokens == whole.tokens[0][: place + 1]
    assert row.text == bytes(row.tokens[:-1]).decode("utf-8", "replace")
    options = ["--max_new_tokens", "6", "--repeats", "0"]
    shown = succeed("decode", "--ckpt", text_ckpt, "--prompt", "def main(", *options).out
    assert (
        "def main(" in shown and "def café(" in succeed("decode", "--ckpt", text_ckpt, *options).out
    )
    exported = str(tmp_path / "exported.ckpt")
    succeed("export", "--ckpt", text_ckpt, "--output", exported)
    assert "bytes" in succeed("info", "--ckpt", exported).out
    assert call("decode", "--ckpt", exported, "--prompt", "def main(", *options).out == shown


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_chat_has_the_tokens_that_the_template_gives(kind: str) -> None:
    tokenizer = shared(kind)
    messages = [
        *HELLO,
        {"role": "assistant", "content": " fell"},
        {"role": "user", "content": "é 🌩\n"},
    ]
    expected = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.encode_chat(messages) == expected
    assert tokenizer.render_chat(messages).endswith("<s>user\né 🌩\n</s>\n<s>assistant\n")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a tokenizer."""
    text_cases.tokenizer("sentencepiece").save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_the_tokenizer_with_all_that_ends_an_answer(saved: Path) -> None:
    GenerationConfig(eos_token_id=[2, 5]).save_pretrained(saved)
    loaded, own = TextTokenizer.load(saved), shared("sentencepiece")
    assert loaded.eos == {2, 5} and loaded.has_chat_template
    assert loaded.encode(text_cases.TEXT[2]) == own.encode(text_cases.TEXT[2])
    assert (
        loaded.encode_chat(HELLO) == own.encode_chat(HELLO) and loaded.vocabulary == own.vocabulary
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "added'),
        ("tokenizer_config.json", "{"),
        ("tokenizer.json", None),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_one_line(
    saved: Path, file: str, content: str | None
) -> None:
    (saved / file).unlink(missing_ok=True) if content is None else (saved / file).write_text(
        content
    )
    with pytest.raises(
        ValueError, match="holds no tokenizer" if content is None else "cannot be read"
    ) as error:
        TextTokenizer.load(saved)
    assert (
        str(saved) in str(error.value)
        and "\n" not in str(error.value)
        and len(str(error.value)) < 400
    )


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no system\n role') }}", "no system role"),
        ("{% if %}", "does not take this chat"),
        (ENDLESS + "{% endfor %}", "does not end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "powers"),
    ],
)
def test_a_template_that_does_not_take_a_chat_says_why_in_one_line_at_once(
    template: str, told: str
) -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = template
    started = time.perf_counter()
    with pytest.raises(ValueError, match=told) as error:
        TextTokenizer(tokenizer).encode_chat(HELLO)
    assert "\n" not in str(error.value) and time.perf_counter() - started < 5
