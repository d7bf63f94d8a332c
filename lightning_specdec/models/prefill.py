"""Prefill in parts: a call on many tokens, or on rows of very different lengths, is read in parts.

Activations and attention masks then do not grow with the square of the text, and no row is padded
to a much longer one.

Shapes: B rows, T tokens, N scored positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

    Places = Int[Tensor, "B N"] | slice | None

LONGEST_PART = {"cpu": 1024, "cuda": 4096}
"""Most tokens of each row in one part, by the type of device. On a CPU, smaller parts were slower
(docs/log/2026-11.md). A GPU needs more tokens to be busy; its number is not measured."""
CALL_COST = {"cpu": 32, "cuda": 4096}
"""Tokens that take as long as one more call, by the type of device: on a CPU the time to read the
weights, on a GPU that of the launches. Rows are padded to a longer one if that is cheaper than a
separate call. The numbers are rough: a factor of two changes few choices."""
MOST_PADDED = 64
"""Rows of at most this many tokens always share a call: they are drafts, or short prompts, and what
two calls cost depends on the model more than on its padding."""
NOTHING = slice(0, 0)
"""Selects no positions of a call."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one row, or of all rows, that are read together.

    Args:
        row: the only row; None for all rows.
        starts: for each of these rows, the column of its first token in the call.
        lengths: for each of these rows, how many tokens it has.
    """

    row: int | None
    starts: list[int]
    lengths: list[int]

    @property
    def rows(self) -> range:
        """The rows of the call that the part reads."""
        if self.row is None:
            return range(len(self.starts))
        return range(self.row, self.row + 1)

    @property
    def num_tokens(self) -> int:
        """Columns of the part."""
        return max(self.lengths)

    def cut(self, given: Tensor) -> Tensor:
        """The part's columns of the call's tokens `[B, T]` or hidden states `[B, T, D]`.

        A short row has some of its next columns as padding, or its last one again.
        """
        if self.row is not None:
            start = self.starts[0]
            return given[self.row : self.row + 1, start : start + self.num_tokens]

        starts = torch.tensor(self.starts, device=given.device)[:, None]
        columns = starts + torch.arange(self.num_tokens, device=given.device)
        columns = columns.clamp(max=given.shape[1] - 1)
        if given.dim() == 2:
            return given.gather(1, columns)
        return given.gather(1, columns[..., None].expand(-1, -1, given.shape[-1]))


def longest_part(device: torch.device) -> int:
    """Most tokens of each row in one part on a device."""
    return LONGEST_PART.get(device.type, LONGEST_PART["cpu"])


def call_cost(device: torch.device) -> int:
    """Tokens that take as long as one more call on a device."""
    return CALL_COST.get(device.type, CALL_COST["cpu"])


def parts_of(lengths: Sequence[int], most_tokens: int, cost_of_call: int) -> list[Part]:
    """Parts that together read the first `lengths[b]` tokens of each row b.

    Long rows are read alone, so that no other row is padded to their length. If there are shorter
    rows, all rows read their last tokens in one call.

    Args:
        most_tokens: most tokens of each row in one part.
        cost_of_call: see `call_cost`.
    """
    num_shared = _num_shared(lengths, most_tokens, cost_of_call)

    parts: list[Part] = []
    starts: list[int] = []
    for row, length in enumerate(lengths):
        if length <= num_shared:
            starts.append(0)
            continue
        num_alone = length - num_shared
        for start in range(0, num_alone, most_tokens):
            part_length = min(most_tokens, num_alone - start)
            parts.append(Part(row, [start], [part_length]))
        starts.append(num_alone)

    if num_shared:
        last_lengths = [min(length, num_shared) for length in lengths]
        parts.append(Part(None, starts, last_lengths))
    return parts


def _num_shared(lengths: Sequence[int], most_tokens: int, cost_of_call: int) -> int:
    """Tokens of the call that all rows share: the number with the least cost in total."""
    short_lengths = {length for length in lengths if length <= most_tokens}
    longest = max(short_lengths, default=0)
    num_padding = sum(max(0, longest - length) for length in lengths)
    if longest <= MOST_PADDED or num_padding <= cost_of_call:
        return longest

    costs: dict[int, int] = {}
    for num_shared in short_lengths:
        cost = len(lengths) * num_shared
        for length in lengths:
            num_alone = max(0, length - num_shared)
            cost += num_alone + cost_of_call * math.ceil(num_alone / most_tokens)
        costs[num_shared] = cost
    return min(costs, key=costs.__getitem__)


class JoinedOutputs:
    """The outputs of a call's parts, put together. What no part computes is zero.

    Args:
        batch_size: B of the call.
        num_tokens: T of the call.
        logits_for: positions that the call wants logits for.
        device: of the call.
    """

    def __init__(
        self,
        batch_size: int,
        num_tokens: int,
        logits_for: Places,
        device: torch.device,
    ) -> None:
        self._batch_size = batch_size
        self._num_tokens = num_tokens
        self._device = device
        self._positions = _positions_of(logits_for, batch_size, num_tokens)
        self._logits: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        """Hidden states `[B, T, D]` by layer."""

    def scored_in(self, part: Part) -> Places:
        """The positions in a part that the call wants logits for."""
        scored = [positions for _, positions in self._scored(part)]
        num_positions = max(len(positions) for positions in scored)
        if num_positions == 0:
            return NOTHING

        # Rows with fewer positions score their first token instead, and nobody reads that.
        padded = [[*positions, *[0] * (num_positions - len(positions))] for positions in scored]
        return torch.tensor(padded, device=self._device)

    def _scored(self, part: Part) -> list[tuple[list[int], list[int]]]:
        """For each row of a part: columns of the call's logits, and their positions in the part."""
        scored = []
        for row, start, length in zip(part.rows, part.starts, part.lengths, strict=True):
            columns = []
            positions = []
            for column, position in enumerate(self._positions[row]):
                if start <= position < start + length:
                    columns.append(column)
                    positions.append(position - start)
            scored.append((columns, positions))
        return scored

    def add_logits(self, part: Part, logits: Tensor) -> None:
        """Add a part's logits, for the positions that `scored_in` returns."""
        if self._logits is None:
            num_columns = len(self._positions[0])
            shape = (self._batch_size, num_columns, logits.shape[-1])
            self._logits = logits.new_zeros(shape)
        for index, (row, (columns, _)) in enumerate(
            zip(part.rows, self._scored(part), strict=True)
        ):
            self._logits[row, columns] = logits[index, : len(columns)]

    def add_hidden(self, layer: int, part: Part, hidden: Tensor) -> None:
        """Add a layer's hidden states of a part."""
        if layer not in self.hidden:
            shape = (self._batch_size, self._num_tokens, hidden.shape[-1])
            self.hidden[layer] = hidden.new_zeros(shape)
        joined = self.hidden[layer]
        for index, row in enumerate(part.rows):
            start = part.starts[index]
            length = part.lengths[index]
            joined[row, start : start + length] = hidden[index, :length]

    @property
    def logits(self) -> Tensor:
        """The logits `[B, N, V]`."""
        assert self._logits is not None, "no part has been read"
        return self._logits


def _positions_of(logits_for: Places, batch_size: int, num_tokens: int) -> list[list[int]]:
    """The positions that each row's logits are wanted for."""
    if isinstance(logits_for, Tensor):
        positions: list[list[int]] = logits_for.tolist()
        return positions
    columns = slice(None) if logits_for is None else logits_for
    row_positions = list(range(num_tokens))[columns]
    return [row_positions] * batch_size
