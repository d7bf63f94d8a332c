"""Multi-token prediction layers, which some checkpoints hold beside the layers of their model.

transformers leaves them out of the model, and builds and loads them for its own `use_mtp`. Here
they read ragged rows over the buffers of a `KVState`.

Entry j of layer i combines the embedding of token j + 1 + i with a hidden state that predicts this
token: the target's at token j for i = 0, else the output of layer i - 1 at entry j. The output of
layer i scores token j + 2 + i (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

Shapes: B rows, T entries, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_specdec.models.base import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import quiet
from lightning_specdec.models.state import KVState, KVStorage, Slots

with quiet():
    from lightning_specdec.models.attention import StateCache
    from lightning_specdec.models.layers import additive, cache_name

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PreTrainedConfig

FULL = "full_attention"
# In transformers 5.24, the masks of "hybrid_sliding" prediction layers have no window, so that
# their output depends on how a text is cut into calls. Here the window of the layer holds.
_SLIDING = ("sliding_attention", "hybrid_sliding")
_WITH_CONVOLUTIONS = ("hybrid", "hybrid_sliding")
"""Kinds of layers that also have short convolutions, and positions relative to each row's."""
KINDS = (FULL, *_SLIDING, *_WITH_CONVOLUTIONS)
_WITHOUT_MEMORY = ("moe", "mlp")
"""Kinds of blocks that read each token alone."""
BLOCK_KINDS = "mtp_layers_block_type"
"""The setting of Nemotron-H that lists the blocks of a prediction layer."""
_FIRST_CONVOLUTION = -2
"""Number of the buffer of a first convolution among the layers of a storage; others follow below.
"""
_MOST_CONVOLUTIONS = 16
"""Most convolutions of a layer."""


class _RowCache(StateCache):
    """The cache of a layer with convolutions, for a single row.

    A convolution's inputs are kept for each entry, like keys, so that entries can be read again.

    Args:
        start: position of the first entry.
    """

    def __init__(self, storage: KVStorage, slots: Slots, start: int) -> None:
        super().__init__(storage, slots)
        self.start = start

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that the inputs before the first entry are asked for by `update_conv_state`."""

    def update_conv_state(
        self,
        conv_states: Float[Tensor, "1 D T"],
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int = 1,
        **options: Any,
    ) -> Float[Tensor, "1 D _"]:
        """Store a convolution's inputs. Returns them after those of the entries before."""
        number = _FIRST_CONVOLUTION - (layer_idx * _MOST_CONVOLUTIONS + state_idx)
        # Stored as keys of one head; there are no values.
        keys = conv_states.transpose(1, 2)[:, None]
        all_keys, _ = self.storage.update(number, self.slots, keys, keys[..., :0])
        first_before = max(0, self.start - conv_kernel_size)
        before = all_keys[:, 0, first_before : self.start].transpose(1, 2)
        return torch.cat((before, conv_states), dim=-1)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Keys are at the positions of their entries' tokens, as queries are.
        return self.slots.span, layer_idx + 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start + layer_idx + 1


class Blocks(nn.Module):
    """Blocks of a model that make up one prediction layer, as in Nemotron-H.

    Args:
        config: names the kinds of the blocks of all prediction layers.
        index: of the prediction layer.
    """

    block_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        num_blocks = len(config.layer_types) // config.num_mtp_layers
        first = index * num_blocks
        self.blocks = nn.ModuleList(
            self.block_class(config, number) for number in range(first, first + num_blocks)
        )

    def forward(self, hidden: Float[Tensor, "B T D"], **options: Any) -> Float[Tensor, "B T D"]:
        for block in self.blocks:
            hidden = block(hidden, **options)
        return hidden


def _kinds(config: PreTrainedConfig, num_layers: int) -> list[str]:
    """The kind of the attention of each prediction layer.

    Raises:
        ValueError: a kind that these layers cannot have here.
    """
    kinds = list(getattr(config, "layer_types", None) or [FULL] * num_layers)
    if getattr(config, BLOCK_KINDS, None) is not None:
        # A block without attention needs no mask.
        kinds = [kind for kind in kinds if kind not in _WITHOUT_MEMORY]
    other_kinds = sorted({*kinds} - {*KINDS})
    if other_kinds:
        raise ValueError(f"prediction layers of the kind {other_kinds[0]} are not supported")
    if len(kinds) != num_layers:
        raise ValueError("prediction layers with several or no attentions are not supported")
    return kinds


