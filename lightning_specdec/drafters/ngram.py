"""Prompt lookup: propose the tokens that followed the last occurrence of the text's current suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.layout import pad
from lightning_specdec.rules import Draft, Sampling


@dataclass(frozen=True)
class NGramSettings(Settings):
    max_ngram: int = setting(5, "longest suffix to look up, tried first", minimum=1, maximum=32)
    min_ngram: int = setting(
        1, "shortest suffix to look up; longer ones match less often and more reliably", minimum=1
    )
    tokens_per_match: int = setting(
        2,
        "draft tokens for each matched token; a match of max_ngram tokens fills the window",
        minimum=1,
        maximum=1024,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram ({self.max_ngram}), got {self.min_ngram}"
            )


class _Index:
    """The place behind the latest occurrence of each n-gram of one row's text, except of those that end it.

    An n-gram's key is one integer, its last token first: integers are no work for the garbage collector.
    """

    def __init__(self, settings: NGramSettings) -> None:
        self.settings = settings
        self.places: dict[int, int] = {}
        self.end = 1
        """The n-grams that end before this place of the text are in the table."""

    def propose(self, text: Sequence[int], num_settled: int, window: int) -> Sequence[int]:
        """Take in the text's new tokens, and copy up to `window` from behind the match; none where there is none."""
        assert self.end <= len(text), "the text became shorter: its row was not cleared"
        for end in range(self.end, num_settled):
            for _, key in self._ngrams(text, end):
                self.places[key] = end
        self.end = max(self.end, num_settled)
        matched = behind = 0
        for length, key in self._ngrams(text, len(text)):
            if (found := self.places.get(key)) is None:  # then all longer ones are missing too
                break
            matched, behind = length, found
        if not matched:
            return ()
        if matched < self.settings.max_ngram:
            window = min(window, self.settings.tokens_per_match * matched)
        tokens = list(text[behind : behind + window])
        # A match that reaches the suffix: the text repeats itself with this period, and so does the draft.
        while len(tokens) < window:
            tokens += tokens[: window - len(tokens)]
        return tokens

    def _ngrams(self, text: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Lengths and keys of the n-grams that end there, shorter ones first."""
        shortest, longest = self.settings.min_ngram, self.settings.max_ngram
        key = 0
        for length, token in enumerate(reversed(text[max(end - longest, 0) : end]), 1):
            key = key << 32 | token + 1
            if length >= shortest:
                yield length, key


class NGramState(DraftState):
    """An index for each row."""

    def go_back(self, row: int, length: int) -> None:
        if self.rows[row].end > length + 1:  # a table does not forget one by one
            self.clear([row])


class NGramDrafter(Drafter):
    """Copies the tokens after the latest occurrence of the text's longest known suffix (Saxena 2023); needs no model.

    It searches prompt and output. Short matches are wrong most of the time, so they propose few tokens.

    Raises:
        ValueError: a setting is wrong, or `min_ngram` exceeds `max_ngram`.
    """

    Settings = NGramSettings
    settings: NGramSettings

    def needs_noise(self, sampling: Sampling) -> bool:
        return False

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> NGramState:
        return NGramState(batch_size, lambda: _Index(self.settings))

    def look_up(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int]
    ) -> list[Sequence[int]]:
        """Each row's draft tokens as lists on the host, at most `windows[b]`; empty without a match."""
        # A row that wants no draft may be a vacant one: its text is nobody's.
        settled = request.settled or [len(text) for text in request.texts]
        return [
            index.propose(text, known, window) if window else ()
            for index, text, known, window in zip(
                state.rows, request.texts, settled, windows, strict=True
            )
        ]

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        return certain(self.look_up(state, request, windows), request.tail.device)


def certain(found: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The draft of tokens that are known on the host."""
    if len(set(map(len, found))) == 1:
        return Draft(
            torch.tensor(found, dtype=torch.long, device=device).view(len(found), len(found[0]))
        )
    # Tokens and lengths go to the device in one piece.
    packed, _ = pad([[len(row), *row] for row in found], device)
    return Draft(packed[:, 1:], packed[:, 0])
