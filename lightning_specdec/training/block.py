"""Training a block drafter: DFlash with the Markov and confidence heads of DSpark.

A block starts at an anchor token: slot 0 reads the anchor's embedding, slots 1 to K - 1 a learned
mask. Slot i predicts the token i + 1 positions after the anchor, from the target's features before
the anchor and from all slots of its block. The Markov head then adds a bias that depends on the
token before, which in training is the text's own.

Shapes: B rows, T tokens, A blocks of K slots each, N slots of all blocks, D width of the target's
hidden states, R rank of the Markov head, W tokens of the draft, H query heads that share G keys, E
size of a head.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_specdec.config.checks import require_int
from lightning_specdec.data import Batch
from lightning_specdec.drafters import BlockDrafter
from lightning_specdec.drafters.block import BlockNetwork
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.draft_losses import TotalVariation
from lightning_specdec.training.eagle import FeatureTraining, grouped_product
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class BlockTraining(FeatureTraining):
    """Trains a `BlockDrafter` on the blocks of every `anchor_stride`-th token in one pass.

    Args:
        block_size: slots of a block; `num_draft_tokens` when None.
        num_layers: decoder layers.
        markov_rank: rank of the Markov head; 0 for none.
        min_confidence: see `BlockSettings`.
        anchor_stride: distance between anchors; the first anchor changes with each step. A larger
            stride makes steps cheaper, and each step learns less.
        options: see `FeatureTraining` and `DistillationTraining`.
    """

    drafter: BlockDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        block_size: int | None = None,
        num_layers: int = 1,
        markov_rank: int = 64,
        min_confidence: float = 0.0,
        anchor_stride: int = 2,
        feature_norms: bool = False,
        num_draft_tokens: int = 4,
        **options: Any,
    ) -> None:
        self.anchor_stride = require_int("anchor_stride", anchor_stride, 1)
        make = partial(
            BlockDrafter,
            block_size=block_size or num_draft_tokens,
            num_layers=num_layers,
            markov_rank=markov_rank,
            min_confidence=min_confidence,
        )
        super().__init__(
            make, target, feature_norms=feature_norms, num_draft_tokens=num_draft_tokens, **options
        )
        if num_draft_tokens > self.drafter.max_draft_tokens:
            raise ValueError(
                f"a round cannot have {num_draft_tokens} draft tokens of a block of "
                f"{self.drafter.max_draft_tokens}: lower num_draft_tokens or raise block_size"
            )

    @classmethod
    def recipe_arguments(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train a block drafter for a target of this shape."""
        return {
            **cls.layer_arguments(target),
            "position_decay": 0.6,
            "num_draft_tokens": 4,
            "anchor_stride": 2,
            "draft_vocabulary": target.draft_vocabulary,
        }

    def anchor_start_and_stride(self, num_tokens: int) -> tuple[int, int]:
        """The first anchor of an optimizer step, and the distance between anchors.

        They depend on the step's number only, so a resumed run has those of an uninterrupted one.
        Validations measure blocks at every token.
        """
        if not self.training:
            return 1, 1
        generator = torch.Generator().manual_seed(self.global_step)
        first_anchor = 1 + int(torch.randint(self.anchor_stride, (), generator=generator))
        # A short text has at least one block.
        return min(first_anchor, max(1, num_tokens - 2)), self.anchor_stride

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: a step for each slot, with the Markov head's input."""
        tokens = batch.tokens
        num_tokens = tokens.shape[1]
        first_anchor, stride = self.anchor_start_and_stride(num_tokens)
        last_anchor = max(num_tokens - 2, first_anchor)
        anchors = torch.arange(first_anchor, last_anchor + 1, stride, device=tokens.device)
        hidden = blocks(
            self.drafter.network,
            self.target.embeddings(tokens[:, anchors]),
            self.joined_features(outputs),
            anchors,
        )

        steps = []
        for slot in range(self.drafter.max_draft_tokens):
            # The last blocks reach beyond the text.
            inside_anchors = anchors[anchors + slot + 1 < num_tokens]
            previous_tokens = tokens[:, inside_anchors + slot]
            markov_input = self.drafter.before(previous_tokens).to(hidden.dtype)
            slot_hidden = hidden[:, : len(inside_anchors), slot]
            inputs = torch.cat((slot_hidden, markov_input), dim=-1)
            steps.append(DraftStep(inputs, first_index=first_anchor + slot + 1, stride=stride))
        return steps

    def _split(self, hidden: Float[Tensor, "N D_R"]) -> tuple[Tensor, Tensor]:
        """Separate a slot's output `[N, D]` from its Markov input `[N, R]`."""
        settings = self.drafter.network.settings
        slot_hidden, markov_input = hidden.split((settings.hidden_size, settings.markov_rank), -1)
        return slot_hidden, markov_input

    def step_logits(self, number: int, hidden: Float[Tensor, "N D_R"]) -> Float[Tensor, "N W"]:
        network = self.drafter.network
        slot_hidden, markov_input = self._split(hidden)
        return network.output(slot_hidden) + network.bias(markov_input)

    def step_losses(
        self,
        number: int,
        hidden: Tensor,
        log_probs: Tensor,
        labels: Tensor,
    ) -> Float[Tensor, "N"]:
        """See `DistillationTraining`; also trains the confidence head.

        Its loss is the cross-entropy with the probability that the draft token is accepted. It has
        no gradient for any other weight.
        """
        logits = self.step_logits(number, hidden)
        with torch.no_grad():
            rejection_probs = TotalVariation()(logits, log_probs, labels)
            acceptance_probs = (1 - rejection_probs).clamp(0, 1)

        slot_hidden, markov_input = self._split(hidden.detach())
        confidence_logits = self.drafter.network.confidence_logit(slot_hidden, markov_input)
        confidence_losses = functional.binary_cross_entropy_with_logits(
            confidence_logits.float(), acceptance_probs, reduction="none"
        )
        return self.loss(logits, log_probs, labels) + confidence_losses


