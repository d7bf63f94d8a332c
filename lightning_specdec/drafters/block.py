"""A block of masked places over the target's hidden states as the draft: one pass gives all of a round's logits.

Place 0 has the text's last token, the anchor, and scores the token after it; the others are masked, and place i scores
the token that many places further on. All see the target's features ahead of the anchor, and each other.

Shapes: B rows, T tokens, N places, D width of the target's hidden states, H query heads, G key heads, E size of a head,
R rank of the Markov head, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import setting
from lightning_specdec.drafters.base import DraftRequest, TargetContext
from lightning_specdec.drafters.eagle import FeatureDrafter, FeatureState
from lightning_specdec.drafters.eagle_network import (
    FeatureNetwork,
    FeatureSettings,
    attention,
    rotate,
)
from lightning_specdec.drafters.model import Drawn, make_draft, nothing, shortened
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    KeysValues = tuple[Float[Tensor, "B G T E"], Float[Tensor, "B G T E"]]
    Attend = Callable[
        [int, Float[Tensor, "B H N E"], Float[Tensor, "B G N E"], Float[Tensor, "B G N E"]], Tensor
    ]


@dataclass(frozen=True)
class BlockSettings(FeatureSettings):
    feature_norms: bool = setting(
        False,
        "normalize each layer's hidden states before joining them; other engines do not support it",
    )
    block_size: int = setting(
        7, "positions in a block, the most draft tokens of a round", minimum=1, maximum=64
    )
    num_layers: int = setting(1, "decoder layers", minimum=1, maximum=64)
    markov_rank: int = setting(64, "rank of the Markov head; 0 for none", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_window is not None and self.attention_window < self.block_size:
            raise ValueError(
                f"attention_window must be at least block_size, {self.block_size}, got {self.attention_window}"
            )


class BlockLayer(nn.Module):
    """A decoder layer whose keys and values come from its own places and from the target's features.

    Norms are RMSNorm, those of queries and keys head by head, positions rotary, the inner network SwiGLU, as in Qwen3.
    """

    def __init__(self, own: BlockSettings, head_size: int) -> None:
        super().__init__()
        size, self.head_size, self.rotary_base = own.hidden_size, head_size, own.rotary_base
        self.input_norm = nn.RMSNorm(size, eps=own.norm_eps)
        self.query = nn.Linear(size, own.num_heads * head_size, bias=False)
        self.key_value = nn.Linear(size, 2 * own.num_key_heads * head_size, bias=False)
        self.query_norm = nn.RMSNorm(head_size, eps=own.norm_eps)
        self.key_norm = nn.RMSNorm(head_size, eps=own.norm_eps)
        self.attention_output = nn.Linear(own.num_heads * head_size, size, bias=False)
        self.inner_norm = nn.RMSNorm(size, eps=own.norm_eps)
        self.gate_up = nn.Linear(size, 2 * own.intermediate_size, bias=False)
        self.down = nn.Linear(own.intermediate_size, size, bias=False)

    def keys_values(
        self, normed: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]
    ) -> KeysValues:
        """What the places look at for T tokens or places."""
        heads = self.key_value(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        keys, values = heads.chunk(2, dim=1)
        return rotate(self.key_norm(keys), positions, self.rotary_base).to(values.dtype), values

    def forward(
        self,
        hidden: Float[Tensor, "B N D"],
        positions: Int[Tensor, "#B N"],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "B N D"]:
        """The output at N places, given attention over their keys and values and over the features'."""
        normed = self.input_norm(hidden)
        heads = self.query(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        keys, values = self.keys_values(normed, positions)
        queries = rotate(self.query_norm(heads), positions, self.rotary_base).to(values.dtype)
        hidden = hidden + self.attention_output(
            attend(queries, keys, values).transpose(1, 2).flatten(2)
        )
        gate, up = self.gate_up(self.inner_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)


class BlockNetwork(FeatureNetwork):
    """Decoder layers over a block of places, with a Markov head and a confidence head.

    Args:
        settings: sizes.
        num_tokens: W.
    """

    def __init__(self, settings: BlockSettings, num_tokens: int) -> None:
        super().__init__(settings)
        size, rank = settings.hidden_size, settings.markov_rank
        self.mask = nn.Parameter(0.02 * torch.randn(size))
        # Small, as the mask: where the target's embeddings are its output head too, the anchor would score itself.
        self.anchor_scale = nn.Parameter(torch.full((1,), 0.1))
        self.context_norm = self._norm()
        self.layers = nn.ModuleList(
            BlockLayer(settings, self.head_size) for _ in range(settings.num_layers)
        )
        self.output_norm = self._norm()
        self.output = nn.Linear(size, num_tokens, bias=False)
        self.markov_input = nn.Embedding(num_tokens, rank) if rank else None
        self.markov_output = nn.Linear(rank, num_tokens, bias=False) if rank else None
        self.confidence = nn.Linear(size + rank, 1)
        if self.markov_output is not None:
            nn.init.zeros_(self.markov_output.weight)

    def context(
        self, features: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]
    ) -> list[KeysValues]:
        """What each layer's places see of the target's features."""
        normed = self.context_norm(features)
        return [layer.keys_values(normed, positions) for layer in self.layers]  # type: ignore[operator]

    def forward(
        self, anchors: Float[Tensor, "B A D"], positions: Int[Tensor, "#B N"], attend: Attend
    ) -> Float[Tensor, "B N D"]:
        """What the output head reads at the N places of A blocks.

        Args:
            anchors: embedding of each block's first token.
            positions: of all places, block by block.
            attend: attention of the numbered layer over these places and over the features.
        """
        masks = self.mask.to(self.dtype).expand(
            *anchors.shape[:2], self.settings.block_size - 1, -1
        )
        hidden = torch.cat(
            ((self.anchor_scale * anchors.to(self.dtype))[:, :, None], masks), dim=2
        ).flatten(1, 2)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, partial(attend, number))
        return self.output_norm(hidden)

    def before(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B R"]:
        """What the Markov head knows of the token before a place; zero for tokens below 0."""
        if self.markov_input is None:
            return self.mask.new_zeros(*tokens.shape, 0)
        return self.markov_input(tokens.clamp(min=0)) * (tokens >= 0)[..., None]

    def bias(self, before: Float[Tensor, "*B R"]) -> Float[Tensor, "*B W"] | float:
        """What that token adds to a place's logits."""
        return 0.0 if self.markov_output is None else self.markov_output(before)

    def confidence_logit(
        self, hidden: Float[Tensor, "*B D"], before: Float[Tensor, "*B R"]
    ) -> Float[Tensor, "*B"]:
        """The logit of the probability that a place's token is kept if all before it are, whichever it is."""
        return self.confidence(torch.cat((hidden, before), dim=-1))[..., 0]


class BlockDrafter(FeatureDrafter):
    """Drafts a block of tokens in one pass over the target's hidden states.

    Chen et al. 2026, "DFlash", with the Markov head and the confidence head of DSpark: the token before a place adds a
    bias of low rank to its logits, so tokens are drawn one by one and their distributions are exact; and a place that
    is hardly ever kept ends the window. All places are computed whatever the window, which changes no distribution.
    """

    Settings, Network = BlockSettings, BlockNetwork
    settings: BlockSettings
    network: BlockNetwork

    @property
    def max_draft_tokens(self) -> int:
        return self.settings.block_size

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> FeatureState:
        return super().init_state(batch_size, max_length + self.settings.block_size, context)

    def before(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B R"]:
        """See `BlockNetwork.before`; of the target's tokens."""
        own = self.draft_vocabulary
        return self.network.before(tokens if own is None else own.to_draft(tokens, -1))

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        most = self.max_draft_tokens
        wanted = [min(window, most) for window in state.wanted(request, windows)]
        num_draft_tokens = max(wanted)
        if not num_draft_tokens:
            return nothing(request)
        self._read(state, request)
        hidden = self._places(state, request)[:, :num_draft_tokens]

        def call(
            drawn: Drawn, hidden: Float[Tensor, "B K D"], token: Int[Tensor, "B"]
        ) -> Float[Tensor, "B K"]:
            logits, chances = self.network.output(hidden), []
            for i in range(num_draft_tokens):
                before = self.before(token)
                chances.append(self.network.confidence_logit(hidden[:, i], before).sigmoid())
                token = drawn.draw(logits[:, i] + self.network.bias(before))
            return torch.stack(chances, dim=1)

        vocabulary, anchors = self.draft_vocabulary, request.tail[:, 1].contiguous()
        outputs = self.run(request, wanted, sampling, call, hidden, anchors, vocabulary=vocabulary)
        draft = make_draft(outputs, wanted, request, num_calls=1)
        if outputs[3] is None or not self.settings.min_confidence:
            return draft
        # The first place always is worth it. A window ends by hidden states and the tokens before its end.
        chances = outputs[3].float().cumprod(1)[:, 1:]
        return shortened(draft, 1 + (chances >= self.settings.min_confidence).sum(1))

    def _read(self, state: FeatureState, request: DraftRequest) -> None:
        """Keep the keys and values of the features of the settled text that have not been read."""
        read = state.read
        ends = [
            min(len(text) - 1, known)
            for text, known in zip(request.texts, state.known, strict=True)
        ]
        starts = [min(end, length) for end, length in zip(ends, read.consumed, strict=True)]
        read.truncate(starts)
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        # As many as any round settles, so that shapes do not depend on acceptance.
        width = max(state.num_scored, *lengths)
        slots = read.slots(width)
        context = self.network.context(
            self.network.joined(state.hidden(starts, width, lengths)), slots.positions
        )
        for number, (keys, values) in enumerate(context):
            read.storage.update(number, slots, keys, values)
        read.advance(width, lengths)

    def _places(self, state: FeatureState, request: DraftRequest) -> Float[Tensor, "B N D"]:
        """The network's output at the places behind the settled text, whose keys and values are written over later."""
        storage, slots = state.kept.storage, state.kept.slots(self.settings.block_size)
        keys, positions = torch.arange(slots.span, device=request.tail.device), slots.positions
        seen = keys <= positions[:, -1:, None]
        if self.settings.attention_window is not None:
            seen = seen & (keys > positions[..., None] - self.settings.attention_window)
        seen = seen.expand(-1, self.settings.block_size, -1)

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention(queries, *storage.update(number, slots, keys, values), seen)

        return self.network(state.context.model.embeddings(request.tail[:, 1:]), positions, attend)
