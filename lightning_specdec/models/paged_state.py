"""Keys and values of a network that runs in OpenVINO, and the padding of its calls.

A call reads the tokens of all rows, one row after the other, without columns of padding. It still
contains some padding tokens: OpenVINO prepares every operation again when a call has another size
than the last one, and quantized weights compute differently on a single token.

Shapes: B rows, T tokens; N tokens of all rows in one call; P the same with the call's padding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from lightning_specdec.models.state import DecodeState, RowCopy, for_keys_and_values, lazy_zeros
from lightning_specdec.models.threads import one_thread

if TYPE_CHECKING:
    from jaxtyping import Int

BLOCK = 32
"""Tokens in a block of keys and values: the only size that OpenVINO's CPU kernels accept."""
ATTENTION_INPUTS = (
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
"""Inputs of paged attention that tell where the tokens belong, named as in OpenVINO's own
pipelines."""
SIZES = (6, 10, 16)
"""Sizes of calls on a few tokens: up to six tokens cost about as much as one, and a change of size
costs 6 ms."""
MAX_PADDING = 5
"""Most padding tokens of a call on more tokens than `SIZES` contains, to keep the size of the last
call."""
MAX_ATTENDED = 10_000
"""Most tokens that one call's padding attends to: 6 ms, as much as a change of size costs."""
MAX_ATTENDED_IN_A_ROW = 25_000
"""Most tokens that the padding of consecutive calls attends to: as much as a change of size and
back costs."""
TOKEN_COST = 125
"""Cost of a padding token outside attention in bfloat16, in attended tokens."""
COSTLY_TOKEN_COST = 1_500
"""The same in float32 and with quantized weights: about 1 ms for a model of 135M parameters."""


def shared_tensor(tensor: Tensor) -> ov.Tensor:
    """The same memory as a tensor of OpenVINO."""
    if tensor.dtype == torch.bfloat16:
        # numpy has no bfloat16, so its bits travel as integers.
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


class CallSizes:
    """Chooses the padded size of one input dimension from call to call, since a new size costs
    milliseconds.

    Args:
        token_cost: cost of a padding token outside attention, in attended tokens.
        fewest: smallest size.
    """

    def __init__(self, token_cost: int = TOKEN_COST, fewest: int = 1) -> None:
        self._token_cost = token_cost
        self._fewest = fewest
        self._last_size = 0
        self._cost_so_far = 0
        """Cost of the padding since the size changed last, in attended tokens."""

    def padded(self, number: int, context: int = 0) -> int:
        """The size of a call on `number` tokens.

        It is the last call's size if that is near, until the padding would have cost more than a
        change. Otherwise it is the next of `SIZES`. Padding attends to the context too, so a call
        with a long context gets none.

        Args:
            context: tokens that each token attends to.
        """
        number = max(number, self._fewest)
        size = self._next_size(number)
        largest = SIZES[-1] if number <= SIZES[-1] else number + MAX_PADDING

        cost_of_keeping = (self._last_size - number) * (context + self._token_cost)
        can_keep = size < self._last_size <= largest
        if can_keep and self._cost_so_far + cost_of_keeping <= MAX_ATTENDED_IN_A_ROW:
            self._cost_so_far += cost_of_keeping
            return self._last_size

        if (size - number) * context > MAX_ATTENDED:
            size = number
        self._last_size = size
        self._cost_so_far = 0
        return size

    def _next_size(self, number: int) -> int:
        """The smallest of `SIZES` that holds a number; the number itself if it is the smallest or
        too large."""
        if number > self._fewest:
            for size in SIZES:
                if number <= size:
                    return size
        return number


@dataclass(frozen=True)
class PagedCall:
    """Where the tokens of one call belong, and which of them are padding.

    A padding token repeats the last token of its row at the slots after it, which the row's next
    tokens overwrite.

    Attributes:
        inputs: the positions `[P, 1]`, then the inputs of paged attention in the order of
            `ATTENTION_INPUTS`.
        num_tokens: N, without padding.
        sources: for each of the P tokens, the token among the N that it repeats; None without
            padding.
        destinations: for each of the N tokens, its index among the P; None if padding only follows
            them.
    """

    inputs: list[np.ndarray]
    num_tokens: int
    sources: Int[Tensor, "P"] | None = None
    destinations: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        """Each token's position in its row, `[P, 1]`."""
        return self.inputs[0]

    def pad(self, tokens: Tensor) -> Tensor:
        """Tokens or their vectors, `[N, ...]`, with padding as `[P, 1, ...]`."""
        if self.sources is not None:
            tokens = tokens.index_select(0, self.sources)
        return tokens[:, None]

    def unpad(self, outputs: Tensor) -> Tensor:
        """Outputs of all computed tokens, `[P, ...]`, without those of padding, `[N, ...]`."""
        if self.destinations is None:
            return outputs[: self.num_tokens]
        return outputs.index_select(0, torch.from_numpy(self.destinations))

    def indices(self, token_indices: np.ndarray) -> np.ndarray:
        """Indices among the N tokens as indices among the P."""
        if self.destinations is None:
            return token_indices
        return self.destinations[token_indices]


class PagedState(DecodeState):
    """Attention's keys and values by layer, in blocks of `BLOCK` tokens. A row's blocks are
    contiguous.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes.
        sizes: for each layer: number of key heads, size of a key head, size of a value head.
        dtype: of keys and values.
        token_cost: see `CallSizes`.
        fewest_tokens: fewest tokens that a call computes for each row, padding included.

    Attributes:
        num_tokens: sizes of this state's calls, by the layer that they begin with.
        num_scored: sizes of this state's calls in scored positions.
        num_blocks: blocks of each row.
        caches: keys and values of each layer, as OpenVINO's tensors.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        sizes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        token_cost: int = TOKEN_COST,
        fewest_tokens: int = 1,
    ) -> None:
        super().__init__(batch_size, torch.device("cpu"))
        self.fewest_tokens = fewest_tokens
        self.num_tokens: dict[int, CallSizes] = defaultdict(
            lambda: CallSizes(token_cost, fewest_tokens)
        )
        # Another number of scored positions changes only the output head, which is cheap.
        self.num_scored = CallSizes(COSTLY_TOKEN_COST, fewest_tokens)
        # A row's last token may need padding after it.
        max_slots = max(1, max_length + fewest_tokens - 1)
        self.num_blocks = math.ceil(max_slots / BLOCK)

        self._sizes = list(sizes)
        self._dtype = dtype
        self._use(self._new_buffers(batch_size))
        self._num_used = [0] * batch_size
        """Blocks of each row that may hold something, from the first one on."""

    def _new_buffers(self, batch_size: int) -> list[Tensor]:
        """Keys and values of all layers in turn, which are zero."""
        total_blocks = batch_size * self.num_blocks
        shapes = []
        for num_heads, key_size, value_size in self._sizes:
            shapes.append((total_blocks, num_heads, BLOCK, key_size))
            shapes.append((total_blocks, num_heads, BLOCK, value_size))

        # One allocation for all layers.
        buffer_lengths = [math.prod(shape) for shape in shapes]
        num_values = sum(buffer_lengths)
        num_slots = self.num_blocks * BLOCK
        with for_keys_and_values(batch_size, num_slots, num_values, self._dtype):
            memory = lazy_zeros([num_values], self._dtype, self.device)
        parts = memory.split(buffer_lengths)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _use(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self.caches = [shared_tensor(buffer) for buffer in buffers]

    def plan_call(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        size: int = 0,
        num_following: int = 0,
    ) -> PagedCall:
        """Plan a call on the next `lengths[b]` tokens of each row b, which begin at position
        `starts[b]`.

        Args:
            size: tokens to compute, where the rows have fewer. The last row takes the padding, as
                far as it has room.
            num_following: tokens of each row that follow in the same call.
        """
        rows = [row for row, length in enumerate(lengths) if length]
        row_starts = [starts[row] for row in rows]
        row_lengths = [lengths[row] for row in rows]
        num_slots = self.num_blocks * BLOCK - num_following
        padded_lengths = self._padded_lengths(row_starts, row_lengths, size, num_slots)

        positions = []
        block_tables = []
        num_row_blocks = []
        longest = 0
        for row, start, length, padded_length in zip(
            rows, row_starts, row_lengths, padded_lengths, strict=True
        ):
            # Padding tokens repeat the last one, at its position.
            last_position = start + length - 1
            padded_positions = np.arange(start, start + padded_length)
            positions.append(np.minimum(padded_positions, last_position))

            context_length = start + padded_length + num_following
            longest = max(longest, context_length)
            num_blocks = math.ceil(context_length / BLOCK)
            self._num_used[row] = max(self._num_used[row], num_blocks)
            first_block = row * self.num_blocks
            block_tables.append(np.arange(first_block, first_block + num_blocks, dtype=np.int32))
            num_row_blocks.append(num_blocks)
        assert max(num_row_blocks) <= self.num_blocks, (
            f"{longest} tokens overrun {self.num_blocks * BLOCK} slots"
        )

        token_begins = [0, *accumulate(padded_lengths)]
        block_begins = [0, *accumulate(num_row_blocks)]
        inputs = [
            np.concatenate(positions)[:, None],
            # In the order of `ATTENTION_INPUTS`.
            np.array(row_starts, dtype=np.int32),
            np.array(token_begins, dtype=np.int32),
            np.concatenate(block_tables),
            np.array(block_begins, dtype=np.int32),
            np.array(longest, dtype=np.int32),
        ]
        sources, destinations = _padding(row_lengths, padded_lengths)
        return PagedCall(inputs, sum(row_lengths), sources, destinations)

    def _padded_lengths(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        size: int,
        num_slots: int,
    ) -> list[int]:
        """How many tokens a call computes for each row, padding included."""
        padded_lengths = []
        for start, length in zip(starts, lengths, strict=True):
            room = num_slots - start
            fewest_tokens = min(self.fewest_tokens, room)
            padded_lengths.append(max(length, fewest_tokens))

        # The last row takes the rest, as far as it has room.
        num_missing = size - sum(padded_lengths)
        room = num_slots - starts[-1] - padded_lengths[-1]
        padded_lengths[-1] += max(0, min(num_missing, room))
        return padded_lengths

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        # A request that ended in NaN must not poison the next one.
        with one_thread(True):
            for buffer in self._buffers:
                by_row = self._by_row(buffer)
                for row in rows:
                    by_row[row, : self._num_used[row]] = 0
        for row in rows:
            self._num_used[row] = 0

    def save_row(self, row: int, length: int) -> RowCopy:
        num_blocks = math.ceil(length / BLOCK)
        tensors: dict[Hashable, Tensor] = {}
        for i, buffer in enumerate(self._buffers):
            tensors[i] = self._by_row(buffer)[row, :num_blocks].clone()
        return RowCopy(length, tensors)

    def _load(self, row: int, copy: RowCopy, length: int) -> None:
        num_blocks = math.ceil(length / BLOCK)
        for i, buffer in enumerate(self._buffers):
            self._by_row(buffer)[row, :num_blocks] = copy.tensors[i][:num_blocks]
        self._num_used[row] = max(self._num_used[row], num_blocks)

    def _by_row(self, buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (-1, self.num_blocks))

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        # Most slots of a row are empty: only those that were used are copied.
        buffers = self._new_buffers(len(rows))
        with one_thread(True):
            for previous_buffer, buffer in zip(self._buffers, buffers, strict=True):
                previous_rows = self._by_row(previous_buffer)
                new_rows = self._by_row(buffer)
                for row, previous_row in enumerate(rows):
                    if previous_row < 0:
                        continue
                    num_used = self._num_used[previous_row]
                    new_rows[row, :num_used] = previous_rows[previous_row, :num_used]
        self._use(buffers)
        self._num_used = [0 if row < 0 else self._num_used[row] for row in rows]


def _padding(
    lengths: Sequence[int], padded_lengths: Sequence[int]
) -> tuple[Tensor | None, np.ndarray | None]:
    """`PagedCall.sources` and `PagedCall.destinations` of rows with these lengths without and with
    padding."""
    if list(lengths) == list(padded_lengths):
        return None, None

    sources = []
    destinations = []
    first_source = 0
    first_destination = 0
    for length, padded_length in zip(lengths, padded_lengths, strict=True):
        # Padding tokens repeat the row's last one.
        offsets = np.minimum(np.arange(padded_length), length - 1)
        sources.append(first_source + offsets)
        destinations.append(np.arange(first_destination, first_destination + length))
        first_source += length
        first_destination += padded_length
    all_sources = torch.from_numpy(np.concatenate(sources))

    is_only_at_end = list(lengths[:-1]) == list(padded_lengths[:-1])
    if is_only_at_end:
        return all_sources, None
    return all_sources, np.concatenate(destinations)


def flatten_rows(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rows of right-padded tokens, `[B, T, ...]`, as `[N, ...]` without the padding.

    By views, since a mask would use torch's threads, which keep OpenVINO's cores busy for a
    millisecond afterwards.
    """
    if min(lengths) == rows.shape[1]:
        return rows.flatten(0, 1)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
