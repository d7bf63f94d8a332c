"""What an engine computes from an exported draft, as a second implementation in plain torch.

It reads the exported files and shares no code with their writer, so that an error of one is noticed
by the other. Steps are named as in vLLM's models of EAGLE-3, DSpark and Medusa. Everything is
computed in float64, for one text at a time.

Shapes: T tokens of a text, N entries of a layer, H heads, E size of a head, D hidden size,
K draft tokens, V vocabulary of the target, W vocabulary of the draft.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def hidden_states(model: Any, tokens: Sequence[int]) -> list[Float[Tensor, "T D"]]:
    """Return the input of each layer of a transformers model, then the input of its output head."""
    batch = torch.tensor([list(tokens)])
    with torch.no_grad():
        output = model(batch, output_hidden_states=True, use_cache=False)
    return [states[0].double() for states in output.hidden_states]


def _read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def _read_weights(directory: Path) -> dict[str, Tensor]:
    weights = load_file(directory / "model.safetensors")
    return {name: weight.double() for name, weight in weights.items()}


class Reference(ABC):
    """A draft, computed from the config and the tensors in its directory."""

    def __init__(self, directory: Path) -> None:
        self.config = _read_config(directory)
        self.weights = _read_weights(directory)
        # speculators nests the sizes of the layers, SpecForge does not.
        self.sizes = self.config.get("transformer_layer_config", self.config)

    @abstractmethod
    def logits(
        self,
        states: Sequence[Float[Tensor, "T D"]],
        table: Float[Tensor, "V D"],
        text: Sequence[int],
        num_tokens: int,
    ) -> Float[Tensor, "K V"]:
        """Return the scores of one round's draft tokens, the last `num_tokens` of a text.

        Args:
            states: `hidden_states` of the text.
            table: the target's embeddings.
            text: the tokens of the target, then the draft tokens.
        """

    def _linear(self, states: Float[Tensor, "N _"], name: str) -> Float[Tensor, "N _"]:
        """Apply a linear layer without bias."""
        weight = self.weights[f"{name}.weight"]
        return states @ weight.T

    def _rms_norm(self, states: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        epsilon = self.sizes["rms_norm_eps"]
        mean_square = states.square().mean(-1, keepdim=True)
        normalized = states * (mean_square + epsilon).rsqrt()
        return normalized * weight

    def _rotary_embedding(
        self,
        heads: Float[Tensor, "H N E"],
        first_position: int = 0,
    ) -> Float[Tensor, "H N E"]:
        """Rotate queries or keys by their positions, which ascend from `first_position`.

        Coordinates i and i + E / 2 are a pair, which is rotated as one complex number.
        """
        _, num_entries, head_size = heads.shape
        half = head_size // 2

        # Each pair of coordinates has its own frequency, from 1 down to almost 1 / rope_theta.
        rope_theta = self.sizes["rope_parameters"]["rope_theta"]
        exponents = torch.arange(half, dtype=torch.float64) / half
        frequencies = rope_theta**-exponents
        positions = torch.arange(first_position, first_position + num_entries)
        angles = positions[:, None] * frequencies

        # Multiplication by a complex number of length 1 rotates by its angle.
        rotations = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.complex(heads[..., :half], heads[..., half:])
        rotated = pairs * rotations
        return torch.cat((rotated.real, rotated.imag), -1)

    def _queries(self, states: Float[Tensor, "N _"], layer: str) -> Float[Tensor, "H N E"]:
        queries = self._linear(states, f"{layer}.self_attn.q_proj")
        return self._split_heads(queries, self.sizes["num_attention_heads"])

    def _keys(self, states: Float[Tensor, "N _"], layer: str) -> Float[Tensor, "H N E"]:
        keys = self._linear(states, f"{layer}.self_attn.k_proj")
        return self._key_value_heads(keys)

    def _values(self, states: Float[Tensor, "N _"], layer: str) -> Float[Tensor, "H N E"]:
        values = self._linear(states, f"{layer}.self_attn.v_proj")
        return self._key_value_heads(values)

    def _key_value_heads(self, states: Float[Tensor, "N _"]) -> Float[Tensor, "H N E"]:
        """Split keys or values into heads, and repeat them for the query heads that share one."""
        num_heads = self.sizes["num_key_value_heads"]
        heads = self._split_heads(states, num_heads)
        group_size = self.sizes["num_attention_heads"] // num_heads
        return heads.repeat_interleave(group_size, 0)

    def _split_heads(self, states: Float[Tensor, "N _"], num_heads: int) -> Float[Tensor, "_ N E"]:
        num_entries = len(states)
        heads = states.reshape(num_entries, num_heads, -1)
        return heads.transpose(0, 1)

    def _attention(
        self,
        queries: Float[Tensor, "H N E"],
        keys: Float[Tensor, "H S E"],
        values: Float[Tensor, "H S E"],
        mask: Bool[Tensor, "N S"],
    ) -> Float[Tensor, "N HE"]:
        """Return scaled dot-product attention, with the heads joined; `mask` is True if visible."""
        head_size = queries.shape[-1]
        scores = queries @ keys.transpose(1, 2) / math.sqrt(head_size)
        scores = scores.masked_fill(~mask, -torch.inf)
        attended = scores.softmax(-1) @ values
        return attended.transpose(0, 1).flatten(1)

    def _after_attention(
        self,
        residual: Float[Tensor, "N D"],
        attended: Float[Tensor, "N HE"],
        layer: str,
    ) -> Float[Tensor, "N D"]:
        """Return the output of a Llama layer from its residual stream and its attention."""
        hidden = residual + self._linear(attended, f"{layer}.self_attn.o_proj")

        normed = self._rms_norm(hidden, f"{layer}.post_attention_layernorm")
        gate = self._linear(normed, f"{layer}.mlp.gate_proj")
        up = self._linear(normed, f"{layer}.mlp.up_proj")
        down = self._linear(functional.silu(gate) * up, f"{layer}.mlp.down_proj")
        return hidden + down

    def _to_target_vocabulary(
        self,
        draft_logits: Float[Tensor, "K W"],
        vocab_size: int,
    ) -> Float[Tensor, "K V"]:
        """Return the logits by the target's token ids; tokens that the draft lacks have -inf."""
        if "d2t" not in self.weights:
            return draft_logits

        # The file contains the differences of a token's ids in both vocabularies.
        num_tokens, draft_vocab_size = draft_logits.shape
        differences = self.weights["d2t"].long()
        target_ids = torch.arange(draft_vocab_size) + differences
        logits = draft_logits.new_full((num_tokens, vocab_size), -torch.inf)
        logits[:, target_ids] = draft_logits
        return logits


