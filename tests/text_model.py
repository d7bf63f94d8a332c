"""A tiny model of text as a directory, for tests that load one: import the fixtures by name."""

from __future__ import annotations

import pytest
import text_cases
import tiny_models

from lightning_specdec.decoder import SpeculativeDecoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random Llama and a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("text_model")
    return tiny_models.write(path, tokenizer=text_cases.byte_level(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def decoder(model: str) -> SpeculativeDecoder:
    """The model, which is its own draft."""
    return SpeculativeDecoder.from_pretrained(model, model)
