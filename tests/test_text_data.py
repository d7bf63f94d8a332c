"""Laws of files of text: whole files are held out, tokens are made once, windows are where they should be."""

from __future__ import annotations

import math
import multiprocessing
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import torch
from text_corpus import NUM_FILES, corpus, files_in, make, text_of
from training_fixtures import verb

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.data import TextFiles
from lightning_specdec.data.text import WindowSampler, find_texts, grid_size, hold_out
from lightning_specdec.text.tokenizer import named_tokenizer

__all__ = ["corpus", "make"]


def test_tokens_stay_on_the_disk_and_are_made_once(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    first = make()
    tokens = first.texts["train"].tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8 and not tokens.flags.writeable
    assert isinstance(first.rows("val")[0][1], np.memmap), "windows are views"
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(kept) == 3
    make().setup("fit")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == kept


def test_a_change_of_one_byte_makes_new_tokens(make: Callable[..., TextFiles], corpus: Path) -> None:
    old = make()
    old.setup("fit")
    path = corpus / "even" / "0.txt"
    path.write_text(path.read_text("utf-8").replace("line 3", "line X"), encoding="utf-8")
    assert any("line X" in text_of(make(), split) for split in ("train", "val", "test"))
    assert not any("line X" in text_of(old, split) for split in ("train", "val", "test"))


@pytest.mark.parametrize("damage", ["cut", "grown", "emptied", "other", "wrong dtype"])
def test_a_damaged_token_file_is_made_again(make: Callable[..., TextFiles], tmp_path: Path, damage: str) -> None:
    whole = {split: text_of(make(), split) for split in ("train", "val", "test")}
    for path in (tmp_path / "cache").iterdir():
        content = path.read_bytes()
        damaged = {"cut": content[:-7], "grown": content + b"x", "emptied": b"", "other": b"\x93NUMPY\x01\x00v\x00{'de"}
        if damage == "wrong dtype":
            np.save(path, np.zeros(len(content), np.uint16))
        else:
            path.write_bytes(damaged[damage])
    assert {split: text_of(make(), split) for split in ("train", "val", "test")} == whole
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def read_all(data: TextFiles) -> tuple[list[bytes], list[list[int]], list[list[list[int]]]]:
    tokens = [text.tokens.tobytes() for text in data.texts.values()]
    return tokens, data.prompts(), [batch.tokens.tolist() for batch in data.train_dataloader()]


def test_processes_that_make_the_tokens_at_once_get_the_same(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        read = pool.map(read_all, [make() for _ in range(4)], chunksize=1)
    assert read == [read[0]] * 4 == [read_all(make())] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize(("num_tokens", "length"), [(64, 64), (100, 64), (128, 64), (1000, 64), (1000, 7)])
def test_an_epochs_windows_lie_side_by_side_within_the_text(num_tokens: int, length: int) -> None:
    size = grid_size(num_tokens, length)
    sampler = WindowSampler(num_tokens, length, size, seed=3)
    offsets = set()
    for epoch in range(200):
        sampler.set_epoch(epoch)
        starts = sorted(sampler)
        assert len(starts) == size >= 1
        assert starts[0] >= 0 and starts[-1] + length <= num_tokens
        assert {b - a for a, b in zip(starts, starts[1:], strict=False)} <= {length}
        offsets.add(starts[0])
    most = min(length, num_tokens - size * length + 1)
    assert offsets <= set(range(most)) and len(offsets) > 0.9 * most * (1 - math.exp(-200 / most))


def test_a_resumed_run_reads_the_windows_that_an_uninterrupted_one_would(make: Callable[..., TextFiles]) -> None:
    def epochs(data: TextFiles, numbers: list[int]) -> list[list[list[int]]]:
        loader, read = data.train_dataloader(), []
        for number in numbers:
            loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
            read.append([row for batch in loader for row in batch.tokens.tolist()])
        return read

    whole = epochs(make(), [0, 1, 2])
    assert epochs(make(), [2]) == whole[2:]
    assert whole[0] != whole[1] and len(whole[0]) == len(whole[1])
    assert epochs(make(seed=9), [0]) != whole[:1]


def test_rows_are_the_text_at_their_place(make: Callable[..., TextFiles]) -> None:
    data = make(num_train=20)
    text = data.texts["train"].tokens
    batches = list(data.train_dataloader())
    assert sum(len(batch.tokens) for batch in batches) == 20
    for batch in batches:
        assert batch.tokens.dtype == torch.int64 and batch.lengths.tolist() == [64] * len(batch.tokens)
        for start, row in zip(batch.indices.tolist(), batch.tokens.tolist(), strict=True):
            assert row == text[start : start + 64].tolist()
    assert data.max_length == 64


@pytest.mark.parametrize("split", ["val", "test"])
def test_held_out_windows_are_fixed_disjoint_and_begin_a_line(make: Callable[..., TextFiles], split: str) -> None:
    data = make()
    loader = {"val": data.val_dataloader, "test": data.test_dataloader}[split]
    read = [[row for batch in loader() for row in batch.tokens.tolist()] for _ in range(2)]
    assert read[0] == read[1] and len(read[0]) == {"val": 6, "test": 4}[split]
    text, position = text_of(data, split).encode(), 0
    for row in read[0]:
        position = text.index(bytes(row), position)
        assert position == 0 or text[position - 1 : position] == b"\n"
        position += 64


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 18, 19, 63, 200])
def test_a_prompt_never_ends_within_a_character(
    make: Callable[..., TextFiles], corpus: Path, prompt_length: int
) -> None:
    for path in corpus.rglob("*.txt"):
        path.write_text("x🙂é" * 400, encoding="utf-8")  # without a line's end
        path.write_text(path.read_text("utf-8") + path.stem, encoding="utf-8")
    data = make(prompt_length=prompt_length)
    for prompt in data.prompts():
        bytes(prompt).decode()  # raises within a character
        assert max(1, min(prompt_length, 63) - 3) <= len(prompt) <= min(prompt_length, 63)
    assert [prompt for batch in data.predict_dataloader() for prompt in batch.prompts()] == data.prompts()


