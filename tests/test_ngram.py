"""Prompt lookup drafts what followed an earlier occurrence of the longest suffix.

No token of a text is read or indexed twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import Draft, DraftRequest, NGramDrafter, last_two_tokens_of
from lightning_specdec.drafters.ngram import NGramState
from lightning_specdec.models import RNN
from lightning_specdec.rules import Sampling


def propose(
    drafter: NGramDrafter,
    state: NGramState,
    texts: Sequence[Sequence[int]],
    windows: Sequence[int],
    prompt_lengths: Sequence[int] | None = None,
) -> Draft:
    tail = last_two_tokens_of(texts, torch.device("cpu"))
    request = DraftRequest(texts, tail, None, prompt_lengths=prompt_lengths)
    return drafter.propose(state, request, windows, Sampling())


def num_entries(state: NGramState) -> int:
    """The number of indexed n-grams of all rows."""
    return sum(len(row.continuations) for row in state.rows)


def drafted(draft: Draft) -> list[list[int]]:
    """Each row's draft tokens, without the padding."""
    rows: list[list[int]] = draft.tokens.tolist()
    lengths = [len(row) for row in rows] if draft.lengths is None else draft.lengths.tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def scan(
    text: Sequence[int],
    prompt_length: int,
    window: int,
    *,
    max_ngram: int,
    min_ngram: int,
    per_token: int,
) -> list[int]:
    """The definition: search the whole text for every length of suffix, the longest first."""
    end = len(text)
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = list(text[end - length :])
        if length < max_ngram:
            num_draft_tokens = min(window, per_token * length)
        else:
            num_draft_tokens = window
        positions = [
            position
            for position in range(length, end)
            if list(text[position - length : position]) == suffix
        ]
        if positions:
            position = choose(
                text,
                prompt_length,
                positions,
                max_ngram=max_ngram if length == max_ngram else None,
            )
            extended = list(text)
            for i in range(num_draft_tokens):
                extended.append(extended[position + i])
            return extended[end:]
    return []


def choose(
    text: Sequence[int],
    prompt_length: int,
    positions: Sequence[int],
    *,
    max_ngram: int | None,
) -> int:
    """The occurrence to copy, of those that end before these positions.

    Args:
        max_ngram: length of the match if the text before it is compared, too.
    """
    is_in_output = positions[-1] > prompt_length
    usual_position = positions[-1] if is_in_output else positions[0]
    if max_ngram is None:
        return usual_position

    compared = positions if len(positions) <= 8 else [*positions[:4], *positions[-4:]]
    lengths = {position: match_length(text, position, max_ngram + 16) for position in compared}
    longest = max(lengths.values())
    if lengths[usual_position] == longest:
        return usual_position
    return next(position for position in compared if lengths[position] == longest)


def match_length(text: Sequence[int], position: int, most: int) -> int:
    """How many tokens before a position, of up to `most`, equal the last ones of the text."""
    for length in range(1, min(most, position) + 1):
        if text[position - length] != text[len(text) - length]:
            return length - 1
    return min(most, position)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "per_token"), [(5, 1, 2), (3, 1, 1024), (1, 1, 1), (4, 4, 2)]
)
def test_the_growing_index_finds_what_a_scan_of_the_whole_text_finds(
    max_ngram: int,
    min_ngram: int,
    per_token: int,
    seed: int,
) -> None:
    """Rows of a tiny alphabet grow by up to five tokens a round, move, and start other texts."""
    generator = random.Random(seed)
    drafter = NGramDrafter(max_ngram=max_ngram, min_ngram=min_ngram, tokens_per_match=per_token)
    alphabet_size = generator.randint(2, 4)
    state = drafter.init_state(3, 400)
    num_matches = 0

    def some_tokens(num_tokens: int) -> list[int]:
        return [generator.randrange(alphabet_size) for _ in range(num_tokens)]

    texts = [some_tokens(length) for length in (1, 9, 40)]
    prompt_lengths = [1, 9, 40]
    for _ in range(60):
        windows = [generator.randint(0, 5) for _ in texts]
        drafts = drafted(propose(drafter, state, texts, windows, prompt_lengths))
        for text, length, window, draft in zip(texts, prompt_lengths, windows, drafts, strict=True):
            assert draft == scan(
                text,
                length,
                window,
                max_ngram=max_ngram,
                min_ngram=min_ngram,
                per_token=per_token,
            )
            num_matches += bool(draft)

        for text in texts:
            text += some_tokens(generator.randint(1, 5))
        if generator.random() < 0.1:
            # The next turn of a conversation: all of the text is its prompt.
            row = generator.randrange(len(texts))
            prompt_lengths[row] = len(texts[row])
        if generator.random() < 0.1:
            rows = generator.sample([-1, -1, -1, *range(len(texts))], generator.randint(1, 4))
            state.select(rows)
            prompt_lengths = [1 if row < 0 else prompt_lengths[row] for row in rows]
            texts = [some_tokens(1) if row < 0 else list(texts[row]) for row in rows]
        if generator.random() < 0.1:
            cleared_row = generator.randrange(len(texts))
            state.clear([cleared_row])
            texts[cleared_row] = some_tokens(generator.randint(1, 9))
            prompt_lengths[cleared_row] = len(texts[cleared_row])
    assert num_matches > 2, "hardly anything was compared"


