"""Laws of a new user's first data: one text file is enough, and messages name what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_specdec import SpeculativeDecoder, load_model
from lightning_specdec.data import SequenceFile
from lightning_specdec.data.text import find_texts, hold_out


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_single_file_is_cut_into_parts_so_that_some_can_be_held_out() -> None:
    lines = [f"line {number} of the notes\n" for number in range(1000)]
    Path("notes.txt").write_text("".join(lines))
    texts = find_texts(["notes.txt"])
    parts = [text.content for text in texts]
    assert "".join(str(part) for part in parts) == "".join(lines), "nothing is lost"
    assert all(str(part).endswith("\n") for part in parts)
    train, val, test = hold_out(texts, 0.05)
    assert len(train) + len(val) + len(test) == len(texts) == 40
    total_bytes = sum(text.num_bytes for text in texts)
    for split in (val, test):
        assert 0.02 * total_bytes < sum(text.num_bytes for text in split) <= 0.05 * total_bytes
    assert find_texts(["notes.txt"]) == texts


def test_several_files_stay_whole() -> None:
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text(f"{name}\n" * 100)
    assert [text.content for text in find_texts(["a.txt", "b.txt"])] == [None, None]


@pytest.mark.parametrize("text", ["one line without an end", "\n\n\n", "a\nb\n"])
def test_a_file_of_few_lines_has_few_parts(text: str) -> None:
    Path("few.txt").write_text(text)
    texts = find_texts(["few.txt"])
    assert len(texts) <= len(text.splitlines())


def test_integers_outside_the_vocabulary_are_named_with_the_size_that_fits() -> None:
    Path("mine.csv").write_text("1,2,3\n4,59,6\n7,104,9\n")
    message = r"mine.csv has integers up to 104, and vocab_size is 50: set it to 105 or more"
    with pytest.raises(ValueError, match=message):
        SequenceFile("mine.csv", vocab_size=50).setup("fit")


def test_a_misspelled_directory_is_named_in_python_as_in_the_command_line() -> None:
    Path("models/llama").mkdir(parents=True)
    Path("models/llama/config.json").write_text("{}")
    message = "there is no directory models/lama: did you mean models/llama"
    for load in (SpeculativeDecoder.from_pretrained, load_model):
        with pytest.raises(ValueError, match=message):
            load("models/lama")
