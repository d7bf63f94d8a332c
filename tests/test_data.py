"""Laws of integer sequences: splits share nothing, and padding has no labels."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

ROWS = [list(range(start, start + 4 + start % 3)) for start in range(30)]


def all_sequences(data: SequenceData) -> list[list[int]]:
    train, val, test = data.splits()
    return [*train, *val, *test]


def test_a_files_sequences_are_each_in_one_split_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = []
    for row in ROWS * 2:
        json_line = str(row)
        spreadsheet_line = json_line.strip("[]") + ",,"
        lines.append(json_line if row[0] % 2 else spreadsheet_line)
    path.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert sorted(all_sequences(SequenceFile(str(path), 50))) == sorted(ROWS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3\n4,50,6\n", "has integers up to 50, and vocab_size is 50: set it to 51"),
        ("1,2,3\n4,-1,6\n", "line 2"),
        ("start,next\n1,2\n", "line 1.*'start,next'"),
        ("1,2\n7\n", "line 2: write two or more"),
        ("", "is empty"),
        ("1,2\n3,4\n", "2 distinct sequences, and the splits need 16"),
        ("[1, 2]\n[1, true]\n", "line 2"),
        ("1, " + "[" * 100_000 + "1\n", "line 1"),
        (b"1,2\n\xe9,3\n", "cannot be read"),
        (None, "cannot be read.*No such file"),
    ],
)
def test_a_faulty_file_gives_one_line(
    tmp_path: Path,
    content: str | bytes | None,
    message: str,
) -> None:
    path = tmp_path / "a.csv"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        SequenceFile(str(path), 50).setup("fit")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .*, got 0"),
        ({"max_step": 64}, "max_step must be from 1 to 63, got 64"),
        (
            {"vocab_size": 10, "max_step": 2, "max_change": 0},
            "20 distinct sequences, and the splits need 81",
        ),
        ({"vocab_size": 512}, "133955584 progressions.*lower max_step or max_change"),
    ],
)
def test_impossible_progressions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuadraticProgressions(**arguments).setup("fit")


def test_labels_leave_out_the_padding() -> None:
    batch = ArithmeticProgressions().collate([(7, [1, 2, 3, 4]), (9, [5, 6])])
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.next_tokens().tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]
    assert batch.indices.tolist() == [7, 9]
    assert batch.prompts() == [[1, 2, 3], [5]]


def test_the_fourth_token_of_a_progression_follows_from_three() -> None:
    sequences = torch.tensor(list(QuadraticProgressions(11, 30).sequences()))
    first, second, third, fourth = sequences.unfold(1, 4, 1).unbind(-1)
    assert (fourth == (3 * third - 3 * second + first) % 11).all()


def test_every_progression_is_in_one_split_and_the_counts_are_exact() -> None:
    def make_data(**options: Any) -> SequenceData:
        return QuadraticProgressions(16, 20, max_change=3, num_val=50, num_test=10, **options)

    global_state = torch.get_rng_state()
    data = make_data()
    splits = data.splits()
    num_progressions = 16 * 15 * 4
    assert [len(split) for split in splits] == [num_progressions - 60, 50, 10]
    assert len({tuple(row) for row in data.sequences()}) == num_progressions
    assert sorted(all_sequences(data)) == sorted(list(row) for row in data.sequences())
    assert torch.equal(torch.get_rng_state(), global_state), "no global seed is touched"

    fewer = make_data(num_train=100).splits()
    assert fewer.train == splits.train[:100] and fewer.val == splits.val
    assert make_data(seed=1).splits().val != splits.val


def test_batches_hold_the_rows_in_an_order_that_can_be_had_again() -> None:
    data = QuadraticProgressions(32, 16, num_train=500, num_val=3, num_test=2, batch_size=64)
    loader = data.train_dataloader()
    train = data.splits().train
    orders = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches = list(loader)
        order = torch.cat([batch.indices for batch in batches]).tolist()
        tokens = torch.cat([batch.tokens for batch in batches]).tolist()
        assert tokens == [train[index] for index in order]
        orders.append(order)
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(500))


LENGTHS = random.Random(0).choices(range(10, 500), k=1003)


def test_rows_of_like_lengths_share_a_batch_and_every_row_is_there_once() -> None:
    def padded_size(order: list[int]) -> int:
        """Number of tokens and padding in batches of eight."""
        size = 0
        for start in range(0, len(order), 8):
            lengths = [LENGTHS[row] for row in order[start : start + 8]]
            size += len(lengths) * max(lengths)
        return size

    sampler = LikeLengths(LENGTHS, 8, 1)
    order = list(sampler)
    assert sorted(order) == list(range(len(LENGTHS)))
    assert list(sampler) == order
    random_order = list(EpochSampler(len(LENGTHS), 1))
    assert padded_size(order) < 1.05 * sum(LENGTHS) < 0.7 * padded_size(random_order)
    sampler.set_epoch(1)
    assert list(sampler) != order


TOKENS = torch.arange(10).view(2, 5)
LENGTHS_OF_TOKENS = torch.tensor([5, 5])


@pytest.mark.parametrize(
    "foreign_batch",
    [
        {"tokens": TOKENS, "lengths": LENGTHS_OF_TOKENS},
        SimpleNamespace(tokens=TOKENS, lengths=LENGTHS_OF_TOKENS),
        TOKENS,
    ],
    ids=["dict", "object", "tensor"],
)
def test_a_batch_of_any_data_module_is_accepted(foreign_batch: Any) -> None:
    batch = Batch.of(foreign_batch)
    assert batch.lengths.tolist() == [5, 5]
    assert batch.prompts() == [[0, 1], [5, 6]]
    assert batch.next_tokens().tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="tokens"):
        Batch.of([1, 2])
