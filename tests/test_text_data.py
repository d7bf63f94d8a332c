"""Laws of files of text: whole texts are held out, and windows lie side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import torch
from training_fixtures import verb

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.data import TextFiles
from lightning_specdec.data.text import find_texts
from lightning_specdec.text.tokenizer import named_tokenizer

SPLITS = ("train", "val", "test")
NUM_FILES = 40


def line(file: int, number: int) -> str:
    return f"file {file} line {number}: naïve café 🙂 {number * number}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty files of hundreds or thousands of bytes, in two directories."""
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
    """Data of that corpus, of a size that fits it."""

    def make_data(**arguments: object) -> TextFiles:
        defaults = {
            "paths": str(corpus),
            "cache_dir": str(tmp_path / "cache"),
            "length": 64,
            "num_val": 6,
            "num_test": 4,
            "prompt_length": 16,
            "held_out": 0.1,
            "batch_size": 8,
        }
        return TextFiles(**{**defaults, **arguments})  # type: ignore[arg-type]

    return make_data


def text_of(data: TextFiles, split: str) -> str:
    return bytes(data.texts[split].tokens.tolist()).decode()


def files_in(text: str) -> set[str]:
    return {part.split()[1] for part in text.splitlines()}


def test_tokens_stay_on_the_disk_and_are_made_once(
    make: Callable[..., TextFiles], tmp_path: Path
) -> None:
    tokens = make().texts["train"].tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8 and not tokens.flags.writeable

    def modification_times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}

    times = modification_times()
    assert len(times) == 3
    make().setup("fit")
    assert modification_times() == times


def test_a_damaged_token_file_is_made_again(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    whole = {split: text_of(make(), split) for split in SPLITS}
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert {split: text_of(make(), split) for split in SPLITS} == whole


def test_a_resumed_run_reads_the_windows_that_an_uninterrupted_one_would(
    make: Callable[..., TextFiles],
) -> None:
    def read_epochs(data: TextFiles, numbers: list[int]) -> list[list[list[int]]]:
        loader = data.train_dataloader()
        epochs = []
        for number in numbers:
            loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
            windows: list[list[int]] = []
            for batch in loader:
                windows += batch.tokens.tolist()
            epochs.append(windows)
        return epochs

    epochs = read_epochs(make(num_train=20), [0, 1, 2])
    assert read_epochs(make(num_train=20), [2]) == epochs[2:]
    assert epochs[0] != epochs[1]
    assert [len(windows) for windows in epochs] == [20, 20, 20]
    assert read_epochs(make(num_train=20, seed=9), [0]) != epochs[:1]


def test_windows_are_the_text_side_by_side(make: Callable[..., TextFiles]) -> None:
    data = make()
    tokens = data.texts["train"].tokens
    batch = data.first_rows("train")
    num_windows = len(tokens) // 64
    assert batch.tokens.dtype == torch.int64
    assert batch.lengths.tolist() == [64] * num_windows
    assert batch.tokens.flatten().tolist() == tokens[: num_windows * 64].tolist()
    assert data.max_length == 64
    assert {len(prompt) for prompt in data.prompts()} == {16}

    for split, num_windows in (("val", 6), ("test", 4)):
        tokens = data.texts[split].tokens
        distance = len(tokens) // num_windows
        starts = [index * distance for index in range(num_windows)]
        windows = [tokens[start : start + 64].tolist() for start in starts]
        assert data.first_rows(split).tokens.tolist() == windows


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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    corpus: Path,
) -> None:
    arguments = {
        "vocab_size": 256,
        "length": 64,
        "num_train": 8,
        "num_val": 4,
        "num_test": 2,
        "held_out": 0.1,
        "paths": corpus,
        "cache_dir": tmp_path / "cache",
    }
    options = []
    for name, value in arguments.items():
        options += [f"--data.{name}", str(value)]
    verb(monkeypatch, tmp_path, "fit", "--data", "TextFiles", *options, "--trainer.max_epochs", "1")
    # The run is named after its data.
    (run,) = (tmp_path / "checkpoints").iterdir()
    decoder = SpeculativeDecoder.from_checkpoint(run)
    row = decoder.decode("naïve", max_new_tokens=5).rows[0]
    assert row.text == bytes(row.tokens).decode("utf-8", "replace") and len(row.tokens) == 5
    assert len(decoder.prompts) == 2


def test_whole_files_are_held_out_and_none_is_in_two_splits(
    make: Callable[..., TextFiles], corpus: Path
) -> None:
    data = make()
    names_by_split = {split: files_in(text_of(data, split)) for split in SPLITS}
    assert sum(len(names) for names in names_by_split.values()) == NUM_FILES
    assert len(set.union(*names_by_split.values())) == NUM_FILES

    texts = {path.stem: path.read_text("utf-8") for path in corpus.rglob("*.txt")}
    total_bytes = sum(len(text.encode()) for text in texts.values())
    for split, names in names_by_split.items():
        num_bytes = sum(len(texts[name].encode()) for name in names)
        assert num_bytes == len(data.texts[split].tokens)
        if split != "train":
            assert 0.05 * total_bytes < num_bytes <= 0.1 * total_bytes
        assert all(texts[name] in text_of(data, split) for name in names)


def test_names_alone_decide_the_split(
    make: Callable[..., TextFiles],
    corpus: Path,
    tmp_path: Path,
) -> None:
    moved = corpus.rename(tmp_path / "elsewhere")
    by_directory = make(paths=str(moved), seed=1)
    by_pattern = make(paths=[str(moved / "**" / "*.txt")], seed=2)
    for split in SPLITS:
        assert text_of(by_directory, split) == text_of(by_pattern, split)


