"""Lookup guesses what followed the latest occurrence of the longest suffix; its index is never read or built twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.decoding import Session, autoregressive_decode, open_session, speculative_decode
from lightning_specdec.drafters import Draft, DraftRequest, NGramDrafter, last_two
from lightning_specdec.drafters.ngram import NGramState
from lightning_specdec.models import RNN
from lightning_specdec.rules import Sampling

TRAINED = Path(__file__).parent / "data" / "rnn_format_1.ckpt"


def propose(drafter: NGramDrafter, state: NGramState, texts: Sequence[Sequence[int]], windows: Sequence[int]) -> Draft:
    tail = last_two(texts, torch.device("cpu"))
    return drafter.propose(state, DraftRequest(texts, tail, None), windows, Sampling())


def num_entries(state: NGramState) -> int:
    """N-grams that are remembered, of all rows."""
    return sum(len(row.places) for row in state.rows)


def guesses(draft: Draft) -> list[list[int]]:
    """Each row's guesses, without the padding."""
    rows: list[list[int]] = draft.tokens.tolist()
    lengths = [len(row) for row in rows] if draft.lengths is None else draft.lengths.tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def look_up(text: Sequence[int], window: int, drafter: NGramDrafter | None = None) -> list[int]:
    """What is guessed after a text that is read at once."""
    drafter = drafter or NGramDrafter()
    return guesses(propose(drafter, drafter.init_state(1, len(text) + window), [text], [window]))[0]


def scan(text: Sequence[int], window: int, *, max_ngram: int, min_ngram: int, per_token: int) -> list[int]:
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


LOOK_UPS: list[tuple[list[int], int, dict[str, int], list[int]]] = [
    ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, {}, [7]),  # a longer match goes before a later one
    ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, {"max_ngram": 1}, [8]),
    ([1, 2, 7, 5, 2], 2, {}, [7, 5]),
    ([1, 2, 7, 5, 2], 2, {"min_ngram": 2}, []),
    ([9, 1, 2, 3, 1, 2, 3, 1, 2], 8, {}, [3, 1, 2, 3, 1, 2, 3, 1]),  # a loop goes on
    ([5, 5], 4, {"max_ngram": 1}, [5, 5, 5, 5]),
]


@pytest.mark.parametrize(("text", "window", "settings", "expected"), LOOK_UPS)
def test_lookups_counted_by_hand(text: list[int], window: int, settings: dict[str, int], expected: list[int]) -> None:
    assert look_up(text, window, NGramDrafter(**settings)) == expected


def test_guesses_are_as_many_as_the_match_deserves() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    lengths = [len(look_up([*text, *text[:n]], 7)) for n in (1, 2, 3, 4, 5)]
    assert lengths == [2, 4, 6, 7, 7]
    one_each = NGramDrafter(max_ngram=3, tokens_per_match=1)
    assert [len(look_up([*text, *text[:n]], 7, one_each)) for n in (1, 2, 3, 4)] == [1, 2, 7, 7]


@pytest.mark.parametrize("text", [[4], [4, 5], [1, 2, 3, 4, 5, 6, 7]])
def test_where_nothing_occurred_before_nothing_is_guessed(text: list[int]) -> None:
    draft = propose(NGramDrafter(), NGramDrafter().init_state(1, 20), [text], [3])
    assert draft.tokens.shape == (1, 0) and draft.num_calls == 0 and draft.probs is None and draft.logits is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("max_ngram", "min_ngram", "per_token"), [(5, 1, 2), (3, 1, 1024), (1, 1, 1), (4, 4, 2)])
def test_the_growing_index_finds_what_a_scan_of_the_whole_text_finds(
    max_ngram: int, min_ngram: int, per_token: int, seed: int
) -> None:
    """Rows over a tiny alphabet grow by one to five tokens a round, move, double and are emptied for other texts."""
    generator = random.Random(seed)
    drafter = NGramDrafter(max_ngram=max_ngram, min_ngram=min_ngram, tokens_per_match=per_token)
    alphabet, state, num_found = generator.randint(2, 4), drafter.init_state(3, 400), 0
    texts: list[list[int]] = [[generator.randrange(alphabet)] for _ in range(3)]
    for _ in range(60):
        windows = [generator.randint(0, 5) for _ in texts]
        found = guesses(propose(drafter, state, texts, windows))
        for text, window, row in zip(texts, windows, found, strict=True):
            assert row == scan(text, window, max_ngram=max_ngram, min_ngram=min_ngram, per_token=per_token)
            num_found += bool(row)
        for text in texts:
            text += [generator.randrange(alphabet) for _ in range(generator.randint(1, 5))]
        if generator.random() < 0.2:
            rows = [generator.randrange(-1, len(texts)) for _ in range(generator.randint(1, 4))]
            state.select(rows)
            texts = [[generator.randrange(alphabet)] if row < 0 else list(texts[row]) for row in rows]
        if generator.random() < 0.2:
            cleared = generator.randrange(len(texts))
            state.clear([cleared])
            texts[cleared] = [generator.randrange(alphabet) for _ in range(generator.randint(1, 9))]
    assert num_found > 2, "hardly anything was compared"


