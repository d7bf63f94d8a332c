"""Laws of the data: splits that share nothing, padding that teaches nothing, faults that are told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_specdec.data import IGNORED, ArithmeticProgressions, EpochSampler, SequenceData, SequenceFile

ROWS = [[start + i for i in range(4 + start % 3)] for start in range(30)]


def write(path: Path, rows: list[list[int]]) -> Path:
    if path.suffix == ".csv":
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        np.save(path, np.array(rows))
    return path


def everything(data: SequenceData) -> list[list[int]]:
    return [sequence for split in data.splits() for sequence in split]


def test_progressions_without_wrapping_are_115() -> None:
    data = ArithmeticProgressions()
    sequences = data.sequences()
    assert len(sequences) == 115 == 49 * 5 - 9 * (1 + 2 + 3 + 4 + 5) + 5
    assert all(0 <= token < 50 for sequence in sequences for token in sequence)
    assert all(len({b - a for a, b in zip(s, s[1:], strict=False)}) == 1 for s in sequences)
    assert [len(split) for split in data.splits()] == [100, 12, 3]


def test_progressions_with_wrapping_are_vocabulary_times_steps() -> None:
    data = ArithmeticProgressions(modulo=True, num_train=200)
    assert len({tuple(sequence) for sequence in data.sequences()}) == 50 * 5
    assert [45, 0, 5] in [sequence[:3] for sequence in data.sequences()]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_no_sequence_is_in_two_splits(tmp_path: Path, suffix: str) -> None:
    file = SequenceFile(str(write(tmp_path / f"rows{suffix}", ROWS * 2)), 50)
    for data in (ArithmeticProgressions(), ArithmeticProgressions(modulo=True, seed=5), file):
        sequences = everything(data)
        assert len({tuple(sequence) for sequence in sequences}) == len(sequences)
    assert sorted(everything(file)) == sorted(ROWS)


def test_the_seed_alone_decides_the_split_and_no_global_seed_is_touched() -> None:
    before = torch.get_rng_state()
    first, again, other = (ArithmeticProgressions(seed=seed).splits() for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), before)


def test_all_kinds_of_file_hold_the_same_sequences(tmp_path: Path) -> None:
    rows = [[start, start + 1, start + 2] for start in range(20)]
    read = [SequenceFile(str(write(tmp_path / f"rows{suffix}", rows)), 30) for suffix in (".csv", ".jsonl", ".npy")]
    assert read[0].sequences() == read[1].sequences() == read[2].sequences() == rows


def test_a_spreadsheets_empty_cells_and_blank_lines_are_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\ufeff1, 2,3,,\n\n4,5,,,\n")
    assert SequenceFile(str(path), 10).sequences() == [[1, 2, 3], [4, 5]]


def test_too_few_sequences_say_how_many_there_are_and_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"115 distinct sequences.*needs 135 \(120 train \+ 12 val \+ 3 test\).*modulo"
    ):
        ArithmeticProgressions(num_train=120).splits()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", "1,2,3\n4,50,6\n", ["line 2", "token 50 is outside", "0 to 49", "vocab_size to 51"]),
        ("a.csv", "1,2,3\n4,-1,6\n", ["line 2", "token -1 is outside", "start at 0"]),
        ("a.csv", "start,next\n1,2\n", ["line 1", "'start'", "without a heading"]),
        ("a.csv", "1,2\n\n1,2.5\n", ["line 3", "'2.5'", "integers separated by commas"]),
        ("a.csv", "1,,2\n", ["line 1", "''", "integers separated by commas"]),
        ("a.csv", "1," + "9" * 30 + "\n", ["line 1", "999", "integers separated by commas"]),
        ("a.csv", "1,2\n7\n", ["line 2", "single token", "at least two tokens"]),
        ("a.csv", "", ["is empty", "one sequence of integers on each line"]),
        ("a.csv", "1,2\n3,4\n", ["holds 2 distinct sequences", "at least 16", "add sequences"]),
        ("a.jsonl", "[1, 2]\n[1, true]\n", ["line 2", "True", "JSON list"]),
        ("a.jsonl", "[1, 2]\n[1, 2.0]\n", ["line 2", "2.0", "JSON list"]),
        ("a.jsonl", "[1, 2]\n{}\n", ["line 2", "'{}'", "JSON list"]),
        ("a.jsonl", "[1, 2\n", ["line 1", "JSON list"]),
        ("a.jsonl", "[]\n", ["line 1", "at least two tokens"]),
        ("a.npy", "no array", ["not a readable .npy file", "numpy.save"]),
        ("a.npy", "", ["is empty"]),
        ("a.txt", "1 2 3\n", ["unknown extension '.txt'", ".csv"]),
    ],
)
def test_a_faulty_file_gives_one_line_with_file_line_and_remedy(
    tmp_path: Path, name: str, content: str, told: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        SequenceFile(str(path), 50).setup("fit")
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in [str(path), *told]), message


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((20, 3)), "dimensions of float64"),
        (np.arange(20), "1 dimensions"),
        (np.array([[1], [2]], dtype=object), "not a readable .npy file"),
        (np.full((20, 3), 77), "line 1: token 77"),
    ],
)
def test_a_faulty_array_gives_one_line(tmp_path: Path, array: np.ndarray, told: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=told) as caught:
        SequenceFile(str(path), 50).setup("fit")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.csv does not exist: check"):
        SequenceFile(str(tmp_path / "nowhere.csv"), 50).setup("fit")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="folder.csv is not a file"):
        SequenceFile(str(tmp_path / "folder.csv"), 50).setup("fit")
    (tmp_path / "latin.csv").write_bytes(b"1,2\n\xe9,3\n")
    with pytest.raises(ValueError, match="byte 4 is not UTF-8"):
        SequenceFile(str(tmp_path / "latin.csv"), 50).setup("fit")


@pytest.mark.parametrize(
    ("argument", "value"), [("batch_size", 0), ("num_val", 0), ("seed", -1), ("max_step", 50), ("length", 1)]
)
def test_arguments_out_of_range_are_named(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be .*, got {value}"):
        ArithmeticProgressions(**{argument: value})  # type: ignore[arg-type]


def test_labels_leave_out_the_padding() -> None:
    batch = ArithmeticProgressions().collate([(7, [1, 2, 3, 4]), (9, [5, 6])])
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.next_tokens().tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]
    assert batch.indices.tolist() == [7, 9]
    assert batch.prompts() == [[1, 2, 3], [5]]


def test_prompts_are_the_first_tokens_of_the_test_sequences() -> None:
    data = ArithmeticProgressions(prompt_length=4)
    assert data.prompts() == [sequence[:4] for sequence in data.splits().test]
    batches = list(data.predict_dataloader())
    assert [prompt for batch in batches for prompt in batch.prompts()] == data.prompts()


def test_every_epoch_has_an_order_of_its_own_that_can_be_had_again() -> None:
    sampler = EpochSampler(20, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20)) and len(sampler) == 20


def test_arguments_rebuild_the_data() -> None:
    data = ArithmeticProgressions(vocab_size=40, length=8, seed=2, num_train=50)
    assert ArithmeticProgressions(**data.arguments()).splits() == data.splits()  # type: ignore[arg-type]
