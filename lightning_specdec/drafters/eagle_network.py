"""The network of an autoregressive head: one decoder layer over tokens and a target's hidden states.

Theory: entry j joins the target's hidden states at token j, which sum up the text so far, with the embedding of token
j + 1, which tells what was drawn from them; what comes out scores token j + 2. Where the target has not been yet, the
network's own output at entry j - 1 stands for the target's hidden states at token j, so it goes on from itself.

Shapes: B rows, T entries, S keys, D width of the target's hidden states, F how many of them are joined, H query heads,
G key heads, E size of a head, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.checks import require_int
from lightning_specdec.models.packed import pack_linears

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    Attend = Callable[[Float[Tensor, "B H T E"], Float[Tensor, "B G T E"], Float[Tensor, "B G T E"]], Tensor]

ROTARY_BASE = 10_000.0


class EagleNetwork(nn.Module):
    """Joins features, runs one decoder layer, scores tokens.

    Sources: Li et al. 2025, "EAGLE-3", figure 5 (three layers' features joined by a linear layer; the layer's attention
    reads embedding and feature side by side, its residual stream is the feature's; the output goes on as the next
    feature). Norms are RMSNorm, positions rotary (Su et al. 2021), the inner network SwiGLU, as in Llama.

    Args:
        hidden_size: D.
        num_features: F.
        num_tokens: W.
        num_heads: H; the size of a head is D / H.
        num_key_heads: G, a divisor of H.
        intermediate_size: width of the inner network.
        attention_window: how many entries an entry looks at, itself included, the newest ones; all when None. What lies
            further back the target has summed up in its hidden states, and distances that no training text had are
            never met.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_features: int,
        num_tokens: int,
        num_heads: int,
        num_key_heads: int,
        intermediate_size: int,
        attention_window: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = require_int("hidden_size", hidden_size, 2, 2**16)
        self.num_heads = require_int("num_heads", num_heads, 1, hidden_size)
        self.num_key_heads = require_int("num_key_heads", num_key_heads, 1, num_heads)
        require_int("intermediate_size", intermediate_size, 1, 2**20)
        if hidden_size % (2 * num_heads) or num_heads % num_key_heads:
            raise ValueError(
                f"{num_heads} heads of {num_key_heads} keys do not divide a hidden size of {hidden_size} into even "
                "parts: choose other numbers of heads"
            )
        if attention_window is not None:
            require_int("attention_window", attention_window, 1, 2**20)
        self.attention_window = attention_window
        self.head_size = hidden_size // num_heads
        width = (num_heads + 2 * num_key_heads) * self.head_size
        # Layers differ a hundredfold in how large their states are, and so do the first token's from all others'.
        self.layer_norms = nn.ModuleList(_norm(hidden_size) for _ in range(num_features))
        self.join = nn.Linear(num_features * hidden_size, hidden_size, bias=False)
        self.token_norm, self.feature_norm = _norm(hidden_size), _norm(hidden_size)
        self.query_key_value = nn.Linear(2 * hidden_size, width, bias=False)
        self.attention_output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.inner_norm = _norm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.output_norm = _norm(hidden_size)
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.output_norm.weight.dtype

    def packed(self) -> EagleNetwork:
        """The network laid out for this processor, in place: for decoding only, and for good."""
        if self.output_norm.weight.device.type == "cpu":
            pack_linears(self)
        return self

    def features(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        """The target's hidden states of F layers as one feature for each token."""
        normed = [norm(each.to(self.dtype)) for norm, each in zip(self.layer_norms, hidden, strict=True)]
        joined: Tensor = self.join(torch.cat(normed, dim=-1))
        return joined.to(self.dtype)  # which autocast may have left in another type

    def layer(
        self,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T D"]:
        """The decoder layer's output for T entries, which is the feature of the entries after them.

        Args:
            embedded: of each entry's token.
            positions: of the entries.
            attend: attention over these entries' keys and values and over what came before.
        """
        both = torch.cat((self.token_norm(embedded.to(self.dtype)), self.feature_norm(features)), dim=-1)
        heads = self.query_key_value(both).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        turned, values = heads.split((self.num_heads + self.num_key_heads, self.num_key_heads), dim=1)
        queries, keys = rotate(turned, positions).split((self.num_heads, self.num_key_heads), dim=1)
        hidden = features + self.attention_output(attend(queries, keys, values).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.inner_norm(hidden)).chunk(2, dim=-1)
        output: Tensor = hidden + self.down(nn.functional.silu(gate) * up)
        return output

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """What the layer's output says of the next token."""
        scores: Tensor = self.output(self.output_norm(hidden))
        return scores


def attention(
    queries: Float[Tensor, "B H T E"],
    keys: Float[Tensor, "B G S E"],
    values: Float[Tensor, "B G S E"],
    seen: Bool[Tensor, "#B T S"],
) -> Float[Tensor, "B H T E"]:
    """Scaled dot-product attention; `seen` is True where a query looks, and H / G query heads share a key head."""
    batch, heads, num_tokens, size = queries.shape
    groups = heads // keys.shape[1]
    # The heads that share keys lie behind each other along the query axis, so that no key is copied.
    stacked = queries.reshape(batch, keys.shape[1], groups * num_tokens, size)
    mask = seen[:, None].repeat(1, 1, groups, 1)
    output = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
    return output.reshape(batch, heads, num_tokens, size)


def rotate(vectors: Float[Tensor, "B H T E"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T E"]:
    """Rotary position embedding: pairs of coordinates turn by angles that grow with the position."""
    half = vectors.shape[-1] // 2
    exponents = torch.arange(half, device=vectors.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None] * ROTARY_BASE**-exponents
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.split(half, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _norm(size: int) -> Any:
    return nn.RMSNorm(size, eps=1e-5)
