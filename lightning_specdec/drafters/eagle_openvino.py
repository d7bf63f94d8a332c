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
from lightning_specdec.models.openvino import Compiled, PagedState
from lightning_specdec.models.openvino_conversion import open_attention

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _Join(nn.Module):
    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, *hidden: Float[Tensor, "1 P D"]) -> Float[Tensor, "1 P D"]:
        return self.network.features(hidden)


class _Step(nn.Module):
    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network, self.attention = network, open_attention

    def forward(
        self,
        embedded: Float[Tensor, "1 P D"],
        features: Float[Tensor, "1 P D"],
        scored: Int[Tensor, "N"],
        positions: Int[Tensor, "1 P"],
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N W"]]:
        """The next features and the logits behind some entries."""

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self.attention(queries, keys, values, window=self.network.attention_window)

        last = self.network.layer(embedded, features, positions, attend)[0].index_select(0, scored)
        return self.network.fed_back(last), self.network.logits(last)


class EagleInOpenVINO:
    """The network of an `EagleDrafter`, compiled.

    Args:
        network: it is copied.
        quantization: of the copy's weights; its target's.
    """

    def __init__(self, network: EagleNetwork, quantization: str | None) -> None:
        self.dtype = network.dtype
        size, num_layers = network.settings.hidden_size, len(network.settings.feature_layers)
        hidden, places = torch.zeros(1, 4, size), (torch.arange(2), torch.arange(4)[None])
        self._join = Compiled.of(_Join(network), (hidden,) * num_layers, self.dtype, quantization)
        self._step = Compiled.of(_Step(network), (hidden, hidden, *places), self.dtype, quantization)

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        """Keys and values of the entries; one more than the text has tokens."""
        return PagedState(batch_size, max_length + 1, sizes=self._step.sizes, dtype=self.dtype)

    def features(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        """As `EagleNetwork.features`."""
        flat = [each.float().flatten(0, 1)[None].contiguous() for each in hidden]
        return torch.from_numpy(self._join.run(flat)[0][0]).to(self.dtype).unflatten(0, hidden[0].shape[:2])

    def advance(
        self,
        read: PagedState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T D"],
        lengths: Sequence[int] | None,
    ) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B W"]]:
        """Read the next T entries of every row, `lengths` of which are real: the next feature and the logits behind."""
        num_rows, num_entries = embedded.shape[:2]
        counts = [num_entries] * num_rows if lengths is None else list(lengths)
        positions, *places = read.places(read.consumed, counts)
        scored = torch.tensor([max(end - 1, 0) for end in accumulate(counts)])
        real = torch.arange(num_entries) < torch.tensor(counts)[:, None]
        inputs = [each.float()[real][None] for each in (embedded, features)]
        feature, logits = self._step.run([*inputs, scored, positions, *places], read)
        read.advance(num_entries, lengths)
        return torch.from_numpy(feature)[:, None], torch.from_numpy(logits)
