"""Laws of models that also read images: they write a text as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import succeed
from families import greedy_tokens
from multimodal import FAMILIES, PROMPTS, generated, multimodal, reference, write_multimodal
from safetensors.torch import load_file, save_file
from tiny_eagle import fitted_eagle
from tiny_heads import heads
from tiny_models import CHAT
from tiny_tokenizers import byte_level
from transformers import AutoConfig, AutoModelForImageTextToText, pipeline

import lightning_specdec
from lightning_specdec import SpeculativeDecoder
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

NUM_NEW = 16
_EXPERTS = {
    "num_experts": 2,
    "top_k_experts": 1,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "hidden_size": 64,
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_a_directory_is_loaded_and_decodes_a_ragged_batch_as_generate_does(
    family: str, tmp_path: Path
) -> None:
    decoder = SpeculativeDecoder(load_model(write_multimodal(tmp_path, family)), NGramDrafter())
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": (), "num_draft_tokens": 3}
    expected = generated(family, NUM_NEW)
    assert decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW, eos=()).tokens == expected
    assert decoder.decode(PROMPTS, **options).tokens == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert decoder.decode(prompt, **options).tokens == [tokens]


@every_family
def test_generate_and_custom_generate_return_what_transformers_writes(family: str) -> None:
    model = multimodal(family)
    decoder = SpeculativeDecoder(model)
    if family == "llama4":
        model = model.language_model
        decoder = SpeculativeDecoder(model)
    for prompt, tokens in zip(PROMPTS, generated(family, NUM_NEW), strict=True):
        text = torch.tensor([prompt])
        options: dict[str, Any] = {
            "attention_mask": torch.ones_like(text),
            "max_new_tokens": NUM_NEW,
        }
        expected = [[*prompt, *tokens]]
        assert decoder.generate(text, **options).tolist() == expected
        options["custom_generate"] = lightning_specdec.generate
        assert model.generate(text, **options).tolist() == expected


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen3_vl", "qwen3_5"])
def test_a_padded_batch_equals_transformers_own(family: str) -> None:
    model = multimodal(family)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": NUM_NEW}
    output = model.generate(ids, custom_generate=lightning_specdec.generate, **options)
    assert output[:, longest:].tolist() == generated(family, NUM_NEW)


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("make_drafter", [fitted_eagle, heads])
def test_heads_on_hidden_states_draft_for_them(family: str, make_drafter: Any) -> None:
    target = HuggingFaceLM(multimodal(family))
    result = speculative_decode(
        target, make_drafter(target), PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens == generated(family, NUM_NEW)
    assert result.acceptance_rate is not None


@pytest.mark.parametrize("family", ["mistral3", "llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_an_early_exit_drafts_where_all_layers_have_one_span(family: str) -> None:
    target = HuggingFaceLM(multimodal(family))
    result = speculative_decode(
        target, EarlyExitDrafter(3), PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens == generated(family, NUM_NEW)


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen3_vl"])
def test_one_may_be_the_draft_of_another(family: str) -> None:
    drafter = ModelDrafter(HuggingFaceLM(multimodal(family)))
    target = HuggingFaceLM(multimodal("mistral3"))
    result = speculative_decode(
        target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens == generated("mistral3", NUM_NEW)
    if family == "mistral3":
        assert result.block_efficiency == 4


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen2_5_vl", "qwen3_5"])
def test_an_image_is_refused_in_one_line(family: str) -> None:
    model = multimodal(family)
    text = torch.tensor([[5, 327, 7]])
    images = {"pixel_values": torch.zeros(1, 3, 28, 28)}
    if family.startswith("qwen"):
        images["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        images["pixel_values"] = torch.zeros(4, 3 * 2 * 14 * 14)
    if family == "mistral3":
        images["pixel_values"] = torch.zeros(1, 3, 56, 56)
        images["image_sizes"] = torch.tensor([[56, 56]])
    options: dict[str, Any] = {"max_new_tokens": 4, **images}
    for generate in (
        SpeculativeDecoder(model).generate,
        lambda text, **options: model.generate(
            text, custom_generate=lightning_specdec.generate, **options
        ),
    ):
        with pytest.raises(
            ValueError, match="does not support .*(pixel_values|mm_encoder_outputs)"
        ) as raised:
            generate(text, **options)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("blip-2", {}),
        ("kosmos-2", {}),
        ("unlimited_ocr", {}),
        ("diffusion_gemma", {"text_config": _EXPERTS}),
    ],
)
def test_a_family_that_generates_in_its_own_way_is_refused(
    family: str, sizes: dict[str, Any]
) -> None:
    """Its forward pass, called for token after token, writes something else."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **sizes))
    with pytest.raises(ValueError, match="generates in a way that is only its own") as raised:
        HuggingFaceLM(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["mistral3", "qwen3_5"])
def test_the_command_decodes_a_directory_and_a_chat(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = write_multimodal(tmp_path / "model", family, CHAT)
    words = ["decode", "--target", directory, "--max_new_tokens", "8", "--repeats", "0"]
    document = succeed(*words, "--prompt", "the cat", "--output", "json").json
    (prompt,) = document["prompts"]
    expected = greedy_tokens(reference(family), prompt["prompt"], 8)
    assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"] == expected
    assert type(load_model(directory).model).__name__ in succeed("info", directory).out


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen3_5"])
def test_a_pipeline_writes_the_same_text(family: str) -> None:
    pipe = pipeline("text-generation", model=multimodal(family), tokenizer=byte_level())
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = pipe("the cat", **options)
    assert pipe("the cat", custom_generate=lightning_specdec.generate, **options) == expected


def test_some_layers_of_the_text_part_make_a_draft() -> None:
    target = HuggingFaceLM(multimodal("mistral3"))
    draft = target.with_layers([0, 3])
    assert type(draft.model).__name__ == "MistralForCausalLM"
    assert draft.stack.num_layers == 2
    whole = target.with_layers([0, 1, 2, 3])
    tokens = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(whole(tokens).logits, target(tokens).logits)


def test_parts_for_images_are_not_called_left_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 4 is loaded for texts only, and its directory has the weights of all parts."""
    directory = write_multimodal(tmp_path / "model", "llama4")
    load_model(directory)
    assert "no place for" not in caplog.text
    weights_path = tmp_path / "model" / "model.safetensors"
    weights = load_file(weights_path)
    weights["language_model.model.layers.9.weight"] = torch.zeros(1)
    save_file(weights, weights_path, metadata={"format": "pt"})
    load_model(directory)
    assert "contains 1 weights that its config has no place for" in caplog.text
