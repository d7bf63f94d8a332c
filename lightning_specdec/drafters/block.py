"""Block drafting: one pass over a block of positions yields the logits of all of a round's tokens.

Position 0 of a block has the text's last token, the anchor, and scores the token after it. The
other positions are masked; position i scores the token i positions further on. All positions attend
to the target's features before the anchor, and to each other.

Shapes: B rows, T tokens, K draft tokens, N positions of a block, A blocks, D hidden size of the
target, H query heads, G key and value heads, E head size, R rank of the Markov head, W tokens of
the draft.
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
from lightning_specdec.drafters.sampling_drafter import (
    DraftSampler,
    empty_draft,
    limit_draft,
    make_draft,
)
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

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
                f"attention_window must be at least block_size, {self.block_size}, got "
                f"{self.attention_window}"
            )


class BlockLayer(nn.Module):
    """A decoder layer that attends to the block's own positions and to the target's features.

    As in Qwen3, norms are RMSNorm, queries and keys are normalized head by head, positions are
    rotary and the inner network is SwiGLU.
    """

    def __init__(self, settings: BlockSettings, head_size: int) -> None:
        super().__init__()
        hidden_size = settings.hidden_size
        query_size = settings.num_heads * head_size
        key_size = settings.num_key_heads * head_size
        inner_size = settings.intermediate_size
        epsilon = settings.norm_eps
        self.head_size = head_size
        self.rotary_base = settings.rotary_base

        # The attention.
        self.input_norm = nn.RMSNorm(hidden_size, eps=epsilon)
        self.query = nn.Linear(hidden_size, query_size, bias=False)
        self.key_value = nn.Linear(hidden_size, 2 * key_size, bias=False)
        self.query_norm = nn.RMSNorm(head_size, eps=epsilon)
        self.key_norm = nn.RMSNorm(head_size, eps=epsilon)
        self.attention_output = nn.Linear(query_size, hidden_size, bias=False)

        # The inner network.
        self.inner_norm = nn.RMSNorm(hidden_size, eps=epsilon)
        self.gate_up = nn.Linear(hidden_size, 2 * inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def keys_values(
        self,
        normed: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
    ) -> KeysValues:
        """Keys and values of T tokens or positions, from their normalized features or inputs."""
        heads = self._split_heads(self.key_value(normed))
        keys, values = heads.chunk(2, dim=1)
        keys = rotate(self.key_norm(keys), positions, self.rotary_base)
        # Under autocast, the norm may return another dtype.
        return keys.to(values.dtype), values

    def forward(
        self,
        hidden: Float[Tensor, "B N D"],
        positions: Int[Tensor, "#B N"],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "B N D"]:
        """The layer's output at N positions.

        Args:
            attend: attention over the keys and values of these positions and of the features.
        """
        normed = self.input_norm(hidden)
        keys, values = self.keys_values(normed, positions)
        queries = self._split_heads(self.query(normed))
        queries = rotate(self.query_norm(queries), positions, self.rotary_base)
        # Under autocast, the norm may return another dtype.
        queries = queries.to(values.dtype)

        attended_heads = attend(queries, keys, values)
        attended = attended_heads.transpose(1, 2).flatten(2)
        hidden = hidden + self.attention_output(attended)

        normed_hidden = self.inner_norm(hidden)
        gate, up = self.gate_up(normed_hidden).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)

    def _split_heads(self, projected: Float[Tensor, "B T _"]) -> Float[Tensor, "B _ T E"]:
        heads = projected.unflatten(-1, (-1, self.head_size))
        return heads.transpose(1, 2)


class BlockNetwork(FeatureNetwork):
    """Decoder layers over a block of positions, with a Markov head and a confidence head.

    Args:
        settings: sizes.
        num_tokens: W.
    """

    def __init__(self, settings: BlockSettings, num_tokens: int) -> None:
        super().__init__(settings)
        hidden_size = settings.hidden_size
        rank = settings.markov_rank
        self.mask = nn.Parameter(0.02 * torch.randn(hidden_size))
        # The anchor's embedding starts as small as the mask. If the target ties its embeddings to
        # its output head, a larger one would make position 0 predict the anchor itself.
        self.anchor_scale = nn.Parameter(torch.full((1,), 0.1))
        self.context_norm = self._norm()
        self.layers = nn.ModuleList()
        for _ in range(settings.num_layers):
            self.layers.append(BlockLayer(settings, self.head_size))
        self.output_norm = self._norm()
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

        # The Markov head is an embedding of the previous token and its projection to logits.
        self.markov_input: nn.Embedding | None = None
        self.markov_output: nn.Linear | None = None
        if rank:
            self.markov_input = nn.Embedding(num_tokens, rank)
            self.markov_output = nn.Linear(rank, num_tokens, bias=False)
        self.confidence = nn.Linear(hidden_size + rank, 1)

        if self.markov_output is not None:
            # Without training, the head changes nothing.
            nn.init.zeros_(self.markov_output.weight)

    def context(
        self,
        features: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
    ) -> list[KeysValues]:
        """Each layer's keys and values of the target's features."""
        normed = self.context_norm(features)
        layers: Any = self.layers
        return [layer.keys_values(normed, positions) for layer in layers]

    def forward(
        self,
        anchors: Float[Tensor, "B A D"],
        positions: Int[Tensor, "#B N"],
        attend: Attend,
    ) -> Float[Tensor, "B N D"]:
        """The output head's input at the N positions of A blocks.

        Args:
            anchors: embedding of each block's first token.
            positions: of all blocks, one block after the other.
            attend: attention of a layer, given by number, over these positions and the features.
        """
        # A block is its first token, and masks at all other positions.
        batch_size, num_blocks, _ = anchors.shape
        num_masked = self.settings.block_size - 1
        mask = self.mask.to(self.dtype)
        masked_inputs = mask.expand(batch_size, num_blocks, num_masked, -1)
        anchor_inputs = self.anchor_scale * anchors.to(self.dtype)
        block_inputs = torch.cat((anchor_inputs[:, :, None], masked_inputs), dim=2)

        hidden = block_inputs.flatten(1, 2)
        for layer_index, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, partial(attend, layer_index))
        return self.output_norm(hidden)

    def before(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B R"]:
        """The Markov head's embedding of the token before a position; zero for tokens below 0."""
        if self.markov_input is None:
            return self.mask.new_zeros(*tokens.shape, 0)
        is_token = tokens >= 0
        embedded = self.markov_input(tokens.clamp(min=0))
        return embedded * is_token[..., None]

    def bias(self, before: Float[Tensor, "*B R"]) -> Float[Tensor, "*B W"] | float:
        """The Markov head's bias: what the token before a position adds to its logits."""
        if self.markov_output is None:
            return 0.0
        return self.markov_output(before)

    def confidence_logit(
        self,
        hidden: Float[Tensor, "*B D"],
        before: Float[Tensor, "*B R"],
    ) -> Float[Tensor, "*B"]:
        """The confidence head: the logit of the probability that a position's token is accepted.

        The probability is conditional on all tokens before it being accepted.
        """
        inputs = torch.cat((hidden, before), dim=-1)
        logits = self.confidence(inputs)
        return logits.squeeze(-1)


