"""N-gram look-up: guesses that what followed the same words before will follow them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Draft, Sampling

LONGEST = 32
"""More tokens than any two texts share by chance: longer n-grams would find the same places at a higher cost."""

MOST_GUESSES = 1024
"""Guesses per token of a match that fill any window, however short the match."""


class _Index:
    """Where each n-gram of one row's text occurred last.

    Theory: a suffix that occurred before did so as an n-gram with a token behind it. One table holds the place behind
    the latest occurrence of every n-gram but those that end the text. New tokens add theirs once they are settled, and
    what was there is never read again. Where a suffix is missing from the table so are all longer ones, and the search
    ends.

    An n-gram's key is one whole number, its last token first: numbers are no work for the garbage collector.
    """

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths
        self.places: dict[int, int] = {}
        self.end = 1
        """The n-grams that end before this place of the text are in the table."""

    def copy(self) -> _Index:
        """Another one, for a row that goes on by itself."""
        other = _Index(self.lengths)
        other.places, other.end = dict(self.places), self.end
        return other

    def guess(self, text: Sequence[int], num_settled: int, window: int, guesses_per_token: int) -> Sequence[int]:
        """Take in the text's new tokens, and copy up to `window` from behind the match; none where there is none."""
        assert self.end <= len(text), "the text became shorter: its row was not cleared"
        for end in range(self.end, num_settled):
            for _, key in self._ngrams(text, end):
                self.places[key] = end
        self.end = max(self.end, num_settled)
        matched = behind = 0
        for length, key in self._ngrams(text, len(text)):
            if (found := self.places.get(key)) is None:
                break
            matched, behind = length, found
        if not matched:
            return ()
        if matched < self.lengths[-1]:
            window = min(window, guesses_per_token * matched)
        guesses = list(text[behind : behind + window])
        # The match reaches into the suffix: the text repeats itself with this period, and so do the guesses.
        while len(guesses) < window:
            guesses += guesses[: window - len(guesses)]
        return guesses

    def _ngrams(self, text: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Lengths and keys of the n-grams that end there, shorter ones first."""
        shortest, longest = self.lengths[0], self.lengths[-1]
        key = 0
        for length, token in enumerate(reversed(text[max(end - longest, 0) : end]), 1):
            key = key << 32 | token + 1
            if length >= shortest:
                yield length, key


class NGramState(DraftState):
    """An index for each row, empty until the row's first guess."""

    def __init__(self, batch_size: int, lengths: range) -> None:
        self.lengths = lengths
        self.rows = [_Index(lengths) for _ in range(batch_size)]

    @property
    def num_entries(self) -> int:
        """N-grams that are remembered, of all rows."""
        return sum(len(row.places) for row in self.rows)

    def select(self, rows: Sequence[int]) -> None:
        taken: set[int] = set()
        moved = []
        for row in rows:
            moved.append(_Index(self.lengths) if row < 0 else self.rows[row].copy() if row in taken else self.rows[row])
            taken.add(row)
        self.rows = moved

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows[row] = _Index(self.lengths)

    def go_back(self, row: int, length: int) -> None:
        if self.rows[row].end > length + 1:  # a table does not forget one by one
            self.clear([row])


class NGramDrafter(Drafter):
    """Guesses what followed the latest occurrence of the longest suffix of the text that occurred before.

    Theory: summaries, answers from a document, edits and code repeat their prompts and themselves, and a model in a
    loop repeats its output. There a look-up guesses as well as a network at no cost to speak of; elsewhere it often
    finds nothing, and the round is one of standard decoding. It needs no training and serves every target. Longer
    suffixes are tried first, since they are surer; of equally long ones the latest, since it is nearest. A match that
    reaches the end of the text is a loop, and is continued as one.

    What follows a single repeated token is guessed wrong four times out of five, what follows several mostly right. So
    guesses are as many as the match deserves, which saves much where a wider verification costs more.

    Args:
        max_ngram: tokens of the longest suffix that is looked up, at most 32.
        min_ngram: tokens of the shortest; a higher number guesses less often and is right more often.
        guesses_per_token: most guesses for each token of the match; one of `max_ngram` tokens fills the window.

    Source: Saxena 2023, prompt lookup decoding; here over the output too, indexed, and with the latest match.
    """

    def __init__(self, max_ngram: int = 5, min_ngram: int = 1, guesses_per_token: int = 2) -> None:
        super().__init__()
        self.max_ngram = require_int("max_ngram", max_ngram, 1, LONGEST)
        self.min_ngram = require_int("min_ngram", min_ngram, 1, max_ngram)
        self.guesses_per_token = require_int("guesses_per_token", guesses_per_token, 1, MOST_GUESSES)

    def check_target(self, target: LanguageModel) -> None:
        pass  # a text's own tokens are of its target's vocabulary

    def arguments(self) -> dict[str, Any]:
        return {
            "max_ngram": self.max_ngram,
            "min_ngram": self.min_ngram,
            "guesses_per_token": self.guesses_per_token,
        }

    def needs_noise(self, sampling: Sampling) -> bool:
        return False

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> NGramState:
        return NGramState(batch_size, range(self.min_ngram, self.max_ngram + 1))

    def look_up(self, state: NGramState, context: Context, windows: Sequence[int]) -> list[Sequence[int]]:
        """Each row's guesses, at most `windows[b]`; none where nothing is found."""
        # A row that wants no guess may be a vacant one: its text is nobody's.
        settled = context.settled or [len(text) for text in context.texts]
        return [
            index.guess(text, known, window, self.guesses_per_token) if window else ()
            for index, text, known, window in zip(state.rows, context.texts, settled, windows, strict=True)
        ]

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, NGramState)
        return certain(self.look_up(state, context, windows), context.tail.device)


def certain(found: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The draft of guesses that are known on the host."""
    lengths = [len(row) for row in found]
    width = max(lengths)
    if min(lengths) == width:
        return Draft(torch.tensor(found, dtype=torch.long, device=device).view(len(found), width))
    # Guesses and lengths go to the device in one piece.
    padded = [[*row, *[0] * (width - len(row)), len(row)] for row in found]
    packed = torch.tensor(padded, device=device)
    return Draft(packed[:, :-1], packed[:, -1])