def test_a_tokenizer_of_transformers_makes_the_tokens(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(vocab_size=400).save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer")
    data = make(tokenizer=name, vocab_size=500, length=32)
    tokens = data.texts["test"].tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert named_tokenizer(name).decode(tokens.tolist()) == text_of(make(), "test")
    assert data.bytes_per_token("test") == len(text_of(make(), "test").encode()) / len(tokens) > 1
    assert make().bytes_per_token("val") == 1
    with pytest.raises(ValueError, match=r"has \d+ tokens, more than vocab_size 256: set vocab_size to \d+ or more"):
        make(tokenizer=name).setup("fit")
    with pytest.raises(ValueError, match="there is no such directory"):
        make(tokenizer="./nowhere").setup("fit")


def test_another_tokenizer_makes_other_tokens(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    read = []
    for size in (300, 400):
        tiny_tokenizers.byte_level(vocab_size=size).save_pretrained(tmp_path / "tokenizer")
        read.append(make(tokenizer=str(tmp_path / "tokenizer"), vocab_size=500, length=32).texts["val"].tokens)
    assert len(read[0]) != len(read[1])


def test_arguments_rebuild_the_data(make: Callable[..., TextFiles]) -> None:
    data = make(seed=3)
    again = TextFiles(**data.arguments())
    assert again.prompts() == data.prompts() and again.arguments() == data.arguments()


def test_a_pair_trained_on_text_decodes_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 256, "length": 64, "num_train": 8, "num_val": 4, "num_test": 2, "held_out": 0.1}
    given = {**sizes, "paths": corpus, "cache_dir": tmp_path / "cache"}
    options = [word for key, value in given.items() for word in (f"--data.{key}", str(value))]
    verb(monkeypatch, tmp_path, "fit", "--data", "TextFiles", *options, "--trainer.max_epochs", "1")
    assert f"text: {NUM_FILES} files, " in capsys.readouterr().err
    decoder = SpeculativeDecoder.from_checkpoint(tmp_path / "checkpoints" / "rnn")
    row = decoder.decode("naïve", max_new_tokens=5).rows[0]
    assert row.text == bytes(row.tokens).decode("utf-8", "replace") and len(row.tokens) == 5
    assert [bytes(prompt)[:5] for prompt in decoder.prompts] == [b"file "] * 2


def test_whole_files_are_held_out_and_none_is_in_two_splits(make: Callable[..., TextFiles], corpus: Path) -> None:
    data = make()
    files = {split: files_in(text_of(data, split)) for split in ("train", "val", "test")}
    assert sum(map(len, files.values())) == NUM_FILES == len(set.union(*files.values()))
    texts = {path.stem: path.read_text("utf-8") for path in corpus.rglob("*.txt")}
    total = sum(len(text.encode()) for text in texts.values())
    for split, names in files.items():
        num_bytes = sum(len(texts[name].encode()) for name in names)
        assert num_bytes == len(data.texts[split].tokens)
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
        found = find_texts([str(tmp_path)])
        splits = hold_out(found, share)
        assert all(splits) and sorted(sum(splits, []), key=lambda file: file.path) == found


def test_empty_repeated_and_hidden_files_are_left_out(make: Callable[..., TextFiles], corpus: Path) -> None:
    (corpus / "empty.txt").write_text("")
    (corpus / "again.txt").write_bytes((corpus / "even" / "4.txt").read_bytes())
    (corpus / ".hidden").write_bytes(b"\xff")
    (corpus / "__pycache__").mkdir()
    (corpus / "__pycache__" / "x").write_bytes(b"\xff")
    assert len(find_texts([str(corpus)])) == NUM_FILES == len(find_texts([str(corpus), str(corpus / "even")]))


def test_the_cap_takes_files_that_fit(make: Callable[..., TextFiles]) -> None:
    data = make(max_bytes=20_000, num_val=1, num_test=1)
    num_bytes = sum(len(text.tokens) for text in data.texts.values())
    assert 18_000 < num_bytes <= 20_000
    assert sum(len(text.tokens) for text in make(max_bytes=None).texts.values()) > 40_000


def test_the_standard_library_is_there_without_its_tests(tmp_path: Path) -> None:
    data = TextFiles(max_bytes=400_000, cache_dir=str(tmp_path))
    data.setup("fit")
    assert 390_000 < sum(len(text.tokens) for text in data.texts.values()) <= 400_000
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.path.relative_to(root) for file in find_texts(None, max_bytes=10**7)]
    assert all(name.suffix == ".py" for name in names)
    assert not {part for name in names for part in name.parts} & {"test", "tests", "site-packages", "encodings"}


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ("nowhere", "nowhere does not exist"),
        ("corpus/*.md", "corpus/*.md does not exist or has no files"),
        ("bare", "bare does not exist or has no files"),
        ("hollow", "hollow: all files are empty"),
        ("latin.txt", "latin.txt is not text (byte 4 is not UTF-8)"),
        ("corpus/odd/1.txt", "1.txt is one of only 1 distinct files"),
        (["corpus/odd/1.txt", "corpus/odd/3.txt"], "is one of only 2 distinct files"),
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
        ({"length": 100_000}, "train, val and test need a window of 100000 tokens each"),
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


def test_a_text_smaller_than_wanted_is_taken_whole(make: Callable[..., TextFiles]) -> None:
    data = make(num_train=10**6, num_val=10**5, num_test=2)
    tokens = {split: len(text.tokens) for split, text in data.texts.items()}
    train, val = len(data.train_sampler()), len(data.rows("val"))
    assert val == tokens["val"] // 64 and train in (tokens["train"] // 64, tokens["train"] // 64 - 1)
    assert len(data.rows("test")) == 2 and sum(len(batch.tokens) for batch in data.train_dataloader()) == train
    assert data.arguments()["num_train"] == 10**6, "what was asked for is the record"
