"""Tiny random models of the families that are decoded row by row, over transformers' own caches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from families import LATENT, tiny

from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM

PROMPTS = [[3], [1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, *range(20, 42)]]
"""Ragged: one of a single token, and one that is longer than what is read twice."""
_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA4_LAYERS: dict[str, Any] = {
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 0, 1, 0],
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
}
"""Layers of a Llama 4 of four layers."""
_LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_DELTA_RULE = {
    **_SIZES,
    **_LAYERS,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "state_size": 8,
    "expand": 2,
    "time_step_rank": 4,
}
_HYBRID_MAMBA = {
    **_SIZES,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": {**_DELTA_RULE, **_EXPERTS},
    "kimi_linear": {
        **_SIZES,
        **_LAYERS,
        **_EXPERTS,
        **LATENT,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "lfm2": {
        **_SIZES,
        "layer_types": ["conv", "full_attention"] * 2,
        "full_attn_idxs": [1, 3],
        "block_multiple_of": 8,
    },
    "falcon_h1": {**_HYBRID_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {**_HYBRID_MAMBA, **_LAYERS, **_EXPERTS, "shared_intermediate_size": 24},
    "bamba": {**_HYBRID_MAMBA, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        **_SIZES,
        "head_dim": 8,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "olmo_hybrid": {
        **_SIZES,
        **_LAYERS,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "zamba2": {
        **_SIZES,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "adapter_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""Families with recurrent and attention layers."""
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "rwkv": {
        "vocab_size": 67,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "context_length": 128,
    },
    "xlstm": {
        "vocab_size": 67,
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_heads": 2,
        "num_blocks": 2,
        "ffn_round_up_to_multiple_of": 16,
        "chunk_size": 8,
    },
}
"""Families without attention."""
ONE_TOKEN: dict[str, dict[str, Any]] = {
    "mamba": _MAMBA,
    "jamba": {
        **_SIZES,
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        **_SIZES,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "minimax": {**_SIZES, **_EXPERTS, **_LAYERS, "head_dim": 8, "block_size": 8},
    "deepseek_v32": {
        **_SIZES,
        **_EXPERTS,
        **LATENT,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "index_topk": 8,
        "index_head_dim": 8,
        "index_n_heads": 8,
        "layer_types": ["indexed_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "recurrent_gemma": {
        **_SIZES,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 6,
        "block_types": ["recurrent", "attention"],
    },
}
"""Families whose calls on several tokens are wrong, or choose other keys by their shape."""
ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 67, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "mpt": {"vocab_size": 67, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
    "gpt_neo": {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 6,
        "max_position_embeddings": 128,
    },
    "llama4_text": {**_SIZES, **LLAMA4_LAYERS, "head_dim": 8},
}
"""Families with masks or positions of their own."""
FAMILIES = {**HYBRID, **RECURRENT, **ONE_TOKEN, **ATTENTION}


@functools.cache
def reference(family: str) -> Any:
    """The model as transformers runs it. Read it, do not write to it."""
    with torch.inference_mode(False):
        return tiny(family, **FAMILIES[family])


def other(family: str, seed: int, noise: float) -> HuggingFaceLM:
    """A model whose weights are those of `reference` with some noise."""
    return HuggingFaceLM(noisy(tiny(family, **FAMILIES[family]), seed, noise))


@torch.no_grad()
def noisy(model: Any, seed: int, noise: float) -> Any:
    """Add noise to the weights of a model, in place, relative to their spread."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.add_(drawn * noise * weight.std().nan_to_num())
    return model


@functools.cache
def ours(family: str) -> HuggingFaceLM:
    """The same weights with our interface."""
    with torch.inference_mode(False):
        return HuggingFaceLM(tiny(family, **FAMILIES[family]))


@functools.cache
def standard(family: str, num_new: int, **options: Any) -> list[list[int]]:
    """Standard decoding of `PROMPTS`, each alone."""
    target: LanguageModel = ours(family)
    tokens = []
    for index, prompt in enumerate(PROMPTS):
        result = autoregressive_decode(
            target, [prompt], indices=[index], max_new_tokens=num_new, **options
        )
        tokens += result.tokens
    return tokens
