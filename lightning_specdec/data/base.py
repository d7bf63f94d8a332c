"""Token sequences in three splits, as Lightning data.

Shapes: B rows, T tokens, N = T - 1 labels.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from jaxtyping import Int

IGNORED = -100
"""The label that cross-entropy leaves out."""

SPLITS = ("train", "val", "test")

PlainValues = dict[str, Any]
"""Constructor arguments by name: numbers, strings, lists of them."""

Row = tuple[int, Any]
"""A sequence's number within its split, and its tokens."""


class NumberedRows(Dataset[Row]):
    """The rows of a split, each read when it is asked for.

    Args:
        places: of each row, where it is found.
        read: what reads it from there.
    """

    def __init__(self, places: Any, read: Callable[[Any], Any]) -> None:
        self.places, self.read = places, read

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: Any) -> Any:
        return number, self.read(self.places[number])


class Batch(NamedTuple):
    """Some sequences as one right-padded tensor.

    Args:
        tokens: `[B, T]`, zeros behind a row's end.
        lengths: `[B]`, number of real tokens of each row.
        prompt_lengths: `[B]`, number of tokens that are given when the row is continued by decoding.
        indices: `[B]`, each row's number within its split; -1 where the data do not say.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    indices: Tensor

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """A batch of any data module: a tensor of tokens, or a mapping or object with `tokens` and maybe `lengths`.

        Where there are no `prompt_lengths`, the first half of each row is its prompt.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(batch, Batch):
            return batch
        values = (
            batch
            if isinstance(batch, Mapping)
            else {name: getattr(batch, name, None) for name in cls._fields}
        )
        tokens = batch if isinstance(batch, Tensor) else values.get("tokens")
        lengths, prompt_lengths, indices = map(values.get, cls._fields[1:])
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise ValueError(
                "a batch must be a [B, T] tensor of tokens or hold one as `tokens`: change the data module"
            )
        if lengths is None:
            lengths = tokens.new_full((len(tokens),), tokens.shape[1])
        if prompt_lengths is None:
            prompt_lengths = (lengths // 2).clamp(min=1)
        return cls(
            tokens,
            lengths,
            prompt_lengths,
            torch.full_like(lengths, -1) if indices is None else indices,
        )

    def next_tokens(self) -> Int[Tensor, "B N"]:
        """The label of every position but the last: the token after it, `IGNORED` where that is padding."""
        labels = self.tokens[:, 1:]
        positions = torch.arange(1, self.tokens.shape[1], device=labels.device)
        return labels.masked_fill(positions >= self.lengths[:, None], IGNORED)

    def prompts(self) -> list[list[int]]:
        """The first tokens of every row, on the host."""
        lengths = self.prompt_lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


class EpochSampler(Sampler[int]):
    """A new order each epoch, which depends on the seed and the epoch's number alone, so that a run can resume.

    Args:
        num_sequences: how many there are.
        seed: of the orders.
        num_drawn: how many of them an epoch has at most; all when None.
    """

    def __init__(self, num_sequences: int, seed: int, num_drawn: int | None = None) -> None:
        self.num_sequences, self.seed = num_sequences, seed
        self.num_drawn = min(num_drawn or num_sequences, num_sequences)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_drawn

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_sequences, generator=self.generator())[
            : self.num_drawn
        ].tolist()

    def generator(self) -> torch.Generator:
        """This epoch's random numbers, from the first one."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` that continues in the middle of an epoch once Lightning has restored its state.

    Args:
        trainer: the Trainer that learns from the batches.
        options: those of `DataLoader`.
    """

    def __init__(self, *args: Any, trainer: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trainer, self._first = trainer, 0

    def state_dict(self) -> dict[str, int]:
        """How many batches of the epoch in progress the Trainer has made a step of."""
        return {
            "num_batches": int(self.trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        done = int(state["num_batches"])
        self._first = done if done < len(self) else 0  # else the epoch was over

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first, self._first = self._first, 0
        return islice(super().__iter__(), first, None)


class TokenData(LightningDataModule, ABC):
    """Token sequences in three splits that share nothing.

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
    """

    tokenizer: str | None = None

    def __init__(
        self,
        vocab_size: int,
        *,
        num_train: int | None = None,
        num_val: int = 64,
        num_test: int = 16,
        batch_size: int = 16,
        seed: int = 0,
        prompt_length: int = 8,
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
    def rows(self, split: str) -> NumberedRows:
        """The rows of a split, one of `SPLITS`.

        Raises:
            FileNotFoundError, ValueError: the data cannot be had, in one line.
        """

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of rows, right-padded with zeros."""
        texts = [torch.from_numpy(np.array(tokens, np.int64)) for _, tokens in rows]
        lengths, indices = (
            torch.tensor([len(text) for text in texts]),
            torch.tensor([index for index, _ in rows]),
        )
        prompt_lengths = (lengths - 1).clamp(max=self.prompt_length)
        return Batch(pad_sequence(texts, batch_first=True), lengths, prompt_lengths, indices)

    def train_sampler(self) -> EpochSampler:
        """The order of each epoch: what it yields is looked up in the rows of the training split."""
        return EpochSampler(len(self.rows("train")), self.seed)

    def bytes_per_token(self, *splits: str) -> float | None:
        """How many bytes of text a token of these splits stands for, on average; None where the tokens are no text."""
        return None

    def arguments(self) -> PlainValues:
        """The constructor's arguments, for the record of how a checkpoint was made."""
        return plain_arguments(self)

    def prompts(self) -> list[list[int]]:
        """The first tokens of the test sequences."""
        return self.first_rows("test").prompts()

    def first_rows(self, split: str, number: int | None = None) -> Batch:
        """The first rows of a split, all when `number` is None."""
        rows = self.rows(split)
        return self.collate(
            [rows[i] for i in range(len(rows) if number is None else min(number, len(rows)))]
        )

    def setup(self, stage: str) -> None:
        """Make the splits, so that whatever is wrong with them is reported before anything starts."""
        for split in SPLITS:
            self.rows(split)

    def train_dataloader(self) -> DataLoader[Row]:
        rows, trainer = self.rows("train"), self.trainer
        sampler: Sampler[int] = self.train_sampler()
        if (
            trainer is not None and trainer.world_size > 1
        ):  # Lightning would wrap it with another shuffle
            places = trainer.distributed_sampler_kwargs or {}
            sampler = DistributedSamplerWrapper(sampler, shuffle=False, drop_last=True, **places)
        return ResumableLoader(
            rows,
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            trainer=trainer,
        )

    def val_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("val")

    def test_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("test")

    def _dataloader(self, split: str) -> DataLoader[Row]:
        return DataLoader(self.rows(split), batch_size=self.batch_size, collate_fn=self.collate)

    def split(self, num_sequences: int, source: str) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of the sequences of each split, in the order of `SPLITS`: a shuffle by the seed, cut in three.

        Args:
            source: of the sequences, for the error when there are too few.

        Raises:
            ValueError: there are fewer sequences than the splits need.
        """
        held_out = self.num_val + self.num_test
        needed = held_out + (1 if self.num_train is None else self.num_train)
        if num_sequences < needed:
            raise ValueError(
                f"{source}: {num_sequences} distinct sequences, and the splits need {needed} ({self.num_val} val + "
                f"{self.num_test} test + train): lower num_train, num_val or num_test, or give more data"
            )
        order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(self.seed))
        stop = None if self.num_train is None else needed
        return order[held_out:stop], order[self.num_test : held_out], order[: self.num_test]


def plain_arguments(made: object) -> PlainValues:
    """The arguments of an object's constructors that it keeps under their names, if they are plain values."""
    values: PlainValues = {}
    for kind in type(made).__mro__:
        if not kind.__module__.startswith("lightning.") and "__init__" in vars(kind):
            for name in inspect.signature(kind.__init__).parameters:  # type: ignore[misc]
                value = getattr(made, name, inspect)
                if isinstance(value, int | float | str | list | None):
                    values.setdefault(name, value)
    return values


@rank_zero_only
def tell(line: str) -> None:
    """Report progress on stderr, once for all processes."""
    say(line, file=sys.stderr)
