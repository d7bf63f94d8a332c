"""Lists of integer sequences, split by a seed, in right-padded batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_specdec.data.base import Batch, Row, Rows, TokenData


class Splits(NamedTuple):
    """Sequences for training, validation and test; none is in two of them."""

    train: list[list[int]]
    val: list[list[int]]
    test: list[list[int]]


class SequenceData(TokenData):
    """Integer sequences, split by a seed into training, validation and test, in batches of one shape each.

    Theory: a model must be judged on what it did not learn from, so each distinct sequence is in one split only.
    Sequences of different lengths share a batch by padding on the right, and the loss leaves the padding out, so that
    a row teaches the same whether it was padded or not.

    Args:
        vocab_size: tokens are integers from 0 to `vocab_size` - 1.
        num_train: sequences to train on; all that validation and test leave when None.
        num_val: sequences that choose the best checkpoint.
        num_test: sequences kept for the end; their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: of the split and of the order of the batches.
        prompt_length: how many tokens of a test sequence are its prompt (at least one is left to decode).
    """

    _splits: Splits | None = None

    @abstractmethod
    def sequences(self) -> list[list[int]]:
        """All sequences, each of at least two tokens, all distinct."""

    @abstractmethod
    def shortage(self) -> tuple[str, str]:
        """For the error when there are too few: what was counted, and what to do besides asking for fewer."""

    def splits(self) -> Splits:
        """The three splits, made on the first call."""
        if self._splits is None:
            sequences = self.sequences()
            dealt = self.deal(len(sequences), *self.shortage())
            self._splits = Splits(*([sequences[i] for i in numbers.tolist()] for numbers in dealt))
        return self._splits

    @property
    def max_length(self) -> int:
        return max(len(sequence) for split in self.splits() for sequence in split)

    def rows(self, split: str) -> Rows:
        return list(enumerate(getattr(self.splits(), split)))

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered sequences."""
        sequences = [sequence for _, sequence in rows]
        width = max(map(len, sequences))
        return Batch(
            tokens=torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]),
            lengths=torch.tensor([len(sequence) for sequence in sequences]),
            prompt_lengths=torch.tensor([min(self.prompt_length, len(sequence) - 1) for sequence in sequences]),
            indices=torch.tensor([index for index, _ in rows]),
        )
