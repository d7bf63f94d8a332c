"""Decoding states: what a model keeps of the tokens that a batch of rows has consumed.

Lengths are held on the host and copied to the device when a kernel needs them, so truncating is
always checked and costs the device nothing. Shapes: B rows, T tokens, S slots, D numbers of a
row's state or head, H heads.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_specdec.config.memory import gigabytes, is_out_of_memory
from lightning_specdec.models.graphs import SPAN_STEP, GraphCache

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_ALIGNMENT = 64
"""Bytes of a cache line, at which torch's memory begins too."""

Lengths = Sequence[int] | Tensor
"""A number of tokens for each row; a tensor is read to the host."""


def as_list(lengths: Lengths) -> list[int]:
    """Lengths on the host."""
    if isinstance(lengths, Tensor):
        numbers: list[int] = lengths.tolist()
        return numbers
    return list(lengths)


def crosses_switch(num_prompt_tokens: int, num_new_tokens: int, switch: int) -> bool:
    """Whether a text begins on one side of a position switch and ends on the other.

    The last new token is not read, so it does not count.
    """
    num_read = num_prompt_tokens + num_new_tokens - 1
    return num_prompt_tokens <= switch < num_read


class DecodeState(ABC):
    """What a model keeps of the tokens that a batch of rows has consumed, such as keys and values.

    Attributes:
        consumed: number of tokens that each row has consumed, on the host.
        committed: for each row the smallest length that it can still be truncated to.
        device: where the state's tensors are.
        position_switch: as of `LanguageModel`. The state remembers on which side of it each row is.
        is_long: for each row, whether its prompt has more tokens than `position_switch`.
        shares_calls: whether an empty row costs nothing, since each call reads all rows. If not,
            rows are read alone or with those that happen to read equally many tokens.
        reads_in_parts: whether a prompt may be read in several calls, each on many tokens. If not,
            the model reads one token a call after the first.
    """

    shares_calls: ClassVar[bool] = True
    reads_in_parts = True
    position_switch: int | None = None

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.consumed = [0] * batch_size
        self.committed = [0] * batch_size
        self.device = device
        self.is_long = [False] * batch_size
        # Rows whose whole prompts are known before they read anything (see `expect_prompts`).
        self._is_expected = [False] * batch_size
        # Lengths on the device, with the list on the host that they are a copy of.
        self._device_lengths: tuple[list[int], Tensor] | None = None
        self._round_uploads_lengths = False

    @property
    def graphs(self) -> GraphCache | None:
        """Calls recorded over the state's tensors; None if calls are not recorded."""
        return None

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """`consumed` on the device; copied there if it has changed."""
        if self._device_lengths is not None:
            host_lengths, device_lengths = self._device_lengths
            if host_lengths is self.consumed:
                return device_lengths
        device_lengths = torch.tensor(self.consumed, device=self.device)
        self._device_lengths = self.consumed, device_lengths
        return device_lengths

    def truncate(self, lengths: Lengths, uploaded: Int[Tensor, "B"] | None = None) -> None:
        """Shorten rows to these absolute lengths, from `committed` to `consumed` of each row.

        Args:
            uploaded: the same lengths on the device, if they are there already.
        """
        lengths = as_list(lengths)
        if lengths != self.consumed:
            self._check(lengths)
            self._truncate()
            self.consumed = lengths
        self._round_uploads_lengths = uploaded is not None
        if uploaded is not None:
            self._device_lengths = self.consumed, uploaded

    def _check(self, lengths: Sequence[int]) -> None:
        for length, shortest, longest in zip(lengths, self.committed, self.consumed, strict=True):
            assert shortest <= length <= longest, (
                f"{lengths} is not between committed {self.committed} and {self.consumed}"
            )

    def _truncate(self) -> None:  # noqa: B027
        """Work of truncating in addition to changing `consumed`."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Give up truncating below these lengths, which frees memory.

        Commit only tokens that the target verified.
        """
        self._check(lengths)
        self.committed = list(lengths)

    # The sides of a position switch

    def is_long_prompt(self, num_tokens: int) -> bool:
        """Whether a prompt of that many tokens is on the long side."""
        return self.position_switch is not None and num_tokens > self.position_switch

    def expect_prompts(self, prompt_lengths: Sequence[int]) -> None:
        """Report how many tokens each row's whole prompt has, before a part of it is read.

        Otherwise, an empty row takes the tokens that it reads first as its prompt. Report again
        after rows were cleared. A row that has read tokens must stay on its side.
        """
        if self.position_switch is None:
            return
        sides = list(self.is_long)
        for row, num_tokens in enumerate(prompt_lengths):
            sides[row] = self.is_long_prompt(num_tokens)
            is_kept = self.consumed[row] == 0 or sides[row] == self.is_long[row]
            assert is_kept, f"row {row} has read tokens on the other side of the position switch"
        self._is_expected = [True] * len(sides)
        self._set_sides(sides)

    def begin_texts(self, lengths: Sequence[int], starts: Sequence[int]) -> None:
        """Take what empty rows are about to read as their prompts, unless these are expected.

        Models call it.

        Args:
            lengths: tokens that each row reads.
            starts: position of the first of them.
        """
        sides = list(self.is_long)
        for row, num_tokens in enumerate(lengths):
            is_empty = self.consumed[row] == 0 and starts[row] == 0
            if is_empty and not self._is_expected[row]:
                sides[row] = self.is_long_prompt(num_tokens)
        self._set_sides(sides)

    def _set_sides(self, sides: list[bool]) -> None:
        self.is_long = sides

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        """Count tokens as consumed: `num_tokens` in each row, or `valid_lengths[b]` in row b.

        Models call it.
        """
        previous = self.consumed
        if valid_lengths is not None:
            row_counts = as_list(valid_lengths)
            self.consumed = [
                length + count for length, count in zip(previous, row_counts, strict=True)
            ]
            return

        self.consumed = [length + num_tokens for length in previous]
        if self._device_lengths is None or self._round_uploads_lengths:
            # The next round uploads its lengths too, so nobody would read a sum.
            return
        host_lengths, device_lengths = self._device_lengths
        if host_lengths is previous:
            self._device_lengths = self.consumed, device_lengths + num_tokens

    def select(self, rows: Sequence[int]) -> None:
        """Change the batch to `len(rows)` rows: row i is the former row `rows[i]`, or empty where
        that is -1.
        """
        row_numbers = torch.tensor(rows, device=self.device)
        is_empty = row_numbers < 0
        # Any row will do as the source of an empty one, which is set to zero.
        source = row_numbers.clamp(min=0)
        self._select(rows, source, is_empty)
        self.consumed = _select_lengths(self.consumed, rows)
        self.committed = _select_lengths(self.committed, rows)
        self._is_expected = [row >= 0 and self._is_expected[row] for row in rows]
        self._set_sides([row >= 0 and self.is_long[row] for row in rows])

    @abstractmethod
    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        """Change the tensors as in `select`.

        On the device the rows are `source`, with zeros where `empty`.
        """

    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows in place, for the next prompt."""
        self.consumed = _clear_lengths(self.consumed, rows)
        self.committed = _clear_lengths(self.committed, rows)
        for row in rows:
            self._is_expected[row] = False

    def forget_calls(self, owners: Sequence[object]) -> None:  # noqa: B027
        """Drop what was recorded of the calls of these objects, such as a drafter's networks."""

    def save_row(self, row: int, length: int) -> RowCopy | None:
        """A copy of what a row keeps of its first `length` tokens.

        None if this kind of state has no copies; a text is then read again.
        """
        return None

    def load_row(self, row: int, copy: RowCopy, length: int) -> None:
        """Continue an empty row from the first `length` tokens of a copy."""
        self._load(row, copy, length)
        self.consumed = [*self.consumed[:row], length, *self.consumed[row + 1 :]]
        # Nothing was given up below that length, since the copy has all of it.
        self.committed = [*self.committed[:row], 0, *self.committed[row + 1 :]]
        self._set_sides([*self.is_long[:row], copy.is_long, *self.is_long[row + 1 :]])

    def _load(self, row: int, copy: RowCopy, length: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} makes no copies")


