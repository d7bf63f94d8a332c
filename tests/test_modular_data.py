"""Laws of quadratic progressions: what they count, that no two are equal, that no split sees another's."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_specdec.data import Batch, QuadraticProgressions


def all_of(data: QuadraticProgressions) -> torch.Tensor:
    return data.sequences(torch.arange(data.num_sequences))


def numbers(data: QuadraticProgressions, split: str) -> list[int]:
    rows = data.rows(split)
    return [rows[i][1] for i in range(len(rows))]


@pytest.mark.parametrize(("vocab_size", "max_step", "max_change"), [(7, None, None), (8, 5, 3), (12, 11, 0), (2, 1, 1)])
def test_no_two_progressions_are_equal_and_there_are_as_many_as_said(
    vocab_size: int, max_step: int | None, max_change: int | None
) -> None:
    data = QuadraticProgressions(vocab_size, 3, max_step=max_step, max_change=max_change)
    found = {tuple(sequence) for sequence in all_of(data).tolist()}
    assert len(found) == data.num_sequences == vocab_size * data.max_step * (data.max_change + 1)
    assert all(0 <= token < vocab_size for sequence in found for token in sequence)


def test_the_second_difference_is_constant_and_the_fourth_token_follows_from_three() -> None:
    data = QuadraticProgressions(11, 30)
    sequences = all_of(data)
    second = sequences.diff(n=2) % 11
    assert (second == second[:, :1]).all()
    a, b, c, after = (sequences[:, i : i - 3 or None] for i in range(4))
    assert (after == (3 * c - 3 * b + a) % 11).all()


def test_without_changes_they_are_arithmetic_progressions() -> None:
    data = QuadraticProgressions(10, 12, max_step=4, max_change=0)
    assert data.num_sequences == 40
    assert all_of(data)[12].tolist() == [(2 + 2 * t) % 10 for t in range(12)]


def test_every_progression_is_in_one_split_and_the_counts_are_exact() -> None:
    data = QuadraticProgressions(16, 20, max_change=3, num_val=50, num_test=10)
    splits = [numbers(data, split) for split in ("train", "val", "test")]
    assert [len(split) for split in splits] == [16 * 15 * 4 - 60, 50, 10]
    assert sorted(sum(splits, [])) == list(range(16 * 15 * 4))
    fewer = QuadraticProgressions(16, 20, max_change=3, num_train=100, num_val=50, num_test=10)
    assert numbers(fewer, "train") == splits[0][:100] and numbers(fewer, "val") == splits[1]
    other = QuadraticProgressions(16, 20, max_change=3, num_val=50, num_test=10, seed=1)
    assert numbers(other, "val") != splits[1]


def test_batches_hold_the_progressions_of_their_rows_in_an_order_that_can_be_had_again() -> None:
    data = QuadraticProgressions(32, 160, num_train=500, num_val=3, num_test=2, batch_size=64)
    data.setup("fit")
    loader = data.train_dataloader()
    epochs: list[list[Batch]] = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs.append(list(loader))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(epochs[0], epochs[2], strict=True))
    assert not torch.equal(epochs[0][0].tokens, epochs[1][0].tokens)
    seen = torch.cat([batch.indices for batch in epochs[0]])
    assert sorted(seen.tolist()) == list(range(500)) and data.max_length == 160
    train = torch.tensor(numbers(data, "train"))
    assert torch.equal(torch.cat([batch.tokens for batch in epochs[0]]), data.sequences(train[seen]))
    assert epochs[0][0].lengths.tolist() == [160] * 64 and epochs[0][0].prompt_lengths.tolist() == [8] * 64


def test_prompts_are_the_first_tokens_of_the_test_progressions() -> None:
    data = QuadraticProgressions(prompt_length=5, max_change=2, num_test=4)
    assert data.prompts() == data.sequences(torch.tensor(numbers(data, "test")))[:, :5].tolist()
    assert QuadraticProgressions(**data.arguments()).prompts() == data.prompts()  # type: ignore[arg-type]


def test_an_epoch_of_a_large_vocabulary_is_made_in_seconds() -> None:
    data = QuadraticProgressions(128, 160, num_train=20_000, batch_size=100)
    started = time.process_time()
    num_tokens = sum(batch.tokens.numel() for batch in data.train_dataloader())
    assert num_tokens == 20_000 * 160
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"length": 2}, "length must be at least 3, got 2"),
        ({"max_step": 64}, "max_step must be from 1 to 63, got 64"),
        ({"max_change": -1}, "max_change must be from 0 to 63, got -1"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        QuadraticProgressions(**arguments)


def test_too_few_and_too_many_progressions_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"give 20 distinct sequences.*needs at least 81.*raise vocab_size, max_step"):
        QuadraticProgressions(10, max_step=2, max_change=0).setup("fit")
    with pytest.raises(ValueError, match=r"give 133955584 progressions.*lower max_step or max_change"):
        QuadraticProgressions(512).setup("fit")
