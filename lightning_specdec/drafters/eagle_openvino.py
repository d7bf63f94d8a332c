"""An autoregressive head that runs in OpenVINO, where its target does.

Shapes: B rows, T entries of a row, D width of the target's hidden states, F layers, K draft tokens,
S scored entries, N entries of all rows in one call, P the same with the call's padding, V tokens of
the target, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_specdec.drafters.eagle_network import EagleNetwork
from lightning_specdec.models.openvino import Compiled, computing_dtype
from lightning_specdec.models.openvino_conversion import open_attention
from lightning_specdec.models.paged_state import PagedState, flatten_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int


ROLLED = 5
"""Most draft tokens of a call that chooses them itself. Each costs half of one that the host
chooses (docs/log/2026-11.md, 26 November)."""
QUANTIZATION: str | None = "int8"
"""Quantization of the weights. Reading them is most of a draft token's cost (docs/log/2026-11.md),
and rounding them changes no output."""


class _Join(nn.Module):
    """Projects the target's hidden states to features of the head."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Float[Tensor, "P 1 FD"]) -> Float[Tensor, "P 1 D"]:
        return self.network.joined(features)


class _Step(nn.Module):
    """Reads entries that contain the head's own features."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network
        self.attention = open_attention

    def forward(
        self,
        embedded: Float[Tensor, "P 1 D"],
        features: Float[Tensor, "P 1 D"],
        scored: Int[Tensor, "S"],
        positions: Int[Tensor, "P 1"],
    ) -> tuple[Float[Tensor, "S D"], Float[Tensor, "S W"]]:
        """The features that the head reads next, and the logits of the scored entries."""
        attend = partial(self.attention, window=self.network.attention_window)
        hidden = self.network.layer(embedded, features, positions, attend)
        scored_hidden = hidden[:, 0].index_select(0, scored)
        next_features = self.network.fed_back(scored_hidden)
        logits = self.network.logits(scored_hidden)
        return next_features, logits


class _Roll(nn.Module):
    """Reads entries that contain the target's hidden states, then drafts `ROLLED` tokens
    greedily."""

    def __init__(self, network: EagleNetwork, vocabulary: Tensor | None) -> None:
        super().__init__()
        self.network = network
        self.attention = open_attention
        self.vocabulary = None if vocabulary is None else nn.Buffer(vocabulary)

    def forward(
        self,
        embeddings: Float[Tensor, "V D"],
        embedded: Float[Tensor, "P 1 D"],
        features: Float[Tensor, "P 1 FD"],
        scored: Int[Tensor, "B"],
        positions: Int[Tensor, "P 1"],
    ) -> tuple[Int[Tensor, "B _"], Float[Tensor, "B _"]]:
        """The draft tokens in the target's numbers, and their probabilities."""
        network = self.network
        attend = partial(self.attention, window=network.attention_window)
        joined_features = network.joined(features)
        hidden = network.layer(embedded, joined_features, positions, attend)

        # From here on, one entry of each row.
        hidden = hidden.index_select(0, scored)
        positions = positions.index_select(0, scored)

        draft_tokens: list[Tensor] = []
        token_probs: list[Tensor] = []
        for step in range(ROLLED):
            if step > 0:
                # Read the last draft token.
                positions = positions + 1
                token_embeddings = nn.functional.embedding(draft_tokens[-1], embeddings)
                embedded = token_embeddings[:, None].float()
                attend_to_past = partial(attend, past=positions[:, 0])
                own_features = network.fed_back(hidden)
                hidden = network.layer(embedded, own_features, positions, attend_to_past)

            logits = network.logits(hidden[:, 0])
            token_probs.append(logits.softmax(-1).amax(-1))
            tokens = _argmax(logits)
            if self.vocabulary is not None:
                tokens = self.vocabulary[tokens]
            draft_tokens.append(tokens)
        return torch.stack(draft_tokens, dim=1), torch.stack(token_probs, dim=1)


def _argmax(logits: Float[Tensor, "B W"]) -> Int[Tensor, "B"]:
    """The same as `argmax`, in operations that OpenVINO runs three times as fast."""
    # The lowest index of a largest logit; all other logits count as the last index.
    indices = torch.arange(logits.shape[-1], dtype=torch.int32)
    largest = logits.amax(-1, keepdim=True)
    candidates = torch.where(logits >= largest, indices, indices[-1:])
    return candidates.amin(-1).long()


