"""Integer sequences: progressions that follow a formula, and sequences from a file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.base import SPLITS, NumberedRows, TokenData

MAX_PROGRESSIONS = 2**22
"""Upper limit of the number of progressions, which are shuffled in memory."""


class Splits(NamedTuple):
    """Sequences for training, validation and test. None is in two splits."""

    train: list[list[int]]
    val: list[list[int]]
    test: list[list[int]]


class SequenceData(TokenData):
    """Integer sequences, split by a seed into training, validation and test."""

    _split_indices: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def sequences(self) -> Sequence[Sequence[int]]:
        """All sequences, each of at least two tokens, all distinct."""

    def splits(self) -> Splits:
        """All sequences of each split."""
        return Splits(
            train=self._sequences_of("train"),
            val=self._sequences_of("val"),
            test=self._sequences_of("test"),
        )

    @property
    def max_length(self) -> int:
        return max(len(sequence) for sequence in self.sequences())

    def rows(self, split: str) -> NumberedRows:
        sequences = self.sequences()
        if self._split_indices is None:
            indices = self.split(len(sequences), type(self).__name__)
            self._split_indices = dict(zip(SPLITS, indices, strict=True))
        return NumberedRows(self._split_indices[split], lambda index: sequences[int(index)])

    def _sequences_of(self, split: str) -> list[list[int]]:
        rows = self.rows(split)
        return [list(rows[index][1]) for index in range(len(rows))]


class QuadraticProgressions(SequenceData, Sequence[list[int]]):
    """Sequences start + step t + change t (t - 1) / 2 for t = 0, 1, ...

    The step grows by `change`.

    Token t + 1 is 3 x[t] - 3 x[t-1] + x[t-2], so three tokens determine the others, and two tokens
    if `max_change` is 0 (arithmetic progressions). Modulo `vocab_size` there are vocab_size *
    max_step * (max_change + 1) progressions. Without wrapping there are fewer, those below
    `vocab_size`. Deeper networks predict them better.

    Args:
        vocab_size: tokens are 0 to `vocab_size` - 1.
        length: tokens of a progression.
        max_step: steps at the start are 1 to `max_step`; to `vocab_size` - 1 if None.
        max_change: changes are 0 to `max_change`; to `vocab_size` - 1 if None.
        modulo: whether a progression wraps around at `vocab_size`.
        options: arguments of `TokenData`.
    """

    def __init__(
        self,
        vocab_size: int = 64,
        length: int = 160,
        *,
        max_step: int | None = None,
        max_change: int | None = None,
        modulo: bool = True,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, batch_size=batch_size, **options)
        largest = vocab_size - 1
        if max_step is None:
            max_step = largest
        if max_change is None:
            max_change = largest
        self.max_step = require_int("max_step", max_step, 1, largest)
        self.max_change = require_int("max_change", max_change, 0, largest)
        self.length = require_int("length", length, 3 if self.max_change else 2)
        self.modulo = modulo

        num_progressions = vocab_size * self.max_step * (self.max_change + 1)
        if num_progressions > MAX_PROGRESSIONS:
            raise ValueError(
                f"{num_progressions} progressions are more than {MAX_PROGRESSIONS}: lower max_step "
                "or max_change"
            )
        self._times = np.arange(length)
        self._sums_of_times = self._times * (self._times - 1) // 2
        self._coefficients = self._all_coefficients(num_progressions)

    def _all_coefficients(self, num_progressions: int) -> np.ndarray:
        """Start, step and change of every progression, as rows of three integers."""
        # The index of a progression is a number of three digits: change, step and start.
        change_and_step, start = np.divmod(np.arange(num_progressions), self.vocab_size)
        change, step = np.divmod(change_and_step, self.max_step)
        step += 1  # a step of 0 would repeat one token

        coefficients = np.stack((start, step, change), axis=1)
        if self.modulo:
            return coefficients
        last_token = start + step * self._times[-1] + change * self._sums_of_times[-1]
        return coefficients[last_token < self.vocab_size]

    def __len__(self) -> int:
        return len(self._coefficients)

    def __getitem__(self, index: Any) -> Any:
        start, step, change = self._coefficients[index]
        tokens = start + step * self._times + change * self._sums_of_times
        return (tokens % self.vocab_size).tolist()

    def sequences(self) -> Sequence[list[int]]:
        """All progressions, each computed when it is read."""
        return self

    @property
    def max_length(self) -> int:
        return self.length


class ArithmeticProgressions(QuadraticProgressions):
    """Arithmetic progressions of integers below `vocab_size`: 115 by default.

    Args:
        options: arguments of `QuadraticProgressions`.
    """

    def __init__(
        self,
        vocab_size: int = 50,
        length: int = 10,
        *,
        max_step: int = 5,
        max_change: int = 0,
        modulo: bool = False,
        num_train: int = 100,
        num_val: int = 12,
        num_test: int = 3,
        batch_size: int = 5,
        prompt_length: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(
            vocab_size,
            length,
            max_step=max_step,
            max_change=max_change,
            modulo=modulo,
            num_train=num_train,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            prompt_length=prompt_length,
            **options,
        )


class SequenceFile(SequenceData):
    """Integer sequences from a text file, one on each line: `1, 2, 3` or `[1, 2, 3]`.

    Args:
        path: the file. Repeated sequences are used once.
        vocab_size: tokens are 0 to `vocab_size` - 1.
        options: arguments of `TokenData`.
    """

    def __init__(
        self,
        path: str,
        vocab_size: int,
        *,
        num_val: int = 12,
        num_test: int = 3,
        batch_size: int = 5,
        prompt_length: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(
            vocab_size,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            prompt_length=prompt_length,
            **options,
        )
        self.path = path
        self._sequences: list[list[int]] = []

    def sequences(self) -> list[list[int]]:
        """The distinct sequences, in the order of the file."""
        if self._sequences:
            return self._sequences
        try:
            lines = Path(self.path).read_text(encoding="utf-8-sig").splitlines()
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.path} cannot be read ({one_line(error)})") from None

        # A dict keeps the order and drops repetitions.
        distinct_sequences: dict[tuple[int, ...], None] = {}
        for number, line in enumerate(lines, 1):
            if line.strip():
                distinct_sequences[tuple(self._parse(number, line))] = None
        self._check_sizes(distinct_sequences)
        if not distinct_sequences:
            raise ValueError(f"{self.path} is empty: give it one sequence of integers on each line")
        self._sequences = [list(sequence) for sequence in distinct_sequences]
        return self._sequences

    def _parse(self, number: int, line: str) -> list[int]:
        """The integers of a line, with or without brackets."""
        try:
            tokens = json.loads(f"[{line.strip('[], ')}]")
        except (ValueError, RecursionError):
            tokens = []
        if len(tokens) < 2 or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(
                f"{self.path}, line {number}: write two or more integers from 0 on as 1, 2, 3, "
                f"got {line[:40]!r}"
            )
        return list(tokens)

    def _check_sizes(self, sequences: Iterable[tuple[int, ...]]) -> None:
        """Raise ValueError if an integer is outside the vocabulary."""
        largest = max((max(sequence) for sequence in sequences), default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"{self.path} has integers up to {largest}, and vocab_size is {self.vocab_size}: "
                f"set it to {largest + 1} or more (--data.vocab_size {largest + 1})"
            )
