"""Laws of files of text: whole files are held out, and whatever is no text is told in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fixtures import TRAINER, here, refused
from text_corpus import NUM_FILES, corpus, files_in, make, text_of

from lightning_specdec.data import TextFiles
from lightning_specdec.data.text_sources import find_texts, hold_out

__all__ = ["corpus", "here", "make"]


def test_whole_files_are_held_out_and_none_is_in_two_splits(make: Callable[..., TextFiles], corpus: Path) -> None:
    data = make()
    files = {split: files_in(text_of(data, split)) for split in ("train", "val", "test")}
    assert sum(map(len, files.values())) == NUM_FILES == len(set.union(*files.values()))
    texts = {path.stem: path.read_text("utf-8") for path in corpus.rglob("*.txt")}
    total = sum(len(text.encode()) for text in texts.values())
    for split, names in files.items():
        num_bytes = sum(len(texts[name].encode()) for name in names)
        assert num_bytes == len(data.texts()[split].tokens)
        assert split == "train" or 0.05 * total < num_bytes <= 0.1 * total
        assert all(texts[name] in text_of(data, split) for name in names)


def test_names_alone_decide_the_split(make: Callable[..., TextFiles], corpus: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    (corpus).rename(moved)
    before, after = make(paths=str(moved), seed=1), make(paths=[str(moved / "**" / "*.txt")], seed=2)
    assert [text_of(before, split) for split in ("train", "val", "test")] == [
        text_of(after, split) for split in ("train", "val", "test")
    ]


@pytest.mark.parametrize("sizes", [(10, 10, 10**6), (10**6, 1, 1), (5, 5, 5), (100, 1, 1, 1), (1, 10**6, 10**6, 1)])
def test_every_split_gets_a_file_whatever_their_sizes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text(chr(ord("a") + number) * size)
    for share in (0.01, 0.1, 0.4):
        found = find_texts([str(tmp_path)], max_bytes=None)
        splits = hold_out(found, share)
        assert all(splits) and sorted(sum(splits, []), key=lambda file: file.name) == found.files


def test_empty_and_repeated_files_are_left_out_and_counted(
    make: Callable[..., TextFiles], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        (corpus / f"empty{number}.txt").write_text("")
        (corpus / f"again{number}.txt").write_bytes((corpus / "even" / "4.txt").read_bytes())
    (corpus / ".hidden").write_bytes(b"\xff")
    make().setup("fit")
    told = capsys.readouterr().err
    assert f"text: {NUM_FILES} files" in told and "(left out: 3 empty, 3 repeated)" in told


def test_the_cap_takes_files_that_fit(make: Callable[..., TextFiles]) -> None:
    data = make(max_bytes=20_000, num_val=1, num_test=1)
    num_bytes = sum(len(text.tokens) for text in data.texts().values())
    assert 18_000 < num_bytes <= 20_000
    assert sum(len(text.tokens) for text in make(max_bytes=None).texts().values()) > 40_000


def test_the_standard_library_is_there_without_its_tests(tmp_path: Path) -> None:
    data = TextFiles(max_bytes=400_000, cache_dir=str(tmp_path))
    data.setup("fit")
    assert 390_000 < sum(len(text.tokens) for text in data.texts().values()) <= 400_000
    found = find_texts(None, max_bytes=10**7)
    names = {file.name for file in found.files}
    assert all(name.endswith(".py") for name in names)
    assert not {part for name in names for part in Path(name).parts} & {"test", "tests", "site-packages", "encodings"}


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ("nowhere", "nowhere does not exist: check the path that data.paths gives"),
        ("corpus/*.md", "corpus/*.md fits no file: check the pattern"),
        ("bare", "bare is a directory without files"),
        ("hollow", "hollow: all 2 files are empty: give files with text in them"),
        ("hollow/1.txt", "hollow/1.txt: the file is empty: give files with text in them"),
        ("latin.txt", "latin.txt is not text (byte 4 is not UTF-8): save it as UTF-8, or leave it out"),
        ("corpus/odd/1.txt", "1.txt is the only file with text of its own"),
        (["corpus/odd/1.txt", "corpus/odd/3.txt"], "is one of only two files"),
        ([], "paths is an empty list"),
    ],
)
def test_sources_without_usable_text_give_one_line(
    make: Callable[..., TextFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str | list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "hollow").mkdir()
    for number in range(2):
        (tmp_path / "hollow" / f"{number}.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xc3\xa9"[:3] + b" \xe9t\xe9")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make(paths=paths).setup("fit")
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"length": 100_000}, "train, val and test need a window of 100000 tokens each, and train has"),
        ({"length": 100_000}, "give more text (some 1,000,000 tokens at least, in files of 100000 or more), lower"),
        ({"max_bytes": 900}, "raise max_bytes"),
        ({"max_bytes": 10}, "larger than max_bytes (10)"),
        ({"cache_dir": "/proc/nothing"}, "give another data.cache_dir"),
        ({"held_out": 0.5}, "held_out must be in (0, 0.4], got 0.5"),
        ({"length": 1}, "length must be at least 2, got 1"),
    ],
)
def test_sizes_that_do_not_fit_the_text_give_one_line(
    make: Callable[..., TextFiles], arguments: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError) as caught:
        make(**arguments).setup("fit")
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_smaller_than_wanted_is_taken_whole_with_one_note(
    make: Callable[..., TextFiles], capsys: pytest.CaptureFixture[str]
) -> None:
    data = make(num_train=10**6, num_val=10**5, num_test=2)
    data.setup("fit")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    train, val = len(data.train_sampler()), len(data.rows("val"))
    assert notes == [
        f"note: the text has fewer windows of 64 tokens than wanted: num_train {train} instead of 1000000, "
        f"num_val {val} instead of 100000"
    ]
    tokens = {split: len(text.tokens) for split, text in data.texts().items()}
    assert val == tokens["val"] // 64 and train in (tokens["train"] // 64, tokens["train"] // 64 - 1)
    assert len(data.rows("test")) == 2 and sum(len(batch.tokens) for batch in data.train_dataloader()) == train
    assert data.arguments()["num_train"] == 10**6, "what was asked for is the record"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "told"),
    [("nowhere.txt", "nowhere.txt does not exist"), ("empty.txt", "is empty"), ("latin.txt", "byte 3 is not UTF-8")],
)
def test_the_command_line_refuses_text_that_is_none(tmp_path: Path, name: str, told: str) -> None:
    for path, content in (("empty.txt", b""), ("latin.txt", b"caf\xe9")):
        (tmp_path / path).write_bytes(content)
    given = ["--data", "TextFiles", "--data.vocab_size", "256", "--data.paths", str(tmp_path / name)]
    refused("fit", *TRAINER, *given, told=told)
