"""Prompt lookup before another drafter, which drafts for the rows where nothing is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from lightning_specdec.config.settings import setting
from lightning_specdec.drafters.base import (
    Drafter,
    DraftRequest,
    DraftState,
    JointState,
    TargetContext,
)
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.drafters.ngram import NGramDrafter, NGramSettings, certain
from lightning_specdec.models import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling


class FallbackState(JointState):
    def __init__(
        self, lookup: DraftState, fallback: DraftState, context: TargetContext | None
    ) -> None:
        super().__init__(lookup, fallback)
        self.lookup, self.fallback, self.context = lookup, fallback, context


@dataclass(frozen=True)
class FallbackSettings(NGramSettings):
    """Settings of `NGramWithFallback`: those of its lookup."""

    # A continuation of a single matched token is right less often than a trained draft (docs/log.md).
    min_ngram: int = setting(2, "shortest suffix to look up", minimum=1)
    min_confidence: float | None = setting(
        None, "that of the trained draft; default: its own", minimum=0, maximum=1
    )


class NGramWithFallback(Drafter):
    """Drafts by prompt lookup, and with another drafter for the rows where nothing is found.

    Found tokens are not compared with the other drafter's, so it pays to look up long matches only: `min_ngram` of 2
    or 3. A round in which every row finds something costs no pass of a network.

    Args:
        lookup: asked first.
        fallback: any drafter.

    Raises:
        ValueError: these are no such drafters.
    """

    Settings = FallbackSettings

    def __init__(self, lookup: NGramDrafter, fallback: Drafter) -> None:
        if not isinstance(lookup, NGramDrafter) or not isinstance(fallback, Drafter):
            given = f"{type(lookup).__name__} and {type(fallback).__name__}"
            raise ValueError(
                f"lookup must be an NGramDrafter and fallback a Drafter, got {given}: wrap a model in one"
            )
        super().__init__(**lookup.settings.to_dict())
        self.lookup, self.fallback, self.inside_target = lookup, fallback, fallback.inside_target

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """As `Drafter.for_target`; `draft` may also be a drafter."""
        if isinstance(draft, NGramWithFallback):  # another lookup before the same draft
            draft = draft.fallback
        fallback = (
            draft if isinstance(draft, Drafter) else CrossVocabulary.for_target(target, draft)
        )
        if (least := settings.pop("min_confidence", None)) is not None:
            if fallback.free != "min_confidence":
                raise ValueError(f"{type(fallback).__name__} has no min_confidence: drop it")
            fallback = fallback.at(least)
        drafter = cls(sure_lookup(**settings), fallback)
        drafter.check_target(target)
        return drafter

    @property
    def max_positions(self) -> int | None:
        return self.fallback.max_positions

    def check_target(self, target: LanguageModel) -> None:
        self.fallback.check_target(target)

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.fallback.features(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.fallback.needs_noise(sampling)

    def fused(self, target: LanguageModel | None = None) -> NGramWithFallback:
        return NGramWithFallback(self.lookup, self.fallback.fused(target))

    def arguments(self) -> dict[str, Any]:
        self.fallback.arguments()  # one that a checkpoint cannot keep says so
        return {"lookup": self.lookup, "fallback": self.fallback}

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> FallbackState:
        lookup = self.lookup.init_state(batch_size, max_length, context)
        return FallbackState(
            lookup, self.fallback.init_state(batch_size, max_length, context), context
        )

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        found = self.lookup.look_up(state.lookup, request, windows)
        if not any(found):
            return self.fallback.propose(state.fallback, request, windows, sampling)
        copied = certain(found, request.tail.device)
        wanted = [0 if tokens else window for tokens, window in zip(found, windows, strict=True)]
        if not any(wanted):
            return copied
        other = self.fallback.propose(state.fallback, request, wanted, sampling)
        rows = [row for row, tokens in enumerate(found) if tokens]
        for row in rows:  # the target reads other tokens there than the fallback drafted
            state.fallback.go_back(row, len(request.texts[row]))
        exit_states = other.exit_states
        if exit_states is not None:  # of copied rows only those of unread text are of use
            assert state.context is not None
            consumed, lengths = state.context.state.consumed, list(exit_states.lengths)
            for row in rows:
                lengths[row] = min(lengths[row], len(request.texts[row]) - consumed[row])
            exit_states = replace(exit_states, lengths=lengths)
        return _joined(copied, other, exit_states)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        self.fallback.observe(state.fallback, output, num_accepted)


def sure_lookup(**settings: Any) -> NGramDrafter:
    """A lookup to go before a draft, which looks up long matches alone."""
    if settings.get("max_ngram") == 1:  # less than the default of the shortest one
        settings = {"min_ngram": 1, **settings}
    return NGramDrafter(**{"min_ngram": FallbackSettings.min_ngram, **settings})


def _joined(copied: Draft, other: Draft, exit_states: ExitStates | None) -> Draft:
    """For each row the one draft or the other: `copied` has no tokens for the rows that are the other's."""
    assert copied.lengths is not None, "it has tokens for some rows and none for others"
    width = max(copied.tokens.shape[1], other.tokens.shape[1])
    found = (copied.lengths > 0)[:, None]
    copies, others = (
        pad(draft.tokens, (0, width - draft.tokens.shape[1])) for draft in (copied, other)
    )
    lengths = (
        torch.full_like(copied.lengths, other.tokens.shape[1])
        if other.lengths is None
        else other.lengths
    )
    probs = other.probs
    if probs is not None:
        probs = pad(probs, (0, 0, 0, width - probs.shape[1]))
        one_hot = torch.zeros_like(probs).scatter_(-1, copies[..., None], 1.0)
        probs = torch.where(found[..., None], one_hot, probs)
    return Draft(
        torch.where(found, copies, others),
        torch.where(found[:, 0], copied.lengths, lengths),
        probs,
        num_calls=other.num_calls,
        exit_states=exit_states,
    )
