"""What an engine computes from an exported head, written out plainly: reads files, shares no code with their writer.

Shapes: T tokens of a text, N entries, H heads, E size of a head, D hidden size, W tokens of the draft, V of the target.
"""

from __future__ import annotations

import json
import math
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
        found = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    return [each[0].double() for each in found]


class Eagle3Reference:
    """An EAGLE-3 head, from the config and tensors of its directory."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: value.double() for name, value in load_file(directory / "model.safetensors").items()}
        if "transformer_layer_config" in config:  # counted as inputs of layers
            self.sizes, self.layer = config["transformer_layer_config"], "layers.0"
            self.taps = config["eagle_aux_hidden_state_layer_ids"]
        else:  # counted as their outputs
            self.sizes, self.layer = config, "midlayer"
            self.taps = [each + 1 for each in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        assert sorted(set(self.taps)) == self.taps, "engines sort the layers"
        self.config = config

    def _norm(self, states: Tensor, name: str) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt()
        return states * scale * self.weights[f"{name}.weight"]

    def _rotated(self, heads: Float[Tensor, "H N E"]) -> Float[Tensor, "H N E"]:
        size, theta = heads.shape[-1], self.sizes["rope_parameters"]["rope_theta"]
        speeds = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
        angles = torch.arange(heads.shape[1])[:, None] * speeds
        turned = torch.view_as_complex(torch.stack(heads.split(size // 2, -1), -1).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def _outputs(self, embedded: Float[Tensor, "N D"], features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The decoder layer's output at every entry."""
        normed = self._norm(features, f"{self.layer}.hidden_norm")
        residual = normed if self.config["norm_before_residual"] else features
        both = torch.cat((self._norm(embedded, f"{self.layer}.input_layernorm"), normed), -1)
        parts = []
        for name, count in zip("qkv", ("num_attention_heads", *["num_key_value_heads"] * 2), strict=True):
            part = both @ self.weights[f"{self.layer}.self_attn.{name}_proj.weight"].T
            parts.append(part.reshape(len(both), self.sizes[count], -1).transpose(0, 1))
        groups = self.sizes["num_attention_heads"] // self.sizes["num_key_value_heads"]
        queries, keys = self._rotated(parts[0]), self._rotated(parts[1]).repeat_interleave(groups, 0)
        scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])
        distance = torch.arange(len(both))[:, None] - torch.arange(len(both))
        window = self.sizes["sliding_window"] if self.sizes.get("layer_types") == ["sliding_attention"] else len(both)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        mixed = (scores.softmax(-1) @ parts[2].repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
        hidden = residual + mixed @ self.weights[f"{self.layer}.self_attn.o_proj.weight"].T
        inner = self._norm(hidden, f"{self.layer}.post_attention_layernorm")
        gate, up, down = (self.weights[f"{self.layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return hidden + (functional.silu(inner @ gate) * (inner @ up)) @ down

    def logits(
        self, states: Sequence[Float[Tensor, "T D"]], table: Float[Tensor, "V D"], text: Sequence[int], num_tokens: int
    ) -> Float[Tensor, "K V"]:
        """Scores of the last `num_tokens` of a text, a round's draft tokens; those before are the target's own.

        Args:
            states: `hidden_states` of the text.
            table: the target's embeddings.
        """
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
        own = torch.stack(scored)
        if "d2t" not in self.weights:
            return own
        numbers = torch.arange(own.shape[1]) + self.weights["d2t"].long()
        return own.new_full((len(own), len(table)), -torch.inf).index_copy_(1, numbers, own)


def medusa_logits(directory: Path, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "H T W"]:
    """What each of Medusa's heads scores from the target's last hidden states."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = {name: value.double() for name, value in load_file(directory / "model.safetensors").items()}
    found, depth = [], config["medusa_num_layers"]
    for head in range(config["medusa_num_heads"]):
        states = hidden
        for i in range(depth):
            linear = states @ weights[f"{head}.{i}.linear.weight"].T + weights[f"{head}.{i}.linear.bias"]
            states = states + functional.silu(linear)
        found.append(states @ weights[f"{head}.{depth}.weight"].T)
    return torch.stack(found)
