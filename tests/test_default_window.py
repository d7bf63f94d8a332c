"""Draft tokens per round if nobody chooses: adaptive for all but small targets."""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
from tiny_models import write

from lightning_specdec import NGramDrafter, SpeculativeDecoder, decoder
from lightning_specdec.checkpoints import checkpoint


@pytest.fixture
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MOST_SMALL", 0)


def test_a_small_target_has_the_stored_number_or_three(tmp_path: Path) -> None:
    target = cases.target("rnn")
    assert SpeculativeDecoder(target).num_draft_tokens == 3

    path = tmp_path / "pair.safetensors"
    checkpoint.save(path, target, NGramDrafter(), recipe={"num_draft_tokens": 5})
    assert SpeculativeDecoder.from_checkpoint(path).num_draft_tokens == 5


@pytest.mark.usefixtures("_all_are_large")
def test_a_large_target_adapts_whatever_a_file_recommends(tmp_path: Path) -> None:
    target = cases.target("rnn")
    assert SpeculativeDecoder(target).num_draft_tokens == "auto"

    path = tmp_path / "pair.safetensors"
    checkpoint.save(path, target, NGramDrafter(), recipe={"num_draft_tokens": 5})
    assert SpeculativeDecoder.from_checkpoint(path).num_draft_tokens == "auto"

    write(tmp_path / "llama")
    assert SpeculativeDecoder.from_pretrained(tmp_path / "llama").num_draft_tokens == "auto"


@pytest.mark.usefixtures("_all_are_large")
def test_a_number_that_the_user_or_the_pair_names_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SpeculativeDecoder(cases.target("rnn"), num_draft_tokens=2).num_draft_tokens == 2

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "llama")
    directory = tmp_path / "configs" / "pairs"
    directory.mkdir(parents=True)
    (directory / "mine.yaml").write_text(
        "description: a small model with prompt lookup\n"
        "target:\n"
        "  source: llama\n"
        "  dtype: float32\n"
        "  size: {parameters: 1000, matrix_parameters: 900, kept_parameters: 100}\n"
        "drafter: NGramDrafter\n"
        "num_draft_tokens: 6\n"
    )
    assert SpeculativeDecoder.from_pair("mine").num_draft_tokens == 6
    assert SpeculativeDecoder.from_pair("mine", num_draft_tokens=2).num_draft_tokens == 2
    own_draft = SpeculativeDecoder.from_pair("mine", draft=tmp_path / "llama")
    assert own_draft.num_draft_tokens == "auto"
