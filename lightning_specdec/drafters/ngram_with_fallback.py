"""A lookup combined with another drafter, which drafts for the rows without a match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from lightning_specdec.drafters.early_exit import EarlyExitDrafter
from lightning_specdec.drafters.known_tokens import draft_around
from lightning_specdec.drafters.mtp import MtpDrafter
from lightning_specdec.drafters.ngram import LookupDrafter, NGramDrafter, NGramSettings
from lightning_specdec.drafters.suffix_corpus import SuffixCorpusDrafter, SuffixCorpusSettings
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling


@dataclass(frozen=True)
class FallbackSettings(NGramSettings):
    """Settings of `NGramWithFallback`: those of its lookup."""

    # The continuation of a single token is right less often than a trained draft (see the log).
    min_ngram: int = setting(2, "shortest suffix to look up", minimum=1)
    min_confidence: float | None = setting(
        None, "that of the trained draft; default: its own", minimum=0, maximum=1
    )
    exit_layer: int | None = setting(
        None, "that of an early exit; without a draft, this exit of the target drafts", minimum=1
    )
    mtp: bool = setting(
        False, "without a draft, the prediction layers of the target's checkpoint draft"
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
    exit_layer: int | None = setting(
        None, "that of an early exit; without a draft, this exit of the target drafts", minimum=1
    )
    mtp: bool = setting(
        False, "without a draft, the prediction layers of the target's checkpoint draft"
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

    @property
    def inner(self) -> DraftState:
        return self.fallback.inner

    def take_over(self, previous: DraftState) -> bool:
        return self.fallback.take_over(previous)


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
        exit_layer = settings.get("exit_layer")
        uses_mtp = settings.pop("mtp", False)
        if uses_mtp and (draft is not None or exit_layer is not None):
            raise ValueError("mtp names the draft already: drop mtp, or the other draft")
        if isinstance(draft, NGramWithFallback):
            # Replaces its lookup.
            fallback = draft.fallback
        elif isinstance(draft, Drafter):
            fallback = draft
        elif uses_mtp:
            fallback = MtpDrafter.for_target(target)
        elif draft is None and exit_layer is not None:
            fallback = EarlyExitDrafter.for_target(target, exit_layer=exit_layer)
        else:
            fallback = CrossVocabulary.for_target(target, draft)

        for name in ("min_confidence", "exit_layer"):
            value = settings.pop(name, None)
            if value is None:
                continue
            if fallback.free != name:
                raise ValueError(f"{type(fallback).__name__} has no {name}: drop it")
            fallback = fallback.at(value)

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
        fallback_windows = list(windows)
        if request.fallback_windows is not None:
            fallback_windows = list(map(min, windows, request.fallback_windows))
        draft = draft_around(
            matches,
            self.fallback,
            state.fallback,
            state.context,
            request,
            fallback_windows,
            sampling,
        )
        return replace(draft, copied=[bool(tokens) for tokens in matches])

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
