"""Rows of like lengths share a batch, and chance has the rest."""

from __future__ import annotations

import random

from lightning_specdec.data.base import EpochSampler
from lightning_specdec.data.like_lengths import LikeLengths

LENGTHS = random.Random(0).choices(range(10, 500), k=1003)
SIZE = 8


def padded(order: list[int]) -> int:
    """Places of all batches, padding included."""
    batches = [order[i : i + SIZE] for i in range(0, len(order), SIZE)]
    return sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in batches)


def test_every_row_is_there_once_and_little_is_padded() -> None:
    order = list(LikeLengths(LENGTHS, SIZE, 1))
    assert sorted(order) == list(range(len(LENGTHS)))
    assert padded(order) < 1.05 * sum(LENGTHS) < 0.7 * padded(list(EpochSampler(len(LENGTHS), 1)))


def test_the_order_is_another_each_epoch_and_the_same_for_the_same_epoch() -> None:
    sampler = LikeLengths(LENGTHS, SIZE, 1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert len({max(LENGTHS[row] for row in first[i : i + SIZE]) > 250 for i in range(0, 400, SIZE)}) == 2
