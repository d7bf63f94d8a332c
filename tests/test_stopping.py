"""Laws of stop strings: they are found wherever they begin, in speculative decoding too."""

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
"""Bytes of the tokens of `cases`: overlapping pieces, parts of characters, and nothing."""
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
    """Search byte by byte: the number of tokens to keep, and of bytes to cut from their end."""
    needles = [string.encode() for string in strings]
    text = b""
    for num_tokens, token in enumerate(tokens, 1):
        piece = PIECES[token] or b""
        for num_read in range(1, len(piece) + 1):
            seen = text + piece[:num_read]
            match_lengths = [len(needle) for needle in needles if seen.endswith(needle)]
            if match_lengths:
                return num_tokens, max(match_lengths) + len(piece) - num_read
        text += piece
    return None


@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
def test_a_search_in_pieces_of_any_size_finds_what_a_search_byte_after_byte_finds(
    strings: list[str],
) -> None:
    generator = random.Random(1)
    stops = StopStrings(strings, PIECES)
    for _ in range(400):
        # The largest id is outside the vocabulary, and adds nothing.
        tokens = [generator.randrange(len(PIECES) + 1) for _ in range(generator.randint(0, 20))]
        expected = oracle([token for token in tokens if token < len(PIECES)], strings)

        search = StopSearch(stops)
        num_read = 0
        num_kept = None
        while num_kept is None and num_read < len(tokens):
            chunk = tokens[num_read : num_read + generator.randint(0, 5)]
            num_kept_of_chunk = search.push(chunk)
            if num_kept_of_chunk is not None:
                num_kept = num_read + num_kept_of_chunk
            num_read += len(chunk)

        if expected is None:
            assert num_kept is None and search.num_cut == 0
        else:
            assert num_kept is not None
            num_known = sum(token < len(PIECES) for token in tokens[:num_kept])
            assert (num_known, search.num_cut) == expected
            assert search.num_cut == search.num_held


def spelling(model: LanguageModel, pieces: Sequence[bytes | None]) -> LanguageModel:
    """A copy of the model whose tokens have these bytes."""
    renamed = copy(model)
    renamed.vocabulary = SimpleNamespace(token_bytes=pieces)  # type: ignore[assignment]
    return renamed


def options(name: str, sampling: Sampling) -> dict[str, Any]:
    return {"max_new_tokens": 14, "sampling": sampling, "eos": 9, "stop": STRINGS[name]}


@functools.cache
def standard(target: str, name: str, sampling: Sampling) -> DecodeResult:
    """Standard decoding up to the strings of that name, which all drafters must equal."""
    return autoregressive_decode(
        spelling(cases.target(target), PIECES), cases.PROMPTS, **options(name, sampling)
    )


def speculate(
    target: str,
    drafter: str,
    name: str,
    window: int,
    sampling: Sampling,
) -> DecodeResult:
    return speculative_decode(
        spelling(cases.target(target), PIECES),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        num_draft_tokens=window,
        **options(name, sampling),
    )


DRAFTERS = ["near", "ragged", "itself", "repeater", "early_exit", "heads"]


def windows_for(drafter: str, name: str, sampling: Sampling) -> tuple[int, int]:
    """Two windows. The first four drafters together try each string with all windows to 8."""
    turn = DRAFTERS.index(drafter) + [*STRINGS].index(name) + sampling.greedy
    return 1 + turn % 4, 5 + turn % 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2)], ids=["greedy", "t1.2"])
@pytest.mark.parametrize(
    ("target", "drafter", "name"),
    [
        (*pair, name)
        for pair in cases.pairs(DRAFTERS, ["rnn", "transformer"])
        for name in cases.few([*STRINGS], *pair)
    ],
)
def test_speculative_output_equals_standard_output_with_stop_strings(
    target: str,
    drafter: str,
    name: str,
    sampling: Sampling,
) -> None:
    expected = standard(target, name, sampling)
    expected_reasons = [row.stop_reason for row in expected.rows]
    for window in windows_for(drafter, name, sampling):
        result = speculate(target, drafter, name, window, sampling)
        assert result.tokens == expected.tokens
        assert [row.stop_reason for row in result.rows] == expected_reasons


def test_a_stop_string_that_no_text_can_contain_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""], PIECES)
    with pytest.raises(ValueError, match=r"'\\ud83d' has half a surrogate") as caught:
        StopStrings(["a", "\ud83d"], PIECES)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()


def test_the_prompt_does_not_count() -> None:
    target = cases.target("rnn")
    (first,) = autoregressive_decode(target, [[0, 1, 2]], max_new_tokens=1).tokens[0]
    strings = ["aba"]  # the prompt's own text, and begun at its end
    pieces = [b"z"] * cases.VOCAB
    pieces[:3] = [b"a", b"b", b"ab"]
    pieces[first] = b"a"
    result = autoregressive_decode(
        spelling(target, pieces), [[0, 1, 2]], max_new_tokens=1, stop=strings
    )
    assert result.rows[0].stop_reason == "length"


def test_a_stop_string_wins_over_eos_in_the_same_token_and_eos_over_a_later_one() -> None:
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
