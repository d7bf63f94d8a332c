"""What a staged draft remembers, and its guesses of one round as they become known.

Shapes: B rows, K window, N places that one call scores, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Context, DraftState
from lightning_specdec.drafters.early_exit import ExitState
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import ModelDraftState, commit, fit
from lightning_specdec.models import DecodeState, LanguageModel
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class StagedState(DraftState):
    """What the larger stage's model has read, and what the smaller drafter remembers.

    Theory: within a round the smaller drafter sees texts that go on with the larger one's guesses. These are not
    settled: once the target has judged them, both go back to what it kept.

    Args:
        model: what the larger stage scores with.
        larger: the larger stage's own state.
        smaller: the smaller drafter's.
    """

    def __init__(self, model: LanguageModel, larger: ModelDraftState | ExitState, smaller: DraftState) -> None:
        self.model, self.larger, self.smaller = model, larger, smaller
        self.num_own_calls = self.num_smaller_calls = 0
        self.guessed_at: list[int] | None = None
        """Lengths of the texts that were last guessed on, until it is known how many of the guesses were kept."""

    @property
    def num_calls(self) -> list[int]:
        """Passes of each stage's networks so far, smallest stage first."""
        below = self.smaller.num_calls if isinstance(self.smaller, StagedState) else [self.num_smaller_calls]
        return [*below, self.num_own_calls]

    def begin(self, context: Context) -> DecodeState:
        """The larger stage's state, gone back to the texts: the last token at least is not read yet."""
        self._drop_guesses()
        self.guessed_at = [len(text) for text in context.texts]
        if isinstance(self.larger, ExitState):
            return self.larger.begin()
        self.larger.guessed_at, state = self.guessed_at, self.larger.model_state
        starts = [min(read, length - 1) for read, length in zip(state.consumed, self.guessed_at, strict=True)]
        state.truncate(starts)
        commit(state, starts, context)
        return state

    def settle(self, num_accepted: Sequence[int]) -> None:
        """Forget the guesses that were not kept."""
        if self.guessed_at is None:
            return
        if isinstance(self.larger, ModelDraftState):
            self.larger.settle(num_accepted)
        for row, (length, count) in enumerate(zip(self.guessed_at, num_accepted, strict=True)):
            self.smaller.go_back(row, length + count)
        self.guessed_at = None

    def _drop_guesses(self) -> None:
        if self.guessed_at is not None:
            self.settle([0] * len(self.guessed_at))

    def select(self, rows: Sequence[int]) -> None:
        self._drop_guesses()
        self.larger.select(rows)
        self.smaller.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self._drop_guesses()
        self.larger.clear(rows)
        self.smaller.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        self.larger.go_back(row, length)
        self._follow(row, length)

    def resume(self, row: int, length: int) -> None:
        self.larger.resume(row, length)
        self._follow(row, length)

    def _follow(self, row: int, length: int) -> None:
        """The smaller stage goes back too; where the larger one reads the text anew, it has nothing to go on from."""
        if isinstance(self.larger, ModelDraftState) and not self.larger.model_state.consumed[row]:
            self.smaller.clear([row])
        else:
            self.smaller.resume(row, length)


class Window:
    """The larger stage's guesses of one round: texts grow until every row has as many as it wants.

    Args:
        context: what the round began with.
        windows: guesses wanted of each row.
        sampling: how the larger stage draws.
    """

    def __init__(self, context: Context, windows: Sequence[int], sampling: Sampling) -> None:
        self.context, self.windows, self.sampling = context, windows, sampling
        self.texts = [list(text) for text in context.texts]
        self.starts = [len(text) for text in context.texts]
        self.device = context.tail.device
        self.probs: Tensor | None = None
        self.logits: Tensor | None = None

    @property
    def left(self) -> list[int]:
        """How many guesses each row still wants."""
        ends = map(sum, zip(self.starts, self.windows, strict=True))
        return [end - len(text) for end, text in zip(ends, self.texts, strict=True)]

    @property
    def guesses(self) -> list[list[int]]:
        """What has been guessed of each row."""
        return [text[start:] for start, text in zip(self.starts, self.texts, strict=True)]

    def places(self, num_places: int) -> Int[Tensor, "B N"]:
        """The places of the window that each row's next tokens come to; K, which is none, behind its end."""
        done = torch.tensor([[len(row)] for row in self.guesses], device=self.device)
        return (done + torch.arange(num_places, device=self.device)).clamp(max=max(self.windows))

    def uniform(self, places: Int[Tensor, "B N"]) -> Float[Tensor, "B N"] | None:
        """The uniform numbers of these places."""
        numbers = self.context.uniform
        return None if numbers is None else numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def draw(self, logits: Float[Tensor, "B N W"], guesses: Sequence[Sequence[int]]) -> Int[Tensor, "B N"]:
        """The larger stage's own tokens at each row's next places, from its logits behind each of the guesses."""
        logits = fit(logits, self.context.vocab_size)
        if self.sampling.processors:
            texts = [text if left else None for text, left in zip(self.texts, self.left, strict=True)]
            logits = self.sampling.process(logits, texts, guesses, stop_at_impossible=True)
        places = self.places(logits.shape[1])
        tokens, probs = self.sampling.sample_with_probs(logits, self.uniform(places))
        if probs is not None:
            self.probs = self._put(self.probs, places, probs)
        if self.context.wants_logits:
            self.logits = self._put(self.logits, places, logits)
        return tokens.clamp(max=logits.shape[-1] - 1)  # none, where the logits are no numbers: it has to be read

    def extend(self, drawn: Sequence[Sequence[int]], guesses: Sequence[Sequence[int]]) -> list[int]:
        """Each row that wants more goes on with what the larger stage drew, up to and with the first token that was
        guessed otherwise, or the one behind the guesses; gives how many guesses it agreed with."""
        num_agreed = []
        for text, left, own, guessed in zip(self.texts, self.left, drawn, guesses, strict=True):
            differ = (i for i, (token, guess) in enumerate(zip(own, guessed, strict=False)) if token != guess)
            num_agreed.append(next(differ, len(guessed)))
            if left:
                text += own[: num_agreed[-1] + 1]
        return num_agreed

    def _put(self, kept: Tensor | None, places: Tensor, values: Float[Tensor, "B N V"]) -> Float[Tensor, "B K1 V"]:
        """`kept` with these values at their places. What belongs behind a wrong guess is written over in time."""
        num_rows, _, size = values.shape
        if kept is None:
            kept = values.new_zeros(num_rows, max(self.windows) + 1, size)
        kept[torch.arange(num_rows, device=self.device)[:, None], places] = values
        return kept

    def draft(self, num_calls: int) -> Draft:
        """What goes to the target."""
        tokens, lengths = pad(self.guesses, self.device)
        return Draft(
            tokens,
            None if lengths is None else torch.tensor(lengths, device=self.device),
            None if self.probs is None else self.probs[:, :-1],
            None if self.logits is None else self.logits[:, :-1],
            num_calls=num_calls,
        )