def test_a_copy_of_the_prompt_goes_on_where_it_was() -> None:
    # Both functions have the same lines 2 and 3, and the answer copies the first one.
    first = [10, 1, 2, 3, 4, 5, 6, 11, 12]
    second = [20, 1, 2, 3, 4, 5, 6, 21, 22]
    prompt = [*first, *second, 30]
    text = [*prompt, 10, 1, 2, 3, 4, 5, 6]
    drafter = NGramDrafter()
    draft = propose(drafter, drafter.init_state(1, 99), [text], [2], [len(prompt)])
    assert drafted(draft) == [[11, 12]]


def test_a_copy_begins_with_the_first_occurrence_in_the_prompt() -> None:
    # A fence opens a block of code, and closes it.
    fence = 7
    prompt = [1, fence, 2, 3, 4, fence, 5]
    drafter = NGramDrafter()
    text = [*prompt, fence]
    draft = propose(drafter, drafter.init_state(1, 99), [text], [2], [len(prompt)])
    assert drafted(draft) == [[2, 3]]

    # What the output has repeated is more likely to be repeated again.
    text = [*prompt, fence, 8, 9, fence]
    draft = propose(drafter, drafter.init_state(1, 99), [text], [2], [len(prompt)])
    assert drafted(draft) == [[8, 9]]


class Counted(Sequence[int]):
    """A text that counts how many of its tokens were read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        tokens = self.tokens[index]
        self.num_read += len(tokens) if isinstance(index, slice) else 1
        return tokens

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole text is read")


def test_a_round_costs_by_its_new_tokens_and_not_by_the_text() -> None:
    tail = torch.zeros(1, 2, dtype=torch.long)
    for length in (30, 300, 3000):
        generator = random.Random(0)
        text = Counted([generator.randrange(5) for _ in range(length)])
        drafter = NGramDrafter()
        state = drafter.init_state(1, length + 100)
        request = DraftRequest([text], tail, None)
        drafter.propose(state, request, [4], Sampling())

        for _ in range(20):
            text.tokens += [generator.randrange(5) for _ in range(3)]
            text.num_read = 0
            num_entries_before = num_entries(state)
            drafter.propose(state, request, [4], Sampling())
            # The n-grams of three new tokens, the suffixes, the copied tokens; the tokens before
            # eight occurrences and before the suffix; and the elements that the tests' shape
            # checker inspects.
            assert text.num_read <= 3 * 5 + 5 + 4 + 8 * 2 * 16 + 16 + 2 * 16
            assert num_entries(state) - num_entries_before <= 3 * 5


def test_a_loop_in_the_output_is_drafted_correctly() -> None:
    # This model settles on a cycle.
    target = cases.make(RNN, 3, sharpness=1.0, embedding_size=8, hidden_size=16)
    result = speculative_decode(
        target, NGramDrafter(), [1, 2, 3], max_new_tokens=60, num_draft_tokens=5
    )
    assert result.tokens == autoregressive_decode(target, [1, 2, 3], max_new_tokens=60).tokens
    assert result.block_efficiency is not None and result.block_efficiency > 2


def test_a_truncated_row_forgets_the_tokens_after_its_end() -> None:
    generator = random.Random(0)
    drafter = NGramDrafter()
    for length in (0, 3, 19, 20):
        state = drafter.init_state(1, 60)
        former_text = [generator.randrange(3) for _ in range(20)]
        propose(drafter, state, [former_text], [4])
        state.truncate_row(0, length)

        text = [*former_text[:length], *(generator.randrange(3) for _ in range(9))]
        expected = propose(drafter, drafter.init_state(1, 60), [text], [4])
        assert drafted(propose(drafter, state, [text], [4])) == drafted(expected)
        assert num_entries(state) <= 5 * len(text)
