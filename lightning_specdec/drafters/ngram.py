"""Prompt lookup: propose the tokens that followed the last occurrence of the current suffix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


class _NGramIndex:
    """The n-grams of one row's text, and where each last occurred.

    An n-gram's key is one integer, with its last token in the highest bits. Tuples as keys would
    keep the garbage collector busy.
    """

    def __init__(self, settings: NGramSettings) -> None:
        self.settings = settings
        self.continuations: dict[int, int] = {}
        """For each n-gram, the position after its last occurrence. The n-grams at the end of the
        text are not included, because nothing follows them yet."""
        self.next_end = 1
        """All n-grams that end before this position are included."""

    def propose(self, text: Sequence[int], num_settled: int, window: int) -> Sequence[int]:
        """Index the text's new tokens, and copy up to `window` tokens from after the match.

        Args:
            num_settled: final tokens of the text; n-grams that end later are not indexed.

        Returns:
            The draft tokens; none if no suffix of the text has occurred before.
        """
        assert self.next_end <= len(text), "the text became shorter: its row was not cleared"
        for end in range(self.next_end, num_settled):
            for _, key in self._ngrams(text, end):
                self.continuations[key] = end
        self.next_end = max(self.next_end, num_settled)

        match_length, continuation = self._longest_match(text)
        if match_length == 0:
            return ()

        # Short matches are often wrong, so they propose fewer tokens.
        if match_length < self.settings.max_ngram:
            window = min(window, self.settings.tokens_per_match * match_length)
        tokens = list(text[continuation : continuation + window])

        # If the text ends within the window, the match overlaps the suffix: the text repeats
        # itself with this period, and so does the draft.
        while len(tokens) < window:
            num_missing = window - len(tokens)
            tokens += tokens[:num_missing]
        return tokens

    def _longest_match(self, text: Sequence[int]) -> tuple[int, int]:
        """Length of the longest suffix that has occurred before, and the position after it there.

        Both are 0 without a match.
        """
        match_length = 0
        continuation = 0
        for length, key in self._ngrams(text, len(text)):
            position = self.continuations.get(key)
            if position is None:
                # All longer suffixes end with this one, so they have not occurred either.
                break
            match_length = length
            continuation = position
        return match_length, continuation

    def _ngrams(self, text: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Lengths and keys of the n-grams that end before position `end`, shortest first."""
        start = max(end - self.settings.max_ngram, 0)
        last_tokens = text[start:end]
        key = 0
        for length, token in enumerate(reversed(last_tokens), start=1):
            # One more token, as a number above 0, so that n-grams of all lengths differ.
            key = (key << 32) | (token + 1)
            if length >= self.settings.min_ngram:
                yield length, key


class NGramState(DraftState):
    """An index for each row."""

    def truncate_row(self, row: int, length: int) -> None:
        # An index cannot forget single n-grams, so the row is indexed again. This is not necessary
        # if all indexed n-grams end within `length`: only the tokens after them change.
        if self.rows[row].next_end > length + 1:
            self.clear([row])


class LookupDrafter(Drafter, ABC):
    """Copies tokens from texts on the host. Drafts are deterministic, and no network runs."""

    def needs_noise(self, sampling: Sampling) -> bool:
        return False

    def look_up(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
    ) -> list[Sequence[int]]:
        """Each row's draft tokens on the host: at most `windows[b]`, none without a match."""
        final_lengths = request.committed or [len(text) for text in request.texts]
        draft_tokens: list[Sequence[int]] = []
        for row, (num_final, window) in enumerate(zip(final_lengths, windows, strict=True)):
            if window:
                draft_tokens.append(self.look_up_row(state, request, row, num_final, window))
            else:
                # Such a row may be vacant, and its text must not be indexed.
                draft_tokens.append(())
        return draft_tokens

    @abstractmethod
    def look_up_row(
        self,
        state: Any,
        request: DraftRequest,
        row: int,
        num_final: int,
        window: int,
    ) -> Sequence[int]:
        """The draft tokens of one row, up to `window`.

        Args:
            state: as of `look_up`, like `request`.
            row: its index in the batch.
            num_final: tokens of its text that no round can remove.
            window: at least 1.
        """

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft_tokens = self.look_up(state, request, windows)
        return certain(draft_tokens, request.last_two_tokens.device)


class NGramDrafter(LookupDrafter):
    """Copies the tokens that followed the last occurrence of the text's longest known suffix.

    Saxena 2023, "Prompt lookup decoding". Needs no model. It searches prompt and output. Short
    matches are wrong most of the time, so they propose few tokens.

    Raises:
        ValueError: a setting is wrong, or `min_ngram` exceeds `max_ngram`.
    """

    Settings = NGramSettings
    settings: NGramSettings

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> NGramState:
        return NGramState(batch_size, lambda: _NGramIndex(self.settings))

    def look_up_row(
        self,
        state: Any,
        request: DraftRequest,
        row: int,
        num_final: int,
        window: int,
    ) -> Sequence[int]:
        index: _NGramIndex = state.rows[row]
        return index.propose(request.texts[row], num_final, window)


def certain(draft_tokens: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The deterministic draft of these rows of tokens on the host."""
    lengths = [len(row) for row in draft_tokens]
    if min(lengths) == max(lengths):
        return Draft(torch.tensor(draft_tokens, dtype=torch.long, device=device))

    # Tokens and lengths go to the device in one copy.
    lengths_and_tokens = [[len(row), *row] for row in draft_tokens]
    columns, _ = pad(lengths_and_tokens, device)
    return Draft(columns[:, 1:], columns[:, 0])
