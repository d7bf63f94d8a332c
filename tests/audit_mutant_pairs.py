"""Drafters that do not draw from what they report or with what they are given, and loops that mix up their numbers.

An audit must find them out as it does the rules of `audit_mutants`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_specdec.decoding.batch import Batch
from lightning_specdec.decoding.rows import Row
from lightning_specdec.decoding.verification import Verification
from lightning_specdec.drafters import Draft, DraftRequest, DraftState, ModelDrafter
from lightning_specdec.rules import RejectionSampling, Sampling


class HotterThanReported(ModelDrafter):
    """Reports its probabilities at another temperature than it draws at."""

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, sampling)
        assert draft.logits is not None
        told = replace(sampling, temperature=0.7 * sampling.temperature)
        return replace(draft, probs=told.probs(draft.logits))


class ArgmaxReportedSoft(ModelDrafter):
    """Proposes its argmax and reports its softmax, as a well-known library did."""

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, Sampling(0.0))
        assert draft.logits is not None
        return Draft(draft.tokens, draft.lengths, sampling.probs(draft.logits))


class ReportsTheFirstAgain(ModelDrafter):
    """Reports the first guess's distribution for all of them."""

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        assert draft.probs is not None
        return replace(draft, probs=draft.probs[:, :1].expand_as(draft.probs))


class OneNumberForAll(ModelDrafter):
    """Draws all guesses of a round with the first one's number."""

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        assert request.uniform is not None
        request = replace(request, uniform=request.uniform[:, :1].expand_as(request.uniform))
        return super().propose(state, request, windows, sampling)


class NumbersOfItsOwn(ModelDrafter):
    """Draws guesses from what it reports, with random numbers that nobody gave it."""

    own = torch.Generator().manual_seed(0)

    def numbers(self, uniform: Tensor) -> Tensor:
        """What it draws with in the place of those that it was given."""
        return torch.rand(uniform.shape, generator=self.own)

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        if request.uniform is not None:
            request = replace(request, uniform=self.numbers(request.uniform))
        return super().propose(state, request, windows, sampling)


class SeedOfItsOwn(NumbersOfItsOwn):
    """Draws with the same numbers in every round."""

    def numbers(self, uniform: Tensor) -> Tensor:
        return torch.rand(uniform.shape, generator=torch.Generator().manual_seed(0))


class CountsItsCalls(NumbersOfItsOwn):
    """Draws with numbers that move by how often it was asked."""

    calls = 0

    def numbers(self, uniform: Tensor) -> Tensor:
        self.calls += 1
        return (uniform + 0.1 * self.calls) % 1


NO_FUNCTIONS: dict[str, type[ModelDrafter]] = {
    "random numbers of its own": NumbersOfItsOwn,
    "a seed of its own": SeedOfItsOwn,
    "a hidden state": CountsItsCalls,
}
DRAFTERS: dict[str, type[ModelDrafter]] = {
    "draft probabilities at another temperature": HotterThanReported,
    "argmax proposed with soft probabilities": ArgmaxReportedSoft,
}
MORE_DRAFTERS: dict[str, type[ModelDrafter]] = {
    "first distribution reported for all": ReportsTheFirstAgain,
    "one number for all guesses": OneNumberForAll,
}


def _logits_of_the_place_before(
    self: Verification, rows: Any, draft: Draft, logits: Tensor, *rest: Any
) -> Tensor:
    shifted_logits = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
    return _VERDICT(self, rows, draft, shifted_logits, *rest)


def _logits_of_another_row(
    self: Verification, rows: Any, draft: Draft, logits: Tensor, *rest: Any
) -> Tensor:
    return _VERDICT(self, rows, draft, logits.roll(1, dims=0), *rest)


def _lengths_forgotten(self: RejectionSampling, draft: Draft, *rest: Any) -> Any:
    return _JUDGE(self, replace(draft, lengths=None), *rest)


def _eos_not_seen(self: Row, *arguments: Any, **rest: Any) -> list[int]:
    eos, self.eos = self.eos, frozenset()
    try:
        return _COMMIT(self, *arguments, **rest)
    finally:
        self.eos = eos


def _eos_not_seen_at_the_end(
    self: Row, drafted: list[int], num_accepted: int, *rest: Any, **more: Any
) -> Any:
    """A correction or bonus token that is EOS does not end its row."""
    if any(token in self.eos for token in drafted[:num_accepted]):
        return _COMMIT(self, drafted, num_accepted, *rest, **more)
    return _eos_not_seen(self, drafted, num_accepted, *rest, **more)


def _noise_of_the_place_before(self: Batch, num_positions: int) -> Tensor | None:
    noise = _NOISE(self, num_positions)
    return None if noise is None else noise[:, :1].expand_as(noise)


def _forgets_to_go_back(self: Batch) -> list[list[int]]:
    """The target is told that its state is as long as the text, guesses that were rejected included."""
    state, texts = self.target_state, [row.text for row in self.rows]
    starts = [
        min(length, len(text) - 1) for length, text in zip(state.consumed, texts, strict=True)
    ]
    if min(state.consumed) > 0:
        state.commit(starts)
        return [text[-1:] for text in texts]
    return _TRUNCATE(self)


_VERDICT = Verification.judge
_JUDGE = RejectionSampling.judge
_COMMIT = Row.commit
_NOISE = Batch.next_noise
_TRUNCATE = Batch.truncate_target
LOOPS: dict[str, Callable[[], Any]] = {
    "logits of the place before": lambda: mock.patch.object(
        Verification, "judge", _logits_of_the_place_before
    ),
    "logits of another row": lambda: mock.patch.object(
        Verification, "judge", _logits_of_another_row
    ),
    "one round's numbers for all its places": lambda: mock.patch.object(
        Batch, "next_noise", _noise_of_the_place_before
    ),
    "the target's state does not go back": lambda: mock.patch.object(
        Batch, "truncate_target", _forgets_to_go_back
    ),
}
ENDS: dict[str, Callable[[], Any]] = {
    "EOS is not seen": lambda: mock.patch.object(Row, "commit", _eos_not_seen),
    "EOS is not seen where it ends a round": lambda: mock.patch.object(
        Row, "commit", _eos_not_seen_at_the_end
    ),
    "lengths of unequal drafts are forgotten": lambda: mock.patch.object(
        RejectionSampling, "judge", _lengths_forgotten
    ),
}
"""What an audit of `RejectionSampling` must find out at its default settings."""
