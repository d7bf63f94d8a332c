"""Look-up joined to a trained draft: what the text has said before is copied, and elsewhere the draft guesses.

Theory: whether the look-up finds anything depends on a row's settled text alone, so a row's guesses are those of one
drafter or of the other, drawn from exactly the distribution that is reported: a certain one where they were copied. So
every rule that is lossless with both is lossless with the two of them. A round in which every row finds something
costs no pass of a network; where some do, the trained draft makes its calls for the others, and forgets what it made of
those.

Shapes: B rows, K guesses, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host
from lightning_specdec.drafters.ngram import NGramDrafter, NGramState, certain
from lightning_specdec.models import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

SHORTEST_MATCH = 2
"""Tokens. What followed a single one is right less often than what a trained draft guesses (docs/log.md)."""


class LookupFirstState(DraftState):
    """What both drafters remember; each is told of every row that moves.

    Args:
        host: the target and its state.
    """

    def __init__(self, lookup: NGramState, fallback: DraftState, host: Host | None) -> None:
        self.lookup, self.fallback, self.host = lookup, fallback, host

    def select(self, rows: Sequence[int]) -> None:
        self.lookup.select(rows)
        self.fallback.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.lookup.clear(rows)
        self.fallback.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        self.lookup.go_back(row, length)
        self.fallback.go_back(row, length)

    def resume(self, row: int, length: int) -> None:
        self.lookup.resume(row, length)
        self.fallback.resume(row, length)


class LookupFirstDrafter(Drafter):
    """Guesses what the look-up finds, and with another drafter for the rows for which it finds nothing.

    Theory: where a text repeats itself a look-up is right as often as a network and costs nothing; elsewhere it guesses
    at random. What it finds is not weighed against what the other would have guessed, so it pays to ask it for long
    matches only: `min_ngram` of 2 or 3, where a look-up by itself does best with 1.

    Args:
        lookup: what is asked first.
        fallback: what guesses where that finds nothing: any drafter.

    Raises:
        ValueError: these are no such drafters.
    """

    def __init__(self, lookup: NGramDrafter, fallback: Drafter) -> None:
        super().__init__()
        check_parts(lookup, fallback)
        self.lookup, self.fallback = lookup, fallback

    @property
    def inside_target(self) -> bool:  # type: ignore[override]
        """Whether the fallback works on the target's own state."""
        return self.fallback.inside_target

    @property
    def max_positions(self) -> int | None:
        return self.fallback.max_positions

    def check_target(self, target: LanguageModel) -> None:
        self.lookup.check_target(target)
        self.fallback.check_target(target)

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.fallback.features(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.fallback.needs_noise(sampling)

    def fused(self) -> LookupFirstDrafter:
        return LookupFirstDrafter(self.lookup, self.fallback.fused())

    def arguments(self) -> dict[str, Any]:
        self.fallback.arguments()  # one that a checkpoint cannot keep says so
        return {"lookup": self.lookup, "fallback": self.fallback}

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> LookupFirstState:
        lookup = self.lookup.init_state(batch_size, max_length, host)
        return LookupFirstState(lookup, self.fallback.init_state(batch_size, max_length, host), host)

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, LookupFirstState)
        found = self.lookup.look_up(state.lookup, context, windows)
        if not any(found):
            return self.fallback.propose(state.fallback, context, windows, sampling)
        looked_up = certain(found, context.tail.device)
        wanted = [0 if guesses else window for guesses, window in zip(found, windows, strict=True)]
        if not any(wanted):
            return looked_up
        guessed = self.fallback.propose(state.fallback, replace(context, windows=wanted), wanted, sampling)
        copied = [row for row, guesses in enumerate(found) if guesses]
        for row in copied:  # the target reads other guesses there than the fallback made
            state.fallback.go_back(row, len(context.texts[row]))
        exit_states = guessed.exit_states
        if exit_states is not None:
            assert state.host is not None, "what drafts inside its target was told which that is"
            consumed = state.host.state.consumed
            exit_states = _known(exit_states, {row: len(context.texts[row]) - consumed[row] for row in copied})
        return _joined(looked_up, guessed, exit_states)

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, LookupFirstState)
        self.fallback.observe(state.fallback, output, num_accepted)


def sure_lookup(**arguments: Any) -> NGramDrafter:
    """A look-up to go before a draft: for `SHORTEST_MATCH` tokens at least, where `min_ngram` says no other number.

    Args:
        arguments: those of `NGramDrafter`.
    """
    shortest = 1 if arguments.get("max_ngram") == 1 else SHORTEST_MATCH
    return NGramDrafter(**{"min_ngram": shortest, **arguments})


def check_parts(lookup: object, fallback: object) -> None:
    """Raise ValueError unless these are a look-up and a drafter."""
    for name, given, kind in (("lookup", lookup, NGramDrafter), ("fallback", fallback, Drafter)):
        if not isinstance(given, kind):
            instead = "make it a ModelDrafter" if isinstance(given, LanguageModel) else "give one"
            raise ValueError(f"{name} must be a {kind.__name__}, got a {type(given).__name__}: {instead}")


def _known(exit_states: ExitStates, unread: dict[int, int]) -> ExitStates:
    """What was made of these rows' unread text alone: of its own guesses the target reads none."""
    lengths = [min(length, unread.get(row, length)) for row, length in enumerate(exit_states.lengths)]
    return replace(exit_states, lengths=lengths)


def _joined(looked_up: Draft, guessed: Draft, exit_states: ExitStates | None) -> Draft:
    """For each row the one draft or the other: `looked_up` has no guesses for the rows that are the other's."""
    num_found = looked_up.lengths
    assert num_found is not None, "it has guesses for some rows and none for others"
    width = max(looked_up.tokens.shape[1], guessed.tokens.shape[1])
    found = (num_found > 0)[:, None]
    copies, others = (pad(draft.tokens, (0, width - draft.tokens.shape[1])) for draft in (looked_up, guessed))
    num_guessed = guessed.lengths
    if num_guessed is None:
        num_guessed = torch.full_like(num_found, guessed.tokens.shape[1])
    probs: Tensor | None = guessed.probs
    if probs is not None:
        probs = pad(probs, (0, 0, 0, width - probs.shape[1]))
        sure = torch.zeros_like(probs).scatter_(-1, copies[..., None], 1.0)
        probs = torch.where(found[..., None], sure, probs)
    return Draft(
        torch.where(found, copies, others),
        torch.where(found[:, 0], num_found, num_guessed),
        probs,
        num_calls=guessed.num_calls,
        exit_states=exit_states,
    )
