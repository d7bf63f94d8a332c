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
from lightning_specdec.config.kinds import described
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from jaxtyping import Int

IGNORED = -100
"""The label that cross-entropy ignores."""

SPLITS = ("train", "val", "test")

PlainValues = dict[str, Any]
"""Constructor arguments by name: numbers, strings, lists of them."""

MISSING = object()
"""Marks an attribute that does not exist."""

Row = tuple[int, Any]
"""A sequence's index in its split, and its tokens."""


class NumberedRows(Dataset[Row]):
    """The rows of a split, each read at its first use.

    Args:
        locations: where each row is: a sequence of anything that `read` accepts.
        read: reads the row at a location.
    """

    def __init__(self, locations: Any, read: Callable[[Any], Any]) -> None:
        self.locations = locations
        self.read = read

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: Any) -> Any:
        return index, self.read(self.locations[index])


class Batch(NamedTuple):
    """Some sequences as one right-padded tensor.

    Args:
        tokens: `[B, T]`, zeros after a row's end.
        lengths: `[B]`, number of real tokens of each row.
        prompt_lengths: `[B]`, number of tokens that are the prompt when the row is continued by
            decoding.
        indices: `[B]`, index of each row in its split; -1 if it is unknown.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    indices: Tensor

    @classmethod
    def of(cls, batch: Any, *, origin: str = "the data module") -> Batch:
        """Read a batch of any data module.

        Args:
            batch: a tensor of tokens, or a mapping or object with `tokens` and optionally the other
                fields. Without `prompt_lengths`, the first half of each row is its prompt.
            origin: what messages call the data module.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(batch, Batch):
            return batch

        if isinstance(batch, Tensor):
            values: Mapping[str, Any] = {"tokens": batch}
        elif isinstance(batch, Mapping):
            values = batch
        else:
            values = {name: getattr(batch, name, None) for name in cls._fields}

        tokens: Any = values.get("tokens")
        is_tensor = isinstance(tokens, Tensor) and tokens.dim() == 2
        if not is_tensor or tokens.is_floating_point():
            got = f"tokens as {described(tokens)}"
            if tokens is None:
                got = described(batch)
            raise ValueError(
                f"a batch of {origin} must be integer tokens [B, T], or have them as `tokens`, "
                f"got {got}"
            )
        lengths = values.get("lengths")
        if lengths is None:
            lengths = tokens.new_full((len(tokens),), tokens.shape[1])
        prompt_lengths = values.get("prompt_lengths")
        if prompt_lengths is None:
            prompt_lengths = (lengths // 2).clamp(min=1)
        indices = values.get("indices")
        if indices is None:
            indices = torch.full_like(lengths, -1)
        return cls(tokens, lengths, prompt_lengths, indices)

    def next_tokens(self) -> Int[Tensor, "B N"]:
        """The label of every position but the last: the next token, or `IGNORED` for padding."""
        labels = self.tokens[:, 1:]
        positions = torch.arange(1, self.tokens.shape[1], device=labels.device)
        is_padding = positions >= self.lengths[:, None]
        return labels.masked_fill(is_padding, IGNORED)

    def prompts(self) -> list[list[int]]:
        """The prompt of every row, on the host."""
        rows = zip(self.tokens.tolist(), self.prompt_lengths.tolist(), strict=True)
        return [tokens[:prompt_length] for tokens, prompt_length in rows]


class EpochSampler(Sampler[int]):
    """A new order each epoch. It depends on the seed and the epoch only, so that a run can resume.

    Args:
        num_sequences: number of sequences.
        seed: seed of the orders.
        num_drawn: upper limit of the number of sequences in an epoch; no limit if None.
    """

    def __init__(self, num_sequences: int, seed: int, num_drawn: int | None = None) -> None:
        self.num_sequences = num_sequences
        self.seed = seed
        self.num_drawn = min(num_drawn or num_sequences, num_sequences)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_drawn

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.num_sequences, generator=self.generator())
        yield from order[: self.num_drawn].tolist()

    def generator(self) -> torch.Generator:
        """A new generator of this epoch's random numbers."""
        # The large factor keeps the epochs of neighboring seeds apart.
        epoch_seed = (self.seed * 1_000_003 + self.epoch) % 2**63
        return torch.Generator().manual_seed(epoch_seed)


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` that continues an epoch after Lightning has restored its state.

    Args:
        trainer: the Trainer that uses the batches.
        options: arguments of `DataLoader`.
    """

    def __init__(self, *args: Any, trainer: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trainer = trainer
        self._num_done = 0

    def state_dict(self) -> dict[str, int]:
        """The number of batches in the current epoch that the Trainer has processed."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return {"num_batches": int(progress.current.processed)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_done = int(state["num_batches"])
        if self._num_done >= len(self):
            # The epoch was over, so the next one starts at its first batch.
            self._num_done = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        num_skipped = self._num_done
        self._num_done = 0
        return islice(super().__iter__(), num_skipped, None)


class TokenData(LightningDataModule, ABC):
    """Token sequences in three splits that share nothing.

    Args:
        vocab_size: tokens are integers from 0 to `vocab_size` - 1.
        num_train: number of sequences in an epoch; all if None.
        num_val: number of sequences that choose the best checkpoint.
        num_test: number of sequences for the final test. Their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: seed of the order of the batches, and of all that the data draws.
        prompt_length: number of tokens of a test sequence that are its prompt; at least one is left
            to decode.

    Attributes:
        tokenizer: the tokenizer of the tokens: "bytes", or a directory or Hub id; None if they are
            not text.
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
        if num_train is not None:
            num_train = require_int("num_train", num_train, 1)
        self.num_train = num_train
        self.num_val = require_int("num_val", num_val, 1)
        self.num_test = require_int("num_test", num_test, 1)
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.seed = require_int("seed", seed, 0, 2**32 - 1)
        self.prompt_length = require_int("prompt_length", prompt_length, 1)

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Number of tokens of the longest sequence."""

    @abstractmethod
    def rows(self, split: str) -> NumberedRows:
        """The rows of a split, one of `SPLITS`.

        Raises:
            FileNotFoundError, ValueError: the data cannot be read, in one line.
        """

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of rows, right-padded with zeros."""
        indices = []
        lengths = []
        sequences = []
        for index, tokens in rows:
            indices.append(index)
            lengths.append(len(tokens))
            sequences.append(torch.from_numpy(np.array(tokens, np.int64)))

        # At least one token is left to decode.
        all_lengths = torch.tensor(lengths)
        prompt_lengths = (all_lengths - 1).clamp(max=self.prompt_length)
        padded_tokens = pad_sequence(sequences, batch_first=True)
        return Batch(padded_tokens, all_lengths, prompt_lengths, torch.tensor(indices))

    def train_sampler(self) -> EpochSampler:
        """The order of each epoch, as indices into the rows of the training split."""
        return EpochSampler(len(self.rows("train")), self.seed)

    def bytes_per_token(self, *splits: str) -> float | None:
        """Bytes of text / number of tokens in these splits; None if the tokens are not text."""
        return None

    def arguments(self) -> PlainValues:
        """The constructor's arguments, for the record of a checkpoint's training."""
        return plain_arguments(self)

    def prompts(self) -> list[list[int]]:
        """The prompts of the test sequences."""
        return self.first_rows("test").prompts()

    def first_rows(self, split: str, number: int | None = None) -> Batch:
        """The first `number` rows of a split; all if None."""
        rows = self.rows(split)
        num_rows = len(rows) if number is None else min(number, len(rows))
        return self.collate([rows[index] for index in range(num_rows)])

    def setup(self, stage: str) -> None:
        """Read the splits, so that their faults are reported before training starts."""
        for split in SPLITS:
            self.rows(split)

    def train_dataloader(self) -> DataLoader[Row]:
        sampler: Sampler[int] = self.train_sampler()
        if self.trainer is not None and self.trainer.world_size > 1:
            # Lightning would shuffle a sampler again that it distributes itself.
            ranks = self.trainer.distributed_sampler_kwargs or {}
            sampler = DistributedSamplerWrapper(sampler, shuffle=False, drop_last=True, **ranks)
        return ResumableLoader(
            self.rows("train"),
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            trainer=self.trainer,
        )

    def val_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("val")

    def test_dataloader(self) -> DataLoader[Row]:
        return self._dataloader("test")

    def _dataloader(self, split: str) -> DataLoader[Row]:
        return DataLoader(self.rows(split), batch_size=self.batch_size, collate_fn=self.collate)

    def split(self, num_sequences: int, source: str) -> tuple[Tensor, Tensor, Tensor]:
        """Shuffle sequences by the seed, and cut them into splits.

        Args:
            num_sequences: number of sequences.
            source: where they are from, for the error if there are too few.

        Returns:
            The indices of the sequences in train, val and test.

        Raises:
            ValueError: there are fewer sequences than the splits need.
        """
        num_held_out = self.num_val + self.num_test
        min_train = 1 if self.num_train is None else self.num_train
        num_needed = num_held_out + min_train
        if num_sequences < num_needed:
            raise ValueError(
                f"{source}: {num_sequences} distinct sequences, and the splits need {num_needed} "
                f"({self.num_val} val + {self.num_test} test + {min_train} train): lower "
                "num_train, num_val or num_test, or give more data"
            )

        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(num_sequences, generator=generator)
        test = order[: self.num_test]
        val = order[self.num_test : num_held_out]
        train = order[num_held_out:]
        if self.num_train is not None:
            train = train[: self.num_train]
        return train, val, test


def plain_arguments(instance: object) -> PlainValues:
    """The constructor arguments that an object keeps as attributes, if they are plain values."""
    values: PlainValues = {}
    for cls in type(instance).__mro__:
        if cls.__module__.startswith("lightning.") or "__init__" not in vars(cls):
            continue
        for name in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
            value = getattr(instance, name, MISSING)
            if isinstance(value, int | float | str | list | None):
                values.setdefault(name, value)
    return values


@rank_zero_only
def tell(line: str) -> None:
    """Report progress on stderr, once for all processes."""
    say(line, file=sys.stderr)
