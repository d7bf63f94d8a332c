"""Laws of bytes as tokens: any text comes back, no character is cut in two, and a checkpoint of text decodes text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_fixtures import call, here, refused, succeed
from text_cases import SAMPLES

from lightning_specdec import RNN, ModelDrafter, SpeculativeDecoder
from lightning_specdec.text.bytes import ByteTokenizer

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("here")

TEXTS = [
    *SAMPLES,
    "def main(\n\tx):\n",
    "\x00\x7f\u0080\uffff\U0010ffff",
    "a\r\nb",
    "".join(map(chr, range(0, 3000, 7))),
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == tokenizer.encode_plain(text) == list(text.encode())
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_never_shows_half_a_character(text: str, width: int) -> None:
    tokenizer = ByteTokenizer()
    stream, tokens = tokenizer.stream(), tokenizer.encode(text)
    shown = ""
    for start in range(0, len(tokens), width):
        shown += stream.push(tokens[start : start + width])
        assert text.startswith(shown), "what is shown is what stands there"
    assert shown + stream.finish() == text


def test_bytes_that_are_no_text_are_shown_as_decoding_shows_them() -> None:
    generator = torch.Generator().manual_seed(0)
    tokenizer = ByteTokenizer()
    for _ in range(200):
        tokens = torch.randint(256, (30,), generator=generator).tolist()
        stream = tokenizer.stream()
        pieces = [stream.push([token]) for token in tokens]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens) == bytes(tokens).decode("utf-8", "replace")
    assert tokenizer.decode([104, 105, 300]) == "hi", "a model may have more outputs than there are bytes"
    assert tokenizer.encode("a\ud800b") == [97, 63, 98]


def test_nothing_is_special() -> None:
    tokenizer = ByteTokenizer()
    assert not tokenizer.eos and tokenizer.start is None and not tokenizer.has_chat_template
    assert not tokenizer.vocabulary.special_texts and len(tokenizer.vocabulary) == 256
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.fixture
def text_ckpt(tmp_path: Path) -> str:
    """A tiny untrained pair whose tokens are bytes."""
    torch.manual_seed(0)
    decoder = SpeculativeDecoder(
        RNN(256, embedding_size=8, hidden_size=16),
        ModelDrafter(RNN(256, embedding_size=8, hidden_size=8)),
        prompts=[list("def café(".encode())],
    )
    decoder.read_text(ByteTokenizer())
    decoder.save(tmp_path / "text.ckpt")
    return str(tmp_path / "text.ckpt")


def test_a_checkpoint_of_text_takes_and_gives_text(text_ckpt: str) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(text_ckpt)
    assert isinstance(decoder.tokenizer, ByteTokenizer)
    result = decoder.decode("def main(", max_new_tokens=12)
    assert result.rows[0].prompt == list(b"def main(")
    assert result.rows[0].text == bytes(result.tokens[0]).decode("utf-8", "replace")
    assert result.tokens == decoder.decode_standard("def main(", max_new_tokens=12).tokens


def test_the_command_line_shows_a_checkpoints_text(text_ckpt: str, tmp_path: Path) -> None:
    options = ["--max_new_tokens", "6", "--repeats", "0"]
    shown = succeed("decode", "--ckpt", text_ckpt, "--prompt", "def main(", *options).out
    assert "prompt 0: def main(" in shown
    assert "prompt 0: def café(" in succeed("decode", "--ckpt", text_ckpt, *options).out
    rows = succeed("decode", "--ckpt", text_ckpt, "--prompt", "1 2", *options, "--output", "json").json["prompts"]
    assert rows[0]["prompt"] == list(b"1 2")
    exported = str(tmp_path / "exported.ckpt")
    succeed("export", "--ckpt", text_ckpt, "--output", exported)
    assert "tokenizer   bytes" in succeed("info", "--ckpt", exported).out
    assert call("decode", "--ckpt", exported, "--prompt", "def main(", *options).out == shown


def test_stop_strings_end_a_row_of_bytes(text_ckpt: str) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(text_ckpt)
    whole = decoder.decode_standard("def main(", max_new_tokens=30, temperature=1.0)
    place, stop = next((i, chr(token)) for i, token in enumerate(whole.tokens[0]) if 32 < token < 127)
    row = decoder.decode("def main(", max_new_tokens=30, stop=stop, temperature=1.0).rows[0]
    assert row.stop_reason == "stop" and row.tokens == whole.tokens[0][: place + 1]
    assert row.text == bytes(row.tokens[:-1]).decode("utf-8", "replace")


def test_a_tokenizer_that_is_not_there_is_named(text_ckpt: str, tmp_path: Path) -> None:
    content = torch.load(text_ckpt, weights_only=True)
    for name, told in (("./nowhere", "a tokenizer that is not here: ./nowhere"), (3, "its tokenizer is no name")):
        content["lightning_specdec"]["tokenizer"] = name
        torch.save(content, tmp_path / "other.ckpt")
        refused("decode", "--ckpt", str(tmp_path / "other.ckpt"), told=told)
