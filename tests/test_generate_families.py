"""Laws of `custom_generate` for models whose caches have recurrent layers, or only such layers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from families import greedy_tokens, tiny
from row_families import FAMILIES, PROMPTS, reference
from transformers import DynamicCache, PreTrainedModel

import lightning_specdec
from lightning_specdec import NGramDrafter

NUM_NEW = 12


def check(model: PreTrainedModel) -> None:
    """Compare the tokens with transformers' own, which also has them afterwards."""
    expected = greedy_tokens(model, PROMPTS[1], NUM_NEW)
    for options in ({}, {"draft": NGramDrafter(), "num_draft_tokens": 5}):
        actual = greedy_tokens(
            model, PROMPTS[1], NUM_NEW, custom_generate=lightning_specdec.generate, **options
        )
        assert actual == expected
    assert greedy_tokens(model, PROMPTS[1], NUM_NEW) == expected


@pytest.mark.quick_cases("mamba2", "jamba", "lfm2", "qwen3_5_text", "bloom")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_decodes_through_its_own_generate(family: str) -> None:
    check(deepcopy(reference(family)))


def test_so_does_falcon_mamba() -> None:
    check(tiny("falcon_mamba", **FAMILIES["mamba"]))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_a_cache_that_has_read_tokens_is_refused(family: str) -> None:
    model: Any = deepcopy(reference(family))
    ids = torch.tensor([PROMPTS[1]])
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="(cache|past_key_values) is not supported"):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            max_new_tokens=3,
            custom_generate=lightning_specdec.generate,
        )
