"""The network of an EAGLE head, and the parts that all networks over a target's features share.

Entry j combines the target's hidden states at token j with the embedding of token j + 1, and its
output scores token j + 2. For draft tokens, the target's hidden states do not exist yet: there the
network's output at entry j - 1 replaces the feature of entry j.

Shapes: B rows, T entries, S keys, D hidden size of the target, F feature layers, H query heads,
G key and value heads, E head size, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import Settings, setting

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    Attend = Callable[
        [Float[Tensor, "B H T E"], Float[Tensor, "B G T E"], Float[Tensor, "B G T E"]], Tensor
    ]


@dataclass(frozen=True)
class FeatureSettings(Settings):
    """Sizes of a network over a target's hidden states."""

    feature_layers: tuple[int, ...] = setting(
        help="the target's layers whose hidden states are read, from 0", minimum=0, maximum=1000
    )
    hidden_size: int = setting(help="hidden size of the target", minimum=2, maximum=2**16)
    vocab_size: int = setting(help="vocabulary of the target", minimum=2, maximum=2**20)
    num_heads: int = setting(help="query heads", minimum=1)
    num_key_heads: int = setting(help="key and value heads, a divisor of num_heads", minimum=1)
    intermediate_size: int = setting(help="width of the inner network", minimum=1, maximum=2**20)
    attention_window: int | None = setting(
        None, "newest tokens that each token attends to; default: all", minimum=1, maximum=2**20
    )
    draft_vocabulary: int | tuple[int, ...] | None = setting(
        None,
        "tokens that the draft scores, ascending, or how many to choose before training; "
        "default: all",
    )
    feature_norms: bool = setting(True, "normalize each layer's hidden states before joining them")
    min_confidence: float = setting(
        0.0, "end the window where its chance to be kept is lower", minimum=0, maximum=1
    )
    head_size: int | None = setting(
        None, "size of a head; default: hidden_size / num_heads", minimum=2, maximum=2**12
    )
    rotary_base: float = setting(10_000.0, "base of the rotary positions", minimum=1)
    norm_eps: float = setting(1e-5, "epsilon of the norms", above=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.feature_layers:
            raise ValueError("feature_layers must be one layer at least")

        # Rotary positions need heads of an even size.
        if self.head_size is None:
            has_even_heads = self.hidden_size % (2 * self.num_heads) == 0
        else:
            has_even_heads = self.head_size % 2 == 0
        if not has_even_heads or self.num_heads % self.num_key_heads != 0:
            raise ValueError(
                f"{self.num_heads} heads of {self.num_key_heads} keys do not divide a hidden size "
                f"of {self.hidden_size} into even parts: choose other numbers of heads"
            )


@dataclass(frozen=True)
class EagleSettings(FeatureSettings):
    norm_output: bool = setting(False, "feed back the output after the final norm")
    norm_before_residual: bool = setting(
        False, "take the residual stream from the normalized feature"
    )


class FeatureNetwork(nn.Module):
    """Joins the hidden states of several layers of a target into one feature for each token.

    Args:
        settings: sizes. The head size E is D / H by default.
    """

    output_norm: Any

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.attention_window = settings.attention_window
        self.num_heads = settings.num_heads
        self.num_key_heads = settings.num_key_heads
        self.head_size = settings.head_size or settings.hidden_size // settings.num_heads

        # The scales of hidden states differ a hundredfold between layers, and between the first
        # token and all others.
        self.layer_norms = nn.ModuleList()
        if settings.feature_norms:
            self.layer_norms.extend(self._norm() for _ in settings.feature_layers)
        num_features = len(settings.feature_layers)
        self.join = nn.Linear(num_features * settings.hidden_size, settings.hidden_size, bias=False)

    def _norm(self) -> Any:
        return nn.RMSNorm(self.settings.hidden_size, eps=self.settings.norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in."""
        return self.output_norm.weight.dtype

    def features(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        """One feature for each token, from the hidden states of F layers.

        EAGLE-3, section 3.1: the features of low, middle and high layers are concatenated, and a
        linear layer reduces them to the feature g.
        """
        states = [layer_hidden.to(self.dtype) for layer_hidden in hidden]
        if self.settings.feature_norms:
            states = [norm(state) for norm, state in zip(self.layer_norms, states, strict=True)]
        concatenated = torch.cat(states, dim=-1)
        features = self.join(concatenated)
        # Under autocast, the linear layer may return another dtype.
        return features.to(self.dtype)

    def joined(self, hidden: Float[Tensor, "B T FD"]) -> Float[Tensor, "B T D"]:
        """Like `features`, from hidden states that are concatenated already."""
        hidden_by_layer = hidden.split(self.settings.hidden_size, dim=-1)
        return self.features(hidden_by_layer)


class EagleNetwork(FeatureNetwork):
    """Joins features, runs one decoder layer, scores tokens (Li et al. 2025, "EAGLE-3", figure 5).

    The layer's attention reads embedding and feature side by side; its residual stream is the
    feature's. As in Llama, norms are RMSNorm, positions are rotary (Su et al. 2021) and the inner
    network is SwiGLU.

    Args:
        settings: sizes. The head size E is D / H by default.
        num_tokens: W.
    """

    def __init__(self, settings: EagleSettings, num_tokens: int) -> None:
        super().__init__(settings)
        hidden_size = settings.hidden_size
        inner_size = settings.intermediate_size
        query_size = self.num_heads * self.head_size
        key_size = self.num_key_heads * self.head_size

        # The attention, which reads embedding and feature side by side.
        self.token_norm = self._norm()
        self.feature_norm = self._norm()
        self.query_key_value = nn.Linear(2 * hidden_size, query_size + 2 * key_size, bias=False)
        self.attention_output = nn.Linear(query_size, hidden_size, bias=False)

        # The inner network.
        self.inner_norm = self._norm()
        self.gate_up = nn.Linear(hidden_size, 2 * inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

        # The output head.
        self.output_norm = self._norm()
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

    def layer(
        self,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T D"]:
        """The decoder layer's output for T entries. `fed_back` turns it into the next features.

        Args:
            embedded: embedding of each entry's token.
            positions: positions of the entries.
            attend: attention over these entries' keys and values and those before them.
        """
        # EAGLE-3, section 3.1: the embedding e and the feature g are concatenated.
        normed_embedded = self.token_norm(embedded.to(self.dtype))
        normed_features = self.feature_norm(features)
        attention_input = torch.cat((normed_embedded, normed_features), dim=-1)

        projected = self.query_key_value(attention_input)
        heads = projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        # Queries and keys are rotated in one call.
        num_rotated_heads = self.num_heads + self.num_key_heads
        queries_keys, values = heads.split((num_rotated_heads, self.num_key_heads), dim=1)
        queries_keys = rotate(queries_keys, positions, self.settings.rotary_base)
        queries, keys = queries_keys.split((self.num_heads, self.num_key_heads), dim=1)

        attended_heads = attend(queries, keys, values)
        attended = attended_heads.transpose(1, 2).flatten(2)
        residual = normed_features if self.settings.norm_before_residual else features
        hidden = residual + self.attention_output(attended)

        normed_hidden = self.inner_norm(hidden)
        gate, up = self.gate_up(normed_hidden).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """Scores of the next token, from the layer's output."""
        normed_hidden = self.output_norm(hidden)
        return self.output(normed_hidden)

    def fed_back(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """The feature of the next entry, where the target's hidden states do not exist yet.

        EAGLE-3, section 3.1: the layer's output replaces g. EAGLE-3.1 normalizes it.
        """
        if self.settings.norm_output:
            return self.output_norm(hidden)
        return hidden


def attention(
    queries: Float[Tensor, "B H T E"],
    keys: Float[Tensor, "B G S E"],
    values: Float[Tensor, "B G S E"],
    seen: Bool[Tensor, "#B T S"],
) -> Float[Tensor, "B H T E"]:
    """Scaled dot-product attention where groups of H / G query heads share a key head.

    Args:
        seen: True where a query attends to a key.
    """
    batch_size, num_heads, num_queries, head_size = queries.shape
    num_key_heads = keys.shape[1]
    group_size = num_heads // num_key_heads

    # The queries of a group are stacked along the query axis, so keys need not be copied.
    num_grouped = group_size * num_queries
    grouped_queries = queries.reshape(batch_size, num_key_heads, num_grouped, head_size)
    mask = seen[:, None].repeat(1, 1, group_size, 1)
    output = nn.functional.scaled_dot_product_attention(
        grouped_queries, keys, values, attn_mask=mask
    )
    return output.reshape(batch_size, num_heads, num_queries, head_size)


def rotate(
    vectors: Float[Tensor, "B H T E"],
    positions: Int[Tensor, "#B T"],
    base: float,
) -> Float[Tensor, "B H T E"]:
    """Rotary position embedding (Su et al. 2021, "RoFormer").

    As in Llama, coordinates i and i + E / 2 form a pair. It is rotated by the angle
    position * base^(-2i / E).
    """
    num_pairs = vectors.shape[-1] // 2
    pair_indices = torch.arange(num_pairs, device=vectors.device, dtype=torch.float32)
    frequencies = base ** -(pair_indices / num_pairs)
    angles = positions[:, None, :, None] * frequencies
    cos = angles.cos().to(vectors.dtype)
    sin = angles.sin().to(vectors.dtype)

    # Each pair is a point (x, y) of the plane.
    x, y = vectors.split(num_pairs, dim=-1)
    rotated_x = x * cos - y * sin
    rotated_y = x * sin + y * cos
    return torch.cat((rotated_x, rotated_y), dim=-1)