def blocks(
    network: BlockNetwork,
    embedded: Float[Tensor, "B A D"],
    features: Float[Tensor, "B T D"],
    anchors: Int[Tensor, "A"],
) -> Float[Tensor, "B A K D"]:
    """The output head's input at all slots of the blocks that start at some tokens.

    Args:
        embedded: embedding of each anchor.
        features: features of all tokens, from `BlockNetwork.features`; a block attends to those
            before its anchor.
        anchors: index of each block's first token.
    """
    block_size = network.settings.block_size
    slot_offsets = torch.arange(block_size, device=anchors.device)
    positions = (anchors[:, None] + slot_offsets).flatten()

    token_indices = torch.arange(features.shape[1], device=features.device)
    slot_anchors = anchors.repeat_interleave(block_size)
    is_visible = token_indices < slot_anchors[:, None]
    if network.attention_window is not None:
        distances = positions[:, None] - token_indices
        is_visible &= distances < network.attention_window

    text_keys_values = network.context(features, token_indices[None])

    def attend(
        layer_index: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Float[Tensor, "B H N E"]:
        text_keys, text_values = text_keys_values[layer_index]
        return _attend_in_blocks(
            queries,
            keys.unflatten(2, (-1, block_size)),
            values.unflatten(2, (-1, block_size)),
            text_keys,
            text_values,
            is_visible,
        )

    hidden = network(embedded, positions[None], attend)
    return hidden.unflatten(1, (-1, block_size))


def _attend_in_blocks(
    queries: Float[Tensor, "B H N E"],
    keys: Float[Tensor, "B G A K E"],
    values: Float[Tensor, "B G A K E"],
    text_keys: Float[Tensor, "B G T E"],
    text_values: Float[Tensor, "B G T E"],
    is_visible: Bool[Tensor, "N T"],
) -> Float[Tensor, "B H N E"]:
    """Attention of all slots to the text before their anchors and to their own blocks.

    Args:
        keys: keys of the slots, block by block; values likewise.
        text_keys: keys of the text's features; values likewise.
        is_visible: whether a slot attends to a token of the text.
    """
    _, num_key_heads, num_blocks, block_size, head_size = keys.shape
    num_tokens = text_keys.shape[2]

    # Query heads that share a key head are one group: [B, G, H / G, N, E].
    grouped_queries = queries.unflatten(1, (num_key_heads, -1))
    scaled_queries = grouped_queries * head_size**-0.5

    # A slot's scores of the text, `[..., N, T]`.
    text_scores = grouped_product(scaled_queries, text_keys.transpose(-1, -2))
    text_scores = text_scores.masked_fill(~is_visible, -torch.inf)

    # A slot's scores of its block, `[..., N, K]`. All query heads of a group attend to the same
    # blocks: [B, G, 1, A, K, E].
    block_keys = keys[:, :, None]
    block_values = values[:, :, None]
    block_queries = scaled_queries.unflatten(3, (num_blocks, block_size))
    block_scores = block_queries @ block_keys.transpose(-1, -2)

    scores = torch.cat((text_scores, block_scores.flatten(3, 4)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)

    # The weighted sum of the values of the text and of the block.
    text_weights, block_weights = weights.split((num_tokens, block_size), dim=-1)
    text_output = grouped_product(text_weights, text_values)
    block_output = block_weights.unflatten(3, (num_blocks, block_size)) @ block_values
    output = text_output + block_output.flatten(3, 4)
    return output.flatten(1, 2)
