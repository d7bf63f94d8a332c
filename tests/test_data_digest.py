"""Laws of the digest by which a resumed run notices other training data."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_specdec import RNN
from lightning_specdec.data import TextFiles
from lightning_specdec.training import PairTraining, data_digest


def text_files(directory: Path, content: str) -> TextFiles:
    directory.mkdir()
    for number in range(30):
        (directory / f"{number}.txt").write_text(f"{content} {number}\n" * 9)
    return TextFiles(str(directory), length=16, cache_dir=str(directory / ".cache"))


def test_a_digest_is_that_of_the_data_and_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PairTraining(RNN(256), RNN(256))
    first = text_files(tmp_path / "first", "the cat")
    second = text_files(tmp_path / "second", "the dog")
    digests = [model.data_digest(data) for data in (first, second, first)]
    assert digests[0] == digests[2] != digests[1]
    assert model.data_digest("no data of ours") is None

    again = text_files(tmp_path / "again", "the cat")
    assert model.data_digest(again) == digests[0]
    monkeypatch.setattr(data_digest, "_digest_of", None)
    assert model.data_digest(again) == digests[0]
