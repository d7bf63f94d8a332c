"""Laws of generated text as training data: rows are as written, and no prompt is in two splits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated import PROMPTS, contents, corpus, generate, prompt_file, target

from lightning_specdec.data import GeneratedText, PromptFiles, TokenData
from lightning_specdec.data.base import SPLITS
from lightning_specdec.data.corpus import (
    open_corpus,
    read_manifest,
    shipped_corpora,
    write_manifest,
)

__all__ = ["corpus", "target"]
SMALL: dict[str, Any] = {"num_val": 2, "num_test": 2, "batch_size": 4}
VOCABULARY = 320


def stored(*corpora: Path) -> list[tuple[list[int], int]]:
    """Every row of some directories, with its prompt's length."""
    rows = []
    for directory in corpora:
        _, shards = open_corpus(directory)
        for shard in shards:
            for number, prompt_length in enumerate(shard.prompt_lengths.tolist()):
                rows.append((shard.row(number).tolist(), prompt_length))
    return rows


def loaded(data: TokenData) -> dict[str, list[tuple[list[int], int]]]:
    """Every row of every split, with its prompt's length, as the loaders return them."""
    loaders = {
        "train": data.train_dataloader(),
        "val": data.val_dataloader(),
        "test": data.test_dataloader(),
    }
    rows: dict[str, list[tuple[list[int], int]]] = {split: [] for split in loaders}
    for split, loader in loaders.items():
        for batch in loader:
            for tokens, length, prompt_length in zip(
                batch.tokens.tolist(),
                batch.lengths.tolist(),
                batch.prompt_lengths.tolist(),
                strict=True,
            ):
                rows[split].append((tokens[:length], prompt_length))
    return rows


def test_the_splits_have_every_row_once_and_share_no_prompt(
    target: str,
    corpus: Path,
    tmp_path: Path,
) -> None:
    again = generate(
        target,
        tmp_path / "hot",
        PromptFiles(prompt_file(tmp_path, PROMPTS[2:])),
        temperatures=[2.0],
    )
    data = GeneratedText([str(corpus), str(again)], VOCABULARY, **SMALL)
    splits = loaded(data)
    all_rows = [*splits["train"], *splits["val"], *splits["test"]]
    assert sorted(all_rows) == sorted(stored(corpus, again))
    assert len(all_rows) == 3 * len(PROMPTS) - 2

    prompts = {}
    for split, rows in splits.items():
        prompts[split] = {tuple(tokens[:prompt_length]) for tokens, prompt_length in rows}
    assert [len(prompts[split]) for split in SPLITS] == [len(PROMPTS) - 4, 2, 2]
    assert len(set().union(*prompts.values())) == len(PROMPTS), "no prompt is in two splits"
    assert len(splits["val"]) > 2, "a prompt has several rows"


def test_rows_are_cut_to_max_length_and_prompts_without_room_left_out(corpus: Path) -> None:
    stored_rows = stored(corpus)
    prompt_lengths = sorted(prompt_length for _, prompt_length in stored_rows)
    max_length = prompt_lengths[len(prompt_lengths) // 2]
    expected = []
    for tokens, prompt_length in stored_rows:
        if prompt_length < max_length:
            expected.append((tokens[:max_length], prompt_length))
    assert len(expected) < len(stored_rows)

    sizes: dict[str, Any] = {"num_val": 1, "num_test": 1, "batch_size": 4}
    data = GeneratedText(str(corpus), VOCABULARY, max_length=max_length, **sizes)
    splits = loaded(data)
    assert sorted([*splits["train"], *splits["val"], *splits["test"]]) == sorted(expected)
    assert data.max_length == max_length


def changed(**values: Any) -> Callable[[Path], object]:
    """Writes other values into the manifest."""
    return lambda path: write_manifest(path, read_manifest(path) | values)


SHARD = "shard-00001.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "torn": (
        lambda path: (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-9]),
        {},
        f"{SHARD} is damaged",
    ),
    "missing": (lambda path: (path / SHARD).unlink(), {}, f"{SHARD} is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), {}, "holds no generated text"),
    "other format": (changed(format=2), {}, "is not a manifest of format 1"),
    "tokens outside": (
        changed(vocab_size=30),
        {"vocab_size": 30},
        "holds rows that cannot have been generated",
    ),
    "other vocabulary": (lambda path: None, {"vocab_size": 400}, "with 320 tokens: give"),
    "too few": (lambda path: None, {"num_val": 20}, "11 distinct sequences, and the splits need"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_corpus_is_refused_by_one_line_that_names_it(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "text")
    spoil, arguments, message = FAULTS[name]
    spoil(tmp_path / "text")
    before = contents(tmp_path / "text")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        GeneratedText("text", **{"vocab_size": VOCABULARY, **arguments}).setup("fit")
    assert "\n" not in str(caught.value) and contents(tmp_path / "text") == before


def test_the_text_that_ships_is_whole_and_of_one_target() -> None:
    corpora = [open_corpus(Path(path)) for path in shipped_corpora()]
    assert len(corpora) == 5
    assert len({manifest["target"]["sha256"] for manifest, _ in corpora}) == 1
    for manifest, shards in corpora:
        num_temperatures = len(manifest["arguments"]["temperatures"])
        num_rows = sum(len(shard) for shard in shards)
        assert num_rows == manifest["num_prompts"] * num_temperatures
    data = GeneratedText(shipped_corpora(), vocab_size=49152, max_length=512, num_val=48)
    data.setup("fit")
    assert len(next(iter(data.train_dataloader()))[0])
