"""A lookup combined with another drafter, which drafts for the rows without a match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.config.settings import setting
from lightning_specdec.drafters.base import (
    Drafter,
    DraftRequest,
    DraftState,
    JointState,
    TargetContext,
)
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.drafters.ngram import (
    LookupDrafter,
    NGramDrafter,
    NGramSettings,
    certain,
)
from lightning_specdec.drafters.suffix_corpus import SuffixCorpusDrafter, SuffixCorpusSettings
from lightning_specdec.drafters.user_drafts import proposed
from lightning_specdec.models import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling


@dataclass(frozen=True)
class FallbackSettings(NGramSettings):
    """Settings of `NGramWithFallback`: those of its lookup."""

    # The continuation of a single token is right less often than a trained draft (see the log).
    min_ngram: int = setting(2, "shortest suffix to look up", minimum=1)
    min_confidence: float | None = setting(
        None, "that of the trained draft; default: its own", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class SuffixFallbackSettings(SuffixCorpusSettings):
    """Settings of `SuffixCorpusWithFallback`: those of its suffix corpus."""

    # A trained draft is right more often than tokens of which the suffix corpus is not sure.
    min_acceptance: float = setting(
        0.5,
        "end the copied draft where the estimated probability that it is accepted falls below this",
        minimum=0,
        maximum=1,
    )
    min_confidence: float | None = setting(
        None, "that of the trained draft; default: its own", minimum=0, maximum=1
    )


class FallbackState(JointState):
    """The states of the lookup and of the fallback."""

    def __init__(
        self,
        lookup: DraftState,
        fallback: DraftState,
        context: TargetContext | None,
    ) -> None:
        super().__init__(lookup, fallback)
        self.lookup = lookup
        self.fallback = fallback
        self.context = context


class NGramWithFallback(Drafter):
    """Drafts by prompt lookup, and with another drafter for the rows without a match.

    Matches are not compared with the other drafter's tokens, so it pays to look up long matches
    only: `min_ngram` of 2 or 3. A round in which every row has a match runs no network.

    Args:
        lookup: used first: an `NGramDrafter` or `SuffixCorpusDrafter`.
        fallback: any drafter.

    Raises:
        ValueError: the arguments are not such drafters.
    """

    Settings: ClassVar[type[BaseSettings]] = FallbackSettings

    def __init__(self, lookup: LookupDrafter, fallback: Drafter) -> None:
        if not isinstance(lookup, LookupDrafter) or not isinstance(fallback, Drafter):
            kinds = f"{type(lookup).__name__} and {type(fallback).__name__}"
            raise ValueError(
                "lookup must be an NGramDrafter or SuffixCorpusDrafter and fallback a Drafter, "
                f"got {kinds}: wrap a model in one"
            )
        super().__init__()
        self.settings = lookup.settings
        self.lookup = lookup
        self.fallback = fallback
        self.inside_target = fallback.inside_target

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """As `Drafter.for_target`; `draft` may also be a drafter."""
        if isinstance(draft, NGramWithFallback):
            # Replaces its lookup.
            fallback = draft.fallback
        elif isinstance(draft, Drafter):
            fallback = draft
        else:
            fallback = CrossVocabulary.for_target(target, draft)

        min_confidence = settings.pop("min_confidence", None)
        if min_confidence is not None:
            if fallback.free != "min_confidence":
                raise ValueError(f"{type(fallback).__name__} has no min_confidence: drop it")
            fallback = fallback.at(min_confidence)

        drafter = cls(cls.first_stage(**settings), fallback)
        drafter.check_target(target)
        return drafter

    @classmethod
    def first_stage(cls, **settings: Any) -> LookupDrafter:
        """The lookup with these settings; by default it looks up long matches only."""
        lookup_settings = {"min_ngram": FallbackSettings.min_ngram}
        if settings.get("max_ngram") == 1:
            # The default of min_ngram would exceed it.
            lookup_settings["min_ngram"] = 1
        lookup_settings.update(settings)
        return NGramDrafter(**lookup_settings)

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

    def fused(self, target: LanguageModel | None = None) -> NGramWithFallback:
        return type(self)(self.lookup, self.fallback.fused(target))

    def fresh(self) -> NGramWithFallback:
        return type(self)(self.lookup.fresh(), self.fallback.fresh())

    def arguments(self) -> dict[str, Any]:
        # Raises ValueError if a checkpoint cannot store the lookup or the fallback.
        self.lookup.arguments()
        self.fallback.arguments()
        return {"lookup": self.lookup, "fallback": self.fallback}

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> FallbackState:
        lookup = self.lookup.init_state(batch_size, max_length, context)
        fallback = self.fallback.init_state(batch_size, max_length, context)
        return FallbackState(lookup, fallback, context)

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        matches = self.lookup.look_up(state.lookup, request, windows)
        matched_rows = [row for row, tokens in enumerate(matches) if tokens]
        copied = [bool(tokens) for tokens in matches]

        # The fallback drafts for the rows without a match.
        fallback_windows = list(windows)
        if request.fallback_windows is not None:
            fallback_windows = list(map(min, windows, request.fallback_windows))
        for row in matched_rows:
            fallback_windows[row] = 0
        lookup_draft = certain(matches, request.last_two_tokens.device)
        if not any(fallback_windows):
            return replace(lookup_draft, copied=copied)

        fallback_draft = proposed(
            self.fallback, state.fallback, request, fallback_windows, sampling
        )
        if not matched_rows:
            return replace(fallback_draft, copied=copied)
        for row in matched_rows:
            # The target reads the lookup's tokens there, not what the fallback may have drafted.
            state.fallback.truncate_row(row, len(request.texts[row]))

        exit_states = fallback_draft.exit_states
        if exit_states is not None:
            exit_states = _without_drafts(exit_states, matched_rows, state.context, request)
        return replace(_joined(lookup_draft, fallback_draft, exit_states), copied=copied)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        self.fallback.observe(state.fallback, output, num_accepted)


class SuffixCorpusWithFallback(NGramWithFallback):
    """Drafts by a suffix corpus, and with another drafter for the rows without a likely match.

    Args:
        lookup: used first: a `SuffixCorpusDrafter`, which ends its draft early.
        fallback: any drafter.

    Raises:
        ValueError: the arguments are not such drafters.
    """

    Settings: ClassVar[type[BaseSettings]] = SuffixFallbackSettings

    @classmethod
    def first_stage(cls, **settings: Any) -> LookupDrafter:
        suffix_settings = {"min_acceptance": SuffixFallbackSettings.min_acceptance}
        suffix_settings.update(settings)
        return SuffixCorpusDrafter(**suffix_settings)


def _without_drafts(
    exit_states: ExitStates,
    rows: Sequence[int],
    context: TargetContext | None,
    request: DraftRequest,
) -> ExitStates:
    """The exit states, but for these rows only those of text that the target has not read."""
    assert context is not None
    lengths = list(exit_states.lengths)
    for row in rows:
        num_unread = len(request.texts[row]) - context.state.consumed[row]
        lengths[row] = min(lengths[row], num_unread)
    return replace(exit_states, lengths=lengths)


def _joined(lookup: Draft, fallback: Draft, exit_states: ExitStates | None) -> Draft:
    """One draft from two: the lookup's where it has tokens, the fallback's in all other rows."""
    assert lookup.lengths is not None, "it has tokens for some rows and none for others"
    has_match = lookup.lengths > 0

    lookup_width = lookup.tokens.shape[1]
    fallback_width = fallback.tokens.shape[1]
    width = max(lookup_width, fallback_width)
    lookup_tokens = pad(lookup.tokens, (0, width - lookup_width))
    fallback_tokens = pad(fallback.tokens, (0, width - fallback_width))
    tokens = torch.where(has_match[:, None], lookup_tokens, fallback_tokens)

    fallback_lengths = fallback.lengths
    if fallback_lengths is None:
        fallback_lengths = torch.full_like(lookup.lengths, fallback_width)
    lengths = torch.where(has_match, lookup.lengths, fallback_lengths)

    probs = fallback.probs
    if probs is not None:
        # The lookup's tokens are deterministic, so their distributions are one-hot.
        fallback_probs = pad(probs, (0, 0, 0, width - fallback_width))
        one_hot = torch.zeros_like(fallback_probs)
        one_hot.scatter_(-1, lookup_tokens[..., None], 1.0)
        probs = torch.where(has_match[:, None, None], one_hot, fallback_probs)
    return Draft(tokens, lengths, probs, num_calls=fallback.num_calls, exit_states=exit_states)
