"""Laws of integer sequences: splits that share nothing, padding that teaches nothing, faults in one line."""

from __future__ import annotations

import random
from pathlib import Path
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

ROWS = [[start + i for i in range(4 + start % 3)] for start in range(30)]


def everything(data: SequenceData) -> list[list[int]]:
    return [sequence for split in data.splits() for sequence in split]


def test_a_files_sequences_are_each_in_one_split_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = [
        str(row) if row[0] % 2 else ", ".join(map(str, row)) + ",," for row in ROWS * 2
    ]  # JSON, spreadsheet
    path.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert sorted(everything(SequenceFile(str(path), 50))) == sorted(ROWS)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("1,2,3\n4,50,6\n", "line 2.*0 to 49 .vocab_size"),
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
    tmp_path: Path, content: str | bytes | None, told: str
) -> None:
    path = tmp_path / "a.csv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=told) as caught:
        SequenceFile(str(path), 50).setup("fit")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_progressions_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        QuadraticProgressions(**arguments).setup("fit")


def test_labels_leave_out_the_padding() -> None:
    batch = ArithmeticProgressions().collate([(7, [1, 2, 3, 4]), (9, [5, 6])])
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.next_tokens().tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]
    assert batch.indices.tolist() == [7, 9]
    assert batch.prompts() == [[1, 2, 3], [5]]


def test_the_fourth_token_of_a_progression_follows_from_three() -> None:
    sequences = torch.tensor(list(QuadraticProgressions(11, 30).sequences()))
    a, b, c, after = (sequences[:, i : i - 3 or None] for i in range(4))
    assert (after == (3 * c - 3 * b + a) % 11).all()


def test_every_progression_is_in_one_split_and_the_counts_are_exact() -> None:
    def data(**options: Any) -> SequenceData:
        return QuadraticProgressions(16, 20, max_change=3, num_val=50, num_test=10, **options)

    state, splits = torch.get_rng_state(), data().splits()
    assert [len(split) for split in splits] == [16 * 15 * 4 - 60, 50, 10]
    assert len({tuple(row) for row in data().sequences()}) == 16 * 15 * 4
    assert sorted(everything(data())) == sorted(map(list, data().sequences()))
    assert torch.equal(torch.get_rng_state(), state), "no global seed is touched"
    fewer, other = data(num_train=100).splits(), data(seed=1).splits()
    assert fewer.train == splits.train[:100] and fewer.val == splits.val != other.val


def test_batches_hold_the_rows_in_an_order_that_can_be_had_again() -> None:
    data = QuadraticProgressions(32, 16, num_train=500, num_val=3, num_test=2, batch_size=64)
    loader, train, orders = data.train_dataloader(), data.splits().train, []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        read = list(loader)
        orders.append(torch.cat([batch.indices for batch in read]).tolist())
        assert torch.cat([batch.tokens for batch in read]).tolist() == [
            train[i] for i in orders[-1]
        ]
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == list(range(500))


LENGTHS = random.Random(0).choices(range(10, 500), k=1003)


def test_rows_of_like_lengths_share_a_batch_and_every_row_is_there_once() -> None:
    def padded(order: list[int]) -> int:
        return sum(
            len(batch) * max(LENGTHS[row] for row in batch)
            for batch in (order[i : i + 8] for i in starts)
        )

    starts = range(0, len(LENGTHS), 8)
    sampler = LikeLengths(LENGTHS, 8, 1)
    order = list(sampler)
    assert sorted(order) == list(range(len(LENGTHS))) and list(sampler) == order
    assert padded(order) < 1.05 * sum(LENGTHS) < 0.7 * padded(list(EpochSampler(len(LENGTHS), 1)))
    sampler.set_epoch(1)
    assert list(sampler) != order


@pytest.mark.parametrize(
    "form", [dict, lambda **parts: type("Given", (), parts)(), lambda tokens, **_: tokens]
)
def test_a_batch_of_any_data_module_is_taken(form: Any) -> None:
    batch = Batch.of(form(tokens=torch.arange(10).view(2, 5), lengths=torch.tensor([5, 5])))
    assert batch.lengths.tolist() == [5, 5] and batch.prompts() == [[0, 1], [5, 6]]
    assert batch.next_tokens().tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="tokens"):
        Batch.of([1, 2])