def test_rows_guess_apart_and_ragged() -> None:
    drafter = NGramDrafter()
    draft = propose(drafter, drafter.init_state(3, 20), [[1, 2, 3, 1], [4, 5], [6, 6]], [2, 3, 1])
    assert draft.lengths is not None and draft.lengths.tolist() == [2, 0, 1]
    assert guesses(draft) == [[2, 3], [], [6]] and draft.tokens.shape == (3, 2)


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
        drafter.propose(state, DraftRequest(texts, torch.zeros(1, 2, dtype=torch.long), None), [4], Sampling())
        per_round, size = [], num_entries(state)
        for _ in range(20):
            text.tokens += [generator.randrange(5) for _ in range(3)]
            text.num_read = 0
            drafter.propose(state, DraftRequest(texts, torch.zeros(1, 2, dtype=torch.long), None), [4], Sampling())
            per_round.append(text.num_read)
        reads.append(max(per_round))
        entries.append((num_entries(state) - size) / 20)
    # The new ends' n-grams, the suffixes, what is copied; and what the shape checker of the tests looks at.
    most = 3 * 5 + 5 + 4 + 16
    assert max(reads) <= most and max(entries) <= 3 * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", cases.LOSSLESS)
def test_the_trained_recurrent_target_decodes_with_look_up_and_loses_nothing(rule: str, temperature: float) -> None:
    target = checkpoint.load(TRAINED).target
    assert isinstance(target, RNN)
    prompts = [[5, 9], [1, 2, 3, 1, 2, 3, 1], [4, 4, 4]]  # after the first it falls into a loop
    options: dict[str, Any] = {"sampling": Sampling(temperature, top_k=3 if temperature else None), "seed": 2}
    result = speculative_decode(
        target, NGramDrafter(), prompts, max_new_tokens=24, num_draft_tokens=4, rule=cases.RULES[rule](), **options
    )
    assert result.counts is not None and result.counts.num_proposed > 0 and result.num_draft_calls == 0
    if temperature == 0 or rule == "ExactMatch":
        assert result.tokens == autoregressive_decode(target, prompts, max_new_tokens=24, **options).tokens
    if temperature == 0:
        assert result.rows[0].num_rounds < 20


def test_a_loop_in_the_output_is_guessed_right() -> None:
    target = cases.make(RNN, 3, sharpness=1.0, embedding_size=8, hidden_size=16)  # settles on a cycle
    result = speculative_decode(target, NGramDrafter(), [1, 2, 3], max_new_tokens=60, num_draft_tokens=5)
    assert result.tokens == autoregressive_decode(target, [1, 2, 3], max_new_tokens=60).tokens
    assert result.block_efficiency is not None and result.block_efficiency > 2


def test_a_round_without_a_guess_is_a_round_of_standard_decoding() -> None:
    target = cases.target("rnn")
    session = open_session(target, NGramDrafter(min_ngram=32, max_ngram=32), cases.PROMPTS, max_new_tokens=6)
    for _ in range(6):
        assert all(len(tokens) == 1 for _, tokens in session.step())
    result = session.result()
    assert result.tokens == autoregressive_decode(target, cases.PROMPTS, max_new_tokens=6).tokens
    assert result.num_target_calls == 6 and result.counts is not None and result.counts.num_proposed == 0


def test_a_slot_that_is_taken_again_remembers_nothing_of_the_row_before() -> None:
    session = Session(cases.target("rnn"), NGramDrafter(), max_length=40)
    first = session.add([1, 2, 3, 4, 1, 2, 3, 4], max_new_tokens=4)
    session.step()
    session.cancel(first)
    state = session._batch.draft_state
    assert isinstance(state, NGramState) and num_entries(state)
    session.add([1], max_new_tokens=8)
    assert num_entries(state) == 0


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
