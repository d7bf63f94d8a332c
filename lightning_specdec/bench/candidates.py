"""The drafters of a decoder that there are to choose from: every draft, and of an early exit every exit."""

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
        draft: its name among the `drafts` of a decoder; None where it has none.
        exit_layer: how many of the target's layers draft; None where none do.
    """

    drafter: Drafter
    draft: str | None = None
    exit_layer: int | None = None


def exits(target: LanguageModel, own: EarlyExitDrafter) -> dict[int, EarlyExitDrafter]:
    """The target's early exits, with the output heads of `own`, by how many layers draft.

    Raises:
        ValueError: the target cannot be split.
    """
    found: dict[int, EarlyExitDrafter] = {}
    for layer in count(1):
        drafter = own.at(layer)
        try:
            drafter.check_target(target)
        except ValueError:
            if not found:
                raise
            break
        found[layer] = drafter
    return found


def candidates(
    decoder: SpeculativeDecoder, drafts: Sequence[str] | None = None
) -> dict[str, Candidate]:
    """The candidates by name.

    Args:
        drafts: names among the decoder's `drafts`; when None all of them, or its own drafter where it is none of them.

    Raises:
        ValueError: there is no draft of that name.
    """
    if foreign := [name for name in drafts or () if name not in decoder.drafts]:
        known = (
            ", ".join(decoder.drafts)
            or f"one {DRAFTERS.name_of(type(decoder.drafter))}, which has no name"
        )
        raise ValueError(f"there is no draft {foreign[0]!r} to choose: there is {known}")
    chosen: dict[str | None, Drafter] = {None: decoder.drafter}
    if drafts is not None or any(drafter is decoder.drafter for drafter in decoder.drafts.values()):
        chosen = {name: decoder.drafts[name] for name in drafts or decoder.drafts}
    found: dict[str, Candidate] = {}
    for name, drafter in chosen.items():
        if not isinstance(drafter, EarlyExitDrafter):
            found[name or DRAFTERS.name_of(type(drafter))] = Candidate(drafter, name)
            continue
        for layer, exiting in exits(decoder.target, drafter).items():
            found[f"exit {layer}" if name is None else f"{name}, exit {layer}"] = Candidate(
                exiting, name, layer
            )
    return found
