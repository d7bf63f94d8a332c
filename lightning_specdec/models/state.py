"""What a model remembers of the tokens that it has consumed, row by row, and the way back.

Lengths live on the host, which counts the tokens that it feeds; a copy goes to the device where a kernel needs one. So
going back is checked always, and costs the device nothing.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.models.graphs import SPAN_STEP, GraphCache

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Lengths = Sequence[int] | Tensor
"""A number of tokens for each row; a tensor is read to the host."""


class DecodeState(ABC):
    """The memory of a batch of rows while they are decoded.

    Attributes:
        consumed: tokens consumed, row by row.
        committed: lengths below which no row goes back any more.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.consumed = [0] * batch_size
        self.committed = [0] * batch_size
        self.device = device
        self._lengths: tuple[list[int], Tensor] | None = None
        self._uploaded = False

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Tokens consumed, row by row, on the device. Uploaded when they have changed otherwise than by `advance`."""
        if self._lengths is None or self._lengths[0] is not self.consumed:
            self._lengths = self.consumed, torch.tensor(self.consumed, device=self.device)
        return self._lengths[1]

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that it takes now."""

    def truncate(self, lengths: Lengths, uploaded: Int[Tensor, "B"] | None = None) -> None:
        """Go back to these absolute lengths: each between its row's last commit and its present length.

        Args:
            uploaded: the same lengths on the device, where they are there already.
        """
        lengths = as_list(lengths)
        if lengths != self.consumed:
            self._truncate(lengths)
        self._uploaded = uploaded is not None
        if uploaded is not None:
            self._lengths = self.consumed, uploaded

    def _truncate(self, lengths: list[int]) -> None:
        for length, first, last in zip(lengths, self.committed, self.consumed, strict=True):
            assert first <= length <= last, f"cannot go from {self.consumed} to {lengths}: committed {self.committed}"
        self._go_back()
        self.consumed = lengths

    @abstractmethod
    def _go_back(self) -> None:
        """What going back needs besides a change of `consumed`."""

    def commit(self, lengths: Lengths) -> None:
        """Forget the way back below these lengths. Only what the target has judged is committed."""
        lengths = as_list(lengths)
        for length, first, last in zip(lengths, self.committed, self.consumed, strict=True):
            assert first <= length <= last, f"cannot commit {lengths} of {self.consumed}: committed {self.committed}"
        self.committed = lengths

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        """Count tokens as consumed: `num_tokens` of every row, or as many as are valid."""
        counts = [num_tokens] * len(self.consumed) if valid_lengths is None else as_list(valid_lengths)
        before, self.consumed = self.consumed, [a + b for a, b in zip(self.consumed, counts, strict=True)]
        # Lengths that a round uploads are uploaded by the next one too: nobody would read their sum.
        known = self._lengths is not None and self._lengths[0] is before and not self._uploaded
        if valid_lengths is None and known and self._lengths is not None:
            self._lengths = self.consumed, self._lengths[1] + num_tokens

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Become a batch of N rows: row i is the former row `rows[i]`, or an empty one where that is -1."""
        rows = as_list(rows)
        index = torch.tensor(rows, device=self.device)
        self._select(index.clamp(min=0), index < 0)
        self.consumed = [0 if row < 0 else self.consumed[row] for row in rows]
        self.committed = [0 if row < 0 else self.committed[row] for row in rows]

    @abstractmethod
    def _select(self, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> None:
        """Take the rows `source`, with zeros where `empty`."""

    def clear(self, rows: Sequence[int] | Tensor) -> None:
        """Empty these rows for the next request, in place."""
        cleared = set(as_list(rows))
        self.consumed = [0 if row in cleared else length for row, length in enumerate(self.consumed)]
        self.committed = [0 if row in cleared else length for row, length in enumerate(self.committed)]

    def keep(self, path: Int[Tensor, "B N"]) -> None:
        """Of the slots just written keep these, in this order (for trees of guesses)."""
        raise NotImplementedError(f"{type(self).__name__} keeps no trees of guesses: draft a single path")


class RecurrentState(DecodeState):
    """The hidden states of a recurrent network since the last commit, all layers side by side.

    Theory: a recurrent network folds the whole past into one vector, which cannot be taken apart again. So the way
    back is to keep that vector for every token since the last commit, and to take one for each row. While no row
    has gone back, the newest vectors are those to go on from, and nothing needs to be taken at all.

    Args:
        batch_size: rows.
        state_size: hidden units of all layers together.
    """

    def __init__(self, batch_size: int, state_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(batch_size, device)
        # Slot s of the joined chunks holds a row's state after `_origin + s` tokens; each chunk is [B, n, state_size].
        self._origin = self.consumed
        self._current: Tensor | None = torch.zeros(batch_size, state_size, device=device, dtype=dtype)
        self._chunks = [self._current[:, None]]
        self._num_slots = 1

    @property
    def memory_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def hidden(self) -> Float[Tensor, "B D"]:
        """Every row's hidden states after the tokens that it has consumed."""
        if self._current is None:
            slots = [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]
            if min(slots) == max(slots):
                self._current = self._slot(slots[0])
            else:
                places = [row * self._num_slots + slot for row, slot in enumerate(slots)]
                self._current = self._joined().flatten(0, 1).index_select(0, torch.tensor(places, device=self.device))
        return self._current

    def _slot(self, slot: int) -> Float[Tensor, "B D"]:
        """The states of one slot of all rows, without joining the chunks."""
        for chunk in self._chunks:
            if slot < chunk.shape[1]:
                return chunk[:, slot]
            slot -= chunk.shape[1]
        raise AssertionError("the slot lies behind everything that was consumed")

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None = None) -> None:
        """Store the hidden states after each of T more tokens, and count the valid ones as consumed."""
        num_tokens, newest = hidden.shape[1], self._num_slots - 1
        if all(length - origin == newest for length, origin in zip(self.consumed, self._origin, strict=True)):
            self._chunks.append(hidden)
        else:
            past, (_, _, size) = self._joined(), hidden.shape
            first = self.lengths - torch.tensor(self._origin, device=self.device)
            slots = first[:, None] + torch.arange(1, num_tokens + 1, device=self.device)
            room = torch.cat((past, past.new_zeros(past.shape[0], num_tokens, size)), dim=1)
            self._chunks = [room.scatter_(1, slots[..., None].expand(-1, -1, size), hidden)]
        self._num_slots += num_tokens
        self._current = hidden[:, -1] if valid_lengths is None else None
        self.advance(num_tokens, valid_lengths)

    def _joined(self) -> Float[Tensor, "B S D"]:
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, dim=1)]
        return self._chunks[0]

    def _go_back(self) -> None:
        self._current = None

    def commit(self, lengths: Lengths) -> None:
        super().commit(lengths)
        if self.committed == self.consumed:  # to where the rows are: the past can go
            self._chunks = [self.hidden()[:, None]]
            self._origin, self._num_slots = self.consumed, 1

    def _select(self, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> None:
        self._chunks = [_take(self._joined(), source, empty)]
        self._current = None

    def clear(self, rows: Sequence[int] | Tensor) -> None:
        super().clear(rows)
        cleared = as_list(rows)
        self._joined()[cleared] = 0
        self._origin = [0 if row in cleared else origin for row, origin in enumerate(self._origin)]
        self._current = None

    def select(self, rows: Sequence[int] | Tensor) -> None:
        rows = as_list(rows)
        super().select(rows)
        self._origin = [0 if row < 0 else self._origin[row] for row in rows]


@dataclass(frozen=True)
class Slots:
    """Where one call over T tokens writes, and what it looks at.

    Args:
        positions: `[B, T]`, positions in the text: a row's length and on.
        first: the slot of every row's first token, where that is one and the same; None where rows differ.
        span: how many slots, from the first on, the call's queries look at.
    """

    positions: Int[Tensor, "B T"]
    first: int | None
    span: int


class KVStorage:
    """The static buffers `[B, heads, S, head_size]` of all layers, and the calls that were recorded over them.

    Args:
        batch_size, num_slots: B and S.
        graphs: recorded calls; None where calls are not recorded.
    """

    def __init__(self, batch_size: int, num_slots: int, *, device: torch.device, graphs: GraphCache | None) -> None:
        self.num_slots, self.graphs = num_slots, graphs
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = torch.arange(batch_size, device=device)[:, None]

    def update(
        self, layer: int, slots: Slots, keys: Float[Tensor, "B H T D"], values: Float[Tensor, "B H T E"]
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S E"]]:
        """Store a layer's keys and values; gives the slots to attend over, as views of the buffers."""
        if layer not in self.layers:
            # Zeros, not empty: a NaN left in a masked slot would still poison attention through 0 * NaN.
            batch, heads, _, size = keys.shape
            self.layers[layer] = (
                keys.new_zeros(batch, heads, self.num_slots, size),
                values.new_zeros(batch, values.shape[1], self.num_slots, values.shape[-1]),
            )
        key_buffer, value_buffer = self.layers[layer]
        if slots.first is not None:
            end = slots.first + keys.shape[2]
            key_buffer[:, :, slots.first : end] = keys
            value_buffer[:, :, slots.first : end] = values
        else:
            places = slots.positions.clamp(max=self.num_slots - 1)
            key_buffer[self.rows, :, places] = keys.transpose(1, 2)
            value_buffer[self.rows, :, places] = values.transpose(1, 2)
        return key_buffer[:, :, : slots.span], value_buffer[:, :, : slots.span]

    def mask(self, slots: Slots, window: int | None = None) -> Bool[Tensor, "B T S"]:
        """See `KVState.mask`."""
        # Padding far behind the end would look at nothing, and the NaN that gives would reach the last slot.
        queries = slots.positions[:, :, None].clamp(max=self.num_slots - 1)
        keys = torch.arange(slots.span, device=queries.device)
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


def next_span(num_slots: int) -> int:
    """The first of `SPAN_STEP`, twice that, four times that, ... that is large enough."""
    span = SPAN_STEP
    while span < num_slots:
        span *= 2
    return span


class StoragePool:
    """Storages that wait for their next state, so that what was recorded over them serves again."""

    MOST_IDLE = 2

    def __init__(self) -> None:
        self._idle: list[KVStorage] = []

    def take(self, batch_size: int, num_slots: int, device: torch.device) -> KVStorage:
        """An empty storage of that size, rounded up; made where none is idle."""
        num_slots = next_span(num_slots)
        for storage in self._idle:
            if (len(storage.rows), storage.num_slots) == (batch_size, num_slots):
                self._idle.remove(storage)
                for buffers in storage.layers.values():
                    for buffer in buffers:
                        buffer.zero_()
                return storage
        return KVStorage(batch_size, num_slots, device=device, graphs=GraphCache(device))

    def __deepcopy__(self, memo: object) -> StoragePool:
        return StoragePool()  # what was recorded is of this model's weights

    def give_back(self, storage: KVStorage) -> None:
        """Nobody uses the storage any more."""
        self._idle = [storage, *self._idle][: self.MOST_IDLE]


class KVState(DecodeState):
    """Attention's keys and values, layer by layer, in static buffers `[B, heads, S, head_size]`.

    Theory: position = length + offset and the mask is `key_position <= query_position`, so what lies beyond a row's
    length is never read, whatever it holds. To go back is to lower a length: nothing is cropped, padded or copied,
    and rows of different lengths share one call. A layer's buffers are made, zeroed and in full length, when it first
    writes: so layers may differ in heads and sizes, and nothing needs to be known of a model beforehand.

    A call takes `slots` once; each layer then gives its new keys and values to `update` and attends over what it gets
    back, under `mask`; `advance` ends the call.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes. One slot more takes the padding that falls behind them.
        whole_span: whether calls look at whole buffers, so that shapes never change, as compiled code wants it;
            otherwise only as far as the longest row reaches.
        pool: where the buffers come from and go back to, with what was recorded over them; None for buffers of its own.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device,
        whole_span: bool = False,
        pool: StoragePool | None = None,
    ) -> None:
        super().__init__(batch_size, device)
        self.whole_span, self._pool = whole_span, pool
        self._use(self._new_storage(batch_size, max_length + 1))

    def _new_storage(self, batch_size: int, num_slots: int) -> KVStorage:
        if self._pool is not None:
            return self._pool.take(batch_size, num_slots, self.device)
        return KVStorage(batch_size, num_slots, device=self.device, graphs=None)

    def _use(self, storage: KVStorage) -> None:
        self.storage, self.num_slots = storage, storage.num_slots
        if self._pool is not None:
            self._returned = weakref.finalize(self, self._pool.give_back, storage)

    @property
    def buffers(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values by layer."""
        return self.storage.layers

    @property
    def rows(self) -> Int[Tensor, "B 1"]:
        """The rows' numbers, as the buffers are indexed by them."""
        return self.storage.rows

    @property
    def graphs(self) -> GraphCache | None:
        """Calls recorded over the buffers; None where calls are not recorded."""
        return self.storage.graphs

    @property
    def memory_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.buffers.values())

    def slots(self, num_tokens: int, starts: Sequence[int] | None = None) -> Slots:
        """The places of `num_tokens` tokens of every row: of the next ones, or of those from `starts` on."""
        lengths = self.consumed if starts is None else starts
        first, longest = min(lengths), max(lengths)
        span = self.num_slots if self.whole_span else min(longest + num_tokens, self.num_slots)
        if first == longest and first + num_tokens <= self.num_slots:
            positions = torch.arange(first, first + num_tokens, device=self.device).expand(len(lengths), -1)
            return Slots(positions, first, span)
        begin = self.lengths if starts is None else torch.tensor(starts, device=self.device)
        return Slots(begin[:, None] + torch.arange(num_tokens, device=self.device), None, span)

    def recorded_span(self, num_tokens: int) -> int:
        """How many slots a recorded call looks at that reads so many tokens of every row."""
        return next_span(max(self.consumed) + num_tokens)

    def update(
        self, layer: int, slots: Slots, keys: Float[Tensor, "B H T D"], values: Float[Tensor, "B H T E"]
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S E"]]:
        """See `KVStorage.update`."""
        return self.storage.update(layer, slots, keys, values)

    def mask(self, slots: Slots, *, window: int | None = None) -> Bool[Tensor, "B T S"]:
        """True where a query may look: at its own position and before, the last `window` of these where one is set."""
        return self.storage.mask(slots, window)

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        super().advance(num_tokens, valid_lengths)
        assert max(self.consumed) < self.num_slots, f"{max(self.consumed)} tokens overrun {self.num_slots - 1} slots"

    def _go_back(self) -> None:
        pass  # what lies behind a length is never read

    def clear(self, rows: Sequence[int] | Tensor) -> None:
        super().clear(rows)
        cleared = as_list(rows)
        for keys, values in self.buffers.values():  # a request that ended in NaN must not poison the next one
            keys[cleared] = 0
            values[cleared] = 0

    def _select(self, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> None:
        former = self.storage
        taken = {
            layer: (_take(keys, source, empty), _take(values, source, empty))
            for layer, (keys, values) in former.layers.items()
        }
        if self._pool is not None:
            self._returned.detach()
            self._pool.give_back(former)
        self._use(self._new_storage(len(source), self.num_slots))
        for layer, buffers in taken.items():
            if layer in self.storage.layers:
                for kept, values in zip(self.storage.layers[layer], buffers, strict=True):
                    kept.copy_(values)
            else:
                self.storage.layers[layer] = buffers


def as_list(lengths: Sequence[int] | Tensor) -> list[int]:
    """Numbers on the host."""
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _take(values: Tensor, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> Tensor:
    """The rows of `values` by `source`, zero where `empty`."""
    return values[source].masked_fill(empty.view(-1, *[1] * (values.dim() - 1)), 0)
