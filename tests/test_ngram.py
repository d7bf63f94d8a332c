"""Lookup guesses what followed the latest occurrence of the longest suffix; its index is never read or built twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import Draft, DraftRequest, NGramDrafter, last_two
from lightning_specdec.drafters.ngram import NGramState
from lightning_specdec.models import RNN
from lightning_specdec.rules import Sampling


def propose(
    drafter: NGramDrafter, state: NGramState, texts: Sequence[Sequence[int]], windows: Sequence[int]
) -> Draft:
    tail = last_two(texts, torch.device("cpu"))
    return drafter.propose(state, DraftRequest(texts, tail, None), windows, Sampling())


def num_entries(state: NGramState) -> int:
    """N-grams that are remembered, of all rows."""
    return sum(len(row.continuations) for row in state.rows)


def guesses(draft: Draft) -> list[list[int]]:
    """Each row's guesses, without the padding."""
    rows: list[list[int]] = draft.tokens.tolist()
    lengths = [len(row) for row in rows] if draft.lengths is None else draft.lengths.tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def scan(
    text: Sequence[int], window: int, *, max_ngram: int, min_ngram: int, per_token: int
) -> list[int]:
    """The same by reading the whole text backwards for every length of suffix: the definition."""
    end = len(text)
    for length in range(max_ngram, min_ngram - 1, -1):
        for behind in range(end - 1, length - 1, -1):
            if list(text[behind - length : behind]) == list(text[end - length :]):
                grown = list(text)
                for i in range(window if length == max_ngram else min(window, per_token * length)):
                    grown.append(grown[behind + i])
                return grown[end:]
    return []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "per_token"), [(5, 1, 2), (3, 1, 1024), (1, 1, 1), (4, 4, 2)]
)
def test_the_growing_index_finds_what_a_scan_of_the_whole_text_finds(
    max_ngram: int, min_ngram: int, per_token: int, seed: int
) -> None:
    """Rows over a tiny alphabet grow by one to five tokens a round, move and are emptied for other texts."""
    generator = random.Random(seed)
    drafter = NGramDrafter(max_ngram=max_ngram, min_ngram=min_ngram, tokens_per_match=per_token)
    alphabet, state, num_found = generator.randint(2, 4), drafter.init_state(3, 400), 0
    texts: list[list[int]] = [[generator.randrange(alphabet)] for _ in range(3)]
    for _ in range(60):
        windows = [generator.randint(0, 5) for _ in texts]
        found = guesses(propose(drafter, state, texts, windows))
        for text, window, row in zip(texts, windows, found, strict=True):
            assert row == scan(
                text, window, max_ngram=max_ngram, min_ngram=min_ngram, per_token=per_token
            )
            num_found += bool(row)
        for text in texts:
            text += [generator.randrange(alphabet) for _ in range(generator.randint(1, 5))]
        if generator.random() < 0.2:
            rows = generator.sample([-1, -1, -1, *range(len(texts))], generator.randint(1, 4))
            state.select(rows)
            texts = [
                [generator.randrange(alphabet)] if row < 0 else list(texts[row]) for row in rows
            ]
        if generator.random() < 0.2:
            cleared = generator.randrange(len(texts))
            state.clear([cleared])
            texts[cleared] = [generator.randrange(alphabet) for _ in range(generator.randint(1, 9))]
    assert num_found > 2, "hardly anything was compared"


class Counted(Sequence[int]):
    """A text that counts how many of its tokens were read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.num_read = list(tokens), 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: Any) -> Any:
        found = self.tokens[place]
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole text is read")


def test_a_round_costs_by_its_new_tokens_and_not_by_the_text() -> None:
    reads, entries = [], []
    for length in (30, 300, 3000):
        generator = random.Random(0)
        drafter, text = NGramDrafter(), Counted([generator.randrange(5) for _ in range(length)])
        state = drafter.init_state(1, length + 100)
        texts = [text]
        drafter.propose(
            state, DraftRequest(texts, torch.zeros(1, 2, dtype=torch.long), None), [4], Sampling()
        )
        per_round, size = [], num_entries(state)
        for _ in range(20):
            text.tokens += [generator.randrange(5) for _ in range(3)]
            text.num_read = 0
            drafter.propose(
                state,
                DraftRequest(texts, torch.zeros(1, 2, dtype=torch.long), None),
                [4],
                Sampling(),
            )
            per_round.append(text.num_read)
        reads.append(max(per_round))
        entries.append((num_entries(state) - size) / 20)
    # The new ends' n-grams, the suffixes, what is copied; and what the shape checker of the tests looks at.
    most = 3 * 5 + 5 + 4 + 16
    assert max(reads) <= most and max(entries) <= 3 * 5


def test_a_loop_in_the_output_is_guessed_right() -> None:
    target = cases.make(
        RNN, 3, sharpness=1.0, embedding_size=8, hidden_size=16
    )  # settles on a cycle
    result = speculative_decode(
        target, NGramDrafter(), [1, 2, 3], max_new_tokens=60, num_draft_tokens=5
    )
    assert result.tokens == autoregressive_decode(target, [1, 2, 3], max_new_tokens=60).tokens
    assert result.block_efficiency is not None and result.block_efficiency > 2


def test_a_row_that_goes_back_forgets_what_lies_behind() -> None:
    generator, drafter = random.Random(0), NGramDrafter()
    for kept in (0, 3, 19, 20):
        state, old = drafter.init_state(1, 60), [generator.randrange(3) for _ in range(20)]
        propose(drafter, state, [old], [4])
        state.go_back(0, kept)
        text = [*old[:kept], *(generator.randrange(3) for _ in range(9))]
        fresh = propose(drafter, drafter.init_state(1, 60), [text], [4])
        assert guesses(propose(drafter, state, [text], [4])) == guesses(fresh)
        assert num_entries(state) <= 5 * len(text)