class Eagle3Reference(Reference):
    """An EAGLE-3 head: one decoder layer that feeds its output back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if "transformer_layer_config" in self.config:
            # speculators counts the inputs of the target's layers.
            self.layer = "layers.0"
            self.aux_layers = self.config["eagle_aux_hidden_state_layer_ids"]
        else:
            # SpecForge counts their outputs. The output of layer i is the input of layer i + 1.
            self.layer = "midlayer"
            output_layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            self.aux_layers = [layer_index + 1 for layer_index in output_layers]
        assert sorted(set(self.aux_layers)) == self.aux_layers, "engines sort the layers"

    def _combine_hidden_states(
        self, aux_states: list[Float[Tensor, "N D"]]
    ) -> Float[Tensor, "N D"]:
        """Return the head's features: hidden states of several target layers, joined by `fc`."""
        inputs = []
        for i, states in enumerate(aux_states):
            if self.config["fc_norm"]:
                states = self._rms_norm(states, f"fc_norm.{i}")
            inputs.append(states)
        return self._linear(torch.cat(inputs, -1), "fc")

    def _decoder_layer(
        self,
        embeddings: Float[Tensor, "N D"],
        features: Float[Tensor, "N D"],
    ) -> Float[Tensor, "N D"]:
        normed_embeddings = self._rms_norm(embeddings, f"{self.layer}.input_layernorm")
        normed_features = self._rms_norm(features, f"{self.layer}.hidden_norm")
        residual = normed_features if self.config["norm_before_residual"] else features

        attention_input = torch.cat((normed_embeddings, normed_features), -1)
        queries = self._queries(attention_input, self.layer)
        queries = self._rotary_embedding(queries)
        keys = self._keys(attention_input, self.layer)
        keys = self._rotary_embedding(keys)
        values = self._values(attention_input, self.layer)

        mask = self._causal_mask(len(attention_input))
        attended = self._attention(queries, keys, values, mask)
        return self._after_attention(residual, attended, self.layer)

    def _causal_mask(self, num_entries: int) -> Bool[Tensor, "N N"]:
        positions = torch.arange(num_entries)
        distance = positions[:, None] - positions
        mask = distance >= 0
        if self.sizes.get("layer_types") == ["sliding_attention"]:
            mask &= distance < self.sizes["sliding_window"]
        return mask

    def logits(
        self,
        states: Sequence[Float[Tensor, "T D"]],
        table: Float[Tensor, "V D"],
        text: Sequence[int],
        num_tokens: int,
    ) -> Float[Tensor, "K V"]:
        num_target_tokens = len(text) - num_tokens

        # The target has not read its last token, so its hidden states end one token earlier.
        num_read = num_target_tokens - 1
        aux_states = [states[layer_index][:num_read] for layer_index in self.aux_layers]
        features = self._combine_hidden_states(aux_states)

        draft_logits = []
        for i in range(num_tokens):
            # The feature at token j goes with the embedding of token j + 1.
            tokens = text[1 : num_target_tokens + i]
            embeddings = table[list(tokens)].double()
            last_hidden = self._decoder_layer(embeddings, features)[-1:]
            normed_hidden = self._rms_norm(last_hidden, "norm")
            next_logits = self._linear(normed_hidden, "lm_head")
            draft_logits.append(next_logits[0])

            # The head's output replaces the hidden states that the target has not computed.
            next_feature = normed_hidden if self.config["norm_output"] else last_hidden
            features = torch.cat((features, next_feature))
        return self._to_target_vocabulary(torch.stack(draft_logits), len(table))


