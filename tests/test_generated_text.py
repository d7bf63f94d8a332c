"""Laws of generated text as training data: rows as they were written, no prompt in two splits, faults named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated import PROMPTS, contents, corpus, generate, prompt_file, target

from lightning_specdec.data import GeneratedText, PromptFiles, TokenData
from lightning_specdec.data.base import SPLITS
from lightning_specdec.data.corpus import open_corpus, read_manifest, write_manifest

__all__ = ["corpus", "target"]
SMALL: dict[str, Any] = {"num_val": 2, "num_test": 2, "batch_size": 4}
VOCABULARY = 320
SHIPPED = sorted(
    (Path(__file__).parent.parent / "benchmarks" / "smollm2_text").glob("*/manifest.json")
)


def stored(*corpora: Path) -> list[tuple[list[int], int]]:
    """Every row of some directories, with its prompt's length."""
    shards = [shard for corpus in corpora for shard in open_corpus(corpus)[1]]
    return [
        (shard.row(number).tolist(), length)
        for shard in shards
        for number, length in enumerate(shard.prompt_lengths.tolist())
    ]


def dealt(data: TokenData) -> dict[str, list[tuple[list[int], int]]]:
    """Every row of every split, with its prompt's length, through the loaders."""
    loaders = {
        "train": data.train_dataloader(),
        "val": data.val_dataloader(),
        "test": data.test_dataloader(),
    }
    return {
        split: [
            (row[:length], prompt_length)
            for batch in loader
            for row, length, prompt_length in zip(
                batch.tokens.tolist(),
                batch.lengths.tolist(),
                batch.prompt_lengths.tolist(),
                strict=True,
            )
        ]
        for split, loader in loaders.items()
    }


def test_the_splits_have_every_row_once_and_share_no_prompt(
    target: str, corpus: Path, tmp_path: Path
) -> None:
    again = generate(
        target,
        tmp_path / "hot",
        PromptFiles(prompt_file(tmp_path, PROMPTS[2:])),
        temperatures=[2.0],
    )
    data = GeneratedText([str(corpus), str(again)], VOCABULARY, **SMALL)
    splits = dealt(data)
    everything = [row for rows in splits.values() for row in rows]
    assert (
        sorted(everything) == sorted(stored(corpus, again))
        and len(everything) == 3 * len(PROMPTS) - 2
    )
    prompts = {
        split: {tuple(row[:length]) for row, length in rows} for split, rows in splits.items()
    }
    assert [len(prompts[split]) for split in SPLITS] == [len(PROMPTS) - 4, 2, 2]
    assert len(set().union(*prompts.values())) == len(PROMPTS), "no prompt is in two splits"
    assert len(splits["val"]) > 2, "a case that tells something: several rows of a prompt"


def test_rows_are_cut_to_max_length_and_prompts_without_room_left_out(corpus: Path) -> None:
    whole = stored(corpus)
    length = sorted(length for _, length in whole)[len(whole) // 2]
    data = GeneratedText(
        str(corpus), VOCABULARY, max_length=length, num_val=1, num_test=1, batch_size=4
    )
    kept = [row for rows in dealt(data).values() for row in rows]
    assert sorted(kept) == sorted((row[:length], size) for row, size in whole if size < length)
    assert data.max_length == length and len(whole) > len(kept)


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
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "text")
    spoil, arguments, told = FAULTS[name]
    spoil(tmp_path / "text")
    before = contents(tmp_path / "text")
    with pytest.raises((ValueError, FileNotFoundError), match=told) as caught:
        GeneratedText("text", **{"vocab_size": VOCABULARY, **arguments}).setup("fit")
    assert "\n" not in str(caught.value) and contents(tmp_path / "text") == before


def test_the_text_that_ships_is_whole_and_of_one_target() -> None:
    found = [open_corpus(path.parent) for path in SHIPPED]
    assert len({manifest["target"]["sha256"] for manifest, _ in found}) == 1
    for manifest, shards in found:
        assert sum(map(len, shards)) == manifest["num_prompts"] * len(
            manifest["arguments"]["temperatures"]
        )
    data = GeneratedText(
        [str(path.parent) for path in SHIPPED], vocab_size=49152, max_length=512, num_val=48
    )
    data.setup("fit")
    assert len(next(iter(data.train_dataloader()))[0])
