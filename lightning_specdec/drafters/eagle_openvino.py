"""An autoregressive head that runs in OpenVINO, where its target does.

Shapes: B rows, T tokens, D width of the target's hidden states, F layers, N scored tokens, P tokens of all rows,
without padding, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.drafters.eagle_network import EagleNetwork
from lightning_specdec.models.openvino import Compiled, PagedState, lengthened
from lightning_specdec.models.openvino_conversion import open_attention

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self.attention(queries, keys, values, window=self.network.attention_window)

        last = self.network.layer(embedded, features, positions, attend)[:, 0].index_select(0, scored)
        return self.network.fed_back(last), self.network.logits(last)


class EagleInOpenVINO:
    """The network of an `EagleDrafter`, compiled.

    Args:
        network: it is copied.
    """

    def __init__(self, network: EagleNetwork) -> None:
        self.dtype, settings = network.dtype, network.settings
        vectors = torch.zeros(4, 1, settings.hidden_size)
        wide = vectors.repeat(1, 1, len(settings.feature_layers))
        inputs = vectors, vectors, torch.arange(2), torch.arange(4)[:, None]
        self._join = Compiled.of(_Join(network), (wide,), self.dtype, QUANTIZATION)
        self._step = Compiled.of(_Step(network), inputs, self.dtype, QUANTIZATION)

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        """Keys and values of the entries; one more than the text has tokens."""
        return PagedState(batch_size, max_length + 1, sizes=self._step.sizes, dtype=self.dtype)

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
        step = self._step
        places = read.places(read.consumed, counts, read.num_tokens[0].padded(sum(counts)))
        scored = torch.tensor([max(end - 1, 0) for end in accumulate(counts)])
        flat = [each.flatten(0, 1) for each in (embedded, features)]
        if min(counts) < num_entries:
            real = (torch.arange(num_entries) < torch.tensor(counts)[:, None]).flatten()
            flat = [each[real] for each in flat]
        embedded, features = (lengthened(each, places).float().contiguous() for each in flat)
        given: Any = features if lengths is None else self._join.run([features])[0]
        feature, logits = step.run([embedded, given, scored, *places], read)
        read.advance(num_entries, lengths)
        return feature[:, None], logits
