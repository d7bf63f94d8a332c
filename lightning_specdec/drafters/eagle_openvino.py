"""An autoregressive head that runs in OpenVINO, where its target does.

Shapes: B rows, T tokens, D width of the target's hidden states, F layers, N scored tokens, P tokens of all rows,
without padding, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.drafters.eagle_network import EagleNetwork
from lightning_specdec.models.openvino import Compiled, PagedState, lengthened
from lightning_specdec.models.openvino_conversion import open_attention

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _Step(nn.Module):
    """Entries with the target's hidden states, or with features of the network's own."""

    def __init__(self, network: EagleNetwork, joins: bool) -> None:
        super().__init__()
        self.network, self.joins, self.attention = network, joins, open_attention

    def forward(
        self,
        embedded: Float[Tensor, "P 1 D"],
        features: Float[Tensor, "P 1 _"],
        scored: Int[Tensor, "N"],
        positions: Int[Tensor, "P 1"],
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N W"]]:
        """The next features and the logits behind some entries."""

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self.attention(queries, keys, values, window=self.network.attention_window)

        if self.joins:
            features = self.network.joined(features)
        last = self.network.layer(embedded, features, positions, attend)[:, 0].index_select(0, scored)
        return self.network.fed_back(last), self.network.logits(last)


class EagleInOpenVINO:
    """The network of an `EagleDrafter`, compiled.

    Args:
        network: it is copied.
        quantization: of the copy's weights. Reading them is most of a draft token's cost (docs/log.md), and rounding
            them changes no output.
    """

    def __init__(self, network: EagleNetwork, quantization: str | None = "int8") -> None:
        self.dtype = network.dtype
        settings, places = network.settings, (torch.arange(2), torch.arange(4)[:, None])
        widths = {True: len(settings.feature_layers) * settings.hidden_size, False: settings.hidden_size}
        embedded = torch.zeros(4, 1, settings.hidden_size)
        self._steps = {
            joins: Compiled.of(
                _Step(network, joins), (embedded, torch.zeros(4, 1, width), *places), self.dtype, quantization
            )
            for joins, width in widths.items()
        }

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        """Keys and values of the entries; one more than the text has tokens."""
        return PagedState(batch_size, max_length + 1, sizes=self._steps[True].sizes, dtype=self.dtype)

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
        step = self._steps[lengths is not None]
        places = read.places(read.consumed, counts, step.num_tokens.padded(sum(counts)))
        scored = torch.tensor([max(end - 1, 0) for end in accumulate(counts)])
        flat = [each.flatten(0, 1) for each in (embedded, features)]
        if min(counts) < num_entries:
            real = (torch.arange(num_entries) < torch.tensor(counts)[:, None]).flatten()
            flat = [each[real] for each in flat]
        inputs = [lengthened(each, places).float().contiguous() for each in flat]
        feature, logits = step.run([*inputs, scored, *places], read)
        read.advance(num_entries, lengths)
        return torch.from_numpy(feature)[:, None], torch.from_numpy(logits)
