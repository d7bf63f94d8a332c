"""A transformer small enough for tests, on a real `KVState`, with pre-norm and rotary positions.

It shows that the contracts of language models and states hold for attention too.

Shapes: B rows, T tokens, S cache slots, V vocabulary, D width, H heads, E = D / H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_specdec.models import DecodeState, KVState, LanguageModel, ModelOutput
from lightning_specdec.models.state import Lengths, Slots


class Block(nn.Module):
    """Attention over the state's buffers, or over the tokens themselves, then an MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = width // num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(
        self,
        hidden: Float[Tensor, "B T D"],
        positions: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T S"],
        state: KVState | None,
        slots: Slots | None,
        layer: int,
    ) -> Float[Tensor, "B T D"]:
        projected = self.qkv(self.attention_norm(hidden))
        heads = projected.unflatten(-1, (3, self.num_heads, self.head_size))
        queries, keys, values = heads.unbind(2)

        # The state stores keys and values head by head: B x H x S x E.
        queries = rotate(queries, positions)
        keys = rotate(keys, positions).transpose(1, 2)
        values = values.transpose(1, 2)
        if state is not None:
            assert slots is not None
            keys, values = state.storage.update(layer, slots, keys, values)

        scores = torch.einsum("bthe,bhse->bhts", queries, keys) / self.head_size**0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("bhts,bhse->bthe", weights, values)
        hidden = hidden + self.out(attended.flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class TinyTransformer(LanguageModel):
    """A decoder-only transformer.

    Args:
        vocab_size: V.
        width: D, divisible by twice the number of heads.
        num_heads: H.
        num_layers: blocks.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        width: int = 16,
        num_heads: int = 2,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.width = width
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.hidden_size = width
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size)

    def arguments(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "width": self.width,
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
        }

    def init_state(self, batch_size: int, max_length: int) -> KVState:
        return KVState(batch_size, max_length, device=self.device)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        assert state is None or isinstance(state, KVState)
        num_tokens = tokens.shape[1]
        if state is None:
            slots = None
            positions = torch.arange(num_tokens, device=tokens.device).expand_as(tokens)
            mask = positions[:, None] <= positions[:, :, None]
        else:
            slots = state.slots(num_tokens)
            positions = slots.positions
            mask = state.storage.mask(slots)

        hidden = self.embedding(tokens)
        layer_outputs = []
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, positions, mask, state, slots, layer)
            layer_outputs.append(hidden)
        if state is not None:
            state.advance(num_tokens, valid_lengths)

        if isinstance(logits_for, slice):
            hidden = hidden[:, logits_for]
        elif logits_for is not None:
            hidden = hidden.gather(1, logits_for[..., None].expand(-1, -1, self.width))

        requested_outputs = {layer: layer_outputs[layer] for layer in features}
        return ModelOutput(self.output_logits(hidden), requested_outputs, logits_for)

    def embeddings(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def check_output_head(self) -> None:
        pass

    def output_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        return self.output.weight


def rotate(
    vectors: Float[Tensor, "B T H E"], positions: Int[Tensor, "B T"]
) -> Float[Tensor, "B T H E"]:
    """Rotary position embedding (Su et al. 2021): rotate pairs of coordinates by the position."""
    half = vectors.shape[-1] // 2
    frequencies = 10.0 ** -torch.arange(half, dtype=vectors.dtype, device=vectors.device)
    angles = positions[:, :, None, None] * frequencies
    real, imaginary = vectors.split(half, dim=-1)
    cos = angles.cos()
    sin = angles.sin()
    rotated_real = real * cos - imaginary * sin
    rotated_imaginary = real * sin + imaginary * cos
    return torch.cat((rotated_real, rotated_imaginary), dim=-1)
