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
    before = decoder.decode([1, 2, 3], max_new_tokens=20)
    with torch.no_grad():
        for weight in decoder.drafter.parameters():
            weight.zero_()
    after = decoder.decode([1, 2, 3], max_new_tokens=20)
    assert after.tokens == before.tokens and after.acceptance_rate != before.acceptance_rate


def test_training_teaches_both_and_decoding_goes_on_with_what_they_learned() -> None:
    torch.manual_seed(0)
    decoder = SpeculativeDecoder(RNN(50), RNN(50, hidden_size=32, num_layers=1))
    data = ArithmeticProgressions()
    before = decoder.decode([1, 2, 3], max_new_tokens=7)
    reached = decoder.train(data, max_epochs=2)
    assert (
        reached["train/target_loss"] < 3.9
        and {"train/draft_loss", "val/acceptance_rate"} <= reached.keys()
    )
    after = decoder.decode(decoder.prompts, max_new_tokens=7)
    assert decoder.prompts == data.prompts() and decoder.recipe["epochs"] == 2
    assert after.tokens == decoder.decode_standard(decoder.prompts, max_new_tokens=7).tokens
    assert decoder.decode([1, 2, 3], max_new_tokens=7).tokens != before.tokens
    fresh = SpeculativeDecoder(decoder.target, decoder.drafter)
    assert [row.rounds for row in fresh.decode(decoder.prompts, max_new_tokens=7).rows] == [
        r.rounds for r in after.rows
    ]


def test_only_a_model_draft_is_trained() -> None:
    with pytest.raises(
        ValueError, match="only a ModelDrafter is trained with its target, this is a Repeater"
    ):
        SpeculativeDecoder(cases.target("rnn"), cases.Repeater()).train(ArithmeticProgressions())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    decoder = pair(prompts=[[1, 2], [3]], recipe={"seed": 4})
    decoder.save(tmp_path / "new" / "pair.ckpt")
    again = SpeculativeDecoder.from_checkpoint(tmp_path / "new" / "pair.ckpt")
    assert again.prompts == [[1, 2], [3]] and again.recipe == {"seed": 4}
    first, second = (
        each.decode(each.prompts, max_new_tokens=9, temperature=1.0, seed=5)
        for each in (decoder, again)
    )
    assert first.tokens == second.tokens
    assert [row.rounds for row in first.rows] == [row.rounds for row in second.rows]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["pair.ckpt"]
    half = SpeculativeDecoder.from_checkpoint(tmp_path / "new" / "pair.ckpt", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.target.parameters()} == {torch.bfloat16}


def test_what_could_not_be_built_again_is_not_saved(tmp_path: Path) -> None:
    for target in ("transformer", "fused"):
        with pytest.raises(ValueError, match="a checkpoint cannot hold a "):
            SpeculativeDecoder(cases.target(target), cases.target("rnn")).save(
                tmp_path / "pair.ckpt"
            )
    assert list(tmp_path.iterdir()) == []


def test_a_stream_yields_the_tokens_of_decoding_as_they_are_settled() -> None:
    decoder = pair()
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "num_draft_tokens": 3,
        "eos": cases.EOS,
        "seed": 3,
    }
    pairs = list(
        decoder.stream(cases.PROMPTS, temperature=1.0, rule=RejectionSampling(), **options)
    )
    whole = decoder.decode(cases.PROMPTS, temperature=1.0, rule=RejectionSampling(), **options)
    for i, tokens in enumerate(whole.tokens):
        assert [token for number, token in pairs if number == i] == tokens
    session = open_session(
        decoder.target, decoder.drafter, [1, 2], max_new_tokens=20, rule=EpsilonThreshold()
    )
    session.step()
    assert 1 <= session.live[0].num_new <= 4, (
        "a round settles at most the window and one token more"
    )


def test_a_decoder_knows_its_targets_exits_and_takes_any_of_them() -> None:
    target = cases.target("llama")
    own = cases.drafter("early_exit_own", "llama")
    decoder = SpeculativeDecoder(target, own, prompts=cases.PROMPTS, num_draft_tokens=2)
    assert isinstance(own, EarlyExitDrafter)
    found = exits(target, own)
    assert list(found) == [1, 2]
    assert found[own.exit_layer].head is own.head is not None
    for layer in found:
        other = decoder.with_exit(layer)
        assert isinstance(other.drafter, EarlyExitDrafter) and other.drafter.exit_layer == layer
        result = other.decode(other.prompts, max_new_tokens=6, eos=())
        assert (
            result.tokens == cases.standard("llama", Sampling(), 6, None).tokens
            and result.num_draft_tokens == 2
        )
    looking = SpeculativeDecoder(target, NGramDrafter())
    assert isinstance(looking.with_exit(1).drafter, EarlyExitDrafter), (
        "any draft gives way to an exit"
    )
    with pytest.raises(ValueError, match="exit_layer must be from 1 to 2, got 3"):
        decoder.with_exit(3)


def test_another_draft_keeps_everything_else(tmp_path: Path) -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(
        target, cases.near(target), prompts=[[1, 2]], recipe={"seed": 3}, num_draft_tokens=5
    )
    other = decoder.with_drafter(NGramDrafter(4))
    assert isinstance(other.drafter, NGramDrafter) and isinstance(decoder.drafter, ModelDrafter)
    for name in ("target", "prompts", "recipe", "num_draft_tokens"):
        assert getattr(other, name) == getattr(decoder, name), name


ROOT = Path(__file__).parent.parent
FILE = ROOT / "checkpoints" / "smollm2_eagle.safetensors"
TEXTS = ROOT / "lightning_specdec" / "data" / "smollm2_text"


def test_it_is_small_whole_and_told_of() -> None:
    assert FILE.stat().st_size < 20e6
    drafter = checkpoints.load(FILE).drafter
    assert isinstance(drafter, EagleDrafter)
    assert all(torch.isfinite(weight).all() for weight in drafter.parameters())
    assert f"`{FILE.name}`" in (ROOT / "checkpoints" / "README.md").read_text()


def test_it_learned_the_shipped_text_of_its_target() -> None:
    found = checkpoints.load(FILE)
    manifests = [json.loads(path.read_text()) for path in TEXTS.glob("*/manifest.json")]
    assert found.reference is not None
    assert {each["target"]["sha256"] for each in manifests} == {found.reference.sha256}
    assert {Path(path).name for path in found.recipe["data_arguments"]["paths"]} == {
        path.parent.name for path in TEXTS.glob("*/manifest.json")
    }
