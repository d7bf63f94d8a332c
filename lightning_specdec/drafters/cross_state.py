"""What a draft with another vocabulary remembers: each row's text in its own tokens, and how far it has read them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.drafters.base import DraftState
from lightning_specdec.models import LanguageModel
from lightning_specdec.text.translation import TranslatedText, Translation


class _Row:
    """One row's text in the draft's tokens, and how far the draft's state agrees with it.

    Places are counted from the text's beginning, in the draft's tokens.
    """

    def __init__(self, text: TranslatedText) -> None:
        self.text = text
        self.waiting: list[int] = []
        """Tokens behind the text's own that the state has read, and that the next look at the text may change."""
        self.num_kept = 0
        """Guesses of the last round that were kept and that the state has read."""
        self.num_right = 0
        """Leading tokens that the state, if it has read so many, has read as they are now."""
        self.first = 0
        """Where the part begins that the draft looks at: further on, where a text outgrows the draft's context."""

    def copy(self) -> _Row:
        """Another one, which goes on by itself."""
        other = _Row(self.text.copy())
        other.waiting, other.num_kept = list(self.waiting), self.num_kept
        other.num_right, other.first = self.num_right, self.first
        return other

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.text.tokens) + len(self.waiting)

    def extend(self, text: Sequence[int]) -> None:
        """Take in the target's text as it is now."""
        known, new = len(self.text.tokens), text[self.text.num_covered :]
        pairs = self.text.translation.pairs
        read = [*self.waiting, *(pairs.get(token, -1) for token in new[: self.num_kept])]
        if new:
            self.text.extend(new)
        self.waiting = self.text.waiting()
        now = [*self.text.tokens[known:], *self.waiting]
        same = (i for i, (before, after) in enumerate(zip(read, now, strict=False)) if before != after)
        self.num_right = known + next(same, min(len(read), len(now)))
        self.num_kept = 0

    def go_back(self, num_covered: int) -> None:
        """Forget what lies behind so many of the target's tokens."""
        self.text.go_back(num_covered)
        self.waiting, self.num_kept = [], 0  # the state may have read others in their place

    def begin_prompt(self, num_covered: int) -> None:
        """Another prompt follows, which begins with so many of the target's tokens; it may read like what was read."""
        read = [*self.text.tokens, *self.waiting]
        self.text.begin_prompt(num_covered)
        self.waiting, self.num_kept, self.first = read[len(self.text.tokens) :], 0, 0

    def behind(self, place: int) -> list[int]:
        """The tokens from that place on."""
        num_settled = len(self.text.tokens)
        return [*self.text.tokens[place:], *self.waiting[max(0, place - num_settled) :]]


class CrossDraftState(DraftState):
    """The state of the draft's model, and every row's text in its tokens."""

    def __init__(self, model: LanguageModel, translation: Translation, batch_size: int, capacity: int) -> None:
        self.model, self.translation, self.capacity = model, translation, capacity
        self.model_state = model.init_state(batch_size, capacity)
        self.rows = [self._fresh() for _ in range(batch_size)]
        self.num_fed: list[int] | None = None
        """Each row's guesses that the state has read, until it is known how many of them were kept."""

    def _fresh(self) -> _Row:
        return _Row(TranslatedText(self.translation))

    def select(self, rows: Sequence[int]) -> None:
        self.model_state.select(rows)
        self.rows = [self._fresh() if row < 0 else self.rows[row].copy() for row in rows]
        self.num_fed = None

    def clear(self, rows: Sequence[int]) -> None:
        self.model_state.clear(rows)
        for row in rows:
            self.rows[row] = self._fresh()
            self._drop_guesses(row)

    def _drop_guesses(self, row: int) -> None:
        if self.num_fed is not None:
            self.num_fed[row] = 0

    def go_back(self, row: int, length: int) -> None:
        self.rows[row].go_back(length)
        self._drop_guesses(row)
        if len(self.rows[row].text.tokens) <= self.rows[row].first:
            self.clear([row])

    def resume(self, row: int, length: int) -> None:
        if self.rows[row].first:  # what the draft has read begins further on
            self.model_state.clear([row])
        self.rows[row].begin_prompt(length)

    def observe(self, num_accepted: Sequence[int]) -> None:
        """Learn how many guesses were kept; rounds without any say nothing."""
        if self.num_fed is not None:
            for row, count, fed in zip(self.rows, num_accepted, self.num_fed, strict=True):
                row.num_kept = min(count, fed)
            self.num_fed = None

    def make_room(self, num_guesses: int) -> None:
        """Let every row's text and guesses fit, at the price of reading again what does not.

        A text may have any number of tokens in another vocabulary, so the size of buffers can only be estimated. Where
        the model's own context is too short, a row begins anew with its last half; that depends on the row alone.
        """
        limit = self.model.max_positions
        if limit is not None:
            outgrown = [i for i, row in enumerate(self.rows) if row.length - row.first > limit - limit // 4]
            for i in outgrown:
                self.rows[i].first = self.rows[i].length - limit // 2
            if outgrown:
                self.model_state.clear(outgrown)
        needed = max(row.length - row.first for row in self.rows) + num_guesses
        if needed > self.capacity:
            self.capacity = 2 * needed if limit is None else min(2 * needed, limit)
            self.model_state = self.model.init_state(len(self.rows), self.capacity)

    def unread(self) -> list[list[int]]:
        """Go back to where the state agrees with the text, and give what it has not read: two tokens at the least,
        where there are two, so that shapes seldom change. A state that cannot go back so far reads the text again."""
        state, starts, settled = self.model_state, [], []
        for i, row in enumerate(self.rows):
            start = max(row.first, min(row.num_right, row.first + state.consumed[i], row.length - 2))
            if start - row.first < state.committed[i]:
                state.clear([i])
                start = row.first
            starts.append(start - row.first)
            settled.append(max(0, min(start, len(row.text.tokens) - 2) - row.first))
        state.truncate(starts)
        state.commit([max(pair) for pair in zip(settled, state.committed, strict=True)])
        return [row.behind(row.first + start) for row, start in zip(self.rows, starts, strict=True)]
