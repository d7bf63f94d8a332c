"""Laws of datasets: saved ones, parquet files and the Hub's are read like JSON rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from lightning_specdec.data.prompt_sources import PromptFiles
from lightning_specdec.data.text import find_texts
from lightning_specdec.text import datasets as dataset_rows
from lightning_specdec.text.datasets import DatasetSource, dataset_source, read_dataset
from lightning_specdec.text.prompts import read_prompts
from lightning_specdec.text.tokenizer import TextTokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = ["the cat sat on the mat", "where the dog sat", "naïve cafés"]
CHATS = [
    [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
    for text in TEXTS
]


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="the extra datasets is not installed")


@pytest.fixture
def saved(datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one dataset in each form."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "chat": CHATS, "number": [1, 2, 3]})
    rows.save_to_disk("rows")
    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk("splits")
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk("unknown_splits")
    rows.to_parquet("rows.parquet")
    return tmp_path


@pytest.mark.parametrize("source", ["rows", "splits", "rows.parquet", "splits/train"])
def test_a_dataset_is_text_to_train_on(source: str, saved: Path) -> None:
    tokenizer = TextTokenizer(tiny_tokenizers.byte_level(chat_template=TEMPLATE))
    for path in (source, f"{source}#text"):
        texts = [tokenizer.decode(text.encode(tokenizer)) for text in find_texts([path])]
        assert texts == TEXTS

    chats = [tokenizer.decode(text.encode(tokenizer)) for text in find_texts([f"{source}#chat"])]
    assert chats == [f"<user>{text}<assistant>{text[::-1]}" for text in TEXTS]

    Path("more.txt").write_text("a file beside it")
    assert len(find_texts([source, "more.txt"])) == 4


@pytest.mark.parametrize("source", ["rows", "splits", "rows.parquet"])
def test_a_dataset_has_prompts(source: str, saved: Path) -> None:
    tokenizer = TextTokenizer(tiny_tokenizers.byte_level(chat_template=TEMPLATE))
    expected = [f"<user>{text}<assistant>" for text in TEXTS]
    for column in ("text", "chat"):
        for as_typed in (False, True):
            prompts = read_prompts(Path(f"{source}#{column}"), as_typed=as_typed)
            tokens = [prompt.encoded(tokenizer).tokens for prompt in prompts]
            assert [tokenizer.decode(row) for row in tokens] == expected
            assert len({prompt.id for prompt in prompts}) == 3
        tokens_of_files = PromptFiles(f"{source}#{column}").prompts(tokenizer)
        assert [tokenizer.decode(row) for row in tokens_of_files] == expected


def test_a_dataset_of_the_hub_is_read_by_its_name(
    datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Any:
        asked.append((names, options))
        return datasets.Dataset.from_dict({"question": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert dataset_source("lab/questions#question") == DatasetSource("lab/questions", "question")
    prompts = read_prompts(Path("lab/questions#question"))
    assert [prompt.text for prompt in prompts] == TEXTS
    assert asked == [(("lab/questions",), {"split": "train"})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rows#words", "no column 'words': choose from text, chat, number"),
        ("unknown_splits", "the splits a, b and no train"),
        ("broken.parquet", "the dataset broken.parquet cannot be read"),
        ("lab/missing#text", "the dataset lab/missing cannot be read"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_one_line(
    source: str,
    message: str,
    saved: Path,
    datasets: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("broken.parquet").write_bytes(b"PAR1")
    if source.startswith("lab/"):
        # Without a network, the package would try for a minute.
        def refuse(*names: str, **options: Any) -> None:
            raise datasets.exceptions.DatasetNotFoundError(f"{names[0]} is not on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", refuse)
    for read in (lambda: find_texts([source]), lambda: read_prompts(Path(source))):
        with pytest.raises(ValueError, match=message) as error:
            read()
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_files_and_directories_of_other_kinds_are_no_datasets(tmp_path: Path) -> None:
    (tmp_path / "a#b.txt").write_text("text")
    for source in (str(tmp_path), str(tmp_path / "a#b.txt"), "-", "nowhere", "src/**/*.py"):
        assert dataset_source(source) is None


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dataset_rows, "find_spec", lambda name: None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="needs datasets: .* -m pip install datasets"):
        read_dataset(DatasetSource(str(tmp_path / "rows.parquet"), None))
