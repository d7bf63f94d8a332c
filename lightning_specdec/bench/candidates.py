"""The drafters of a decoder to choose from: every draft, and every exit of an early-exit draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import Drafter, EarlyExitDrafter
from lightning_specdec.models import LanguageModel


@dataclass(frozen=True)
class Candidate:
    """A drafter to choose.

    Args:
        draft: its name among the `drafts` of a decoder; None if it has none.
        exit_layer: how many of the target's layers draft; None if none do.
    """

    drafter: Drafter
    draft: str | None = None
    exit_layer: int | None = None


def exits(target: LanguageModel, drafter: EarlyExitDrafter) -> dict[int, EarlyExitDrafter]:
    """The target's early exits, with the output heads of `drafter`, by the number of layers.

    Raises:
        ValueError: the target cannot be split.
    """
    exit_drafters: dict[int, EarlyExitDrafter] = {}
    for exit_layer in count(1):
        exit_drafter = drafter.at(exit_layer)
        try:
            exit_drafter.check_target(target)
        except ValueError:
            # The first layer past the last exit is refused, like every layer of a target that
            # cannot be split.
            if not exit_drafters:
                raise
            break
        exit_drafters[exit_layer] = exit_drafter
    return exit_drafters


def candidates(
    decoder: SpeculativeDecoder, drafts: Sequence[str] | None = None
) -> dict[str, Candidate]:
    """The candidates by name.

    Args:
        drafts: names among the decoder's `drafts`. When None, all of them, or the decoder's own
            drafter if it is not among them.

    Raises:
        ValueError: there is no draft of that name.
    """
    _check_names(decoder, drafts or ())

    drafters: dict[str | None, Drafter] = {}
    is_named = any(drafter is decoder.drafter for drafter in decoder.drafts.values())
    if drafts is not None or is_named:
        for draft_name in drafts or decoder.drafts:
            drafters[draft_name] = decoder.drafts[draft_name]
    else:
        drafters[None] = decoder.drafter

    result: dict[str, Candidate] = {}
    for name, drafter in drafters.items():
        if isinstance(drafter, EarlyExitDrafter):
            for exit_layer, exit_drafter in exits(decoder.target, drafter).items():
                label = f"exit {exit_layer}"
                if name is not None:
                    label = f"{name}, {label}"
                result[label] = Candidate(exit_drafter, name, exit_layer)
        else:
            label = name or DRAFTERS.name_of(type(drafter))
            result[label] = Candidate(drafter, name)
    return result


def _check_names(decoder: SpeculativeDecoder, names: Sequence[str]) -> None:
    for name in names:
        if name in decoder.drafts:
            continue
        draft_names = ", ".join(decoder.drafts)
        if not draft_names:
            draft_names = f"one {DRAFTERS.name_of(type(decoder.drafter))}, which has no name"
        raise ValueError(f"there is no draft {name!r} to choose: there is {draft_names}")
