"""Attention of transformers models over a `KVState`: cache, masks, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lightning_specdec.models.layers import cache_name, parameter_names
from lightning_specdec.models.packed import computes_natively
from lightning_specdec.models.state import KVStorage, Slots
from lightning_specdec.models.weights import ROPE_TYPE

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NAME = "lightning_specdec"
"""Name of `grouped_attention` in transformers: the value of `config._attn_implementation`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
"""Families with two-sided attention. As decoders, some of them do not count positions from 0."""
_OWN_POSITIONS = ("kosmos-2", "kosmos-2.5")
"""Families whose positions begin after the number of the padding token. They accept others, which
transformers' generation does not pass."""
_READ_WHOLE_TEXTS = ("cpmant",)
"""Families that take the whole text in every call, although they have a cache."""
_SCALED_KINDS = ("linear", "yarn", "llama3")
"""Rotary scalings that compute the same function of the positions for texts of any length."""
_OWN_MASKS = ("doge", "gpt_neo")
"""Families whose layers apply another mask in addition to the one that is passed."""
_GENERATION_STEPS = ("generate", "_prefill", "_sample")
"""Methods of transformers' generation. A family that replaces one does more than to choose a token
after each forward pass: it fills in a block of tokens, or treats the prompt in another way."""


class StateCache(Cache):
    """A cache of transformers whose layers write to and read from one call's slots of a storage."""

    def __init__(self, storage: KVStorage, slots: Slots, *, recorded: bool = False) -> None:
        super().__init__(layers=[])
        self.storage = storage
        self.slots = slots
        self.recorded = recorded

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return self.storage.update(layer_idx, self.slots, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Positions and masks are passed with every call, so that no length is read.
        return 0


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the arguments of transformers' "sdpa".

    With grouped queries (Ainslie et al. 2023), G query heads share a key head. transformers copies
    each key head G times for a call over several tokens, which takes longer than the attention
    itself on a long text. Here the G query heads are laid one after another along the query axis,
    and only the T rows of the mask are repeated.

    Args:
        attention_mask: `[B, 1, T, S]`, to be added to the scores; or `continued_mask`.
    """
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        return _continued_attention(query, key, value, options), None

    batch_size, num_heads, num_tokens, head_size = query.shape
    num_key_heads = key.shape[1]
    num_groups = num_heads // num_key_heads

    has_additive_mask = (
        attention_mask is not None
        and attention_mask.shape[1] == 1
        and attention_mask.dtype != torch.bool
    )
    has_special_option = bool(options.get("dropout"))
    for name in ("is_causal", "position_bias"):
        has_special_option = has_special_option or options.get(name) is not None
    if num_groups == 1 or not has_additive_mask or has_special_option:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    assert attention_mask is not None
    if num_tokens > 1:
        attention_mask = attention_mask.repeat(1, 1, num_groups, 1)
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(batch_size, num_key_heads, num_groups * num_tokens, head_size),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    output = output.reshape(batch_size, num_heads, num_tokens, -1)
    return output.transpose(1, 2).contiguous(), None


def continued_mask(positions: Int[Tensor, "B T"], dtype: torch.dtype) -> Float[Tensor, "B 1 T 0"]:
    """A mask without columns. To `grouped_attention`, it means that the queries belong to the last
    of the keys, and that each attends to all keys up to its own.

    No other attention accepts it, so that none can misread it.
    """
    return torch.empty(len(positions), 1, positions.shape[1], 0, dtype=dtype).to(positions.device)


def _continued_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    options: dict[str, Any],
) -> Float[Tensor, "B T H D"]:
    """Causal attention of the last T of S tokens, on a CPU.

    The kernel of causal attention accepts no earlier keys, and one with a mask computes all scores
    and reads the mask for each head. So the queries attend to the earlier keys and to one another
    separately. The two outputs are added with the weights that the sums of their exponentiated
    scores have, as FlashAttention does for blocks of keys (Dao et al. 2022).
    """
    for name in ("position_bias", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"attention over a part of a prompt has no {name}")
    dtype = query.dtype
    if not computes_natively(dtype):
        # Converting takes less time than computing in a type that the processor does not have.
        query = query.float()
        key = key.float()
        value = value.float()

    num_tokens = query.shape[2]
    num_key_heads = key.shape[1]
    num_groups = query.shape[1] // num_key_heads
    num_earlier = key.shape[2] - num_tokens
    scale = options.get("scaling")

    recent_output, recent_sums = _flash_attention(
        query,
        key[:, :, num_earlier:],
        value[:, :, num_earlier:],
        is_causal=True,
        scale=scale,
    )
    # The query heads that share a key head are laid one after another along the query axis, which
    # makes the kernel's blocks of queries larger.
    earlier_output, earlier_sums = _flash_attention(
        query.unflatten(1, (num_key_heads, num_groups)).flatten(2, 3),
        key[:, :, :num_earlier],
        value[:, :, :num_earlier],
        is_causal=False,
        scale=scale,
    )

    # Views, since a copy of all heads would take longer than the sum.
    recent_by_group = recent_output.unflatten(1, (num_key_heads, num_groups))
    earlier_by_group = earlier_output.unflatten(2, (num_groups, num_tokens))
    recent_sums = recent_sums.unflatten(1, (num_key_heads, num_groups))
    earlier_sums = earlier_sums.unflatten(2, (num_groups, num_tokens))

    # The sums are logarithms, so this is the earlier keys' share of both sums.
    earlier_share = torch.sigmoid(earlier_sums - recent_sums)[..., None]
    recent_by_group.lerp_(earlier_by_group, earlier_share.to(recent_output.dtype))
    return recent_output.to(dtype).transpose(1, 2).contiguous()


def _flash_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """The kernel of scaled dot-product attention on a CPU, for G key heads that divide H.

    It also returns the logarithm of the sum of each query's exponentiated scores.
    """
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return output, sums


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_windows(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of attention layers of a model with their windows in tokens; None is unlimited.

    Empty for a model that `needs_row_caches`.

    Raises:
        ValueError: the model is not a decoder, or has no cache.
    """
    reason = _reason_to_refuse(model, config)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} {reason}")

    windows: dict[str, int | None] = {}
    if needs_row_caches(model, config):
        return windows
    for kind in _layer_kinds(config):
        windows[kind] = getattr(config, "sliding_window", None) if kind == _SLIDING else None
    return windows


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer; a single kind if the config lists none."""
    layer_kinds = getattr(config, "layer_types", None)
    if layer_kinds is not None:
        return list(layer_kinds)

    # A config of transformers may hold a window that its family does not have and ignores.
    is_of_transformers = type(config).__module__.startswith("transformers.")
    family_has_window = hasattr(type(config), "sliding_window") or not is_of_transformers
    uses_window = family_has_window and getattr(config, "use_sliding_window", True)
    if getattr(config, "sliding_window", None) is not None and uses_window:
        return [_SLIDING]
    return [_FULL]


def needs_row_caches(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether each row of a model is decoded over a separate cache, which transformers makes.

    These are models with recurrent layers, with sparse or chunked attention, with masks that depend
    on the shape of the cache, and those that accept no positions.
    """
    layer_kinds = _layer_kinds(config)
    if not {*layer_kinds} <= {_FULL, _SLIDING}:
        return True

    # Some classes have recurrent layers only if the config lists them.
    lists_layers = getattr(config, "layer_types", None) is not None
    if getattr(model, "_is_stateful", False) and not lists_layers:
        return True
    if getattr(config, "alibi", False) or config.model_type in _OWN_MASKS:
        return True
    return not accepts_positions(model)


