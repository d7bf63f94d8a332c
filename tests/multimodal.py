"""Tiny random models that also read images, as `AutoModelForImageTextToText` makes them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from families import greedy_tokens
from row_families import LLAMA4_LAYERS
from tiny_tokenizers import byte_level
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from lightning_specdec.models.model_config import quiet

_TEXT: dict[str, Any] = {
    "vocab_size": 328,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {
    "image_token_id": 327,
    "video_token_id": 326,
    "vision_start_token_id": 325,
    "vision_end_token_id": 324,
}
_SECTIONED_POSITIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
_MIXED_LAYERS = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral"},
        "image_token_index": 327,
    },
    "gemma3": {
        "text_config": {**_TEXT, **_MIXED_LAYERS, "model_type": "gemma3_text"},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_id": 327,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            **_MIXED_LAYERS,
            "model_type": "gemma4_text",
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 328,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {**_VISION, "model_type": "gemma4_vision"},
        "audio_config": None,
        "image_token_id": 327,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 327,
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "smolvlm_vision"},
        "image_token_id": 327,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_SECTIONED_POSITIONS, "model_type": "qwen2_5_vl_text"},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0], "window_size": 28},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, **_SECTIONED_POSITIONS, "model_type": "qwen3_vl_text"},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": _QWEN_VISION,
        **_QWEN_TOKENS,
    },
    "lfm2_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 8,
        },
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model"},
        "image_token_id": 327,
    },
    "step3p7": {
        "text_config": {
            **_TEXT,
            **_MIXED_LAYERS,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 24,
        },
        "vision_config": _VISION,
        "image_token_id": 327,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            **LLAMA4_LAYERS,
            "model_type": "llama4_text",
        },
        "vision_config": {
            **_VISION,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
        "image_token_index": 327,
    },
}
"""Configs by family. Some have a text class of their own, others can only be loaded whole."""
_SEEDS = {"mistral3": 1, "smolvlm": 2, "llava": 3}
"""Seeds of the weights where those of seed 0 write few different tokens."""
PROMPTS = [
    [5],
    [7, 21, 9, 40, 7, 21, 9, 40, 7],
    [11, 52, 3, 90, 64, 11, 52, 3, 77, 101, 23, 11, 52],
]
"""Ragged, with repetitions that prompt lookup finds."""


def multimodal(family: str, **text_settings: Any) -> Any:
    """A tiny model of a family. The global seed is unchanged.

    Args:
        text_settings: of the text part, where they differ from the family's.
    """
    settings = FAMILIES[family]
    text_config = {**settings["text_config"], **text_settings}
    values = {**settings, "text_config": text_config, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **values)
    with torch.random.fork_rng():
        torch.manual_seed(_SEEDS.get(family, 0))
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@functools.cache
def reference(family: str) -> Any:
    """The part of the model that transformers generates text with. Read it, do not write to it."""
    with torch.inference_mode(False):
        model = multimodal(family)
    if family == "llama4":
        # transformers 5.24 fails in the whole model: it reads the images of a text.
        return model.language_model
    return model


def generated(family: str, num_new: int) -> list[list[int]]:
    """What transformers' own greedy decoding writes after each prompt."""
    return [greedy_tokens(reference(family), prompt, num_new) for prompt in PROMPTS]


def write_multimodal(path: Path, family: str, chat_template: str | None = None) -> str:
    """Write a model and a byte-level tokenizer as `save_pretrained` does. Returns the path."""
    tokenizer = byte_level() if chat_template is None else byte_level(chat_template=chat_template)
    with quiet():
        multimodal(family).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)
