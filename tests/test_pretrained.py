"""Laws of pretrained pairs: the drafter follows from what is given, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_eagle import eagle
from tiny_models import write, write_text_model
from tiny_tokenizers import byte_level, sentencepiece
from transformers import AutoModelForCausalLM

from lightning_specdec import NGramDrafter, SpeculativeDecoder
from lightning_specdec.config import memory
from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.drafters import EagleDrafter, ModelDrafter
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.models.loading import load_model

PROMPTS = ["the cat sat on the mat and", "a guess is kept when the target"]


def of(name: str, **settings: Any) -> dict[str, Any]:
    """A drafter by name, with its settings."""
    return {"drafter": {"class_path": name, "init_args": settings}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models. Read them, do not write to them."""
    home = tmp_path_factory.mktemp("pretrained")
    return {
        "target": write_text_model(home / "target", chat=True),
        "draft": write_text_model(home / "draft", "gpt2", seed=2, n_layer=1, n_positions=512),
        "foreign": write(
            home / "foreign", "qwen2", tokenizer=sentencepiece(), max_position_embeddings=512
        ),
        "tokens": write(home / "tokens"),
        "other size": write(home / "other", vocab_size=71),
    }


def test_a_loaded_model_takes_a_draft_by_its_path(models: dict[str, str], tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(models["target"])
    decoder = SpeculativeDecoder(target, models["draft"])
    assert isinstance(decoder.drafter, ModelDrafter)

    file = tmp_path / "head.safetensors"
    decoder.with_drafter(eagle(decoder.target)).save_draft(file)
    decoder = decoder.with_drafter(str(file))
    assert isinstance(decoder.drafter, EagleDrafter)
    result = decoder.decode([[1, 2, 3]], max_new_tokens=6)
    assert result.tokens == decoder.decode_standard([[1, 2, 3]], max_new_tokens=6).tokens


def test_the_drafter_follows_from_the_draft(models: dict[str, str]) -> None:
    load = SpeculativeDecoder.from_pretrained
    assert isinstance(load(models["target"]).drafter, NGramDrafter)
    assert isinstance(load(models["target"], models["draft"]).drafter, ModelDrafter)
    assert isinstance(load(models["target"], models["foreign"]).drafter, CrossVocabulary)
    assert isinstance(load(models["tokens"], models["tokens"]).drafter, ModelDrafter)
    given = NGramDrafter(4)
    assert load(models["target"], given).drafter is given
    assert (
        load(load_model(models["target"]), load_model(models["draft"])).drafter.check_target
        is not None
    )
    named = load(models["target"], **of("NGramDrafter", max_ngram=4)).drafter
    assert isinstance(named, NGramDrafter) and named.settings.max_ngram == 4
    cross = load(models["target"], models["foreign"], **of("CrossVocabulary", min_share=0.05))
    assert isinstance(cross.drafter, CrossVocabulary) and cross.drafter.settings.min_share == 0.05


def test_a_target_ends_at_its_own_eos_by_default(models: dict[str, str]) -> None:
    decoder = SpeculativeDecoder.from_pretrained(models["target"])
    eos = byte_level().eos_token_id
    first = decoder.decode(PROMPTS[0], max_new_tokens=12, eos=()).tokens[0]
    assert decoder.tokenizer is not None and decoder.tokenizer.eos == {eos}
    decoder.tokenizer.eos = frozenset({first[5]})  # a token that it does say
    cut = first.index(first[5]) + 1
    for decode in (decoder.decode, decoder.decode_standard):
        (row,) = decode(PROMPTS[0], max_new_tokens=12).rows
        assert row.tokens == first[:cut] and row.stop_reason == "eos"
        assert decode(PROMPTS[0], max_new_tokens=12, eos=()).tokens[0] == first
        assert (
            decode(PROMPTS[0], max_new_tokens=12, eos=first[2]).tokens[0]
            == first[: first.index(first[2]) + 1]
        )


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("target", {"drafter": "ModelDrafter"}, "needs a draft model"),
        (
            "target",
            {"drafter": "NGramDrafter", "draft": "draft"},
            "NGramDrafter takes no draft model",
        ),
        ("target", of("EarlyExitDrafter", exit_layer=3), "exit_layer must be from 1 to 2"),
        (
            "target",
            {"drafter": "ModelDrafter", "draft": "foreign"},
            "the draft's vocabulary is not the target's",
        ),
        ("target", of("NGramDrafter", max_gram=3), "max_gram"),
        ("target", {"drafter": "no_such.Module"}, "cannot import the drafter no_such.Module"),
        (
            "target",
            {"draft": NGramDrafter(), **of("EarlyExitDrafter", exit_layer=1)},
            "NGramDrafter already",
        ),
        (
            "tokens",
            {"draft": "other size"},
            "the draft has a vocabulary of 71 tokens, the target one of 67",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_cannot_draft_is_refused(
    models: dict[str, str],
    target: str,
    options: dict[str, Any],
    message: str,
) -> None:
    if options.get("draft") in models:
        options = {**options, "draft": models[options["draft"]]}
    with pytest.raises(ValueError) as raised:
        SpeculativeDecoder.from_pretrained(models[target], **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_two_models_must_fit_the_memory_together(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(weight.nbytes for weight in load_model(models["target"]).parameters())
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed + 1000)
    monkeypatch.setattr(
        "lightning_specdec.models.loading.load", lambda *arguments: pytest.fail("weights were read")
    )
    with pytest.raises(ValueError, match="not enough memory for .*target with .*draft: it needs"):
        SpeculativeDecoder.from_pretrained(models["target"], models["draft"], pack=False)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_models_that_are_laid_out_for_decoding_are_not_saved(
    models: dict[str, str],
    backend: str,
    tmp_path: Path,
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(models["target"], backend=backend)
    with pytest.raises(ValueError, match="a packed model cannot be saved: load it with pack=False"):
        decoder.save(tmp_path / "pair.safetensors")
    SpeculativeDecoder.from_pretrained(models["target"], pack=False, backend=backend).save(
        tmp_path / "pair.safetensors"
    )
    found = SpeculativeDecoder.from_checkpoint(tmp_path / "pair.safetensors", backend="torch")
    assert (
        found.decode(PROMPTS, max_new_tokens=4).tokens
        == decoder.decode(PROMPTS, max_new_tokens=4).tokens
    )


@pytest.fixture
def registry(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair `mine` of the user's own: the tiny models in the shape of a shipped one."""
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    values["target"] |= {"source": models["target"], "dtype": "float64"}
    values["draft"] |= {"source": "nowhere/at-all", "local": models["draft"], "dtype": "float32"}
    Path("configs/pairs").mkdir(parents=True)
    Path("configs/pairs/mine.yaml").write_text(yaml.safe_dump({**values, "num_draft_tokens": 5}))


@pytest.mark.usefixtures("registry")
def test_a_pair_brings_its_models_types_and_window() -> None:
    decoder = SpeculativeDecoder.from_pair("mine", pack=False)
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.num_draft_tokens == 5
    assert next(decoder.target.parameters()).dtype == torch.float64
    assert next(decoder.drafter.parameters()).dtype == torch.float32
    found = decoder.decode(PROMPTS, max_new_tokens=12)
    assert (
        found.tokens == decoder.decode_standard(PROMPTS, max_new_tokens=12).tokens
        and found.num_draft_tokens == 5
    )


@pytest.mark.usefixtures("registry")
def test_what_is_given_goes_before_what_the_pair_says(models: dict[str, str]) -> None:
    load = SpeculativeDecoder.from_pair
    other = load("mine", dtype="bfloat16", num_draft_tokens=2)
    assert other.num_draft_tokens == 2
    assert {next(part.parameters()).dtype for part in (other.target, other.drafter)} == {
        torch.bfloat16
    }
    assert isinstance(load("mine", drafter="NGramDrafter").drafter, NGramDrafter)
    assert isinstance(load("mine", models["foreign"]).drafter, CrossVocabulary)
    given = NGramDrafter(4)
    assert load("mine", given).drafter is given
    with pytest.raises(ValueError, match="there is no pair 'mime': did you mean mine"):
        load("mime")
