"""Writes a tiny random Llama as llama.cpp does: one GGUF file with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from families import tiny
from gguf import GGMLQuantizationType, quants
from tiny_tokenizers import byte_level

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(path: Path, *, quantized: bool = True, seed: int = 1) -> str:
    """Write a model, with matrices of eight bits if `quantized`; returns its path."""
    tokenizer = byte_level()
    # Blocks of 32 numbers share a scale.
    model = tiny("llama", seed, vocab_size=len(tokenizer), intermediate_size=64)
    config: Any = model.config

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        tensor_name = _gguf_name(name.removesuffix(".weight")) + ".weight"
        if quantized and values.ndim == 2:
            blocks = quants.quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor_name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _gguf_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest]}"


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    types = [3 if token in special else 1 for token in range(len(tokens))]
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


def _merges(tokenizer: Any) -> list[list[str]]:
    import json

    merges: list[Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
