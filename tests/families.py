"""Tiny random models of transformers' families, with scaled weights so that outputs vary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

DEVICE = os.environ.get("LIGHTNING_SPECDEC_TEST_DEVICE", "cpu")
"""Device of the tests' models. `pytest --device cuda` runs the laws on a GPU."""
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES},
    "qwen2": {**SIZES},
    "qwen3": {**SIZES, "head_dim": 8},
    "mistral": {**SIZES, "sliding_window": 5},
    "phi3": {**SIZES, "pad_token_id": 0},
    "gpt2": {"vocab_size": 67, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96},
    "gpt_neox": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "gemma3_text": {
        **SIZES,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""Sizes by family, with what sets it apart: shared key heads, sliding windows, positions."""
_MIXED = {
    **SIZES,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
"""Sizes of attention over a latent vector, where values have another size than keys."""
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_MIXED,
        "head_dim": 8,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {**_MIXED, **_EXPERTS, "head_dim": 8},
    "gemma3n_text": {
        **_MIXED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 67,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "deepseek_v3": {
        **SIZES,
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "longcat_flash": {
        **SIZES,
        **LATENT,
        "num_layers": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "falcon": {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gptj": {
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 96,
        "rotary_dim": 4,
    },
    "smollm3": {**SIZES, "no_rope_layers": [1, 0, 1]},
    "cohere2": {**_MIXED},
    "mixtral": {**SIZES, **_EXPERTS, "sliding_window": 5},
}
"""Families with unusual layers: logit caps, attention sinks, shared layers, values of another size
than keys, routers, and layers without positions."""


def placed(model: Any) -> Any:
    """Move the model to `DEVICE`."""
    return model.to(DEVICE)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Create models on the CPU inside this context. Drafters are fitted there."""
    global DEVICE
    previous_device = DEVICE
    DEVICE = "cpu"
    try:
        yield
    finally:
        DEVICE = previous_device


def tiny(family: str, seed: int = 1, *, sharpness: float = 6.0, **sizes: Any) -> PreTrainedModel:
    """Create a random model of a family. The global seed is unchanged.

    Args:
        family: a model type of transformers; `FAMILIES` and `MORE` have the sizes of some.
        seed: seed of the weights.
        sharpness: factor of all weight matrices.
        sizes: entries of the config that differ from the family's.
    """
    all_families = {**FAMILIES, **MORE}
    entries = {
        **all_families.get(family, {}),
        **_NO_SPECIAL_TOKENS,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **sizes,
    }
    config = AutoConfig.for_model(family, **entries)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return placed(model)


def greedy_tokens(model: Any, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    """New tokens of transformers' own greedy `generate`, for one prompt alone."""
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        **options,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