def test_a_byte_order_mark_is_no_text(make: Callable[..., TextFiles], corpus: Path) -> None:
    plain = {split: text_of(make(), split) for split in SPLITS}
    for path in corpus.rglob("*.txt"):
        path.write_text(path.read_text("utf-8"), encoding="utf-8-sig")
    assert {split: text_of(make(), split) for split in SPLITS} == plain


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": f"question {number} café"},
        {"role": "assistant", "content": f"answer {number}"},
    ]
    for number in range(200)
]


def sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    speakers = {"user": "human", "assistant": "gpt"}
    return [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in messages]


@pytest.mark.parametrize("name", ["openai.jsonl", "sharegpt.jsonl", "list.json"])
def test_conversations_are_written_by_the_chat_template(
    make: Callable[..., TextFiles],
    tmp_path: Path,
    name: str,
) -> None:
    chat_tokenizer = tiny_tokenizers.byte_level(vocab_size=400, chat_template=CHAT_TEMPLATE)
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / name
    if name == "list.json":
        path.write_text(json.dumps([{"messages": chat} for chat in CHATS]))
    elif name == "openai.jsonl":
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
    else:
        rows = [{"id": "a", "conversations": sharegpt(chat)} for chat in CHATS]
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8-sig")

    data = make(paths=str(path), tokenizer=str(tmp_path / "tokenizer"), vocab_size=400, length=16)
    tokenizer = named_tokenizer(str(tmp_path / "tokenizer"))
    all_text = "".join(tokenizer.decode(data.texts[split].tokens.tolist()) for split in SPLITS)
    expected = [str(chat_tokenizer.apply_chat_template(chat, tokenize=False)) for chat in CHATS]
    assert sorted(all_text.splitlines()) == sorted("".join(expected).splitlines())
    assert 0 < data.bytes_per_token("train") < 20

    with pytest.raises(ValueError, match=f"{name} has conversations, which need a chat template"):
        make(paths=str(path), length=16).setup("fit")


def test_a_json_file_without_texts_is_a_text_itself(tmp_path: Path) -> None:
    contents = {
        "list.json": '[{"a": 1}, {"b": 2}]',
        "lines.json": '{"a": 1}\n{"b": 2}\n',
        "TEXTS.JSONL": '{"text": "abc"}',
        "second.jsonl": '{"text": "", "content": "defg"}\n{"text": ""}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    sizes = {text.path.name: text.num_bytes for text in find_texts([str(tmp_path)])}
    assert sizes == {
        "list.json": len(contents["list.json"]),
        "lines.json": len(contents["lines.json"]),
        "TEXTS.JSONL": len("abc"),
        "second.jsonl": len("defg"),
    }


def test_half_a_surrogate_in_a_conversation_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "q\ud800"}, {"role": "user", "content": "r"}]}
    path.write_text(json.dumps(row))
    [text] = find_texts([str(path)])
    assert text.num_bytes == len("q?r")


def test_rows_of_json_are_separate_texts(make: Callable[..., TextFiles], tmp_path: Path) -> None:
    lines = [f"row {number}: naïve café\n" for number in range(200)]
    rows = [{"text": line, "id": number} for number, line in enumerate(lines)]
    rows += [{"content": "the source of a file\n"}, {"text": lines[0]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    data = make(paths=str(path), length=16)
    texts = [text_of(data, split).splitlines(keepends=True) for split in SPLITS]
    assert sorted(sum(texts, [])) == sorted([*lines, "the source of a file\n"])
    num_bytes = len("".join(sum(texts, [])).encode())
    assert data.bytes_per_token(*SPLITS) == 1 and len(text_of(data, "val")) > 0.05 * num_bytes


def test_json_that_is_no_data_set_stays_text(
    make: Callable[..., TextFiles],
    corpus: Path,
    tmp_path: Path,
) -> None:
    (corpus / "settings.json").write_text('{\n "name": "a"\n}\n')
    data = make()
    assert any('"name": "a"' in text_of(data, split) for split in SPLITS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": "nowhere"}, "nowhere does not exist"),
        ({"paths": "latin.txt"}, "latin.txt is not text in UTF-8"),
        ({"paths": ["corpus/odd/1.txt", "corpus/odd/3.txt"]}, "no whole file of the 2 fits"),
        ({"paths": "utf_16.txt"}, "utf_16.txt is text in UTF-16: save it as UTF-8"),
        ({"paths": "other.jsonl"}, "other.jsonl, line 1: a row needs text, content, messages"),
        ({"paths": "other.jsonl"}, "this one has instruction, output"),
        ({"paths": "other.json"}, "other.json, row 1: a row needs text, content, messages"),
        ({"paths": "torn.jsonl"}, "torn.jsonl, line 2: this is not JSON"),
        ({"length": 100_000}, "train, val and test need a window of 100000 tokens each"),
        ({"held_out": 0.5}, "held_out must be in (0, 0.4], got 0.5"),
    ],
)
def test_what_cannot_be_read_gives_one_line(
    make: Callable[..., TextFiles],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "utf_16.txt").write_text("the oak", encoding="utf-16")
    other = {"instruction": "a", "output": "b"}
    (tmp_path / "other.jsonl").write_text(json.dumps(other) + "\n" + json.dumps(other))
    (tmp_path / "other.json").write_text(json.dumps([other, other], indent=1))
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text":')
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make(**arguments).setup("fit")
    assert message in str(caught.value) and "\n" not in str(caught.value)
