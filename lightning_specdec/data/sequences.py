"""Integer sequences: progressions made by a formula, and a user's own from a file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.base import SPLITS, NumberedRows, TokenData

MAX_PROGRESSIONS = 2**22
"""Progressions that can be shuffled."""


class Splits(NamedTuple):
    """Sequences for training, validation and test; none is in two of them."""

    train: list[list[int]]
    val: list[list[int]]
    test: list[list[int]]


class SequenceData(TokenData):
    """Integer sequences, split by a seed into training, validation and test, each in one split only."""

    _numbers: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def sequences(self) -> Sequence[Sequence[int]]:
        """All sequences, each of at least two tokens, all distinct."""

    def splits(self) -> Splits:
        split = [self.rows(name) for name in SPLITS]
        return Splits(*([list(rows[i][1]) for i in range(len(rows))] for rows in split))

    @property
    def max_length(self) -> int:
        return max(map(len, self.sequences()))

    def rows(self, split: str) -> NumberedRows:
        if self._numbers is None:
            self._numbers = dict(
                zip(SPLITS, self.split(len(self.sequences()), type(self).__name__), strict=True)
            )
        sequences = self.sequences()
        return NumberedRows(self._numbers[split], lambda number: sequences[int(number)])


class QuadraticProgressions(SequenceData, Sequence[list[int]]):
    """Sequences start + step t + change t (t - 1) / 2 for t = 0, 1, ...: the step itself grows by `change`.

    Token t + 1 is 3 x[t] - 3 x[t-1] + x[t-2], so three tokens determine the rest, and two where `max_change` is 0
    (arithmetic progressions). Modulo `vocab_size` there are vocab_size * max_step * (max_change + 1) of them; without
    wrapping those that stay below it. Deeper networks are better at them than shallow ones.

    Args:
        vocab_size: tokens are 0 to `vocab_size` - 1.
        length: tokens of a progression.
        max_step: steps at the beginning are 1 to `max_step`; to `vocab_size` - 1 when None.
        max_change: changes are 0 to `max_change`; to `vocab_size` - 1 when None.
        modulo: whether a progression wraps around at `vocab_size`.
        options: those of `TokenData`.
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
        self.max_step = (
            largest if max_step is None else require_int("max_step", max_step, 1, largest)
        )
        self.max_change = (
            largest if max_change is None else require_int("max_change", max_change, 0, largest)
        )
        self.length = require_int("length", length, 3 if self.max_change else 2)
        self.modulo = modulo
        most = vocab_size * self.max_step * (self.max_change + 1)
        if most > MAX_PROGRESSIONS:
            raise ValueError(
                f"{most} progressions are more than {MAX_PROGRESSIONS}: lower max_step or max_change"
            )
        self._times = np.arange(length)
        self._grown = self._times * (self._times - 1) // 2
        rest, start = np.divmod(np.arange(most), vocab_size)
        change, step = np.divmod(rest, self.max_step)
        last = start + (step + 1) * self._times[-1] + change * self._grown[-1]
        self._parts = np.stack((start, step + 1, change), axis=1)[modulo | (last < vocab_size)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: Any) -> Any:
        start, step, change = self._parts[number]
        return ((start + step * self._times + change * self._grown) % self.vocab_size).tolist()

    def sequences(self) -> Sequence[list[int]]:
        """All progressions, each computed when it is asked for."""
        return self

    @property
    def max_length(self) -> int:
        return self.length


class ArithmeticProgressions(QuadraticProgressions):
    """Arithmetic progressions over the integers below `vocab_size`: 115 of them by default.

    Args:
        options: those of `QuadraticProgressions`.
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
            vocab_size, length, max_step=max_step, max_change=max_change, modulo=modulo, num_train=num_train,
            num_val=num_val, num_test=num_test, batch_size=batch_size, prompt_length=prompt_length, **options,
        )  # fmt: skip


class SequenceFile(SequenceData):
    """Integer sequences from a text file, one on each line: `1, 2, 3` or `[1, 2, 3]`. Equal sequences count once.

    Args:
        path: the file.
        options: those of `TokenData`.
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
            vocab_size, num_val=num_val, num_test=num_test, batch_size=batch_size, prompt_length=prompt_length,
            **options,
        )  # fmt: skip
        self.path = path
        self._sequences: list[list[int]] = []

    def sequences(self) -> list[list[int]]:
        """The file's distinct sequences, in the order of the file."""
        if not self._sequences:
            try:
                lines = Path(self.path).read_text(encoding="utf-8-sig").splitlines()
            except (ValueError, OSError) as error:
                raise ValueError(f"{self.path} cannot be read ({one_line(error)})") from None
            found = [
                tuple(self._parse(number, line))
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
            self._sequences = [list(sequence) for sequence in dict.fromkeys(found)]
            if not found:
                raise ValueError(
                    f"{self.path} is empty: give it one sequence of integers on each line"
                )
        return self._sequences

    def _parse(self, number: int, line: str) -> list[int]:
        where = f"{self.path}, line {number}"
        try:
            tokens = json.loads(f"[{line.strip('[], ')}]")
        except (ValueError, RecursionError):
            tokens = [line]
        if len(tokens) < 2 or not all(
            type(token) is int and 0 <= token < self.vocab_size for token in tokens
        ):
            raise ValueError(
                f"{where}: write two or more integers from 0 to {self.vocab_size - 1} (vocab_size) as 1, 2, 3, got "
                f"{line[:40]!r}"
            )
        return list(tokens)
