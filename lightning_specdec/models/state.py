"""What a model remembers of the tokens that it has consumed, row by row, and the way back.

Knows nothing of the networks that fill it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

CHECK_INVARIANTS = False
"""Whether going back is checked to stay between commit and length. It reads the device, so only tests turn it on."""


class DecodeState(ABC):
    """The memory of a batch of rows while they are decoded.

    Attributes:
        committed: lengths below which no row goes back any more.
    """

    committed: Int[Tensor, "B"]

    @property
    @abstractmethod
    def lengths(self) -> Int[Tensor, "B"]:
        """Tokens consumed, row by row."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that it takes now."""

    def truncate(self, lengths: Int[Tensor, "B"]) -> None:
        """Go back to these absolute lengths: each between its row's last commit and its present length."""
        if CHECK_INVARIANTS:
            assert bool((lengths <= self.lengths).all()), f"cannot go forward from {self.lengths} to {lengths}"
            assert bool((lengths >= self.committed).all()), f"cannot go back to {lengths}, behind {self.committed}"
        self._go_back(lengths)

    @abstractmethod
    def _go_back(self, lengths: Int[Tensor, "B"]) -> None: ...

    def commit(self, lengths: Int[Tensor, "B"]) -> None:
        """Forget the way back below these lengths. Only what the target has judged is committed."""
        self.committed = lengths

    @abstractmethod
    def select(self, rows: Int[Tensor, "N"]) -> None:
        """Become a batch of N rows: row i is the former row `rows[i]`, or an empty one where that is -1."""

    def clear(self, rows: Int[Tensor, "N"]) -> None:
        """Empty these rows for the next request."""
        kept = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        kept[rows] = -1
        self.select(kept)

    def keep(self, path: Int[Tensor, "B N"]) -> None:
        """Of the slots just written keep these, in this order (for trees of guesses)."""
        raise NotImplementedError(f"{type(self).__name__} keeps no trees of guesses: draft a single path")


class RecurrentState(DecodeState):
    """The hidden states of a recurrent network since the last commit, all layers side by side.

    Theory: a recurrent network folds the whole past into one vector, which cannot be taken apart again. So the way
    back is to keep that vector for every token since the last commit, and to gather one for each row. While no row
    has gone back, the newest vectors are those to go on from, and nothing needs to be gathered at all.

    Args:
        batch_size: rows.
        state_size: hidden units of all layers together.
    """

    def __init__(self, batch_size: int, state_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        # Slot s of the joined chunks holds the state after `_origin + s` tokens; each chunk is [B, n, state_size].
        self._origin = self.committed
        self._chunks = [torch.zeros(batch_size, 1, state_size, device=device, dtype=dtype)]
        self._current: Tensor | None = self._chunks[0][:, 0]
        # Lengths are `_base + _ahead`. Rows are even while every length is that of the last slot.
        self._base, self._ahead, self._even = self.committed, 0, True

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        return self._base + self._ahead if self._ahead else self._base

    @property
    def memory_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def hidden(self) -> Float[Tensor, "B D"]:
        """Every row's hidden states after the tokens that it has consumed."""
        if self._current is None:
            chunk = self._joined()
            slots = self.lengths - self._origin
            if len(slots) > 1:
                slots = slots + torch.arange(len(slots), device=slots.device) * chunk.shape[1]
            self._current = chunk.flatten(0, 1).index_select(0, slots)
        return self._current

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Int[Tensor, "B"] | None = None) -> None:
        """Store the hidden states after each of T more tokens, and count the valid ones as consumed."""
        if self._even:
            self._chunks.append(hidden)
        else:
            past, (_, num_tokens, size) = self._joined(), hidden.shape
            slots = (self.lengths - self._origin)[:, None] + torch.arange(1, num_tokens + 1, device=hidden.device)
            room = torch.cat((past, past.new_zeros(past.shape[0], num_tokens, size)), dim=1)
            self._chunks = [room.scatter_(1, slots[..., None].expand(-1, -1, size), hidden)]
        if valid_lengths is None:
            self._ahead += hidden.shape[1]
            self._current = hidden[:, -1]
        else:
            self._base, self._ahead, self._even = self.lengths + valid_lengths, 0, False
            self._current = None

    def _joined(self) -> Float[Tensor, "B S D"]:
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, dim=1)]
        return self._chunks[0]

    def _go_back(self, lengths: Int[Tensor, "B"]) -> None:
        self._base, self._ahead, self._even, self._current = lengths, 0, False, None

    def commit(self, lengths: Int[Tensor, "B"]) -> None:
        super().commit(lengths)
        if lengths is self._base and not self._ahead:  # to where the rows are: the past can go
            self._chunks = [self.hidden()[:, None]]
            self._origin, self._even = lengths, True

    def select(self, rows: Int[Tensor, "N"]) -> None:
        source, empty = rows.clamp(min=0), rows < 0
        self._chunks = [_select(self._joined(), source, empty)]
        self._base, self._ahead = _select(self.lengths, source, empty), 0
        self.committed = _select(self.committed, source, empty)
        self._origin = _select(self._origin, source, empty)
        self._even, self._current = False, None


