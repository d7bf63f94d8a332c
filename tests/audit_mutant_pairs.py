"""Drafters that do not draw from what they report, or with the numbers that they receive, and loops
that mix up their numbers.

An audit must find them as it does the rules of `audit_mutants`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_specdec.decoding.batch import Batch
from lightning_specdec.decoding.requests import Request
from lightning_specdec.decoding.verification import Verification
from lightning_specdec.drafters import Draft, DraftRequest, DraftState, ModelDrafter
from lightning_specdec.rules import RejectionSampling, Sampling

# The correct functions, which the mistakes below replace and call.
_judge_round = Verification.judge
_judge = RejectionSampling.judge
_commit = Request.commit
_next_noise = Batch.next_noise
_truncate_target = Batch.truncate_target


class HotterThanReported(ModelDrafter):
    """Reports its probabilities at another temperature than it draws at."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, sampling)
        assert draft.logits is not None
        reported_sampling = replace(sampling, temperature=0.7 * sampling.temperature)
        return replace(draft, probs=reported_sampling.probs(draft.logits))


class ArgmaxReportedSoft(ModelDrafter):
    """Proposes its argmax and reports its softmax, as a well-known library did."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, Sampling(0.0))
        assert draft.logits is not None
        return Draft(draft.tokens, draft.lengths, sampling.probs(draft.logits))


class ReportsTheFirstAgain(ModelDrafter):
    """Reports the first draft token's distribution for all of them."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        assert draft.probs is not None
        return replace(draft, probs=draft.probs[:, :1].expand_as(draft.probs))


class OneNumberForAll(ModelDrafter):
    """Draws all draft tokens of a round with the number of the first."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        assert request.uniform is not None
        request = replace(request, uniform=request.uniform[:, :1].expand_as(request.uniform))
        return super().propose(state, request, windows, sampling)


class PrivateNumbers(ModelDrafter):
    """Draws from what it reports, but with random numbers that were not passed to it."""

    generator = torch.Generator().manual_seed(0)

    def numbers(self, uniform: Tensor) -> Tensor:
        """The numbers to draw with instead of those that were passed."""
        return torch.rand(uniform.shape, generator=self.generator)

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        if request.uniform is not None:
            request = replace(request, uniform=self.numbers(request.uniform))
        return super().propose(state, request, windows, sampling)


class PrivateSeed(PrivateNumbers):
    """Draws with the same numbers in every round."""

    def numbers(self, uniform: Tensor) -> Tensor:
        return torch.rand(uniform.shape, generator=torch.Generator().manual_seed(0))


class CountsItsCalls(PrivateNumbers):
    """Draws with numbers that move with each call."""

    num_calls = 0

    def numbers(self, uniform: Tensor) -> Tensor:
        self.num_calls += 1
        return (uniform + 0.1 * self.num_calls) % 1


NO_FUNCTIONS: dict[str, type[ModelDrafter]] = {
    "private random numbers": PrivateNumbers,
    "a private seed": PrivateSeed,
    "a hidden state": CountsItsCalls,
}
"""Drafters that are not functions of the numbers that they receive."""
DRAFTERS: dict[str, type[ModelDrafter]] = {
    "draft probabilities at another temperature": HotterThanReported,
    "argmax proposed with soft probabilities": ArgmaxReportedSoft,
}
MORE_DRAFTERS: dict[str, type[ModelDrafter]] = {
    "first distribution reported for all": ReportsTheFirstAgain,
    "one number for all draft tokens": OneNumberForAll,
}
"""Others, for fewer seeds."""


def _logits_of_previous_position(
    self: Verification,
    rows: Any,
    draft: Draft,
    logits: Tensor,
    *arguments: Any,
) -> Tensor:
    shifted_logits = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
    return _judge_round(self, rows, draft, shifted_logits, *arguments)


def _logits_of_another_row(
    self: Verification,
    rows: Any,
    draft: Draft,
    logits: Tensor,
    *arguments: Any,
) -> Tensor:
    return _judge_round(self, rows, draft, logits.roll(1, dims=0), *arguments)


def _noise_of_first_position(self: Batch, num_positions: int) -> Tensor | None:
    noise = _next_noise(self, num_positions)
    return None if noise is None else noise[:, :1].expand_as(noise)


def _keep_rejected_tokens(self: Batch) -> list[list[int]]:
    """Commit the target's state up to the length of the text, rejected draft tokens included."""
    state = self.target_state
    if min(state.consumed) <= 0:
        return _truncate_target(self)
    lengths = []
    last_tokens = []
    for row, num_consumed in zip(self.rows, state.consumed, strict=True):
        lengths.append(min(num_consumed, len(row.text) - 1))
        last_tokens.append(row.text[-1:])
    state.commit(lengths)
    return last_tokens


LOOPS: dict[str, Callable[[], Any]] = {
    "logits of the previous position": partial(
        mock.patch.object, Verification, "judge", _logits_of_previous_position
    ),
    "logits of another row": partial(
        mock.patch.object, Verification, "judge", _logits_of_another_row
    ),
    "one round's numbers for all its positions": partial(
        mock.patch.object, Batch, "next_noise", _noise_of_first_position
    ),
    "the target's state does not roll back": partial(
        mock.patch.object, Batch, "truncate_target", _keep_rejected_tokens
    ),
}
"""Context managers, each of which breaks the loop."""


def _commit_without_eos(self: Request, *arguments: Any, **options: Any) -> list[int]:
    """No EOS ends a row."""
    eos = self.eos
    self.eos = frozenset()
    try:
        return _commit(self, *arguments, **options)
    finally:
        self.eos = eos


def _commit_without_eos_at_the_end(
    self: Request,
    drafted: list[int],
    num_accepted: int,
    *arguments: Any,
    **options: Any,
) -> Any:
    """A correction or bonus token that is EOS does not end its row."""
    if any(token in self.eos for token in drafted[:num_accepted]):
        return _commit(self, drafted, num_accepted, *arguments, **options)
    return _commit_without_eos(self, drafted, num_accepted, *arguments, **options)


def _judge_without_lengths(self: RejectionSampling, draft: Draft, *arguments: Any) -> Any:
    return _judge(self, replace(draft, lengths=None), *arguments)


ENDS: dict[str, Callable[[], Any]] = {
    "EOS is not seen": partial(mock.patch.object, Request, "commit", _commit_without_eos),
    "EOS is not seen if it ends a round": partial(
        mock.patch.object, Request, "commit", _commit_without_eos_at_the_end
    ),
    "lengths of unequal drafts are forgotten": partial(
        mock.patch.object, RejectionSampling, "judge", _judge_without_lengths
    ),
}
"""What an audit of `RejectionSampling` must find at its default settings."""
