"""Attention of transformers models over a `KVState`: cache, masks, and grouped queries without copies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lightning_specdec.models.state import KVStorage, Slots

NAME = "lightning_specdec"
"""What transformers calls `grouped_attention`: the value of a config's `_attn_implementation`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
"""Families that see both ways; as decoders, some of them count positions from another number than 0."""
_OWN_MASKS = ("doge", "gpt_neo")
"""Families whose layers mask by themselves, besides the mask that they are given."""


class StateCache(Cache):
    """A cache of transformers whose layers write to and read from one call's slots of a storage."""

    def __init__(self, storage: KVStorage, slots: Slots, *, recorded: bool = False) -> None:
        super().__init__(layers=[])
        self.storage, self.slots, self.recorded = storage, slots, recorded

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.storage.update(layer_idx, self.slots, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, as transformers' "sdpa" and with its arguments, over a mask `[B, 1, T, S]`.

    With grouped queries (Ainslie et al. 2023) G query heads look at one key head, which transformers copies G times for
    each call over several tokens: more work than the attention itself on a long text. Here the G heads are laid one
    behind the other along the query axis, and only the mask's T rows are repeated.
    """
    batch, heads, num_tokens, size = query.shape
    groups = heads // key.shape[1]
    plain = (
        attention_mask is None or attention_mask.shape[1] != 1 or attention_mask.dtype == torch.bool
    )
    other = options.get("dropout") or any(
        options.get(name) is not None for name in ("is_causal", "position_bias")
    )
    if groups == 1 or plain or other:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * num_tokens, size),
        key,
        value,
        attn_mask=attention_mask if num_tokens == 1 else attention_mask.repeat(1, 1, groups, 1),
        scale=options.get("scaling"),
    )
    return output.reshape(batch, heads, num_tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_windows(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of attention layers that a model has, and how far back each looks (None: to the start).

    Raises:
        ValueError: it is no decoder, its state cannot go back, or it takes no positions.
    """
    implementation, window = (
        model.config._attn_implementation,
        getattr(config, "sliding_window", None),
    )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # A config of transformers' own may hold a window that its family does not have, and no layer heeds.
        known = hasattr(type(config), "sliding_window") or not type(config).__module__.startswith(
            "transformers."
        )
        sliding = window is not None and known and getattr(config, "use_sliding_window", True)
        kinds = [_SLIDING if sliding else _FULL]
    foreign = sorted({*kinds} - {_FULL, _SLIDING})
    two_sided = config.model_type in _ENCODERS or getattr(
        config, "use_bidirectional_attention", None
    ) in (True, "all")
    own_masks = getattr(config, "alibi", False) or config.model_type in _OWN_MASKS
    reason = None
    if config.is_encoder_decoder or two_sided or model.get_output_embeddings() is None:
        reason = "is not a causal language model: use a decoder-only one"
    elif foreign or getattr(model, "_is_stateful", False):
        layers = ", ".join(foreign) or "recurrent"
        reason = f"has {layers} layers, and their state cannot go back: speculative decoding needs attention"
    elif own_masks or "position_ids" not in inspect.signature(model.forward).parameters:
        reason = "takes no masks or position_ids, so rows of different lengths cannot share a call: use another"
    elif implementation not in ("eager", "sdpa", NAME):
        reason = f'runs on {implementation}, which takes no mask of ours: load it with attn_implementation="sdpa"'
    if reason is not None:
        raise ValueError(f"{type(model).__name__} {reason}")
    return {kind: window if kind == _SLIDING else None for kind in dict.fromkeys(kinds)}


def max_positions(config: PreTrainedConfig) -> int | None:
    """Most tokens of a text. Rotary scalings that change with the text's length stay below the change."""
    scaling = getattr(config, "rope_parameters", None) or {}
    original = (
        scaling.get("original_max_position_embeddings") if isinstance(scaling, Mapping) else None
    )
    if original is not None and scaling.get("rope_type") in ("longrope", "dynamic"):
        return int(original)
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)