def accepts_positions(model: PreTrainedModel) -> bool:
    """Whether transformers' own generation passes the positions of tokens to a model."""
    if model.config.model_type in _OWN_POSITIONS:
        return False
    return "position_ids" in parameter_names(type(model).forward)


def _reason_to_refuse(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Why a model cannot be decoded, as the rest of a sentence; None if it can."""
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional in (True, "all"):
        return (
            "lets the tokens of a prompt attend to later ones (use_bidirectional_attention in its "
            "config): use a model with causal attention"
        )
    is_encoder = config.model_type in _ENCODERS or config.is_encoder_decoder
    if is_encoder or model.get_output_embeddings() is None:
        return "is not a causal language model: use a decoder-only one"

    if _generates_in_its_own_way(type(model)):
        return "generates in a way that is only its own: use transformers' own generate"

    # The class counts: a user may have replaced the function of this one model.
    forward = type(model).forward
    has_cache = cache_name(forward) or cache_name(type(model.base_model).forward)
    if has_cache is None and "state" not in parameter_names(forward):
        return "keeps no key-value cache, which speculative decoding needs: use another model"
    if config.model_type in _READ_WHOLE_TEXTS:
        return "reads the whole text in every call: use another model"

    implementation = model.config._attn_implementation
    is_masked_by_us = not needs_row_caches(model, config)
    if is_masked_by_us and implementation not in ("eager", "sdpa", NAME):
        return (
            f"runs on {implementation}, which does not accept the masks of decoding: load it with "
            'attn_implementation="sdpa"'
        )
    return None


def _generates_in_its_own_way(model_class: type[PreTrainedModel]) -> bool:
    """Whether a family of transformers replaces a step of generation. Users' classes may."""
    if not model_class.__module__.startswith("transformers."):
        return False
    for name in _GENERATION_STEPS:
        if getattr(model_class, name, None) is not getattr(GenerationMixin, name, None):
            return True
    return False


_CHANGING_KINDS = ("dynamic", ROPE_TYPE)
"""Rotary scalings whose frequencies depend on the length of the text."""


def max_positions(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens of a text; None if unlimited.

    Rotary scalings that change with every length of the text stay below the change. Those that
    change once have a `position_switch`. The others count with the scaled length, also if the
    config states the original one.
    """
    max_length = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None)
    if not isinstance(scaling, Mapping):
        return None if max_length is None else int(max_length)

    kind = scaling.get("rope_type")
    original_length = scaling.get("original_max_position_embeddings")
    if kind == "dynamic" and original_length is not None:
        return int(original_length)
    if kind == ROPE_TYPE and original_length is not None:
        return max(int(original_length), int(max_length or 0))

    # Layers of several kinds have a scaling each. Which of them change is not followed.
    for layer_scaling in scaling.values():
        if isinstance(layer_scaling, Mapping) and layer_scaling.get("rope_type") in _CHANGING_KINDS:
            layer_length = layer_scaling.get("original_max_position_embeddings")
            lengths = [length for length in (max_length, layer_length) if length is not None]
            max_length = min(lengths, default=None)

    if max_length is None:
        return None
    factor = scaling.get("factor")
    # A config that states another original length has the scaled length as its own.
    is_original = original_length in (None, max_length)
    if kind in _SCALED_KINDS and factor is not None and is_original:
        return max(int(max_length), int(max_length * factor))
    return int(max_length)


def position_switch(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens of a text before all rotary frequencies change; None if they never
    do, up to `max_positions`.
    """
    scaling = getattr(config, "rope_parameters", None)
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") != ROPE_TYPE:
        return None
    original_length = scaling.get("original_max_position_embeddings")
    longest = max_positions(config)
    if original_length is None or longest is None or longest <= original_length:
        return None
    return int(original_length)


def positions_before_switch(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens of a text whose frequencies never change; None if unlimited.

    This is the context of readers that know one side of a `position_switch` only.
    """
    switch = position_switch(config)
    return max_positions(config) if switch is None else switch
