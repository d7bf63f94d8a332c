"""Prompt lookup: propose the tokens that followed an earlier occurrence of the current suffix."""

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


MOST_COMPARED = 16
"""How many tokens before an n-gram decide between its occurrences."""
MOST_OCCURRENCES = 4
"""Of an n-gram, as many of its first occurrences and as many of its last ones are compared."""


class _NGramIndex:
    """The n-grams of one row's text, and where each of them occurred.

    Of several occurrences, the one with the longest equal text before it is copied: an answer that
    copies a part of the prompt goes on in this part. If these are equal as well, the first one in
    the prompt is copied, since copies begin at the beginning; but if the output has the n-gram too,
    the last one.

    An n-gram's key is one integer, with its last token in the highest bits. Tuples as keys would
    keep the garbage collector busy.
    """

    def __init__(self, settings: NGramSettings) -> None:
        self.settings = settings
        self.prompt_length = 0
        self.continuations: dict[int, int] = {}
        """For each n-gram, the position after the occurrence that is copied unless another one has
        a longer equal text before it. The n-grams at the end of the text are not included, because
        nothing follows them yet."""
        self.occurrences: dict[int, list[int]] = {}
        """For each n-gram of `max_ngram` tokens, the positions after some of its occurrences."""
        self.next_end = 1
        """All n-grams that end before this position are included."""

    def propose(
        self,
        text: Sequence[int],
        prompt_length: int,
        num_settled: int,
        window: int,
    ) -> Sequence[int]:
        """Index the text's new tokens, and copy up to `window` tokens from after the match.

        Args:
            prompt_length: tokens at the start of the text that were not generated.
            num_settled: final tokens of the text; n-grams that end later are not indexed.

        Returns:
            The draft tokens; none if no suffix of the text has occurred before.
        """
        assert self.next_end <= len(text), "the text became shorter: its row was not cleared"
        if prompt_length != self.prompt_length:
            # The next turn of a conversation, whose prompt includes this text.
            self._start_over(prompt_length)
        for end in range(self.next_end, num_settled):
            self._index(text, end)
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

    def _start_over(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.continuations.clear()
        self.occurrences.clear()
        self.next_end = 1

    def _index(self, text: Sequence[int], end: int) -> None:
        """Include the n-grams that end before position `end`."""
        for length, key in self._ngrams(text, end):
            if end <= self.prompt_length:
                self.continuations.setdefault(key, end)
            else:
                self.continuations[key] = end
            if length == self.settings.max_ngram:
                positions = self.occurrences.setdefault(key, [])
                positions.append(end)
                if len(positions) > 2 * MOST_OCCURRENCES:
                    del positions[MOST_OCCURRENCES]

    def _longest_match(self, text: Sequence[int]) -> tuple[int, int]:
        """Length of the longest suffix that has occurred before, and the position after it there.

        Both are 0 without a match. A suffix longer than `max_ngram` counts as one of that length.
        """
        match_length = 0
        match_key = 0
        for length, key in self._ngrams(text, len(text)):
            if key not in self.continuations:
                # All longer suffixes end with this one, so they have not occurred either.
                break
            match_length = length
            match_key = key
        if match_length == 0:
            return 0, 0
        if match_length < self.settings.max_ngram:
            return match_length, self.continuations[match_key]
        return match_length, self._best_occurrence(text, match_key)

    def _best_occurrence(self, text: Sequence[int], key: int) -> int:
        """The position after the occurrence with the longest equal text before it."""
        best_position = self.continuations[key]
        positions = self.occurrences[key]
        if len(positions) == 1:
            return best_position

        longest = self._num_equal_before(text, best_position)
        for position in positions:
            num_equal = self._num_equal_before(text, position)
            if num_equal > longest:
                best_position = position
                longest = num_equal
        return best_position

    def _num_equal_before(self, text: Sequence[int], position: int) -> int:
        """How many tokens before the n-gram that ends at `position` equal those before the last."""
        start = position - self.settings.max_ngram
        last_start = len(text) - self.settings.max_ngram
        num_compared = min(MOST_COMPARED, start)
        tokens_before = text[start - num_compared : start]
        tokens_before_last = text[last_start - num_compared : last_start]

        num_equal = 0
        pairs = zip(reversed(tokens_before), reversed(tokens_before_last), strict=True)
        for token, other_token in pairs:
            if token != other_token:
                break
            num_equal += 1
        return num_equal

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
    """Copies the tokens that followed an earlier occurrence of the text's longest known suffix.

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
        prompt_length = 0
        if request.prompt_lengths is not None:
            prompt_length = request.prompt_lengths[row]
        return index.propose(request.texts[row], prompt_length, num_final, window)


def certain(draft_tokens: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The deterministic draft of these rows of tokens on the host."""
    lengths = [len(row) for row in draft_tokens]
    if min(lengths) == max(lengths):
        return Draft(torch.tensor(draft_tokens, dtype=torch.long, device=device))

    # Tokens and lengths go to the device in one copy.
    lengths_and_tokens = [[len(row), *row] for row in draft_tokens]
    columns, _ = pad(lengths_and_tokens, device)
    return Draft(columns[:, 1:], columns[:, 0])
