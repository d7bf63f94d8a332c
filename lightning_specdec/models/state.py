"""Decoding states: what a model keeps of the tokens that a batch of rows has consumed, and the way back.

Lengths are held on the host and copied to the device when a kernel needs them, so going back is always checked and
costs the device nothing. Shapes: B rows, T tokens, S slots, D numbers of a row's state or head, H heads.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.models.graphs import SPAN_STEP, GraphCache

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Lengths = Sequence[int] | Tensor
"""A number of tokens for each row; a tensor is read to the host."""


def as_list(lengths: Lengths) -> list[int]:
    """Numbers on the host."""
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


class DecodeState(ABC):
    """What a model keeps of the tokens that a batch of rows has consumed, such as keys and values.

    Attributes:
        consumed: number of tokens that each row has consumed, on the host.
        committed: for each row the smallest length that it can still go back to.
        device: where the state's tensors are.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.consumed = [0] * batch_size
        self.committed = [0] * batch_size
        self.device = device
        self._lengths: tuple[list[int], Tensor] | None = None
        self._uploaded = False

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Number of tokens that each row has consumed, on the device; copied there when `consumed` has changed."""
        if self._lengths is None or self._lengths[0] is not self.consumed:
            self._lengths = self.consumed, torch.tensor(self.consumed, device=self.device)
        return self._lengths[1]

    def truncate(self, lengths: Lengths, uploaded: Int[Tensor, "B"] | None = None) -> None:
        """Go back to these absolute lengths, each from `committed` to `consumed` of its row (checked by assertion).

        Args:
            uploaded: the same lengths on the device, if they are there already.
        """
        lengths = as_list(lengths)
        if lengths != self.consumed:
            self._check(lengths)
            self._go_back()
            self.consumed = lengths
        self._uploaded = uploaded is not None
        if uploaded is not None:
            self._lengths = self.consumed, uploaded

    def _check(self, lengths: Sequence[int]) -> None:
        for length, first, last in zip(lengths, self.committed, self.consumed, strict=True):
            assert first <= length <= last, (
                f"{lengths} is not between committed {self.committed} and {self.consumed}"
            )

    def _go_back(self) -> None:  # noqa: B027
        """Work of going back besides changing `consumed`."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Give up going back below these lengths, which frees memory. Commit only tokens that the target verified."""
        self._check(lengths)
        self.committed = list(lengths)

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        """Count tokens as consumed: `num_tokens` in each row, or `valid_lengths[b]` in row b. Models call it."""
        counts = (
            [num_tokens] * len(self.consumed) if valid_lengths is None else as_list(valid_lengths)
        )
        before, self.consumed = (
            self.consumed,
            [a + b for a, b in zip(self.consumed, counts, strict=True)],
        )
        # Lengths that a round uploads are uploaded by the next one too: nobody would read their sum.
        known = self._lengths is not None and self._lengths[0] is before and not self._uploaded
        if valid_lengths is None and known and self._lengths is not None:
            self._lengths = self.consumed, self._lengths[1] + num_tokens

    def select(self, rows: Sequence[int]) -> None:
        """Change the batch to `len(rows)` rows: row i is the former row `rows[i]`, or empty where that is -1."""
        index = torch.tensor(rows, device=self.device)
        self._select(rows, index.clamp(min=0), index < 0)
        self.consumed, self.committed = _chosen(self.consumed, rows), _chosen(self.committed, rows)

    @abstractmethod
    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        """Take these rows; on the device they are `source`, with zeros where `empty`."""

    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows in place, for the next prompt."""
        self.consumed, self.committed = (
            _cleared(self.consumed, rows),
            _cleared(self.committed, rows),
        )


def _chosen(lengths: list[int], rows: Sequence[int]) -> list[int]:
    return [0 if row < 0 else lengths[row] for row in rows]


def _cleared(lengths: list[int], rows: Sequence[int]) -> list[int]:
    return [0 if row in rows else length for row, length in enumerate(lengths)]


def _take(values: Tensor, source: Tensor, empty: Tensor) -> Tensor:
    """The rows of `values` by `source`, zero where `empty`."""
    return values[source].masked_fill(empty.view(-1, *[1] * (values.dim() - 1)), 0)


class RecurrentState(DecodeState):
    """The hidden states of a recurrent network since the last commit, all layers side by side.

    Going back takes a vector for every token since the last commit. While no row has gone back, the newest vectors are
    those to continue from, and nothing is gathered.

    Args:
        batch_size: rows.
        state_size: hidden units of all layers together.
    """

    def __init__(
        self, batch_size: int, state_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(batch_size, device)
        # Slot s holds a row's state after `_origin + s` tokens; consecutive slots lie in chunks, joined when needed.
        self._origin = self.consumed
        self._chunks = [torch.zeros(batch_size, 1, state_size, device=device, dtype=dtype)]
        self._num_slots = 1
        self._current: Tensor | None = self._chunks[0][:, 0]

    @property
    def _past(self) -> Float[Tensor, "B S D"]:
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, dim=1)]
        return self._chunks[0]

    def _keep(self, past: Float[Tensor, "B S D"]) -> None:
        self._chunks, self._num_slots = [past], past.shape[1]

    def hidden(self) -> Float[Tensor, "B D"]:
        """Every row's hidden states after the tokens that it has consumed."""
        if self._current is None:
            slots = self._slots
            if min(slots) == max(slots):
                self._current = self._slot(slots[0])
            else:
                places = [row * self._num_slots + slot for row, slot in enumerate(slots)]
                self._current = self._past.flatten(0, 1).index_select(
                    0, torch.tensor(places, device=self.device)
                )
        return self._current

    def _slot(self, slot: int) -> Float[Tensor, "B D"]:
        for chunk in self._chunks:
            if slot < chunk.shape[1]:
                return chunk[:, slot]
            slot -= chunk.shape[1]
        raise AssertionError("the slot lies behind everything that was consumed")

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None = None) -> None:
        """Store the hidden states after each of T more tokens, and count the valid ones as consumed."""
        num_tokens, first = hidden.shape[1], self._slots
        if min(first) == self._num_slots - 1:
            self._chunks.append(hidden)
            self._num_slots += num_tokens
        else:
            slots = torch.tensor(first, device=self.device)[:, None] + torch.arange(
                1, num_tokens + 1, device=self.device
            )
            room = torch.cat((self._past, torch.zeros_like(hidden)), dim=1)
            self._keep(room.scatter_(1, slots[..., None].expand_as(hidden), hidden))
        self._current = hidden[:, -1] if valid_lengths is None else None
        self.advance(num_tokens, valid_lengths)

    @property
    def _slots(self) -> list[int]:
        """Each row's slot to continue from."""
        return [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]

    def _go_back(self) -> None:
        self._current = None

    def commit(self, lengths: Sequence[int]) -> None:
        super().commit(lengths)
        if self.committed == self.consumed:  # to where the rows are: the past can go
            self._keep(self.hidden()[:, None])
            self._origin = self.consumed

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        self._keep(_take(self._past, source, empty))
        self._current = None
        self._origin = _chosen(self._origin, rows)

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        past = self._past.clone()  # it may be a view of what a model gave
        past[list(rows)] = 0
        self._keep(past)
        self._origin, self._current = _cleared(self._origin, rows), None