class MtpNetwork(nn.Module):
    """The multi-token prediction layers of a checkpoint.

    Embedding, rotary positions, and output head are the target's, which each call names.

    Args:
        model: the layers as transformers builds them, an `MtpModel`.

    Raises:
        ValueError: a layer is of another kind than attention and short convolutions.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.layers: nn.ModuleList = model.layers
        self.shared_norm: nn.Module | None = getattr(model, "shared_post_norm", None)
        """Norm that all layers share; None if each has its own."""
        rotary_settings = getattr(self.config, "rope_parameters", None) or {}
        self.has_rotary_kinds = bool(self.config.nested_rope_parameter_keys(rotary_settings))
        """Whether the rotary positions depend on the kind of the layer."""
        self.kinds = _kinds(self.config, len(self.layers))
        self.reads_rows = any(kind in _WITH_CONVOLUTIONS for kind in self.kinds)
        """Whether each row is read in a separate call."""
        self._cache_name = cache_name(type(self.layers[0]).forward) or "past_key_values"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        first_layer: Any = self.layers[0]
        return first_layer.enorm.weight.dtype

    def window(self, index: int) -> int | None:
        """The attention window of a layer, in entries; None if it is unlimited."""
        if self.kinds[index] not in _SLIDING:
            return None
        return getattr(self.config, "sliding_window", None)

    def check_target(self, target: LanguageModel) -> None:
        """Raise ValueError unless these layers can read the hidden states of this target."""
        if not isinstance(target, HuggingFaceLM):
            raise ValueError(f"{type(target).__name__} has no multi-token prediction layers")
        if target.hidden_size != self.config.hidden_size:
            raise ValueError(
                f"the prediction layers are for a hidden size of {self.config.hidden_size}, the "
                f"target has {target.hidden_size}: use the target of their checkpoint"
            )

    def slots(self, state: KVState, num_entries: int) -> list[Slots]:
        """The slots of the next entries of every row, for each call that reads them."""
        if not self.reads_rows:
            return [state.slots(num_entries)]
        return [
            state.slots(num_entries, [length], row) for row, length in enumerate(state.consumed)
        ]

    def read(
        self,
        target: HuggingFaceLM,
        index: int,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
        slots: Sequence[Slots],
        storage: KVStorage,
    ) -> Float[Tensor, "B T D"]:
        """One layer's output for T entries of each row.

        Args:
            index: number of the layer, whose keys and values are those of this layer of `storage`.
            tokens: token j + 1 + index for each entry j.
            hidden: the target's hidden states at tokens j, or the output of the layer before.
            slots: of the entries, as `slots` returns them.
        """
        outputs = []
        for part in slots:
            part_tokens = tokens[part.rows]
            part_hidden = hidden[part.rows]
            outputs.append(self._call(target, index, part_tokens, part_hidden, part, storage))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _call(
        self,
        target: HuggingFaceLM,
        index: int,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
        slots: Slots,
        storage: KVStorage,
    ) -> Float[Tensor, "B T D"]:
        """One call of a layer."""
        embedded = _embeddings(target, tokens).to(self.dtype)
        # The position of an entry is that of its token.
        positions = slots.positions + 1 + index
        if target.max_positions is not None:
            positions = positions.clamp(max=target.max_positions - 1)

        cache = StateCache(storage, slots)
        if self.reads_rows:
            cache = _RowCache(storage, slots, int(slots.positions[0, 0]))
        output: Tensor = self.layers[index](
            embedded,
            hidden.to(self.dtype),
            position_embeddings=self._rotation(target, index, embedded, positions),
            attention_mask=additive(storage.mask(slots, self.window(index)), self.dtype),
            position_ids=positions,
            **{self._cache_name: cache},
        )
        if self.shared_norm is not None:
            output = self.shared_norm(output)
        return output

    def _rotation(
        self,
        target: HuggingFaceLM,
        index: int,
        embedded: Float[Tensor, "B T D"],
        positions: Int[Tensor, "B T"],
    ) -> Any:
        """The rotation of positions that the target computes; None if it has none."""
        decoder: Any = target.model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        if rotary is None:
            return None
        if self.has_rotary_kinds:
            return rotary(embedded, position_ids=positions, layer_type=self.kinds[index])
        return rotary(embedded, position_ids=positions)

    def logits(
        self,
        target: HuggingFaceLM,
        hidden: Float[Tensor, "B N D"],
    ) -> Float[Tensor, "B N V"]:
        """Scores of the next token by the target's output head, from a layer's output."""
        head: Any = target.model.get_output_embeddings()
        multiplier = getattr(self.config, "logits_mup_width_multiplier", None)
        if multiplier is not None:
            hidden = hidden / multiplier
        logits: Tensor = head(hidden.to(target.dtype))
        num_tokens = getattr(self.config, "unpadded_vocab_size", None)
        return logits if num_tokens is None else logits[..., :num_tokens]

    def read_text(
        self,
        target: HuggingFaceLM,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
    ) -> list[Float[Tensor, "B _ D"]]:
        """Each layer's output on whole texts, for training.

        Output j of layer i scores token j + 2 + i. A layer has one entry less than the one before.

        Args:
            hidden: the target's hidden states at these tokens.
        """
        outputs = []
        batch_size, num_tokens = tokens.shape
        for index in range(self.num_layers):
            num_entries = num_tokens - 1 - index
            if num_entries < 1:
                outputs.append(hidden[:, :0])
                continue
            state = KVState(batch_size, num_entries, device=tokens.device)
            hidden = self.read(
                target,
                index,
                tokens[:, 1 + index :],
                hidden[:, :num_entries],
                self.slots(state, num_entries),
                state.storage,
            )
            outputs.append(hidden)
        return outputs


def _embeddings(target: HuggingFaceLM, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """The target's embeddings, without a norm that some models have inside of them."""
    embedding: Any = target.model.get_input_embeddings()
    if hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(tokens, embedding.weight)
    return target.embeddings(tokens)
