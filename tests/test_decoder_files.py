"""Laws of the object that loads, trains, decodes and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from lightning_specdec import (
    RNN,
    EpsilonThreshold,
    ModelDrafter,
    NGramDrafter,
    RejectionSampling,
    Sampling,
    SpeculativeDecoder,
    checkpoints,
)
from lightning_specdec.bench.candidates import exits
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.decoding import open_session
from lightning_specdec.drafters import EagleDrafter, EarlyExitDrafter


def pair(**settings: Any) -> SpeculativeDecoder:
    target = cases.target("rnn")
    return SpeculativeDecoder(target, cases.near(target), **settings)


def test_decoding_notices_that_the_draft_has_changed() -> None:
    decoder = pair()
    assert decoder.ready()[1] is decoder.ready()[1]
    result = decoder.decode([1, 2, 3], max_new_tokens=20)
    with torch.no_grad():
        for weight in decoder.drafter.parameters():
            weight.zero_()
    zeroed_result = decoder.decode([1, 2, 3], max_new_tokens=20)
    assert zeroed_result.tokens == result.tokens
    assert zeroed_result.acceptance_rate != result.acceptance_rate


def test_training_teaches_both_and_decoding_goes_on_with_what_they_learned() -> None:
    torch.manual_seed(0)
    decoder = SpeculativeDecoder(RNN(50), RNN(50, hidden_size=32, num_layers=1))
    data = ArithmeticProgressions()
    untrained_result = decoder.decode([1, 2, 3], max_new_tokens=7)
    metrics = decoder.train(data, max_epochs=2)
    assert metrics["train/target_loss"] < 3.9
    assert {"train/draft_loss", "val/acceptance_rate"} <= metrics.keys()
    assert decoder.prompts == data.prompts()
    assert decoder.recipe["epochs"] == 2

    result = decoder.decode(decoder.prompts, max_new_tokens=7)
    assert result.tokens == decoder.decode_standard(decoder.prompts, max_new_tokens=7).tokens
    assert decoder.decode([1, 2, 3], max_new_tokens=7).tokens != untrained_result.tokens
    new_decoder = SpeculativeDecoder(decoder.target, decoder.drafter)
    new_result = new_decoder.decode(decoder.prompts, max_new_tokens=7)
    assert [row.rounds for row in new_result.rows] == [row.rounds for row in result.rows]


def test_only_a_model_draft_is_trained() -> None:
    with pytest.raises(
        ValueError, match="only a ModelDrafter is trained with its target, this is a Repeater"
    ):
        SpeculativeDecoder(cases.target("rnn"), cases.Repeater()).train(ArithmeticProgressions())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pair.ckpt"
    decoder = pair(prompts=[[1, 2], [3]], recipe={"seed": 4})
    decoder.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["pair.ckpt"]

    loaded = SpeculativeDecoder.from_checkpoint(path)
    assert loaded.prompts == [[1, 2], [3]]
    assert loaded.recipe == {"seed": 4}
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "seed": 5}
    expected = decoder.decode(decoder.prompts, **options)
    result = loaded.decode(loaded.prompts, **options)
    assert result.tokens == expected.tokens
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]

    in_bfloat16 = SpeculativeDecoder.from_checkpoint(path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in in_bfloat16.target.parameters()} == {torch.bfloat16}


def test_what_could_not_be_built_again_is_not_saved(tmp_path: Path) -> None:
    for target in ("transformer", "fused"):
        decoder = SpeculativeDecoder(cases.target(target), cases.target("rnn"))
        with pytest.raises(ValueError, match="a checkpoint cannot hold a "):
            decoder.save(tmp_path / "pair.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_yields_the_tokens_of_decoding_as_they_are_settled() -> None:
    decoder = pair()
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "num_draft_tokens": 3,
        "eos": cases.EOS,
        "temperature": 1.0,
        "seed": 3,
    }
    result = decoder.decode(cases.PROMPTS, rule=RejectionSampling(), **options)
    streamed_tokens: list[list[int]] = [[] for _ in cases.PROMPTS]
    for prompt_index, token in decoder.stream(cases.PROMPTS, rule=RejectionSampling(), **options):
        streamed_tokens[prompt_index].append(token)
    assert streamed_tokens == result.tokens

    session = open_session(
        decoder.target, decoder.drafter, [1, 2], max_new_tokens=20, rule=EpsilonThreshold()
    )
    session.step()
    assert 1 <= session.live[0].num_new <= 4, (
        "a round settles at most the window and one token more"
    )


def test_a_decoder_knows_its_targets_exits_and_takes_any_of_them() -> None:
    target = cases.target("llama")
    drafter = cases.drafter("early_exit_own", "llama")
    decoder = SpeculativeDecoder(target, drafter, prompts=cases.PROMPTS, num_draft_tokens=2)
    assert isinstance(drafter, EarlyExitDrafter)
    exit_drafters = exits(target, drafter)
    assert list(exit_drafters) == [1, 2]
    assert exit_drafters[drafter.exit_layer].head is drafter.head is not None

    expected = cases.standard("llama", Sampling(), 6, None)
    for layer in exit_drafters:
        with_exit = decoder.with_exit(layer)
        assert isinstance(with_exit.drafter, EarlyExitDrafter)
        assert with_exit.drafter.exit_layer == layer
        result = with_exit.decode(with_exit.prompts, max_new_tokens=6, eos=())
        assert result.tokens == expected.tokens
        assert result.num_draft_tokens == 2

    # An exit replaces any draft.
    with_lookup = SpeculativeDecoder(target, NGramDrafter())
    assert isinstance(with_lookup.with_exit(1).drafter, EarlyExitDrafter)
    with pytest.raises(ValueError, match="exit_layer must be from 1 to 2, got 3"):
        decoder.with_exit(3)


def test_another_draft_keeps_everything_else(tmp_path: Path) -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(
        target, cases.near(target), prompts=[[1, 2]], recipe={"seed": 3}, num_draft_tokens=5
    )
    with_lookup = decoder.with_drafter(NGramDrafter(4))
    assert isinstance(with_lookup.drafter, NGramDrafter)
    assert isinstance(decoder.drafter, ModelDrafter)
    for name in ("target", "prompts", "recipe", "num_draft_tokens"):
        assert getattr(with_lookup, name) == getattr(decoder, name), name


ROOT = Path(__file__).parent.parent
FILE = ROOT / "checkpoints" / "smollm2_eagle.safetensors"
TEXTS = ROOT / "lightning_specdec" / "data" / "smollm2_text"


def test_a_saved_file_is_small_complete_and_reported() -> None:
    assert FILE.stat().st_size < 20e6
    drafter = checkpoints.load(FILE).drafter
    assert isinstance(drafter, EagleDrafter)
    assert all(torch.isfinite(weight).all() for weight in drafter.parameters())
    assert f"`{FILE.name}`" in (ROOT / "checkpoints" / "README.md").read_text()


def test_it_learned_the_shipped_text_of_its_target() -> None:
    draft = checkpoints.load(FILE)
    assert draft.reference is not None
    manifest_paths = list(TEXTS.glob("*/manifest.json"))
    for path in manifest_paths:
        manifest = json.loads(path.read_text())
        assert manifest["target"]["sha256"] == draft.reference.sha256
    text_names = {path.parent.name for path in manifest_paths}
    assert text_names
    assert {Path(path).name for path in draft.recipe["data_arguments"]["paths"]} == text_names