@dataclass(frozen=True)
class Slots:
    """Where one call over T tokens writes, and what it looks at.

    Args:
        positions: of the tokens in their texts: a row's length and on.
        first: the slot of every row's first token; None where rows differ.
        span: how many slots, from the first on, the call's queries look at.
    """

    positions: Int[Tensor, "B T"]
    first: int | None
    span: int


class KVStorage:
    """The static buffers `[B, H, S, D]` of all layers, and the calls that were recorded over them.

    Args:
        graphs: recorded calls; None where calls are not recorded.
    """

    def __init__(
        self, batch_size: int, num_slots: int, *, device: torch.device, graphs: GraphCache | None
    ) -> None:
        self.num_slots, self.graphs = num_slots, graphs
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = torch.arange(batch_size, device=device)[:, None]

    def update(
        self,
        layer: int,
        slots: Slots,
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T E"],
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S E"]]:
        """Store a layer's keys and values; gives the slots to attend over, as views of the buffers."""
        if layer not in self.layers:
            # Zeros, not empty: a NaN left in a masked slot would still poison attention through 0 * NaN.
            keys_, values_ = (
                new.new_zeros(*new.shape[:2], self.num_slots, new.shape[-1])
                for new in (keys, values)
            )
            self.layers[layer] = keys_, values_
        key_buffer, value_buffer = self.layers[layer]
        if slots.first is not None:
            written = slice(slots.first, slots.first + keys.shape[2])
            key_buffer[:, :, written] = keys
            value_buffer[:, :, written] = values
        else:
            places = slots.positions.clamp(max=self.num_slots - 1)
            key_buffer[self.rows, :, places] = keys.transpose(1, 2)
            value_buffer[self.rows, :, places] = values.transpose(1, 2)
        return key_buffer[:, :, : slots.span], value_buffer[:, :, : slots.span]

    def mask(self, slots: Slots, window: int | None = None) -> Bool[Tensor, "B T S"]:
        """True where a query may look: at its own position and before, the last `window` of these where one is set."""
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

    MOST_IDLE = 3
    """Slots that idle storages have together at most, in the largest one's: halves of a shrinking batch need two."""

    def __init__(self) -> None:
        self._idle: list[KVStorage] = []

    def take(self, batch_size: int, num_slots: int, device: torch.device) -> KVStorage:
        """An empty storage of that size, rounded up; a new one where none is idle."""
        num_slots = next_span(num_slots)
        for storage in self._idle:
            if (len(storage.rows), storage.num_slots) == (batch_size, num_slots):
                self._idle.remove(storage)
                for buffer in chain.from_iterable(storage.layers.values()):
                    buffer.zero_()
                return storage
        return KVStorage(batch_size, num_slots, device=device, graphs=GraphCache(device))

    def give_back(self, storage: KVStorage) -> None:
        """Keep a storage that is no longer used."""
        self._idle.insert(0, storage)
        sizes = [len(each.rows) * each.num_slots for each in self._idle]
        kept = sum(total <= self.MOST_IDLE * max(sizes) for total in accumulate(sizes))
        del self._idle[kept:]

    def __deepcopy__(self, memo: object) -> StoragePool:
        return StoragePool()  # what was recorded is of this model's weights


class KVState(DecodeState):
    """Attention's keys and values, layer by layer, in static buffers `[B, H, S, D]`.

    Position = length + offset and the mask is `key_position <= query_position`, so what lies beyond a row's length is
    never read. Going back lowers a length: nothing is cropped, padded or copied, and rows of different lengths share
    one call. A layer's buffers are made when it first writes, so layers may differ.

    A call takes `slots` once; each layer gives its new keys and values to the storage's `update` and attends over what
    it gets back, under the storage's `mask`; `advance` ends the call.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes. One slot more takes the padding that falls behind them.
        pool: where the buffers come from and go back to, with what was recorded over them; None for its own buffers.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device,
        pool: StoragePool | None = None,
    ) -> None:
        super().__init__(batch_size, device)
        self._pool = pool
        self._use(batch_size, max_length + 1)

    def _use(self, batch_size: int, num_slots: int) -> None:
        """Go on with an empty storage."""
        if self._pool is None:
            self.storage = KVStorage(batch_size, num_slots, device=self.device, graphs=None)
        else:
            self.storage = self._pool.take(batch_size, num_slots, self.device)
            self._returned = weakref.finalize(self, self._pool.give_back, self.storage)
        self.num_slots = self.storage.num_slots

    @property
    def graphs(self) -> GraphCache | None:
        """Calls recorded over the buffers; None where calls are not recorded."""
        return self.storage.graphs

    def slots(self, num_tokens: int, starts: Sequence[int] | None = None) -> Slots:
        """The places of `num_tokens` tokens of every row: of the next ones, or of those from `starts` on."""
        lengths = self.consumed if starts is None else starts
        first, longest = min(lengths), max(lengths)
        span = min(longest + num_tokens, self.num_slots)
        if first == longest and first + num_tokens <= self.num_slots:
            positions = torch.arange(first, first + num_tokens, device=self.device).expand(
                len(lengths), -1
            )
            return Slots(positions, first, span)
        begin = self.lengths if starts is None else torch.tensor(starts, device=self.device)
        return Slots(begin[:, None] + torch.arange(num_tokens, device=self.device), None, span)

    def recorded_span(self, num_tokens: int) -> int:
        """How many slots a recorded call looks at that reads so many tokens of every row."""
        return next_span(max(self.consumed) + num_tokens)

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        super().advance(num_tokens, valid_lengths)
        assert max(self.consumed) < self.num_slots, (
            f"{max(self.consumed)} tokens overrun {self.num_slots - 1} slots"
        )

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        for buffer in chain.from_iterable(self.storage.layers.values()):
            buffer[list(rows)] = 0  # a request that ended in NaN must not poison the next one

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        former = self.storage
        taken = {
            layer: [_take(each, source, empty) for each in pair]
            for layer, pair in former.layers.items()
        }
        if self._pool is not None:
            self._returned.detach()
            self._pool.give_back(former)
        self._use(len(source), self.num_slots)
        for layer, (keys, values) in taken.items():
            kept = self.storage.layers.setdefault(layer, (keys, values))
            for buffer, rows_taken in zip(kept, (keys, values), strict=True):
                if buffer is not rows_taken:  # buffers of recorded calls stay in place
                    buffer.copy_(rows_taken)
