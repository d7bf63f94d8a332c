"""Laws of stop strings: found wherever they begin and end, and the same speculatively as token by token."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

import cases
import pytest

from lightning_specdec.decoding import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.stopping import StopSearch, StopStrings
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling

PIECES = [b"ab", b"a", b"b", b" c", "é".encode(), b"\xc3", b"\xa9", b"\xa9b", b"cab a", None, b""]
"""What the tokens of `cases` stand for here: overlapping pieces, halves of a character, nothing at all."""
STRINGS = {
    "within_a_token": ["b a"],
    "over_tokens": ["ba"],
    "over_rounds": ["abcab ab"],
    "overlapping": ["aba", "bab", "ab", "b"],
    "longest_of_one_end": ["abab", "bab"],
    "unicode": ["éé", "bé"],
    "many": ["a", "c", "é"],
    "never": ["xyz", "ÿ"],
}


def oracle(tokens: list[int], strings: list[str]) -> tuple[int, int] | None:
    """Byte after byte: the tokens kept, and the bytes cut from their end."""
    text = b""
    for i, token in enumerate(tokens):
        piece = PIECES[token] or b""
        for place in range(len(piece)):
            text += piece[place : place + 1]
            if complete := [
                string.encode() for string in strings if text.endswith(string.encode())
            ]:
                return i + 1, max(map(len, complete)) + len(piece) - place - 1
    return None


@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
def test_a_search_in_pieces_of_any_size_finds_what_a_search_byte_after_byte_finds(
    strings: list[str],
) -> None:
    generator, stops = random.Random(1), StopStrings(strings, PIECES)
    for _ in range(400):
        tokens = [generator.randrange(len(PIECES) + 1) for _ in range(generator.randint(0, 20))]
        tokens = [min(token, 50) for token in tokens]  # one of them is no token
        expected = oracle([token for token in tokens if token < len(PIECES)], strings)
        search, read, found = StopSearch(stops), 0, None
        while found is None and read < len(tokens):
            chunk = tokens[read : read + generator.randint(0, 5)]
            kept = search.push(chunk)
            found, read = (None if kept is None else read + kept), read + len(chunk)
        if expected is None:
            assert found is None and search.num_cut == 0
        else:
            assert found is not None
            known = sum(token < len(PIECES) for token in tokens[:found])
            assert (known, search.num_cut) == expected
            assert search.num_cut == search.num_held


def spelling(model: LanguageModel, pieces: Sequence[bytes | None]) -> LanguageModel:
    """The model, its tokens having this text."""
    other = copy(model)
    other.vocabulary = SimpleNamespace(token_bytes=pieces)  # type: ignore[assignment]
    return other


def options(name: str, sampling: Sampling) -> dict[str, Any]:
    return {"max_new_tokens": 14, "sampling": sampling, "eos": 9, "stop": STRINGS[name]}


@functools.cache
def standard(target: str, name: str, sampling: Sampling) -> DecodeResult:
    """Standard decoding up to strings of that name: the oracle of all drafters and windows."""
    return autoregressive_decode(
        spelling(cases.target(target), PIECES), cases.PROMPTS, **options(name, sampling)
    )


def speculate(
    target: str, drafter: str, name: str, window: int, sampling: Sampling
) -> DecodeResult:
    return speculative_decode(
        spelling(cases.target(target), PIECES),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        num_draft_tokens=window,
        **options(name, sampling),
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2)], ids=["greedy", "t1.2"])
@pytest.mark.parametrize(
    ("target", "drafter", "name"),
    [
        (*pair, name)
        for pair in cases.pairs(
            ["near", "ragged", "itself", "repeater", "early_exit", "heads"], ["rnn", "transformer"]
        )
        for name in cases.few([*STRINGS], *pair)
    ],
)
def test_speculative_output_equals_standard_output_with_stop_strings(
    target: str, drafter: str, name: str, sampling: Sampling
) -> None:
    """Every string meets every window: odd ones at one temperature, even ones at the other."""
    expected = standard(target, name, sampling)
    first = 1 + ([*STRINGS].index(name) + sampling.greedy) % 2
    for window in (2, 7) if target == "llama" else range(first, 9, 2):
        result = speculate(target, drafter, name, window, sampling)
        assert result.tokens == expected.tokens
        assert [row.stop_reason for row in result.rows] == [
            row.stop_reason for row in expected.rows
        ]


def test_the_prompt_does_not_count() -> None:
    target = cases.target("rnn")
    (first,) = autoregressive_decode(target, [[0, 1, 2]], max_new_tokens=1).tokens[0]
    strings = ["aba"]  # the prompt's own text, and begun at its end
    pieces = [b"z"] * cases.VOCAB
    pieces[:3], pieces[first] = [b"a", b"b", b"ab"], b"a"
    result = autoregressive_decode(
        spelling(target, pieces), [[0, 1, 2]], max_new_tokens=1, stop=strings
    )
    assert result.rows[0].stop_reason == "length"


def test_a_stop_string_wins_over_eos_in_the_same_token_and_eos_over_one_behind_it() -> None:
    target = cases.target("rnn")
    tokens = autoregressive_decode(target, [[3]], max_new_tokens=8).tokens[0]
    pieces = [b"a"] * cases.VOCAB
    for num_before, reason in ((0, "stop"), (1, "eos")):
        stop = "a" * (1 + num_before)
        for window in (1, 4):
            row = speculative_decode(
                spelling(target, pieces),
                cases.drafter("itself", "rnn"),
                [[3]],
                max_new_tokens=8,
                num_draft_tokens=window,
                eos=tokens[0],
                stop=stop,
            ).rows[0]
            assert (row.tokens, row.stop_reason) == (tokens[:1], reason)
