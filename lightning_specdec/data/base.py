"""What training may ask of any data: three splits of token sequences, in batches, and prompts to try a draft on.

Shapes: B rows, T tokens, N = T - 1 labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_specdec.checks import require_int
from lightning_specdec.data.resumable import ResumableLoader

if TYPE_CHECKING:
    from jaxtyping import Int

IGNORED = -100
"""The label that cross-entropy leaves out."""

SPLITS = ("train", "val", "test")


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


PlainValues = dict[str, int | float | str | bool | list[str] | None]
"""Arguments of a constructor by name."""

Row = tuple[int, Any]
"""A sequence's number within its split, and what `TokenData.collate` makes its tokens from."""


@runtime_checkable
class Rows(Protocol):
    """The rows of a split, each made when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


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
        yield from torch.randperm(self.num_sequences, generator=self.generator()).tolist()

    def generator(self) -> torch.Generator:
        """This epoch's noise, from its beginning."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)


class TokenData(LightningDataModule, ABC):
    """Token sequences in three splits that share nothing: to train on, to choose the best checkpoint by, for the end.

    Theory: a model must be judged on what it did not learn from. Training asks for nothing but this class, so that
    integers, sequences made by a rule and real text are learned from in the same way.

    Args:
        vocab_size: tokens are integers from 0 to `vocab_size` - 1.
        num_train: sequences of an epoch; all there are when None.
        num_val: sequences that choose the best checkpoint.
        num_test: sequences kept for the end; their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: of the order of the batches, and of whatever else the data draw.
        prompt_length: how many tokens of a test sequence are its prompt (at least one is left to decode).

    Attributes:
        tokenizer: what turns text into these tokens: "bytes", or the directory or hub id of a tokenizer; None where
            the tokens are no text.
        fixed_rows: whether row i of a split is the same tokens every time.
    """

    tokenizer: str | None = None
    fixed_rows: bool = True

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

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of the longest sequence."""

    @abstractmethod
    def rows(self, split: str) -> Rows:
        """The rows of a split, one of `SPLITS`.

        Raises:
            FileNotFoundError, ValueError: the data cannot be had, in one line.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of rows."""

    def train_sampler(self) -> EpochSampler:
        """The order of each epoch: what it yields is looked up in the rows of the training split."""
        return EpochSampler(len(self.rows("train")), self.seed)

    def bytes_per_token(self, *splits: str) -> float | None:
        """How many bytes of text a token of these splits stands for, on average; None where the tokens are no text.

        A loss in nats is loss / ln 2 / bytes_per_token bits per byte, which compares models of different tokenizers.
        """
        return None

    def arguments(self) -> PlainValues:
        """The constructor's arguments as plain values, for the record of how a checkpoint was made."""
        names = ("vocab_size", "num_train", "num_val", "num_test", "batch_size", "seed", "prompt_length")
        return {name: getattr(self, name) for name in names}

    def prompts(self) -> list[list[int]]:
        """The first tokens of the test sequences, `prompt_length` of them where there are so many."""
        rows = self.rows("test")
        return self.collate([rows[i] for i in range(len(rows))]).prompts()

    def setup(self, stage: str) -> None:
        """Make the splits, so that whatever is wrong with them is said before anything starts."""
        for split in SPLITS:
            self.rows(split)

    def train_dataloader(self) -> DataLoader[Row]:
        return ResumableLoader(
            cast(Any, self.rows("train")),
            batch_size=self.batch_size,
            sampler=self.train_sampler(),
            collate_fn=self.collate,
            num_done=self._num_done,
        )

    def _num_done(self) -> int:
        """How many batches of the epoch in progress the Trainer has made a step of."""
        assert self.trainer is not None, "asked by a Trainer"
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        done: int = progress.processed
        return done

    def val_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("val")

    def test_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("test")

    def predict_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("test")

    def _dataloader(self, split: str) -> DataLoader[Row]:
        return DataLoader(cast(Any, self.rows(split)), batch_size=self.batch_size, collate_fn=self.collate)

    def deal(self, num_sequences: int, counted: str, remedy: str) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of the sequences of each split, in the order of `SPLITS`: a shuffle by the seed, cut in three.

        Args:
            counted: what was counted, for the error when there are too few.
            remedy: what to do then besides asking for fewer.

        Raises:
            ValueError: there are fewer sequences than the splits need.
        """
        num_train = 1 if self.num_train is None else self.num_train
        held_out = self.num_val + self.num_test
        needed = num_train + held_out
        if num_sequences < needed:
            at_least = "at least " if self.num_train is None else ""
            raise ValueError(
                f"{counted} {num_sequences} distinct sequences, and the split needs {at_least}{needed} ({num_train} "
                f"train + {self.num_val} val + {self.num_test} test): lower these numbers, or {remedy}"
            )
        order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(self.seed))
        stop = None if self.num_train is None else held_out + self.num_train
        # Each a copy, which does not keep the whole shuffle.
        return order[held_out:stop].clone(), order[self.num_test : held_out].clone(), order[: self.num_test].clone()
