"""What drafters over a target's hidden states compute, and the network of an autoregressive head: one decoder layer.

Entry j joins the target's hidden states at token j with the embedding of token j + 1, and its output scores token
j + 2. Where the target has not been yet, the network's output at entry j - 1 stands for its hidden states at token j.

Shapes: B rows, T entries, S keys, D width of the target's hidden states, F how many of them are joined, H query heads,
G key heads, E size of a head, W tokens of the draft.
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
        "tokens that the draft scores, ascending, or how many to choose before training; default: all",
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
        divided = (
            self.hidden_size % (2 * self.num_heads)
            if self.head_size is None
            else self.head_size % 2
        )
        if divided or self.num_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_heads} heads of {self.num_key_heads} keys do not divide a hidden size of "
                f"{self.hidden_size} into even parts: choose other numbers of heads"
            )


@dataclass(frozen=True)
class EagleSettings(FeatureSettings):
    norm_output: bool = setting(False, "feed back the output after the final norm")
    norm_before_residual: bool = setting(
        False, "take the residual stream from the normalized feature"
    )


class FeatureNetwork(nn.Module):
    """Joins the hidden states of several layers of a target.

    Args:
        settings: sizes; the size of a head E is D / H by default.
    """

    output_norm: Any

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings, self.attention_window = settings, settings.attention_window
        self.num_heads, self.num_key_heads = settings.num_heads, settings.num_key_heads
        self.head_size = settings.head_size or settings.hidden_size // settings.num_heads
        # Layers differ a hundredfold in how large their states are, and so do the first token's from all others'.
        normed = settings.feature_layers if settings.feature_norms else ()
        self.layer_norms = nn.ModuleList(self._norm() for _ in normed)
        self.join = nn.Linear(
            len(settings.feature_layers) * settings.hidden_size, settings.hidden_size, bias=False
        )

    def _norm(self) -> Any:
        return nn.RMSNorm(self.settings.hidden_size, eps=self.settings.norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.output_norm.weight.dtype

    def features(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        """One feature for each token from the hidden states of F layers."""
        states = [each.to(self.dtype) for each in hidden]
        if self.settings.feature_norms:
            states = [norm(each) for norm, each in zip(self.layer_norms, states, strict=True)]
        return self.join(torch.cat(states, dim=-1)).to(
            self.dtype
        )  # autocast may have left it in another type

    def joined(self, hidden: Float[Tensor, "B T FD"]) -> Float[Tensor, "B T D"]:
        """As `features`, from hidden states that lie side by side."""
        return self.features(hidden.split(self.settings.hidden_size, dim=-1))


class EagleNetwork(FeatureNetwork):
    """Joins features, runs one decoder layer, scores tokens (Li et al. 2025, "EAGLE-3", figure 5).

    The layer's attention reads embedding and feature side by side; its residual stream is the feature's. Norms are
    RMSNorm, positions rotary (Su et al. 2021), the inner network SwiGLU, as in Llama.

    Args:
        settings: sizes; the size of a head E is D / H by default.
        num_tokens: W.
    """

    def __init__(self, settings: EagleSettings, num_tokens: int) -> None:
        super().__init__(settings)
        hidden_size, inner_size = settings.hidden_size, settings.intermediate_size
        width = (self.num_heads + 2 * self.num_key_heads) * self.head_size
        self.token_norm, self.feature_norm = self._norm(), self._norm()
        self.query_key_value = nn.Linear(2 * hidden_size, width, bias=False)
        self.attention_output = nn.Linear(self.num_heads * self.head_size, hidden_size, bias=False)
        self.inner_norm = self._norm()
        self.gate_up = nn.Linear(hidden_size, 2 * inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)
        self.output_norm = self._norm()
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

    def layer(
        self,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T D"]:
        """The decoder layer's output for T entries; through `fed_back`, the feature of the entries after them.

        Args:
            embedded: of each entry's token.
            positions: of the entries.
            attend: attention over these entries' keys and values and over what came before.
        """
        normed = self.feature_norm(features)
        both = torch.cat((self.token_norm(embedded.to(self.dtype)), normed), dim=-1)
        heads = self.query_key_value(both).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        turned, values = heads.split(
            (self.num_heads + self.num_key_heads, self.num_key_heads), dim=1
        )
        turned = rotate(turned, positions, self.settings.rotary_base)
        queries, keys = turned.split((self.num_heads, self.num_key_heads), dim=1)
        residual = normed if self.settings.norm_before_residual else features
        hidden = residual + self.attention_output(
            attend(queries, keys, values).transpose(1, 2).flatten(2)
        )
        gate, up = self.gate_up(self.inner_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """Scores of the next token from the layer's output."""
        return self.output(self.output_norm(hidden))

    def fed_back(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """The next entry's feature where the target has not been: the layer's output, normalized in EAGLE-3.1."""
        return self.output_norm(hidden) if self.settings.norm_output else hidden


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


def rotate(
    vectors: Float[Tensor, "B H T E"], positions: Int[Tensor, "#B T"], base: float
) -> Float[Tensor, "B H T E"]:
    """Rotary position embedding: pairs of coordinates turn by angles that grow with the position."""
    half = vectors.shape[-1] // 2
    exponents = torch.arange(half, device=vectors.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None] * base**-exponents
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.split(half, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
