"""An autoregressive head that runs in OpenVINO, where its target does.

Shapes: B rows, T tokens, D width of the target's hidden states, F layers, K draft tokens, N scored tokens, P tokens of
all rows, without padding, V tokens of the target, W tokens of the draft.
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
from lightning_specdec.models.openvino import Compiled
from lightning_specdec.models.openvino_conversion import open_attention
from lightning_specdec.models.paged_state import PagedState, flatten_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int


ROLLED = 5
"""Draft tokens of one call that draws them itself: each costs half of one that the host draws (docs/log.md)."""
QUANTIZATION: str | None = "int8"
"""Of the weights: reading them is most of a draft token's cost (docs/log.md), and rounding them changes no output."""


class _Join(nn.Module):
    """The target's hidden states become features of the network's own."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Float[Tensor, "P 1 FD"]) -> Float[Tensor, "P 1 D"]:
        return self.network.joined(features)


class _Step(nn.Module):
    """Entries with features of the network's own."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network, self.attention = network, open_attention

    def forward(
        self,
        embedded: Float[Tensor, "P 1 D"],
        features: Float[Tensor, "P 1 D"],
        scored: Int[Tensor, "N"],
        positions: Int[Tensor, "P 1"],
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N W"]]:
        """The next features and the logits behind some entries."""
        attend = partial(self.attention, window=self.network.attention_window)
        last = self.network.layer(embedded, features, positions, attend)[:, 0].index_select(
            0, scored
        )
        return self.network.fed_back(last), self.network.logits(last)


class _Roll(nn.Module):
    """Entries with the target's hidden states, then `ROLLED` tokens that are each the likeliest after the last."""

    def __init__(self, network: EagleNetwork, vocabulary: Tensor | None) -> None:
        super().__init__()
        self.network, self.attention = network, open_attention
        self.vocabulary = None if vocabulary is None else nn.Buffer(vocabulary)

    def forward(
        self,
        embeddings: Float[Tensor, "V D"],
        embedded: Float[Tensor, "P 1 D"],
        features: Float[Tensor, "P 1 FD"],
        scored: Int[Tensor, "B"],
        positions: Int[Tensor, "P 1"],
    ) -> tuple[Int[Tensor, "B _"], Float[Tensor, "B _"]]:
        """The tokens, and how likely each is."""
        network, attend = (
            self.network,
            partial(self.attention, window=self.network.attention_window),
        )
        tokens, chances = list[Tensor](), list[Tensor]()
        hidden = network.layer(embedded, network.joined(features), positions, attend).index_select(
            0, scored
        )
        positions = positions.index_select(0, scored)
        for i in range(ROLLED):
            if i:
                positions = positions + 1
                embedded = nn.functional.embedding(tokens[-1], embeddings)[:, None].float()
                behind = partial(attend, past=positions[:, 0])
                hidden = network.layer(embedded, network.fed_back(hidden), positions, behind)
            logits = network.logits(hidden[:, 0])
            token = _largest(logits)
            chances.append(logits.softmax(-1).amax(-1))
            tokens.append(token if self.vocabulary is None else self.vocabulary[token])
        return torch.stack(tokens, dim=1), torch.stack(chances, dim=1)


def _largest(logits: Float[Tensor, "B W"]) -> Int[Tensor, "B"]:
    """As `argmax`, in operations that OpenVINO runs three times as fast."""
    order = torch.arange(logits.shape[-1], dtype=torch.int32)
    largest = logits.amax(-1, keepdim=True)
    return torch.where(logits >= largest, order, order[-1:]).amin(-1).long()


class EagleInOpenVINO:
    """The network of an `EagleDrafter`, compiled.

    Args:
        network: it is copied.
        vocabulary: the target's numbers of its tokens; None where they are the target's.
        embeddings: the target's, which it shares; None where they are not a plain table.
    """

    def __init__(
        self,
        network: EagleNetwork,
        vocabulary: Int[Tensor, "W"] | None,
        embeddings: Float[Tensor, "V D"] | None,
    ) -> None:
        self.dtype, settings = network.dtype, network.settings
        vectors, scored, positions = (
            torch.zeros(4, 1, settings.hidden_size),
            torch.arange(2),
            torch.arange(4)[:, None],
        )
        wide = vectors.repeat(1, 1, len(settings.feature_layers))
        kind = self.dtype, QUANTIZATION, (settings, ROLLED)
        self._join = Compiled.of(_Join(network), (wide,), *kind)
        self._step = Compiled.of(_Step(network), (vectors, vectors, scored, positions), *kind)
        self._roll: Compiled | None = None
        if embeddings is not None:
            inputs = embeddings, vectors, wide, scored, positions
            self._roll = Compiled.of(_Roll(network, vocabulary), inputs, *kind, shared=True)

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        """Keys and values of the entries; a roll may pass the end of the text."""
        return PagedState(batch_size, max_length + ROLLED, sizes=self._step.sizes, dtype=self.dtype)

    def advance(
        self,
        read: PagedState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T _"],
        lengths: Sequence[int] | None,
    ) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B W"]]:
        """As of `EagleDrafter`."""
        num_rows, num_entries = embedded.shape[:2]
        counts = [num_entries] * num_rows if lengths is None else list(lengths)
        inputs = _inputs(read, embedded, features, counts)
        if lengths is not None:
            inputs[1] = self._join.run([inputs[1]])[0]
        feature, logits = self._step.run(inputs, read)
        read.advance(num_entries, lengths)
        return feature[:, None], logits

    def roll(
        self,
        read: PagedState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T FD"],
        lengths: Sequence[int],
        num_tokens: int,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]] | None:
        """Read the next entries of every row as `advance` does, and draft K likeliest tokens behind them.

        Returns:
            The tokens and their probabilities; None where that many cannot be drafted at once.
        """
        if self._roll is None or not all(lengths) or not 1 < num_tokens <= ROLLED:
            return None
        tokens, chances = self._roll.run(
            _inputs(read, embedded, features, lengths, ROLLED - 1), read
        )
        read.advance(embedded.shape[1], lengths)
        return tokens[:, :num_tokens], chances[:, :num_tokens]


def _inputs(
    state: PagedState,
    embedded: Float[Tensor, "B T D"],
    features: Float[Tensor, "B T _"],
    lengths: Sequence[int],
    num_following: int = 0,
) -> list[Any]:
    """The network's inputs for the next entries of every row, of which the last one of each is scored.

    Args:
        lengths: how many of each row's T entries are real.
        num_following: draft tokens of each row that follow in the same call.
    """
    size = state.num_tokens[num_following].padded(sum(lengths))
    call = state.plan_call(state.consumed, lengths, size, num_following)
    vectors = []
    for rows in (embedded, features):
        vectors.append(call.pad(flatten_rows(rows, lengths)).float().contiguous())
    last_entries = [max(end - 1, 0) for end in accumulate(lengths)]
    scored = call.indices(np.array(last_entries))
    return [*vectors, scored, *call.inputs]
