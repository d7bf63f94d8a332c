"""What a model remembers of the tokens that it has consumed, row by row, and the way back.

Knows nothing of the networks that fill it.

Both kinds here are static buffers with a length for each row. To go back is to lower a length: nothing is cropped,
padded or copied, rows of different lengths cost nothing extra, and every shape stays as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHECK_INVARIANTS = False
"""Whether going back is checked to stay between commit and length. It reads the device, so only tests turn it on."""


class DecodeState(ABC):
    """The memory of a batch of rows while they are decoded.

    Attributes:
        lengths: tokens consumed, row by row.
        committed: lengths below which no row goes back any more.
    """

    lengths: Int[Tensor, "B"]
    committed: Int[Tensor, "B"]

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that the buffers take."""

    def truncate(self, lengths: Int[Tensor, "B"]) -> None:
        """Go back to these absolute lengths: each between its row's last commit and its present length."""
        if CHECK_INVARIANTS:
            assert bool((lengths <= self.lengths).all()), f"cannot go forward from {self.lengths} to {lengths}"
            assert bool((lengths >= self.committed).all()), f"cannot go back to {lengths}, behind {self.committed}"
        self.lengths = lengths

    def commit(self, lengths: Int[Tensor, "B"]) -> None:
        """Forget the way back below these lengths. Only the target's verdict commits."""
        self.committed = lengths

    @abstractmethod
    def select(self, rows: Int[Tensor, "N"]) -> None:
        """Become a batch of N rows: row i is the former row `rows[i]`, or an empty one where that is -1."""

    def clear(self, rows: Int[Tensor, "N"]) -> None:
        """Empty these rows for the next request."""
        kept = torch.arange(self.batch_size, device=self.lengths.device)
        kept[rows] = -1
        self.select(kept)

    def keep(self, path: Int[Tensor, "B N"]) -> None:
        """Of the slots just written keep these, in this order (for trees of guesses)."""
        raise NotImplementedError(f"{type(self).__name__} keeps no trees of guesses: draft a single path")


class BufferState(DecodeState):
    """A state made of buffers `[B, S, ...]` in which slot s of row b belongs to one position of that row's text.

    Args:
        batch_size: rows.
        num_slots: how many positions a row may use. One spare slot more takes the padding that falls behind them.
        buffers: by name, the shape of one slot.
    """

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        buffers: dict[str, tuple[int, ...]],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots + 1
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.committed = self.lengths
        # Zeros, not empty: a NaN left in a masked slot would still poison attention through 0 * NaN.
        self.buffers = {
            name: torch.zeros(batch_size, self.num_slots, *shape, device=device, dtype=dtype)
            for name, shape in buffers.items()
        }
        self._index_rows()

    def _index_rows(self) -> None:
        self.row_offsets = torch.arange(self.batch_size, device=self.lengths.device)[:, None] * self.num_slots
        self._steps = torch.arange(self.num_slots, device=self.lengths.device)

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def positions(self, num_tokens: int) -> Int[Tensor, "B T"]:
        """Positions in the text of the next `num_tokens` tokens of every row."""
        return self.lengths[:, None] + self._steps[:num_tokens]

    def write(self, name: str, positions: Int[Tensor, "B T"], values: Float[Tensor, "B T *slot"]) -> None:
        """Store one value for each position of each row; padding beyond the last slot lands in the spare one."""
        slots = (self.row_offsets + positions.clamp(max=self.num_slots - 1)).flatten()
        self.buffers[name].flatten(0, 1).index_copy_(0, slots, values.flatten(0, 1))

    def read(self, name: str, positions: Int[Tensor, "B"]) -> Float[Tensor, "B *slot"]:
        """The value at one position of each row."""
        return self.buffers[name].flatten(0, 1).index_select(0, self.row_offsets[:, 0] + positions)

    def advance(self, num_tokens: int, valid_lengths: Int[Tensor, "B"] | None) -> None:
        """Count the tokens that were just written."""
        self.lengths = self.lengths + (num_tokens if valid_lengths is None else valid_lengths)

    def select(self, rows: Int[Tensor, "N"]) -> None:
        source, empty = rows.clamp(min=0), rows < 0
        self.lengths = self.lengths[source].masked_fill(empty, 0)
        self.committed = self.committed[source].masked_fill(empty, 0)
        for name, buffer in self.buffers.items():
            self.buffers[name] = buffer[source].masked_fill(empty.view(-1, *[1] * (buffer.dim() - 1)), 0)
        self._index_rows()


class RecurrentState(BufferState):
    """The hidden states of a recurrent network, all layers side by side in one buffer.

    Theory: a recurrent network folds the whole past into one vector, which cannot be taken apart again. So the way
    back is to keep that vector for every position: slot s holds the layers' hidden states after s tokens, slot 0 the
    zeros that every sequence starts from. That is a vector for each token, far less than attention's keys and values.

    Args:
        state_size: hidden units of all layers together.
        max_length: most tokens that a row consumes.
    """

    def __init__(
        self, batch_size: int, max_length: int, state_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(batch_size, max_length + 1, {"hidden": (state_size,)}, device=device, dtype=dtype)

    def hidden(self) -> Float[Tensor, "B D"]:
        """Every row's hidden states after the tokens that it has consumed."""
        return self.read("hidden", self.lengths)

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Int[Tensor, "B"] | None = None) -> None:
        """Store the hidden states after each of T more tokens, and count the valid ones as consumed."""
        num_tokens = hidden.shape[1]
        self.write("hidden", self.positions(num_tokens) + 1, hidden)
        self.advance(num_tokens, valid_lengths)


class KVState(BufferState):
    """Attention's keys and values, layer by layer, in static buffers.

    Theory: position = length + offset and the mask is `key_position <= query_position`, so what lies beyond a row's
    length is never read, whatever it holds. A rejected token is forgotten by lowering the length, and rows of
    different lengths share one call without padding or realignment.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        slot = (num_heads, head_size)
        names = [f"{kind}{layer}" for layer in range(num_layers) for kind in ("keys", "values")]
        super().__init__(batch_size, max_length, dict.fromkeys(names, slot), device=device, dtype=dtype)

    def update(
        self,
        layer: int,
        positions: Int[Tensor, "B T"],
        keys: Float[Tensor, "B T H D"],
        values: Float[Tensor, "B T H D"],
    ) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H D"]]:
        """Store a layer's keys and values at their positions; gives the whole buffers back."""
        self.write(f"keys{layer}", positions, keys)
        self.write(f"values{layer}", positions, values)
        return self.buffers[f"keys{layer}"], self.buffers[f"values{layer}"]

    def mask(self, positions: Int[Tensor, "B T"]) -> Tensor:
        """`[B, T, S]`, true where a query may look: at its own position and before."""
        return self._steps <= positions[:, :, None]
