"""The keys and values of what runs in OpenVINO, and rows of tokens without padding.

Shapes: B rows, T tokens; P tokens of all rows, without padding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightning_specdec.models.openvino_conversion import QUANTIZED_ROW, ROW, Sizes, shared_tensor
from lightning_specdec.models.state import DecodeState

BLOCK = 32
"""Tokens of a block of keys and values: the only size that OpenVINO's CPU kernels take."""


class PagedState(DecodeState):
    """Attention's keys and values, layer by layer, in blocks of `BLOCK` tokens; a row's blocks lie together.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes.
        sizes: of each layer: its key heads, the size of a key's head, that of a value's.
        dtype: of keys and values.
        row: what a token of padding costs the network, see `ROW`.

    Attributes:
        num_tokens: sizes of this state's calls, by the layer that they begin with.
        num_scored: of how many positions they score.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        sizes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        row: int = ROW,
    ) -> None:
        super().__init__(batch_size, torch.device("cpu"))
        self.num_tokens = defaultdict[int, Sizes](lambda: Sizes(row))
        self.num_scored = Sizes(
            QUANTIZED_ROW
        )  # another size changes the output head alone, which is cheap
        self.num_blocks = max(1, -(-max_length // BLOCK))
        shapes = [
            (batch_size * self.num_blocks, heads, BLOCK, size)
            for heads, *kinds in sizes
            for size in kinds
        ]
        memory = torch.zeros(
            sum(map(math.prod, shapes)), dtype=dtype
        )  # once: the system clears a page when it is met
        self._use(
            [
                part.view(shape)
                for part, shape in zip(
                    memory.split(list(map(math.prod, shapes))), shapes, strict=True
                )
            ]
        )

    def _use(self, buffers: list[Tensor]) -> None:
        self._buffers, self.caches = buffers, [shared_tensor(buffer) for buffer in buffers]

    def places(
        self, starts: Sequence[int], lengths: Sequence[int], width: int = 0, num_more: int = 0
    ) -> list[np.ndarray]:
        """The positions `[P, 1]` of the next `lengths[b]` tokens of each row, from `starts[b]` on, and `_PLACES`.

        Args:
            width: for how many tokens, where those are fewer. The last row takes the others, as far as it has room:
                its next tokens overwrite them.
            num_more: tokens of each row that follow in the same call.
        """
        rows = [row for row, length in enumerate(lengths) if length]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        positions = [np.arange(starts[row], ends[row]) for row in rows]
        last, num_tokens = rows[-1], sum(lengths)
        padding = max(0, min(width - num_tokens, self.num_blocks * BLOCK - num_more - ends[last]))
        if padding:
            positions.append(np.full(padding, ends[last] - 1))
            lengths, ends[last] = [*lengths], ends[last] + padding
            lengths[last] += padding
        longest = max(ends) + num_more
        blocks = [-(-(ends[row] + num_more) // BLOCK) for row in rows]
        assert max(blocks) <= self.num_blocks, (
            f"{longest} tokens overrun {self.num_blocks * BLOCK} slots"
        )
        firsts = [row * self.num_blocks for row in rows]
        tables = [
            np.arange(first, first + num, dtype=np.int32)
            for first, num in zip(firsts, blocks, strict=True)
        ]
        return [
            np.concatenate(positions)[:, None],
            np.array([starts[row] for row in rows], dtype=np.int32),
            np.array([0, *accumulate(lengths[row] for row in rows)], dtype=np.int32),
            np.concatenate(tables),
            np.array([0, *accumulate(blocks)], dtype=np.int32),
            np.array(longest, dtype=np.int32),
        ]

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        for buffer in self._buffers:
            self._by_row(buffer)[list(rows)] = (
                0  # a request that ended in NaN must not poison the next one
            )

    def _by_row(self, buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (-1, self.num_blocks))

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        taken = [self._by_row(buffer)[source] for buffer in self._buffers]
        for each in taken:
            each[empty] = 0
        self._use([each.flatten(0, 1) for each in taken])


def without_padding(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[B, T, ...]` as `[P, ...]`. By views: torch looks for a mask's places with threads that then keep OpenVINO's
    cores busy for a millisecond."""
    whole = min(lengths) == rows.shape[1]
    return (
        rows.flatten(0, 1)
        if whole
        else torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    )


def lengthened(flat: Tensor, places: Sequence[np.ndarray]) -> Tensor:
    """The tokens, or their vectors, `[P, 1, ...]`; the last one is repeated for the padding in `places`."""
    padding = len(places[0]) - len(flat)
    return (torch.cat((flat, flat[-1:].expand(padding, *flat.shape[1:]))) if padding else flat)[
        :, None
    ]
