"""Tiny random models of transformers' families, sharpened so that their outputs wander."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES},
    "qwen2": {**_SIZES},
    "qwen3": {**_SIZES, "head_dim": 8},
    "mistral": {**_SIZES, "sliding_window": 5},
    "phi3": {**_SIZES, "pad_token_id": 0},
    "gpt2": {"vocab_size": 67, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96},
    "gpt_neox": {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"},
    "gemma3_text": {
        **_SIZES,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""What sets each family apart is in it: shared key heads, sliding windows of 5 tokens, learned positions."""


def tiny(family: str, seed: int = 1, *, sharpness: float = 6.0, **sizes: Any) -> PreTrainedModel:
    """A random model of that family; the global seed stays as it was."""
    config = AutoConfig.for_model(
        family, **{**FAMILIES[family], **_NONE, "pad_token_id": 0, "tie_word_embeddings": False, **sizes}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return model
