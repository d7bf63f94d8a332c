"""Laws of the models that `make test-families` examines."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lightning_specdec import SpeculativeDecoder

ROOT = Path(__file__).parent.parent
MOST_WEIGHTS = 5e6
SOME_WITH_IMAGES = ["mistral3", "qwen2_5_vl", "qwen3_5", "llava", "lfm2_vl", "glm4v_moe", "step3p7"]


@pytest.fixture
def every_family(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("every_family")


@pytest.mark.parametrize("family", SOME_WITH_IMAGES)
def test_a_model_that_reads_images_is_whole_and_tiny(family: str, every_family: ModuleType) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(every_family.config_with_images(family))
    assert type(model).__name__ == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]
    num_weights = {"text": 0, "other": 0}
    text_part = model.get_decoder()
    text_weights = {id(weight) for weight in text_part.parameters()}
    for weight in model.parameters():
        num_weights["text" if id(weight) in text_weights else "other"] += weight.numel()
    assert min(num_weights.values()) > 0
    assert sum(num_weights.values()) < MOST_WEIGHTS


def test_families_that_read_images_are_examined_or_left_out_for_a_reason(
    every_family: ModuleType,
) -> None:
    names = every_family.all_families()
    assert len(names) == len({*names})
    settings = every_family.SETTINGS["with_images"]
    left_out = [name for names in settings["left_out"].values() for name in names]
    families = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for name in (*left_out, *settings["families"]):
        assert name in families, name
    for name in SOME_WITH_IMAGES:
        assert f"{name} with images" in names


def test_positions_that_a_family_counts_itself_are_left_to_it(every_family: ModuleType) -> None:
    """Kosmos begins after the padding token's number, whatever positions others count."""
    model, expected = every_family.varied_model("kosmos-2.5 with images")
    decoder = SpeculativeDecoder(model)
    result = decoder.decode(every_family.PROMPTS, max_new_tokens=every_family.NUM_NEW)
    assert result.tokens == expected
