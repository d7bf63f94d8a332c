"""Windows of one long row of tokens: all that begin anywhere, and which of them an epoch reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lightning_specdec.data.base import EpochSampler, Row


class WindowSampler(EpochSampler):
    """The first tokens of each epoch's windows, which depend on the seed and the epoch's number alone.

    Args:
        num_tokens: of the text.
        length: tokens of a window.
        num_windows: of an epoch, at most `grid_size`.
        seed: of the offsets and orders.
    """

    def __init__(self, num_tokens: int, length: int, num_windows: int, seed: int) -> None:
        super().__init__(num_windows, seed)
        self.num_tokens, self.length = num_tokens, length

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        size = grid_size(self.num_tokens, self.length)
        room = min(self.length, self.num_tokens - size * self.length + 1)
        offset = int(torch.randint(room, (), generator=generator))
        places = torch.randperm(size, generator=generator)[: self.num_sequences]
        yield from (offset + places * self.length).tolist()


def grid_size(num_tokens: int, length: int) -> int:
    """Windows side by side that a text has room for wherever the first one begins, within its own length.

    A text of one window has that one."""
    windows = num_tokens // length
    return windows if windows < 2 else windows - 1


class Windows:
    """Windows of a text, each a view of the memory map.

    Args:
        tokens: of the text.
        length: of a window.
        starts: the first token of each window.
    """

    def __init__(self, tokens: np.memmap, length: int, starts: Sequence[int]) -> None:
        self.tokens, self.length, self.starts = tokens, length, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Row:
        start = self.starts[number]
        return number, self.tokens[start : start + self.length]
