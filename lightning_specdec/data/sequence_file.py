"""A user's own integer sequences, read from a CSV, JSON-lines or NumPy file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lightning_specdec.data.base import PlainValues
from lightning_specdec.data.sequences import SequenceData

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class SequenceFile(SequenceData):
    """Integer sequences from a file, one for each line (of an array: row).

    Theory: speculative decoding works on token numbers and does not care what they stand for, so a table of integers
    is all that the toolkit needs to train a draft on somebody's own data. Rows may differ in length. A sequence that
    is there twice counts once, or it could be trained on and tested on as well.

    - `.csv`: integers separated by commas; empty cells at the end of a row are dropped.
    - `.jsonl`: a JSON list of integers on each line.
    - `.npy`: a two-dimensional integer array.

    Args:
        path: the file.
        vocab_size: tokens are 0 to `vocab_size` - 1.
        num_train: sequences to train on; all that validation and test leave when None.
        num_val: sequences that choose the best checkpoint.
        num_test: sequences kept for the end; their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: of the split and of the order of the batches.
        prompt_length: how many tokens of a test sequence are its prompt.
    """

    def __init__(
        self,
        path: str,
        vocab_size: int,
        *,
        num_train: int | None = None,
        num_val: int = 12,
        num_test: int = 3,
        batch_size: int = 5,
        seed: int = 0,
        prompt_length: int = 3,
    ) -> None:
        super().__init__(
            vocab_size,
            num_train=num_train,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            seed=seed,
            prompt_length=prompt_length,
        )
        self.path = path

    def sequences(self) -> list[list[int]]:
        """The file's distinct sequences, in the order of the file."""
        distinct: dict[tuple[int, ...], None] = {}
        for line, sequence in self._rows():
            if len(sequence) < 2:
                raise ValueError(
                    f"{self.path}, line {line}: a single token, but there must be a next one to predict: "
                    "give every sequence at least two tokens, or delete the line"
                )
            self._check_tokens(line, sequence)
            distinct[tuple(sequence)] = None
        if not distinct:
            raise ValueError(f"{self.path} is empty: give it one sequence of integers on each line")
        return [list(sequence) for sequence in distinct]

    def shortage(self) -> tuple[str, str]:
        return f"{self.path} holds", "add sequences to the file"

    def arguments(self) -> PlainValues:
        return {"path": self.path, **super().arguments()}

    def _check_tokens(self, line: int, sequence: list[int]) -> None:
        for token in sequence:
            if not 0 <= token < self.vocab_size:
                remedy = "tokens start at 0" if token < 0 else f"set vocab_size to {token + 1} or more, or fix the line"
                raise ValueError(
                    f"{self.path}, line {line}: token {token} is outside the vocabulary of {self.vocab_size} tokens "
                    f"(0 to {self.vocab_size - 1}): {remedy}"
                )

    def _rows(self) -> Iterator[tuple[int, list[int]]]:
        """Line numbers, from 1, and sequences."""
        readers = {".csv": self._read_csv, ".jsonl": self._read_jsonl, ".npy": self._read_npy}
        extension = Path(self.path).suffix.lower()
        if extension not in readers:
            raise ValueError(
                f"{self.path}: unknown extension {extension!r}: give a .csv file (integers and commas), a .jsonl file "
                "(a list of integers on each line) or a .npy file (a two-dimensional integer array)"
            )
        if not Path(self.path).exists():
            raise FileNotFoundError(f"{self.path} does not exist: check the path that data.path gives")
        if not Path(self.path).is_file():
            raise ValueError(f"{self.path} is not a file: give the path of a .csv, .jsonl or .npy file")
        return readers[extension]()

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers."""
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not text (byte {error.start} is not UTF-8): save it as UTF-8") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield number, line

    def _read_csv(self) -> Iterator[tuple[int, list[int]]]:
        for number, line in self._lines():
            cells = [cell.strip().strip('"') for cell in line.rstrip(", \t").split(",")]
            for cell in cells:
                if not _INTEGER.fullmatch(cell):
                    raise self._wrong(number, repr(cell), "integers separated by commas, without a heading")
            yield number, [int(cell) for cell in cells]

    def _read_jsonl(self) -> Iterator[tuple[int, list[int]]]:
        form = "a JSON list of integers such as [1, 2, 3]"
        for number, line in self._lines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise self._wrong(number, repr(line), form) from None
            if not isinstance(row, list):
                raise self._wrong(number, repr(line), form)
            for token in row:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise self._wrong(number, repr(token), form)
            yield number, row

    def _read_npy(self) -> Iterator[tuple[int, list[int]]]:
        form = "save a two-dimensional array of integers with numpy.save"
        if not Path(self.path).stat().st_size:
            return
        try:
            array = np.load(self.path, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{self.path} is not a readable .npy file ({type(error).__name__}): {form}") from None
        if not isinstance(array, np.ndarray) or array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            kind = f"{array.ndim} dimensions of {array.dtype}" if isinstance(array, np.ndarray) else "several arrays"
            raise ValueError(f"{self.path} holds {kind}: {form}")
        yield from enumerate(array.tolist(), start=1)

    def _wrong(self, line: int, what: str, form: str) -> ValueError:
        shown = what if len(what) <= 40 else what[:40] + "..."
        return ValueError(f"{self.path}, line {line}: {shown} where integers belong: write {form}")