class EagleInOpenVINO:
    """The network of an `EagleDrafter`, compiled.

    Args:
        network: the network; it is copied.
        vocabulary: the target's number of each draft token; None if they are the same.
        embeddings: the target's embedding table, whose memory is shared; None if it has no plain
            table.
    """

    def __init__(
        self,
        network: EagleNetwork,
        vocabulary: Int[Tensor, "W"] | None,
        embeddings: Float[Tensor, "V D"] | None,
    ) -> None:
        settings = network.settings
        self.dtype = network.dtype
        options = (self.dtype, QUANTIZATION, (settings, ROLLED))

        # Example inputs for tracing: four entries, of which two are scored.
        vectors = torch.zeros(4, 1, settings.hidden_size)
        target_vectors = vectors.repeat(1, 1, len(settings.feature_layers))
        scored = torch.arange(2)
        positions = torch.arange(4)[:, None]

        self._join = Compiled.of(_Join(network), (target_vectors,), *options)
        step_inputs = (vectors, vectors, scored, positions)
        self._step = Compiled.of(_Step(network), step_inputs, *options)

        self._roll: Compiled | None = None
        if embeddings is not None:
            roll = _Roll(network, vocabulary)
            roll_inputs = (embeddings, vectors, target_vectors, scored, positions)
            self._roll = Compiled.of(roll, roll_inputs, *options, shared=True)

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        """Keys and values of the entries. The tokens that one call drafts may pass the end of the
        text."""
        sizes = self._step.sizes
        dtype = computing_dtype(self.dtype)
        return PagedState(batch_size, max_length + ROLLED, sizes=sizes, dtype=dtype)

    def advance(
        self,
        state: PagedState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T _"],
        lengths: Sequence[int] | None,
    ) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B W"]]:
        """As of `EagleDrafter`."""
        num_rows, num_entries, _ = embedded.shape
        row_lengths = [num_entries] * num_rows
        if lengths is not None:
            row_lengths = list(lengths)
        embedded_vectors, feature_vectors, *other_inputs = _inputs(
            state, embedded, features, row_lengths
        )

        # With lengths the features are the target's, otherwise the head's own.
        if lengths is not None:
            (feature_vectors,) = self._join.run([feature_vectors])
        step_inputs = [embedded_vectors, feature_vectors, *other_inputs]
        next_features, logits = self._step.run(step_inputs, state)
        state.advance(num_entries, lengths)
        return next_features[:, None], logits

    def roll(
        self,
        state: PagedState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T FD"],
        lengths: Sequence[int],
        num_tokens: int,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]] | None:
        """Read the next entries of every row as `advance` does, and draft K tokens greedily after
        them.

        Returns:
            The tokens and their probabilities; None if that many cannot be drafted in one call.
        """
        if self._roll is None or num_tokens == 1 or num_tokens > ROLLED:
            return None
        # The call continues from an entry of each row.
        if not all(lengths):
            return None

        inputs = _inputs(state, embedded, features, lengths, num_following=ROLLED - 1)
        tokens, token_probs = self._roll.run(inputs, state)
        state.advance(embedded.shape[1], lengths)
        return tokens[:, :num_tokens], token_probs[:, :num_tokens]


def _inputs(
    state: PagedState,
    embedded: Float[Tensor, "B T D"],
    features: Float[Tensor, "B T _"],
    lengths: Sequence[int],
    num_following: int = 0,
) -> list[Any]:
    """The network's inputs for the next entries of every row, of which the last one of each is
    scored.

    Args:
        lengths: how many of each row's T entries are real.
        num_following: draft tokens of each row that follow in the same call.
    """
    size = state.num_tokens[num_following].padded(sum(lengths))
    call = state.plan_call(state.consumed, lengths, size, num_following)

    vectors = []
    for rows in (embedded, features):
        padded_rows = call.pad(flatten_rows(rows, lengths))
        vectors.append(padded_rows.float().contiguous())

    # The rows follow one another, so a row's last entry is the one before its end.
    last_entries = [max(end - 1, 0) for end in accumulate(lengths)]
    scored = call.indices(np.array(last_entries))
    return [*vectors, scored, *call.inputs]
