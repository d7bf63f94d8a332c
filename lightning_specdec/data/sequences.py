"""Integer sequences: progressions made by a formula, and a user's own from a file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import SPLITS, Batch, Row, Rows, TokenData, pad_rows

MAX_PROGRESSIONS = 2**24
"""Progressions that can be shuffled: their order takes 8 bytes each."""
FORMS = {
    ".csv": "integers separated by commas, without a heading",
    ".jsonl": "a JSON list of integers on each line, as [1, 2, 3]",
    ".npy": "a two-dimensional array of integers with numpy.save",
}
"""What a `SequenceFile` may be."""


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

    @abstractmethod
    def shortage(self) -> tuple[str, str]:
        """For the error when there are too few: what was counted, and what to do besides asking for fewer."""

    def splits(self) -> Splits:
        """The sequences of each split."""
        split = [self.rows(name) for name in SPLITS]
        return Splits(*([list(rows[i][1]) for i in range(len(rows))] for rows in split))

    @property
    def max_length(self) -> int:
        return max(map(len, self.sequences()))

    def rows(self, split: str) -> Rows:
        if self._numbers is None:
            self._numbers = dict(zip(SPLITS, self.split(len(self.sequences()), *self.shortage()), strict=True))
        return _Chosen(self.sequences(), self._numbers[split])

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered sequences."""
        prompt_lengths = [min(self.prompt_length, len(sequence) - 1) for _, sequence in rows]
        return pad_rows([sequence for _, sequence in rows], prompt_lengths, [index for index, _ in rows])


class _Chosen:
    """Some of all sequences, numbered anew."""

    def __init__(self, sequences: Sequence[Sequence[int]], numbers: torch.Tensor) -> None:
        self.sequences, self.numbers = sequences, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        return index, self.sequences[int(self.numbers[index])]


class Formula(Sequence[list[int]]):
    """All progressions of a `Progressions`, each computed when it is asked for.

    They are numbered by start first, then by step, then by change.
    """

    def __init__(self, vocab_size: int, length: int, max_step: int, max_change: int, modulo: bool) -> None:
        self.vocab_size, self.max_step = vocab_size, max_step
        times = np.arange(length, dtype=np.int64)
        self._times, self._grown = times, times * (times - 1) // 2
        self._numbers: range | np.ndarray = range(vocab_size * max_step * (max_change + 1))
        if not modulo:
            start, step, change = self._parts(np.arange(len(self._numbers)))
            self._numbers = np.flatnonzero(start + step * times[-1] + change * self._grown[-1] < vocab_size)

    def _parts(self, numbers: Any) -> tuple[Any, Any, Any]:
        rest, start = np.divmod(numbers, self.vocab_size)
        change, step = np.divmod(rest, self.max_step)
        return start, step + 1, change

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        start, step, change = self._parts(self._numbers[number])
        tokens: list[int] = ((start + step * self._times + change * self._grown) % self.vocab_size).tolist()
        return tokens


