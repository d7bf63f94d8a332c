"""What every source of integer sequences shares: the split, the batches and the prompts.

Knows nothing of where the sequences come from, nor of the models that learn them.

Shapes: B rows, T tokens, N = T - 1 labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_specdec.checks import require_int

if TYPE_CHECKING:
    from jaxtyping import Int

IGNORED = -100
"""The label that cross-entropy leaves out."""


class Batch(NamedTuple):
    """Some sequences as one right-padded tensor.

    Args:
        tokens: `[B, T]`, zeros behind a row's end.
        lengths: `[B]`, how many of a row's tokens are real.
        prompt_lengths: `[B]`, how many of them are given when the row is continued by decoding.
        indices: `[B]`, each row's number within its split.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    indices: Tensor

    def next_tokens(self) -> Int[Tensor, "B N"]:
        """The label of every position but the last: the token after it, `IGNORED` where that is padding."""
        labels = self.tokens[:, 1:]
        positions = torch.arange(1, self.tokens.shape[1], device=labels.device)
        return labels.masked_fill(positions >= self.lengths[:, None], IGNORED)

    def prompts(self) -> list[list[int]]:
        """The first tokens of every row, on the host."""
        lengths = self.prompt_lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


class Splits(NamedTuple):
    """Sequences for training, validation and test; none is in two of them."""

    train: list[list[int]]
    val: list[list[int]]
    test: list[list[int]]


class EpochSampler(Sampler[int]):
    """A new order each epoch, which depends on the seed and the epoch's number alone.

    Theory: stochastic gradient descent wants its examples shuffled. A stream of random numbers would start anew when a
    run is resumed; a key of seed and epoch gives the resumed run the very order that the uninterrupted one would have.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        self.num_sequences = num_sequences
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_sequences

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        yield from torch.randperm(self.num_sequences, generator=generator).tolist()


class SequenceData(LightningDataModule):
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

    def __init__(
        self,
        vocab_size: int,
        *,
        num_train: int | None,
        num_val: int,
        num_test: int,
        batch_size: int,
        seed: int,
        prompt_length: int,
    ) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        self.num_train = None if num_train is None else require_int("num_train", num_train, 1)
        self.num_val = require_int("num_val", num_val, 1)
        self.num_test = require_int("num_test", num_test, 1)
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.seed = require_int("seed", seed, 0, 2**32 - 1)
        self.prompt_length = require_int("prompt_length", prompt_length, 1)
        self._splits: Splits | None = None

    @abstractmethod
    def sequences(self) -> list[list[int]]:
        """All sequences, each of at least two tokens, all distinct."""

    @abstractmethod
    def shortage(self) -> tuple[str, str]:
        """For the error when there are too few: what was counted, and what to do besides asking for fewer."""

    def arguments(self) -> dict[str, int | str | bool | None]:
        """The constructor's arguments as plain values, for the record of how a checkpoint was made."""
        names = ("vocab_size", "num_train", "num_val", "num_test", "batch_size", "seed", "prompt_length")
        return {name: getattr(self, name) for name in names}

    def splits(self) -> Splits:
        """The three splits, made on the first call."""
        if self._splits is None:
            sequences = self.sequences()
            self._check_count(len(sequences))
            order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(self.seed)).tolist()
            held_out = self.num_val + self.num_test
            stop = None if self.num_train is None else held_out + self.num_train
            self._splits = Splits(
                train=[sequences[i] for i in order[held_out:stop]],
                val=[sequences[i] for i in order[self.num_test : held_out]],
                test=[sequences[i] for i in order[: self.num_test]],
            )
        return self._splits

    def _check_count(self, num_sequences: int) -> None:
        num_train = 1 if self.num_train is None else self.num_train
        needed = num_train + self.num_val + self.num_test
        if num_sequences < needed:
            counted, remedy = self.shortage()
            at_least = "at least " if self.num_train is None else ""
            raise ValueError(
                f"{counted} {num_sequences} distinct sequences, and the split needs {at_least}{needed} ({num_train} "
                f"train + {self.num_val} val + {self.num_test} test): lower these numbers, or {remedy}"
            )

    def prompts(self) -> list[list[int]]:
        """The first `prompt_length` tokens of the test sequences."""
        return [sequence[: self._prompt_length(sequence)] for sequence in self.splits().test]

    def _prompt_length(self, sequence: list[int]) -> int:
        return min(self.prompt_length, len(sequence) - 1)

    def setup(self, stage: str) -> None:
        self.splits()

    def train_dataloader(self) -> DataLoader[tuple[int, list[int]]]:
        return self._dataloader(self.splits().train, EpochSampler(len(self.splits().train), self.seed))

    def val_dataloader(self) -> DataLoader[tuple[int, list[int]]]:
        return self._dataloader(self.splits().val)

    def test_dataloader(self) -> DataLoader[tuple[int, list[int]]]:
        return self._dataloader(self.splits().test)

    def predict_dataloader(self) -> DataLoader[tuple[int, list[int]]]:
        return self._dataloader(self.splits().test)

    def _dataloader(
        self, sequences: list[list[int]], sampler: Sampler[int] | None = None
    ) -> DataLoader[tuple[int, list[int]]]:
        rows = list(enumerate(sequences))
        return DataLoader(rows, batch_size=self.batch_size, sampler=sampler, collate_fn=self.collate)  # type: ignore[arg-type]

    def collate(self, rows: list[tuple[int, list[int]]]) -> Batch:
        """One batch of numbered sequences."""
        sequences = [sequence for _, sequence in rows]
        width = max(map(len, sequences))
        return Batch(
            tokens=torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]),
            lengths=torch.tensor([len(sequence) for sequence in sequences]),
            prompt_lengths=torch.tensor([self._prompt_length(sequence) for sequence in sequences]),
            indices=torch.tensor([index for index, _ in rows]),
        )
