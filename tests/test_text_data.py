"""Laws of files of text: whole files are held out, tokens are made once, windows are where they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import torch
from training_fixtures import verb

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.data import TextFiles
from lightning_specdec.text.tokenizer import named_tokenizer

SPLITS = ("train", "val", "test")
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
        path.write_text(
            "".join(line(file, number) for number in range(10 + file)), encoding="utf-8"
        )
    return root


@pytest.fixture
def make(corpus: Path, tmp_path: Path) -> Callable[..., TextFiles]:
    """Data of that corpus, of a size that suits it."""

    def made(**arguments: object) -> TextFiles:
        sizes = {
            "length": 64,
            "num_val": 6,
            "num_test": 4,
            "prompt_length": 16,
            "held_out": 0.1,
            "batch_size": 8,
        }
        given = {"paths": str(corpus), "cache_dir": str(tmp_path / "cache"), **sizes, **arguments}
        return TextFiles(**given)  # type: ignore[arg-type]

    return made


def text_of(data: TextFiles, split: str) -> str:
    return bytes(data.texts[split].tokens.tolist()).decode()


def files_in(text: str) -> set[str]:
    return {part.split()[1] for part in text.splitlines()}


def test_tokens_stay_on_the_disk_and_are_made_once(
    make: Callable[..., TextFiles], tmp_path: Path
) -> None:
    tokens = make().texts["train"].tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8 and not tokens.flags.writeable
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(kept) == 3
    make().setup("fit")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == kept


def test_a_damaged_token_file_is_made_again(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    whole = {split: text_of(make(), split) for split in SPLITS}
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert {split: text_of(make(), split) for split in SPLITS} == whole


def test_a_resumed_run_reads_the_windows_that_an_uninterrupted_one_would(
    make: Callable[..., TextFiles],
) -> None:
    def epochs(data: TextFiles, numbers: list[int]) -> list[list[list[int]]]:
        loader, read = data.train_dataloader(), []
        for number in numbers:
            loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
            read.append([row for batch in loader for row in batch.tokens.tolist()])
        return read

    whole = epochs(make(num_train=20), [0, 1, 2])
    assert epochs(make(num_train=20), [2]) == whole[2:]
    assert whole[0] != whole[1] and [len(each) for each in whole] == [20] * 3
    assert epochs(make(num_train=20, seed=9), [0]) != whole[:1]


def test_windows_are_the_text_side_by_side(make: Callable[..., TextFiles]) -> None:
    data = make()
    text = data.texts["train"].tokens
    batch = data.first_rows("train")
    assert batch.tokens.dtype == torch.int64 and batch.lengths.tolist() == [64] * (len(text) // 64)
    assert batch.tokens.flatten().tolist() == text[: len(batch.tokens) * 64].tolist()
    assert data.max_length == 64 and {len(prompt) for prompt in data.prompts()} == {16}
    for split, number in (("val", 6), ("test", 4)):
        rows, text = data.first_rows(split), data.texts[split].tokens
        starts = [number * (len(text) // len(rows.tokens)) for number in range(len(rows.tokens))]
        assert len(starts) == number
        assert rows.tokens.tolist() == [text[start : start + 64].tolist() for start in starts]


def test_a_tokenizer_of_transformers_makes_the_tokens(
    make: Callable[..., TextFiles], tmp_path: Path
) -> None:
    tiny_tokenizers.byte_level(vocab_size=400).save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer")
    data = make(tokenizer=name, vocab_size=500, length=32)
    tokens = data.texts["test"].tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert named_tokenizer(name).decode(tokens.tolist()) == text_of(make(), "test")
    assert data.bytes_per_token("test") == len(text_of(make(), "test").encode()) / len(tokens) > 1
    with pytest.raises(
        ValueError, match=r"has \d+ tokens, more than vocab_size 256: set vocab_size to \d+ or more"
    ):
        make(tokenizer=name).setup("fit")


def test_a_pair_trained_on_text_decodes_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path
) -> None:
    sizes = {
        "vocab_size": 256,
        "length": 64,
        "num_train": 8,
        "num_val": 4,
        "num_test": 2,
        "held_out": 0.1,
    }
    given = {**sizes, "paths": corpus, "cache_dir": tmp_path / "cache"}
    options = [word for key, value in given.items() for word in (f"--data.{key}", str(value))]
    verb(monkeypatch, tmp_path, "fit", "--data", "TextFiles", *options, "--trainer.max_epochs", "1")
    decoder = SpeculativeDecoder.from_checkpoint(tmp_path / "checkpoints" / "rnn")
    row = decoder.decode("naïve", max_new_tokens=5).rows[0]
    assert row.text == bytes(row.tokens).decode("utf-8", "replace") and len(row.tokens) == 5
    assert len(decoder.prompts) == 2


def test_whole_files_are_held_out_and_none_is_in_two_splits(
    make: Callable[..., TextFiles], corpus: Path
) -> None:
    data = make()
    files = {split: files_in(text_of(data, split)) for split in SPLITS}
    assert sum(map(len, files.values())) == NUM_FILES == len(set.union(*files.values()))
    texts = {path.stem: path.read_text("utf-8") for path in corpus.rglob("*.txt")}
    total = sum(len(text.encode()) for text in texts.values())
    for split, names in files.items():
        num_bytes = sum(len(texts[name].encode()) for name in names)
        assert num_bytes == len(data.texts[split].tokens)
        assert split == "train" or 0.05 * total < num_bytes <= 0.1 * total
        assert all(texts[name] in text_of(data, split) for name in names)


def test_names_alone_decide_the_split(
    make: Callable[..., TextFiles], corpus: Path, tmp_path: Path
) -> None:
    moved = corpus.rename(tmp_path / "elsewhere")
    before, after = (
        make(paths=str(moved), seed=1),
        make(paths=[str(moved / "**" / "*.txt")], seed=2),
    )
    assert [text_of(before, split) for split in SPLITS] == [
        text_of(after, split) for split in SPLITS
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"paths": "nowhere"}, "nowhere does not exist"),
        ({"paths": "latin.txt"}, "latin.txt is not text in UTF-8"),
        ({"paths": ["corpus/odd/1.txt", "corpus/odd/3.txt"]}, "no whole file of the 2 fits"),
        ({"length": 100_000}, "train, val and test need a window of 100000 tokens each"),
        ({"held_out": 0.5}, "held_out must be in (0, 0.4], got 0.5"),
    ],
)
def test_what_cannot_be_read_gives_one_line(
    make: Callable[..., TextFiles],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, object],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make(**arguments).setup("fit")
    assert told in str(caught.value) and "\n" not in str(caught.value)
