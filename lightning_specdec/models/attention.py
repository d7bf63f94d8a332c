"""Attention for transformers models that does not repeat the keys that several query heads share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "lightning_specdec"
"""What transformers calls it: the value of a config's `_attn_implementation`."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, as transformers' "sdpa" and with its arguments, over a mask `[B, 1, T, S]`.

    Theory: with grouped queries (Ainslie et al. 2023) G query heads look at one key head. transformers copies that head
    G times for each call over more than one token, which costs more than the attention itself once the text is long.
    Here the G heads are laid one behind the other along the query axis, so a key head meets all its queries in one
    product, and the mask is what is repeated: T rows of it.
    """
    batch, heads, num_tokens, size = query.shape
    groups = heads // key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1] != 1 or attention_mask.dtype == torch.bool
    if groups == 1 or plain or dropout or any(value is not None for value in (is_causal, options.get("position_bias"))):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
    assert attention_mask is not None
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * num_tokens, size),
        key,
        value,
        attn_mask=attention_mask if num_tokens == 1 else attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return output.reshape(batch, heads, num_tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