class DSparkReference(Reference):
    """A DSpark draft that samples from its anchor: one pass over a block of masked tokens."""

    def logits(
        self,
        states: Sequence[Float[Tensor, "T D"]],
        table: Float[Tensor, "V D"],
        text: Sequence[int],
        num_tokens: int,
    ) -> Float[Tensor, "K V"]:
        assert self.config["sample_from_anchor"], "the anchor scores the first draft token"
        assert not self.sizes["is_causal"], "the tokens of a block see each other"
        num_target_tokens = len(text) - num_tokens
        anchor_position = num_target_tokens - 1

        context = self._context(states, anchor_position)
        hidden = self._block_embeddings(text[anchor_position])
        num_layers = len(self.sizes["layer_types"])
        for layer_index in range(num_layers):
            hidden = self._decoder_layer(layer_index, hidden, context)

        # A block may have more positions than tokens are drafted.
        normed = self._rms_norm(hidden, "norm")[:num_tokens]
        block_logits = self._linear(normed, "lm_head")

        # The Markov head adds a bias that depends on the token before each draft token.
        previous_tokens = text[anchor_position:-1]
        draft_logits = block_logits + self._markov_bias(previous_tokens)
        return self._to_target_vocabulary(draft_logits, len(table))

    def _context(
        self,
        states: Sequence[Float[Tensor, "T D"]],
        num_tokens: int,
    ) -> Float[Tensor, "N D"]:
        """Return what the block sees of the target: one feature for each token that it has read."""
        layers = self.config["aux_hidden_state_layer_ids"]
        aux_states = [states[layer_index][:num_tokens] for layer_index in layers]
        combined = self._linear(torch.cat(aux_states, -1), "fc")
        return self._rms_norm(combined, "hidden_norm")

    def _block_embeddings(self, anchor: int) -> Float[Tensor, "N D"]:
        """Return the embeddings of a block: the target's last token, then masks."""
        num_masks = self.config["block_size"] - 1
        masks = [self.config["mask_token_id"]] * num_masks
        table = self.weights["embed_tokens.weight"]
        return table[[anchor, *masks]]

    def _decoder_layer(
        self,
        layer_index: int,
        hidden: Float[Tensor, "N D"],
        context: Float[Tensor, "T D"],
    ) -> Float[Tensor, "N D"]:
        layer = f"layers.{layer_index}"
        normed = self._rms_norm(hidden, f"{layer}.input_layernorm")

        # Queries are of the block only, keys and values of the context too.
        queries = self._queries(normed, layer)
        queries = self._rms_norm(queries, f"{layer}.self_attn.q_norm")
        queries = self._rotary_embedding(queries, first_position=len(context))

        context_and_block = torch.cat((context, normed))
        keys = self._keys(context_and_block, layer)
        keys = self._rms_norm(keys, f"{layer}.self_attn.k_norm")
        keys = self._rotary_embedding(keys)
        values = self._values(context_and_block, layer)

        key_positions = torch.arange(len(context_and_block))
        query_positions = key_positions[len(context) :]
        mask = self._block_mask(layer_index, query_positions, key_positions)
        attended = self._attention(queries, keys, values, mask)
        return self._after_attention(hidden, attended, layer)

    def _block_mask(
        self,
        layer_index: int,
        query_positions: Int[Tensor, "N"],
        key_positions: Int[Tensor, "S"],
    ) -> Bool[Tensor, "N S"]:
        """Return which keys a block's tokens see: all, or those within a window on either side."""
        distance = (query_positions[:, None] - key_positions).abs()
        if self.sizes["layer_types"][layer_index] == "sliding_attention":
            return distance < self.sizes["sliding_window"]
        return torch.ones_like(distance, dtype=torch.bool)

    def _markov_bias(self, previous_tokens: Sequence[int]) -> Float[Tensor, "K W"]:
        table = self.weights["markov_head.markov_w1.weight"]
        embeddings = table[list(previous_tokens)]
        return self._linear(embeddings, "markov_head.markov_w2")


def medusa_logits(directory: Path, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "H T W"]:
    """Return what each of Medusa's heads scores from the target's last hidden states."""
    config = _read_config(directory)
    weights = _read_weights(directory)
    num_blocks = config["medusa_num_layers"]

    head_logits = []
    for head_index in range(config["medusa_num_heads"]):
        states = hidden
        for block_index in range(num_blocks):
            block = f"{head_index}.{block_index}.linear"
            weight = weights[f"{block}.weight"]
            bias = weights[f"{block}.bias"]
            linear = states @ weight.T + bias
            states = states + functional.silu(linear)

        output_weight = weights[f"{head_index}.{num_blocks}.weight"]
        head_logits.append(states @ output_weight.T)
    return torch.stack(head_logits)
