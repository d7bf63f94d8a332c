"""What an engine computes from an exported head, written out plainly: reads files, shares no code with their writer.

Shapes: T tokens of a text, N entries, H heads, E size of a head, D hidden size, W tokens of the draft, V of the target.
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
    from jaxtyping import Float


def hidden_states(model: Any, tokens: Sequence[int]) -> list[Float[Tensor, "T D"]]:
    """The inputs of every layer of a transformers model, and last what its output head reads."""
    with torch.no_grad():
        found = model(
            torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False
        ).hidden_states
    return [each[0].double() for each in found]


class Reference(ABC):
    """A draft from the config and tensors of its directory."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.weights = {
            name: value.double()
            for name, value in load_file(directory / "model.safetensors").items()
        }
        self.sizes = self.config.get("transformer_layer_config", self.config)

    @abstractmethod
    def logits(
        self,
        states: Sequence[Float[Tensor, "T D"]],
        table: Float[Tensor, "V D"],
        text: Sequence[int],
        num_tokens: int,
    ) -> Float[Tensor, "K V"]:
        """Scores of the last `num_tokens` of a text, a round's draft tokens; those before are the target's own.

        Args:
            states: `hidden_states` of the text.
            table: the target's embeddings.
        """

    def _norm(self, states: Tensor, name: str) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt()
        return states * scale * self.weights[f"{name}.weight"]

    def _rotated(self, heads: Float[Tensor, "H N E"]) -> Float[Tensor, "H N E"]:
        size, theta = heads.shape[-1], self.sizes["rope_parameters"]["rope_theta"]
        speeds = torch.tensor(
            [theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64
        )
        angles = torch.arange(heads.shape[1])[:, None] * speeds
        turned = torch.view_as_complex(torch.stack(heads.split(size // 2, -1), -1).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def _heads(self, states: Float[Tensor, "N D"], layer: str, name: str) -> Float[Tensor, "H N E"]:
        """Queries, keys or values (q, k, v) of a layer, keys and values as many times as queries share them."""
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        part = states @ self.weights[f"{layer}.self_attn.{name}_proj.weight"].T
        part = part.reshape(len(states), heads if name == "q" else groups, -1).transpose(0, 1)
        return part if name == "q" else part.repeat_interleave(heads // groups, 0)

    def _behind_attention(
        self, residual: Tensor, scores: Tensor, values: Tensor, layer: str
    ) -> Float[Tensor, "N D"]:
        """A layer's output, given its residual stream, what queries and keys say, and values."""
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        hidden = residual + mixed @ self.weights[f"{layer}.self_attn.o_proj.weight"].T
        inner = self._norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up, down = (
            self.weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )
        return hidden + (functional.silu(inner @ gate) * (inner @ up)) @ down

    def _spread(self, own: Float[Tensor, "K W"], vocab_size: int) -> Float[Tensor, "K V"]:
        """Logits by the target's numbers."""
        if "d2t" not in self.weights:
            return own
        numbers = torch.arange(own.shape[1]) + self.weights["d2t"].long()
        return own.new_full((len(own), vocab_size), -torch.inf).index_copy_(1, numbers, own)


class Eagle3Reference(Reference):
    """An EAGLE-3 head."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if self.sizes is not self.config:  # counted as inputs of layers
            self.layer, self.taps = "layers.0", self.config["eagle_aux_hidden_state_layer_ids"]
        else:  # counted as their outputs
            self.layer = "midlayer"
            self.taps = [
                each + 1 for each in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            ]
        assert sorted(set(self.taps)) == self.taps, "engines sort the layers"

    def _outputs(
        self, embedded: Float[Tensor, "N D"], features: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N D"]:
        normed = self._norm(features, f"{self.layer}.hidden_norm")
        residual = normed if self.config["norm_before_residual"] else features
        both = torch.cat((self._norm(embedded, f"{self.layer}.input_layernorm"), normed), -1)
        queries, keys, values = (self._heads(both, self.layer, name) for name in "qkv")
        scores = (
            self._rotated(queries)
            @ self._rotated(keys).transpose(1, 2)
            / math.sqrt(queries.shape[-1])
        )
        distance = torch.arange(len(both))[:, None] - torch.arange(len(both))
        window = (
            self.sizes["sliding_window"]
            if self.sizes.get("layer_types") == ["sliding_attention"]
            else len(both)
        )
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return self._behind_attention(residual, scores, values, self.layer)

    def logits(
        self, states: Sequence[Tensor], table: Tensor, text: Sequence[int], num_tokens: int
    ) -> Tensor:
        known = len(text) - num_tokens
        taps = [states[tap][: known - 1] for tap in self.taps]
        if self.config["fc_norm"]:
            taps = [self._norm(each, f"fc_norm.{i}") for i, each in enumerate(taps)]
        features, scored = torch.cat(taps, -1) @ self.weights["fc.weight"].T, []
        for i in range(num_tokens):
            hidden = self._outputs(table[list(text[1 : known + i])].double(), features)[-1:]
            normed = self._norm(hidden, "norm")
            scored.append((normed @ self.weights["lm_head.weight"].T)[0])
            features = torch.cat((features, normed if self.config["norm_output"] else hidden))
        return self._spread(torch.stack(scored), len(table))


class DSparkReference(Reference):
    """A DSpark draft that samples from its anchor, with as many places as its block has."""

    def logits(
        self, states: Sequence[Tensor], table: Tensor, text: Sequence[int], num_tokens: int
    ) -> Tensor:
        assert self.config["sample_from_anchor"] and not self.sizes["is_causal"]
        known, size = len(text) - num_tokens, self.config["block_size"]
        taps = [states[tap][: known - 1] for tap in self.config["aux_hidden_state_layer_ids"]]
        context = self._norm(torch.cat(taps, -1) @ self.weights["fc.weight"].T, "hidden_norm")
        block = [text[known - 1], *[self.config["mask_token_id"]] * (size - 1)]
        hidden = self.weights["embed_tokens.weight"][block]
        ends = torch.arange(known - 1, known - 1 + size)
        distance = (ends[:, None] - torch.arange(known - 1 + size)).abs()
        for number, kind in enumerate(self.sizes["layer_types"]):
            layer, window = f"layers.{number}", self.sizes.get("sliding_window")
            normed = self._norm(hidden, f"{layer}.input_layernorm")
            seen = torch.cat((context, normed))
            keys, values = (self._heads(seen, layer, name) for name in "kv")
            keys = self._rotated(self._norm(keys, f"{layer}.self_attn.k_norm"))
            padded = torch.cat(
                (torch.zeros_like(context), normed)
            )  # so that queries have their positions
            queries = self._norm(self._heads(padded, layer, "q"), f"{layer}.self_attn.q_norm")
            scores = (
                self._rotated(queries)[:, -size:] @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
            )
            if kind == "sliding_attention":
                scores = scores.masked_fill(distance >= window, -torch.inf)
            hidden = self._behind_attention(hidden, scores, values, layer)
        scored = self._norm(hidden, "norm")[:num_tokens] @ self.weights["lm_head.weight"].T
        before = self.weights["markov_head.markov_w1.weight"][list(text[known - 1 : -1])]
        return self._spread(
            scored + before @ self.weights["markov_head.markov_w2.weight"].T, len(table)
        )


def medusa_logits(directory: Path, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "H T W"]:
    """What each of Medusa's heads scores from the target's last hidden states."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = {
        name: value.double() for name, value in load_file(directory / "model.safetensors").items()
    }
    found, depth = [], config["medusa_num_layers"]
    for head in range(config["medusa_num_heads"]):
        states = hidden
        for i in range(depth):
            linear = (
                states @ weights[f"{head}.{i}.linear.weight"].T + weights[f"{head}.{i}.linear.bias"]
            )
            states = states + functional.silu(linear)
        found.append(states @ weights[f"{head}.{depth}.weight"].T)
    return torch.stack(found)