@dataclass(frozen=True)
class RowCopy:
    """What a state keeps of one row, in tensors that no state changes.

    Args:
        length: tokens of the row.
        tensors: by names that belong to the state.
        is_long: as of `DecodeState`.
    """

    length: int
    tensors: Mapping[Any, Tensor]
    is_long: bool = False


def _select_lengths(lengths: list[int], rows: Sequence[int]) -> list[int]:
    return [0 if row < 0 else lengths[row] for row in rows]


def _clear_lengths(lengths: list[int], rows: Sequence[int]) -> list[int]:
    return [0 if row in rows else length for row, length in enumerate(lengths)]


def _select_rows(values: Tensor, source: Tensor, empty: Tensor) -> Tensor:
    """The rows of `values` by `source`, zero where `empty`."""
    num_other_dimensions = values.dim() - 1
    row_mask = empty.view(-1, *[1] * num_other_dimensions)
    return values[source].masked_fill(row_mask, 0)


class RecurrentState(DecodeState):
    """The hidden states of a recurrent network since the last commit, all layers side by side.

    Truncating takes a vector for every token since the last commit. While no row was truncated,
    the newest vectors are those to continue from, and nothing is gathered.

    Args:
        batch_size: rows.
        state_size: hidden units of all layers together.
    """

    def __init__(
        self,
        batch_size: int,
        state_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(batch_size, device)
        # Slot s holds a row's state after `_origin + s` tokens. Consecutive slots lie in chunks,
        # joined when needed.
        self._origin = self.consumed
        initial = torch.zeros(batch_size, 1, state_size, device=device, dtype=dtype)
        self._chunks = [initial]
        self._num_slots = 1
        # Every row's state to continue from; None if it has to be gathered.
        self._current: Tensor | None = initial[:, 0]

    @property
    def _past(self) -> Float[Tensor, "B S D"]:
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, dim=1)]
        return self._chunks[0]

    def _keep(self, past: Float[Tensor, "B S D"]) -> None:
        self._chunks = [past]
        self._num_slots = past.shape[1]

    def hidden(self) -> Float[Tensor, "B D"]:
        """Every row's hidden states after the tokens that it has consumed."""
        if self._current is None:
            slots = self._slots
            if min(slots) == max(slots):
                self._current = self._slot(slots[0])
            else:
                # Rows continue from different slots: one gather over the slots of all rows.
                flat_slots = [row * self._num_slots + slot for row, slot in enumerate(slots)]
                index = torch.tensor(flat_slots, device=self.device)
                all_slots = self._past.flatten(0, 1)
                self._current = all_slots.index_select(0, index)
        return self._current

    def _slot(self, slot: int) -> Float[Tensor, "B D"]:
        """One slot of all rows."""
        for chunk in self._chunks:
            if slot < chunk.shape[1]:
                return chunk[:, slot]
            slot -= chunk.shape[1]
        raise AssertionError("the slot lies after everything that was consumed")

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None = None) -> None:
        """Store the hidden states after each of T tokens, and count the valid ones as consumed."""
        num_tokens = hidden.shape[1]
        slots = self._slots
        all_rows_use_last_slot = min(slots) == self._num_slots - 1
        if all_rows_use_last_slot:
            self._chunks.append(hidden)
            self._num_slots += num_tokens
        else:
            # Rows that were truncated overwrite what they have after their present slot.
            offsets = torch.arange(1, num_tokens + 1, device=self.device)
            new_slots = torch.tensor(slots, device=self.device)[:, None] + offsets
            index = new_slots[..., None].expand_as(hidden)
            extended_past = torch.cat((self._past, torch.zeros_like(hidden)), dim=1)
            extended_past.scatter_(1, index, hidden)
            self._keep(extended_past)

        self._current = None
        if valid_lengths is None:
            self._current = hidden[:, -1]
        self.advance(num_tokens, valid_lengths)

    @property
    def _slots(self) -> list[int]:
        """Each row's slot to continue from."""
        return [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]

    def _truncate(self) -> None:
        self._current = None

    def commit(self, lengths: Sequence[int]) -> None:
        super().commit(lengths)
        if self.committed == self.consumed:
            # No row can be truncated any more, so only the present states are kept.
            self._keep(self.hidden()[:, None])
            self._origin = self.consumed

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        self._keep(_select_rows(self._past, source, empty))
        self._current = None
        self._origin = _select_lengths(self._origin, rows)

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        past = self._past.clone()  # it may be a view of a model's output
        past[list(rows)] = 0
        self._keep(past)
        self._origin = _clear_lengths(self._origin, rows)
        self._current = None


