"""What a sweep tries without being told to: drafts that were not trained for the target.

Most of them do not pay, so each has to qualify with one number of draft tokens before it takes part
with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.family import family_models
from lightning_specdec.bench.ways import (
    LOOKUP_FIRST,
    LOOKUP_NAME,
    NO_DRAFT,
    Drafting,
    both_ways,
    in_int4,
)
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.models import LanguageModel

SUFFIX_NAME = "suffix corpus"
_SUFFIX_FIRST = Choice("SuffixCorpusWithFallback")

EXIT_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the target's layers that early exits are tried with."""
EXIT_WINDOW = 2
"""Draft tokens of an exit that was not trained: later ones are rarely right."""
SUFFIX_WINDOW = 8
"""Draft tokens of the suffix corpus, which ends a doubtful draft early."""
MODEL_WINDOW = 4
"""Draft tokens of a draft model."""


@dataclass(frozen=True)
class Scout:
    """A kind of draft that has to qualify.

    Args:
        drafting: the kind.
        num_draft_tokens: with which it is tried.
        followers: kinds that take part too if it qualifies, such as the same after lookup.
        beats_lookup: whether it must be as fast as prompt lookup, because it does the same; others
            must be as fast as standard decoding, since they can also help after lookup.
        loads_model: whether a model is loaded for it.
    """

    drafting: Drafting
    num_draft_tokens: int
    followers: tuple[Drafting, ...] = ()
    beats_lookup: bool = False
    loads_model: bool = False


def scouts(
    decoder: SpeculativeDecoder,
    source: PairSource,
    kinds: Sequence[Drafting],
    *,
    has_choice: bool = False,
) -> list[Scout]:
    """The kinds of drafts that may be worth a trial, those that load a model last.

    Args:
        decoder: has the target.
        source: what loaded it.
        kinds: what is tried anyway.
        has_choice: whether the user named the drafts to try, so that no others are wanted.
    """
    is_chosen = has_choice or source.drafter is not None or source.draft is not None
    if is_chosen or source.draft_quantization is not None:
        return []
    if source.ckpt is not None:
        # A checkpoint has its own drafts. Only text repeats what earlier texts contain.
        return [] if decoder.tokenizer is None else [_suffix_scout(kinds)]
    result = [_suffix_scout(kinds)]
    if not any(kind.is_trained_exit for kind in kinds):
        result += _exit_scouts(decoder.target)
    result += _model_scouts(decoder.target, source)
    return result


def _suffix_scout(kinds: Sequence[Drafting]) -> Scout:
    """The suffix corpus over the text itself, and before each draft that prompt lookup precedes."""
    followers = []
    for kind in kinds:
        if kind.fields.get("drafter") == LOOKUP_FIRST:
            name = f"{SUFFIX_NAME}{kind.name.removeprefix(LOOKUP_NAME)}"
            followers.append(Drafting(name, {**kind.fields, "drafter": _SUFFIX_FIRST}))
    fields = {"drafter": Choice("SuffixCorpusDrafter"), **NO_DRAFT}
    return Scout(Drafting(SUFFIX_NAME, fields), SUFFIX_WINDOW, tuple(followers), beats_lookup=True)


def exit_layers(target: LanguageModel) -> list[int]:
    """Depths at which a target may exit early; none if it cannot be split."""
    num_layers = target.num_layers
    if num_layers is None or num_layers < 2:
        return []
    try:
        target.check_exit(1)
    except ValueError:
        return []
    depths = {min(num_layers - 1, max(1, round(share * num_layers))) for share in EXIT_SHARES}
    return sorted(depths)


def _exit_scouts(target: LanguageModel) -> list[Scout]:
    result = []
    for layer in exit_layers(target):
        settings = {"exit_layer": layer}
        alone, joined = both_ways(f"exit {layer}", NO_DRAFT, exit_settings=settings)
        result.append(Scout(alone, EXIT_WINDOW, (joined,)))
    return result


def _model_scouts(target: LanguageModel, source: PairSource) -> list[Scout]:
    if source.draft_adapter is not None or source.draft_revision is not None:
        return []
    result = []
    for model in family_models(target):
        fields: Mapping[str, Any] = {"draft": model.source}
        if model.revision is not None:
            fields = {**fields, "draft_revision": model.revision}
        share = model.num_parameters / target.num_parameters
        found = f"{model.place}: {model.source} ({share:.0%} of the target's parameters)"
        alone, joined = both_ways(model.name, fields, found)
        followers = (joined, *in_int4(model.name, fields, found))
        result.append(Scout(alone, MODEL_WINDOW, followers, loads_model=True))
    return result