class KVState(DecodeState):
    """Attention's keys and values, layer by layer, in static buffers `[B, S, heads, head_size]`.

    Theory: position = length + offset and the mask is `key_position <= query_position`, so what lies beyond a row's
    length is never read, whatever it holds. To go back is to lower a length: nothing is cropped, padded or copied,
    rows of different lengths share one call, and every shape stays as it was.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes. One slot more takes the padding that falls behind them.
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
        self._lengths = self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._slots = torch.arange(max_length + 1, device=device)
        # Zeros, not empty: a NaN left in a masked slot would still poison attention through 0 * NaN.
        shape = (num_layers, batch_size, max_length + 1, num_heads, head_size)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        return self._lengths

    @property
    def memory_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def positions(self, num_tokens: int) -> Int[Tensor, "B T"]:
        """Positions in the text of the next `num_tokens` tokens of every row."""
        return self._lengths[:, None] + self._slots[:num_tokens]

    def update(
        self,
        layer: int,
        positions: Int[Tensor, "B T"],
        keys: Float[Tensor, "B T H D"],
        values: Float[Tensor, "B T H D"],
    ) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H D"]]:
        """Store a layer's keys and values at their positions; gives the whole buffers back."""
        num_slots = len(self._slots)
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None] * num_slots
        slots = (rows + positions.clamp(max=num_slots - 1)).flatten()
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            buffer.flatten(0, 1).index_copy_(0, slots, new.flatten(0, 1))
        return self.keys[layer], self.values[layer]

    def mask(self, positions: Int[Tensor, "B T"]) -> Bool[Tensor, "B T S"]:
        """True where a query may look: at its own position and before."""
        return self._slots <= positions[:, :, None]

    def advance(self, num_tokens: int, valid_lengths: Int[Tensor, "B"] | None = None) -> None:
        """Count the tokens that were just written."""
        self._lengths = self._lengths + (num_tokens if valid_lengths is None else valid_lengths)

    def _go_back(self, lengths: Int[Tensor, "B"]) -> None:
        self._lengths = lengths

    def select(self, rows: Int[Tensor, "N"]) -> None:
        source, empty = rows.clamp(min=0), rows < 0
        self._lengths = _select(self._lengths, source, empty)
        self.committed = _select(self.committed, source, empty)
        self.keys, self.values = (
            _select(buffer.transpose(0, 1), source, empty).transpose(0, 1).contiguous()
            for buffer in (self.keys, self.values)
        )


def _select(values: Tensor, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> Tensor:
    """The rows of `values` by `source`, zero where `empty`."""
    return values[source].masked_fill(empty.view(-1, *[1] * (values.dim() - 1)), 0)