@dataclass(frozen=True)
class Slots:
    """Where one call over T tokens writes, and what it attends over.

    Args:
        positions: positions of the tokens in their texts: a row's length and on.
        first: the slot of every row's first token; None if rows differ.
        span: how many slots, from the first on, the call's queries attend over.
        row: the only row that the call reads; None for all rows.
        is_long: whether the rows are on the long side of the position switch: all of them, or each
            one; None for a model without a switch.
    """

    positions: Int[Tensor, "B T"]
    first: int | None
    span: int
    row: int | None = None
    is_long: bool | Bool[Tensor, "B"] | None = None

    @property
    def rows(self) -> slice:
        """The rows that the call reads."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


class KVStorage:
    """The static buffers `[B, H, S, D]` of all layers, and the calls that were recorded over them.

    Args:
        graphs: recorded calls; None if calls are not recorded.

    Attributes:
        is_long: as of `DecodeState`, on the device; None for a model without a position switch.
    """

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        *,
        device: torch.device,
        graphs: GraphCache | None,
    ) -> None:
        self.num_slots = num_slots
        self.graphs = graphs
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = torch.arange(batch_size, device=device)[:, None]
        self.is_long: Bool[Tensor, "B"] | None = None
        self._host_is_long: list[bool] = []

    def set_sides(self, is_long: list[bool]) -> None:
        """Upload the sides of all rows, if they have changed."""
        if is_long == self._host_is_long:
            return
        self._host_is_long = is_long
        sides = torch.tensor(is_long, device=self.rows.device)
        if self.is_long is None or self.graphs is None:
            self.is_long = sides
        else:
            # Recorded calls read it where it is.
            self.is_long.copy_(sides)

    @property
    def size(self) -> int:
        """Number of slots of all rows."""
        return len(self.rows) * self.num_slots

    def buffers(self) -> Iterator[Tensor]:
        """The keys and values of all layers."""
        for keys, values in self.layers.values():
            yield keys
            yield values

    def update(
        self,
        layer: int,
        slots: Slots,
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T E"],
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S E"]]:
        """Store a layer's keys and values.

        Returns those of the slots to attend over, as views of the buffers.
        """
        key_buffer, value_buffer = self.buffers_of(layer, keys, values)
        rows = slots.rows

        if slots.first is not None:
            end = slots.first + keys.shape[2]
            key_buffer[rows, :, slots.first : end] = keys
            value_buffer[rows, :, slots.first : end] = values
        else:
            # Positions beyond the last slot are padding, and the last slot is free for it.
            positions = slots.positions.clamp(max=self.num_slots - 1)
            # Indices around a slice put rows and positions first: `[B, T, H, D]`.
            row_numbers = self.rows[rows]
            key_buffer[row_numbers, :, positions] = keys.transpose(1, 2)
            value_buffer[row_numbers, :, positions] = values.transpose(1, 2)

        attended_keys = key_buffer[rows, :, : slots.span]
        attended_values = value_buffer[rows, :, : slots.span]
        return attended_keys, attended_values

    def save_row(self, row: int, length: int) -> dict[Hashable, Tensor]:
        """Copies of the keys and values of a row's first slots."""
        tensors: dict[Hashable, Tensor] = {}
        for layer, (keys, values) in self.layers.items():
            tensors[layer, "keys"] = keys[row, :, :length].clone()
            tensors[layer, "values"] = values[row, :, :length].clone()
        return tensors

    def load_row(self, row: int, tensors: Mapping[Hashable, Tensor], length: int) -> None:
        """Write the first slots of a row."""
        layers = {key[0] for key in tensors if isinstance(key, tuple)}
        for layer in layers:
            keys = tensors[layer, "keys"][None]
            values = tensors[layer, "values"][None]
            key_buffer, value_buffer = self.buffers_of(layer, keys, values)
            key_buffer[row, :, :length] = keys[0, :, :length]
            value_buffer[row, :, :length] = values[0, :, :length]

    def buffers_of(
        self,
        layer: int,
        keys: Float[Tensor, "_ H T D"],
        values: Float[Tensor, "_ H T E"],
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S E"]]:
        """A layer's buffers. At the first use they are new, for heads and types as of these."""
        if layer not in self.layers:
            self.layers[layer] = (self._new_buffer(keys), self._new_buffer(values))
        return self.layers[layer]

    def _new_buffer(self, like: Float[Tensor, "_ H T D"]) -> Float[Tensor, "B H S D"]:
        # Zeros, not empty: a NaN in a masked slot would still poison attention through 0 * NaN.
        _, num_heads, _, size = like.shape
        batch_size = len(self.rows)
        shape = (batch_size, num_heads, self.num_slots, size)
        with for_keys_and_values(batch_size, self.num_slots, math.prod(shape), like.dtype):
            return lazy_zeros(shape, like.dtype, like.device)

    def mask(self, slots: Slots, window: int | None = None) -> Bool[Tensor, "B T S"]:
        """True where a query attends: to its own position and those before, only the last `window`
        of these if set.
        """
        # Padding far after the end would attend to nothing, and the NaN of that would reach the
        # last slot.
        queries = slots.positions[:, :, None].clamp(max=self.num_slots - 1)
        keys = torch.arange(slots.span, device=queries.device)
        attends = keys <= queries
        if window is None:
            return attends
        return attends & (keys > queries - window)


@contextmanager
def for_keys_and_values(
    batch_size: int,
    num_slots: int,
    num_values: int,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Raise ValueError if a buffer cannot be allocated.

    Args:
        num_values: numbers in the buffer.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        plural = "" if batch_size == 1 else "s"
        raise ValueError(
            f"not enough memory for the keys and values of {batch_size} text{plural} with up to "
            f"{num_slots} tokens: a buffer of {gigabytes(num_values * dtype.itemsize)} could not "
            "be allocated: decode fewer or shorter texts at once"
        ) from error


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which take no memory on a CPU before they are written to.

    Most slots of a long context stay empty. torch writes its zeros at once; numpy lets the system
    do that, page by page, when a page is first used. Pages may have megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(*shape)


def next_span(num_slots: int) -> int:
    """The first of `SPAN_STEP`, twice that, four times that, ... that is large enough."""
    span = SPAN_STEP
    while span < num_slots:
        span *= 2
    return span


class StoragePool:
    """Idle storages, whose recorded calls serve their next state."""

    MAX_IDLE = 3
    """Most slots of all idle storages together, in multiples of the largest: halves of a shrinking
    batch need two.
    """

    def __init__(self) -> None:
        self._idle: list[KVStorage] = []

    def take(self, batch_size: int, num_slots: int, device: torch.device) -> KVStorage:
        """An empty storage of that size, rounded up; a new one if none is idle."""
        num_slots = next_span(num_slots)
        for storage in self._idle:
            if len(storage.rows) == batch_size and storage.num_slots == num_slots:
                self._idle.remove(storage)
                for buffer in storage.buffers():
                    buffer.zero_()
                return storage
        return KVStorage(batch_size, num_slots, device=device, graphs=GraphCache(device))

    def give_back(self, storage: KVStorage) -> None:
        """Keep a storage that is no longer used, and drop those that were not used for longest."""
        self._idle.insert(0, storage)
        sizes = [idle.size for idle in self._idle]
        max_slots = self.MAX_IDLE * max(sizes)
        for i, num_slots in enumerate(accumulate(sizes)):
            if num_slots > max_slots:
                del self._idle[i:]
                return

    def forget_calls(self, owners: Sequence[object]) -> None:
        """As of `DecodeState`, in all idle storages."""
        for storage in self._idle:
            if storage.graphs is not None:
                storage.graphs.forget(owners)

    def __deepcopy__(self, memo: object) -> StoragePool:
        return StoragePool()  # calls are recorded with this model's weights


class KVState(DecodeState):
    """Attention's keys and values, layer by layer, in static buffers `[B, H, S, D]`.

    Position = length + offset and the mask is `key_position <= query_position`, so what is
    beyond a row's length is never read. Truncating lowers a length: nothing is cropped, padded or
    copied, and rows of different lengths share one call. A layer's buffers are allocated when it
    first writes, so layers may differ.

    A call takes `slots` once. Each layer passes its new keys and values to the storage's `update`
    and attends over what it returns, under the storage's `mask`. `advance` ends the call.

    Args:
        batch_size: rows.
        max_length: maximum tokens that a row consumes. One more slot contains the padding
            after them.
        pool: where the buffers come from and return to, with what was recorded over them; None for
            buffers of this state only.
        position_switch: of the model.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device,
        pool: StoragePool | None = None,
        position_switch: int | None = None,
    ) -> None:
        super().__init__(batch_size, device)
        self.position_switch = position_switch
        self._pool = pool
        self._use(batch_size, max_length + 1)
        self._num_used = [0] * batch_size
        """Slots of each row that may hold something, from the first one on."""
        self._set_sides(self.is_long)

    def _use(self, batch_size: int, num_slots: int) -> None:
        """Continue with an empty storage."""
        if self._pool is None:
            self.storage = KVStorage(batch_size, num_slots, device=self.device, graphs=None)
        else:
            self.storage = self._pool.take(batch_size, num_slots, self.device)
            self._returned = weakref.finalize(self, self._pool.give_back, self.storage)
        self.num_slots = self.storage.num_slots

    @property
    def graphs(self) -> GraphCache | None:
        return self.storage.graphs

    def _set_sides(self, sides: list[bool]) -> None:
        super()._set_sides(sides)
        if self.position_switch is not None:
            self.storage.set_sides(sides)

    def _sides_of(self, row: int | None) -> bool | Tensor | None:
        """`Slots.is_long` of a call on that row, or on all rows."""
        if self.position_switch is None:
            return None
        if row is not None:
            return self.is_long[row]
        if all(self.is_long) or not any(self.is_long):
            return self.is_long[0]
        return self.storage.is_long

    def slots(
        self,
        num_tokens: int,
        starts: Sequence[int] | None = None,
        row: int | None = None,
    ) -> Slots:
        """The slots of the next `num_tokens` tokens of every row, or of those from `starts` on.

        Args:
            row: the only row that is read, with the only one of `starts`; None for all rows.
        """
        host_starts = self.consumed if starts is None else starts
        if row is None:
            self._note_used(host_starts, num_tokens)
        else:
            self._num_used[row] = max(self._num_used[row], host_starts[0] + num_tokens)
        first = min(host_starts)
        last = max(host_starts)
        end = last + num_tokens
        span = min(end, self.num_slots)
        is_long = self._sides_of(row)

        if first == last and end <= self.num_slots:
            positions = torch.arange(first, end, device=self.device)
            return Slots(positions.expand(len(host_starts), -1), first, span, row, is_long)

        # Rows differ, so each has separate positions.
        if starts is None:
            device_starts = self.lengths
        else:
            device_starts = torch.tensor(starts, device=self.device)
        offsets = torch.arange(num_tokens, device=self.device)
        positions = device_starts[:, None] + offsets
        return Slots(positions, None, span, row, is_long)

    def _note_used(self, starts: Sequence[int], num_tokens: int) -> None:
        """Remember that a call writes this many tokens of every row, padding included."""
        ends = [start + num_tokens for start in starts]
        self._num_used = list(map(max, self._num_used, ends))

    def recorded_span(self, num_tokens: int) -> int:
        """Number of slots that a recorded call attends over after it reads `num_tokens`."""
        self._note_used(self.consumed, num_tokens)
        return next_span(max(self.consumed) + num_tokens)

    def advance(self, num_tokens: int, valid_lengths: Lengths | None = None) -> None:
        super().advance(num_tokens, valid_lengths)
        longest = max(self.consumed)
        assert longest < self.num_slots, f"{longest} tokens overrun {self.num_slots - 1} slots"

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        # A request that ended in NaN must not poison the next one.
        for buffer in self.storage.buffers():
            for row in rows:
                buffer[row, :, : self._num_used[row]] = 0
        for row in rows:
            self._num_used[row] = 0

    def forget_calls(self, owners: Sequence[object]) -> None:
        if self.storage.graphs is not None:
            self.storage.graphs.forget(owners)
        if self._pool is not None:
            self._pool.forget_calls(owners)

    def save_row(self, row: int, length: int) -> RowCopy:
        return RowCopy(length, self.storage.save_row(row, length), self.is_long[row])

    def _load(self, row: int, copy: RowCopy, length: int) -> None:
        self.write_row(row, copy.tensors, length)

    def write_row(self, row: int, tensors: Mapping[Hashable, Tensor], length: int) -> None:
        """Write the first slots of a row, without counting them as consumed."""
        self.storage.load_row(row, tensors, length)
        self._num_used[row] = max(self._num_used[row], length)

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        previous = self.storage
        num_used = _select_lengths(self._num_used, rows)
        # Most slots of a row are empty: only those that were used are copied.
        end = max(num_used)
        selected: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, (keys, values) in previous.layers.items():
            selected_keys = _select_rows(keys[:, :, :end], source, empty)
            selected_values = _select_rows(values[:, :, :end], source, empty)
            selected[layer] = (selected_keys, selected_values)

        if self._pool is not None:
            self._returned.detach()
            self._pool.give_back(previous)
        self._use(len(source), self.num_slots)

        self._num_used = num_used

        for layer, (keys, values) in selected.items():
            # Recorded calls read buffers that exist, so these stay in place. They are zero.
            key_buffer, value_buffer = self.storage.buffers_of(layer, keys, values)
            key_buffer[:, :, :end] = keys
            value_buffer[:, :, :end] = values
