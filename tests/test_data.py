"""Laws of integer sequences: splits that share nothing, padding that teaches nothing, faults in one line."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_specdec.data import (
    IGNORED,
    ArithmeticProgressions,
    Batch,
    EpochSampler,
    QuadraticProgressions,
    SequenceData,
    SequenceFile,
)
from lightning_specdec.data.generated_text import LikeLengths

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
    sequences = list(data.sequences())
    assert len(sequences) == 115 == 49 * 5 - 9 * (1 + 2 + 3 + 4 + 5) + 5
    assert all(0 <= token < 50 for sequence in sequences for token in sequence)
    assert all(len({b - a for a, b in zip(s, s[1:], strict=False)}) == 1 for s in sequences)
    assert [len(split) for split in data.splits()] == [100, 12, 3]


def test_progressions_with_wrapping_are_vocabulary_times_steps() -> None:
    data = ArithmeticProgressions(modulo=True, num_train=200)
    sequences = list(data.sequences())
    assert len({tuple(sequence) for sequence in sequences}) == 50 * 5
    assert [45, 0, 5] in [sequence[:3] for sequence in sequences]


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
        ("a.csv", "1,2,3\n4,50,6\n", ["line 2", "token 50", "0 to 49", "vocab_size to 51"]),
        ("a.csv", "1,2,3\n4,-1,6\n", ["line 2", "token -1", "start at 0"]),
        ("a.csv", "start,next\n1,2\n", ["line 1", "'start,next'", "without a heading"]),
        ("a.csv", "1,2\n\n1,2.5\n", ["line 3", "2.5", "integers"]),
        ("a.csv", "1,,2\n", ["line 1", "integers"]),
        ("a.csv", "1," + "9" * 30 + "\n", ["line 1", "999", "vocab_size"]),
        ("a.csv", "1,2\n7\n", ["line 2", "at least two tokens"]),
        ("a.csv", "", ["is empty"]),
        ("a.csv", "1,2\n3,4\n", ["holds 2 distinct sequences", "at least 16"]),
        ("a.jsonl", "[1, 2]\n[1, true]\n", ["line 2", "True"]),
        ("a.jsonl", "[1, 2]\n[1, 2.0]\n", ["line 2", "2.0"]),
        ("a.jsonl", "[1, 2]\n{}\n", ["line 2", "'{}'"]),
        ("a.jsonl", "[1, 2\n", ["line 1", "JSON list"]),
        ("a.jsonl", "[" * 100_000 + "\n", ["line 1", "JSON list"]),
        ("a.jsonl", "[]\n", ["line 1", "at least two tokens"]),
        ("a.npy", "no array", ["cannot be read", "numpy.save"]),
        ("a.txt", "1 2 3\n", ["extension '.txt'", ".csv"]),
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
        (np.array([[1], [2]], dtype=object), "cannot be read"),
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
    with pytest.raises(FileNotFoundError, match="nowhere.csv does not exist"):
        SequenceFile(str(tmp_path / "nowhere.csv"), 50).setup("fit")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="folder.csv cannot be read"):
        SequenceFile(str(tmp_path / "folder.csv"), 50).setup("fit")
    (tmp_path / "latin.csv").write_bytes(b"1,2\n\xe9,3\n")
    with pytest.raises(ValueError, match="latin.csv cannot be read.*UTF-8"):
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
    assert ArithmeticProgressions(**data.arguments()).splits() == data.splits()


@pytest.mark.parametrize(("vocab_size", "max_step", "max_change"), [(7, None, None), (8, 5, 3), (12, 11, 0), (2, 1, 1)])
def test_no_two_progressions_are_equal_and_there_are_as_many_as_said(
    vocab_size: int, max_step: int | None, max_change: int | None
) -> None:
    data = QuadraticProgressions(vocab_size, 3, max_step=max_step, max_change=max_change)
    found = {tuple(sequence) for sequence in data.sequences()}
    assert len(found) == len(data.sequences()) == vocab_size * data.max_step * (data.max_change + 1)
    assert all(0 <= token < vocab_size for sequence in found for token in sequence)


def test_the_second_difference_is_constant_and_the_fourth_token_follows_from_three() -> None:
    sequences = torch.tensor(list(QuadraticProgressions(11, 30).sequences()))
    second = sequences.diff(n=2) % 11
    assert (second == second[:, :1]).all()
    a, b, c, after = (sequences[:, i : i - 3 or None] for i in range(4))
    assert (after == (3 * c - 3 * b + a) % 11).all()
    arithmetic = QuadraticProgressions(10, 12, max_step=4, max_change=0).sequences()
    assert len(arithmetic) == 40 and arithmetic[12] == [(2 + 2 * t) % 10 for t in range(12)]


def test_every_progression_is_in_one_split_and_the_counts_are_exact() -> None:
    def data(**options: int) -> SequenceData:
        return QuadraticProgressions(16, 20, max_change=3, num_val=50, num_test=10, **options)

    splits = data().splits()
    assert [len(split) for split in splits] == [16 * 15 * 4 - 60, 50, 10]
    assert sorted(map(list, everything(data()))) == sorted(map(list, data().sequences()))
    fewer, other = data(num_train=100).splits(), data(seed=1).splits()
    assert fewer.train == splits.train[:100] and fewer.val == splits.val != other.val


def test_batches_hold_the_rows_in_an_order_that_can_be_had_again() -> None:
    data = QuadraticProgressions(32, 160, num_train=500, num_val=3, num_test=2, batch_size=64)
    loader = data.train_dataloader()
    epochs: list[list[Batch]] = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs.append(list(loader))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(epochs[0], epochs[2], strict=True))
    assert not torch.equal(epochs[0][0].tokens, epochs[1][0].tokens)
    seen = torch.cat([batch.indices for batch in epochs[0]]).tolist()
    assert sorted(seen) == list(range(500)) and data.max_length == 160
    train = data.splits().train
    assert torch.cat([batch.tokens for batch in epochs[0]]).tolist() == [train[i] for i in seen]
    assert epochs[0][0].lengths.tolist() == [160] * 64 and epochs[0][0].prompt_lengths.tolist() == [8] * 64


def test_an_epoch_of_a_large_vocabulary_is_made_in_seconds() -> None:
    data = QuadraticProgressions(128, 160, num_train=20_000, batch_size=100)
    started = time.process_time()
    assert sum(batch.tokens.numel() for batch in data.train_dataloader()) == 20_000 * 160
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"length": 2}, "length must be at least 3, got 2"),
        ({"max_step": 64}, "max_step must be from 1 to 63, got 64"),
        ({"max_change": -1}, "max_change must be from 0 to 63, got -1"),
        ({"vocab_size": 10, "max_step": 2, "max_change": 0}, "give 20 distinct sequences.*needs at least 81"),
        ({"vocab_size": 512}, "give 133955584 progressions.*lower max_step or max_change"),
    ],
)
def test_progressions_that_cannot_be_are_refused(arguments: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        QuadraticProgressions(**arguments).setup("fit")


LENGTHS = random.Random(0).choices(range(10, 500), k=1003)


def test_rows_of_like_lengths_share_a_batch_and_every_row_is_there_once() -> None:
    def padded(order: list[int]) -> int:
        return sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in (order[i : i + 8] for i in starts))

    starts = range(0, len(LENGTHS), 8)
    sampler = LikeLengths(LENGTHS, 8, 1)
    order = list(sampler)
    assert sorted(order) == list(range(len(LENGTHS))) and list(sampler) == order
    assert padded(order) < 1.05 * sum(LENGTHS) < 0.7 * padded(list(EpochSampler(len(LENGTHS), 1)))
    assert len({max(LENGTHS[row] for row in order[i : i + 8]) > 250 for i in range(0, 400, 8)}) == 2
    sampler.set_epoch(1)
    assert list(sampler) != order


@pytest.mark.parametrize("form", [dict, lambda **parts: type("Given", (), parts)(), lambda tokens, **_: tokens])
def test_a_batch_of_any_data_module_is_taken(form: Any) -> None:
    batch = Batch.of(form(tokens=torch.arange(10).view(2, 5), lengths=torch.tensor([5, 5])))
    assert batch.lengths.tolist() == [5, 5] and batch.prompts() == [[0, 1], [5, 6]]
    assert batch.next_tokens().tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="tokens"):
        Batch.of([1, 2])
