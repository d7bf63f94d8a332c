"""Saved texts: rows that continue one have the tokens that they have without it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import cases
import pytest
import torch
from families import tiny

from lightning_specdec.decoding import SavedText, Session
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import RowCopy
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.serve.prefix_cache import MIN_SHARED, PrefixCache

PAIRS = [
    ("llama", "near"),
    ("llama", "ngram"),
    ("llama", "early_exit"),
    ("llama", "eagle"),
    ("llama", "mtp"),
    ("llama", "heads"),
    ("llama", "staged"),
    ("gemma3", "near"),
    ("openvino", "near"),
]
FIRST = [1, 2, 3, 4, 5, 6, 7, 8, 9]
MODEL = cases.target("rnn")
DRAFTER = NGramDrafter()


class Watched(cases.Wrapped):
    """Counts the tokens that the model reads."""

    num_read = 0

    def forward(self, tokens: torch.Tensor, state: Any = None, **options: Any) -> Any:
        lengths = options.get("valid_lengths")
        self.num_read += tokens.numel() if lengths is None else sum(lengths)
        return super().forward(tokens, state, **options)


def decode(session: Session, prompt: list[int], **options: Any) -> Any:
    row = session.add(prompt, max_new_tokens=9, index=0, **options)
    while row.live:
        session.step()
    return row


@pytest.mark.parametrize(
    ("target", "drafter", "temperature"),
    [*((*pair, 1.0) for pair in PAIRS), ("llama", "near", 0.0), ("llama", "eagle", 0.0)],
)
def test_a_row_that_continues_a_saved_text_has_the_same_tokens(
    target: str,
    drafter: str,
    temperature: float,
) -> None:
    model = cases.target(target)
    drafter_object = cases.drafter(drafter, target)
    options: dict[str, Any] = {"num_draft_tokens": 3, "temperature": temperature, "seed": 2}
    session = Session(model, drafter_object, max_length=60, **options)
    first = decode(session, FIRST)
    saved = session.save(first)
    assert saved is not None
    # The target may not have read the last token, or tokens of the last round.
    assert len(saved.tokens) > len(FIRST)
    session.release(first)

    longer = [*first.text, 3, 1, 4]
    departing = [*FIRST, 10, 9, 8]
    for prompt in (longer, departing, FIRST[:4], [10, 1]):
        other = session.add([2, 2], max_new_tokens=7, index=1)
        row = decode(session, prompt, saved=saved)
        while other.live:
            session.step()
        fresh = decode(Session(model, drafter_object, max_length=60, **options), prompt)
        assert row.text == fresh.text


def test_the_target_reads_only_what_follows_the_shared_prefix() -> None:
    model = Watched(cases.target("llama"))
    drafter = cases.drafter("ngram", "llama")
    session = Session(model, drafter, max_length=200, num_draft_tokens=1)
    first = decode(session, FIRST * 12)
    saved = session.save(first)
    assert saved is not None
    num_saved = len(saved.tokens)
    model.num_read = 0
    row = decode(session, [*first.text, 3, 1, 4], saved=saved)
    num_unread = len(first.text) + 3 - num_saved
    # Each round reads a draft token and the token before it.
    assert model.num_read <= num_unread + 2 * row.num_rounds
    assert num_unread < 8


def test_states_without_copies_are_read_again() -> None:
    session = Session(cases.target("rnn"), cases.drafter("near", "rnn"), max_length=60)
    assert session.save(decode(session, FIRST)) is None


@pytest.mark.parametrize("changed", ["target", "drafter"])
def test_a_saved_text_of_other_models_is_refused(changed: str) -> None:
    model = cases.target("llama")
    drafter = cases.drafter("eagle", "llama")
    first_session = Session(model, drafter, max_length=60)
    saved = first_session.save(decode(first_session, FIRST))
    if changed == "target":
        model = HuggingFaceLM(tiny("llama", seed=9, vocab_size=cases.VOCAB))
    else:
        drafter = deepcopy(drafter)

    session = Session(model, drafter, max_length=60)
    with pytest.raises(ValueError, match="read by another target or drafter"):
        session.add(FIRST, saved=saved, max_new_tokens=9)

    # The refused prompt left nothing behind.
    row = decode(session, FIRST)
    assert row.text == decode(Session(model, drafter, max_length=60), FIRST).text


def test_a_row_that_failed_or_left_is_not_saved() -> None:
    session = Session(cases.target("llama"), cases.drafter("near", "llama"), max_length=60)
    row = decode(session, FIRST)
    row.stop_reason = "failed"
    assert session.save(row) is None
    row = decode(session, FIRST)
    decode(session, FIRST)
    assert session.save(row) is None


def text(*tokens: int, size: int = 100) -> SavedText:
    """A saved text whose states have that many bytes."""
    tensors = {"keys": torch.zeros(size, dtype=torch.uint8)}
    return SavedText(tokens, RowCopy(len(tokens), tensors), None, MODEL, DRAFTER)


def test_the_cache_finds_the_longest_prefix_and_keeps_to_its_memory() -> None:
    cache = PrefixCache(300)
    common = tuple(range(MIN_SHARED))
    short = text(*common, 50)
    long = text(*common, 60, 61, 62)
    cache.put(short)
    cache.put(long)
    assert cache.find([*common, 60, 61, 9]) == (long, MIN_SHARED + 2)
    assert cache.find([*common, 50, 9]) == (short, MIN_SHARED + 1)
    # The last token is always read.
    assert cache.find([*common, 60, 61, 62]) == (long, MIN_SHARED + 2)
    assert cache.find([*common[:-1], 99, 99]) == (None, 0)

    other = text(*range(70, 90))
    cache.put(other)
    assert cache.num_bytes == 300
    cache.find([*common, 50, 9])
    cache.put(text(*range(100, 120)))
    # The one that was not used for longest is gone.
    assert cache.find([*common, 60, 61, 62, 63])[1] == MIN_SHARED
    assert len(cache) == 3

    continued = text(*common, 50, 51)
    cache.put(continued)
    assert cache.find([*common, 50, 51, 52]) == (continued, MIN_SHARED + 2)
    assert len(cache) == 3
    cache.put(text(1, size=301))
    assert len(cache) == 3
    # A text that is too large takes the place of none.
    cache.put(text(*common, 50, 51, 52, size=301))
    assert cache.find([*common, 50, 51, 52]) == (continued, MIN_SHARED + 2)
    assert cache.num_bytes == 300
