"""The decoder on what users give: a tokenizer's padded output, configs, text as it comes, one line in a notebook."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import write_text_model
from transformers import AutoTokenizer

from lightning_specdec import DecodingConfig, SpeculativeDecoder

TEXTS = ["the cat sat on the mat and", "a guess"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpeculativeDecoder, Any]:
    path = write_text_model(tmp_path_factory.mktemp("model"))
    return SpeculativeDecoder.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_read_by_its_attention_mask(pair: tuple[SpeculativeDecoder, Any], side: str) -> None:
    decoder, tokenizer = pair
    tokenizer.add_special_tokens({"pad_token": tokenizer.pad_token or tokenizer.eos_token})
    tokenizer.padding_side = side
    padded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert not bool(padded["attention_mask"].all())
    expected = decoder.decode(TEXTS, max_new_tokens=6)
    for prompts in (padded, dict(padded), {name: value.tolist() for name, value in padded.items()}):
        for decode in (decoder.decode, decoder.decode_standard):
            result = decode(prompts, max_new_tokens=6)
            assert [row.prompt for row in result.rows] == [row.prompt for row in expected.rows]
            assert result.tokens == expected.tokens
    assert decoder.target.vocabulary is not None
    decoder.target.vocabulary.special["pad"] = tokenizer.pad_token_id
    with pytest.raises(ValueError, match="prompt 1 seems padded"):
        decoder.decode(padded["input_ids"], max_new_tokens=6)
    del decoder.target.vocabulary.special["pad"]


@pytest.mark.parametrize("stop", [(), ("a", " t")])
def test_pieces_of_text_add_up_to_the_text(pair: tuple[SpeculativeDecoder, Any], stop: tuple[str, ...]) -> None:
    decoder, _ = pair
    config = DecodingConfig(max_new_tokens=20, stop=stop, eos=())
    pieces = {0: "", 1: ""}
    for number, piece in decoder.stream_text(TEXTS, config):
        assert piece
        pieces[number] += piece
    result = decoder.decode(TEXTS, config)
    standard = decoder.decode_standard(TEXTS, config)
    assert [*pieces.values()] == [row.text for row in result.rows] == [row.text for row in standard.rows]
    tokens = list(decoder.stream(TEXTS[0], config))
    assert [token for _, token in tokens] == result.tokens[0]
