"""Training a block drafter on blocks of its own that begin all over a text.

Shapes: B rows, T tokens, A blocks of K places each, D width of the target's hidden states, R rank of the Markov head,
W tokens of the draft, H query heads that share G keys, E size of a head, N positions.
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
from lightning_specdec.training.eagle import FeatureTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class BlockTraining(FeatureTraining):
    """Trains a `BlockDrafter`: blocks begin at every `anchor_stride`-th token, all in one pass, and the token before
    each place is the text's own.

    Args:
        block_size: places of a block; `num_draft_tokens` when None.
        num_layers: decoder layers.
        markov_rank: rank of the Markov head; 0 for none.
        min_confidence: as of `BlockSettings`.
        anchor_stride: from one block's beginning to the next, the first at a place that changes with each step. Larger
            ones cost less of a step and learn less from it.
        options: those of `FeatureTraining` and `DistillationTraining`.
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
        own = {
            "block_size": block_size or num_draft_tokens,
            "num_layers": num_layers,
            "markov_rank": markov_rank,
        }
        make = partial(BlockDrafter, **own, min_confidence=min_confidence)
        self.anchor_stride = require_int("anchor_stride", anchor_stride, 1)
        super().__init__(
            make, target, feature_norms=feature_norms, num_draft_tokens=num_draft_tokens, **options
        )
        if (most := self.drafter.max_draft_tokens) < num_draft_tokens:
            raise ValueError(
                f"a round cannot have {num_draft_tokens} draft tokens of a block of {most}: lower num_draft_tokens or "
                "raise block_size"
            )

    def first_anchor(self, num_tokens: int) -> tuple[int, int]:
        """Where blocks of an optimizer step begin, and how far apart: depends on its number alone, so that runs can
        resume. Everywhere when it is measured."""
        if not self.training:
            return 1, 1
        generator = torch.Generator().manual_seed(self.global_step)
        first = 1 + int(torch.randint(self.anchor_stride, (), generator=generator))
        return min(first, max(1, num_tokens - 2)), self.anchor_stride

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        network, num_tokens, size = (
            self.drafter.network,
            batch.tokens.shape[1],
            self.drafter.max_draft_tokens,
        )
        features = network.features(
            [outputs.features[layer][:, :-1].float() for layer in self.layers()]
        )
        first, stride = self.first_anchor(num_tokens)
        anchors = torch.arange(
            first, max(num_tokens - 1, first + 1), stride, device=batch.tokens.device
        )
        hidden = blocks(
            network, self.target.embeddings(batch.tokens[:, anchors]), features, anchors
        )
        steps = []
        for i in range(size):
            inside = anchors[anchors + 1 + i < num_tokens]  # those whose place i is of the text
            before = self.drafter.before(batch.tokens[:, inside + i])
            inputs = torch.cat((hidden[:, : len(inside), i], before.to(hidden.dtype)), dim=-1)
            steps.append(DraftStep(inputs, first + 1 + i, stride))
        return steps

    def step_logits(self, number: int, hidden: Float[Tensor, "N D_R"]) -> Float[Tensor, "N W"]:
        network = self.drafter.network
        normed, before = hidden.split(
            (network.settings.hidden_size, network.settings.markov_rank), dim=-1
        )
        return network.output(normed) + network.bias(before)

    def step_losses(
        self, number: int, hidden: Tensor, log_probs: Tensor, labels: Tensor
    ) -> Float[Tensor, "N"]:
        """See `DistillationTraining`; and the cross-entropy of the chance that a draft token is kept, which changes the
        confidence head alone."""
        network = self.drafter.network
        logits = self.step_logits(number, hidden)
        with torch.no_grad():
            kept = (1 - TotalVariation()(logits, log_probs, labels)).clamp(0, 1)
        normed, before = hidden.detach().split(
            (network.settings.hidden_size, network.settings.markov_rank), dim=-1
        )
        confidence = network.confidence_logit(normed, before).float()
        confidence_loss = functional.binary_cross_entropy_with_logits(
            confidence, kept, reduction="none"
        )
        return self.loss(logits, log_probs, labels) + confidence_loss


def blocks(
    network: BlockNetwork,
    embedded: Float[Tensor, "B A D"],
    features: Float[Tensor, "B T D"],
    anchors: Int[Tensor, "A"],
) -> Float[Tensor, "B A K D"]:
    """What the output head reads at the places of blocks that begin at these tokens, computed together.

    Args:
        embedded: embedding of each anchor.
        features: of all tokens, from `BlockNetwork.features`; a block sees those before its anchor.
    """
    size, window = network.settings.block_size, network.attention_window
    tokens = torch.arange(features.shape[1], device=features.device)
    places = (anchors[:, None] + torch.arange(size, device=anchors.device)).flatten()
    context = network.context(features, tokens[None])
    seen = tokens < anchors.repeat_interleave(size)[:, None]
    if window is not None:
        seen &= places[:, None] - tokens < window

    def attend(
        number: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Float[Tensor, "B H N E"]:
        old_keys, old_values = context[number]
        queries = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[-1] ** -0.5
        old = (queries.flatten(2, 3) @ old_keys.transpose(-1, -2)).unflatten(2, (-1, len(places)))
        keys, values = (each.unflatten(2, (-1, size))[:, :, None] for each in (keys, values))
        own = (queries.unflatten(3, (-1, size)) @ keys.transpose(-1, -2)).flatten(3, 4)
        scores = torch.cat((old.masked_fill(~seen, -torch.inf), own), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        theirs, ours = weights.split((len(tokens), size), dim=-1)
        output = (theirs.flatten(2, 3) @ old_values).unflatten(2, (-1, len(places)))
        return (output + (ours.unflatten(3, (-1, size)) @ values).flatten(3, 4)).flatten(1, 2)

    return network(embedded, places[None], attend).unflatten(1, (-1, size))
