"""A pair of target and drafts as a benchmark measures it: in the forms that decode fastest, with what they are."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from lightning_specdec.bench.failures import FAILURES, in_one_line
from lightning_specdec.bench.outside import Forms, Outside
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.remembered import fingerprint
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel

DRAFT_FACTS = ("draft_parameters", "draft_sha256", "max_draft_tokens")
"""What the manifest says of each draft; None of one that could never be made ready."""


@dataclass
class Subject:
    """A pair as it is measured.

    Args:
        name: in the config.
        target: as it shall decode, packed.
        drafts: by name, as they shall guess; or why one of them cannot.
        prompts: what is measured, by domain.
        others: what alpha and settings are taken from; none of the prompts.
        stops: tokens that end a row.
        outside: the same target and models of drafts, for transformers' own ways; None where they are not of it.
        rolled: the target as fused as a draft.
        facts: what the manifest says of it.
    """

    name: str
    target: LanguageModel
    drafts: Mapping[str, Drafter | str]
    prompts: Mapping[str, Sequence[Prompt]]
    others: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    outside: Outside | None = None
    rolled: ModelDrafter | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        target: LanguageModel,
        drafts: Mapping[str, Drafter | str],
        *,
        prompts: Mapping[str, Sequence[Prompt]],
        others: Mapping[str, Sequence[Prompt]] | None = None,
        stops: Sequence[int] = (),
        outside: bool = False,
        rolled: bool = False,
    ) -> Subject:
        """The pair in the forms that decode fastest.

        Args:
            target, drafts: as they were loaded, not packed.
            outside: whether transformers shall decode with it too.
            rolled: whether the target alone shall be rolled out too.
        """
        for module in (target, *drafts.values()):
            if isinstance(module, nn.Module):
                module.eval()
        facts: dict[str, Any] = {
            "target": _named(target),
            "target_parameters": target.num_parameters,
            "target_bytes": target.memory_bytes,
            "target_sha256": weights_digest(target),
            "dtype": str(getattr(target, "dtype", None) or next(target.parameters()).dtype).removeprefix("torch."),
        }
        of_drafts = {key: _facts_of(each) for key, each in drafts.items()}
        ready = target.packed()
        guessing = {key: _ready(each) for key, each in drafts.items()}
        for fact in DRAFT_FACTS:
            facts[fact] = {
                key: None if isinstance(guessing[key], str) else each[fact] for key, each in of_drafts.items()
            }
        assistants = {
            key: forms for key, each in drafts.items() if (forms := _assistant(each, guessing[key])) is not None
        }
        baseline = _forms(target, ready) if outside else None
        return cls(
            name,
            ready,
            guessing,
            prompts,
            others or {},
            tuple(stops),
            None if baseline is None else Outside(baseline, assistants),
            ModelDrafter(target).fused() if rolled else None,
            facts,
        )

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Take what is not known of drafts that could not be made ready from when they last were."""
        for name in DRAFT_FACTS:
            for key, drafter in self.drafts.items():
                if isinstance(drafter, str):
                    self.facts[name][key] = facts[name].get(key)


def weights_digest(module: nn.Module) -> str:
    """A hash of a network's parts and weights; weights that lie in files go by these files' own."""
    found, known = hashlib.sha256(fingerprint(module).encode()), set()
    for name, part in module.named_modules():
        if (origin := getattr(part, "origin", None)) is not None:
            found.update(f"{name} {origin.sha256}".encode())
            known |= {id(tensor) for tensor in chain(part.parameters(), part.buffers())}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if id(tensor) not in known and tensor.numel():
            found.update(name.encode())
            plain = tensor.detach().cpu().contiguous()
            found.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return found.hexdigest()


def _named(target: LanguageModel) -> str:
    origin = getattr(target, "origin", None)
    kind = type(getattr(target, "model", target)).__name__
    return kind if origin is None else f"{kind} {origin.source}"


def _facts_of(draft: Drafter | str) -> dict[str, Any]:
    """What the manifest says of a draft, as it was loaded."""
    if isinstance(draft, str):
        return dict.fromkeys(DRAFT_FACTS)
    return {
        "draft_parameters": _num_parameters(draft),
        "draft_sha256": weights_digest(draft),
        "max_draft_tokens": draft.max_draft_tokens,
    }


def _num_parameters(draft: Drafter) -> int | None:
    """Those of its own; None where it has none."""
    models = [part for part in draft.modules() if isinstance(part, LanguageModel)]
    return max([sum(each.numel() for each in draft.parameters()), *(model.num_parameters for model in models)]) or None


def _ready(draft: Drafter | str) -> Drafter | str:
    """A draft as it shall guess, or why it cannot: the memory for it too may be missing."""
    try:
        return draft.fused() if isinstance(draft, Drafter) else draft
    except FAILURES as error:
        return in_one_line(error)


def _forms(plain: LanguageModel, ready: LanguageModel) -> Forms | None:
    """The model of transformers behind one of ours; None where there is none."""
    models = [getattr(each, "model", None) for each in (plain, ready)]
    return Forms(*models) if all(hasattr(model, "generate") for model in models) else None


def _assistant(draft: Drafter | str, ready: Drafter | str) -> Forms | None:
    """What can assist in a draft's stead: its model, where that shares the target's vocabulary."""
    if type(draft) is not ModelDrafter or not isinstance(ready, ModelDrafter):
        return None
    return _forms(draft.model, ready.model)