class Progressions(SequenceData):
    """Sequences start + step t + change t (t - 1) / 2 for t = 0, 1, ...: the step itself grows by `change`.

    Token t + 1 is 3 x[t] - 3 x[t-1] + x[t-2], so three tokens determine the rest, and two where `max_change` is 0
    (arithmetic progressions). Modulo `vocab_size` there are vocab_size * max_step * (max_change + 1) of them; without
    wrapping those that stay below it.

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
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, **options)
        largest = vocab_size - 1
        self.max_step = largest if max_step is None else require_int("max_step", max_step, 1, largest)
        self.max_change = largest if max_change is None else require_int("max_change", max_change, 0, largest)
        self.length = require_int("length", length, 3 if self.max_change else 2)
        self.modulo = modulo
        self._formula: Formula | None = None

    def sequences(self) -> Formula:
        if self._formula is None:
            most = self.vocab_size * self.max_step * (self.max_change + 1)
            if most > MAX_PROGRESSIONS:
                raise ValueError(
                    f"{self._rule()} give {most} progressions, and {MAX_PROGRESSIONS} are the most that are shuffled: "
                    "lower max_step or max_change"
                )
            self._formula = Formula(self.vocab_size, self.length, self.max_step, self.max_change, self.modulo)
        return self._formula

    @property
    def max_length(self) -> int:
        return self.length

    def _rule(self) -> str:
        return (
            f"length {self.length}, steps 1 to {self.max_step} and changes 0 to {self.max_change} over "
            f"{self.vocab_size} tokens"
        )

    def shortage(self) -> tuple[str, str]:
        wrap = "" if self.modulo else ", or set modulo to true"
        return f"{self._rule()} give", f"raise vocab_size, max_step or max_change{wrap}"


class ArithmeticProgressions(Progressions):
    """Arithmetic progressions over the integers below `vocab_size`: 115 of them by default.

    Args:
        options: those of `Progressions`.
    """

    def __init__(
        self,
        vocab_size: int = 50,
        length: int = 10,
        *,
        max_step: int = 5,
        modulo: bool = False,
        num_train: int = 100,
        num_val: int = 12,
        num_test: int = 3,
        batch_size: int = 5,
        prompt_length: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(
            vocab_size, length, max_step=max_step, max_change=0, modulo=modulo, num_train=num_train, num_val=num_val,
            num_test=num_test, batch_size=batch_size, prompt_length=prompt_length, **options,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments().items() if name != "max_change"}


class QuadraticProgressions(Progressions):
    """Quadratic progressions modulo `vocab_size`: deeper networks are better at them than shallow ones.

    Args:
        options: those of `Progressions`.
    """

    def __init__(self, vocab_size: int = 64, length: int = 160, *, batch_size: int = 32, **options: Any) -> None:
        super().__init__(vocab_size, length, batch_size=batch_size, **options)


class SequenceFile(SequenceData):
    """Integer sequences from a file, one for each line (of an array: row). A sequence that is there twice counts once.

    Args:
        path: a .csv (empty cells at the end of a row are dropped), .jsonl or .npy file; see `FORMS`.
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
        if self._sequences:
            return self._sequences
        distinct: dict[tuple[int, ...], None] = {}
        for line, sequence in self._read():
            where = f"{self.path}, line {line}"
            if len(sequence) < 2:
                raise ValueError(f"{where}: a sequence needs at least two tokens, got {len(sequence)}: delete the line")
            for token in sequence:
                if not 0 <= token < self.vocab_size:
                    remedy = "tokens start at 0" if token < 0 else f"set vocab_size to {token + 1} or fix the line"
                    raise ValueError(f"{where}: token {token} is not from 0 to {self.vocab_size - 1}: {remedy}")
            distinct[tuple(sequence)] = None
        if not distinct:
            raise ValueError(f"{self.path} is empty: give it one sequence of integers on each line")
        self._sequences = [list(sequence) for sequence in distinct]
        return self._sequences

    def shortage(self) -> tuple[str, str]:
        return f"{self.path} holds", "add sequences to the file"

    def _read(self) -> Iterator[tuple[int, list[int]]]:
        """Line numbers, from 1, and sequences."""
        path = Path(self.path)
        form = FORMS.get(path.suffix.lower())
        if form is None:
            raise ValueError(f"{path}: give a .csv, .jsonl or .npy file, got the extension {path.suffix!r}")
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: check the path that data.path gives")
        try:
            if path.suffix.lower() == ".npy":
                array = np.load(path, allow_pickle=False)
                if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
                    raise ValueError(f"{array.ndim} dimensions of {array.dtype}")
                lines = [str(row) for row in array.tolist()]
            else:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}): save {form} in UTF-8") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, self._parse(f"{path}, line {number}", line, form, bare=path.suffix.lower() == ".csv")

    def _parse(self, where: str, line: str, form: str, *, bare: bool) -> list[int]:
        try:
            row = json.loads("[" + line.rstrip(", \t") + "]" if bare else line)
        except (ValueError, RecursionError):
            row = None
        wrong = [token for token in row if type(token) is not int] if isinstance(row, list) else [line]
        if wrong:
            raise ValueError(f"{where}: {repr(wrong[0])[:40]} where integers belong: write {form}")
        return row
