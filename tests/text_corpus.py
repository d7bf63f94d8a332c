"""Some files of text, and data made of them, for the laws of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_specdec.data import TextFiles

NUM_FILES = 40


def line(file: int, number: int) -> str:
    return f"file {file} line {number}: naïve café 🙂 {number * number}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty files of some hundred bytes to some thousand, in two directories."""
    root = tmp_path / "corpus"
    for file in range(NUM_FILES):
        path = root / ("even" if file % 2 == 0 else "odd") / f"{file}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line(file, number) for number in range(10 + file)), encoding="utf-8")
    return root


@pytest.fixture
def make(corpus: Path, tmp_path: Path) -> Callable[..., TextFiles]:
    """Data of that corpus, of a size that suits it."""

    def made(**arguments: object) -> TextFiles:
        sizes = {"length": 64, "num_val": 6, "num_test": 4, "prompt_length": 16, "held_out": 0.1, "batch_size": 8}
        given = {"paths": str(corpus), "cache_dir": str(tmp_path / "cache"), **sizes, **arguments}
        return TextFiles(**given)  # type: ignore[arg-type]

    return made


def text_of(data: TextFiles, split: str) -> str:
    return bytes(data.texts[split].tokens.tolist()).decode()


def files_in(text: str) -> set[str]:
    return {part.split()[1] for part in text.splitlines()}