class BlockDrafter(FeatureDrafter):
    """Drafts a block of tokens in one pass over the target's hidden states.

    Chen et al. 2026, "DFlash", with the Markov head and the confidence head of DSpark. In the
    Markov head, the token before a position adds a low-rank bias to its logits, so tokens are drawn
    one by one and their distributions are exact. The confidence head ends the window before a
    position that is rarely accepted. All positions are computed whatever the window, which changes
    no distribution.
    """

    Settings, Network = BlockSettings, BlockNetwork
    settings: BlockSettings
    network: BlockNetwork

    @property
    def max_draft_tokens(self) -> int:
        return self.settings.block_size

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> FeatureState:
        # The block's keys and values are stored after the text's.
        return super().init_state(batch_size, max_length + self.settings.block_size, context)

    def before(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B R"]:
        """`BlockNetwork.before` for token IDs of the target."""
        if self.draft_vocabulary is not None:
            tokens = self.draft_vocabulary.to_draft(tokens, missing=-1)
        return self.network.before(tokens)

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        windows = state.possible_windows(request, windows)
        windows = [min(window, self.max_draft_tokens) for window in windows]
        num_draft_tokens = max(windows)
        if num_draft_tokens == 0:
            return empty_draft(request)

        self._read_features(state, request)
        hidden = self._block_hidden(state, request)[:, :num_draft_tokens]
        anchors = request.last_two_tokens[:, 1].contiguous()

        outputs = self.run(
            request,
            windows,
            sampling,
            self._draw_tokens,
            hidden,
            anchors,
            vocabulary=self.draft_vocabulary,
        )
        draft = make_draft(outputs, windows, request, num_calls=1)
        *_, confidences = outputs
        if confidences is None or not self.settings.min_confidence:
            return draft

        # The first token costs no further pass, so it is always proposed. The others are, while the
        # probability that all tokens up to them are accepted is high enough. It depends on hidden
        # states and earlier tokens only, so ending the window there does not bias the output.
        joint_confidences = confidences.float().cumprod(1)
        is_confident = joint_confidences[:, 1:] >= self.settings.min_confidence
        return limit_draft(draft, 1 + is_confident.sum(1))

    def _draw_tokens(
        self,
        sampler: DraftSampler,
        hidden: Float[Tensor, "B K D"],
        anchors: Int[Tensor, "B"],
    ) -> Float[Tensor, "B K"]:
        """Draw K tokens of each row, one after the other.

        Args:
            hidden: the network's output at the block's first K positions.

        Returns:
            The confidence head's probability for each token.
        """
        block_logits = self.network.output(hidden)
        previous_tokens = anchors
        confidences = []
        for i in range(hidden.shape[1]):
            markov_embedding = self.before(previous_tokens)
            confidence_logit = self.network.confidence_logit(hidden[:, i], markov_embedding)
            confidences.append(confidence_logit.sigmoid())

            logits = block_logits[:, i] + self.network.bias(markov_embedding)
            previous_tokens = sampler.draw(logits)
        return torch.stack(confidences, dim=1)

    def _read_features(self, state: FeatureState, request: DraftRequest) -> None:
        """Store keys and values of the final text's features that have not been read yet."""
        cache = state.entry_cache
        starts: list[int] = []
        lengths: list[int] = []
        for text, num_known, num_read in zip(
            request.texts, state.num_known, cache.consumed, strict=True
        ):
            end = min(len(text) - 1, num_known)
            start = min(end, num_read)
            starts.append(start)
            lengths.append(end - start)
        cache.truncate(starts)

        # As wide as the most tokens that a round adds, so shapes do not depend on acceptance.
        width = max(state.num_scored, *lengths)
        slots = cache.slots(width)
        hidden = state.hidden(starts, width, lengths)
        features = self.network.joined(hidden)
        context = self.network.context(features, slots.positions)
        for layer_index, (keys, values) in enumerate(context):
            cache.storage.update(layer_index, slots, keys, values)
        cache.advance(width, lengths)

    def _block_hidden(self, state: FeatureState, request: DraftRequest) -> Float[Tensor, "B N D"]:
        """The network's output at the positions of each row's block.

        The block's keys and values are stored after those of the final text, without counting them
        as consumed. Later calls overwrite them.
        """
        cache = state.entry_cache
        slots = cache.slots(self.settings.block_size)
        mask = self._block_mask(slots.positions, slots.span)

        def attend(layer_index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = cache.storage.update(layer_index, slots, keys, values)
            return attention(queries, all_keys, all_values, mask)

        last_tokens = request.last_two_tokens[:, 1:]
        anchors = state.context.model.embeddings(last_tokens)
        return self.network(anchors, slots.positions, attend)

    def _block_mask(self, positions: Int[Tensor, "B N"], num_slots: int) -> Bool[Tensor, "B N S"]:
        """True where a position of the block attends to a slot: the text and the whole block."""
        slot_positions = torch.arange(num_slots, device=positions.device)
        last_position = positions[:, -1:, None]
        mask = slot_positions <= last_position
        window = self.settings.attention_window
        if window is not None:
            is_in_window = slot_positions > positions[..., None] - window
            mask = mask & is_in_window
        return mask.expand(-1, self.settings.block_size, -1)
