"""The order of an epoch in which rows of like lengths share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_specdec.data.base import EpochSampler

IN_A_POOL = 32
"""Batches whose rows are sorted among each other: enough to be alike, few enough to leave the order to chance."""


class LikeLengths(EpochSampler):
    """An `EpochSampler` whose batches hold rows of like lengths.

    Theory: a batch is as wide as its longest row, and what pads the others is computed in vain. So the shuffled rows
    are taken by pools, sorted within each, cut into batches, and the batches shuffled again.

    Args:
        lengths: of the rows.
        batch_size: rows of a batch.
        seed: of the order, together with the epoch's number.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        order = torch.randperm(self.num_sequences, generator=generator)
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(IN_A_POOL * self.batch_size)]
        batches = torch.cat(pools).split(self.batch_size)
        last = len(batches) - 1
        # The last batch may be smaller, and stays the last.
        for number in [*torch.randperm(last, generator=generator).tolist(), last]:
            yield from batches[number].tolist()
